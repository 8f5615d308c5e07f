"""The blocks of KV cache that a scenario's engine has, and their places on the host."""

from functools import cache

from simulator.core.request import Chunk, Request, Step, Swap
from simulator.costs.cost_model import CostModel
from simulator.costs.precision import kv_block_bytes
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.kv_cache.host_memory import HostTier, Prices
from simulator.kv_cache.radix_cache import RadixCache
from simulator.kv_cache.slot_counter import SlotCounter
from simulator.kv_cache.unshared_prefix_cache import UnsharedPrefixCache
from simulator.models.gpus import GIB
from simulator.models.sliding_window import Groups, layer_groups
from simulator.models.spec import ModelSpec
from simulator.scenario.assemble import Parts
from simulator.scenario.engine_config import EngineConfig


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
        lambda blocks: cost.swap_seconds(Step([], outgoing=[Swap(nobody, blocks)])),
        lambda blocks: cost.swap_seconds(Step([], incoming=[Swap(nobody, blocks)])),
    )


def windowed(engine: EngineConfig, model: ModelSpec) -> bool:
    """Say whether some layers keep the KV of a window alone."""
    return model.sliding_window > 0 and not engine.disable_hybrid_kv_cache_manager


def make_blocks(
    engine: EngineConfig, parts: Parts, caching: bool, shares: bool, named: bool
) -> BlockCounter:
    """Make the block manager that the scenario's memory rule needs.

    `shares` says whether prompts have contents that others may begin with, too.

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
        size = kv_block_bytes(parts.model, engine) * engine.tensor_parallel_size
        tier = HostTier(int(engine.kv_offloading_size * GIB // size))
        return BlockManager(parts.num_gpu_blocks, engine.block_size, caching, tier)
    if caching and not shares and not named:
        return UnsharedPrefixCache(parts.num_gpu_blocks, engine.block_size)
    if caching or named:
        return BlockManager(parts.num_gpu_blocks, engine.block_size, prefix_caching=caching)
    return _counter(engine, parts, parts.num_gpu_blocks, engine.block_size)


def _counter(engine: EngineConfig, parts: Parts, count: int, size: int) -> BlockCounter:
    """Make so many blocks without names."""
    speculation, model = engine.speculative_config, parts.model
    slides = windowed(engine, model)
    if speculation is None and not slides:
        return BlockCounter(count, size)
    groups = None
    if slides:
        full, others, _ = layer_groups(model.num_hidden_layers, model.windowed_layers)
        groups = Groups(full, others, model.sliding_window, engine.max_num_batched_tokens)
    ahead = speculation.lookahead if speculation is not None else 0
    return SlotCounter(
        count, size, lookahead=ahead, max_model_len=parts.max_model_len, groups=groups
    )
