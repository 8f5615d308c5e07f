"""The replicas of a fleet and the clock that wakes them."""

from bisect import bisect_left
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Protocol

import simpy

from simulator.core.alarm import LATE, Alarm
from simulator.core.request import Request
from simulator.engine.async_replica import AsyncReplica
from simulator.engine.replica import Replica
from simulator.schedulers.vllm.scheduler import Scheduler


class Sleeper(Protocol):
    """Whoever steps by itself: a replica, or ranks that step together."""

    clock: "Clock"
    number: int

    def awaits(self, when: float) -> bool:
        """Say whether it is to be woken then, and has not been put off."""

    def take(self, when: float) -> bool:
        """Say so, too, and count it as woken."""

    def land(self, now: float) -> None:
        """End the step in flight, if there is one."""

    def begin(self, now: float) -> None:
        """Schedule the next step and set out on it, or rest."""


class Clock:
    """Wakes replicas, all that are due at one instant together: one alarm for the whole fleet."""

    def __init__(self, env: simpy.Environment, ring: Callable[[float], None]) -> None:
        self.env = env
        self.sleepers: list[Sleeper] = []
        self.settled = -1.0  # the last instant whose steps have ended
        self._ring = ring
        self._heap: list[tuple[float, int]] = []
        self._alarm = Alarm(env, self._awake, LATE)
        self._armed = inf  # when it comes off; -inf: it is coming off

    def add(self, sleeper: Sleeper) -> None:
        """Take somebody in who will have to be woken."""
        sleeper.clock, sleeper.number = self, len(self.sleepers)
        self.sleepers.append(sleeper)

    def wake(self, when: float, number: int) -> None:
        """Let a replica's next step begin at `when`."""
        heappush(self._heap, (when, number))
        if when < self._armed:
            if self._armed < inf:  # the old alarm will come off to no effect
                self._alarm = Alarm(self.env, self._awake, LATE)
            self._armed = when
            self._alarm.set(when)

    def due(self, now: float) -> list[Sleeper]:
        """Take out those that are due, by number."""
        heap, found = self._heap, []
        while heap and heap[0][0] <= now:
            when, number = heappop(heap)
            sleeper = self.sleepers[number]
            if sleeper.take(when):
                found.append(sleeper)
        return found

    def _awake(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:
            return
        self._armed = -inf
        now = self.env.now
        self._ring(now)
        self.settled = now
        self._armed = inf
        heap, sleepers = self._heap, self.sleepers
        while heap and not sleepers[heap[0][1]].awaits(heap[0][0]):
            heappop(heap)
        if heap:
            self._armed = heap[0][0]
            self._alarm.set(self._armed)


class Member(Replica):
    """A replica that its fleet's clock wakes, that can be told to drop a request, and can fail."""

    clock: Clock
    number: int
    dropped: dict[Request, None]  # to leave when the step in flight ends

    def _sleep(self, when: float) -> None:
        self._set = True
        self._due = when
        self.clock.wake(when, self.number)

    def awaits(self, when: float) -> bool:
        """Say whether it is to be woken then, and has not been put off."""
        return self._set and self._due == when

    def take(self, when: float) -> bool:
        """Say so, too, and count it as woken."""
        waits = self._set and self._due == when
        if waits:
            self._set = False
        return waits

    def land(self, now: float) -> None:
        super().land(now)
        if self.dropped:
            for request in self.dropped:
                if request.finish < 0:
                    self.scheduler.cancel(request)
            self.dropped.clear()

    def _record(self, request: Request, reason: int) -> None:
        if request not in self.dropped:
            super()._record(request, reason)
        else:  # it ended as it was about to leave: nobody cares
            self.scheduler.forget(request)

    def record(self, request: Request, reason: int) -> None:
        """Write down that a request ended without having run here to its end."""
        self._record(request, reason)

    def wake(self) -> None:
        """Decide anew at the end of the step in flight, or now."""
        self._arrived(True)

    def cancel(self, request: Request) -> None:
        """Let a request go at the end of the step in flight."""
        if self._step is None:
            self.scheduler.cancel(request)
        else:
            self.dropped[request] = None
            self._arrived(True)

    def crash(self, scheduler: Scheduler) -> list[Request]:
        """Lose the step in flight and all requests, which are returned; go on with another engine.

        Before anything else at this instant: a step that would end now has not ended.
        """
        self._land_before(self.env.now)
        old = self.scheduler
        lost = [request for request in old.running if request.finish < 0]
        while old.waiting:
            lost.append(old.waiting.take())
        lost = [request for request in lost if request not in self.dropped]
        self.dropped.clear()
        self._set, self._due = False, -1.0
        self.scheduler = scheduler
        log = self.log
        log.emptied.append(self.env.now)
        running = scheduler.running
        running.runs, running.pauses = log.run_rows, log.pause_rows
        scheduler.drafts = log.draft_rows
        scheduler.decodes.tick = log.ticks_before + len(log.tick_ends)
        return lost

    def _land_before(self, now: float) -> None:
        """Write down the steps of a leap that are over; forget the one in flight."""
        del self._ends[bisect_left(self._ends, now) :]
        if self._step is not None and self._ends:
            self._commit(self._step)
        self._step, self._ends = None, []
        self._napping = False

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self.scheduler.waiting)

    @property
    def used(self) -> int:
        """KV blocks in use, between two steps."""
        blocks = self.scheduler.blocks
        return blocks.usable - blocks.free

    def blocks_used(self, now: float) -> int:
        """Count the KV blocks in use before anything happens at `now`, also within a leap."""
        blocks, taken = self.scheduler.blocks, 0
        if self._step is not None and len(self._ends) > 1:
            taken = self.scheduler.decodes.blocks(bisect_left(self._ends, now), skip=1)
        return blocks.usable - blocks.free + taken


class AsyncMember(Member, AsyncReplica):
    """The same of an engine that schedules asynchronously; it does not fail."""

    def blocks_used(self, now: float) -> int:
        blocks, taken = self.scheduler.blocks, 0
        if self._flights and not self._flights[-1].settled:
            flight = self._flights[-1]
            ahead = 0 if len(self._flights) == 2 and flight.start >= now else 1
            taken = self.scheduler.decodes.blocks(bisect_left(flight.ends, now) + ahead)
        return blocks.usable - blocks.free + taken
