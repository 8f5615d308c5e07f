"""Exact, reusable timers for a SimPy environment, and one that spares a simulation events."""

from collections.abc import Callable
from functools import partial
from heapq import heappush
from math import inf, nextafter
from typing import Any

import simpy
from simpy.events import NORMAL, EventPriority

LATE = EventPriority(NORMAL + 1)
"""The priority of what comes after everything else that happens at the same instant."""
MOST_SKIPS = 16
"""How often in a row a loop may skip time: whoever drives the clock looks at it now and then."""


class FastEnvironment(simpy.Environment):
    """A SimPy environment that nobody looks at between two events.

    A loop that wakes up for every step need not make an event of each: while nothing else is due
    it may let the clock go on (`skip_to`). One call of `step` may then comprise several steps of an
    engine. In other environments, where time is real or somebody watches event by event, each is
    an event of its own; the outcome is the same.
    """

    def skip_to(self, when: float) -> bool:
        """Let the clock show `when` if nothing else happens until then; say whether it does.

        That is what a LATE alarm set to `when` comes to.
        """
        queue = self._queue
        if queue and queue[0][0] <= when:
            return False
        self._now = when
        return True

    def schedule_at(self, event: simpy.Event, priority: EventPriority, when: float) -> None:
        """Schedule an event at a time, where SimPy takes but delays."""
        heappush(self._queue, (when, priority, next(self._eid), event))


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

    def set(self, when: float) -> None:
        """Come off at `when`; only for an alarm that is not set already."""
        env = self.env
        if isinstance(env, FastEnvironment):
            self.callbacks = self._when_due
            env.schedule_at(self, self.priority, when)
            return
        now = env.now
        delay = when - now
        self.callbacks = self._when_due
        if now + delay != when:
            delay = nextafter(delay, inf if now + delay < when else -inf)
            if now + delay != when:  # no delay does it: from half way, the difference is exact
                self.callbacks = [partial(self._go_on, when)]
                delay = (when - now) / 2
        env.schedule(self, self.priority, delay)

    def _go_on(self, when: float, _: simpy.Event) -> None:
        self.set(when)
