"""KV-cache blocks: how many are free, and, where a prefix cache makes it matter, which.

`BlockCounter` only counts: enough as long as nobody asks which block a token lies in.
`BlockManager` names the blocks, shares them between equal prefixes and evicts in the order of
vLLM V1 (checked against 0.33): a freed block without a hash goes to the head of the free list, one
with a hash to its tail, so that cached blocks are reused least recently freed first, and within
a request from its end backwards.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request, by_admission
from simulator.kv_cache.block_hashes import known_hashes
from simulator.kv_cache.tiers import HostTier


class BlockCounter:
    """Free blocks as a number. A request's table is as long as its computed tokens need.

    `num_blocks` counts vLLM's null block, which nobody gets.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"num_blocks must be >= 2 and block_size >= 1, not {num_blocks} and {block_size}"
            )
        self.block_size = block_size
        self.usable = num_blocks - 1
        self.free = self.usable
        self.num_groups = 1  # block tables of a request; a new token may take a block in each
        self.tier: HostTier | None = None  # where evicted blocks of the prefix cache go
        self.offloaded = 0  # blocks that went to a host of its own
        self.names_blocks = False
        self.leaps = True  # what a tick takes can be told without taking it
        self.caches_chunks = False  # `cache` wants to be called
        # A waiting request may lose more cached blocks at once than somebody takes.
        self.evicts_runs = False
        self.prefix_caching = False  # prompts find what earlier ones have in common with them
        # What requests find there depends on who takes and gives back blocks first.
        self.ordered = False
        # Of freed blocks those that nobody will find are taken first; before vLLM 0.24, in turn.
        self.splits_free_list = True
        self.masks_windows = True
        # Steps after which a generated token is known to the prefix cache; 1: async_scheduling.
        self.delay = 0
        self.shared = 0  # table entries beyond the first of each block in use
        self.reserved = 0  # blocks reserved for running requests, those that they have included
        self._reservations: dict[Request, int] = {}

    @property
    def used(self) -> int:
        """Blocks that are taken, or reserved for those who run."""
        return max(self.usable - self.free, self.reserved - self.shared)

    @property
    def unreserved(self) -> int:
        """Blocks left when every running request takes all that is reserved for it."""
        return self.usable + self.shared - self.reserved

    def reserve(self, request: Request, tokens: int) -> None:
        """Reserve blocks for `tokens` tokens in all, until the request leaves."""
        self._reservations[request] = -(-tokens // self.block_size)
        self.reserved += self._reservations[request]

    def unreserve(self, request: Request) -> None:
        """Drop a request's reservation, if it has one."""
        self.reserved -= self._reservations.pop(request, 0)

    @property
    def hashed(self) -> int:
        """Distinct hashes in the prefix cache, if it names its blocks; else 0."""
        return 0

    def match(self, request: Request) -> Sequence[int]:
        """Return the cached blocks that the request's prompt begins with."""
        return ()

    def tokens_of(self, hits: Sequence[int]) -> int:
        """Count the tokens of cached blocks that `match` has found."""
        return len(hits) * self.block_size

    def first_new(self, request: Request, count: int) -> int | None:
        """Name what a prompt adds to the prefix cache after its first `count` blocks, if anything.

        Blocks with the same tokens, from the first on, have the same name.
        """
        return None

    def loadable(self, request: Request, hits: Sequence[int]) -> int:
        """Count the blocks after the hits that wait in the host tier."""
        return 0

    def fetch(self, request: Request) -> tuple[list[int], float]:
        """Begin to fetch what tiers behind the host have of a prompt; see `HostTier.fetch`."""
        raise NotImplementedError

    def load(self, request: Request, hits: Sequence[int], count: int) -> None:
        """Note the use of so many blocks after the hits that are loaded from the host tier."""

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        """Count the free blocks that it takes to admit a request with `tokens` tokens."""
        return -(-tokens // self.block_size)

    def missing_whole(self, prompt: int, tokens: int, hits: Sequence[int]) -> int:
        """Count the free blocks that a whole prompt needs whose first chunk has so many tokens."""
        return self.missing(prompt, hits)

    def most_held(self, tokens: int) -> int:
        """Count the blocks that a request of so many tokens holds at most."""
        return -(-tokens // self.block_size)

    def in_use(self, tokens: int) -> int:
        """Count the tokens in the blocks in use, of requests with so many; shared ones once."""
        return tokens - self.shared * self.block_size

    def begin_step(self, *, in_flight: bool) -> None:
        """Hear that a step is about to be scheduled while that before it is under way, or not.

        Told by those who schedule steps ahead.
        """

    def recycle(self, request: Request) -> None:
        """Take back what a running request that is about to be scheduled needs no more."""

    def admit(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        """Allocate a new request's blocks: those it hit, and more up to `tokens` tokens in all."""
        self.free -= -(-tokens // self.block_size)
        request.computed = tokens

    def hold(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        """Allocate blocks of a request whose KV comes from elsewhere; no prompt hits them yet."""
        self.admit(request, hits, tokens)

    def publish(self, request: Request) -> None:
        """Let others find the full blocks of a request whose KV has come from elsewhere."""

    def taken(self, request: Request, tokens: int) -> int:
        """Count the blocks that it takes to let a running request's table hold `tokens` tokens."""
        size = self.block_size
        return -(-tokens // size) - -(-request.computed // size)

    def growth(self, request: Request, tokens: int) -> int:
        """Count the same, less the blocks that the request gives back then."""
        return self.taken(request, tokens)

    def extend(self, request: Request, tokens: int) -> None:
        """Let a running request's table hold `tokens` tokens in all."""
        size = self.block_size
        self.free -= -(-tokens // size) - -(-request.computed // size)
        request.computed = tokens

    def take(self, count: int) -> None:
        """Take free blocks, which have no names here; a cache loses those of its own among them."""
        self.free -= count

    def make_room(self, count: int) -> None:
        """Evict until so many blocks are nobody's, or nothing can be evicted, as here."""

    def take_ticks(self, decodes: DecodeSet, ticks: int, skip: int = 0) -> None:
        """Take what `ticks` ticks need, beginning `skip` ticks from now."""
        if ticks == 1:
            self.free -= decodes.phases[(decodes.tick + skip) % self.block_size]
        else:
            self.free -= decodes.blocks(ticks, skip)

    def register_last(self, request: Request, in_flight: int = 0) -> None:
        """Let others find the request's last full block, now that all its tokens are known.

        All but the last `in_flight`, whose KV is being computed.
        """

    def owned(self, request: Request, tokens: int) -> int:
        """Count the blocks that nobody else holds of a running request with `tokens` computed."""
        return -(-tokens // self.block_size)

    def cache(self, request: Request) -> None:
        """Let others share what is computed of a request, now that a chunk of it is done."""

    def finished(self, request: Request) -> None:
        """Hear that a request has ended, or will never end."""

    def release(self, request: Request) -> None:
        """Take back all blocks of a request that has left the decode set."""
        if self._reservations:
            self.unreserve(request)
        self.free += -(-request.computed // self.block_size)
        request.computed = 0


class CacheListener(Protocol):
    """Hears of the blocks that the prefix cache holds, as vLLM's KV events tell of them."""

    def stored(self, request: Request, first: int, hashes: Sequence[int]) -> None:
        """Blocks of a request have got their hashes, from its block number `first` on."""

    def removed(self, key: int) -> None:
        """A block with this hash has been given to somebody else."""


class BlockManager(BlockCounter):
    """Blocks with names, reference counts and, if asked for, a prefix cache."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        tier: HostTier | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.names_blocks = self.ordered = True
        self.prefix_caching = prefix_caching
        self.listener: CacheListener | None = None
        self.tier = tier
        # The free list in two parts: its head is the end of `_blank`, its tail that of `_idle`.
        self._blank = list(range(num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, int | None] = OrderedDict()  # with their hashes
        self._hashed: dict[Request, int] = {}  # of those who run, the first blocks have hashes
        self._sharers: dict[int, int] = {}  # by block the tables that it is in beyond the first
        # By hash the block registered first, and those registered later, where there are any.
        self._block_of: dict[int, int] = {}
        self._others_of: dict[int, list[int]] = {}
        self._of_tier: dict[Request, list[int]] = {}  # what each stored there or loaded

    @property
    def hashed(self) -> int:
        return len(self._block_of)

    def names(self, request: Request, count: int) -> list[int]:
        """Return the hashes of at least a request's first `count` full blocks."""
        return known_hashes(request, count, self.block_size)

    def match(self, request: Request) -> Sequence[int]:
        """Return the cached blocks of the longest known prefix, never with its last token."""
        if not self.prefix_caching:
            return ()
        limit = (request.known - 1) // self.block_size
        known = self._block_of
        hashes = self.names(request, limit)
        if not limit or hashes[0] not in known:
            return ()
        # Blocks are evicted after those that follow them: what is cached has no gaps.
        count = bisect_left(range(limit), True, key=lambda index: hashes[index] not in known)
        return list(map(known.__getitem__, hashes[:count]))

    def first_new(self, request: Request, count: int) -> int | None:
        if not self.prefix_caching or (request.known - 1) // self.block_size <= count:
            return None
        return self.names(request, count + 1)[count]

    def loadable(self, request: Request, hits: Sequence[int]) -> int:
        if self.tier is None:
            return 0
        limit = (request.known - 1) // self.block_size
        keys = self.names(request, limit)[len(hits) : limit]
        return self.tier.run(keys)

    def fetch(self, request: Request) -> tuple[list[int], float]:
        assert self.tier is not None
        limit = (request.known - 1) // self.block_size
        hits = len(self.match(request))
        return self.tier.fetch(self.names(request, limit)[hits:limit])

    def load(self, request: Request, hits: Sequence[int], count: int) -> None:
        assert self.tier is not None
        end = len(hits) + count
        keys = self.names(request, end)[len(hits) : end]
        self.tier.use(keys)
        if self.tier.write_through:
            self._of_tier.setdefault(request, []).extend(keys)

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        """Count the blocks beyond the hits, and the hits that must leave the free list."""
        idle = list(map(self._idle.__contains__, hits)).count(True)
        return -(-tokens // self.block_size) - len(hits) + idle

    def admit(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        """Allocate a new request's blocks: those it hit, and more up to `tokens` tokens in all."""
        self.hold(request, hits, tokens)
        self._register_known(request, tokens)

    def _share(self, hits: Iterable[int]) -> None:
        """Take cached blocks for one more request."""
        for block in hits:
            if block in self._idle:
                del self._idle[block]
                self.free -= 1
            else:
                self._sharers[block] = self._sharers.get(block, 0) + 1
                self.shared += 1

    def hold(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        self._share(hits)
        self._hashed[request] = len(hits)
        request.blocks = list(hits)
        request.computed = len(hits) * self.block_size
        self._append(request, self.taken(request, tokens))
        request.computed = tokens

    def publish(self, request: Request) -> None:
        self.register_last(request)

    def extend(self, request: Request, tokens: int) -> None:
        self._append(request, self.taken(request, tokens))
        request.computed = tokens
        self._register_known(request, tokens)

    def _register_known(self, request: Request, tokens: int) -> None:
        """Let others find a request's full blocks of its first tokens, as far as these are known.

        Tokens of steps in flight are not.
        """
        if self.prefix_caching:
            known = min(tokens, request.known - request.unknown)
            first = self._hashed[request]
            self._register(request, known // self.block_size)
            if self.tier is not None and self.tier.write_through:
                end = min(known, request.prompt_tokens) // self.block_size
                keys = self.names(request, end)[first:end]
                self._of_tier.setdefault(request, []).extend(self.tier.offer(keys))

    def take_ticks(self, decodes: DecodeSet, ticks: int, skip: int = 0) -> None:
        """Take and register as stepwise: tick by tick, in the order of the running list."""
        size = self.block_size
        assert decodes.members is not None
        first = decodes.tick + skip
        for tick in range(first, first + ticks):
            for request in _in_order(decodes.members[tick % size]):
                self._append(request, 1)
            if self.prefix_caching:
                full = tick + 1 - self.delay
                for request in _in_order(decodes.members[full % size]):
                    self._register(request, (request.computed + full - request.joined) // size)

    def owned(self, request: Request, tokens: int) -> int:
        sharers = self._sharers
        return sum(1 for block in request.blocks or () if block not in sharers)

    def register_last(self, request: Request, in_flight: int = 0) -> None:
        if self.prefix_caching:
            self._register(request, (request.computed - in_flight) // self.block_size)

    def release(self, request: Request) -> None:
        """Unhashed blocks to the head of the free list, hashed ones to its tail, last first.

        Where the list is not split, all go to its tail.
        """
        self.unreserve(request)
        blocks, hashed = request.blocks or [], self._hashed.pop(request, 0)
        cached = list(zip(blocks[:hashed], request.hashes or (), strict=False))
        shared = self._sharers.keys() & set(blocks) if self._sharers else None
        if shared:
            self._unshare(shared)
            cached = [pair for pair in cached if pair[0] not in shared]
        if self.splits_free_list:
            self._blank += blocks[hashed:]
        else:
            self._idle.update(dict.fromkeys(reversed(blocks[hashed:])))
        self._idle.update(reversed(cached))
        self.free += len(cached) + len(blocks) - hashed
        request.blocks = None
        request.computed = 0

    def finished(self, request: Request) -> None:
        if self.tier is not None:
            self.tier.finished(self._of_tier.pop(request, ()))

    def _unshare(self, blocks: set[int]) -> None:
        """Take blocks out of one of the tables that they are in."""
        self.shared -= len(blocks)
        for block in blocks:
            self._sharers[block] -= 1
            if not self._sharers[block]:
                del self._sharers[block]

    def _append(self, request: Request, count: int) -> None:
        """Take blocks for a request from the head of the free list."""
        if not count:
            return
        assert request.blocks is not None
        request.blocks += self._take(count)

    def _take(self, count: int) -> list[int]:
        """Take blocks from the head of the free list."""
        blank = self._blank
        taken = blank[-count:]
        taken.reverse()
        del blank[-count:]
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        self.free -= count
        return taken

    def _evict(self, count: int) -> list[int]:
        """Take blocks from the rest of the free list; they lose their hashes."""
        evicted = []
        pop, known = self._idle.popitem, self._block_of
        for _ in range(count):
            block, key = pop(last=False)
            evicted.append(block)
            if key is None:
                continue
            if self.listener is not None:
                self.listener.removed(key)
            if key in self._others_of:
                self._forget(key, block)
            else:
                del known[key]
                if self.tier is not None and not self.tier.write_through:
                    self.tier.store(key)
        return evicted

    def _forget(self, key: int, block: int) -> None:
        """Strike out one of several blocks with a hash."""
        others = self._others_of[key]
        if self._block_of[key] == block:
            self._block_of[key] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._others_of[key]

    def _register(self, request: Request, end: int) -> None:
        """Let the prefix cache know of a request's first `end` blocks."""
        first = self._hashed[request]
        if end <= first:
            return
        self._hashed[request] = end
        known = self._block_of
        hashes = self.names(request, end)[first:end]
        assert request.blocks is not None
        if self.listener is not None:
            self.listener.stored(request, first, hashes)
        new = zip(hashes, request.blocks[first:end], strict=True)
        if known.keys().isdisjoint(hashes):
            known.update(new)
            return
        for key, block in new:
            if known.setdefault(key, block) != block:
                self._others_of.setdefault(key, []).append(block)


def _in_order(members: dict[Request, None]) -> Iterable[Request]:
    """Return requests in the order of the running list."""
    return sorted(members, key=by_admission) if len(members) > 1 else members
