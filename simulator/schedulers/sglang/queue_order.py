"""The order in which SGLang tries to admit those who wait (its `SchedulePolicy`)."""

from collections.abc import Callable, Hashable, Iterator
from random import Random
from typing import Any

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.radix_cache import Node, RadixCache, pieces_of
from simulator.kv_cache.unshared_radix_cache import UnsharedRadixCache
from simulator.policies.fair import ServiceCounter
from simulator.policies.policy import EngineView
from simulator.policies.waiting_queues import Fifo, WaitingQueue, queue_of

CACHE_AWARE = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
"""Orders by what the prefix cache knows; without one they are fcfs."""
ORDERS = ("fcfs", "lof", "random", *CACHE_AWARE)
BY_ENTRY = ("hrrn", "shortest-prefill-first")
"""Orders by when requests queued up; with priorities all are."""
WITH_PRIORITIES = ("fcfs", "lof")
MATCHED_AT_MOST = 128  # requests; with more, lpm and hrrn do not look at the cache
REFRESH_INTERVAL = 32  # sorts, from one that uses the paths of those who wait to the next
MORE_THAN_ORDER = {
    "displaces": "lets waiting requests displace running ones",
    "victim": "picks victims",
    "promote": "promotes requests that have waited long",
}
"""What a policy may do beside ordering the queue, by its hooks."""
IN_BATCH_PREFIX_TOKENS = 32  # tokens; IN_BATCH_PREFIX_CACHING_*_THRESHOLD


class Queue(Fifo):
    """The waiting queue. Given a clock, it notes when each request queued up last.

    `clock()` is the tokens of prompts computed so far.
    """

    def __init__(self, clock: Callable[[], int] | None) -> None:
        super().__init__()
        self._clock = clock
        self._entries = 0
        self.entered: dict[Request, tuple[int, int]] = {}  # (number, tokens computed by then)

    def add(self, request: Request) -> bool:
        if self._clock is not None:
            self._entries += 1
            self.entered[request] = self._entries, self._clock()
        self.append(request)
        return len(self) == 1

    def put_back(self, request: Request) -> None:
        """Take back a retracted or preempted request: it queues up again."""
        self.add(request)


class PolicyQueue:
    """The waiting queue under one of Headway's policies, which says who is tried next.

    SGLang goes on from one request to the next as long as they are admitted, and the policy is
    asked after each. What SGLang does with the queue besides goes by the order of queueing up.
    """

    moves = False

    def __init__(self, order: WaitingQueue, books: ServiceCounter | None) -> None:
        self.order = order
        self.books = books  # that the policy keeps of tokens
        self._here: dict[Request, None] = {}
        self._settle = getattr(order, "settle", None)
        self._refresh = getattr(order, "refresh", None)
        self.entered: dict[Request, tuple[int, int]] = {}  # nobody asks for it here

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._here)

    def sort(self, now: float) -> None:
        """Bring the order up to date; `now` is in seconds."""
        if self._settle is not None:
            self._settle(now)
        if self._refresh is not None:
            self._refresh(now)
        self.order.head()

    def add(self, request: Request) -> bool:
        self._here[request] = None
        return self.order.add(request)

    def put_back(self, request: Request) -> None:
        self._here[request] = None
        self.order.put_back(request)

    def head(self) -> Request:
        return self.order.head()

    def take(self) -> Request:
        request = self.order.take()
        del self._here[request]
        return request

    def remove(self, request: Request) -> None:
        del self._here[request]
        self.order.remove(request)


def check_orders(policy: type, name: str) -> None:
    """Refuse a policy that does more than order the waiting queue; ValueError says what."""
    for hook, what in MORE_THAN_ORDER.items():
        if hasattr(policy, hook):
            raise ValueError(
                f"{name} {what}: under SGLang, which chooses itself whom it retracts, a policy "
                "only orders the waiting queue"
            )


def make_queue(policy: Any, engine: EngineView) -> PolicyQueue:
    """Make a policy's waiting queue, with the books that it keeps of tokens, if it does.

    ValueError where the policy does more than order, or keeps books in another way.
    """
    name, decodes = type(policy).__name__, engine.decodes
    check_orders(type(policy), name)
    queue, books = queue_of(policy, engine), engine.decodes
    if books is decodes:
        return PolicyQueue(queue, None)
    if not isinstance(books, ServiceCounter):
        raise ValueError(f"{name} keeps books of its own, and SGLang's scheduler cannot fill them")
    return PolicyQueue(queue, books)


