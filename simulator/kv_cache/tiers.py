"""Tiers of the prefix cache beyond the GPU: host memory, and what lies behind it.

The rules are those of vLLM 0.33's offloading connector (`v1/kv_offload/cpu/manager.py`,
`v1/kv_offload/tiering/manager.py`, read in 2026): prompts' blocks are copied to the host as they
are computed and from there to every secondary tier; what only a secondary tier has is fetched
into host memory first, and until it is there its request waits and others are tried. Here a fetch
begins as the request comes (SGLang's prefetch from storage does), vLLM's when its turn comes.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

Rank = tuple[int, int]
TRACKED = 64_000  # blocks whose offers are counted, as vLLM's max_tracker_size


class HostTier:
    """So many blocks of host memory, by hash; the least recently used goes first.

    With `write_through` blocks come as they are computed (`offer`; vLLM's connector), from the
    `threshold`-th offer on; else when the GPU evicts them (`store`). These copies run beside the
    steps and cost them nothing. A prompt whose cached prefix goes on here has the blocks loaded
    before its step, which waits for them; the copy here stays. (SGLang's: `hierarchical_cache.py`.)
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        write_through: bool = False,
        threshold: int = 0,
        secondary: "Sequence[SecondaryTier]" = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.write_through = write_through
        self.secondary = list(secondary)
        self.stored = 0  # blocks copied here so far
        self.now = 0.0  # s, of the step that is being decided
        self._threshold = threshold
        self._offers: OrderedDict[int, int] = OrderedDict()
        self._keys: OrderedDict[int, None] = OrderedDict()
        self._ranks: dict[int, Rank] = {}  # of blocks that have one: the least goes first
        self._by_rank: list[tuple[Rank, int]] = []  # a heap; what is out of date is passed over
        self._newest = 0
        self._coming: dict[int, float] = {}  # s, when what is being fetched will be here
        self.writing: set[int] = set()  # what is being copied here
        self.reading: set[int] = set()  # and from here

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def run(self, keys: Iterable[int]) -> int:
        """Count how many of these hashes, from the first on, are here."""
        found = 0
        for key in keys:
            if key not in self._keys:
                break
            found += 1
        return found

    def use(self, keys: Iterable[int]) -> None:
        """Take note that blocks are loaded; with `write_through` that counts at its end."""
        for key in () if self.write_through else keys:
            self._keys.move_to_end(key)

    def store(self, key: int) -> None:
        """Keep a block that the GPU evicts; nothing is copied if it is here already."""
        if key in self._keys:
            self._keys.move_to_end(key)
        elif self.num_blocks:
            self._insert([key])
            self.stored += 1

    def offer(self, keys: Sequence[int]) -> list[int]:
        """Copy what is computed of a prompt here and to all secondary tiers, if it is not here.

        Return those that count as used, all but what was offered too seldom.
        """
        used, new = self.take(keys)
        for tier in self.secondary:
            tier.store(new or (), self.now)
        return used

    def take(self, keys: Sequence[int]) -> tuple[list[int], list[int] | None]:
        """Keep what is offered and not here: all of it or, without room beside it, none.

        Return those that count as used, and the new ones; None: there is no room.
        """
        new = [key for key in keys if key not in self._keys]
        used = [key for key in keys if key not in self.writing]
        if self._threshold > 1:
            self._count(keys)
            new = [key for key in new if self._offers.get(key, 0) >= self._threshold]
            used = [key for key in used if key in self._keys or key in new]
        if new and not self._make_room(len(new), set(keys)):
            return used, None
        self._insert(new)
        self.stored += len(new)
        return used, new

    def _count(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._offers[key] = self._offers.pop(key, 0) + 1
        while len(self._offers) > TRACKED:
            self._offers.popitem(last=False)

    def _make_room(self, count: int, protected: set[int]) -> bool:
        """Evict what `count` more blocks need; say whether there is so much to evict."""
        lacking = count - (self.num_blocks - len(self._keys))
        if lacking <= 0:
            return True
        now, gone, busy = self.now, [], protected | self.writing | self.reading
        for key in self._by_age() if self._ranks else self._keys:
            if key not in busy and self._coming.get(key, 0.0) <= now:
                gone.append(key)
                if len(gone) == lacking:
                    break
        if len(gone) < lacking:
            return False
        for key in gone:
            del self._keys[key]
            self._ranks.pop(key, None)
            self._coming.pop(key, None)
        return True

    def _by_age(self) -> Iterator[int]:
        """Yield the blocks in the order of their ranks, as long as the caller wants more."""
        heap, ranks, seen = self._by_rank, self._ranks, dict[int, Rank]()
        try:
            while heap:
                rank, key = heappop(heap)
                if ranks.get(key) == rank and key not in seen:
                    seen[key] = rank
                    yield key
        finally:
            for key, rank in seen.items():
                heappush(heap, (rank, key))

    def begin(self) -> int:
        """Return an age for what a request uses from now on, younger than all before."""
        self._newest += 1
        return self._newest

    def rank(self, key: int, rank: Rank) -> None:
        """Let a block that is here go after those of a lower rank, unless it does so already."""
        if key in self._keys and self._ranks.get(key, (0, 0)) < rank:
            self._ranks[key] = rank
            heappush(self._by_rank, (rank, key))

    def _insert(self, keys: Sequence[int]) -> None:
        for key in keys:
            if len(self._keys) == self.num_blocks:
                self._keys.popitem(last=False)
            self._keys[key] = None

    def finished(self, keys: Sequence[int]) -> None:
        """Hear what a request that has ended stored or loaded: its last block goes first."""
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)
                if self._ranks:
                    self.rank(key, (self.begin(), 0))

    def fetch(self, keys: Sequence[int]) -> tuple[list[int], float]:
        """Begin to fetch what secondary tiers have of the run that these hashes begin.

        Return the blocks that come from each, and when all that is found is here, s.
        """
        counts, ready = [0] * len(self.secondary), self.now
        for key in keys:
            if key in self._keys:
                ready = max(ready, self._coming.get(key, 0.0))
                continue
            found = next((k for k, tier in enumerate(self.secondary) if key in tier), None)
            if found is None or not self._make_room(1, set()):
                break
            self._insert([key])
            self._coming[key] = ready = max(ready, self.secondary[found].load(key, self.now))
            counts[found] += 1
        return counts, ready


class SecondaryTier:
    """A disk, or a store that replicas share: so many blocks, behind one link.

    Reads and writes go over the link in the order of asking, `block_seconds` each; a read is there
    `latency` s after its last byte was sent. The least recently used block goes first.
    """

    def __init__(
        self, name: str, num_blocks: int, block_seconds: float, latency: float, *, shared: bool
    ) -> None:
        self.name, self.shared = name, shared
        self.num_blocks = num_blocks
        self.latency = latency
        self.block_seconds = block_seconds
        self.read = self.written = 0  # blocks
        self._free = 0.0  # s, when the link is
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def _send(self, now: float) -> float:
        self._free = max(self._free, now) + self.block_seconds
        return self._free

    def store(self, keys: Iterable[int], now: float) -> None:
        """Keep blocks; of those that are here nothing is written."""
        for key in keys:
            if key in self._keys:
                self._keys.move_to_end(key)
                continue
            if len(self._keys) >= self.num_blocks:
                self._keys.popitem(last=False)
            self._keys[key] = None
            self.written += 1
            self._send(now)

    def load(self, key: int, now: float) -> float:
        """Read a block; say when it is in host memory, s."""
        self._keys.move_to_end(key)
        self.read += 1
        return self._send(now) + self.latency
