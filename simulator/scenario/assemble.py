"""What a scenario stands for: its model, its hardware, their memory, and what a step costs.

Every function names the scenario's field in its errors: `ValueError("field: what is wrong")`.
"""

import warnings
from dataclasses import dataclass
from typing import Any

from simulator.core.engine_config import UNIFORM, EngineConfig
from simulator.costs.cost_model import CostModel, DraftedCost
from simulator.costs.load import load_cost
from simulator.costs.noise import describe_cost
from simulator.costs.overhead import VLLM, read_version
from simulator.costs.profile import settings_of, shipped_profile, shipped_profiles
from simulator.models.gpus import Gpu, find_gpu
from simulator.models.kv_budget import MemoryBudget, kv_budget
from simulator.models.load import load_model
from simulator.models.spec import ModelSpec
from simulator.scenario.engines import fraction_of
from simulator.scenario.policy_table import find_policy, ignored_keys
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayWarning

MEMORY_KEYS = {
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "block_size",
    "max_num_batched_tokens",
    "max_num_seqs",
}
"""Keys of the engine on which the memory left for the KV cache depends."""


@dataclass(slots=True, frozen=True)
class EngineParts:
    """What a scenario stands for, apart from its workload."""

    model: ModelSpec
    gpu: Gpu
    cost: CostModel
    num_gpu_blocks: int
    max_model_len: int


def assemble(scenario: Scenario) -> EngineParts:
    """Look up model, GPU and cost, and see what fits into the memory."""
    engine = scenario.engine
    model = load_model(scenario.model, scenario.folder)
    gpu = find_gpu(scenario.gpu.name)
    max_model_len = engine.max_model_len or model.max_position_embeddings
    messages = []
    if max_model_len > model.max_position_embeddings:
        messages = [
            f"engine.max_model_len {max_model_len:,} is beyond the "
            f"{model.max_position_embeddings:,} positions of {model.name}: vLLM takes it only if "
            "told to"
        ]
    budget = None
    if engine.num_gpu_blocks_override is None:
        budget = memory_budget(engine, model, gpu)
    if engine.name == VLLM and model.keeps_window and engine.disable_hybrid_kv_cache_manager:
        room = ""
        if budget is not None:
            whole, windowed = (
                count(max_model_len) for count in (budget.concurrent, budget.concurrent_windowed)
            )
            room = f": {whole:,} requests of {max_model_len:,} tokens fit, not {windowed:,}"
        messages.append(
            f"{model.name} has layers that keep a window alone in vLLM; here they keep all tokens"
            f"{room}. engine.disable_hybrid_kv_cache_manager: false has windows"
        )
    messages += ignored_keys(engine, find_policy(scenario)[0], max_model_len)
    messages += _ranks_filled_otherwise(engine)
    for message in messages:
        warnings.warn(message, HeadwayWarning, stacklevel=3)
    blocks = engine.num_gpu_blocks_override or (0 if budget is None else budget.num_gpu_blocks)
    return EngineParts(model, gpu, make_cost(scenario, model, gpu), blocks, max_model_len)


def memory_budget(engine: EngineConfig, model: ModelSpec, gpu: Gpu) -> MemoryBudget:
    """Work out what memory an engine has for its KV cache; ValueError where it has none."""
    sizes = engine.values_of(MEMORY_KEYS)
    if engine.num_gpu_blocks_override is not None:  # then it has no meaning, as in vLLM
        sizes["gpu_memory_utilization"] = 1.0
    hybrid = not engine.disable_hybrid_kv_cache_manager
    return kv_budget(model, gpu, **sizes, fraction_of=fraction_of(engine.name), hybrid=hybrid)


def make_cost(scenario: Scenario, model: ModelSpec, gpu: Gpu) -> CostModel:
    """Make what a scenario's steps cost: as its `cost` says, else by a profile or the roofline.

    Profiles know of no experts that are spread over data-parallel ranks.
    """
    engine = scenario.engine
    if not model.num_experts:
        for key in ("expert_routing", "enable_expert_parallel"):
            if getattr(engine, key) != EngineConfig.model_fields[key].default:
                raise ValueError(f"engine.{key}: {model.name} has no experts")
    parallel = engine.data_parallel_size > 1 and model.num_experts > 0
    if parallel and engine.pipeline_parallel_size > 1:
        raise ValueError(
            "engine.pipeline_parallel_size: must be 1 where data-parallel ranks share experts"
        )
    shipped = None if parallel or scenario.cost else shipped_profile(model, gpu, engine)
    if engine.expert_routing != UNIFORM and scenario.cost is None and shipped is None:
        raise ValueError(_why_uniform(model, gpu, engine, parallel=parallel))
    spec = scenario.cost or shipped or {"kind": "roofline"}
    target: Any = {"model": model, "gpu": gpu, "engine": engine, "host": scenario.host}
    cost: CostModel = load_cost(spec, scenario.folder, **target)
    speculation = engine.speculative_config
    if speculation is not None and speculation.draft is not None:
        cost = DraftedCost(cost, speculation.num_speculative_tokens, speculation.draft)
    if not parallel:
        return cost
    from simulator.costs.data_parallel import DataParallelCost, Experts

    experts = None
    if spec.get("kind") == "roofline":
        sizes = engine.tensor_parallel_size, engine.data_parallel_size
        experts = Experts(model, gpu, engine.weight_dtype, *sizes)
    kernels = cost.without_host() if engine.async_scheduling else None
    return DataParallelCost(cost, engine.data_parallel_size, experts, kernels)


def _why_uniform(model: ModelSpec, gpu: Gpu, engine: EngineConfig, *, parallel: bool) -> str:
    """Say why experts can only be chosen evenly where no profile is taken."""
    if parallel:
        return (
            f"engine.expert_routing: experts that data-parallel ranks share are by roofline, which "
            f"knows {UNIFORM} routing alone"
        )
    others = any(name.startswith(f"{model.name}.") for name in shipped_profiles())
    there = "; `headway profile list` has those of other layouts" if others else ""
    words = [f"{key} {value}" for key, value in settings_of(model, engine).items()]
    return (
        f"engine.expert_routing: no profile is shipped of {model.name} on {gpu.name} with "
        f"{', '.join(words)}, and the roofline that stands for it knows {UNIFORM} alone{there}"
    )


def _ranks_filled_otherwise(engine: EngineConfig) -> list[str]:
    """Say where a release's load balancer is another than that which is simulated."""
    version = read_version(engine.version or "")
    if engine.data_parallel_size == 1 or version is None:
        return []
    from simulator.cluster.data_parallel import BALANCES_SINCE

    if version >= BALANCES_SINCE:
        return []
    return [
        f"engine.version {engine.version}: its load balancer filled data-parallel ranks less "
        "evenly than vLLM 0.33's, which is simulated"
    ]


def describe_costs(scenario: Scenario) -> dict[str, Any]:
    """Return what a summary would say of the costs of a scenario, by group in a cluster."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadwayWarning)  # its runs tell them
        groups = {name: describe_cost(assemble(own).cost) for name, own in scenario.groups.items()}
    return groups[""] if scenario.cluster is None else {"cluster": {"groups": groups}}
