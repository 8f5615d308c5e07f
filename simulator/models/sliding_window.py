"""What layers with a sliding window keep and compute: blocks of KV cache, (query, key) pairs."""

from typing import NamedTuple


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
