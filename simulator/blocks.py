"""KV-cache blocks: how many are free, and, where a prefix cache makes it matter, which.

`BlockCounter` only counts: enough as long as nobody asks which block a token lies in.
`BlockManager` names the blocks, shares them between equal prefixes and evicts in the order of
vLLM V1 (checked against 0.33): a freed block without a hash goes to the head of the free list, one
with a hash to its tail, so that cached blocks are reused least recently freed first, and within
a request from its end backwards.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

from simulator.decodes import DecodeSet
from simulator.request import Request, Segments
from simulator.tier import HostTier


class BlockCounter:
    """Free blocks as a number. A request's table is as long as its computed tokens need.

    `num_blocks` counts vLLM's null block, which nobody gets.
    """

    names_blocks = False
    ordered = False
    """What requests find in the prefix cache depends on who takes and gives back blocks first."""
    prefix_caching = False
    """Prompts find what earlier ones have in common with them."""
    tier: HostTier | None = None
    """Where evicted blocks of the prefix cache go."""
    delay = 0
    """Steps after which a generated token is known to the prefix cache; 1: async_scheduling."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"num_blocks must be >= 2 and block_size >= 1, not {num_blocks} and {block_size}"
            )
        self.block_size = block_size
        self.usable = num_blocks - 1
        self.free = self.usable
        self.shared = 0  # table entries beyond the first of each block in use
        self.promised = 0  # blocks reserved for running requests, those that they have included
        self._promises: dict[Request, int] = {}

    @property
    def used(self) -> int:
        """Blocks that are taken, or promised to those who run."""
        return max(self.usable - self.free, self.promised - self.shared)

    @property
    def unpromised(self) -> int:
        """Blocks left when every running request takes all that it is promised."""
        return self.usable + self.shared - self.promised

    def promise(self, request: Request, tokens: int) -> None:
        """Reserve blocks for `tokens` tokens in all, until the request leaves."""
        self._promises[request] = -(-tokens // self.block_size)
        self.promised += self._promises[request]

    @property
    def hashed(self) -> int:
        """Distinct hashes in the prefix cache."""
        return 0

    def match(self, request: Request) -> Sequence[int]:
        """Return the cached blocks that the request's prompt begins with."""
        return ()

    def loadable(self, request: Request, hits: Sequence[int]) -> int:
        """Count the blocks after the hits that wait in the host tier."""
        return 0

    def load(self, request: Request, hits: Sequence[int], count: int) -> None:
        """Note the use of so many blocks after the hits that are loaded from the host tier."""

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        """Count the free blocks that it takes to admit a request with `tokens` tokens."""
        return -(-tokens // self.block_size)

    def admit(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        """Give a new request the blocks it hit and those for `tokens` tokens in all."""
        self.free -= -(-tokens // self.block_size)
        request.computed = tokens

    def hold(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        """Give blocks to a request whose KV comes from elsewhere; nobody finds them as yet."""
        self.admit(request, hits, tokens)

    def publish(self, request: Request) -> None:
        """Let others find the full blocks of a request whose KV has come from elsewhere."""

    def extend(self, request: Request, tokens: int) -> None:
        """Let a running request's table hold `tokens` tokens in all."""
        size = self.block_size
        self.free -= -(-tokens // size) - -(-request.computed // size)
        request.computed = tokens

    def take_ticks(self, decodes: DecodeSet, ticks: int, skip: int = 0) -> None:
        """Take what `ticks` ticks need, beginning `skip` ticks from now."""
        if ticks == 1:
            self.free -= decodes.phases[(decodes.tick + skip) % self.block_size]
        else:
            self.free -= decodes.blocks(ticks, skip)

    def learn(self, request: Request) -> None:
        """Register the request's last full block, now that all its tokens are known."""

    def owned(self, request: Request, tokens: int) -> int:
        """Count the blocks that nobody else holds of a running request with `tokens` computed."""
        return -(-tokens // self.block_size)

    def cache(self, request: Request) -> None:
        """Let others share what is computed of a request, now that a chunk of it is done."""

    def release(self, request: Request) -> None:
        """Take back all blocks of a request that has left the decode set."""
        if self._promises:
            self.promised -= self._promises.pop(request, 0)
        self.free += -(-request.computed // self.block_size)
        request.computed = 0


class BlockManager(BlockCounter):
    """Blocks with names, reference counts and, if asked for, a prefix cache."""

    names_blocks = True
    ordered = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        tier: HostTier | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.prefix_caching = prefix_caching
        self.tier = tier
        # The free list in two parts: its head is the end of `_blank`, its tail that of `_idle`.
        self._blank = list(range(num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * num_blocks
        self._hash_of: list[int | None] = [None] * num_blocks
        self._blocks_of: dict[int, dict[int, None]] = {}  # by hash, in order of registering

    @property
    def hashed(self) -> int:
        return len(self._blocks_of)

    def match(self, request: Request) -> Sequence[int]:
        """Return the cached blocks of the longest known prefix, never with its last token."""
        if not self.prefix_caching:
            return ()
        limit = (request.known - 1) // self.block_size
        hits = []
        for key in self._hashes(request, limit)[:limit]:
            same = self._blocks_of.get(key)
            if same is None:
                break
            hits.append(next(iter(same)))
        return hits

    def loadable(self, request: Request, hits: Sequence[int]) -> int:
        if self.tier is None:
            return 0
        limit = (request.known - 1) // self.block_size
        keys = self._hashes(request, limit)[len(hits) : limit]
        return self.tier.run(keys)

    def load(self, request: Request, hits: Sequence[int], count: int) -> None:
        assert self.tier is not None
        self.tier.use(self._hashes(request, 0)[len(hits) : len(hits) + count])

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        """Count the blocks beyond the hits, and the hits that must leave the free list."""
        refs = self._refs
        idle = sum(1 for block in hits if not refs[block])
        return -(-tokens // self.block_size) - len(hits) + idle

    def admit(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        """Give a new request the blocks it hit and those for `tokens` tokens in all."""
        for block in hits:
            if self._refs[block]:
                self.shared += 1
            else:
                del self._idle[block]
                self.free -= 1
            self._refs[block] += 1
        request.blocks = list(hits)
        request.computed = len(hits) * self.block_size
        self.extend(request, tokens)

    def hold(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        caching, self.prefix_caching = self.prefix_caching, False
        self.admit(request, hits, tokens)
        self.prefix_caching = caching

    def publish(self, request: Request) -> None:
        for index in range(request.computed // self.block_size if self.prefix_caching else 0):
            self._register(request, index)

    def extend(self, request: Request, tokens: int) -> None:
        full = request.computed // self.block_size
        for _ in range(-(-tokens // self.block_size) - -(-request.computed // self.block_size)):
            self._take(request)
        request.computed = tokens
        if self.prefix_caching:
            known = min(tokens, request.known - request.unknown)
            for index in range(max(full - self.delay, 0), known // self.block_size):
                self._register(request, index)

    def take_ticks(self, decodes: DecodeSet, ticks: int, skip: int = 0) -> None:
        """Take and register as stepwise: tick by tick, in the order of the running list."""
        size = self.block_size
        assert decodes.members is not None
        first = decodes.tick + skip
        for tick in range(first, first + ticks):
            for request in sorted(decodes.members[tick % size], key=_seat):
                self._take(request)
            if self.prefix_caching:
                full = tick + 1 - self.delay
                for request in sorted(decodes.members[full % size], key=_seat):
                    tokens = request.computed + full - request.joined
                    self._register(request, tokens // size - 1)

    def owned(self, request: Request, tokens: int) -> int:
        refs = self._refs
        return sum(1 for block in request.blocks or () if refs[block] == 1)

    def learn(self, request: Request) -> None:
        full = request.computed // self.block_size
        if self.prefix_caching and full:
            self._register(request, full - 1)

    def release(self, request: Request) -> None:
        """Unhashed blocks to the head of the free list, hashed ones to its tail, last first."""
        if self._promises:
            self.promised -= self._promises.pop(request, 0)
        blank = []
        for block in reversed(request.blocks or ()):
            self._refs[block] -= 1
            if self._refs[block]:
                self.shared -= 1
                continue
            self.free += 1
            if self._hash_of[block] is None:
                blank.append(block)
            else:
                self._idle[block] = None
        self._blank.extend(reversed(blank))
        request.blocks = None
        request.computed = 0

    def _take(self, request: Request) -> None:
        """Take the head of the free list; a cached block loses its hash."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            key = self._hash_of[block]
            assert key is not None
            same = self._blocks_of[key]
            del same[block]
            if not same:
                del self._blocks_of[key]
                if self.tier is not None:
                    self.tier.store(key)
            self._hash_of[block] = None
        self.free -= 1
        self._refs[block] = 1
        assert request.blocks is not None
        request.blocks.append(block)

    def _register(self, request: Request, index: int) -> None:
        assert request.blocks is not None
        block = request.blocks[index]
        if self._hash_of[block] is None:
            key = self._hash_of[block] = self._hashes(request, index + 1)[index]
            self._blocks_of.setdefault(key, {})[block] = None

    def _hashes(self, request: Request, blocks: int) -> list[int]:
        """Return the hashes of at least the first `blocks` blocks.

        A hash covers the block's tokens and the hash before it, so it names the whole prefix. It
        is Python's 64-bit hash: among a million blocks two collide with probability 3e-8.
        """
        size = self.block_size
        hashes = request.hashes
        if hashes is None:
            hashes = request.hashes = list(prompt_hashes(request, size))
        while len(hashes) < blocks:
            hashes.append(hash((hashes[-1] if hashes else 0, _tail(request, len(hashes), size))))
        return hashes


def _seat(request: Request) -> int:
    return request.seat


def _segments(request: Request) -> Segments:
    return request.segments or ((("in", request.id), request.prompt_tokens),)


def prompt_hashes(request: Request, size: int) -> Iterator[int]:
    """Yield the hashes of the full blocks of a prompt.

    A block's tokens are named by pieces (name, first, count); pieces are never split otherwise
    than at the ends of segments and blocks, so equal tokens have equal pieces.
    """
    key = 0
    pieces: list[tuple[Hashable, int, int]] = []
    room = size
    for name, count in _segments(request):
        first = 0
        while count - first >= room:
            pieces.append((name, first, room))
            key = hash((key, tuple(pieces)))
            yield key
            first += room
            pieces, room = [], size
        if first < count:
            pieces.append((name, first, count - first))
            room -= count - first


def _tail(request: Request, index: int, size: int) -> tuple[tuple[Hashable, int, int], ...]:
    """Return the pieces of a block that ends among the generated tokens."""
    start = index * size
    out = start - request.prompt_tokens
    if out >= 0:
        return ((("out", request.id), out, size),)
    pieces: list[tuple[Hashable, int, int]] = []
    end = 0
    for name, count in _segments(request):
        first = max(0, start - end)
        end += count
        if first < count:
            pieces.append((name, first, count - first))
    return (*pieces, (("out", request.id), 0, size + out))
