"""Blocks of speculative decoding and of sliding windows, as a number.

A table outlives the tokens in it: the slots of rejected drafts stay for the next ones, and a layer
that keeps a window alone gives back what has left it.
"""

from collections.abc import Sequence

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.models.sliding_window import LayerGroups


class SlotCounter(BlockCounter):
    """Blocks whose tables have room for drafts.

    A running request holds `lookahead` slots more than it computes, `max_model_len` at most, in the
    tables of each of the `groups` of layers; with `looks_ahead_at_once` from its first step on.
    """

    looks_ahead_at_once = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        lookahead: int,
        max_model_len: int,
        groups: LayerGroups | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.lookahead = lookahead
        self.max_model_len = max_model_len
        self.groups = groups or LayerGroups()
        self.ordered = self.groups.windowed > 0  # what leaves a window is there for those behind
        self.tables: dict[Request, tuple[int, int]] = {}
        """Of each running request: the entries of a table, and those that left the window."""

    def _grown(self, request: Request, tokens: int) -> tuple[int, int]:
        """Return the table of a running request when it computes up to `tokens` tokens."""
        slots = min(tokens + self.lookahead, self.max_model_len)
        gone = self.groups.blocks_outside(request.computed, self.block_size)
        return max(-(-slots // self.block_size), self.tables[request][0]), gone

    def taken(self, request: Request, tokens: int) -> int:
        more = self._grown(request, tokens)[0] - self.tables[request][0]
        return self.groups.blocks_held(more, 0)

    def growth(self, request: Request, tokens: int) -> int:
        """Count the same, less those that leave the window; it may be below 0."""
        return self.groups.blocks_held(*self._grown(request, tokens)) - self.owned(request, tokens)

    def _first_slots(self, tokens: int) -> int:
        """Count the slots of a request that is admitted to compute so many tokens."""
        ahead = self.lookahead if self.looks_ahead_at_once else 0
        return min(tokens + ahead, self.max_model_len)

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        return self.groups.max_blocks(self._first_slots(tokens), self.block_size)

    def missing_whole(self, prompt: int, tokens: int, hits: Sequence[int]) -> int:
        """Count what the whole prompt, or the first chunk and slots ahead of it, need."""
        return max(self.groups.max_blocks(prompt, self.block_size), self.missing(tokens, hits))

    def admit(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        """Allocate a new request's blocks for `tokens` tokens."""
        self.tables[request] = -(-self._first_slots(tokens) // self.block_size), 0
        self.free -= self.owned(request, tokens)
        request.computed = tokens

    def extend(self, request: Request, tokens: int) -> None:
        self.free -= self.growth(request, tokens)
        self.tables[request] = self._grown(request, tokens)
        request.computed = tokens

    def owned(self, request: Request, tokens: int) -> int:
        return self.groups.blocks_held(*self.tables[request])

    def stored(self, tokens: int) -> int:
        """Count the tokens that are of use in all groups, of a request with so many computed."""
        groups = self.groups
        return groups.full * tokens + groups.windowed * min(tokens, groups.window)

    def release(self, request: Request) -> None:
        held = self.owned(request, request.computed)
        del self.tables[request]
        self.free += held - -(-request.computed // self.block_size)
        super().release(request)
