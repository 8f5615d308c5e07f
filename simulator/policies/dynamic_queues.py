"""Waiting queues whose order changes while nobody comes or goes.

`dynamic.DynamicScheduler` tells them the time, by `refresh(now)`, when an order may matter.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from simulator.core.request import Request
from simulator.policies.policy import Policy, Ranked, failed
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from simulator.schedulers.vllm.batch import Batch

FIELDS = ("id", "arrival", "prompt_tokens", "priority", "hint", "generated", "preemptions")
NONE = -1  # in the column `hint`: nobody predicted a length


class Columns:
    """A queue ordered by `policy.rank(waiting, now)`, asked at most once per step.

    The policy sees the queue as `waiting.arrival`, `waiting.prompt_tokens` and so on: the fields
    of FIELDS as numpy arrays of floats, one entry per request, in no particular order. Of equals
    the one with the smaller id boards first. Raises HeadwayError where the policy fails.
    """

    moves = False  # `dynamic.py` asks anew when it may have

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
        hint = NONE if request.hint is None else request.hint
        self._table[:, at] = (
            request.id,
            request.arrival,
            request.prompt_tokens,
            request.priority,
            hint,
            request.generated,
            request.preemptions,
        )
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


class Promoting(Ranked):
    """Ordered by a policy's key, until somebody has waited `policy.patience` seconds.

    Then the policy is told, `promote(request)`, and its key asked for again: once, until the
    request has run and waits again.
    """

    def __init__(
        self,
        policy: Policy,
        patience: float,
        promote: Callable[[Request], None],
        batch: "Batch",
    ) -> None:
        super().__init__(policy)
        self._batch = batch
        self._patience, self._promote = patience, promote
        self._valid: dict[Request, int] = {}  # the number of its entry in the heap; others are dead
        self._line: deque[tuple[float, int, Request]] = deque()  # since when, in order of time

    def __len__(self) -> int:
        return len(self._valid)

    def add(self, request: Request) -> bool:
        self._line.append((request.arrival, self._push(request), request))
        return self.head() is request

    def put_back(self, request: Request) -> None:
        self._line.append((self._batch.now, self._push(request), request))

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
        line = self._line
        while line and line[0][0] + self._patience <= now:
            _, number, request = line.popleft()
            if self._valid.get(request) == number:
                self._promote(request)
                self._push(request)


def queue_for(policy: Any, batch: "Batch") -> Columns | Promoting | None:
    """Make the queue of a policy whose order changes with time; None where it does not.

    Raises ValueError where its `patience` is no time.
    """
    if hasattr(policy, "rank"):
        return Columns(policy)
    if not hasattr(policy, "promote"):
        return None
    patience = getattr(policy, "patience", None)
    if not isinstance(patience, int | float) or isnan(patience) or patience <= 0:
        raise ValueError(
            f"engine.scheduling_policy: {type(policy).__name__}.patience must be more than 0 "
            f"seconds, not {patience!r}"
        )
    return Promoting(policy, patience, policy.promote, batch)
