"""Blocks of speculative decoding: tables have room for drafts, which may be rejected.

With names as vLLM has them (0.33: kv_cache_manager.py, kv_cache_utils.py). EAGLE and MTP compute a
block's last entry in their own layers from the token behind it: its hash covers that, too. Before
0.33, the last block that a prompt finds is not used instead. As a number where nobody shares them:
a table outlives the tokens in it, since the slots of rejected drafts stay for the next ones, and a
layer that keeps a window alone gives back what has left it. SGLang's prefix tree has pairs as keys.
"""

from collections.abc import Sequence

from simulator.core.request import Request
from simulator.kv_cache.block_hashes import known_hashes
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.kv_cache.hybrid_manager import HybridManager
from simulator.kv_cache.radix_cache import Piece, RadixCache, pieces_of
from simulator.models.sliding_window import LayerGroups


class LooksAhead:
    """Tables with `lookahead` slots more than a request computes, `max_model_len` at most."""

    lookahead = 0
    max_model_len: int
    looks_ahead_at_once = True  # from a request's first step on

    def _slots(self, tokens: int, *, at_first: bool) -> int:
        """Count the slots of a request that computes up to `tokens` tokens."""
        ahead = self.lookahead if self.looks_ahead_at_once or not at_first else 0
        return min(tokens + ahead, self.max_model_len)


class DraftBlocks(LooksAhead, BlockManager):
    """Blocks with names whose tables outlive what is in them.

    Tokens that a step in flight computes, `Request.unknown` of them, may not come to stay.
    """

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


class SlotCounter(LooksAhead, BlockCounter):
    """Blocks as a number; each of the `groups` of layers has a table of a running request."""

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

    def most_held(self, tokens: int) -> int:
        return self.groups.max_blocks(tokens, self.block_size)

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        return self.most_held(self._slots(tokens, at_first=True))

    def missing_whole(self, prompt: int, tokens: int, hits: Sequence[int]) -> int:
        """Count what the whole prompt, or the first chunk and slots ahead of it, need."""
        return max(self.most_held(prompt), self.missing(tokens, hits))

    def admit(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        """Allocate a new request's blocks for `tokens` tokens."""
        self.tables[request] = -(-self._slots(tokens, at_first=True) // self.block_size), 0
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


class EagleTree(RadixCache):
    """The tree of pairs: of n tokens it has n - 1, and each names the place of its first token.

    So a prompt finds a token if the one behind it is the same, too (`is_bigram` in SGLang 0.5.23's
    `mem_cache/radix_cache.py`).
    """

    reads_next = 1

    def _content(self, request: Request, tokens: int, start: int = 0) -> list[Piece]:
        """Name pairs: as their first token within a run, by both tokens where two runs meet."""
        runs = pieces_of(request, tokens + 1, start)
        found: list[Piece] = []
        for number, (name, first, count) in enumerate(runs, 1):
            if count > 1:
                found.append((name, first, count - 1))
            if number < len(runs):
                other, begin, _ = runs[number]
                found.append(((name, first + count - 1, other, begin), 0, 1))
        return found
