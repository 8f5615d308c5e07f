"""One engine on a SimPy clock: schedule, execute, commit, for ever.

Where the executor can leap and the scheduler is sure that a step repeats, the replica sleeps
through all repeats at once; an arrival that may change the next step cuts the leap short at the
end of the step in flight. Stepwise and leaping runs agree to the last bit, since both add up the
same durations one after the other.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate

import simpy

from simulator.core.alarm import LATE, Alarm
from simulator.core.executor import CanLeap, Executor
from simulator.core.log import LENGTH, REJECTED, STOP, UNFINISHED, Log, pack_request, pack_step
from simulator.core.request import Request, Step
from simulator.schedulers.vllm.scheduler import Scheduler

NAP = 0.001  # s, in vLLM's EngineCore


class Replica:
    """An engine: whatever is submitted to it gets scheduled and executed.

    `on_finish(request)` is called at the moment a request ends or is rejected; it may submit
    others, which the next step sees. `leap=False` executes every step by itself. After a step
    that could only preempt, the engine sleeps `nap` seconds.
    """

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
        self.env = env
        self.scheduler = scheduler
        self.executor = executor
        self.leaper = executor if leap and isinstance(executor, CanLeap) else None
        self.on_finish = on_finish
        self.nap = nap
        if getattr(executor, "reads_longest", False):
            scheduler.track_longest()
        self.log = Log(
            scheduler.blocks.usable,
            scheduler.blocks.block_size,
            scheduler.reserves,
            run_rows=scheduler.running.runs,
            pause_rows=scheduler.running.pauses,
            draft_rows=scheduler.drafts,
        )
        self._step: Step | None = None  # in flight
        self._row: tuple[int, ...] = ()  # what the log says of it
        self._start = 0.0
        self._ends: list[float] = []  # of the step in flight and its repeats
        # A request that arrives just as a step ends is seen by the next one, hence late.
        self._alarm = Alarm(env, self._awake, LATE)
        self._due = -1.0  # when it comes off
        self._set = False  # and whether it will
        self._napping = False
        self._unlogged = 0  # preemptions by empty steps

    def submit(self, request: Request) -> None:
        """Take a request in, now."""
        scheduler = self.scheduler
        if not scheduler.fits(request):
            self._record(request, REJECTED)
            return
        self.log.joined.append(self.env.now)
        self._arrived(scheduler.add(request))

    def _arrived(self, may_board: bool) -> None:
        """Wake up for a new request, if it may change what comes next."""
        if self._step is None:
            now = self.env.now
            if self._due != now and not self._napping:
                self._sleep(now)
        elif may_board and len(self._ends) > 1:
            flying = bisect_left(self._ends, self.env.now)
            if flying < len(self._ends) - 1:
                del self._ends[flying + 1 :]
                self._sleep(self._ends[-1])

    def _sleep(self, when: float) -> None:
        if self._set:  # the old alarm will come off to no effect
            self._alarm = Alarm(self.env, self._awake, LATE)
        self._set = True
        self._due = when
        self._alarm.set(when)

    def _awake(self, alarm: simpy.Event) -> None:
        """End the step in flight, begin the next."""
        if alarm is not self._alarm:
            return  # an arrival has cut the leap short
        self._set = False
        now = self._due
        if self._step is not None:
            self._commit(self._step)
        self.begin(now)

    def land(self, now: float) -> None:
        """End the step in flight, if there is one: it is over."""
        if self._step is not None:
            self._commit(self._step)

    def begin(self, now: float) -> None:
        """Schedule the next step and set out on it, or rest."""
        self._napping = False
        scheduler = self.scheduler
        step = scheduler.schedule(now)
        if not step.decodes and not step.prefills:
            self._rest(now)
            return
        self._step = step
        self._start = now
        self._row = scheduler.account(step)
        if self._unlogged:
            self._row = self._with_unlogged(self._row)
        leaper = self.leaper
        if leaper is not None and (repeats := scheduler.horizon(step)) > 1:
            ends = list(accumulate(leaper.leap(step, repeats), initial=now))
            del ends[0]
        else:
            ends = [now + self.executor.execute(step)]
        self._ends = ends
        self._sleep(ends[-1])

    def _with_unlogged(self, row: tuple[int, ...]) -> tuple[int, ...]:
        """Add to a row the preemptions by empty steps before it."""
        *others, preempted = row
        preempted += self._unlogged
        self._unlogged = 0
        return (*others, preempted)

    def _rest(self, now: float) -> None:
        """Wait for an arrival, or until what waits may start."""
        due = self.scheduler.next_wakeup()
        if due is not None:
            self._sleep(max(due, now))
        elif self.scheduler.preempted:
            self._unlogged += self.scheduler.preempted
            self._napping = True
            self._sleep(now + self.nap)
        elif self.scheduler.waiting and not self.scheduler.awaits_transfer:
            raise RuntimeError(f"the scheduler does nothing though requests wait, at {now} s")
        else:
            self._due = -1.0

    def _commit(self, step: Step) -> None:
        ends = self._ends
        log = self.log
        log.step_rows += pack_step(self._start, ends[-1], len(ends), *self._row)
        if step.copies:
            log.record_swaps(self._start, step)
        if step.decodes and self.scheduler.decodes.count:
            log.tick_ends.extend(ends)
        finished = self.scheduler.commit(step, ends)
        self._step = None
        for request in finished:
            self._end(request)

    def _end(self, request: Request) -> None:
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
        """Write down the requests that are still here, when a run is stopped before its end.

        Nobody is told that they ended: they have not.
        """
        self.on_finish = None
        del self._ends[bisect_right(self._ends, self.env.now) :]
        if self._step is not None and self._ends:  # steps of a leap that are over have happened
            self._commit(self._step)
        scheduler = self.scheduler
        while scheduler.waiting:
            self._record(scheduler.waiting.take(), UNFINISHED)
        for request in scheduler.running:
            if request.finish < 0:
                scheduler.close(request)
                self._record(request, UNFINISHED)
