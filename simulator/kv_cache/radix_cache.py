"""SGLang's prefix cache: a radix tree over tokens, whose leaves are evicted least recently used.

The rules are those of SGLang's `RadixCache` (v0.5, `srt/mem_cache/radix_cache.py`): a prompt enters
the tree when its chunk has been computed, an answer when its request has finished; who runs locks
the path to the root; what is not locked may be evicted, leaf by leaf, each as a whole. Headway
differs in one thing: a path counts as used when somebody boards or adds to it, not also each time
that a request in the queue is compared with it.

Nothing here costs a step per token: an edge holds runs of tokens, and blocks are counted.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from simulator.core.request import Request
from simulator.kv_cache.block_manager import EvictingCounter

Piece = tuple[Hashable, int, int]
"""A run of tokens: name, number of the first, how many."""
Cursor = tuple[int, int]
"""A place in a list of pieces: which one, and how far into it."""


@dataclass(eq=False, slots=True)
class Node:
    """The end of an edge; `pieces` is the edge, of whole blocks."""

    parent: "Node | None"
    pieces: list[Piece]
    blocks: int
    locks: int = 0  # running requests whose path passes here
    stamp: int = 0  # when it was last used
    children: dict[tuple[Piece, ...], "Node"] = field(default_factory=dict)


class RadixCache(EvictingCounter):
    """Blocks of `block_size` tokens (SGLang's page_size) under a radix tree.

    `free` counts what may be had: blocks of nobody and those that may be evicted. `missing` and
    `admit` want the hits that `match` has just returned for the same request.
    """

    prefix_caching = True
    caches_chunks = True
    evicts_runs = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._pool = self.usable  # blocks of nobody
        self._root = Node(None, [], 0, locks=1)
        self._held: dict[Request, tuple[Node, int]] = {}  # the end of its path, blocks up to there
        self._idle = 0  # of the last hits, those that nobody has locked
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # (stamp, number, leaf), a heap
        self._pushed = 0
        self._blocks_in_tree = 0

    @property
    def hashed(self) -> int:
        """Blocks in the tree."""
        return self._blocks_in_tree

    def match(self, request: Request) -> Sequence[int]:
        """Return as many numbers as blocks are cached of the prompt, never with its last token."""
        limit = (request.known - 1) // self.block_size
        content = pieces_of(request, limit * self.block_size)
        hits = self._idle = 0
        for node, blocks, _ in self._walk(content):
            hits += blocks
            if not node.locks:
                self._idle += blocks
        return range(hits)

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        """Count the blocks beyond the hits, and the hits that may now be evicted."""
        return -(-tokens // self.block_size) - len(hits) + (self._idle if hits else 0)

    def admit(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        """Lock the path of the hits and take blocks for the rest of `tokens` tokens."""
        node = self._descend(pieces_of(request, len(hits) * self.block_size))
        self._lock(node, self._root)
        self._held[request] = node, len(hits)
        request.computed = tokens
        self.take(-(-tokens // self.block_size) - len(hits))

    def owned(self, request: Request, tokens: int) -> int:
        node, held = self._held[request]
        count = -(-tokens // self.block_size) - held
        while node.parent is not None:
            if node.locks == 1:
                count += node.blocks
            node = node.parent
        return count

    def cache(self, request: Request) -> None:
        """Put the full blocks of all that is computed into the tree."""
        node, held = self._held[request]
        blocks = request.computed // self.block_size
        end, found = self._insert(pieces_of(request, blocks * self.block_size))
        double = max(found - held, 0)  # somebody else has computed the same meanwhile
        self._pool += double
        self.free += double
        self._lock(end, node)
        self._held[request] = end, blocks

    def release(self, request: Request) -> None:
        """Unlock the path; what a finished request leaves in the tree may be found by others."""
        self.unreserve(request)
        if request.finish >= 0:
            self.cache(request)
        node, held = self._held.pop(request)
        own = -(-request.computed // self.block_size) - held
        self._pool += own
        self.free += own
        self._unlock(node)
        request.computed = 0

    def take(self, count: int) -> None:
        """Take blocks of nobody; where there are too few, evict."""
        self.free -= count
        self._pool -= count
        while self._pool < 0:
            stamp, _, leaf = heappop(self._leaves)
            parent = leaf.parent
            if leaf.stamp != stamp or leaf.locks or leaf.children or parent is None:
                continue  # used since, or evicted
            del parent.children[self._key(leaf.pieces, (0, 0))]
            leaf.parent = None
            self._pool += leaf.blocks
            self._blocks_in_tree -= leaf.blocks
            self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Let a node be evicted, if it is a leaf that nobody has locked."""
        if not node.locks and not node.children:
            self._pushed += 1
            heappush(self._leaves, (node.stamp, self._pushed, node))

    def _lock(self, node: Node, above: Node) -> None:
        """Lock the path from `node` up to `above`, which is locked already."""
        while node is not above:
            if node.locks:
                self.shared += node.blocks
            else:
                self.free -= node.blocks
            node.locks += 1
            assert node.parent is not None
            node = node.parent

    def _unlock(self, node: Node) -> None:
        while node.parent is not None:
            node.locks -= 1
            if node.locks:
                self.shared -= node.blocks
            else:
                self.free += node.blocks
                self._offer(node)
            node = node.parent

    def _walk(self, content: list[Piece]) -> Iterator[tuple[Node, int, Cursor]]:
        """Follow `content` down: nodes, how many of their blocks it covers, and where it then is.

        Only the last node may be covered in part.
        """
        node, cursor = self._root, (0, 0)
        while cursor[0] < len(content):
            child = node.children.get(self._key(content, cursor))
            if child is None:
                return
            blocks = _agree(child.pieces, content, cursor) // self.block_size
            whole = blocks == child.blocks  # who is given the node may split it
            cursor = _advance(content, cursor, blocks * self.block_size)
            yield child, blocks, cursor
            if not whole:
                return
            node = child

    def _descend(self, content: list[Piece]) -> Node:
        """Use a path that is in the tree; return the node at its end, split off if need be."""
        node = self._root
        for found, blocks, _ in self._walk(content):
            node = found if blocks == found.blocks else self._split(found, blocks)
            self._clock += 1
            node.stamp = self._clock
        return node

    def _insert(self, content: list[Piece]) -> tuple[Node, int]:
        """Use a path and add what is not there; return its end and the blocks that were there."""
        node = self._root
        cursor, there = (0, 0), 0
        for found, blocks, after in self._walk(content):
            node = found if blocks == found.blocks else self._split(found, blocks)
            self._clock += 1
            node.stamp = self._clock
            cursor, there = after, there + blocks
        if cursor[0] == len(content):
            return node, there
        rest = _rest(content, cursor)
        self._clock += 1
        blocks = sum(count for _, _, count in rest) // self.block_size
        new = Node(node, rest, blocks, locks=0, stamp=self._clock)
        # It consists of blocks that the request has taken: as long as nobody locks it, it is free.
        self.free += blocks
        self._blocks_in_tree += blocks
        node.children[self._key(rest, (0, 0))] = new
        return new, there

    def _split(self, node: Node, blocks: int) -> Node:
        """Cut an edge after so many blocks; return the new upper node.

        The lower one stays itself: whoever holds it goes on to hold the whole path.
        """
        parent = node.parent
        assert parent is not None
        cursor = _advance(node.pieces, (0, 0), blocks * self.block_size)
        lower = _rest(node.pieces, cursor)
        upper = Node(parent, _first(node.pieces, cursor), blocks, node.locks, node.stamp)
        parent.children[self._key(upper.pieces, (0, 0))] = upper
        node.parent, node.pieces, node.blocks = upper, lower, node.blocks - blocks
        upper.children[self._key(lower, (0, 0))] = node
        return upper

    def _key(self, content: list[Piece], cursor: Cursor) -> tuple[Piece, ...]:
        """Give the pieces of the block that begins at a place."""
        index, offset = cursor
        room = self.block_size
        key = []
        while room and index < len(content):
            name, first, count = content[index]
            taken = min(count - offset, room)
            key.append((name, first + offset, taken))
            room -= taken
            index, offset = index + 1, 0
        return tuple(key)


def pieces_of(request: Request, tokens: int) -> list[Piece]:
    """Give the first `tokens` tokens of a request, prompt and answer."""
    found = []
    for name, count in (*request.contents, (("out", request.id), request.generated)):
        if not tokens:
            break
        if taken := min(count, tokens):
            found.append((name, 0, taken))
            tokens -= taken
    return found


def _agree(edge: list[Piece], content: list[Piece], cursor: Cursor) -> int:
    """Count the tokens that an edge has in common with `content` from a place on."""
    index, offset = cursor
    total = 0
    for name, first, count in edge:
        done = 0
        while done < count:
            if index == len(content):
                return total
            other, begin, length = content[index]
            if other != name or begin + offset != first + done:
                return total
            same = min(count - done, length - offset)
            total, done, offset = total + same, done + same, offset + same
            if offset == length:
                index, offset = index + 1, 0
    return total


def _advance(content: list[Piece], cursor: Cursor, tokens: int) -> Cursor:
    """Go on by so many tokens."""
    index, offset = cursor
    tokens += offset
    while index < len(content) and tokens >= content[index][2]:
        tokens -= content[index][2]
        index += 1
    return index, tokens


def _rest(content: list[Piece], cursor: Cursor) -> list[Piece]:
    """Give what follows a place."""
    index, offset = cursor
    name, first, count = content[index]
    return [(name, first + offset, count - offset), *content[index + 1 :]]


def _first(content: list[Piece], cursor: Cursor) -> list[Piece]:
    """Give what precedes a place."""
    index, offset = cursor
    part = content[:index]
    if offset:
        name, first, _ = content[index]
        part.append((name, first, offset))
    return part
