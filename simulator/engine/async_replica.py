"""One engine with two batches in flight, as vLLM's `EngineCore.step_with_batch_queue` runs it.

The next batch is scheduled as soon as fewer than two are in flight: while one runs, the other
waits for the GPU. So the batch that runs was decided when the one before it began. Where nothing
can be scheduled, the engine waits for the batch in flight and then sleeps a millisecond.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import simpy

from simulator.core.executor import Executor
from simulator.core.log import pack_step
from simulator.core.request import Request, Step
from simulator.engine.replica import NAP, Replica
from simulator.schedulers.vllm.scheduler import Scheduler


@dataclass(slots=True)
class Flight:
    """A batch on its way, or a stretch of equal ones, all but the first not yet scheduled."""

    step: Step
    decided: float
    start: float
    ends: list[float]
    row: tuple[int, ...]
    settled: bool  # the scheduler knows of all of them

    @property
    def wake(self) -> float:
        """When the step after these is scheduled, if no other batch is in flight then."""
        return self.ends[-1] if self.settled else self.ends[-2]


class AsyncReplica(Replica):
    """An engine that schedules asynchronously; see Replica."""

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        executor: Executor,
        *,
        leap: bool = True,
        on_finish: Callable[[Request], None] | None = None,
        nap: float = NAP,
    ) -> None:
        super().__init__(env, scheduler, executor, leap=leap, on_finish=on_finish, nap=nap)
        self._flights: deque[Flight] = deque()  # two at most, the older one first
        self._starved = False  # the last step was empty

    def _arrived(self, may_board: bool) -> None:
        if not self._flights:
            if not self._set:
                self._sleep(self.env.now)
        elif may_board and not self._flights[-1].settled:
            self._cut(self._flights[-1])

    def _cut(self, flight: Flight) -> None:
        """Shorten a leap to the steps that are scheduled by now."""
        now = self.env.now
        if len(self._flights) == 2 and flight.start >= now:
            keep = 1
        else:
            keep = bisect_left(flight.ends, now) + 2
        if keep < len(flight.ends):
            del flight.ends[keep:]
            flight.settled = keep == 1
            self._sleep(self._flights[0].ends[-1] if flight.settled else flight.wake)

    def _awake(self, alarm: simpy.Event) -> None:
        """End the batches that are over, schedule the next."""
        if alarm is not self._alarm:
            return  # an arrival has cut the leap short
        self._set = False
        self.land(self._due)
        self.begin(self._due)

    def land(self, now: float) -> None:
        """Take in the outcome of the batches that are over."""
        while self._flights and self._flights[0].ends[-1] <= now:
            self._land(self._flights.popleft())

    def begin(self, now: float) -> None:
        """Schedule as many batches as may be in flight, or rest."""
        if self._flights:
            self._settle(self._flights[-1])
        if self._starved and (self.scheduler.running or self.scheduler.waiting):
            self._starved = False
            self._sleep(now + self.nap)
            return
        self._starved = False
        while len(self._flights) < 2:
            step = self.scheduler.schedule(now)
            if not step.decodes and not step.prefills:
                self._wait(now)
                return
            flight = self._launch(step, now)
            if not flight.settled:
                self._sleep(flight.wake)
                return
        self._sleep(self._flights[0].ends[-1])

    def _settle(self, flight: Flight) -> None:
        """Let the scheduler know of all steps of a leap."""
        if not flight.settled:
            flight.settled = True
            self.scheduler.repeat(len(flight.ends) - 1)

    def _launch(self, step: Step, now: float) -> Flight:
        """Put a batch behind the one in flight."""
        start = self._flights[-1].ends[-1] if self._flights else now
        row = self.scheduler.account(step)
        if self._unlogged:
            row = self._with_unlogged(row)
        repeats = 1 if self.leaper is None else self.scheduler.horizon(step)
        if self.leaper is not None and repeats > 1:
            ends = list(accumulate(self.leaper.leap(step, repeats), initial=start))
            del ends[0]
        else:
            ends = [start + self.executor.execute(step)]
        flight = Flight(step, now, start, ends, row, len(ends) == 1)
        self._flights.append(flight)
        return flight

    def _wait(self, now: float) -> None:
        """Do what vLLM does when there is nothing to schedule."""
        if self._flights:
            self._unlogged += self.scheduler.preempted
            self._starved = True
            self._sleep(self._flights[0].ends[-1])
        else:
            self._rest(now)

    def _land(self, flight: Flight) -> None:
        """Take in the outcome of the oldest batch."""
        step, ends = flight.step, flight.ends
        self.log.step_rows += pack_step(flight.start, ends[-1], len(ends), *flight.row)
        self.log.decided.append(flight.decided)
        if step.copies:
            self.log.record_swaps(flight.start, step)
        if step.decodes > len(step.singles or ()):
            self.log.tick_ends.extend(ends)
        for request in self.scheduler.commit(step, ends):
            self._end(request)

    def abandon(self) -> None:
        """Write down the requests that are still here; the batches in flight come to their end."""
        self.on_finish = None
        if self._flights and not self._flights[-1].settled:
            self._cut(self._flights[-1])
        while self._flights:
            flight = self._flights.popleft()
            self._settle(flight)
            self._land(flight)
        super().abandon()


def make_replica(
    env: simpy.Environment, scheduler: Scheduler, executor: Executor, *, leap: bool = True
) -> Replica:
    """Make the engine that goes with a scheduler."""
    if scheduler.overlaps:
        return AsyncReplica(env, scheduler, executor, leap=leap)
    return Replica(env, scheduler, executor, leap=leap)