class QueueOrder:
    """Sorts the queue; the order lasts, later sorts are stable on top of it.

    `priority` gives the urgency of a request, least first; None: there are no priorities. Whoever
    has tokens in common with another in the queue, and few in the cache, waits until that one is
    computed.
    """

    def __init__(
        self,
        order: str,
        blocks: BlockCounter,
        priority: Callable[[Request], int] | None,
        seed: int,
    ) -> None:
        self.tree = blocks if isinstance(blocks, RadixCache) else None
        self.order = order if self.tree or order not in CACHE_AWARE else "fcfs"
        self._priority = priority
        self._sorts = self.order != "fcfs" or priority is not None
        self._random = Random(seed)
        self._refreshed: RadixCache | UnsharedRadixCache | None = None  # with the policy lru
        if isinstance(blocks, UnsharedRadixCache):
            self._refreshed = blocks
        elif self.tree is not None and self.tree.eviction_policy == "lru":
            self._refreshed = self.tree
        self._refreshes = 0
        self.cached: dict[Request, int] = {}  # tokens, by the last sort that asked

    def sort(self, queue: Queue | PolicyQueue, computed: int, now: float) -> None:
        """Put the queue in order; `computed` tokens of prompts have been, so far, by `now` (s)."""
        order = self.order
        if order in ("lpm", "hrrn") and len(queue) > MATCHED_AT_MOST:
            order = "unsorted"
        if isinstance(queue, PolicyQueue):
            queue.sort(now)
        elif self._sorts and queue:
            self._sort_by(order, queue, computed)
        if self._refreshed is not None and order not in CACHE_AWARE and queue:
            self._refreshes += 1
            if self._refreshes % REFRESH_INTERVAL == 1:
                self._refresh(self._refreshed, queue)

    def _sort_by(self, order: str, queue: Queue, computed: int) -> None:
        priority, entered = self._priority, queue.entered
        if order in CACHE_AWARE and self.tree is not None:
            self._sort_by_cache(order, self.tree, queue, computed)
        elif order == "random":
            self._random.shuffle(queue)
        elif order == "fcfs" and priority is not None:
            _reorder(queue, lambda request: (priority(request), entered[request]))
        elif order == "lof" and priority is not None:
            _reorder(queue, lambda request: (priority(request), -request.allowed))
        elif order == "lof":
            _reorder(queue, lambda request: -request.allowed)

    def uncached(self, request: Request) -> int:
        """Count the tokens that a waiting request has to compute, one at least."""
        return max(1, request.known - self.cached[request])

    def left_by(self, queue: Queue | PolicyQueue, chunked: Request, size: int) -> int | None:
        """Return what shorter prompts leave of `size` tokens to the split one; None: all."""
        tree = self.tree
        if self.order != "shortest-prefill-first" or tree is None or size < 2 * tree.block_size:
            return None
        page, taken = tree.block_size, 0
        for request in queue:
            work = self.uncached(request)
            paged = -(-work // page) * page
            if work >= chunked.pending or taken + paged > size - page:
                break
            taken += paged
        return (size - taken) // page * page if taken else None

    def _sort_by_cache(self, order: str, tree: RadixCache, queue: Queue, computed: int) -> None:
        ends = self._match(tree, queue)
        cached, late, infinity = self.cached, self._deprioritized, float("inf")
        if order == "dfs-weight":
            waiting = list(queue)
            queue.clear()
            queue.extend(waiting[number] for number in tree.depth_first(ends))
        elif order == "lpm":
            _reorder(queue, lambda request: infinity if request in late else -cached[request])
        elif order == "shortest-prefill-first":
            entered = queue.entered
            _reorder(queue, lambda r: (r in late, self.uncached(r), entered[r]))
        else:

            def response_ratio(request: Request) -> tuple[float, int]:
                left = request.prompt_tokens - cached[request]
                if request in late:
                    return infinity, request.id
                if left <= 0:
                    return -infinity, request.id
                return (queue.entered[request][1] - computed) / left, request.id

            _reorder(queue, response_ratio)

    def _match(self, tree: RadixCache, queue: Queue) -> list[Node]:
        """Look all up in the cache, and find those that are computed for others already."""
        seen: set[Hashable] = set()
        ends: list[Node] = []
        self.cached.clear()
        self._deprioritized: set[Request] = set()
        for request in queue:
            blocks, end = tree.find(request, request.known)
            ends.append(end)
            tokens = blocks * tree.block_size
            loads = tree.host_hits * tree.block_size
            self.cached[request] = min(tokens + loads, request.known - 1)
            if tokens <= IN_BATCH_PREFIX_TOKENS <= request.known:
                start = tuple(pieces_of(request, IN_BATCH_PREFIX_TOKENS))
                if start in seen:
                    self._deprioritized.add(request)
                seen.add(start)
        return ends

    def _refresh(self, tree: RadixCache | UnsharedRadixCache, queue: Queue | PolicyQueue) -> None:
        """Use what those who wait would find, the head's last."""
        for request in reversed(list(queue)[:MATCHED_AT_MOST]):
            tree.find(request, request.known)


def _reorder(queue: Queue, key: Callable[[Request], object]) -> None:
    ordered = sorted(queue, key=key)  # type: ignore[arg-type]
    queue.clear()
    queue.extend(ordered)
