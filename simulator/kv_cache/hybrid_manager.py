"""Blocks of models whose layers are of two kinds: full attention, and a sliding window.

As vLLM's hybrid KV cache manager (0.33: kv_cache_coordinator.py, single_type_kv_cache_manager.py):
layers are grouped by kind, and each group has a block table of its own in every request, over one
pool of blocks of one size. A window's group gives back what no query will see any more.
"""

from collections.abc import Sequence

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request, by_admission
from simulator.kv_cache.block_manager import BlockManager
from simulator.util.errors import MappingError

SALT = 0x9E3779B97F4A7C15
"""Between the names that groups have for the same tokens: odd, and far from any run's length."""


class GroupHits(list[int]):
    """A prompt's cached prefix, as the manager's `match` finds it: so many blocks in each table.

    The list itself has the first group's. `junction` is the end of what the groups with full
    attention have, in tokens, where that is longer, else 0.
    """

    def __init__(self, tables: Sequence[list[int]], junction: int = 0) -> None:
        super().__init__(tables[0])
        self.tables = tables  # by group; 0: a block that nobody reads any more
        self.junction = junction


class HybridManager(BlockManager):
    """Blocks with names for several groups of layers, and, if asked for, a prefix cache.

    `windows` are those of the groups in tokens, 0 for full attention; all that are not 0 are alike.
    A step computes up to `max_in_flight` tokens of a request before the tokens of an earlier one
    count as processed, which bounds what a window's table holds; no request is longer than
    `max_model_len` tokens. Block 0 is vLLM's null block: it stands in a table for what has left the
    window.

    `prefix_cache_retention_interval` is vLLM's, in tokens: which of a window's blocks get a name.
    Those that a hit needs which ends at a multiple of it (None: at any block), at the last block
    before the end of the prompt, or at the junction; 0: at the latter two alone.

    A window's blocks leave when their request is scheduled, before it takes new ones, and by the
    tokens whose step is over: with async_scheduling one step later.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        *,
        windows: Sequence[int],
        max_in_flight: int,
        max_model_len: int,
        prefix_cache_retention_interval: int | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, prefix_caching)
        self.leaps = False
        self.num_groups = len(windows)
        self.window = max(windows)
        if not self.window or any(window not in (0, self.window) for window in windows):
            raise MappingError("windows", f"must be 0 or one length, not {windows}")
        self.max_model_len = max_model_len
        self._sliding = [group for group, window in enumerate(windows) if window]
        self._full = [group for group, window in enumerate(windows) if not window]
        self._filled: Sequence[int] = range(self.num_groups)  # whose entries all are blocks
        reach = min(self.window - 1 + max_in_flight, max_model_len)
        self._cap = -(-reach // block_size) + 1  # entries, one for a window that begins in a block
        # A window's blocks that a hit needs before its end.
        self._seen = -(-(self.window - 1) // block_size)
        self._needed = max(self._seen, 1)
        self._retention = prefix_cache_retention_interval
        self._keys: dict[int, list[int]] = {}  # by block, the names that it is found by
        self._junctions: dict[Request, int] = {}
        self._tables: dict[Request, list[list[int]]] = {}  # by group
        self._gone: dict[Request, int] = {}  # entries that have left the window
        self._entries = 0  # of one table, summed over the requests
        # With async_scheduling: whom the step in flight computes, outside the decode set, and the
        # tokens it had before; the same of the step being scheduled.
        self._in_flight: dict[Request, int] = {}
        self._scheduled: dict[Request, int] = {}
        # Requests scheduled one by one, and the ticks at which they are not like other members.
        self._fresh: dict[Request, int] = {}

    # What is cached.

    def match(self, request: Request) -> Sequence[int]:
        """Return the cached blocks of the longest prefix that every group has, as GroupHits.

        A group with full attention needs all of it, one with a window the blocks that the next
        query sees.
        """
        limit = (request.known - 1) // self.block_size if self.prefix_caching else 0
        hashes = self.names(request, limit) if limit else []
        longest = self._longest(hashes, limit, self._full) if self._full else limit
        end = self._longest_window(hashes, longest)
        skipped = self._skipped(end * self.block_size)
        known = self._block_of
        tables = []
        for group in range(self.num_groups):
            first = skipped if group in self._sliding else 0
            salt = group * SALT
            found = [known[key + salt] for key in hashes[first:end]]
            tables.append([0] * first + found)
        junction = longest * self.block_size if self._full and longest > end else 0
        return GroupHits(tables, junction)

    def _longest(self, hashes: Sequence[int], limit: int, groups: Sequence[int]) -> int:
        """Count the blocks, from the first on, that all these groups have; it has no gaps."""
        known = self._block_of
        for group in groups:
            low, salt = 0, group * SALT
            while low < limit:
                middle = (low + limit) // 2
                if hashes[middle] + salt in known:
                    low = middle + 1
                else:
                    limit = middle
        return limit

    def _longest_window(self, hashes: Sequence[int], end: int) -> int:
        """Find the end of the last run of blocks, long enough, that all windows' groups have.

        A shorter run is enough at the beginning.
        """
        known, salts = self._block_of, [group * SALT for group in self._sliding]

        def cached(index: int) -> bool:
            key = hashes[index]
            return all(key + salt in known for salt in salts)

        while end:
            first = max(end - self._needed, 0)
            if not cached(first):  # nor does any run that ends in what follows have this one
                end = first if first else 0
                continue
            for index in range(end - 1, first, -1):
                if not cached(index):
                    end = index
                    break
            else:
                return end
        return 0

    # What a request takes.

    def _skipped(self, processed: int) -> int:
        """Count the blocks that the query after so many tokens does not see."""
        return max(processed + 1 - self.window, 0) // self.block_size

    def most_held(self, tokens: int) -> int:
        """Count the blocks that a request of so many tokens holds at most, while it is computed."""
        table = -(-tokens // self.block_size)
        return len(self._full) * table + len(self._sliding) * min(table, self._cap)

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        table = -(-tokens // self.block_size)
        return self.num_groups * max(table - len(hits), 0) + self._idle_hits(hits)

    def missing_whole(self, prompt: int, tokens: int, hits: Sequence[int]) -> int:
        found = len(hits)
        table = -(-min(prompt, self.max_model_len) // self.block_size)
        whole = len(self._full) * max(table - found, 0)
        whole += len(self._sliding) * max(min(table, self._cap) - found, 0)
        return max(whole + self._idle_hits(hits), self.missing(tokens, hits))

    def _idle_hits(self, hits: Sequence[int]) -> int:
        if not hits:
            return 0
        assert isinstance(hits, GroupHits)
        return sum(list(map(self._idle.__contains__, table)).count(True) for table in hits.tables)

    def taken(self, request: Request, tokens: int) -> int:
        return self.num_groups * super().taken(request, tokens)

    def owned(self, request: Request, tokens: int) -> int:
        sharers = self._sharers
        tables = self._tables.get(request, ())
        return sum(1 for table in tables for block in table if block and block not in sharers)

    def in_use(self, tokens: int) -> int:
        """Count the tokens in the blocks in use, of requests with so many computed tokens."""
        unfilled = self._entries * self.block_size - tokens
        return (self.usable - self.free) * self.block_size - len(self._filled) * unfilled

    # A request is scheduled.

    def begin_step(self, *, in_flight: bool) -> None:
        self._in_flight = self._scheduled if in_flight else {}
        self._scheduled = {}

    def hold(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        assert isinstance(hits, GroupHits)
        for table in hits.tables:
            self._share(filter(None, table))
        request.computed = start = self.tokens_of(hits)
        self._hashed[request] = start // self.block_size
        self._junctions[request] = hits.junction
        self._tables[request] = [*hits.tables]
        self._gone[request] = self._skipped(start)
        self._entries += len(hits)
        self._compute(request, tokens)

    def extend(self, request: Request, tokens: int) -> None:
        self.recycle(request)
        self._compute(request, tokens)
        self._register_known(request, tokens)

    def _table(self, tokens: int) -> int:
        """Count the entries of a running request's table that computes up to `tokens` tokens."""
        return -(-tokens // self.block_size)

    def _compute(self, request: Request, tokens: int) -> None:
        self._grow(request, self._table(tokens))
        if self.delay:
            self._scheduled[request] = request.computed
        self._fresh[request] = 1 + self.delay
        request.computed = tokens

    def recycle(self, request: Request) -> None:
        """Take back what has left the window of a request that is about to be scheduled."""
        before = self._in_flight.get(request)
        processed = request.computed - request.unknown if before is None else before
        self._recycle(request, processed)

    def _recycle(self, request: Request, processed: int) -> None:
        tables = self._tables[request]
        gone = self._gone[request]
        end = min(self._skipped(processed), len(tables[0]))
        if end <= gone:
            return
        for group in self._sliding:
            table = tables[group]
            self._give_back(request, group, table[gone:end], gone)
            table[gone:end] = [0] * (end - gone)
        self._gone[request] = end

    def take_ticks(self, decodes: DecodeSet, ticks: int, skip: int = 0) -> None:
        """Let each member give back, take and register, in the order of the running list."""
        size, delay, members = self.block_size, self.delay, decodes.members
        assert members is not None
        for tick in range(decodes.tick + skip, decodes.tick + skip + ticks):
            due = members[tick % size] | members[(tick + 1 - delay - self.window) % size]
            if self.prefix_caching and not delay:
                due |= members[(tick + 1) % size]
            for request in [*self._fresh]:
                if request.joined >= 0:
                    due[request] = None
                    self._fresh[request] -= 1
                    if not self._fresh[request]:
                        del self._fresh[request]
            for request in sorted(due, key=by_admission) if len(due) > 1 else due:
                computed = request.computed + tick - request.joined
                processed = computed - delay
                if request.joined == tick:
                    processed = self._in_flight.get(request, computed)
                self._recycle(request, processed)
                self._grow(request, -(-(computed + 1) // size))
                if self.prefix_caching:
                    self._register(request, (computed + 1 - delay) // size)

    def _grow(self, request: Request, entries: int) -> None:
        """Let the tables of a request have so many entries, group by group."""
        tables = self._tables[request]
        count = entries - len(tables[0])
        if count <= 0:
            return
        for table in tables:
            table.extend(self._take(count))
        self._entries += count

    def _register(self, request: Request, end: int) -> None:
        first = self._hashed[request]
        if end <= first:
            return
        self._hashed[request] = end
        names, kept = self.names(request, end), self._kept(request, first, end)
        for group, table in enumerate(self._tables[request]):
            some = kept if group in self._sliding else None
            for at in range(first, end):
                if table[at] and (some is None or at in some):
                    self._name(table[at], group, names[at])

    def _names_all(self) -> bool:
        """Say whether every block of a window gets a name."""
        interval = self.block_size if self._retention is None else self._retention
        return not self.masks_windows or self._seen * self.block_size >= interval > 0

    def _kept(self, request: Request, first: int, end: int) -> set[int] | None:
        """Return the entries, of those from `first` to `end`, that a window's group names.

        None: all of them (`SlidingWindowManager.reachable_block_mask`).
        """
        if self._names_all():
            return None
        size, seen, kept = self.block_size, self._seen, set[int]()
        if self._retention is None:
            return kept  # of a window of one token
        if segment := self._retention // size:
            kept.update(at for at in range(first, end) if at % segment >= segment - seen)
        for boundary in (request.prompt_tokens - 1, self._junctions[request]):
            last = boundary // size
            kept.update(range(max(last - seen, first), min(last, end)))
        return kept

    # A request goes.

    def release(self, request: Request) -> None:
        self.unreserve(request)
        gone = self._gone.pop(request)
        tables = self._tables.pop(request)
        self._entries -= len(tables[0])
        for group, table in enumerate(tables):
            first = gone if group in self._sliding else 0
            self._give_back(request, group, table[first:], first)
        del self._hashed[request], self._junctions[request]
        for notes in (self._in_flight, self._scheduled, self._fresh):
            notes.pop(request, None)
        request.computed = 0

    def _give_back(self, request: Request, group: int, blocks: Sequence[int], first: int) -> None:
        """Free blocks of a group's table from entry `first` on, the last before the others."""
        self._drop([block for block in reversed(blocks) if block])

    def _drop(self, blocks: Sequence[int]) -> None:
        """Take blocks out of one of the tables that they are in, the first to be evicted first."""
        if self._sharers and (shared := self._sharers.keys() & set(blocks)):
            self._unshare(shared)
            blocks = [block for block in blocks if block not in shared]
        self.free += len(blocks)
        if self.splits_free_list:
            self._blank += [block for block in reversed(blocks) if block not in self._keys]
            blocks = [block for block in blocks if block in self._keys]
        self._idle.update(dict.fromkeys(blocks))

    # What is found.

    def _name(self, block: int, group: int, name: int) -> None:
        """Let a block of a group be found by this name alone."""
        self._strike(block)
        self._insert(name + group * SALT, block)

    def _insert(self, key: int, block: int) -> None:
        """Let a block be found by one more name."""
        keys = self._keys.setdefault(block, [])
        if key in keys:
            return
        keys.append(key)
        if self._block_of.setdefault(key, block) != block:
            self._others_of.setdefault(key, []).append(block)

    def _strike(self, block: int) -> None:
        """Let nobody find a block."""
        for key in self._keys.pop(block, ()):
            if key in self._others_of:
                self._forget(key, block)
            else:
                del self._block_of[key]

    def _evict(self, count: int) -> list[int]:
        evicted = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for block in evicted:
            self._strike(block)
        return evicted
