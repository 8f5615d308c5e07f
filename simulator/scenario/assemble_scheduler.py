"""Which scheduler a scenario stands for, with its policy, its options and its blocks."""

import os
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cache
from typing import Any

from simulator.core.engine_config import EngineConfig
from simulator.core.request import Chunk, Copies, Request, Step, Swap
from simulator.costs.cost_model import CostModel
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.kv_cache.host_memory import HostTier, Prices
from simulator.models.gpus import GIB
from simulator.models.kv_budget import kv_block_bytes
from simulator.models.load import load_model
from simulator.models.sliding_window import LayerGroups, layer_groups
from simulator.models.spec import ModelSpec
from simulator.scenario.assemble import EngineParts
from simulator.scenario.engines import REQUIRED_FOR_WINDOW, release_of
from simulator.scenario.policy_table import (
    DYNAMIC_HOOKS,
    PLUGIN,
    POLICIES,
    POLICY_VARIABLE,
    VLLM_OPTIONS,
    VLLM_POLICIES,
    accepts,
    check_arguments,
    construct,
    find_order,
    find_policy,
    is_own,
    plugin_spec,
    policy_name,
    takes_variable,
)
from simulator.scenario.scenario import Scenario
from simulator.schedulers.vllm.pipeline import PipelineScheduler
from simulator.schedulers.vllm.rules import read_release, rules_of
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayWarning
from simulator.util.imported import Imported
from simulator.util.user_code import search_in

ORDER = "engine.scheduling_policy.order"
ADMISSION_RULES = ("min_decode_blocks", "min_decode_blocks_scope", "reserve_output_tokens")
"""Rules of admission that vLLM does not have; like its options, keys of the engine that a scheduler
may take under the same name."""

REQUIRED_FOR_DRAFTS = {"async_scheduling": False, "preemption_mode": "recompute"}
"""What an engine must have to verify drafts."""
REQUIRED_FOR_ROLE = {
    "scheduler": "headway",
    "data_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "speculative_config": None,
    "disable_hybrid_kv_cache_manager": True,
    "preemption_mode": "recompute",
    "allocation": "paged",
    "kv_offloading_size": None,
    "prefix_cache": "hash",
}
"""What an engine must have that only prefills or only decodes."""
REQUIRED_FOR_STAGES = {
    "scheduler": "headway",
    "speculative_config": None,
    "preemption_mode": "recompute",
    "kv_offloading_size": None,
    "prefix_cache": "hash",
}
"""What an engine must have whose layers are split into pipeline stages."""
ROLES: Imported[type[Scheduler]] = Imported(
    {
        "kv_producer": "simulator.schedulers.vllm.kv_roles:Producer",
        "asynchronous kv_producer": "simulator.schedulers.vllm.kv_roles:AsyncProducer",
        "kv_consumer": "simulator.schedulers.vllm.kv_roles:Consumer",
        "asynchronous kv_consumer": "simulator.schedulers.vllm.kv_roles:AsyncConsumer",
    }
)
"""By a group's kv_role and its async_scheduling, what schedules."""
BLOCKS: Imported[Callable[..., BlockCounter]] = Imported(
    {
        "radix": "simulator.kv_cache.radix_cache:RadixCache",
        "unshared radix": "simulator.kv_cache.unshared_radix_cache:UnsharedRadixCache",
        "unshared": "simulator.kv_cache.unshared_prefix_cache:UnsharedPrefixCache",
        "hybrid": "simulator.kv_cache.hybrid_manager:HybridManager",
        "slots": "simulator.kv_cache.slot_counter:SlotCounter",
    }
)
"""What keeps the blocks of other memory rules than vLLM's."""


def make_scheduler(
    scenario: Scenario,
    parts: EngineParts,
    shares_prefixes: bool,
    *,
    named: bool = False,
    role: str | None = None,
    retries: bool = False,
) -> Scheduler:
    """Build the scheduler with its blocks.

    `shares_prefixes` says that the workload's prompts have contents to share; where they have
    none a prefix cache could only serve requests that come back after a preemption or, with
    `retries`, in a client's next try, which finds what the one before had computed. `named` gives
    every block a number, also where counting them would do: a live engine reads block tables.
    `role` is that of the replica's group, kv_producer or kv_consumer; None: it does both. Raises
    ValueError, by its field, for what the scheduler does not do, and HeadwayError where one of the
    user's own cannot be made.
    """
    scheduler = _make(scenario, parts, shares_prefixes, named=named, role=role, retries=retries)
    assert scheduler is not None
    return scheduler


