"""Policies: who boards first. A policy is a small class; what it leaves out, vLLM's scheduler
does (budgets, chunks, blocks, preemption of the last admitted: `scheduler.py`).

A policy of your own needs no registration: `scheduling_policy: {policy: my_module:MyPolicy}` in
the scenario, with keyword arguments beside `policy`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf, isnan
from operator import lt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from simulator.core.request import Request
from simulator.util.errors import HeadwayError
from simulator.util.from_mapping import refuse

if TYPE_CHECKING:
    from simulator.schedulers.vllm.batch import Batch

SHORT = 60  # characters of a key that a message quotes
SIZES = {"prompt": "prompt tokens", "hint": "predicted output tokens", "total": "the sum of both"}


class Policy(Protocol):
    """Order of the waiting queue: `key(request)`, or else `rank(waiting, now)`.

    A policy may also have

    - `victim(running)`, which picks from the running requests, in order of admission, the one to
      preempt when blocks run out; without it the last admitted goes;
    - `rank(waiting, now)`, an order that changes with time: given the waiting requests as columns
      (numpy arrays with names of Request's fields, see `queues.Columns`) and the time in seconds,
      return an array, of which the smallest boards first;
    - `displaces(head, running)`, which gives the running request that makes way for the head of
      the queue, or None (`schedulers/vllm/dynamic.py`), and `steady`, true if a None stays None
      until somebody arrives, boards, ends or is preempted;
    - `patience` in seconds and `promote(request)`: who has waited so long is promoted, and its key
      asked for again (`queues.Promoting`);
    - `queue(batch)` in place of `key`, which gives the waiting queue itself (`client_queues.py`).
    """

    def key(self, request: Request) -> Any:
        """Rank a waiting request: the smallest key boards first.

        Called when a request arrives and when it returns after a preemption.
        """


def check_by(by: str) -> None:
    """Raise ValueError unless `by` names a size that a request is ranked by."""
    if by not in SIZES:
        raise ValueError(f"by: must be one of {', '.join(SIZES)}, not {by!r}")


def size_of(request: Request, by: str) -> int:
    """Give the tokens of a request that a policy ranks by: SIZES says which."""
    if by == "prompt":
        return request.prompt_tokens
    hint = hint_of(request)
    return hint if by == "hint" else request.prompt_tokens + hint


def hint_of(request: Request) -> int:
    """Give the predicted output tokens; ValueError where nobody predicted any."""
    if request.hint is None:
        raise ValueError("the request has no predicted length; the scenario needs a `predictor`")
    return request.hint


class SJF:
    """Shortest job first, by the prompt, by the predicted answer (`by: hint`) or by both (total).

    With `ageing` a second of waiting counts as so many tokens less, so that long jobs are not
    starved. All age alike: the order of two never changes, and the key stays what it was.
    """

    def __init__(self, by: str = "prompt", ageing: float = 0.0) -> None:
        check_by(by)
        refuse((not 0 <= ageing < inf, f"ageing: must be 0 or more, not {ageing}"))
        self.by, self.ageing = by, ageing
        self.needs_hint = by != "prompt"

    def key(self, request: Request) -> tuple[float, float]:
        return size_of(request, self.by) + self.ageing * request.arrival, request.arrival


class Priority:
    """vLLM's `priority`: the smaller number first, among equals the earlier arrival.

    Urgent arrivals preempt nobody. Only when a running request lacks a block the least urgent one
    leaves, which may be the very request that lacks it.
    """

    def key(self, request: Request) -> tuple[int, float, int]:
        return request.priority, request.arrival, request.id

    def victim(self, running: Iterable[Request]) -> Request:
        return max(running, key=_urgency)  # of exact equals the first


def _urgency(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival


class Waiting(Protocol):
    """The waiting queue that a scheduler works with.

    It may have `settle(now)`, which is called before each step is decided; `add` then says whether
    that call is due for the new request, also where no seat is free.
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


QUEUE = ("moves", "__len__", "add", "put_back", "head", "take", "remove")
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


class Ranked:
    """Ordered by a policy's key, a heap; equals in order of joining.

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
            f"engine.scheduling_policy: {_name(self._policy)}.key: {what} cannot be ranked: "
            f"{_line(error)}"
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


def queue_of(policy: Policy, batch: "Batch") -> Waiting:
    """Give the waiting queue that a policy brings along, or one ordered by its key.

    Raises HeadwayError where the policy fails, or gives something else.
    """
    make: Callable[[Batch], Waiting] | None = getattr(policy, "queue", None)
    if make is None:
        return Ranked(policy)
    try:
        queue = make(batch)
    except Exception as error:
        raise failed(policy, "queue(batch)", error) from error
    if lacking := [name for name in QUEUE if not hasattr(queue, name)]:
        raise HeadwayError(
            f"engine.scheduling_policy: {_name(policy)}.queue(batch) gave {short(queue)}, which is "
            f"no waiting queue: it has no {', '.join(lacking)}"
        )
    return queue


Victim = Callable[[Mapping[Request, None]], Request]
"""Picks from the running requests, in order of admission, the one to preempt."""


def victim_of(policy: Policy | None) -> Victim | None:
    """Give the policy's `victim`, if it has one; HeadwayError where it fails or picks nobody."""
    choose: Callable[[Iterable[Request]], Request] | None = getattr(policy, "victim", None)
    if choose is None:
        return None

    def victim(running: Mapping[Request, None]) -> Request:
        try:
            chosen = choose(running)
            good = chosen in running
        except Exception as error:
            raise failed(policy, "victim(running)", error) from error
        if not good:
            raise HeadwayError(
                f"engine.scheduling_policy: {_name(policy)}.victim(running) gave "
                f"{short(chosen)}, which is none of the running requests"
            )
        return chosen

    return victim


def failed(policy: object, call: str, error: Exception) -> HeadwayError:
    """Say in one line what a policy of the user's did, and where."""
    from traceback import extract_tb

    place = extract_tb(error.__traceback__)[-1]
    where = "" if place.filename == __file__ else f" ({Path(place.filename).name}:{place.lineno})"
    return HeadwayError(
        f"engine.scheduling_policy: {_name(policy)}.{call} raised {type(error).__name__}: "
        f"{_line(error)}{where}"
    )


def _name(policy: object) -> str:
    return type(policy).__name__


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= SHORT else text[:SHORT] + "..."
