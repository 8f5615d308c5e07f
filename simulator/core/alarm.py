"""Exact, reusable timers for a SimPy environment."""

from collections.abc import Callable
from functools import partial
from math import inf, nextafter
from typing import Any

import simpy
from simpy.events import NORMAL, EventPriority

LATE = EventPriority(NORMAL + 1)
"""The priority of what comes after everything else that happens at the same instant."""


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
