"""SGLang's prefix cache: a radix tree over tokens, whose leaves are evicted.

The rules are those of SGLang 0.5.23 (`srt/mem_cache/unified_radix_cache.py` and
`unified_cache/unified_tree_core.py`): a prompt enters the tree when its chunk has been computed, an
answer when its request has finished, cut off from its prompt, so that answers can go first; who
runs locks the path to the root; what is not locked may be evicted, leaf by leaf, each as a whole.
Whoever is compared with a path uses it, and splits the edge that it leaves.

Nothing here costs a step per token: an edge holds runs of tokens, and blocks are counted.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from simulator.core.request import Request
from simulator.kv_cache.evicting_counter import TreeCounter

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
    key: tuple[Piece, ...] = ()  # its first block: what the parent knows it by
    locks: int = 0  # running requests whose path passes here
    stamp: int = 0  # when it was last used
    created: int = 0  # when it, or what it was split off from, was added
    inserts: int = 0  # requests that have put their tokens here
    priority: int = 0  # the highest of these
    offered: bool = False  # it is in the heap of those that may be evicted
    children: dict[tuple[Piece, ...], "Node"] = field(default_factory=dict)


EvictionKey = Callable[[Node], tuple[int, int]]
EVICTION_POLICIES: dict[str, EvictionKey] = {
    "lru": lambda node: (0, node.stamp),
    "lfu": lambda node: (node.inserts, node.stamp),
    "slru": lambda node: (node.inserts >= 2, node.stamp),
    "priority": lambda node: (node.priority, node.stamp),
    "fifo": lambda node: (node.created, node.stamp),
    "filo": lambda node: (-node.created, node.stamp),
    "mru": lambda node: (-node.stamp, 0),
    "tlru": lambda node: (0, node.stamp),  # its threshold is 0 by default: then it is lru
}
"""SGLang's `radix_eviction_policy`: the leaf with the least key is evicted first."""


@dataclass(slots=True)
class Path:
    """What a running request has in the tree."""

    end: Node
    blocks: int
    inserted: int = 0  # blocks that it has put there itself, or found when it did


