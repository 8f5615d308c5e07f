"""The waiting queues: who is admitted next, by arrival, by a policy's key, rank or own queue.

A queue whose order changes while nobody comes or goes has `refresh(now)`, which DynamicScheduler
calls when an order may matter. The queues are one file: `queue_of` chooses among them.
"""

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from math import isnan
from operator import lt
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from simulator.core.request import Request
from simulator.policies.policy import Batch, Policy, failed, short
from simulator.util.errors import HeadwayError, ScenarioError, one_line

FIELDS = (
    "id",
    "arrival",
    "prompt_tokens",
    "priority",
    "hint",
    "max_tokens",
    "generated",
    "preemptions",
)
NO_HINT = -1  # in the columns `hint` and `max_tokens`: nobody predicted, or allowed, a length


class WaitingQueue(Protocol):
    """The waiting queue that a scheduler works with.

    It may have `settle(now)`, which is called before each step is decided; `add` then says whether
    that call is due for the new request, also where all `max_num_seqs` run.
    """

    moves: bool
    """The head may change while nothing but decodes happens."""

    def __len__(self) -> int: ...

    def add(self, request: Request) -> bool:
        """Take a new request; say whether it is now the head."""

    def put_back(self, request: Request) -> None:
        """Take back a preempted request."""

    def head(self) -> Request: ...

    def take(self) -> Request: ...

    def remove(self, request: Request) -> None: ...


METHODS = ("moves", "__len__", "add", "put_back", "head", "take", "remove")
"""What a waiting queue must have."""


class Fifo(deque[Request]):
    """First come, first served; a preempted request goes to the front (vLLM's `fcfs`)."""

    moves = False

    def add(self, request: Request) -> bool:
        self.append(request)
        return len(self) == 1

    def put_back(self, request: Request) -> None:
        self.appendleft(request)

    def head(self) -> Request:
        return self[0]

    def take(self) -> Request:
        return self.popleft()


class KeyQueue:
    """Ordered by `policy.key(request)`, a heap; equals in order of joining.

    Raises HeadwayError where the policy fails, or its keys have no order.
    """

    moves = False

    def __init__(self, policy: Policy) -> None:
        self._heap: list[tuple[Any, int, Request]] = []
        self._policy = policy
        self._joined = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> bool:
        self._push(request)
        return self._heap[0][2] is request

    def _push(self, request: Request) -> int:
        """Rank a request; return the number of its entry."""
        number = next(self._joined)
        try:
            key = self._policy.key(request)
        except Exception as error:
            raise failed(self._policy, f"key(request {request.id})", error) from error
        try:
            if any(
                isinstance(x, float) and isnan(x) for x in (key if type(key) is tuple else (key,))
            ):
                raise ValueError("NaN is neither less nor more than anything")
            lt(key, key)  # None cannot be compared even with itself
            heappush(self._heap, (key, number, request))
        except Exception as error:
            raise self._unordered(f"{short(key)} of request {request.id}", error) from error
        return number

    def _unordered(self, what: str, error: Exception) -> HeadwayError:
        return HeadwayError(
            f"engine.scheduling_policy: {type(self._policy).__name__}.key: {what} cannot be "
            f"ranked: {one_line(error)}"
        )

    def put_back(self, request: Request) -> None:
        self.add(request)

    def head(self) -> Request:
        return self._heap[0][2]

    def take(self) -> Request:
        try:
            return heappop(self._heap)[2]
        except Exception as error:  # keys that differ in type only further back
            raise self._unordered("a key", error) from error

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[2] is not request]
        try:
            heapify(self._heap)
        except Exception as error:
            raise self._unordered("a key", error) from error


class PromotingQueue(KeyQueue):
    """Ordered by a policy's key, until somebody has waited `policy.patience` seconds.

    Then the policy is told, `promote(request)`, and its key asked for again: once, until the
    request has run and waits again. Raises ValueError where `patience` is no time.
    """

    def __init__(self, policy: Any, batch: Batch) -> None:
        super().__init__(policy)
        patience = getattr(policy, "patience", None)
        if not isinstance(patience, int | float) or isnan(patience) or patience <= 0:
            what = f"{type(policy).__name__}.patience must be more than 0 seconds, not {patience!r}"
            raise ScenarioError("engine.scheduling_policy", what)
        self._batch = batch
        self._patience, self._promote = patience, policy.promote
        self._valid: dict[Request, int] = {}  # the number of its entry in the heap; others are dead
        self._since: deque[tuple[float, int, Request]] = deque()  # since when, in order of time

    def __len__(self) -> int:
        return len(self._valid)

    def add(self, request: Request) -> bool:
        self._since.append((request.arrival, self._push(request), request))
        return self.head() is request

    def put_back(self, request: Request) -> None:
        self._since.append((self._batch.now, self._push(request), request))

    def _push(self, request: Request) -> int:
        number = self._valid[request] = super()._push(request)
        return number

    def head(self) -> Request:
        heap, valid = self._heap, self._valid
        while valid.get(heap[0][2]) != heap[0][1]:
            heappop(heap)
        return heap[0][2]

    def take(self) -> Request:
        self.head()
        request = super().take()
        del self._valid[request]
        return request

    def remove(self, request: Request) -> None:
        del self._valid[request]

    def refresh(self, now: float) -> None:
        """Promote those who have waited long enough."""
        since = self._since
        while since and since[0][0] + self._patience <= now:
            _, number, request = since.popleft()
            if self._valid.get(request) == number:
                self._promote(request)
                self._push(request)


