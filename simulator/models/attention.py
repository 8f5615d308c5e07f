"""Attention that keeps less than all heads' keys and values of all tokens: latents, windows."""

from collections.abc import Mapping
from dataclasses import dataclass

FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}
"""Families whose layers have a window but for each second or sixth, by model_type."""
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024), under the names of config.json.

    The cache holds one vector per token and layer, of `kv_lora_rank` + `qk_rope_head_dim` numbers,
    whatever the heads; so with tensor parallelism every GPU holds all of it (vLLM's
    MLAAttentionSpec, page_size_bytes).
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0  # 0: queries are projected at once

    @property
    def cached(self) -> int:
        """Numbers that a token and layer take in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def parameters(self, hidden: int, heads: int) -> int:
        """Weights of one layer's projections, the norms of the latents left out."""
        width = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        rank = self.q_lora_rank
        query = rank * (hidden + width) if rank else hidden * width
        down = hidden * self.cached
        up = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + down + up + heads * self.v_head_dim * hidden

    @property
    def prompt_flops(self) -> int:
        """FLOPs of a head and (query, key) pair where keys and values are spelt out."""
        return 2 * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)

    @property
    def decode_flops(self) -> int:
        """FLOPs of the same where the query is multiplied with the latents themselves."""
        return 2 * (self.cached + self.kv_lora_rank)


def read_latent(raw: Mapping[str, object]) -> Latent | None:
    """Read the sizes of a config.json; None where it has no latents.

    ValueError, `key: what is wrong`, where one is missing or no positive whole number.
    """
    deepseek = str(raw.get("model_type")).startswith("deepseek")
    if raw.get("kv_lora_rank") is None and not deepseek:
        return None
    sizes = {key: _size(raw, key) for key in LATENT}
    rank = 0 if raw.get("q_lora_rank") is None else _size(raw, "q_lora_rank")
    return Latent(**sizes, q_lora_rank=rank)


def read_window(raw: Mapping[str, object], layers: int, longest: int) -> tuple[int, int]:
    """Give the tokens of a config.json's sliding window, and the layers that have it; else 0, 0.

    `layer_types` names each layer's kind (gpt-oss and new files of other families); without it all
    layers have the window (Mistral-7B-v0.1), in Qwen's families those from `max_window_layers` on,
    in Gemma's all but each `sliding_window_pattern`-th.
    A window as long as the model's longest request is none. ValueError where a key is wrong.
    """
    if raw.get("sliding_window") is None or not raw.get("use_sliding_window", True):
        return 0, 0
    window = _size(raw, "sliding_window")
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise ValueError(f"layer_types: must name {layers} layers, not {len(kinds)}")
        windowed = kinds.count("sliding_attention")
    elif "use_sliding_window" in raw and raw.get("max_window_layers") is not None:
        windowed = max(layers - _size(raw, "max_window_layers"), 0)
    elif (kind := raw.get("model_type")) in FULL_EVERY:
        given = raw.get("sliding_window_pattern") is not None
        every = _size(raw, "sliding_window_pattern") if given else FULL_EVERY[str(kind)]
        windowed = layers - layers // every
    else:
        windowed = layers
    return (window, windowed) if windowed and window < longest else (0, 0)


def _size(raw: Mapping[str, object], key: str) -> int:
    """Give a positive whole number."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: must be a positive whole number, not {value!r}")
    return value


def layer_groups(layers: int, windowed: int) -> tuple[int, int, int]:
    """Give the groups of layers with full attention, those with a window, and the layers of each.

    vLLM's hybrid KV cache manager (0.33, kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size)
    gives each group block tables of its own, over one pool of blocks that hold one group's layers:
    as many as the rarer kind has, or, where the kinds differ by less than a quarter, the other.
    """
    full = layers - windowed
    if not full or not windowed:
        return int(not windowed), int(not full), layers
    size, most = min(full, windowed), max(full, windowed)
    size = most if most < 1.25 * size else size
    return -(-full // size), -(-windowed // size), size


@dataclass(frozen=True)
class Groups:
    """Block tables of a request: those of groups with full attention, and with a window."""

    full: int = 1
    windowed: int = 0
    window: int = 0  # tokens
    chunk: int = 0  # tokens that a step computes of one request, at most

    def held(self, table: int, gone: int) -> int:
        """Count the blocks of tables of `table` entries, `gone` of which have left the window."""
        return self.full * table + self.windowed * (table - gone)

    def gone(self, computed: int, block_size: int) -> int:
        """Count the blocks that the query after so many tokens cannot see any more."""
        return max(computed + 1 - self.window, 0) // block_size if self.windowed else 0

    def most(self, tokens: int, block_size: int) -> int:
        """Count the blocks that a request of so many tokens holds at most, while it is computed.

        As vLLM's admission (SlidingWindowSpec.max_admission_blocks_per_request).
        """
        table = -(-tokens // block_size)
        window = -(-(self.window - 1 + self.chunk) // block_size) + 1
        return self.full * table + self.windowed * min(table, window)


def window_blocks(tokens: int, window: int, block_size: int) -> int:
    """Count the blocks that a request of so many tokens holds in layers with a window.

    As vLLM's SlidingWindowManager: what the next query cannot see is given back, in whole blocks,
    before the block for its own token is taken.
    """
    return -(-tokens // block_size) - max(tokens - window, 0) // block_size


def window_pairs(start: int, tokens: int, window: int) -> int:
    """Count the (query, key) pairs of `tokens` queries after `start` within a window.

    Query p, counted from 1, sees min(p, window) keys.
    """
    end = start + tokens
    return _pairs_upto(end, window) - _pairs_upto(start, window)


def _pairs_upto(end: int, window: int) -> int:
    short = min(end, window)
    return short * (short + 1) // 2 + (end - short) * window