class RadixCache(TreeCounter):
    """Blocks of `block_size` tokens (SGLang's page_size) under a radix tree.

    `free` counts what may be had: blocks of nobody and those that may be evicted. `missing` and
    `admit` want the hits that `match` has just returned for the same request. `eviction_policy`,
    a key of EVICTION_POLICIES, may be set while the tree is empty.
    """

    _node = Node
    """What an edge ends in."""
    reads_next = 0
    """Tokens behind those of a key that must be the same, too."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.eviction_policy = "lru"
        self._root = self._node(None, [], 0, locks=1)
        self._held: dict[Request, Path] = {}
        self._found = self._root  # the end of the path of the last hits
        self._idle = 0  # of the last hits, those that nobody has locked
        self.host_hits = 0  # blocks that come after them in host memory
        self._leaves: list[tuple[tuple[int, int], int, Node]] = []  # (key, number, leaf), a heap
        self._pushed = 0

    @property
    def evictable(self) -> int:
        """Blocks in the tree that nobody has locked."""
        return self.free - self._pool

    def match(self, request: Request) -> Sequence[int]:
        """Return as many numbers as blocks are cached of the prompt, never with its last token."""
        return range(self.find(request, request.known - 1)[0])

    def find(self, request: Request, tokens: int) -> tuple[int, Node]:
        """Use the path of a request's first tokens; return its blocks and its end."""
        content = self._content(request, self._whole(tokens) * self.block_size)
        node, hits, self._idle = self._root, 0, 0
        self._found = node
        if not content or self._key(content, (0, 0)) not in node.children:
            return 0, node
        for found, blocks, _ in self._walk(content, node):
            node = found if blocks == found.blocks else self._split(found, blocks)
            self._use(node)
            hits += blocks
            if not node.locks:
                self._idle += blocks
        self._found = node
        return hits, node

    def _whole(self, tokens: int) -> int:
        """Count the blocks of so many tokens that may be in the tree."""
        return max(tokens - self.reads_next, 0) // self.block_size

    def _content(self, request: Request, tokens: int, start: int = 0) -> list[Piece]:
        """Name what the tree has of a request's first `tokens` tokens, from `start` on."""
        return pieces_of(request, tokens, start)

    def missing(self, tokens: int, hits: Sequence[int]) -> int:
        """Count the blocks beyond the hits, and the hits that may now be evicted."""
        return -(-tokens // self.block_size) - len(hits) + (self._idle if hits else 0)

    def admit(self, request: Request, hits: Sequence[int], tokens: int) -> None:
        """Lock the path of the hits and take blocks for the rest of `tokens` tokens."""
        node = self._found if hits else self._root
        self._lock(node)
        self._held[request] = Path(node, len(hits))
        request.computed = tokens
        self.take(-(-tokens // self.block_size) - len(hits))

    def owned(self, request: Request, tokens: int) -> int:
        path = self._held[request]
        node, count = path.end, -(-tokens // self.block_size) - path.blocks
        while node.parent is not None:
            if node.locks == 1:
                count += node.blocks
            node = node.parent
        return count

    def cache(self, request: Request) -> None:
        """Put the full blocks of all that is computed into the tree."""
        self.insert(request, request.computed)

    def insert(self, request: Request, tokens: int) -> None:
        """Put the full blocks of a running request's first tokens into the tree."""
        path = self._held[request]
        blocks = self._whole(tokens)
        if not blocks:
            return
        end, found = self._insert(request, blocks, path, path.inserted)
        path.inserted = max(path.inserted, blocks)
        prompt = self._whole(request.prompt_tokens)
        if 0 < prompt < blocks:  # so that the answer can be evicted without the prompt
            from_ = path if path.blocks <= prompt else Path(self._root, 0)
            if from_.blocks == prompt:
                self._use_path(from_, request.priority + 1, prompt)
            else:
                self._insert(request, prompt, from_, prompt, above=1)
        double = max(found - path.blocks, 0)  # somebody else has computed the same meanwhile
        self._pool += double
        self.free += double
        self._lock(end, path.end)
        path.end, path.blocks = end, blocks

    def release(self, request: Request) -> None:
        """Unlock the path; what a finished request leaves in the tree may be found by others."""
        self.unreserve(request)
        if request.finish >= 0:
            self.cache(request)
        path = self._held.pop(request)
        own = -(-request.computed // self.block_size) - path.blocks
        self._pool += own
        self.free += own
        self._unlock(path.end)
        request.computed = 0

    def make_room(self, count: int) -> None:
        """Evict until so many blocks are nobody's, or nothing can be evicted."""
        if self._pool >= count:
            return
        key, leaves = EVICTION_POLICIES[self.eviction_policy], self._leaves
        while self._pool < count and leaves:
            old, _, leaf = heappop(leaves)
            leaf.offered = False
            if leaf.locks or leaf.children:
                continue  # in use
            parent = leaf.parent
            if parent is None:
                continue  # evicted
            if old != key(leaf):
                self._offer(leaf)
                continue
            del parent.children[leaf.key]
            leaf.parent = None
            self._pool += leaf.blocks
            self._blocks_in_tree -= leaf.blocks
            if not parent.children:
                self._offer(parent)

    def depth_first(self, ends: Iterable[Node]) -> list[int]:
        """Order paths by their ends, depth first: where more of them pass, first.

        At each node those that end there come after those that go on. Returns their numbers.
        """
        ending: dict[Node, list[int]] = {}
        weight: dict[Node, int] = {}
        for number, end in enumerate(ends):
            ending.setdefault(end, []).append(number)
            above: Node | None = end
            while above is not None:
                weight[above] = weight.get(above, 0) + 1
                above = above.parent
        order: list[int] = []
        todo: list[tuple[Node, bool]] = [(self._root, False)]
        while todo:
            node, seen = todo.pop()
            if seen:
                order += ending.get(node, ())
                continue
            below = [child for child in node.children.values() if child in weight]
            todo.append((node, True))
            todo += [(c, False) for c in sorted(below, key=lambda c: -weight[c])[::-1]]
        return order

    def _use(self, node: Node) -> None:
        self._clock += 1
        node.stamp = self._clock
        if self.eviction_policy == "mru":  # it may go earlier than it was due
            node.offered = False
            self._offer(node)

    def _offer(self, node: Node) -> None:
        """Let a node be evicted, if it is a leaf that nobody has locked."""
        if not node.locks and not node.children and not node.offered:
            node.offered = True
            self._pushed += 1
            key = EVICTION_POLICIES[self.eviction_policy](node)
            heappush(self._leaves, (key, self._pushed, node))

    def _lock(self, node: Node, above: Node | None = None) -> None:
        """Lock a path, of which the part that ends at `above` is locked already."""
        while node is not above and node.parent is not None:
            if node.locks:
                self.shared += node.blocks
            else:
                self.free -= node.blocks
            node.locks += 1
            node = node.parent

    def _unlock(self, node: Node) -> None:
        while node.parent is not None:
            node.locks -= 1
            if node.locks:
                self.shared -= node.blocks
            else:
                self.free += node.blocks
                if not node.children:
                    self._offer(node)
            node = node.parent

    def _use_path(self, path: Path, priority: int, inserted: int) -> None:
        """Use a path, of which a request has put `inserted` blocks there before."""
        there = path.blocks
        self._clock += there  # a node has a block at least: stamps enough for all
        stamp, renews, node = self._clock, self.eviction_policy == "mru", path.end
        while node.parent is not None:
            node.stamp = stamp
            node.priority = max(node.priority, priority)
            node.inserts += there > inserted
            if renews:
                node.offered = False
                self._offer(node)
            there -= node.blocks
            stamp -= 1
            node = node.parent

    def _walk(self, content: list[Piece], node: Node) -> Iterator[tuple[Node, int, Cursor]]:
        """Follow `content` down from a node.

        Yields nodes, how many of their blocks it covers, and how far that is. Only the last node
        may be covered in part.
        """
        cursor = (0, 0)
        while cursor[0] < len(content) and node.children:
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

    def _insert(
        self, request: Request, blocks: int, path: Path, inserted: int, above: int = 0
    ) -> tuple[Node, int]:
        """Use the path of a request's first blocks and add what is not there.

        It begins with `path`, and has `inserted` blocks there itself; its priority counts for
        `above` more. Returns the end of the path and the blocks that were there.
        """
        priority = request.priority + above
        node, there = path.end, path.blocks
        self._use_path(path, priority, inserted)
        if there == blocks:
            return node, there
        size = self.block_size
        content = self._content(request, blocks * size, there * size)
        cursor, key = (0, 0), self._key(content, (0, 0))
        if key in node.children:
            for found, length, after in self._walk(content, node):
                node = found if length == found.blocks else self._split(found, length)
                self._use(node)
                node.priority = max(node.priority, priority)
                cursor, there = after, there + length
                node.inserts += there > inserted
            if there == blocks:
                return node, there
            content = _rest(content, cursor)
            key = self._key(content, (0, 0))
        self._clock += 1
        new = self._node(node, content, blocks - there, key, stamp=self._clock, created=self._clock)
        new.priority, new.inserts = priority, int(blocks > inserted)
        # It consists of blocks that the request has taken: as long as nobody locks it, it is free.
        self.free += new.blocks
        self._blocks_in_tree += new.blocks
        node.children[key] = new
        return new, there

    def _split(self, node: Node, blocks: int) -> Node:
        """Cut an edge after so many blocks; return the new upper node.

        The lower one stays itself: whoever holds it goes on to hold the whole path.
        """
        parent = node.parent
        assert parent is not None
        cursor = _advance(node.pieces, (0, 0), blocks * self.block_size)
        lower = _rest(node.pieces, cursor)
        first = _first(node.pieces, cursor)
        upper = self._node(parent, first, blocks, node.key, locks=node.locks, stamp=node.stamp)
        upper.created, upper.inserts, upper.priority = node.created, node.inserts, node.priority
        parent.children[upper.key] = upper
        node.parent, node.pieces, node.blocks = upper, lower, node.blocks - blocks
        node.key = self._key(lower, (0, 0))
        upper.children[node.key] = node
        self._use(node)  # as SGLang does
        return upper

    def _key(self, content: list[Piece], cursor: Cursor) -> tuple[Piece, ...]:
        """Return the pieces of the block that begins at a place."""
        index, offset = cursor
        room = self.block_size
        name, first, count = content[index]
        if count - offset >= room:
            return ((name, first + offset, room),)
        key = []
        while room and index < len(content):
            name, first, count = content[index]
            taken = min(count - offset, room)
            key.append((name, first + offset, taken))
            room -= taken
            index, offset = index + 1, 0
        return tuple(key)


def pieces_of(request: Request, tokens: int, start: int = 0) -> list[Piece]:
    """Get the first `tokens` tokens of a request, prompt and answer, without the first `start`."""
    if tokens <= request.prompt_tokens and request.segments is None:
        return [(("in", request.id), start, tokens - start)] if tokens > start else []
    found = []
    for name, count in (*request.contents, (("out", request.id), request.generated)):
        end = min(count, tokens)
        if start < end:
            found.append((name, start, end - start))
        tokens -= end
        if not tokens:
            break
        start = max(start - count, 0)
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
    """Return what follows a place."""
    index, offset = cursor
    name, first, count = content[index]
    return [(name, first + offset, count - offset), *content[index + 1 :]]


def _first(content: list[Piece], cursor: Cursor) -> list[Piece]:
    """Return what precedes a place."""
    index, offset = cursor
    part = content[:index]
    if offset:
        name, first, _ = content[index]
        part.append((name, first, offset))
    return part