class RankQueue:
    """A queue ordered by `policy.rank(waiting, now)`, asked at most once per step.

    The policy sees the queue as `waiting.arrival`, `waiting.prompt_tokens` and so on: the fields
    of FIELDS as numpy arrays of floats, one entry per request, in no particular order. Of equals
    the one with the smaller id is admitted first. Raises HeadwayError where the policy fails.
    """

    moves = False  # `refresh` is called when it may have

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._requests: list[Request] = []
        self._table = np.empty((len(FIELDS), 64))
        self._ranks: npt.NDArray[np.float64] | None = None  # None: to be asked for
        self._now = 0.0  # s

    def __len__(self) -> int:
        return len(self._requests)

    def __getattr__(self, name: str) -> npt.NDArray[np.float64]:
        if name not in FIELDS:
            raise AttributeError(f"a column {name!r}; there are {', '.join(FIELDS)}")
        return self._table[FIELDS.index(name), : len(self._requests)]

    def add(self, request: Request) -> bool:
        at = len(self._requests)
        if at == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.empty_like(self._table)], axis=1)
        values = [getattr(request, name) for name in FIELDS]
        self._table[:, at] = [NO_HINT if value is None else value for value in values]
        self._requests.append(request)
        self._ranks = None
        return True

    def put_back(self, request: Request) -> None:
        self.add(request)

    def refresh(self, now: float) -> None:
        """Rank anew, as of now."""
        self._now = now
        self._ranks = None

    def head(self) -> Request:
        return self._requests[self._first()]

    def take(self) -> Request:
        return self._pop(self._first())

    def remove(self, request: Request) -> None:
        self._pop(self._requests.index(request))

    def _first(self) -> int:
        ranks = self._ranks
        if ranks is None:
            ranks = self._ranks = self._rank()
        first = int(ranks.argmin())
        equals = np.flatnonzero(ranks == ranks[first])
        return first if len(equals) == 1 else int(equals[self.id[equals].argmin()])

    def _rank(self) -> npt.NDArray[np.float64]:
        call = "rank(waiting, now)"
        try:
            ranks = np.array(self._policy.rank(self, self._now), float)
        except Exception as error:
            raise failed(self._policy, call, error) from error
        if ranks.shape != (len(self),) or np.isnan(ranks).any():
            raise HeadwayError(
                f"engine.scheduling_policy: {type(self._policy).__name__}.{call} must give a "
                f"number for each of {len(self)} requests, not an array of shape {ranks.shape} "
                f"with {int(np.isnan(ranks).sum())} NaN"
            )
        return ranks

    def _pop(self, at: int) -> Request:
        """Take out one request; the last takes its place."""
        request, last = self._requests[at], self._requests.pop()
        end = len(self._requests)
        if at < end:
            self._requests[at] = last
            self._table[:, at] = self._table[:, end]
        if self._ranks is not None:
            self._ranks[at] = self._ranks[end]
            self._ranks = self._ranks[:end]
        return request


