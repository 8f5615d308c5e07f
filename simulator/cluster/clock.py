"""The clock of a fleet: it wakes the loops of all engines, those due at one instant together."""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

import simpy

from simulator.core.alarm import LATE, Alarm, FastEnvironment
from simulator.engine.loop import EngineLoop


class FleetTimer:
    """Wakes one loop of a fleet."""

    def __init__(self, clock: "FleetClock", number: int, loop: EngineLoop) -> None:
        self.loop = loop
        self._clock = clock
        self._number = number
        self._when = -1.0  # -1: it is not set

    def set(self, when: float) -> None:
        """Wake the loop at `when`, and at no other time."""
        self._when = when
        self._clock.wake(when, self._number)

    def cancel(self) -> None:
        """Do not wake the loop."""
        self._when = -1.0

    def is_set(self, when: float) -> bool:
        """Say whether the loop is to be woken then, and has not been put off."""
        return self._when == when

    def take(self, when: float) -> bool:
        """Say so, too, and count the loop as woken."""
        found = self._when == when
        if found:
            self._when = -1.0
        return found


class FleetClock:
    """Calls `ring(now)` when loops are due: one alarm for the whole fleet."""

    def __init__(self, env: simpy.Environment, ring: Callable[[float], None]) -> None:
        self.env = env
        self._clock = env if isinstance(env, FastEnvironment) else None
        self.timers: list[FleetTimer] = []
        self.settled = -1.0  # the last instant whose steps have ended
        self._ring = ring
        self._heap: list[tuple[float, int]] = []
        self._alarm = Alarm(env, self._awake, LATE)
        self._armed = inf  # when it comes off; -inf: it is coming off

    def timer(self, loop: EngineLoop) -> FleetTimer:
        """Make the timer of another loop."""
        timer = FleetTimer(self, len(self.timers), loop)
        self.timers.append(timer)
        return timer

    def wake(self, when: float, number: int) -> None:
        """Come off at `when` for the timer of that number."""
        heappush(self._heap, (when, number))
        if when < self._armed:
            if self._armed < inf:  # the old alarm will come off to no effect
                self._alarm = Alarm(self.env, self._awake, LATE)
            self._armed = when
            self._alarm.set(when)

    def due(self, now: float) -> list[FleetTimer]:
        """Take out the timers that are due, by number."""
        heap, found = self._heap, []
        while heap and heap[0][0] <= now:
            when, number = heappop(heap)
            timer = self.timers[number]
            if timer.take(when):
                found.append(timer)
        return found

    def _awake(self, alarm: simpy.Event) -> None:
        """Ring, again and again as long as nothing but steps of the fleet happens."""
        if alarm is not self._alarm:
            return
        self._armed = -inf
        now = self.env.now
        self._armed = when = (
            self._turn(now) if self._clock is None else self._clock.go_on(self._turn, now)
        )
        if when < 0.0:
            self._armed = inf
        else:
            self._alarm.set(when)

    def _turn(self, now: float) -> float:
        """Ring; say when the next timer is due, -1: none is set."""
        self._ring(now)
        self.settled = now
        heap, timers = self._heap, self.timers
        while heap and not timers[heap[0][1]].is_set(heap[0][0]):
            heappop(heap)
        return heap[0][0] if heap else -1.0
