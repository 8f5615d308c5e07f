"""SGLang's HiCache: a radix tree whose nodes may have their KV on the GPU, in host memory, or both.

The rules are those of SGLang 0.5.23 (`srt/mem_cache/unified_radix_cache.py`,
`unified_cache/unified_tree_core.py` and `components/full.py`). Along a path the GPU's part comes
first. Leaves of that part are evicted, and stay on the host if they are there too; a prompt whose
path goes on in host memory has that part loaded when it is admitted.

What is copied to the host is locked until it is there, and what comes from it until the step that
waits for it is over. Copies to the host take their turns on a link; one begins when the step that
is under way has ended.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from simulator.core.request import Request
from simulator.kv_cache.radix_cache import EVICTION_POLICIES, EvictionKey, Node, Path, RadixCache

WRITE_POLICIES = {"write_back": 0, "write_through": 1, "write_through_selective": 2}
"""When a node is copied to the host: as the so many-th request puts it in; 0: as it is evicted."""
LEAST_LOAD = 10  # tokens; fewer are computed again


@dataclass(eq=False, slots=True)
class TieredNode(Node):
    """The end of an edge, whose KV is on the GPU, on the host, or both."""

    on_gpu: bool = False
    on_host: bool = False
    on_gpu_below: int = 0  # children whose KV is on the GPU
    copies: int = 0  # to the host or from it, whose paths pass here
    anchor: "TieredNode | None" = None  # with write_back, the end of what is loaded with it


@dataclass(slots=True)
class _Leaves:
    """Nodes that may be evicted, as far as they are `good`: the one with the least key first."""

    good: Callable[[TieredNode], bool]
    heap: list[tuple[tuple[int, int], int, TieredNode]] = field(default_factory=list)
    inside: set[TieredNode] = field(default_factory=set)
    pushed: int = 0

    def add(self, node: TieredNode, key: EvictionKey, *, again: bool) -> None:
        if (again or node not in self.inside) and self.good(node):
            self.inside.add(node)
            self.pushed += 1
            heappush(self.heap, (key(node), self.pushed, node))

    def pop(self, key: EvictionKey) -> TieredNode | None:
        while self.heap:
            old, _, node = heappop(self.heap)
            self.inside.discard(node)
            if old != key(node):
                self.add(node, key, again=False)
            elif self.good(node):
                return node
        return None


class HierarchicalCache(RadixCache):
    """A radix tree with `host_blocks` blocks of host memory.

    `write_policy` is a key of WRITE_POLICIES. `store_time` is what a copy of so many blocks to the
    host takes, s; with write_back none takes any.
    """

    _root: TieredNode
    _found: TieredNode
    _node = TieredNode

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        host_blocks: int,
        write_policy: str = "write_through",
        store_time: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.host_free = host_blocks
        self._threshold = WRITE_POLICIES[write_policy]
        self._store_time = store_time
        self._root.on_gpu = True
        self._best = self._root  # the end of the path of the last hits, on the host or the GPU
        self._gpu_leaves = _Leaves(_is_gpu_leaf)
        self._host_leaves = _Leaves(_is_host_leaf)
        self._doubles: dict[TieredNode, None] = {}  # on GPU and host, for write_back
        self._queued: list[tuple[TieredNode, int]] = []  # copies to the host that have not begun,
        self._fenced: list[list[tuple[TieredNode, int]]] = []  # or begin when a step has ended
        self._stores: deque[tuple[float, list[TieredNode]]] = deque()  # with when they are there
        self._link_free = 0.0  # s
        self._loads: list[TieredNode] = []  # for the step that is being decided
        self._loading: deque[list[TieredNode]] = deque()  # for each in flight that loads any
        self._loaded: list[TieredNode] = []

    # What is cached.

    def find(self, request: Request, tokens: int) -> tuple[int, Node]:
        hits, end = super().find(request, tokens)
        assert isinstance(end, TieredNode)
        self._best, self.host_hits, self._idle = end, 0, 0
        while not end.on_gpu:
            self.host_hits += end.blocks
            end = _above(end)
        self._found = node = end
        while node is not self._root:
            if not node.locks and not node.copies:
                self._idle += node.blocks
            node = _above(node)
        return hits - self.host_hits, end

    def load_back(self) -> bool:
        """Load what the last `match` found on the host; False: it is too little, or has no room.

        If so, `admit` takes hits that reach so much further.
        """
        best, count = self._best, self.host_hits
        if count * self.block_size < LEAST_LOAD:
            return False
        self._hold(best)
        self.make_room(count)
        if self._pool < count:
            self._let_go(best)
            return False
        self._pool -= count
        self.free -= count
        self._blocks_in_tree += count
        node = best
        while not node.on_gpu:
            node.on_gpu = True
            node.anchor = None if self._threshold else best
            node = _above(node)
            node.on_gpu_below += 1
        self._loads.append(best)
        self._found = best
        return True

    # Copies come and go.

    @property
    def next_store(self) -> float | None:
        """When the next copy to the host is there, s; None: none is under way."""
        return self._stores[0][0] if self._stores else None

    @property
    def copying(self) -> bool:
        """Whether a copy will change what may be evicted."""
        return bool(self._stores or self._queued or self._fenced or self._loading or self._loaded)

    def begin_pass(self, now: float, *, in_flight: bool) -> None:
        """Take in the copies that are done by `now`, when the next step is decided."""
        self._begin_stores(now, in_flight=in_flight)
        while self._stores and self._stores[0][0] <= now:
            for node in self._stores.popleft()[1]:
                self._let_go(node)
        for node in self._loaded:
            self._let_go(node)
            above = node
            while above is not self._root:
                if not self._threshold and above.anchor is node:
                    above.anchor = None
                    self._note_double(above)
                above = _above(above)
        self._loaded.clear()

    def take_loads(self) -> None:
        """Let the step just decided carry out the loads of its pass."""
        self._loading.append(self._loads)
        self._loads = []

    def end_step(self, now: float, *, loads: bool, in_flight: bool) -> None:
        """Hear that a step has ended, its outcome taken in; another may be in flight."""
        if loads:
            self._loaded += self._loading.popleft()
        for copies in self._fenced:
            self._begin(copies, now)
        self._fenced.clear()
        self._begin_stores(now, in_flight=in_flight)

    def _begin_stores(self, now: float, *, in_flight: bool) -> None:
        """Let the copies that have been asked for begin, together."""
        if self._queued:
            queued, self._queued = self._queued, []
            if in_flight:
                self._fenced.append(queued)
            else:
                self._begin(queued, now)

    def _begin(self, copies: list[tuple[TieredNode, int]], now: float) -> None:
        blocks = sum(count for _, count in copies)
        self._link_free = max(self._link_free, now) + self._store_time(blocks)
        self._stores.append((self._link_free, [node for node, _ in copies]))

    # Requests put their tokens in.

    def _insert(
        self, request: Request, blocks: int, path: Path, inserted: int, above: int = 0
    ) -> tuple[Node, int]:
        """Put in a request's first blocks; what is on the host alone is on the GPU again.

        Returns the end of the path, and the blocks that were there on the GPU.
        """
        counted = inserted if self._threshold else blocks  # write_back counts no requests
        end, there = super()._insert(request, blocks, path, counted, above)
        node, at = end, blocks
        absent, due = list[TieredNode](), list[TieredNode]()
        while node is not self._root:
            assert isinstance(node, TieredNode)
            if not node.on_gpu:
                absent.append(node)
            if at > counted and not node.on_host and node.inserts >= self._threshold:
                due.append(node)
            at -= node.blocks
            node = _above(node)
        for node in reversed(absent):
            node.on_gpu = True
            _above(node).on_gpu_below += 1
            if node.on_host:
                there -= node.blocks
                self.free += node.blocks
                self._blocks_in_tree += node.blocks
                self._note_double(node)
        for node in reversed(due):
            self._store(node)
        return end, there

    def _store(self, node: TieredNode) -> None:
        """Have a node copied to the host, after those before it."""
        lacking = []
        while node is not self._root and not node.on_host:
            lacking.append(node)
            node = _above(node)
        for node in reversed(lacking):
            if not self._put_on_host(node):
                return
            self._hold(node)
            self._queued.append((node, node.blocks))

    def _put_on_host(self, node: TieredNode) -> bool:
        """Give a node blocks of the host; False: there are too few."""
        if not self._make_host_room(node.blocks):
            return False
        self.host_free -= node.blocks
        self.offloaded += node.blocks
        node.on_host = True
        return True

    def _split(self, node: Node, blocks: int) -> Node:
        upper = super()._split(node, blocks)
        assert isinstance(node, TieredNode)
        assert isinstance(upper, TieredNode)
        upper.on_gpu, upper.on_host = node.on_gpu, node.on_host
        upper.on_gpu_below, upper.copies, upper.anchor = int(node.on_gpu), node.copies, node.anchor
        self._note_double(upper)
        return upper

    # Room.

    def make_room(self, count: int) -> None:
        key = EVICTION_POLICIES[self.eviction_policy]
        while self._pool < count:
            leaf = self._gpu_leaves.pop(key)
            if leaf is None:
                return
            if not self._threshold and not leaf.on_host:
                if self._put_on_host(leaf):
                    self._note_double(leaf)
                else:
                    self._drop_below(leaf)
            above = _above(leaf)
            leaf.on_gpu = False
            above.on_gpu_below -= 1
            self._pool += leaf.blocks
            self._blocks_in_tree -= leaf.blocks
            if leaf.on_host:
                self._offer(leaf)
            else:
                self._remove(leaf)
            self._offer(above)

    def _drop_below(self, node: TieredNode) -> None:
        """Forget what the host has beyond a node, which cannot be kept there itself."""
        for child in list(node.children.values()):
            assert isinstance(child, TieredNode)
            self._drop_below(child)
            self.host_free += child.blocks
            self._remove(child)

    def _make_host_room(self, count: int) -> bool:
        """Evict from the host until so many blocks are free there; say whether they are."""
        if not self._threshold and self.host_free < count:
            self._drop_doubles(count)
        key = EVICTION_POLICIES[self.eviction_policy]
        while self.host_free < count:
            leaf = self._host_leaves.pop(key)
            if leaf is None:
                return False
            above = _above(leaf)
            self.host_free += leaf.blocks
            self._remove(leaf)
            self._offer(above)
        return True

    def _drop_doubles(self, count: int) -> None:
        """Free blocks of the host whose KV the GPU has, too: last of what it evicts next."""
        gone = []
        for spares in (True, False):
            if self.host_free >= count:
                break
            for node in self._doubles:
                if self.host_free >= count:
                    break
                if not (node.on_gpu and node.on_host):
                    gone.append(node)
                elif node.anchor is None and not (spares and _is_gpu_leaf(node)):
                    node.on_host = False
                    self.host_free += node.blocks
                    gone.append(node)
        for node in gone:
            self._doubles.pop(node, None)

    def _note_double(self, node: TieredNode) -> None:
        """Note, with write_back, whether a node has its KV in both places and is at rest."""
        if not self._threshold:
            if node.on_gpu and node.on_host and node.anchor is None:
                self._doubles.setdefault(node)
            else:
                self._doubles.pop(node, None)

    def _remove(self, node: TieredNode) -> None:
        del _above(node).children[node.key]
        node.parent = None
        self._doubles.pop(node, None)

    def _offer(self, node: Node) -> None:
        assert isinstance(node, TieredNode)
        key, again = EVICTION_POLICIES[self.eviction_policy], self.eviction_policy == "mru"
        (self._gpu_leaves if node.on_gpu else self._host_leaves).add(node, key, again=again)

    # Locks, of requests and of copies.

    def _lock(self, node: Node, above: Node | None = None) -> None:
        while node is not above and node.parent is not None:
            assert isinstance(node, TieredNode)
            if node.locks:
                self.shared += node.blocks
            elif not node.copies:
                self.free -= node.blocks
            node.locks += 1
            node = node.parent

    def _unlock(self, node: Node) -> None:
        while node.parent is not None:
            assert isinstance(node, TieredNode)
            node.locks -= 1
            if node.locks:
                self.shared -= node.blocks
            elif not node.copies:
                self.free += node.blocks
                self._offer(node)
            node = node.parent

    def _hold(self, node: TieredNode) -> None:
        """Lock a path for a copy."""
        while node is not self._root:
            if node.on_gpu and not node.locks and not node.copies:
                self.free -= node.blocks
            node.copies += 1
            node = _above(node)

    def _let_go(self, node: TieredNode) -> None:
        while node is not self._root:
            node.copies -= 1
            if not node.locks and not node.copies:
                if node.on_gpu:
                    self.free += node.blocks
                self._offer(node)
            node = _above(node)


def _above(node: TieredNode) -> TieredNode:
    assert isinstance(node.parent, TieredNode)
    return node.parent


def _is_gpu_leaf(node: TieredNode) -> bool:
    """Say whether the GPU may evict a node."""
    idle = not node.locks and not node.copies and node.parent is not None
    return idle and node.on_gpu and not node.on_gpu_below


def _is_host_leaf(node: TieredNode) -> bool:
    """Say whether the host may."""
    idle = not node.locks and not node.copies and node.parent is not None
    return idle and node.on_host and not node.on_gpu and not node.children
