"""Blocks with names of speculative decoding: tables have room for drafts, which may be rejected.

As vLLM (0.33: kv_cache_manager.py, kv_cache_utils.py). EAGLE and MTP compute a block's last entry
in their own layers from the token behind it: its hash covers that, too. Before 0.33, the last block
that a prompt finds is not used instead.
"""

from collections.abc import Sequence

from simulator.core.request import Request
from simulator.kv_cache.block_hashes import known_hashes
from simulator.kv_cache.block_manager import BlockManager
from simulator.kv_cache.hybrid_manager import HybridManager


class DraftBlocks(BlockManager):
    """Blocks with names whose tables have `lookahead` slots more than a request computes.

    A table outlives what is in it, and has slots for `max_model_len` tokens at most. Tokens that a
    step in flight computes, `Request.unknown` of them, may not come to stay.
    """

    lookahead = 0
    max_model_len: int
    looks_ahead_at_once = True
    hashes_beyond = 0
    """Tokens behind a block that its hash covers."""
    drops_last = False
    """Of the blocks that a prompt finds, the last is not used."""
    _admits = False

    def names(self, request: Request, count: int) -> list[int]:
        return known_hashes(request, count, self.block_size, self.hashes_beyond)

    def match(self, request: Request) -> Sequence[int]:
        hits = super().match(request)
        return hits[:-1] if self.drops_last else hits

    def _slots(self, tokens: int, *, at_first: bool) -> int:
        """Count the slots of a request that computes up to `tokens` tokens."""
        ahead = self.lookahead if self.looks_ahead_at_once or not at_first else 0
        return min(tokens + ahead, self.max_model_len)

    def _table(self, tokens: int) -> int:
        return -(-self._slots(tokens, at_first=self._admits) // self.block_size)

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        return super().missing(self._slots(tokens, at_first=True), hits)

    def missing_whole(self, prompt: int, tokens: int, hits: Sequence[int]) -> int:
        return max(super().missing(prompt, hits), self.missing(tokens, hits))

    def taken(self, request: Request, tokens: int) -> int:
        assert request.blocks is not None
        more = -(-(tokens + self.lookahead) // self.block_size) - len(request.blocks)
        return max(self._table(tokens) - len(request.blocks), 0) if more > 0 else 0

    def hold(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        self._admits = True
        super().hold(request, hits, tokens)
        self._admits = False

    def _register_known(self, request: Request, tokens: int) -> None:
        if self.prefix_caching:
            self._register(request, min(tokens, request.known) // self.block_size)

    def _register(self, request: Request, end: int) -> None:
        if end > self._hashed[request]:
            known = (request.known - self.hashes_beyond) // self.block_size
            super()._register(request, min(end, known))


class DraftHybridBlocks(DraftBlocks, HybridManager):
    """The same for groups of layers of which some have a window."""

    missing_whole = HybridManager.missing_whole

    def taken(self, request: Request, tokens: int) -> int:
        more = self._table(tokens) - len(self._tables[request][0])
        return self.num_groups * max(more, 0)
