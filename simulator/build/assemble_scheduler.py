"""From what an engine is to its scheduler, with its policy, its options and its blocks."""

from collections.abc import Callable
from functools import cache

from simulator.build.engine_spec import EngineSpec
from simulator.build.policy_table import (
    LIMIT_KEYS,
    ORDER,
    construct,
    is_own,
    make_policy,
    policy_name,
)
from simulator.core.request import Chunk, Copies, Load, Request, Step, Swap
from simulator.features import features_of
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.kv_cache.host_memory import Prices
from simulator.kv_cache.tiers import HostTier, SecondaryTier
from simulator.models.gpus import GIB
from simulator.models.kv_layout import EXPORTED, model_groups
from simulator.models.modules import FULL
from simulator.models.sliding_window import LayerGroups
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.door import Door
from simulator.schedulers.limits import Limits
from simulator.schedulers.vllm.scheduler import Options, Scheduler
from simulator.util.errors import ScenarioError
from simulator.util.imported import Imported

PLUGINS = "headway.schedulers"
"""The entry points of schedulers that need packages of an engine: a function of spec and limits."""
BLOCKS: Imported[Callable[..., BlockCounter]] = Imported(
    {
        "radix": "simulator.kv_cache.radix_cache:RadixCache",
        "eagle": "simulator.features.drafts.blocks:EagleTree",
        "unshared radix": "simulator.kv_cache.unshared_radix_cache:UnsharedRadixCache",
        "hierarchical": "simulator.kv_cache.hierarchical_cache:HierarchicalCache",
        "unshared": "simulator.kv_cache.unshared_prefix_cache:UnsharedPrefixCache",
        "hybrid": "simulator.kv_cache.hybrid_manager:HybridManager",
        "drafts": "simulator.features.drafts.blocks:DraftBlocks",
        "hybrid drafts": "simulator.features.drafts.blocks:DraftHybridBlocks",
        "states": "simulator.kv_cache.state_manager:StateManager",
        "slots": "simulator.features.drafts.blocks:SlotCounter",
    }
)
"""What keeps the blocks of other memory rules than vLLM's."""


def make_scheduler(
    spec: EngineSpec, shares_prefixes: bool, *, named: bool = False
) -> SchedulerBase:
    """Build the scheduler with its blocks.

    `shares_prefixes` says that the workload's prompts have contents to share; where they have
    none a prefix cache could only serve requests that come back after a preemption or in a client's
    next try, which finds what the one before had computed. `named` gives every block a number, also
    where counting them would do: a live engine reads block tables. Raises ValueError, by its field,
    for what the scheduler does not do, and HeadwayError where one of the user's own cannot be made.
    """
    scheduler = _make(spec, shares_prefixes, named=named)
    assert scheduler is not None
    requests, tokens = spec.engine.max_num_queued_reqs, spec.engine.max_num_queued_tokens
    if requests is not None or tokens is not None:
        scheduler.door = Door(requests, tokens)
    return scheduler


def check_scheduler(spec: EngineSpec) -> None:
    """Raise ValueError for what `make_scheduler` refuses; nothing of the user's own is made."""
    try:
        _make(spec, False, check_only=True)
    except TypeError as error:  # an argument of the wrong type is the user's mistake, too
        raise ValueError(str(error)) from error


def _make(
    spec: EngineSpec, shares_prefixes: bool, *, named: bool = False, check_only: bool = False
) -> SchedulerBase | None:
    """Build the scheduler; None where it is, or has, the user's own and shall only be checked."""
    engine, policy_class, scheduler_class = spec.engine, spec.policy, spec.scheduler
    if scheduler_class is None:
        return _make_by_plugin(spec)
    if named and (feature := next(features_of(engine), None)):
        raise ScenarioError(f"engine.{feature.key}", f"a live engine {feature.live}")
    traits, parts = scheduler_class.traits, _parts(spec, scheduler_class)
    sglang, arguments = policy_name(policy_class) == "sglang", spec.arguments
    if spec.order is not None:
        order, given = spec.order
        unmade = check_only and is_own(order)
        parts["policy"] = None if unmade else make_policy(spec, order, given, ORDER)
    if scheduler_class.options_type is not None:
        arguments = {"options": scheduler_class.options_type(**arguments)}
    blocks = make_blocks(
        spec,
        caching=engine.enable_prefix_caching and traits.caches_prefixes,
        shares=shares_prefixes or spec.retries,
        named=named,
        tree=engine.prefix_cache == "radix" or (traits.prefix_tree and not named),
        counts=sglang and arguments["options"].serves_unshared,
    )
    if is_own(policy_class) and check_only:
        return None
    if not issubclass(policy_class, SchedulerBase):
        assert issubclass(scheduler_class, Scheduler)
        parts["policy"], arguments = make_policy(spec, policy_class, arguments), {}
    scheduler: SchedulerBase = construct(spec, scheduler_class, blocks, **parts, **arguments)
    if not hasattr(scheduler, "swap_space"):
        wrong = f"{policy_class.__name__}.__init__ must call super().__init__(blocks, **options)"
        raise spec.blame("engine.scheduling_policy", ValueError(wrong))
    return scheduler


