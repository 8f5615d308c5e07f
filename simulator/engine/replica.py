"""One engine with a loop of its own: what a replica of a model is."""

from collections.abc import Callable

import simpy

from simulator.core.executor import Executor
from simulator.engine.core import EngineCore, ExecutedStep
from simulator.engine.loop import EMPTY_STEP_SECONDS, EngineLoop, LoopTimer, Timer
from simulator.schedulers.interface import SchedulerInterface


class Replica(EngineCore, EngineLoop):
    """An engine core and its loop."""

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: SchedulerInterface,
        executor: Executor,
        *,
        leap: bool = True,
        timer: Callable[[EngineLoop], Timer] = LoopTimer,
        empty_step_seconds: float = EMPTY_STEP_SECONDS,
    ) -> None:
        EngineCore.__init__(self, env, scheduler, executor, leap=leap)
        EngineLoop.__init__(self, env, [self], timer=timer, empty_step_seconds=empty_step_seconds)

    def repeat(self, scheduled: ExecutedStep, times: int) -> None:
        """Let the step just scheduled be scheduled so many times more."""
        self.scheduler.repeat(times)

    def computes(self, core: EngineCore) -> bool:
        """Say whether a step is in flight."""
        return bool(self.batch_queue)
