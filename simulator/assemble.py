"""From the words of a scenario to the parts of a run: model, memory, cost, workload, scheduler.

Every function names the scenario's field in its errors: `ValueError("field: what is wrong")`.
"""

import importlib
import inspect
import sys
import warnings
from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from typing import Any

from simulator.async_scheduler import AsyncScheduler
from simulator.attention import Groups, layer_groups
from simulator.blocks import BlockCounter, BlockManager
from simulator.cost import CostModel, kv_block_bytes, load_cost, shipped_profile
from simulator.drafting import DraftedCost
from simulator.drafts import SlotCounter
from simulator.dynamic import DynamicScheduler
from simulator.engines import fraction_of
from simulator.errors import HeadwayWarning
from simulator.fairness import DRR, WFQ, Fair
from simulator.fastgen import FastGen
from simulator.fields import PLAIN, check
from simulator.hardware import GIB, Gpu, find_gpu
from simulator.hf import HfStatic
from simulator.host import Prices
from simulator.memory import kv_budget
from simulator.mixed import Orca, Sarathi
from simulator.model import ModelSpec, load_model
from simulator.orders import HRRN, MLFQ, SRPT, Boost
from simulator.policies import SJF, Priority
from simulator.preempting import Deadline, Preemptive
from simulator.radix import RadixCache
from simulator.request import Chunk, Request, Step, Swap
from simulator.scenario import EngineBlock, Scenario
from simulator.scheduler import Scheduler
from simulator.sglang import SgLang
from simulator.speculative import Speculative
from simulator.static import Static
from simulator.tgi import Tgi
from simulator.tier import HostTier
from simulator.trtllm import TrtLlm
from simulator.vllm_v0 import VllmV0

POLICIES: dict[str, type] = {
    "fcfs": Scheduler,
    "priority": Priority,
    "preemptive": Preemptive,
    "deadline": Deadline,
    "sjf": SJF,
    "srpt": SRPT,
    "hrrn": HRRN,
    "mlfq": MLFQ,
    "boost": Boost,
    "static": Static,
    "hf-static": HfStatic,
    "orca": Orca,
    "fcfs-v0": VllmV0,
    "sarathi": Sarathi,
    "sglang": SgLang,
    "trtllm": TrtLlm,
    "tgi": Tgi,
    "fastgen": FastGen,
    "fair": Fair,
    "wfq": WFQ,
    "drr": DRR,
}
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
DYNAMIC = ("rank", "displaces", "promote")
"""What makes a policy need the DynamicScheduler, see `policies.Policy`."""


@dataclass(slots=True, frozen=True)
class Parts:
    """What a scenario stands for, apart from its workload."""

    model: ModelSpec
    gpu: Gpu
    cost: CostModel
    num_gpu_blocks: int
    max_model_len: int


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
    for message in _without_effect(engine, find_policy(scenario)[0], max_model_len):
        warnings.warn(message, HeadwayWarning, stacklevel=3)
    blocks = engine.num_gpu_blocks_override or _blocks_that_fit(engine, model, gpu)
    spec = scenario.cost or shipped_profile(model, gpu, engine) or {"kind": "roofline"}
    cost: CostModel = load_cost(spec, scenario.folder, model=model, gpu=gpu, engine=engine)
    speculation = engine.speculative_config
    if speculation is not None and speculation.draft is not None:
        cost = DraftedCost(cost, speculation.num_speculative_tokens, speculation.draft)
    return Parts(model, gpu, cost, blocks, max_model_len)


def _without_effect(engine: EngineBlock, found: type, max_model_len: int) -> list[str]:
    """Name the keys that the scheduler does not know, or takes otherwise than given."""
    if engine.scheduler == "vllm" or not issubclass(found, Scheduler):
        return []
    messages = []
    if engine.preemption_mode != "recompute" and not _takes(found, "swap_blocks"):
        messages.append(
            f"{found.__name__} computes a preempted request again: engine.preemption_mode has no "
            "effect"
        )
    for name in ("max_num_batched_tokens", *VLLM_OPTIONS):
        given = getattr(engine, name)
        if given != EngineBlock.model_fields[name].default and not _takes(found, name):
            messages.append(f"{found.__name__} knows no {name}: engine.{name} has no effect")
    tokens = engine.max_num_batched_tokens
    if issubclass(found, VllmV0 | Tgi) and tokens < max_model_len:
        messages.append(
            f"{found.__name__} computes prompts whole: engine.max_num_batched_tokens {tokens:,} is "
            f"taken as max_model_len, {max_model_len:,}"
        )
    return messages