def _make_by_plugin(spec: EngineSpec) -> SchedulerBase:
    """Build the scheduler that an installed package brings, by the entry point of its name."""
    from importlib.metadata import entry_points

    name = spec.engine.scheduler
    found = [*entry_points(group=PLUGINS, name=name)]
    if not found:
        what = f"no installed package has an entry point {name} of {PLUGINS}: install Headway again"
        raise ScenarioError("engine.scheduler", what)
    make: Callable[[EngineSpec, Limits], SchedulerBase] = found[0].load()
    return make(spec, make_limits(spec))


def _parts(spec: EngineSpec, scheduler_class: type[SchedulerBase]) -> Options:
    """Return what a scheduler is made of beside its blocks and its policy."""
    traits = scheduler_class.traits
    limits = make_limits(spec, beside=traits.loads_beside).only(traits.obeys)
    if not issubclass(scheduler_class, Scheduler):
        return {"limits": limits}
    made = (one.of(spec.engine, spec.model) for one in features_of(spec.engine))
    features = [one for one in made if one is not None]
    return {"limits": limits, "features": features, "rules": spec.rules}


def make_limits(spec: EngineSpec, *, beside: bool = False) -> Limits:
    """Return the knobs of a scheduler; `beside`: blocks come from host memory beside the steps."""
    engine, drafts = spec.engine, spec.engine.speculative_config
    return Limits(
        **{key: getattr(engine, key) for key in LIMIT_KEYS - {"max_model_len"}},
        max_model_len=spec.max_model_len,
        speculation=None if drafts is None else drafts.on(spec.model.name),
        draft_seed=spec.seed,
        swap_blocks=0 if engine.preemption_mode == "recompute" else spec.swap_blocks,
        swap_prices=swap_prices(spec) if engine.preemption_mode == "auto" else None,
        load_time=load_time(spec) if beside else None,
        store_time=store_time(spec) if beside else None,
    )


def load_time(spec: EngineSpec) -> Callable[[int], float]:
    """Say how long so many blocks take from host memory, beside the steps."""
    nobody, cost = Request(-1, 0.0, 1, 1), spec.cost
    return lambda blocks: cost.with_copies(
        0.0, Step([], copies=Copies(loads=[Load(nobody, blocks, fresh=True)]))
    )[0]


def swap_prices(spec: EngineSpec) -> Prices:
    """Say what a preempted request costs by the cost model.

    Computing it again takes steps of its own, of `max_num_batched_tokens` at most.
    """
    nobody, cost, most = Request(-1, 0.0, 1, 1), spec.cost, spec.engine.max_num_batched_tokens

    @cache
    def recompute(tokens: int) -> float:
        return sum(
            cost.execute(Step([Chunk(nobody, start, min(most, tokens - start))])).seconds
            for start in range(0, tokens, most)
        )

    return Prices(
        recompute,
        store_time(spec),
        lambda blocks: cost.swap_seconds(Step([], copies=Copies(incoming=[Swap(nobody, blocks)]))),
    )


def make_blocks(
    spec: EngineSpec, *, caching: bool, shares: bool, named: bool, tree: bool, counts: bool
) -> BlockCounter:
    """Make the block manager that an engine's rules of memory need.

    `shares` says whether others, or later tries, may begin as a prompt does; with `tree` a prefix
    cache is a radix tree, of which the scheduler `counts` the blocks alone. `named` gives every
    block a number.

    Contiguous allocation is paging with one page a request, of the greatest length.
    """
    engine, pool = spec.engine, (spec.num_gpu_blocks, spec.engine.block_size)
    windows = spec.keeps_window and (engine.speculative_config is None or engine.drafts_ahead)
    if windows or engine.mamba_cache_mode == "align":
        if named:
            what = "must be true: a live engine has one table"
            raise ScenarioError("engine.disable_hybrid_kv_cache_manager", what)
        return _make_hybrid(spec, caching)
    if engine.allocation == "contiguous":
        tokens = (spec.num_gpu_blocks - 1) * engine.block_size
        pages = tokens // spec.max_model_len
        if not pages:
            what = f"{tokens} tokens of KV cache have no room for a request of max_model_len"
            raise ScenarioError("engine.allocation", f"{what} {spec.max_model_len}")
        return _make_counter(spec, pages + 1, spec.max_model_len)
    if tree and caching:
        if named:
            what = "radix counts blocks, a live engine names them"
            raise ScenarioError("engine.prefix_cache", what)
        return _make_tree(spec, counts=counts and not shares)
    if engine.kv_offloading_size is not None and (named or not caching):
        why = "a live engine has no host tier" if caching else "there is no prefix cache"
        raise ScenarioError("engine.kv_offloading_size", why)
    if engine.drafts_ahead or not (caching or named):
        return _make_counter(spec, *pool, caching=caching)
    if engine.kv_offloading_size is None and not shares and not named:
        return BLOCKS["unshared"](*pool)
    return BlockManager(*pool, caching, _make_tiers(spec))


