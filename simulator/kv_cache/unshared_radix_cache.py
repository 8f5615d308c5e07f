"""SGLang's prefix cache for prompts with nothing in common: a request finds but its own blocks.

That happens after a retraction. So the tree is a chain of nodes for each request, and of those who
have ended it only matters in which order their leaves are evicted, and how many blocks each has.
The outcome is that of `RadixCache` with its policy `lru`, with which a run takes 11 % longer: user
CPU of Azure's conversation trace of 2023, 19,366 requests, with SGLang's defaults.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from simulator.core.request import Request
from simulator.kv_cache.evicting_counter import TreeCounter


class _Chain:
    """What the tree has of one request, from the root down."""

    __slots__ = ("blocks", "locked", "nodes", "offered", "request", "stamps")

    def __init__(self, request: Request) -> None:  # by hand: a dataclass takes longer
        self.request = request
        self.nodes: list[int] = []  # the blocks of each
        self.stamps: list[int] = []  # when each was last used
        self.locked = 0  # nodes that the running request holds
        self.blocks = 0  # of these
        self.offered = False  # it is in the heap of chains that may be evicted


class UnsharedRadixCache(TreeCounter):
    """Blocks under a radix tree of which no two requests have any in common."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._chains: dict[Request, _Chain] = {}  # of those who run or may come back
        # Of those who have ended, in that order: (when, the blocks of each node).
        self._ended: deque[tuple[int, list[int]]] = deque()
        self._idle: list[tuple[int, _Chain]] = []  # (stamp of the leaf, chain), a heap

    def match(self, request: Request) -> Sequence[int]:
        """Return as many numbers as blocks are left of its own, never with its last token."""
        if request not in self._chains:
            return ()
        return range(self.find(request, request.known - 1))

    def find(self, request: Request, tokens: int) -> int:
        """Use the path of a waiting request's first tokens; return its blocks."""
        chain = self._chains.get(request)
        return 0 if chain is None else self._follow(chain, 0, 0, tokens // self.block_size)

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        """Count the free blocks that it takes: the hits may be evicted as yet."""
        return -(-tokens // self.block_size)

    def admit(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        """Lock the path of the hits and take blocks for the rest of `tokens` tokens."""
        chain = self._chains.get(request)
        if chain is None:
            chain = self._chains[request] = _Chain(request)
        if hits:
            self._lock(chain, len(hits))
            self.free -= len(hits)
        request.computed = tokens
        count = -(-tokens // self.block_size) - len(hits)
        if count:
            self.take(count)

    def cache(self, request: Request) -> None:
        """Put the full blocks of all that is computed into the tree."""
        self.insert(request, request.computed)

    def insert(self, request: Request, tokens: int) -> None:
        """Put the full blocks of a running request's first tokens into the tree."""
        chain, size = self._chains[request], self.block_size
        blocks, prompt = tokens // size, request.prompt_tokens // size
        if not blocks:
            return
        if not chain.nodes and blocks <= prompt:  # the common case of what follows
            self._clock += 1
            chain.nodes.append(blocks)
            chain.stamps.append(self._clock)
            self._blocks_in_tree += blocks
            chain.locked, chain.blocks = 1, blocks
            return
        found = self._follow(chain, 0, 0, blocks)
        if found < blocks:
            self._clock += 1
            chain.nodes.append(blocks - found)
            chain.stamps.append(self._clock)
            self._blocks_in_tree += blocks - found
        if 0 < prompt < blocks:  # the prompt is a node of its own, and used once more
            self._follow(chain, 0, 0, prompt)
        self._pool += found - chain.blocks  # they were there, and have been computed once more
        self._lock(chain, blocks)

    def release(self, request: Request) -> None:
        """Unlock the path; what a finished request leaves in the tree nobody will find."""
        if self._reservations:
            self.unreserve(request)
        chain, size = self._chains[request], self.block_size
        ended, prompt = request.finish >= 0, request.prompt_tokens // size
        if ended and chain.locked == len(chain.nodes) and chain.blocks >= prompt > 0:
            self._clock += 1  # as `insert`, for an answer whose prompt is there
            more = request.computed // size - chain.blocks
            if more:
                chain.nodes.append(more)
                chain.blocks += more
                self._blocks_in_tree += more
        elif ended:
            self.insert(request, request.computed)
        held = -(-request.computed // size)
        self._pool += held - chain.blocks
        self.free += held
        request.computed = 0
        chain.locked, chain.blocks = 0, 0
        if ended:
            del self._chains[request]
            if chain.nodes:
                self._ended.append((self._clock, chain.nodes))
                chain.nodes = []
        elif chain.nodes:
            self._offer(chain)
        else:
            del self._chains[request]

    def make_room(self, count: int) -> None:
        """Evict until so many blocks are nobody's, or nothing can be evicted."""
        ended, idle = self._ended, self._idle
        while self._pool < count:
            if ended and not (idle and idle[0][0] < ended[0][0]):
                nodes = ended[0][1]
                blocks = nodes.pop()
                if not nodes:
                    ended.popleft()
            elif idle:
                stamp, chain = heappop(idle)
                chain.offered = False
                if len(chain.nodes) == chain.locked:
                    continue  # in use, or gone
                if chain.stamps[-1] != stamp:
                    self._offer(chain)
                    continue
                blocks = chain.nodes.pop()
                chain.stamps.pop()
                if len(chain.nodes) > chain.locked:
                    self._offer(chain)
                elif not chain.nodes and not chain.request.computed:  # it waits
                    del self._chains[chain.request]
            else:
                return
            self._pool += blocks
            self._blocks_in_tree -= blocks

    def _offer(self, chain: _Chain) -> None:
        """Let the leaf of a chain be evicted."""
        if not chain.offered:
            chain.offered = True
            heappush(self._idle, (chain.stamps[-1], chain))  # no two stamps are alike

    def _lock(self, chain: _Chain, blocks: int) -> None:
        """Let the running request hold the first blocks of its chain, which end with a node."""
        left, count = blocks, 0
        for node in chain.nodes:
            if not left:
                break
            left -= node
            count += 1
        chain.locked, chain.blocks = count, blocks

    def _follow(self, chain: _Chain, number: int, there: int, blocks: int) -> int:
        """Use a chain from a node on, with `there` blocks before it, up to so many blocks.

        Returns the blocks that are there. A node that is used in part becomes two.
        """
        nodes, stamps = chain.nodes, chain.stamps
        while number < len(nodes) and there < blocks:
            self._clock += 1
            rest = there + nodes[number] - blocks
            if rest > 0:
                nodes[number] -= rest
                nodes.insert(number + 1, rest)
                stamps.insert(number + 1, self._clock)
                if number < chain.locked:
                    chain.locked += 1
            stamps[number] = self._clock
            there += nodes[number]
            number += 1
        return there
