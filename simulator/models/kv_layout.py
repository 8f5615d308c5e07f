"""How a KV cache is cut into blocks: one pool, and block tables for groups of layers.

As vLLM's kv_cache_utils.py (0.11 to 0.24) and kv_cache_planning.py (0.33) do.
"""

from collections.abc import Mapping, Sequence
from math import ceil, lcm
from typing import NamedTuple

from simulator.models.dtypes import HALF
from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import Gpu
from simulator.models.modules import FULL, WINDOW
from simulator.models.spec import ModelSpec

WINDOW_POOL, STATE_POOL = 0.8, 0.9
"""Of SGLang, swa_full_tokens_ratio and mamba_full_memory_ratio: tokens of layers with a window for
one of the others; bytes of states for one of the cache."""


KERNEL_BLOCK = 16
"""Tokens of the smallest block that vLLM's kernels of attention read."""
EXPORTED = 64
"""Tokens at whose multiples FlashInfer's kernels of linear attention export a state
(FLASHINFER_GDN_CHECKPOINT_ALIGNMENT)."""


def exports_states(model: ModelSpec, gpu: Gpu, sizes: EngineSizes) -> bool:
    """Say whether a chunk's kernels keep the state at its last boundary beside that of its end.

    As MambaMixer2 and _resolve_gdn_prefill_backend, the latter with CUDA 13.
    """
    if model.linear is None or not sizes.term(f"exports, Mamba-2: {model.linear.is_mamba}"):
        return False
    capability = gpu.compute_capability
    narrow = capability in (10.0, 10.3, 12.0) and model.linear.key_head_dim == 128
    return model.linear.is_mamba or narrow or capability == 9.0


class Tables(NamedTuple):
    """Block tables of a request that are alike."""

    number: int
    block_size: int  # tokens; 0: a block is a state
    window: int = 0  # tokens; 0: all are kept
    blocks: int = 0  # of each table, where they are states, or beside a window that begins in one

    def needed(self, tokens: int, chunk: int) -> int:
        """Blocks of a request of so many tokens, of which `chunk` at most are being computed.

        As FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec and MambaSpec say in
        `max_memory_usage_bytes`.
        """
        if not self.block_size:
            return self.number * self.blocks
        if not self.window:
            return self.number * ceil(tokens / self.block_size)
        kept = ceil(min(self.window - 1 + chunk, tokens) / self.block_size)
        return self.number * (kept + self.blocks)


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


def model_groups(model: ModelSpec) -> tuple[int, int]:
    """Return the tables of layers with full attention, and of those with a window."""
    if not model.keeps_window:
        return 1, 0
    tables = kv_layout(model, EngineSizes(disable_hybrid_kv_cache_manager=False)).tables
    windowed = sum(one.number for one in tables if one.window)
    return sum(one.number for one in tables) - windowed, windowed


def group_size(counts: Sequence[int]) -> int:
    """Return the layers of a group where there are so many of each kind.

    vLLM's hybrid KV cache manager (0.33, _get_kv_cache_groups_uniform_page_size) gives each group
    block tables of its own, over one pool of blocks that hold one group's layers: as many as the
    rarer kind has, or, where the other has less than half as many more, that one.
    """
    least, most = min(counts), max(counts)
    return most if most < 1.5 * least else least


def kv_layout(model: ModelSpec, sizes: EngineSizes) -> KvLayout:
    """Cut the cache of a model on each GPU into blocks.

    Layers with a window have tables of their own under the hybrid manager, else all keep all
    tokens, as layers that draft do. A request has a state in each layer of linear attention, with a
    prefix cache two, and one for each token drafted, by which all are lengthened.
    """
    gpus, block_size, dtype = sizes.tensor_parallel_size, sizes.block_size, sizes.cache(model)
    more_layers, drafts = sizes.more_layers(model), sizes.speculative_config
    ahead = drafts.lookahead if drafts else 0
    bytes_of = {kind: model.layer_bytes(kind, dtype, gpus) for kind in model.cached_layers}
    if sizes.fraction_of == "static":
        return _pooled(model, sizes, bytes_of, more_layers)
    counts = dict(model.cached_layers)
    most = FULL if FULL in counts else WINDOW
    total = sum(counts[kind] * size for kind, size in bytes_of.items())
    total += more_layers * bytes_of[most]
    counts[most] += ceil(more_layers)
    windowed = sizes.has_windows(model) and WINDOW in counts
    window = (model.sliding_window + model.chunked, int(not model.chunked))
    kept = {WINDOW: window} if windowed else {}
    if model.linear is not None:
        state = model.linear.state_bytes(HALF, ahead) / gpus
        # Blocks so long that one of a layer with a cache is as large as a layer's state.
        exported = EXPORTED if sizes.exports_states and not model.linear.is_mamba else 1
        unit = lcm(max(block_size, KERNEL_BLOCK), exported)
        long = ceil(state / bytes_of[most] / unit) * unit
        held = group_size([counts[most], model.state_layers])
        own = Tables(ceil(counts[most] / held), long)
        states = 1 + sizes.enable_prefix_caching + sizes.exports_states + ahead
        others = Tables(ceil(model.state_layers / held), 0, 0, states)
        return KvLayout(long * bytes_of[most] * held, (own, others), even=False)
    if not windowed or len(counts) == 1:
        return KvLayout(block_size * total, (Tables(1, block_size, *kept.get(most, ())),))
    page = block_size * max(bytes_of.values())
    held = group_size(list(counts.values()))
    tables = tuple(
        Tables(ceil(counts[kind] / held), int(page / bytes_of[kind]), *kept.get(kind, ()))
        for kind in counts
    )
    even = all(one.block_size == block_size for one in tables)
    return KvLayout(page * held, tables, even)


def _pooled(
    model: ModelSpec, sizes: EngineSizes, bytes_of: Mapping[str, float], more_layers: float
) -> KvLayout:
    """Cut the cache as SGLang does: a pool of tokens, and others of windows and of states.

    As set_num_token_hybrid and handle_max_mamba_cache (0.5); windows have a pool in the models of
    is_hybrid_swa_model: gpt-oss, Llama 4, Gemma 4. The blocks are of what a token takes in all.
    """
    apart = model.expert_bias or model.chunked or model.full_head_dim
    each = {FULL: 1.0, WINDOW: WINDOW_POOL if apart else 1.0}
    total = sum(each[kind] * n * bytes_of[kind] for kind, n in model.cached_layers.items())
    total += more_layers * max(bytes_of.values())
    if model.linear is not None:
        total *= 1 + STATE_POOL
    return KvLayout(sizes.block_size * total, (Tables(1, sizes.block_size),))
