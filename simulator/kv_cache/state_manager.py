"""Blocks of models with states: layers of linear attention or Mamba beside full attention.

As vLLM's MambaManager with `mamba_cache_mode: align` (0.33): blocks of all groups have the same
tokens, and a state that ends with a block is kept in a block. A prompt finds the last boundary at
which all groups of states have one, and full attention all before it.
"""

from collections.abc import Sequence

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request
from simulator.kv_cache.hybrid_manager import SALT, GroupHits, HybridManager

SEEN = 2
"""A state serves the next token alone, as does a window of the token before it and itself."""


class StateHits(GroupHits):
    """A prompt's cached prefix, and what decides how many blocks its next chunk takes."""

    def __init__(
        self, tables: Sequence[list[int]], junction: int, last: int, *, is_new: bool
    ) -> None:
        super().__init__(tables, junction)
        self.prefill_end = last  # tokens
        self.is_new = is_new  # this very step computes the state, so nobody reads it yet


class StateManager(HybridManager):
    """Blocks of groups with full attention, and of groups that keep states.

    `states` says which groups are the latter. A chunk takes one block of them, that of its end, and
    one more where the kernels export the state at the last boundary before it, as `exports` says.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        *,
        states: Sequence[bool],
        max_model_len: int,
        exports: bool = False,
        prefix_cache_retention_interval: int | None = None,
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            prefix_caching,
            windows=[SEEN * kept for kept in states],
            max_in_flight=0,
            max_model_len=max_model_len,
            prefix_cache_retention_interval=prefix_cache_retention_interval,
        )
        self._exports = exports
        self._new: set[int] = set()  # names of states that this step computes
        self._chunk_blocks = 1  # blocks of a state that the chunk at hand takes

    rests_states = True
    """A state that a request has named is new in one step alone. Before vLLM 0.33, as long as the
    request is at it."""

    # What a scheduler asks beside.

    def junction(self, request: Request) -> int:
        """Return the tokens up to which others share a prompt beyond its hits; 0: no further."""
        return self._junctions.get(request, 0) * self.block_size

    def exports(self, start: int, end: int, tokens: int) -> bool:
        """Say whether a chunk leaves a state beside that of its end: at the last boundary.

        It leaves one of `tokens` tokens at least, and lies beyond the chunk's first block.
        """
        size = self.block_size
        last = (tokens - 1) // size
        at_once = -(-end // size) - 2 > (start - 1) // size
        return self._exports and not start % size and at_once and start < last * size < end

    def end_step(self) -> None:
        """Hear that a step has been scheduled: from now on its states may be read."""
        self._new.clear()

    def _state_blocks(self, start: int, end: int, last: int) -> int:
        """Count the blocks that a chunk takes of a group of states."""
        size = self.block_size
        kept = 1
        if end >= last or self._retention != 0:
            kept += self.exports(start, end, end)
        return min(kept, -(-end // size) - -(-start // size))

    # What is cached.

    def match(self, request: Request) -> Sequence[int]:
        found = super().match(request)
        assert isinstance(found, GroupHits)
        self._junctions[request] = found.junction
        last = len(found) - 1
        is_new = last >= 0 and self.names(request, last + 1)[last] in self._new
        return StateHits(found.tables, found.junction, prefill_end(request), is_new=is_new)

    def finished(self, request: Request) -> None:
        self._junctions.pop(request, None)

    # What a request takes.

    def most_held(self, tokens: int) -> int:
        table = -(-tokens // self.block_size)
        held = min(table, 2 + self._exports)
        return len(self._full) * table + len(self._sliding) * held

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        assert isinstance(hits, StateHits)
        if hits.is_new:
            return self.usable + 1
        start = len(hits) * self.block_size
        return self._new_blocks(start, tokens, hits.prefill_end) + self._idle_hits(hits)

    def missing_whole(self, prompt: int, tokens: int, hits: Sequence[int]) -> int:
        return max(self.missing(min(prompt, self.max_model_len), hits), self.missing(tokens, hits))

    def _new_blocks(self, start: int, end: int, last: int) -> int:
        """Count the blocks that a chunk takes of all groups."""
        whole = -(-end // self.block_size) - -(-start // self.block_size)
        states = self._state_blocks(start, end, last)
        return len(self._full) * whole + len(self._sliding) * states

    def taken(self, request: Request, tokens: int) -> int:
        return self._new_blocks(request.computed, tokens, prefill_end(request))

    def in_use(self, tokens: int) -> int:
        unfilled = self._entries * self.block_size - tokens
        return (self.usable - self.free) * self.block_size - len(self._full) * unfilled

    # A request is scheduled.

    def _compute(self, request: Request, tokens: int) -> None:
        self._chunk_blocks = self._state_blocks(request.computed, tokens, prefill_end(request))
        super()._compute(request, tokens)
        self._chunk_blocks = 1

    def _grow(self, request: Request, entries: int) -> None:
        tables = self._tables[request]
        more = entries - len(tables[0])
        if more <= 0:
            return
        for group, table in enumerate(tables):
            count = min(self._chunk_blocks, more) if group in self._sliding else more
            table.extend([0] * (more - count))  # states that nobody will need
            table.extend(self._take(count))
        self._entries += more

    def _register_known(self, request: Request, tokens: int) -> None:
        super()._register_known(request, tokens)
        if not self.rests_states:
            self._rename(request, min(tokens, request.known - request.unknown))

    def _rename(self, request: Request, tokens: int) -> None:
        """Take the state at the last boundary of a prompt for new while nothing follows it."""
        last = (request.prompt_tokens - 1) // self.block_size
        table = self._tables[request][self._sliding[0]]
        if last and tokens // self.block_size == last and table[last - 1]:
            self._new.add(self.names(request, last)[last - 1])

    def take_ticks(self, decodes: DecodeSet, ticks: int, skip: int = 0) -> None:
        before = {*self._new} if self.delay else None
        fresh = [request for request in self._fresh if request.joined >= 0]
        super().take_ticks(decodes, ticks, skip)
        if before is None:
            return
        self._new = before  # what it registers are tokens of an earlier step
        for request in fresh if not self.rests_states else ():
            self._rename(request, request.known - 1)

    def register_last(self, request: Request, in_flight: int = 0) -> None:
        before = {*self._new}
        super().register_last(request, in_flight)
        self._new = before

    def _register(self, request: Request, end: int) -> None:
        first, group = self._hashed[request], self._sliding[0]
        super()._register(request, end)
        if end > first:
            salt, table = group * SALT, self._tables[request][group]
            for at, name in enumerate(self.names(request, end)[first:end], first):
                if table[at] and self._is_named(table[at], name + salt):
                    self._new.add(name)


def prefill_end(request: Request) -> int:
    """Return the tokens after which a request does nothing but decode."""
    return max(request.prompt_tokens, request.known - request.unknown - 1)