def check_scheduler(scenario: Scenario, parts: EngineParts) -> None:
    """Raise ValueError for what `make_scheduler` refuses; nothing of the user's own is made."""
    _make(scenario, parts, False, check_only=True)


def _make(
    scenario: Scenario,
    parts: EngineParts,
    shares_prefixes: bool,
    *,
    named: bool = False,
    role: str | None = None,
    retries: bool = False,
    check_only: bool = False,
) -> Scheduler | None:
    """Build the scheduler; None where it is, or has, the user's own and shall only be checked."""
    engine = scenario.engine
    policy_class, arguments = find_policy(scenario)
    if role is not None:
        check_role(role, scenario)
    if engine.pipeline_parallel_size > 1:
        for key, word in differing_keys(engine, REQUIRED_FOR_STAGES):
            raise ValueError(f"engine.pipeline_parallel_size: goes with {key}: {word}")
    if engine.scheduler == "vllm":
        return _make_installed(scenario, parts)
    if named and engine.speculative_config is not None:
        raise ValueError("engine.speculative_config: a live engine verifies no drafts")
    scheduler_class = _find_scheduler(
        engine, policy_class, windowed=_keeps_window(engine, parts.model)
    )
    if role is not None:
        scheduler_class = ROLES[f"asynchronous {role}" if engine.async_scheduling else role]
    caching = engine.enable_prefix_caching and scheduler_class.caches_prefixes
    if shares_prefixes and engine.enable_prefix_caching and not caching:
        what = "has no prefix cache: engine.enable_prefix_caching has no effect"
        warnings.warn(f"{policy_name(scheduler_class)} {what}", HeadwayWarning, stacklevel=2)
    options = _options(scenario, parts, scheduler_class)
    sglang = POLICIES.name_of(policy_class) == "sglang"
    if sglang and isinstance(arguments.get("order"), dict):
        options["policy"] = _make_order(scenario, arguments.pop("order"), check_only=check_only)
    tiers = scheduler_class.has_host_tier and scheduler_class.admit is Scheduler.admit
    if engine.kv_offloading_size and not tiers:
        told = policy_name(policy_class if sglang else scheduler_class)
        raise ValueError(f"engine.kv_offloading_size: {told} has no host tier")
    check_arguments(policy_class, arguments, taken=options)
    tree = engine.prefix_cache == "radix" or (scheduler_class.prefix_tree and not named)
    counts = sglang and policy_class.serves_unshared(**arguments)  # type: ignore[attr-defined]
    shares = shares_prefixes or retries
    blocks = _make_blocks(engine, parts, caching, shares, named=named, tree=tree, counts=counts)
    if is_own(policy_class) and check_only:
        return None
    if issubclass(policy_class, Scheduler):  # fcfs needs no policy
        scheduler: Scheduler = construct(scenario, scheduler_class, blocks, **options, **arguments)
        if not hasattr(scheduler, "swap_space"):
            wrong = (
                f"{policy_class.__name__}.__init__ must call super().__init__(blocks, **options)"
            )
            raise scenario.error_at("engine.scheduling_policy", ValueError(wrong))
        return scheduler
    policy = construct(scenario, policy_class, **arguments)
    _check_hint(scenario, policy)
    return scheduler_class(blocks, policy=policy, **options)


def _make_order(scenario: Scenario, spec: dict[str, Any], *, check_only: bool) -> object:
    """Make the policy that orders SGLang's queue; None where it shall only be checked."""
    policy_class, arguments = find_order(spec, scenario.folder, ORDER)
    if is_own(policy_class) and check_only:
        return None
    policy: object = construct(scenario, policy_class, **arguments)
    _check_hint(scenario, policy, ORDER)
    return policy


def _check_hint(
    scenario: Scenario, policy: object, field: str = "engine.scheduling_policy"
) -> None:
    """Refuse a policy that ranks by predicted lengths where nobody predicts any."""
    if getattr(policy, "needs_hint", False) and scenario.predictor is None:
        raise ValueError(
            f"{field}: {policy_name(type(policy))} ranks by predicted lengths, "
            "and the scenario has no `predictor`; {kind: oracle} is the simplest"
        )


def can_cancel(scenario: Scenario) -> bool:
    """Say whether a scenario's scheduler can let a request go before its end."""
    if scenario.engine.scheduler == "vllm":
        return False
    model = load_model(scenario.model, scenario.folder)
    slides = _keeps_window(scenario.engine, model)
    return _find_scheduler(scenario.engine, find_policy(scenario)[0], windowed=slides).cancels


