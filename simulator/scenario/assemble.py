"""From the words of a scenario to the parts of a run: model, memory, cost, workload, scheduler.

Every function names the scenario's field in its errors: `ValueError("field: what is wrong")`.
"""

import warnings
from collections.abc import Container
from typing import Any

from simulator.cluster.load_balancer import SINCE
from simulator.costs.cost_model import CostModel
from simulator.costs.data_parallel import DataParallelCost, Experts
from simulator.costs.drafting import DraftedCost
from simulator.costs.load import load_cost
from simulator.costs.overhead import read_version, without_host
from simulator.costs.profile import shipped_profile
from simulator.models.gpus import Gpu, find_gpu
from simulator.models.load import load_model
from simulator.models.spec import ModelSpec
from simulator.scenario.engine_config import EngineConfig
from simulator.scenario.kv_memory import (
    blocks_that_fit,
    make_blocks,
    swap_blocks,
    swap_prices,
    windowed,
)
from simulator.scenario.parts import Parts
from simulator.scenario.policy_table import (
    DYNAMIC,
    called,
    check_arguments,
    construct,
    find_policy,
    takes,
)
from simulator.scenario.scenario import Scenario
from simulator.schedulers.tgi import Tgi
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.dynamic import DynamicScheduler
from simulator.schedulers.vllm.kv_roles import Consumer, Producer
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.schedulers.vllm.speculative import Speculative
from simulator.schedulers.vllm_v0 import VllmV0
from simulator.util.errors import HeadwayWarning
from simulator.util.user_code import search_in

VLLM_OPTIONS = (
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "prefill_schedule_interval",
    "scheduler_reserve_full_isl",
    "watermark",
)
OWN_RULES = ("min_decode_blocks", "reserve_output_tokens")
"""Rules of admission that vLLM does not have; like those above, keys of the engine that a scheduler
may take under the same name."""


def assemble(scenario: Scenario) -> Parts:
    """Look up model, GPU and cost, and see what fits into the memory."""
    engine = scenario.engine
    model = load_model(scenario.model, scenario.folder)
    gpu = find_gpu(scenario.gpu.name)
    max_model_len = engine.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        warnings.warn(
            f"engine.max_model_len {max_model_len:,} is beyond the "
            f"{model.max_position_embeddings:,} positions of {model.name}: vLLM takes it only if "
            "told to",
            HeadwayWarning,
            stacklevel=3,
        )
    without_effect = _without_effect(engine, find_policy(scenario)[0], max_model_len)
    for message in (*without_effect, *_older_balancer(engine)):
        warnings.warn(message, HeadwayWarning, stacklevel=3)
    blocks = engine.num_gpu_blocks_override or blocks_that_fit(engine, model, gpu)
    return Parts(model, gpu, make_cost(scenario, model, gpu), blocks, max_model_len)


def make_cost(scenario: Scenario, model: ModelSpec, gpu: Gpu) -> CostModel:
    """Make what a scenario's steps cost: as its `cost` says, else by a profile or the roofline.

    Profiles know of no experts that are spread over data-parallel ranks.
    """
    engine = scenario.engine
    together = engine.data_parallel_size > 1 and model.num_experts > 0
    shipped = None if together else shipped_profile(model, gpu, engine)
    spec = scenario.cost or shipped or {"kind": "roofline"}
    apart = together and spec.get("kind") == "roofline"
    cost: CostModel = load_cost(spec, scenario.folder, model=model, gpu=gpu, engine=engine)
    speculation = engine.speculative_config
    if speculation is not None and speculation.draft is not None:
        cost = DraftedCost(cost, speculation.num_speculative_tokens, speculation.draft)
    if not together:
        return cost
    sizes = engine.tensor_parallel_size, engine.data_parallel_size
    experts = Experts(model, gpu, engine.quantization or engine.dtype, *sizes)
    kernels = without_host(cost) if engine.async_scheduling else None
    return DataParallelCost(cost, engine.data_parallel_size, experts if apart else None, kernels)


def _older_balancer(engine: EngineConfig) -> list[str]:
    """Say where a version of vLLM spread requests over ranks by other rules than these."""
    version = read_version(engine.version or "")
    if engine.data_parallel_size == 1 or version is None or version >= SINCE:
        return []
    return [
        f"engine.version {engine.version}: its load balancer filled data-parallel ranks less "
        "evenly than vLLM 0.33's, which is simulated"
    ]


