"""One engine with a loop of its own: what a replica of a model is."""

from collections.abc import Callable
from itertools import accumulate

import simpy

from simulator.core.executor import Executor
from simulator.engine.core import EngineCore, ScheduledStep
from simulator.engine.loop import EMPTY_STEP_SECONDS, EngineLoop, InFlight, LoopTimer, Timer
from simulator.schedulers.vllm.scheduler import Scheduler


class Replica(EngineCore, EngineLoop):
    """An engine core and its loop."""

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        executor: Executor,
        *,
        leap: bool = True,
        timer: Callable[[EngineLoop], Timer] = LoopTimer,
        empty_step_seconds: float = EMPTY_STEP_SECONDS,
    ) -> None:
        EngineCore.__init__(self, env, scheduler, executor, leap=leap)
        EngineLoop.__init__(self, env, [self], timer=timer, empty_step_seconds=empty_step_seconds)

    def begin(self, now: float, start: float) -> InFlight | None:
        """Schedule the next step, now, and its sure repeats; None: there is nothing to do."""
        # `self.schedule` written out, for every step: a call costs 2 % of a run (11 pairs).
        scheduler = self.scheduler
        step = scheduler.schedule(now)
        prefills = step.prefills
        if not prefills and not step.decodes:
            self.note_empty_step()
            return None
        row = scheduler.account(step)
        if self._unlogged:
            row = self.with_unlogged(row)
        leaper = self.leaper
        if prefills or leaper is None or (repeats := scheduler.horizon(step)) == 1:
            ends = [start + self.executor.execute(step)]
        else:
            ends = list(accumulate(leaper.leap(step, repeats), initial=start))
            del ends[0]
        return InFlight((step, row), now, start, ends)

    def repeat(self, scheduled: ScheduledStep, times: int) -> None:
        """Let the step just scheduled be scheduled so many times more."""
        self.scheduler.repeat(times)

    def computes(self, core: EngineCore) -> bool:
        """Say whether a step is in flight."""
        return bool(self.batch_queue)