def check_role(role: str, scenario: Scenario) -> None:
    """Refuse an engine that cannot have a role in a cluster that prefills and decodes apart."""
    policy_class, _ = find_policy(scenario)
    found = _find_scheduler(scenario.engine, policy_class, windowed=False)
    if found not in (Scheduler, _overlapping(Scheduler)):
        raise ValueError(
            f"engine.scheduling_policy: {policy_name(policy_class)} passes no KV caches on; in a "
            f"group with kv_role {role} fcfs does, and policies that only order the queue: "
            "priority, sjf, fair"
        )
    for key, word in differing_keys(scenario.engine, REQUIRED_FOR_ROLE):
        raise ValueError(f"engine.{key}: a group with kv_role {role} wants {word}")


def differing_keys(engine: EngineConfig, wanted: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the keys of an engine that have another value than is wanted, and that as in YAML."""
    for key, value in wanted.items():
        if getattr(engine, key) != value:
            yield key, "null" if value is None else str(value).lower()


def _options(
    scenario: Scenario, parts: EngineParts, scheduler_class: type[Scheduler]
) -> dict[str, Any]:
    """Return the arguments that a scheduler takes; ValueError for a rule that it does not know."""
    engine = scenario.engine
    options = _vllm_options(engine, parts) | engine.values_of(ADMISSION_RULES)
    options["rules"] = rules_of(release_of(engine))
    if engine.preemption_mode != "recompute":
        options["swap_blocks"] = swap_blocks(engine, parts.model)
    if engine.preemption_mode == "auto":
        options["swap_prices"] = swap_prices(engine, parts.cost)
    if scheduler_class is PipelineScheduler:
        options |= engine.values_of(["pipeline_parallel_size", "async_scheduling"])
    if engine.speculative_config is not None:
        options |= {"speculation": engine.speculative_config, "seed": scenario.seed}
    options = {name: value for name, value in options.items() if accepts(scheduler_class, name)}
    _check_rules(engine, policy_name(scheduler_class), options)
    return options


def _vllm_options(engine: EngineConfig, parts: EngineParts) -> dict[str, Any]:
    names = ("max_num_seqs", "max_num_batched_tokens", *VLLM_OPTIONS)
    return engine.values_of(names) | {"max_model_len": parts.max_model_len}


def _make_installed(scenario: Scenario, parts: EngineParts) -> Scheduler:
    """Build the scheduler of the vLLM that is installed."""
    from simulator.schedulers.vllm.installed import InstalledBlocks, InstalledScheduler

    engine = scenario.engine
    environment = _plugin_policy(scenario)
    if not environment and engine.scheduling_policy not in VLLM_POLICIES:
        raise ValueError(
            "engine.scheduling_policy: vLLM's scheduler has fcfs and priority; with scheduler_cls: "
            f"{PLUGIN} it has the policies that order the waiting queue"
        )
    for key, known, what in (
        ("allocation", ("paged",), "vLLM's scheduler pages its memory"),
        ("speculative_config", (None,), "goes with scheduler: headway"),
        ("preemption_mode", ("recompute",), "vLLM's scheduler knows recompute alone"),
    ):
        if getattr(engine, key) not in known:
            raise ValueError(f"engine.{key}: {what}")
    _check_rules(engine, "vLLM's scheduler")
    _check_installed(engine)
    search_in(scenario.folder)
    return InstalledScheduler(
        InstalledBlocks(parts.num_gpu_blocks, engine.block_size),
        enable_prefix_caching=engine.enable_prefix_caching,
        policy_name="fcfs" if environment else str(engine.scheduling_policy),
        async_scheduling=engine.async_scheduling,
        scheduler_cls=engine.scheduler_cls,
        environment=environment,
        **_vllm_options(engine, parts),
    )


def _check_installed(engine: EngineConfig) -> None:
    """Refuse a version that is not the installed one's, whose scheduler decides."""
    from importlib.metadata import PackageNotFoundError, version

    wanted = release_of(engine)
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return  # told elsewhere
    found = read_release(installed)
    if wanted is not None and found is not None and wanted[:2] != found[:2]:
        raise ValueError(
            f"engine.version: is {engine.version}, and vLLM {installed} is installed, whose "
            "scheduler decides: leave it out"
        )


def _plugin_policy(scenario: Scenario) -> dict[str, str]:
    """Return the environment by which `headway_vllm` is told the scenario's policy.

    It is empty where the class has a policy of its own, or is another's, and where the scenario
    names none: then HEADWAY_POLICY counts as it is set.
    """
    engine, told = scenario.engine, os.environ.get(POLICY_VARIABLE)
    if told and takes_variable(engine):
        warnings.warn(
            f"engine.scheduling_policy: is that of {POLICY_VARIABLE}, {told}, which is not in the "
            "files of the run: give it as engine.scheduling_policy to keep it with them",
            HeadwayWarning,
            stacklevel=4,
        )
    if engine.scheduler_cls != PLUGIN or engine.scheduling_policy == "fcfs":
        return {}
    if told and told != plugin_spec(engine):
        warnings.warn(
            f"{POLICY_VARIABLE} has no effect: the scenario names a policy",
            HeadwayWarning,
            stacklevel=4,
        )
    policy_class, arguments = find_policy(scenario)
    name = policy_name(policy_class)
    if issubclass(policy_class, Scheduler):
        raise ValueError(
            f"engine.scheduling_policy: {name} is a scheduler of its own: it cannot run in vLLM"
        )
    check_arguments(policy_class, arguments, taken={})
    if not is_own(policy_class):
        _check_hint(scenario, construct(scenario, policy_class, **arguments))
    return {POLICY_VARIABLE: plugin_spec(engine)}


def _check_rules(engine: EngineConfig, who: str, taken: Container[str] = ()) -> None:
    """Refuse rules of admission and ways of preempting that a scheduler does not take."""
    for rule in ADMISSION_RULES:
        default = EngineConfig.model_fields[rule].default
        if getattr(engine, rule) != default and rule not in taken:
            raise ValueError(f"engine.{rule}: {who} has no such rule")
    if engine.preemption_mode == "auto" and "swap_blocks" in taken and "swap_prices" not in taken:
        raise ValueError(f"engine.preemption_mode: {who} does not choose: swap or recompute")


def can_overlap(policy_class: type) -> bool:
    """Say whether under a policy a step can be decided while the one before it runs."""
    own = issubclass(policy_class, Scheduler)
    return not own or POLICIES.name_of(policy_class) in ("fcfs", "sglang")


def _overlapping(scheduler_class: type[Scheduler]) -> type[Scheduler] | None:
    """Get what schedules with async_scheduling in the place of a scheduler; None: nobody does."""
    if scheduler_class is Scheduler:
        from simulator.schedulers.vllm.async_scheduler import AsyncScheduler

        return AsyncScheduler
    if POLICIES.name_of(scheduler_class) == "sglang":
        from simulator.schedulers.sglang.overlap import OverlappedSgLang

        return OverlappedSgLang
    from simulator.schedulers.vllm.dynamic import AsyncDynamicScheduler, DynamicScheduler

    return AsyncDynamicScheduler if scheduler_class is DynamicScheduler else None


def _find_scheduler(engine: EngineConfig, policy_class: type, *, windowed: bool) -> type[Scheduler]:
    """Return the scheduler that a policy works with, or refuse what it does not do."""
    scheduler_class = policy_class if issubclass(policy_class, Scheduler) else Scheduler
    if scheduler_class is not policy_class and any(
        hasattr(policy_class, hook) for hook in DYNAMIC_HOOKS
    ):
        from simulator.schedulers.vllm.dynamic import DynamicScheduler

        scheduler_class = DynamicScheduler
    if engine.pipeline_parallel_size > 1:
        _check_stages(policy_class, scheduler_class, windowed=windowed)
        return PipelineScheduler
    if windowed:
        key = "engine.disable_hybrid_kv_cache_manager"
        for name, word in differing_keys(engine, REQUIRED_FOR_WINDOW):
            if name != "speculative_config":
                raise ValueError(f"{key}: false goes with {name}: {word}")
        if scheduler_class is not Scheduler:
            raise ValueError(
                f"{key}: must be true: {policy_name(policy_class)} keeps all tokens; fcfs need "
                "not, nor policies that only order the queue: priority, sjf, boost"
            )
    if engine.speculative_config is not None:
        for name, word in differing_keys(engine, REQUIRED_FOR_DRAFTS):
            raise ValueError(f"engine.speculative_config: goes with {name}: {word}")
        if scheduler_class is not Scheduler:
            raise ValueError(
                f"engine.speculative_config: {policy_name(policy_class)} verifies no drafts; fcfs "
                "does, and policies that only order the queue: priority, sjf, boost"
            )
        from simulator.schedulers.vllm.speculative import Speculative

        return Speculative
    if not engine.async_scheduling:
        return scheduler_class
    overlapping = _overlapping(scheduler_class)
    if overlapping is None:
        raise ValueError(
            f"engine.async_scheduling: {policy_name(policy_class)} schedules a step when the one "
            "before has ended; set it to false"
        )
    return overlapping


def _check_stages(policy_class: type, scheduler_class: type[Scheduler], *, windowed: bool) -> None:
    """Refuse a policy and a cache that do not go with pipeline stages."""
    key = "engine.pipeline_parallel_size"
    if windowed:
        raise ValueError(f"{key}: goes with disable_hybrid_kv_cache_manager: true")
    if scheduler_class is not Scheduler:
        raise ValueError(
            f"{key}: {policy_name(policy_class)} has one batch in flight; fcfs has more, and "
            "policies that only order the queue: priority, sjf, boost"
        )


def swap_blocks(engine: EngineConfig, model: ModelSpec) -> int:
    """Count the KV blocks that `swap_space` holds."""
    return int(engine.swap_space * GIB // kv_block_bytes(model, engine))


def swap_prices(engine: EngineConfig, cost: CostModel) -> Prices:
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
        lambda blocks: cost.swap_seconds(Step([], copies=Copies([Swap(nobody, blocks)]))),
        lambda blocks: cost.swap_seconds(Step([], copies=Copies(incoming=[Swap(nobody, blocks)]))),
    )


def _keeps_window(engine: EngineConfig, model: ModelSpec) -> bool:
    """Say whether some layers keep the KV of a window alone."""
    return model.keeps_window and not engine.disable_hybrid_kv_cache_manager


def _make_blocks(
    engine: EngineConfig,
    parts: EngineParts,
    caching: bool,
    shares: bool,
    *,
    named: bool,
    tree: bool,
    counts: bool,
) -> BlockCounter:
    """Make the block manager that the scenario's memory rule needs.

    `shares` says whether others, or later tries, may begin as a prompt does; with `tree` a prefix
    cache is a radix tree, of which the scheduler `counts` the blocks alone.

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
        return _make_counter(engine, parts, pages + 1, parts.max_model_len)
    if tree and caching:
        if named:
            raise ValueError("engine.prefix_cache: radix counts blocks, a live engine names them")
        kind = "unshared radix" if counts and not shares else "radix"
        return BLOCKS[kind](parts.num_gpu_blocks, engine.block_size)
    if engine.kv_offloading_size is not None:
        if named or not caching:
            why = "a live engine has no host tier" if caching else "there is no prefix cache"
            raise ValueError(f"engine.kv_offloading_size: {why}")
        size = kv_block_bytes(parts.model, engine) * engine.tensor_parallel_size
        tier = HostTier(int(engine.kv_offloading_size * GIB // size))
        return BlockManager(parts.num_gpu_blocks, engine.block_size, caching, tier)
    if _keeps_window(engine, parts.model) and engine.speculative_config is None:
        if named:
            raise ValueError(
                "engine.disable_hybrid_kv_cache_manager: must be true: a live engine has one table"
            )
        return _make_hybrid(engine, parts, caching)
    pool = parts.num_gpu_blocks, engine.block_size
    if not caching and not named:
        return _make_counter(engine, parts, *pool)
    return BlockManager(*pool, caching) if shares or named else BLOCKS["unshared"](*pool)


def _make_hybrid(engine: EngineConfig, parts: EngineParts, caching: bool) -> BlockCounter:
    """Make the blocks of a model with a window: vLLM's groups, that of the first layer first."""
    model = parts.model
    full, sliding, _ = layer_groups(model.num_hidden_layers, model.windowed_layers)
    kinds = [[0] * full, [model.sliding_window] * sliding]
    first, second = kinds if model.full_first else reversed(kinds)
    return BLOCKS["hybrid"](
        parts.num_gpu_blocks,
        engine.block_size,
        caching,
        windows=[*first, *second],
        max_in_flight=engine.max_num_batched_tokens * (1 + engine.async_scheduling),
        max_model_len=parts.max_model_len,
    )


def _make_counter(engine: EngineConfig, parts: EngineParts, count: int, size: int) -> BlockCounter:
    """Make so many blocks without names."""
    speculation, model = engine.speculative_config, parts.model
    if speculation is None:
        return BlockCounter(count, size)
    groups = None
    if _keeps_window(engine, model):
        full, others, _ = layer_groups(model.num_hidden_layers, model.windowed_layers)
        groups = LayerGroups(full, others, model.sliding_window, engine.max_num_batched_tokens)
    return BLOCKS["slots"](
        count,
        size,
        lookahead=speculation.lookahead,
        max_model_len=parts.max_model_len,
        groups=groups,
    )
