"""Schedule, execute, commit, for ever: an engine's loop on a SimPy clock.

Where the executor can leap and the scheduler is sure that a step repeats, the engine sleeps
through all repeats at once; an arrival that may change the next step cuts the leap short at the
end of the step in flight. Stepwise and leaping runs agree to the last bit, since both add up the
same durations one after the other.

An asynchronous scheduler has two batches in flight (vLLM's `EngineCore.step_with_batch_queue`): the
next one is scheduled as soon as fewer are, and waits for the GPU while one runs. So the batch that
runs was decided when the one before it began. Where nothing can be scheduled, the engine waits for
the batch in flight and then sleeps a millisecond: also if all have ended with that batch, since
`Scheduler.has_requests` counts those who have ended until the next step tells the workers of it.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import simpy

from simulator.core.alarm import LATE, Alarm, FastEnvironment
from simulator.core.request import Request
from simulator.engine.core import EngineCore, InFlight
from simulator.schedulers.interface import SchedulerInterface

EMPTY_STEP_SECONDS = 0.001
"""How long vLLM's EngineCore sleeps after a step in which it could schedule nothing."""


class Timer(Protocol):
    """Wakes a loop: calls its `turn`, or `end_steps` and `begin_steps`, and again when they say."""

    def set(self, when: float) -> None:
        """Wake the loop at `when`, and at no other time."""

    def cancel(self) -> None:
        """Do not wake the loop."""


class Turning(Protocol):
    """Whoever has a turn at its time, and says when the next is."""

    env: simpy.Environment

    def turn(self, now: float) -> float:
        """Have a turn; say when the next one is, -1: there is none."""


class LoopTimer:
    """The timer of a loop that shares its clock with no other."""

    def __init__(self, loop: Turning) -> None:
        self._clock = loop.env if isinstance(loop.env, FastEnvironment) else None
        self._env = loop.env
        self.turn = loop.turn
        # A request that arrives just as a step ends is seen by the next one, hence late.
        self._alarm = Alarm(loop.env, self._ring, LATE)
        self.when = -1.0  # -1: it is not set
        self._awake = False

    def set(self, when: float) -> None:
        """Wake the loop at `when`, and at no other time."""
        if not self._awake:
            if self.when >= 0:
                self.cancel()
            self._alarm.set(when)
        self.when = when

    def cancel(self) -> None:
        """Do not wake the loop: the old alarm will come off to no effect."""
        self.when = -1.0
        self._alarm = Alarm(self._env, self._ring, LATE)

    def _ring(self, alarm: simpy.Event) -> None:
        """Let the loop go on, as long as the clock attends to it."""
        if alarm is not self._alarm:
            return
        clock = self._clock
        self._awake = True
        try:
            if clock is None:
                self.when = self.turn(self.when)
            else:
                clock.attend(self)
        except BaseException:  # the clock stops here: SimPy makes use of the event once more
            self._alarm = Alarm(self._env, self._ring, LATE)
            raise
        finally:
            self._awake = False
            if self.when >= 0.0:
                self._alarm.set(self.when)