def _without_effect(engine: EngineConfig, found: type, max_model_len: int) -> list[str]:
    """Name the keys that the scheduler does not know, or takes otherwise than given."""
    if engine.scheduler == "vllm" or not issubclass(found, Scheduler):
        return []
    messages = []
    if engine.preemption_mode != "recompute" and not takes(found, "swap_blocks"):
        messages.append(
            f"{called(found)} computes a preempted request again: engine.preemption_mode has no "
            "effect"
        )
    for name in ("max_num_batched_tokens", *VLLM_OPTIONS):
        given = getattr(engine, name)
        if given != EngineConfig.model_fields[name].default and not takes(found, name):
            messages.append(f"{called(found)} knows no {name}: engine.{name} has no effect")
    tokens = engine.max_num_batched_tokens
    if issubclass(found, VllmV0 | Tgi) and tokens < max_model_len:
        messages.append(
            f"{called(found)} computes prompts whole: engine.max_num_batched_tokens {tokens:,} is "
            f"taken as max_model_len, {max_model_len:,}"
        )
    return messages


def make_scheduler(
    scenario: Scenario,
    parts: Parts,
    shares_prefixes: bool,
    *,
    named: bool = False,
    role: str | None = None,
) -> Scheduler:
    """Build the scheduler with its blocks.

    `shares_prefixes` says that the workload's prompts have contents to share; where they have
    none a prefix cache could only serve requests that come back after a preemption. `named` gives
    every block a number, also where counting them would do: a live engine reads block tables.
    `role` is that of the replica's group, kv_producer or kv_consumer; None: it does both.
    """
    engine = scenario.engine
    found, arguments = find_policy(scenario)
    if role is not None:
        check_role(role, scenario)
    if engine.scheduler == "vllm":
        return _installed(scenario, parts)
    if named and engine.speculative_config is not None:
        raise ValueError("engine.speculative_config: a live engine verifies no drafts")
    mechanism = _mechanism(engine, found, windowed=windowed(engine, parts.model))
    if role is not None:
        mechanism = Producer if role == "kv_producer" else Consumer
    caching = engine.enable_prefix_caching and mechanism.caches_prefixes
    if shares_prefixes and engine.enable_prefix_caching and not caching:
        warnings.warn(
            f"{called(mechanism)} has no prefix cache: engine.enable_prefix_caching has no effect",
            HeadwayWarning,
            stacklevel=2,
        )
    options = _limits(engine, parts) | _vllm_options(engine)
    options |= engine.model_dump(include={*OWN_RULES})
    if engine.preemption_mode != "recompute":
        options["swap_blocks"] = swap_blocks(engine, parts.model)
    if engine.preemption_mode == "auto":
        options["swap_prices"] = swap_prices(engine, parts.cost)
    if mechanism is Speculative:
        options |= {"speculation": engine.speculative_config, "seed": scenario.seed}
    options = {name: value for name, value in options.items() if takes(mechanism, name)}
    _refuse_own_rules(engine, called(mechanism), options)
    if engine.kv_offloading_size and mechanism._board is not Scheduler._board:
        raise ValueError(f"engine.kv_offloading_size: {called(mechanism)} has no host tier")
    check_arguments(found, arguments, taken=options)
    blocks = make_blocks(engine, parts, caching, shares_prefixes, named)
    if issubclass(found, Scheduler):  # fcfs needs no policy
        scheduler: Scheduler = construct(mechanism, blocks, **options, **arguments)
        if not hasattr(scheduler, "swap_space"):
            raise ValueError(
                f"engine.scheduling_policy: {found.__name__}.__init__ must call "
                "super().__init__(blocks, **options)"
            )
        return scheduler
    return mechanism(blocks, policy=_policy(scenario, found, arguments), **options)


def _policy(scenario: Scenario, found: type, arguments: dict[str, Any]) -> Any:
    """Make a policy; ValueError where its constructor fails, or it wants predictions."""
    policy = construct(found, **arguments)
    if getattr(policy, "needs_hint", False) and scenario.predictor is None:
        raise ValueError(
            f"engine.scheduling_policy: {called(found)} ranks by predicted lengths, and the "
            "scenario has no `predictor`; {kind: oracle} is the simplest"
        )
    return policy


def _limits(engine: EngineConfig, parts: Parts) -> dict[str, Any]:
    return {
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": parts.max_model_len,
    }


def _vllm_options(engine: EngineConfig) -> dict[str, Any]:
    return engine.model_dump(include={*VLLM_OPTIONS})


