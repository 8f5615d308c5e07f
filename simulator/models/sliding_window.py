"""What layers with a sliding window keep and compute: blocks of KV cache, (query, key) pairs."""

from collections.abc import Sequence
from typing import NamedTuple


def layer_groups(layers: int, windowed: int) -> tuple[int, int, int]:
    """Return the groups of layers with full attention, those with a window, and the layers of each.

    vLLM's hybrid KV cache manager (0.33, kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size)
    gives each group block tables of its own, over one pool of blocks that hold one group's layers:
    as many as the rarer kind has, or, where the other has less than half as many more, that one.
    """
    full = layers - windowed
    if not full or not windowed:
        return int(not windowed), int(not full), layers
    size = group_size([full, windowed])
    return -(-full // size), -(-windowed // size), size


def group_size(counts: Sequence[int]) -> int:
    """Return the layers of a group where there are so many of each kind."""
    least, most = min(counts), max(counts)
    return most if most < 1.5 * least else least


class LayerGroups(NamedTuple):
    """Block tables of a request: those of groups with full attention, and with a window."""

    full: int = 1
    windowed: int = 0
    window: int = 0  # tokens
    chunk: int = 0  # tokens that a step computes of one request, at most

    def blocks_held(self, table: int, gone: int) -> int:
        """Count the blocks of tables of `table` entries, `gone` of which have left the window."""
        return self.full * table + self.windowed * (table - gone)

    def blocks_outside(self, computed: int, block_size: int) -> int:
        """Count the blocks that the query after so many tokens cannot see any more.

        As vLLM's SlidingWindowManager, which gives them back, in whole blocks, before the block
        for the query's own token is taken.
        """
        return max(computed + 1 - self.window, 0) // block_size if self.windowed else 0

    def max_blocks(self, tokens: int, block_size: int) -> int:
        """Count the blocks that a request of so many tokens holds at most, while it is computed.

        As vLLM's admission (SlidingWindowSpec.max_admission_blocks_per_request).
        """
        table = -(-tokens // block_size)
        window = -(-(self.window - 1 + self.chunk) // block_size) + 1
        return self.full * table + self.windowed * min(table, window)


def window_pairs(start: int, tokens: int, window: int) -> int:
    """Count the (query, key) pairs of `tokens` queries after `start` within a window.

    Query p, counted from 1, sees min(p, window) keys.
    """
    end = start + tokens
    return _pairs_upto(end, window) - _pairs_upto(start, window)


def _pairs_upto(end: int, window: int) -> int:
    short = min(end, window)
    return short * (short + 1) // 2 + (end - short) * window