def _make_tree(spec: EngineSpec, *, counts: bool) -> BlockCounter:
    """Make a radix tree, with a part in host memory where there is some."""
    engine, pool = spec.engine, (spec.num_gpu_blocks, spec.engine.block_size)
    if engine.speculative_config is not None:
        return BLOCKS["eagle"](*pool)
    if engine.kv_offloading_size is None:
        return BLOCKS["unshared radix" if counts else "radix"](*pool)
    policy = engine.hicache_write_policy
    return BLOCKS["hierarchical"](*pool, spec.host_blocks, policy, store_time(spec))


def store_time(spec: EngineSpec) -> Callable[[int], float]:
    """Say how long so many blocks take to host memory, beside the steps."""
    nobody, cost = Request(-1, 0.0, 1, 1), spec.cost
    return lambda blocks: cost.swap_seconds(Step([], copies=Copies([Swap(nobody, blocks)])))


def _make_tiers(spec: EngineSpec) -> HostTier | None:
    """Make the host tier and those behind it, if there are some."""
    engine, size = spec.engine, spec.block_bytes * spec.engine.tensor_parallel_size
    if engine.kv_offloading_size is None:
        return None
    behind = [
        SecondaryTier(
            tier.type,
            int(tier.size * GIB // size),
            size / (tier.bandwidth * 1e9),
            tier.latency * 1e-3,
            shared=tier.shared,
        )
        for tier in engine.secondary_tiers
    ]
    return HostTier(
        spec.host_blocks,
        write_through=engine.hicache_write_policy == "write_through",
        threshold=engine.store_threshold,
        secondary=behind,
    )


def _make_hybrid(spec: EngineSpec, caching: bool) -> BlockCounter:
    """Make the blocks of a model with a window: vLLM's groups, that of the first layer first.

    Or of one with states.
    """
    engine, model = spec.engine, spec.model
    if engine.mamba_cache_mode == "align":
        return _make_states(spec, caching)
    full, sliding = model_groups(model)
    kinds = [[0] * full, [model.sliding_window] * sliding]
    first, second = kinds if model.layer_kinds[0] == FULL else reversed(kinds)
    return BLOCKS["hybrid drafts" if engine.drafts_ahead else "hybrid"](
        spec.num_gpu_blocks,
        engine.block_size,
        caching,
        windows=[*first, *second],
        max_in_flight=engine.max_num_batched_tokens * (1 + engine.async_scheduling),
        max_model_len=spec.max_model_len,
        prefix_cache_retention_interval=engine.prefix_cache_retention_interval,
    )


def _make_states(spec: EngineSpec, caching: bool) -> BlockCounter:
    """Make the blocks of a model with states, the groups of the first layer's kind first."""
    model, memory = spec.model, spec.memory
    assert memory is not None
    tables = memory.layout.tables
    kinds = [[not one.block_size] * one.number for one in tables]
    unit, linear = spec.engine.prefix_match_unit, model.linear
    step = EXPORTED if unit and linear and not linear.is_mamba else 1
    first, second = kinds if model.layer_kinds[0] in model.cached_layers else reversed(kinds)
    return BLOCKS["states"](
        spec.num_gpu_blocks,
        spec.engine.block_size,
        caching,
        states=[*first, *second],
        max_model_len=spec.max_model_len,
        exports=memory.sizes.exports_states * step,
        prefix_cache_retention_interval=spec.engine.prefix_cache_retention_interval,
        prefix_match_unit=unit,
    )


def _make_counter(
    spec: EngineSpec, count: int, size: int, *, caching: bool = False
) -> BlockCounter:
    """Make so many blocks, without names unless drafts need them."""
    speculation, model = spec.engine.speculative_config, spec.model
    if speculation is None or policy_name(spec.policy) == "sglang":
        return BlockCounter(count, size)
    if spec.engine.drafts_ahead:
        return BLOCKS["drafts"](count, size, caching, _make_tiers(spec))
    groups = None
    if spec.keeps_window:
        full, others = model_groups(model)
        most = spec.engine.max_num_batched_tokens
        groups = LayerGroups(full, others, model.sliding_window, most)
    lookahead, longest = speculation.lookahead, spec.max_model_len
    return BLOCKS["slots"](count, size, lookahead=lookahead, max_model_len=longest, groups=groups)