def _takes(found: type, name: str) -> bool:
    """Say whether a scheduler's constructor knows an argument."""
    known = inspect.signature(found).parameters
    return name in known or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())


def _blocks_that_fit(engine: EngineBlock, model: ModelSpec, gpu: Gpu) -> int:
    return kv_budget(
        model,
        gpu,
        tensor_parallel_size=engine.tensor_parallel_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        dtype=engine.dtype,
        quantization=engine.quantization,
        kv_cache_dtype=engine.kv_cache_dtype,
        block_size=engine.block_size,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        fraction_of=fraction_of(engine.name),
        hybrid=not engine.disable_hybrid_kv_cache_manager,
    ).num_gpu_blocks


def find_policy(scenario: Scenario) -> tuple[type, dict[str, Any]]:
    """Find the class that `engine.scheduling_policy` names, and its keyword arguments.

    A subclass of Scheduler decides everything itself; any other class is a policy: it orders
    the waiting queue of the Scheduler.
    """
    spec = scenario.engine.scheduling_policy
    arguments = {} if isinstance(spec, str) else {k: v for k, v in spec.items() if k != "policy"}
    name = spec if isinstance(spec, str) else spec["policy"]
    if isinstance(name, type):  # from Python, see testing.py
        return name, arguments
    if name in POLICIES:
        return POLICIES[name], arguments
    module, colon, attribute = name.partition(":")
    field = "engine.scheduling_policy"
    if not colon:
        known = ", ".join(POLICIES)
        raise ValueError(f"{field}: no policy {name!r}; there are {known}, or package.module:Class")
    folder = str(scenario.folder.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module does
        raise ValueError(f"{field}: cannot load {name}: {' '.join(str(error).split())}") from error
    if not isinstance(found, type) or not (
        issubclass(found, Scheduler)
        or callable(getattr(found, "key", None))
        or callable(getattr(found, "rank", None))
        or callable(getattr(found, "queue", None))
    ):
        raise ValueError(
            f"{field}: {name} is no Scheduler and has no method `key(request)` or "
            "`rank(waiting, now)`"
        )
    return found, arguments


def make_scheduler(
    scenario: Scenario, parts: Parts, shares_prefixes: bool, *, named: bool = False
) -> Scheduler:
    """Build the scheduler with its blocks.

    `shares_prefixes` says that the workload's prompts have contents to share; where they have
    none a prefix cache could only serve requests that come back after a preemption. `named` gives
    every block a number, also where counting them would do: a live engine reads block tables.
    """
    engine = scenario.engine
    found, arguments = find_policy(scenario)
    if engine.scheduler == "vllm":
        return _installed(scenario, parts)
    if named and engine.speculative_config is not None:
        raise ValueError("engine.speculative_config: a live engine verifies no drafts")
    mechanism = _mechanism(engine, found, windowed=_windowed(engine, parts.model))
    caching = engine.enable_prefix_caching and mechanism.caches_prefixes
    if shares_prefixes and engine.enable_prefix_caching and not caching:
        warnings.warn(
            f"{mechanism.__name__} has no prefix cache: engine.enable_prefix_caching has no effect",
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
    options = {name: value for name, value in options.items() if _takes(mechanism, name)}
    _refuse_own_rules(engine, mechanism.__name__, options)
    if engine.kv_offloading_size and mechanism._board is not Scheduler._board:
        raise ValueError(f"engine.kv_offloading_size: {mechanism.__name__} has no host tier")
    _check_arguments(found, arguments, taken=options)
    blocks = _blocks(engine, parts, caching, named)
    if issubclass(found, Scheduler):  # fcfs needs no policy
        scheduler: Scheduler = _construct(mechanism, blocks, **options, **arguments)
        if not hasattr(scheduler, "host"):
            raise ValueError(
                f"engine.scheduling_policy: {found.__name__}.__init__ must call "
                "super().__init__(blocks, **options)"
            )
        return scheduler
    return mechanism(blocks, policy=_policy(scenario, found, arguments), **options)


def _policy(scenario: Scenario, found: type, arguments: dict[str, Any]) -> Any:
    """Make a policy; ValueError where its constructor fails, or it wants predictions."""
    policy = _construct(found, **arguments)
    if getattr(policy, "needs_hint", False) and scenario.predictor is None:
        raise ValueError(
            f"engine.scheduling_policy: {found.__name__} ranks by predicted lengths, and the "
            "scenario has no `predictor`; {kind: oracle} is the simplest"
        )
    return policy


def _construct(found: type, *parts: object, **arguments: Any) -> Any:
    """Make a policy or a scheduler; ValueError where its constructor fails."""
    try:
        return found(*parts, **arguments)
    except ValueError:
        raise  # it says which argument is wrong
    except Exception as error:
        raise ValueError(
            f"engine.scheduling_policy: {found.__name__} raised {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error


def swap_blocks(engine: EngineBlock, model: ModelSpec) -> int:
    """Count the KV blocks that `swap_space` holds."""
    return int(engine.swap_space * GIB // kv_block_bytes(model, engine))


def _offloaded_blocks(engine: EngineBlock, model: ModelSpec) -> int:
    """Count the KV blocks that `kv_offloading_size` holds."""
    assert engine.kv_offloading_size is not None
    size = kv_block_bytes(model, engine) * engine.tensor_parallel_size
    return int(engine.kv_offloading_size * GIB // size)


def swap_prices(engine: EngineBlock, cost: CostModel) -> Prices:
    """Say what a preempted request costs by the cost model.

    Computing it again takes steps of its own, of `max_num_batched_tokens` at most.
    """
    nobody = Request(-1, 0.0, 1, 1)
    most = engine.max_num_batched_tokens

    @cache
    def recompute(tokens: int) -> float:
        return sum(
            cost.execute(Step([Chunk(nobody, start, min(most, tokens - start))]))
            for start in range(0, tokens, most)
        )

    return Prices(
        recompute,
        lambda blocks: cost.swap_seconds(Step([], outgoing=[Swap(nobody, blocks)])),
        lambda blocks: cost.swap_seconds(Step([], incoming=[Swap(nobody, blocks)])),
    )


def _limits(engine: EngineBlock, parts: Parts) -> dict[str, Any]:
    return {
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": parts.max_model_len,
    }


def _vllm_options(engine: EngineBlock) -> dict[str, Any]:
    return engine.model_dump(include={*VLLM_OPTIONS})


def _installed(scenario: Scenario, parts: Parts) -> Scheduler:
    """Build the scheduler of the vLLM that is installed."""
    from simulator.installed import InstalledBlocks, InstalledScheduler

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
    folder = str(scenario.folder.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    return InstalledScheduler(
        InstalledBlocks(parts.num_gpu_blocks, engine.block_size),
        enable_prefix_caching=engine.enable_prefix_caching,
        policy_name=engine.scheduling_policy,
        async_scheduling=engine.async_scheduling,
        scheduler_cls=engine.scheduler_cls,
        **_limits(engine, parts),
        **_vllm_options(engine),
    )


def _refuse_own_rules(engine: EngineBlock, who: str, taken: Container[str] = ()) -> None:
    """Refuse rules of admission and ways of preempting that a scheduler does not take."""
    for rule in OWN_RULES:
        if getattr(engine, rule) and rule not in taken:
            raise ValueError(f"engine.{rule}: {who} has no such rule")
    if engine.preemption_mode == "auto" and "swap_blocks" in taken and "swap_prices" not in taken:
        raise ValueError(f"engine.preemption_mode: {who} does not choose: swap or recompute")


def _windowed(engine: EngineBlock, model: ModelSpec) -> bool:
    """Say whether some layers keep the KV of a window alone."""
    return model.sliding_window > 0 and not engine.disable_hybrid_kv_cache_manager


def _mechanism(engine: EngineBlock, found: type, *, windowed: bool) -> type[Scheduler]:
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
            f"engine.async_scheduling: {found.__name__} schedules a step when the one before has "
            "ended; set it to false"
        )
    return AsyncScheduler


def _check_windowed(engine: EngineBlock, found: type, mechanism: type) -> None:
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
            f"{key}: must be true: {found.__name__} keeps all tokens; fcfs need not, nor policies "
            "that only order the queue: priority, sjf, boost"
        )


def _speculative(engine: EngineBlock, found: type, mechanism: type) -> type[Scheduler]:
    """Give the scheduler for speculative decoding, or refuse what it does not do."""
    for key, plain in (("async_scheduling", False), ("preemption_mode", "recompute")):
        if getattr(engine, key) != plain:
            word = str(plain).lower()
            raise ValueError(f"engine.speculative_config: goes with {key}: {word}")
    if mechanism is not Scheduler:
        raise ValueError(
            f"engine.speculative_config: {found.__name__} verifies no drafts; fcfs does, and "
            "policies that only order the queue: priority, sjf, boost"
        )
    return Speculative


def _check_arguments(found: type, arguments: dict[str, Any], taken: dict[str, Any]) -> None:
    """Refuse arguments that the policy does not know, that the engine's keys already give, or
    whose annotations are plain types that they are not, and name those that are missing."""
    known = inspect.signature(found).parameters
    given = {*taken, "blocks"} if issubclass(found, Scheduler) else set()
    free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    wrong = []
    for name, value in arguments.items():
        if name in taken:
            wrong.append(f"{name}: give it as engine.{name}")
        elif name not in known and not free:
            wrong.append(f"{name}: {found.__name__} takes no such argument")
        elif name in known and (what := _mistyped(name, known[name], value)):
            wrong.append(what)
    wrong += [
        f"{name}: is missing; {found.__name__} needs it"
        for name, parameter in known.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in {*arguments, *given}
    ]
    if wrong:
        raise ValueError("\n".join(f"engine.scheduling_policy.{what}" for what in wrong))


def _mistyped(name: str, parameter: inspect.Parameter, value: object) -> str:
    """Say that an argument is not of the plain type of its annotation; "" where it is."""
    kind = parameter.annotation
    for plain in PLAIN:
        if kind in (plain, plain | None, plain.__name__, f"{plain.__name__} | None"):
            optional = kind not in (plain, plain.__name__)
            wrong, message = check(name, plain, value)
            return message if wrong and not (optional and value is None) else ""
    return ""


def _blocks(engine: EngineBlock, parts: Parts, caching: bool, named: bool) -> BlockCounter:
    """Make the block manager that the scenario's memory rule needs.

    Contiguous allocation is paging with one page a request, of the greatest length.
    """
    if engine.allocation == "contiguous":
        tokens = (parts.num_gpu_blocks - 1) * engine.block_size
        pages = tokens // parts.max_model_len
        if not pages:
            raise ValueError(
                f"engine.allocation: {tokens} tokens of KV cache hold no request of "
                f"max_model_len {parts.max_model_len}"
            )
        return _counter(engine, parts, pages + 1, parts.max_model_len)
    if engine.prefix_cache == "radix" and caching:
        if named:
            raise ValueError("engine.prefix_cache: radix counts blocks, a live engine names them")
        return RadixCache(parts.num_gpu_blocks, engine.block_size)
    if engine.kv_offloading_size is not None:
        if named or not caching:
            why = "a live engine has no host tier" if caching else "there is no prefix cache"
            raise ValueError(f"engine.kv_offloading_size: {why}")
        tier = HostTier(_offloaded_blocks(engine, parts.model))
        return BlockManager(parts.num_gpu_blocks, engine.block_size, caching, tier)
    if caching or named:
        return BlockManager(parts.num_gpu_blocks, engine.block_size, prefix_caching=caching)
    return _counter(engine, parts, parts.num_gpu_blocks, engine.block_size)


def _counter(engine: EngineBlock, parts: Parts, count: int, size: int) -> BlockCounter:
    """Make so many blocks without names."""
    speculation, model = engine.speculative_config, parts.model
    windowed = _windowed(engine, model)
    if speculation is None and not windowed:
        return BlockCounter(count, size)
    groups = None
    if windowed:
        full, others, _ = layer_groups(model.num_hidden_layers, model.windowed_layers)
        groups = Groups(full, others, model.sliding_window, engine.max_num_batched_tokens)
    ahead = speculation.lookahead if speculation is not None else 0
    return SlotCounter(
        count, size, lookahead=ahead, max_model_len=parts.max_model_len, groups=groups
    )
