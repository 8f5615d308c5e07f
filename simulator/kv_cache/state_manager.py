"""Blocks of models with states: layers of linear attention or Mamba beside full attention.

As vLLM's MambaManager with `mamba_cache_mode: align` (0.33): blocks of all groups have the same
tokens, and a state that ends with a block is kept in a block. A prompt finds the last boundary at
which all groups of states have one, and full attention all before it.

With `prefix_match_unit` a prompt's last boundary of so many tokens is found, too: inside a block,
of which the one that finds it takes a copy.
"""

from collections.abc import Sequence

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request
from simulator.kv_cache.block_hashes import known_hashes
from simulator.kv_cache.hybrid_manager import SALT, GroupHits, HybridManager

SEEN = 2
"""A state serves the next token alone, as does a window of the token before it and itself."""


class StateHits(GroupHits):
    """A prompt's cached prefix, and what decides how many blocks its next chunk takes."""

    tokens = 0
    prefill_end = 0  # tokens
    is_new = False  # this very step computes the state, so nobody reads it yet


class StateManager(HybridManager):
    """Blocks of groups with full attention, and of groups that keep states.

    `states` says which groups are the latter. A chunk takes one block of them, that of its end, and
    one more where the kernels export the state at the last boundary before it: a multiple of
    `exports` tokens after the chunk's beginning; 0: they export none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        *,
        states: Sequence[bool],
        max_model_len: int,
        exports: int = 0,
        prefix_cache_retention_interval: int | None = None,
        prefix_match_unit: int | None = None,
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
        self._filled = self._full
        self.unit = prefix_match_unit or block_size  # tokens between boundaries that are looked up
        self._exports = exports
        self._new: set[int] = set()  # names of states that this step computes
        self._chunk_blocks = 1  # blocks of a state that the chunk at hand takes
        self._split: dict[Request, bool] = {}  # whose last block is copied next; True: of a hit
        self._copies: dict[int, list[int]] = {}  # by group, the blocks that this step copies

    rests_states = True
    """A state that a request has named is new in one step alone. Before vLLM 0.33, as long as the
    request is at it."""

    # What a scheduler asks beside.

    def junction(self, request: Request) -> int:
        """Return the tokens up to which others share a prompt beyond its hits; 0: no further."""
        return self._junctions.get(request, 0)

    def last_boundary(self, tokens: int) -> int:
        """Return the last boundary before the end of so many tokens at which one may be found."""
        return (tokens - 1) // self.unit * self.unit

    def exports(self, start: int, end: int, tokens: int) -> bool:
        """Say whether a chunk leaves a state beside that of its end: at the last boundary.

        It leaves one of `tokens` tokens at least, and lies beyond the chunk's first block.
        """
        size, unit, last = self.block_size, self.unit, self.last_boundary(tokens)
        aligned = self._exports > 0 and not start % unit and not (last - start) % self._exports
        at_once = -(-end // size) - 2 > (start - 1) // size
        return aligned and at_once and start + unit <= last < end

    def end_step(self) -> None:
        """Hear that a step has been scheduled: from now on its states may be read."""
        self._new.clear()
        for group in sorted(self._copies):
            for block in self._copies[group]:
                self._drop([block])
        self._copies.clear()

    def _state_blocks(self, start: int, end: int, last: int) -> int:
        """Count the blocks that a chunk takes of a group of states."""
        size = self.block_size
        kept = 1
        if end >= last or self._retention != 0:
            kept += self.exports(start, end, end)
        return min(kept, -(-end // size) - -(-start // size))

    # What is cached.

    def names(self, request: Request, count: int) -> list[int]:
        per_block = self.block_size // self.unit
        return known_hashes(request, count * per_block, self.unit)[per_block - 1 :: per_block]

    def _name_of(self, request: Request, tokens: int) -> int:
        """Return the name of what ends with so many tokens, a multiple of the unit."""
        count = tokens // self.unit
        return known_hashes(request, count, self.unit)[count - 1]

    def match(self, request: Request) -> Sequence[int]:
        size, unit, known = self.block_size, self.unit, self._block_of
        limit = request.known - 1
        names = self.names(request, limit // size)
        whole = self._longest(names, limit // size, self._full)
        fine = known_hashes(request, limit // unit, unit)
        # Inside the next block, the last boundary that all groups with full attention have.
        end, most = whole * size, min((whole + 1) * size - unit, limit // unit * unit)
        last = self._find(fine, most, end, self._full) or end
        start = self._find(fine, last, 0, self._sliding)
        tables, at = [], -(-start // size) - 1
        for group in range(self.num_groups):
            salt = group * SALT
            if group in self._sliding:
                found = [0] * at + [known[fine[start // unit - 1] + salt]] if start else []
            else:
                found = [known[key + salt] for key in names[: min(start, end) // size]]
                if len(found) <= at:
                    key = names[at] if at < whole else fine[last // unit - 1]
                    found.append(known[key + salt])
            tables.append(found)
        hits = StateHits(tables, last if last > start else 0)
        hits.tokens, hits.prefill_end = start, prefill_end(request)
        hits.is_new = start > 0 and fine[start // unit - 1] in self._new
        self._junctions[request] = hits.junction
        return hits

    def _find(self, fine: Sequence[int], most: int, least: int, groups: Sequence[int]) -> int:
        """Return the last boundary, in tokens, that all these groups have; 0: none does."""
        known, salts = self._block_of, [group * SALT for group in groups]
        for at in range(most // self.unit - 1, least // self.unit - 1, -1):
            if all(fine[at] + salt in known for salt in salts):
                return (at + 1) * self.unit
        return 0

    def tokens_of(self, hits: Sequence[int]) -> int:
        assert isinstance(hits, StateHits)
        return hits.tokens

    def finished(self, request: Request) -> None:
        self._junctions.pop(request, None)

    # What a request takes.

    def most_held(self, tokens: int) -> int:
        table = -(-tokens // self.block_size)
        held = min(table, 2 + (self._exports > 0))
        return len(self._full) * table + len(self._sliding) * held

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        assert isinstance(hits, StateHits)
        if hits.is_new:
            return self.usable + 1
        copied = self.num_groups if hits.tokens % self.block_size else 0
        taken = self._new_blocks(hits.tokens, tokens, hits.prefill_end)
        return taken + copied + self._idle_hits(hits)

    def missing_whole(self, prompt: int, tokens: int, hits: Sequence[int]) -> int:
        return max(self.missing(min(prompt, self.max_model_len), hits), self.missing(tokens, hits))

    def _new_blocks(self, start: int, end: int, last: int) -> int:
        """Count the blocks that a chunk takes of all groups."""
        whole = -(-end // self.block_size) - -(-start // self.block_size)
        states = self._state_blocks(start, end, last)
        return len(self._full) * whole + len(self._sliding) * states

    def taken(self, request: Request, tokens: int) -> int:
        copied = len(self._sliding) if request in self._split else 0
        return copied + self._new_blocks(request.computed, tokens, prefill_end(request))

    # A request is scheduled.

    def hold(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        if self.tokens_of(hits) % self.block_size:
            self._split[request] = True
        super().hold(request, hits, tokens)

    def _compute(self, request: Request, tokens: int) -> None:
        self._chunk_blocks = self._state_blocks(request.computed, tokens, prefill_end(request))
        super()._compute(request, tokens)

    def _grow(self, request: Request, entries: int) -> None:
        tables, hit = self._tables[request], self._split.pop(request, None)
        more = max(entries - len(tables[0]), 0)
        if not more and hit is None:
            return
        at = len(tables[0]) - 1
        for group, table in enumerate(tables):
            states = group in self._sliding
            if hit or (states and hit is not None):
                self._copy(request, group, at, hit=bool(hit))
            if more:
                count = min(max(self._chunk_blocks, 1), more) if states else more
                table.extend([0] * (more - count))  # states that nobody will need
                table.extend(self._take(count))
        self._entries += more

    def _copy(self, request: Request, group: int, at: int, *, hit: bool) -> None:
        """Copy an entry of a table: that of a hit becomes the request's own, else what is found."""
        table, [block] = self._tables[request][group], self._take(1)
        source, twice = table[at], table[at]
        if hit:
            table[at] = twice = block
        else:
            for key in self._keys.get(source, [])[:1]:
                self._strike(source)
                self._name(block, group, key - group * SALT)
        self._sharers[twice] = self._sharers.get(twice, 0) + 1
        self.shared += 1
        self._copies.setdefault(group, []).extend((source, block))

    def _register_known(self, request: Request, tokens: int) -> None:
        super()._register_known(request, tokens)
        known = min(tokens, request.known - request.unknown)
        self._mark_last(request, known)
        if self._chunk_blocks > 1:
            self._mark_left(request, tokens)
        if not self.rests_states:
            self._rename(request, known)

    def _mark_last(self, request: Request, known: int) -> None:
        """Name a prompt's last boundary, if it is inside a block and so many tokens reach it."""
        last = self.last_boundary(request.prompt_tokens)
        at, inside = divmod(last, self.block_size)
        if not inside or last > known:
            return
        name = self._name_of(request, last)
        for group, table in enumerate(self._tables[request]):
            key = name + group * SALT
            if group not in self._sliding:
                self._insert(key, table[at])
            elif (
                known == last
                and self._chunk_blocks < 2
                and key not in self._keys.get(table[at], ())
            ):
                self._name(table[at], group, name)
                self._split[request] = False

    def _mark_left(self, request: Request, end: int) -> None:
        """Name the state that a chunk leaves beside that of its end, if it is one to be found."""
        last = self.last_boundary(end)
        at, name = -(-end // self.block_size) - 2, self._name_of(request, last)
        found = last in (self.last_boundary(request.prompt_tokens), self._junctions[request])
        if not last % self.block_size:
            segment = (self._retention or 0) // self.block_size
            found |= self._names_all() or (segment > 0 and at % segment == segment - 1)
        for group in self._sliding:
            block, key = self._tables[request][group][at], name + group * SALT
            if not found:
                self._strike(block)
            elif key not in self._keys.get(block, ()):
                self._name(block, group, name)

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
        more = end > self._hashed[request]
        super()._register(request, end)
        if more:
            self._mark_last(request, end * self.block_size)

    def _name(self, block: int, group: int, name: int) -> None:
        super()._name(block, group, name)
        if group in self._sliding:
            self._new.add(name)

    def release(self, request: Request) -> None:
        self._split.pop(request, None)
        super().release(request)


def prefill_end(request: Request) -> int:
    """Return the tokens after which a request does nothing but decode."""
    return max(request.prompt_tokens, request.known - request.unknown - 1)
