"""Exact, reusable timers for a SimPy environment, and one that spares a simulation events."""

from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappush
from itertools import repeat
from math import inf, nextafter
from typing import Any, Protocol

import simpy
from simpy.events import NORMAL, EventPriority

LATE = EventPriority(NORMAL + 1)
"""The priority of what comes after everything else that happens at the same instant."""
MOST_SKIPS = 16
"""How often in a row a loop may skip time: whoever drives the clock looks at it now and then."""


class Repeating(Protocol):
    """Whoever is to have a turn again and again, as `FastEnvironment.attend` sees it."""

    when: float
    """Of the next turn, s; below 0: there is none. Others may change it between two turns."""

    def turn(self, now: float) -> float:
        """Have a turn; say when the next one is."""


class FastEnvironment(simpy.Environment):
    """A SimPy environment that nobody looks at between two events.

    A loop that wakes up for every step need not make an event of each: it may have the clock attend
    to its steps and to all else alike (`attend`). One call of `step` may then comprise several
    steps of an engine. In other environments, where time is real or somebody watches event by
    event, each is an event of its own; the outcome is the same.
    """

    __slots__ = ("_now",)  # what SimPy keeps the time in, see below

    _attending = False  # to a timer: `attend` is under way

    def attend(self, timer: "Repeating") -> None:
        """Let `timer` have its turn at its time, and at the next, with all that happens between.

        As with a LATE alarm set anew for each time, but that only others need events. Within
        another's `attend` it has one turn, and its next time is for the caller to set.
        """
        queue, alone = self._queue, not self._attending
        self._attending = True
        try:
            timer.when = timer.turn(self._now)
            for _ in repeat(None, MOST_SKIPS if alone else 0):
                when = timer.when
                while queue and queue[0][0] <= when:
                    self.step()
                    when = timer.when
                if when < 0.0:
                    break
                self._now = when
                timer.when = timer.turn(when)
        finally:
            self._attending = not alone

    def agenda(self) -> tuple[list[Any], Iterator[int]]:
        """Return the heap of events (when, priority, number, event), and their numbers to come.

        So an event can be scheduled at a time, where SimPy takes but delays.
        """
        return self._queue, self._eid


# SimPy's `now` is a property: a call, once for every step. The slot itself, under that name, is
# read without one, which is 1 % of all that a step computes.
FastEnvironment.now = FastEnvironment.__dict__["_now"]  # type: ignore[method-assign]


class Alarm(simpy.Event):
    """An event that comes off at a set time, again and again, and calls `callback(event)`.

    It comes off at `when` to the last bit (SimPy adds a delay to its clock, and the sum is rounded)
    and costs less than a new `Timeout` each time.
    """

    def __init__(
        self,
        env: simpy.Environment,
        callback: Callable[[simpy.Event], Any],
        priority: EventPriority = NORMAL,
    ) -> None:
        self.env = env
        self.callbacks = self._when_due = [callback]
        self.priority = priority
        self._value = None
        self._ok = True
        self._defused = False
        self._agenda: list[Any] | None = None
        self._numbers: Iterator[int] = iter(())
        if isinstance(env, FastEnvironment):
            self._agenda, self._numbers = env.agenda()

    def set(self, when: float) -> None:
        """Come off at `when`; only for an alarm that is not set already."""
        self.callbacks = self._when_due
        if self._agenda is not None:
            heappush(self._agenda, (when, self.priority, next(self._numbers), self))
            return
        env = self.env
        now = env.now
        delay = when - now
        if now + delay != when:
            delay = nextafter(delay, inf if now + delay < when else -inf)
            if now + delay != when:  # no delay does it: from half way, the difference is exact
                self.callbacks = [partial(self._go_on, when)]
                delay = (when - now) / 2
        env.schedule(self, self.priority, delay)

    def _go_on(self, when: float, _: simpy.Event) -> None:
        self.set(when)