class EngineLoop(ABC):
    """Lets engine cores schedule, all at once, and execute what they have scheduled.

    `timer(loop)` makes what wakes it. After a step that could only preempt it sleeps
    `empty_step_seconds`. What is scheduled at once, a step or one for each core, is a value that
    only the subclass looks into.
    """

    def __init__(
        self,
        env: simpy.Environment,
        cores: Sequence[EngineCore],
        *,
        timer: Callable[["EngineLoop"], Timer] = LoopTimer,
        empty_step_seconds: float = EMPTY_STEP_SECONDS,
    ) -> None:
        self.env = env
        self.cores = cores
        self.empty_step_seconds = empty_step_seconds
        self.batch_queue: deque[InFlight] = deque()
        self.batch_queue_size = 2 if cores[0].scheduler.traits.overlaps else 1
        self._timer = timer(self)
        self._due = -1.0  # when it is to go on, or just has; -1: it rests
        self._leaping = False  # repeats of the last step in flight may still be called off
        self._pausing = False
        self._starved = False  # the last step was empty
        self._kept = False  # though some waited
        self.cancels = False  # requests of some core leave when the step in flight ends
        for core in cores:
            core.loop = self

    @abstractmethod
    def begin(self, now: float, start: float) -> InFlight | None:
        """Schedule the next step, now, and its sure repeats; the first begins at `start`.

        None: there is nothing to do.
        """

    @abstractmethod
    def commit(self, scheduled: Any, decided: float, start: float, ends: list[float]) -> None:
        """Take in the outcome of a step and its repeats, which ended at `ends`, s."""

    def _commit(self, batch: InFlight) -> None:
        self.commit(batch.scheduled, batch.decided, batch.start, batch.ends)

    @abstractmethod
    def repeat(self, scheduled: Any, times: int) -> None:
        """Let the step just scheduled be scheduled so many times more."""

    @abstractmethod
    def computes(self, core: EngineCore) -> bool:
        """Say whether the core has a part in the last step in flight."""

    def arrived(self, core: EngineCore, *, changes: bool) -> None:
        """Wake up for a new request; `changes`: the next step may differ for it."""
        if not self.batch_queue:
            now = self.env.now
            if self._due != now and not self._pausing:
                self._sleep(now)
        elif self._leaping and (changes or not self.computes(core)):
            self._shorten()

    def repeats_scheduled(self, core: EngineCore) -> int:
        """Count the repeats of its step in flight that have been scheduled by now."""
        return self._scheduled() - 1 if self._leaping and self.computes(core) else 0

    def _scheduled(self) -> int:
        """Count the steps of the leap in flight that have been scheduled by now."""
        last = self.batch_queue[-1]
        if len(self.batch_queue) > 1 and last.start >= self.env.now:
            return 1
        return bisect_left(last.ends, self.env.now) + self.batch_queue_size

    def _shorten(self) -> None:
        """Shorten a leap to the steps that have been scheduled by now."""
        keep, ends = self._scheduled(), self.batch_queue[-1].ends
        if keep < len(ends):
            del ends[keep:]
            self._leaping = keep > 1
            self._sleep(self._next())

    def _next(self) -> float:
        """Say when the step after those in flight is scheduled."""
        if self._leaping:
            return self.batch_queue[-1].ends[-self.batch_queue_size]
        return self.batch_queue[0].ends[-1]

    def _sleep(self, when: float) -> None:
        self._due = when
        self._timer.set(when)

    def turn(  # noqa: PLR0912  written out, as every step has one
        self, now: float, between: Callable[[], None] | None = None
    ) -> float:
        """Take in the outcome of the steps that are over, call `between`, and begin the next.

        Return the time at which that is to be done again, -1: it rests.
        """
        queue = self.batch_queue
        if self.batch_queue_size == 1 and queue:
            # The one batch in flight, without a look at what can only be where it is not alone.
            over = queue.popleft()
            self.commit(over.scheduled, over.decided, over.start, over.ends)
            if self.cancels:
                self.end_steps(now)
            if between is not None:
                between()
            batch = self.begin(now, now)
            if batch is None:
                self._leaping = False
                self._due = when = self._rest(now)
                return when
            queue.append(batch)
            ends = batch.ends
            self._leaping = len(ends) > 1
            self._due = when = ends[-1]
            return when
        if len(queue) == 2:
            over, running = queue
            # Of two batches one is over, and another takes its place: as below, without the calls.
            if over.ends[-1] <= now < running.ends[-1]:
                queue.popleft()
                self.commit(over.scheduled, over.decided, over.start, over.ends)
                if not self.cancels:
                    if between is not None:
                        between()
                    when = running.ends[-1]
                    if self._leaping:
                        self._leaping = False
                        self.repeat(running.scheduled, len(running.ends) - 1)
                    batch = self.begin(now, when)
                    if batch is None:
                        when = self._rest(now)
                    else:
                        queue.append(batch)
                        ends = batch.ends
                        if len(ends) > 1:
                            self._leaping = True
                            when = ends[-2]
                    self._due = when
                    return when
        self.end_steps(now)
        if between is not None:
            between()
        return self.begin_steps(now)

    def end_steps(self, now: float) -> None:
        """Take in the outcome of the steps that are over."""
        queue = self.batch_queue
        while queue and queue[0].ends[-1] <= now:
            over = queue.popleft()  # as `_commit`, without a call
            self.commit(over.scheduled, over.decided, over.start, over.ends)
        if self.cancels:
            self.cancels = False
            if self._leaping:  # all of its steps have been scheduled, with those who leave
                self._end_leap()
            for core in self.cores:
                core.drop_cancelled()

    def begin_steps(self, now: float) -> float:
        """Schedule as many batches as may be in flight; say when to go on, -1: the loop rests."""
        self._pausing = False
        if self._leaping:
            self._end_leap()
        if self._starved:
            self._starved = False
            # Who has come meanwhile does not count; of those who have ended the next step tells.
            left = [core.scheduler for core in self.cores]
            if self._kept or any(one.running or one.ended or one.copies for one in left):
                return self._pause(now)
        queue, size = self.batch_queue, self.batch_queue_size
        start = queue[-1].ends[-1] if queue else now
        while len(queue) < size:
            batch = self.begin(now, start)
            if batch is None:
                self._due = self._rest(now)
                return self._due
            queue.append(batch)
            ends = batch.ends
            if len(ends) > 1:
                self._leaping = True
                self._due = ends[-size]
                return self._due
            start = ends[0]
        self._due = when = queue[0].ends[-1]
        return when

    def _end_leap(self) -> None:
        """Let the schedulers, where they schedule ahead, know of all steps of a leap."""
        self._leaping = False
        if self.batch_queue:
            last = self.batch_queue[-1]
            self.repeat(last.scheduled, len(last.ends) - 1)

    def _rest(self, now: float) -> float:
        """Wait for the batch in flight, for an arrival, or until what waits may start."""
        schedulers = [core.scheduler for core in self.cores]
        due = [when for one in schedulers if (when := one.next_wakeup()) is not None]
        if self.batch_queue:
            self._starved = schedulers[0].traits.pauses
            self._kept = any(one.waiting for one in schedulers)
            return self._next()
        if due:
            return max(min(due), now)
        polls = schedulers[0].traits.polls
        if any(one.preempted or one.copies or (polls and one.waiting) for one in schedulers):
            return self._pause(now)
        if any(one.waiting and not one.awaits_transfer for one in schedulers):
            raise RuntimeError(f"the scheduler does nothing though requests wait, at {now} s")
        return -1.0

    def _pause(self, now: float) -> float:
        self._pausing = True
        self._due = when = now + self.empty_step_seconds
        return when

    def crash(self, *schedulers: SchedulerInterface) -> list[Request]:
        """Lose what is in flight and all requests, which are returned; go on with other schedulers.

        Before anything else at this instant: a step that would end now has not ended.
        """
        self._break_off(bisect_left)
        self._pausing, self._starved, self._due = False, False, -1.0
        self._timer.cancel()
        pairs = zip(self.cores, schedulers, strict=True)
        return [request for core, scheduler in pairs for request in core.restart(scheduler)]

    def _break_off(self, over: Callable[[list[float], float], int]) -> None:
        """Take in the steps in flight that are `over` by now; the others have never happened."""
        self._leaping = False
        for batch in self.batch_queue:
            del batch.ends[over(batch.ends, self.env.now) :]
            if batch.ends:
                self._commit(batch)
        self.batch_queue.clear()

    def catch_up(self) -> None:
        """Take in a step that ended before now: a leap behind it may have put that off."""
        queue = self.batch_queue
        while len(queue) > 1 and queue[0].ends[-1] < self.env.now:
            self._commit(queue.popleft())

    def abandon(self) -> None:
        """Write down the requests that are still here, when a run is stopped before its end.

        Nobody is told that they ended: they have not. Of two batches in flight both come to their
        end; of one, the steps of a leap that are over have happened.
        """
        for core in self.cores:
            core.on_finish = None
        if self.batch_queue_size == 1:
            self._break_off(bisect_right)
        elif self._leaping:
            self._shorten()
            self._end_leap()
        while self.batch_queue:
            self._commit(self.batch_queue.popleft())
        for core in self.cores:
            core.record_unfinished()
