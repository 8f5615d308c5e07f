"""Which block manager an engine has, by its rules of memory."""

from collections.abc import Callable

from simulator.core.request import Copies, Request, Step, Swap
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.kv_cache.tiers import HostTier, SecondaryTier
from simulator.models.gpus import GIB
from simulator.models.kv_layout import model_groups
from simulator.models.modules import FULL
from simulator.models.sliding_window import LayerGroups
from simulator.scenario.engine_spec import EngineSpec
from simulator.scenario.policy_table import policy_name
from simulator.util.errors import ScenarioError
from simulator.util.imported import Imported

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
    first, second = kinds if model.layer_kinds[0] in model.cached_layers else reversed(kinds)
    return BLOCKS["states"](
        spec.num_gpu_blocks,
        spec.engine.block_size,
        caching,
        states=[*first, *second],
        max_model_len=spec.max_model_len,
        exports=memory.sizes.exports_states,
        prefix_cache_retention_interval=spec.engine.prefix_cache_retention_interval,
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
