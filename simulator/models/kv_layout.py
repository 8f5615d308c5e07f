"""How a KV cache is cut into blocks: one pool, and block tables for groups of layers.

As vLLM's kv_cache_utils.py (0.11 to 0.24) and kv_cache_planning.py (0.33) do.
"""

from math import ceil
from typing import NamedTuple

from simulator.models.dtypes import HALF
from simulator.models.modules import ATTENTION
from simulator.models.sliding_window import group_size, layer_groups
from simulator.models.spec import ModelSpec

FULL, WINDOW = ATTENTION
WINDOW_POOL, STATES = 0.8, 0.9
"""Of SGLang, swa_full_tokens_ratio and mamba_full_memory_ratio: tokens of layers with a window for
one of the others; bytes of states for one of the cache."""


class Tables(NamedTuple):
    """Block tables of a request that are alike."""

    number: int
    block_size: int  # tokens; 0: a block is a state
    window: int = 0  # tokens; 0: all are kept
    blocks: int = 0  # of each table, where they are states

    def needed(self, tokens: int, chunk: int) -> int:
        """Blocks of a request of so many tokens, of which a step computes `chunk` at most.

        As FullAttentionSpec, SlidingWindowSpec and MambaSpec say in `max_memory_usage_bytes`.
        """
        if not self.block_size:
            return self.number * self.blocks
        if not self.window:
            return self.number * ceil(tokens / self.block_size)
        return self.number * (ceil(min(self.window - 1 + chunk, tokens) / self.block_size) + 1)


class KvLayout(NamedTuple):
    """Blocks of one size, and who has how many of them."""

    block_bytes: float
    tables: tuple[Tables, ...]
    even: bool = True  # every table's blocks are of the engine's block_size

    def needed(self, tokens: int, chunk: int) -> int:
        """Blocks of a request of so many tokens."""
        return sum(one.needed(tokens, chunk) for one in self.tables)

    @property
    def least_block(self) -> int:
        """Tokens of the smallest block."""
        return min(one.block_size for one in self.tables if one.block_size)

    @property
    def tables_of_request(self) -> int:
        """Tables of a request."""
        return sum(one.number for one in self.tables)


def model_groups(model: ModelSpec) -> tuple[int, int]:
    """Return the tables of layers with full attention, and of those with a window."""
    counts = model.cached_layers
    if not model.keeps_window:
        return 1, 0
    return layer_groups(sum(counts.values()), counts.get(WINDOW, 0))[:2]


def kv_layout(
    model: ModelSpec,
    dtype: str,
    gpus: int,
    block_size: int,
    *,
    hybrid: bool,
    more_layers: float = 0,
    ahead: int = 0,
    states: int = 1,
) -> KvLayout:
    """Cut the cache of a model on each of so many GPUs into blocks.

    `hybrid`: layers with a window have tables of their own, else all keep all tokens.
    `more_layers` more keep all tokens. A request has so many `states` in layers of linear
    attention, each lengthened by `ahead` tokens.
    """
    share = model.kv_share(gpus)
    sizes = {kind: share * model.layer_bytes(kind, dtype) for kind in model.cached_layers}
    counts = dict(model.cached_layers)
    most = FULL if FULL in counts else WINDOW
    total = sum(counts[kind] * size for kind, size in sizes.items()) + more_layers * sizes[most]
    counts[most] += ceil(more_layers)
    windowed = hybrid and model.keeps_window and WINDOW in counts
    if model.linear is not None:
        state = model.linear.state_bytes(HALF, ahead) / gpus
        # Blocks so long that one of a layer with a cache is as large as a layer's state.
        long = max(block_size, ceil(state / sizes[most] / 16) * 16)
        held = group_size([counts[most], model.linear.layers])
        own = Tables(ceil(counts[most] / held), long)
        others = Tables(ceil(model.linear.layers / held), 0, 0, states)
        return KvLayout(long * sizes[most] * held, (own, others), even=False)
    if not windowed or len(counts) == 1:
        window = model.sliding_window if windowed else 0
        return KvLayout(block_size * total, (Tables(1, block_size, window),))
    page = block_size * max(sizes.values())
    held = group_size(list(counts.values()))
    tables = tuple(
        Tables(
            ceil(counts[kind] / held),
            int(page / sizes[kind]),
            model.sliding_window if kind == WINDOW else 0,
        )
        for kind in counts
    )
    even = all(one.block_size == block_size for one in tables)
    return KvLayout(page * held, tables, even)


def pooled_layout(
    model: ModelSpec, dtype: str, gpus: int, page_size: int, more_layers: float = 0
) -> KvLayout:
    """Cut the cache as SGLang does: a pool of tokens, and others of windows and of states.

    As set_num_token_hybrid and handle_max_mamba_cache (0.5); windows have a pool in the models of
    is_hybrid_swa_model: gpt-oss, Llama 4, Gemma 4. The blocks are of what a token takes in all.
    """
    apart = model.expert_bias or model.chunked or model.full_head_dim
    each = {FULL: 1.0, WINDOW: WINDOW_POOL if apart else 1.0}
    sizes = {kind: model.layer_bytes(kind, dtype) for kind in model.cached_layers}
    total = sum(each[kind] * n * sizes[kind] for kind, n in model.cached_layers.items())
    total += more_layers * max(sizes.values())
    if model.linear is not None:
        total *= 1 + STATES
    return KvLayout(page_size * total * model.kv_share(gpus), (Tables(1, page_size),))