class RatioQueue:
    """The largest (now - arrival) / size first, of equals the smaller id.

    Of requests of one size the earliest goes first, whatever the time is: so only one of each size
    is compared, where RankQueue compares all who wait.
    """

    moves = False  # `refresh` is called when it may have

    def __init__(self, size: Callable[[Request], int]) -> None:
        self._size = size
        self._places: dict[int, int] = {}  # by size, of its heap
        self._heaps: list[list[tuple[float, int, Request]]] = []
        self._sizes = np.ones(64)
        self._arrivals = np.full(64, np.inf)  # s, of the first in each heap; inf: it is empty
        self._count = 0
        self._now = 0.0  # s
        self._ratios: npt.NDArray[np.float64] | None = None  # of each place, as of now
        self._first: int | None = None  # the place whose turn it is, until something changes

    def __len__(self) -> int:
        return self._count

    def add(self, request: Request) -> bool:
        size = self._size(request)
        place = self._places.setdefault(size, len(self._heaps))
        if place == len(self._heaps):
            self._heaps.append([])
            if place == len(self._sizes):
                self._sizes = np.concatenate([self._sizes, np.ones(place)])
                self._arrivals = np.concatenate([self._arrivals, np.full(place, np.inf)])
            self._sizes[place] = size
        heappush(self._heaps[place], (request.arrival, request.id, request))
        self._changed(place, 1)
        return True

    def put_back(self, request: Request) -> None:
        self.add(request)

    def refresh(self, now: float) -> None:
        """Compare anew, as of now."""
        self._now = now
        self._ratios = self._first = None

    def head(self) -> Request:
        return self._heaps[self._choose()][0][2]

    def take(self) -> Request:
        place = self._choose()
        request = heappop(self._heaps[place])[2]
        self._changed(place, -1)
        return request

    def remove(self, request: Request) -> None:
        place = self._places[self._size(request)]
        heap = self._heaps[place]
        heap.remove((request.arrival, request.id, request))
        heapify(heap)
        self._changed(place, -1)

    def _changed(self, place: int, count: int) -> None:
        heap = self._heaps[place]
        self._arrivals[place] = heap[0][0] if heap else np.inf
        self._count += count
        self._first = None
        if self._ratios is not None and place < len(self._ratios):
            self._ratios[place] = (self._arrivals[place] - self._now) / self._sizes[place]
        else:
            self._ratios = None

    def _choose(self) -> int:
        if self._first is None:
            count, ratios = len(self._heaps), self._ratios
            if ratios is None:
                ratios = (self._arrivals[:count] - self._now) / self._sizes[:count]
                self._ratios = ratios
            first = int(ratios.argmin())
            equals = np.flatnonzero(ratios == ratios[first])
            if len(equals) > 1:
                first = min(equals.tolist(), key=lambda place: self._heaps[place][0][1])
            self._first = first
        return self._first


class FrontQueue:
    """A waiting queue before which some stand, whatever its order: those given to `push`."""

    def __init__(self, others: WaitingQueue) -> None:
        self.others = others
        self.moves = others.moves
        self.front: list[tuple[int, Request]] = []  # a heap; no two have the same number

    def __len__(self) -> int:
        return len(self.front) + len(self.others)

    def push(self, number: int, request: Request) -> None:
        """Put a request before the others; the smallest number is first."""
        heappush(self.front, (number, request))

    def add(self, request: Request) -> bool:
        return self.others.add(request)

    def put_back(self, request: Request) -> None:
        self.others.put_back(request)

    def head(self) -> Request:
        return self.front[0][1] if self.front else self.others.head()

    def take(self) -> Request:
        return heappop(self.front)[1] if self.front else self.others.take()

    def remove(self, request: Request) -> None:
        rest = [entry for entry in self.front if entry[1] is not request]
        if len(rest) == len(self.front):
            self.others.remove(request)
        else:
            heapify(rest)
            self.front = rest


class SwappedFirst(FrontQueue):
    """A waiting queue before which the swapped requests stand.

    As in vLLM 0.4 to 0.6, where nobody is admitted as long as somebody is swapped out. Of several
    the last preempted comes back first: the victims go from the least important on.
    """

    def __init__(self, others: WaitingQueue) -> None:
        super().__init__(others)
        self._settles = hasattr(others, "settle")
        self._preempted = count(0, -1)

    def add(self, request: Request) -> bool:
        # A queue that settles wants to before the next step, whoever stands before it.
        return self.others.add(request) and (self._settles or not self.front)

    def put_back(self, request: Request) -> None:
        if request.swapped:
            self.push(next(self._preempted), request)
        else:
            self.others.put_back(request)


WITHOUT_BOOKS = (Fifo, KeyQueue, RankQueue, RatioQueue)
"""Queues that do not count who is taken out of them."""


def queue_of(policy: Any, batch: Batch) -> WaitingQueue:
    """Return the waiting queue that a policy brings along, or one ordered by its rank or key.

    Raises HeadwayError where the policy fails, or gives something else; ValueError where its
    `patience` is no time.
    """
    make: Callable[[Batch], WaitingQueue] | None = getattr(policy, "queue", None)
    if make is None and hasattr(policy, "rank"):
        return RankQueue(policy)
    if hasattr(policy, "promote"):
        return PromotingQueue(policy, batch)
    if make is None:
        return KeyQueue(policy)
    try:
        queue = make(batch)
    except Exception as error:
        raise failed(policy, "queue(batch)", error) from error
    if lacking := [name for name in METHODS if not hasattr(queue, name)]:
        raise HeadwayError(
            f"engine.scheduling_policy: {type(policy).__name__}.queue(batch) gave {short(queue)}, "
            f"which is no waiting queue: it has no {', '.join(lacking)}"
        )
    return queue
