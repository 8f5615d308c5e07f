"""What a policy is: a small class that says who goes first. What it leaves out, vLLM's scheduler
does (budgets, chunks, blocks, preemption of the last admitted: `schedulers/vllm/scheduler.py`).

A policy of your own needs no registration: `scheduling_policy: {policy: my_module:MyPolicy}` in
the scenario, with keyword arguments beside `policy`. What it does wrong is told in one line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request
from simulator.util.errors import HeadwayError, one_line

SHORT = 60  # characters of a key that a message quotes

# What an argument of a policy is; an error about one says it.
Seconds = Annotated[float, "s"]
PerSecond = Annotated[float, "per second"]
Factor = Annotated[float, "factor"]
Tokens = Annotated[int, "tokens"]
Priorities = Annotated[float, "priorities"]


class Policy(Protocol):
    """Order of the waiting queue: `key(request)`, or else `rank(waiting, now)`.

    A policy may also have

    - `victim(running)`, which picks from the running requests, in order of admission, the one to
      preempt when blocks run out; without it the last admitted goes;
    - `rank(waiting, now)`, an order that changes with time: given the waiting requests as columns
      (numpy arrays with names of Request's fields, see `waiting_queues.RankQueue`) and the time in
      seconds, return an array, of which the smallest is admitted first;
    - `displaces(head, running)`, which gives the running request that makes way for the head of
      the queue, or None (`schedulers/vllm/dynamic.py`), and `steady`, true if a None stays None
      until somebody arrives, is admitted, ends or is preempted;
    - `patience` in seconds and `promote(request)`: who has waited so long is promoted, and its key
      asked for again (`waiting_queues.PromotingQueue`);
    - `queue(batch)` in place of `key`, which gives the waiting queue itself (`fair.py`).
    """

    def key(self, request: Request) -> Any:
        """Rank a waiting request: the smallest key is admitted first.

        Called when a request arrives and when it returns after a preemption.
        """


class Batch(Protocol):
    """What a waiting queue sees of the engine that it belongs to; a Scheduler is one.

    A queue that must know who gets how many tokens puts a DecodeSet of its own in the place of
    `decodes`, before the first request comes.
    """

    now: float
    """Seconds, at the last decision."""
    decodes: DecodeSet


@dataclass(eq=False)
class EngineView:
    """A Batch that is no scheduler; whoever has it brings it up to date."""

    decodes: DecodeSet
    now: float = 0.0


class RunningView(Mapping[Request, None]):
    """The running requests as `displaces` sees them, in order of admission."""

    now: float
    """Seconds, at the decision under way."""

    def __init__(self, batch: Batch, running: Mapping[Request, None]) -> None:
        self._running = running
        self._decodes = batch.decodes
        self.displaced: list[Request] = []  # of them, those that would make way already

    def __len__(self) -> int:
        return len(self._running) - len(self.displaced)

    def __iter__(self) -> Iterator[Request]:
        if not self.displaced:
            return iter(self._running)
        return (request for request in self._running if request not in self.displaced)

    def __getitem__(self, request: Request) -> None:
        return self._running[request]

    def generated(self, request: Request) -> int:
        """Count the tokens that have come out (`request.generated` lags while it decodes)."""
        return self._decodes.generated(request)

    def computed(self, request: Request) -> int:
        """Count the tokens whose KV is in the cache."""
        return self._decodes.computed(request)


def hint_of(request: Request) -> int:
    """Return the predicted output tokens; ValueError where nobody predicted any."""
    if request.hint is None:
        raise ValueError("the request has no predicted length; the scenario needs a `predictor`")
    return request.hint


Victim = Callable[[Mapping[Request, None]], Request]
"""Picks from the running requests, in order of admission, the one to preempt."""


def victim_of(policy: Policy | None) -> Victim | None:
    """Return the policy's `victim`, if it has one; HeadwayError where it fails or picks nobody."""
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
            raise none_of_them(policy, "victim(running)", chosen)
        return chosen

    return victim


def none_of_them(policy: object, call: str, chosen: object) -> HeadwayError:
    """Say that a policy has chosen what is none of the running requests."""
    named = f"request {chosen.id}" if isinstance(chosen, Request) else short(chosen)
    return HeadwayError(
        f"engine.scheduling_policy: {type(policy).__name__}.{call} gave {named}, which is "
        "none of the running requests"
    )


def failed(policy: object, call: str, error: Exception) -> HeadwayError:
    """Say in one line what a policy of the user's did, and where."""
    return raised(f"engine.scheduling_policy: {type(policy).__name__}.{call}", error)


def raised(call: str, error: Exception) -> HeadwayError:
    """Say in one line what a call of the user's code raised, and where."""
    from traceback import extract_tb

    place = extract_tb(error.__traceback__)[-1]
    ours = Path(place.filename).parent == Path(__file__).parent  # then its place tells nobody
    where = "" if ours else f" ({Path(place.filename).name}:{place.lineno})"
    return HeadwayError(f"{call} raised {type(error).__name__}: {one_line(error)}{where}")


def short(value: object) -> str:
    """Quote a value in a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= SHORT else text[:SHORT] + "..."
