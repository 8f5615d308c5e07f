"""One engine on a SimPy clock: schedule, execute, commit, for ever.

Where the executor can leap and the scheduler is sure that a step repeats, the replica sleeps
through all repeats at once; an arrival that may change the next step cuts the leap short at the
end of the step in flight. Stepwise and leaping runs agree to the last bit, since both add up the
same durations one after the other.
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from math import inf, nextafter

import simpy

from simulator.executor import CanLeap, Executor
from simulator.log import REASONS, Log, pack_request, pack_step
from simulator.request import Request, Step
from simulator.scheduler import Scheduler

STOP, LENGTH, REJECTED, UNFINISHED = range(len(REASONS))
LATE = 2  # SimPy's priorities are 0 (urgent) and 1 (normal)


def delay_until(now: float, when: float) -> float:
    """Return the delay that brings the clock from `now` to `when` exactly, rounding included."""
    delay = when - now
    if now + delay != when:
        delay = nextafter(delay, inf if now + delay < when else -inf)
    return delay


class Wake(simpy.Event):
    """A timeout that comes after everything else that happens at the same instant.

    So a request that arrives just as a step ends is seen by the next one.
    """

    def __init__(
        self, env: simpy.Environment, delay: float, callback: Callable[[simpy.Event], None]
    ) -> None:
        self.env = env
        self.callbacks = [callback]
        self._value = None
        self._ok = True
        self._defused = False
        env.schedule(self, LATE, delay)


class Replica:
    """An engine: whatever is submitted to it gets scheduled and executed.

    `on_finish(request)` is called at the moment a request ends or is rejected; it may submit
    others, which the next step sees. `leap=False` executes every step by itself.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        executor: Executor,
        *,
        leap: bool = True,
        on_finish: Callable[[Request], None] | None = None,
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self.executor = executor
        self.leaper = executor if leap and isinstance(executor, CanLeap) else None
        self.on_finish = on_finish
        self.log = Log(
            scheduler.blocks.usable, scheduler.blocks.block_size, run_rows=scheduler.runs
        )
        self._step: Step | None = None  # in flight
        self._row: tuple[int, ...] = ()  # what the log says of it
        self._start = 0.0
        self._ends: list[float] = []  # of the step in flight and its repeats
        self._wake: Wake | None = None
        self._due = -1.0

    def submit(self, request: Request) -> None:
        """Take a request in, now."""
        if not self.scheduler.fits(request):
            self._record(request, REJECTED)
            return
        may_board = self.scheduler.add(request)
        now = self.env.now
        if self._step is None:
            if self._due != now:
                self._sleep(now)
        elif may_board and len(self._ends) > 1:
            flying = bisect_left(self._ends, now)
            if flying < len(self._ends) - 1:
                del self._ends[flying + 1 :]
                self._sleep(self._ends[-1])

    def _sleep(self, when: float) -> None:
        self._due = when
        self._wake = Wake(self.env, delay_until(self.env.now, when), self._awake)

    def _awake(self, wake: simpy.Event) -> None:
        """End the step in flight, begin the next."""
        if wake is not self._wake:
            return  # an arrival has cut the leap short
        now = self._due
        if self._step is not None:
            self._commit(self._step)
        scheduler = self.scheduler
        step = scheduler.schedule(now)
        if not step.decodes and not step.prefills:
            self._rest(now)
            return
        repeats = scheduler.horizon(step) if self.leaper is not None else 1
        self._begin(step, now, repeats)

    def _begin(self, step: Step, now: float, repeats: int) -> None:
        scheduler = self.scheduler
        tokens = pairs = 0
        for chunk in step.prefills:
            done, size = chunk.start, chunk.tokens
            tokens += size
            pairs += size * done + size * (size + 1) // 2
        self._step = step
        self._start = now
        self._row = (
            step.context,
            pairs,
            scheduler.stored(step),
            tokens - step.padding,
            step.decodes - step.ghosts,
            step.ghosts + step.padding,
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.blocks.usable - scheduler.blocks.free,
            scheduler.preempted,
        )
        if repeats > 1 and self.leaper is not None:
            ends = list(accumulate(self.leaper.leap(step, repeats), initial=now))
            del ends[0]
        else:
            ends = [now + self.executor.execute(step)]
        self._ends = ends
        self._sleep(ends[-1])

    def _rest(self, now: float) -> None:
        """Wait for an arrival, or until what waits may start."""
        self._wake = None
        due = self.scheduler.wakes_at()
        if due is not None:
            self._sleep(max(due, now))
        elif len(self.scheduler.waiting):
            raise RuntimeError(f"the scheduler does nothing though requests wait, at {now} s")

    def _commit(self, step: Step) -> None:
        ends = self._ends
        ticking = self.scheduler.decodes.count and step.decodes
        finished = self.scheduler.commit(step, ends)
        self._step = None
        log = self.log
        (context, pairs, stored, prefills, decodes, wasted, running, waiting, used, preempted) = (
            self._row
        )
        log.step_rows += pack_step(
            self._start,
            ends[-1],
            context,
            pairs,
            stored,
            len(ends),
            prefills,
            decodes,
            wasted,
            running,
            waiting,
            used,
            preempted,
        )
        if ticking:
            log.tick_ends.extend(ends)
        for request in finished:
            self._record(request, STOP if request.generated == request.output_tokens else LENGTH)

    def _record(self, request: Request, reason: int) -> None:
        self.log.request_rows += pack_request(
            request.first_scheduled,
            request.first_token,
            request.finish,
            request.id,
            request.preemptions,
            request.cached,
            request.generated,
            reason,
        )
        if self.on_finish is not None:
            self.on_finish(request)

    def abandon(self) -> None:
        """Write down the requests that are still here, when a run is stopped before its end."""
        scheduler = self.scheduler
        while len(scheduler.waiting):
            self._record(scheduler.waiting.pop(), UNFINISHED)
        for request in scheduler.running:
            if request.finish < 0:
                scheduler.close(request)
                self._record(request, UNFINISHED)