def _installed(scenario: Scenario, parts: Parts) -> Scheduler:
    """Build the scheduler of the vLLM that is installed."""
    from simulator.schedulers.vllm.installed import InstalledBlocks, InstalledScheduler

    engine = scenario.engine
    if engine.scheduling_policy not in ("fcfs", "priority"):
        raise ValueError("engine.scheduling_policy: vLLM's scheduler has fcfs and priority")
    if engine.allocation != "paged":
        raise ValueError("engine.allocation: vLLM's scheduler pages its memory")
    if engine.speculative_config is not None:
        raise ValueError("engine.speculative_config: goes with scheduler: headway")
    if engine.preemption_mode != "recompute":
        raise ValueError("engine.preemption_mode: vLLM's scheduler knows recompute alone")
    _refuse_own_rules(engine, "vLLM's scheduler")
    search_in(scenario.folder)
    return InstalledScheduler(
        InstalledBlocks(parts.num_gpu_blocks, engine.block_size),
        enable_prefix_caching=engine.enable_prefix_caching,
        policy_name=engine.scheduling_policy,
        async_scheduling=engine.async_scheduling,
        scheduler_cls=engine.scheduler_cls,
        **_limits(engine, parts),
        **_vllm_options(engine),
    )


def _refuse_own_rules(engine: EngineConfig, who: str, taken: Container[str] = ()) -> None:
    """Refuse rules of admission and ways of preempting that a scheduler does not take."""
    for rule in OWN_RULES:
        if getattr(engine, rule) and rule not in taken:
            raise ValueError(f"engine.{rule}: {who} has no such rule")
    if engine.preemption_mode == "auto" and "swap_blocks" in taken and "swap_prices" not in taken:
        raise ValueError(f"engine.preemption_mode: {who} does not choose: swap or recompute")


def cancels(scenario: Scenario) -> bool:
    """Say whether a scenario's scheduler can let a request go before its end."""
    if scenario.engine.scheduler == "vllm":
        return False
    model = load_model(scenario.model, scenario.folder)
    slides = windowed(scenario.engine, model)
    return _mechanism(scenario.engine, find_policy(scenario)[0], windowed=slides).cancels


def _mechanism(engine: EngineConfig, found: type, *, windowed: bool) -> type[Scheduler]:
    """Give the scheduler that a policy works with."""
    mechanism = found if issubclass(found, Scheduler) else Scheduler
    if mechanism is not found and any(hasattr(found, hook) for hook in DYNAMIC):
        mechanism = DynamicScheduler
    if windowed:
        _check_windowed(engine, found, mechanism)
    if engine.speculative_config is not None:
        return _speculative(engine, found, mechanism)
    if windowed:
        return Speculative
    if not engine.async_scheduling:
        return mechanism
    if mechanism is not Scheduler:
        raise ValueError(
            f"engine.async_scheduling: {called(found)} schedules a step when the one before has "
            "ended; set it to false"
        )
    return AsyncScheduler


def check_role(role: str, scenario: Scenario) -> None:
    """Refuse an engine that cannot have a role in a cluster that prefills and decodes apart."""
    engine = scenario.engine
    for key, plain in (
        ("scheduler", "headway"),
        ("data_parallel_size", 1),
        ("async_scheduling", False),
        ("speculative_config", None),
        ("disable_hybrid_kv_cache_manager", True),
        ("preemption_mode", "recompute"),
        ("allocation", "paged"),
        ("kv_offloading_size", None),
        ("prefix_cache", "hash"),
    ):
        if getattr(engine, key) != plain:
            word = "null" if plain is None else str(plain).lower()
            raise ValueError(f"engine.{key}: a group with kv_role {role} wants {word}")
    found, _ = find_policy(scenario)
    if _mechanism(engine, found, windowed=False) is not Scheduler:
        raise ValueError(
            f"engine.scheduling_policy: {called(found)} passes no KV caches on; in a group with "
            f"kv_role {role} fcfs does, and policies that only order the queue: priority, sjf, fair"
        )


def _check_windowed(engine: EngineConfig, found: type, mechanism: type) -> None:
    """Refuse what does not go with layers that keep a window alone."""
    key = "engine.disable_hybrid_kv_cache_manager"
    for name, plain in (
        ("async_scheduling", False),
        ("preemption_mode", "recompute"),
        ("allocation", "paged"),
        ("reserve_output_tokens", None),
    ):
        if getattr(engine, name) != plain:
            word = "null" if plain is None else str(plain).lower()
            raise ValueError(f"{key}: false goes with {name}: {word}")
    if mechanism is not Scheduler:
        raise ValueError(
            f"{key}: must be true: {called(found)} keeps all tokens; fcfs need not, nor policies "
            "that only order the queue: priority, sjf, boost"
        )


def _speculative(engine: EngineConfig, found: type, mechanism: type) -> type[Scheduler]:
    """Give the scheduler for speculative decoding, or refuse what it does not do."""
    for key, plain in (("async_scheduling", False), ("preemption_mode", "recompute")):
        if getattr(engine, key) != plain:
            word = str(plain).lower()
            raise ValueError(f"engine.speculative_config: goes with {key}: {word}")
    if mechanism is not Scheduler:
        raise ValueError(
            f"engine.speculative_config: {called(found)} verifies no drafts; fcfs does, and "
            "policies that only order the queue: priority, sjf, boost"
        )
    return Speculative
