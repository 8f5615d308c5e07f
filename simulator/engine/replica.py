"""One engine with a loop of its own: what a replica of a model is."""

from collections.abc import Callable
from typing import Any

import simpy

from simulator.core.executor import Executor, StagedExecutor, Timing
from simulator.core.request import Request
from simulator.engine.core import EngineCore, ExecutedStep, InFlight, ScheduledStep
from simulator.engine.loop import EMPTY_STEP_SECONDS, EngineLoop, LoopTimer, Timer
from simulator.schedulers.interface import SchedulerInterface
from simulator.schedulers.vllm.pipeline import Pipelined


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


class PipelineReplica(Replica):
    """An engine whose layers are split into stages: the loop of vLLM's batch queue, and its GPUs.

    The loop is `EngineCore.step_with_batch_queue` (vLLM 0.33), call by call. As long as fewer
    batches are in flight than may be, the next one is scheduled. Else, or where nobody is left,
    the engine waits for the oldest batch and takes in its outcome. A batch without tokens has a
    place in the queue, too; after a call that scheduled none the engine sleeps a millisecond
    while requests are here. So an arrival is seen when the next call schedules, not when a
    stage is free.

    A batch goes through the stages one after the other, each of which computes one batch at a
    time, in order. The first thing on its way is the host, which prepares one batch at a time
    as well. Rows of the log do not overlap: one begins where the row before it ends, or, where
    the pipeline was empty, as it is scheduled. In a full pipeline a row lasts as long as the
    slowest stage.
    """

    scheduler: Pipelined

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Pipelined,
        executor: StagedExecutor,
        *,
        timer: Callable[[EngineLoop], Timer] = LoopTimer,
    ) -> None:
        super().__init__(env, scheduler, executor, leap=False, timer=timer)
        self.batch_queue_size = scheduler.max_concurrent_batches
        self._stages = executor
        self._host_free = 0.0  # s
        self._free: list[float] = []  # s, when each stage is
        self._blocked = False  # the loop waits for the oldest batch
        self._executed = False  # the last call scheduled tokens
        self._ended = False  # requests ended since the last call: the workers are to hear of it

    def begin(self, now: float, start: float) -> InFlight | None:
        """Schedule the next batch, now, and send it on its way; None: there is nothing to do."""
        self._ended = False
        scheduled = self.schedule(now)
        if scheduled is None:
            return None
        batch = self.scheduler.batches[-1]
        batch.end = end = self._pass(scheduled, now, batch.after)
        return InFlight((*scheduled, Timing(end - now)), now, max(now, start), [end])

    def _pass(self, scheduled: ScheduledStep, now: float, after: float) -> float:
        """Send a batch through host and stages; give the time at which it has left the last.

        The tokens that it begins with are there at `after`, s.
        """
        host, stages, send = self._stages.stage_seconds(scheduled[0])
        self._host_free = max(now, self._host_free) + host
        at = max(self._host_free, after)
        free = self._free or [0.0] * len(stages)
        for stage, seconds in enumerate(stages):
            if stage:
                at += send
            at = free[stage] = max(at, free[stage]) + seconds
        self._free = free
        return at

    def commit(self, scheduled: Any, decided: float, start: float, ends: list[float]) -> None:
        """Take in the outcome of a batch, if it has tokens."""
        if scheduled is not None:
            running = len(self.scheduler.running)
            super().commit(scheduled, decided, start, ends)
            self._ended |= len(self.scheduler.running) < running

    def turn(self, now: float, between: Callable[[], None] | None = None) -> float:
        """Go on, which even one batch in flight does in its own way."""
        self.end_steps(now)
        if between is not None:
            between()
        return self.begin_steps(now)

    def end_steps(self, now: float) -> None:
        """Take in the outcome of the oldest batch, if the loop has waited for it."""
        if self._blocked:
            self.scheduler.heard = now
            self._commit(self.batch_queue.popleft())
            if self.cancels:
                self.cancels = False
                self.drop_cancelled()

    def begin_steps(self, now: float) -> float:
        """Go on, call by call, until there is something to wait for; say when that is, or -1."""
        queue = self.batch_queue
        while True:
            if self._blocked:
                self._blocked = False
                # Who has come meanwhile does not count.
                left = self._kept or self.scheduler.running or self._ended
                if left and not self._executed:
                    return self._pause(now)
            self._pausing = self._executed = False
            if self._has_requests():
                last = queue[-1].ends[-1] if queue else now
                batch = self.begin(now, last)
                self._executed = batch is not None
                queue.append(batch or InFlight(None, now, now, [last]))
                if len(queue) < self.batch_queue_size and self._has_requests():
                    if self._executed:
                        continue
                    self._check_progress(now)
                    return self._pause(now)
            elif not queue:
                self._due = -1.0
                return self._due
            self._blocked, self._kept = True, len(self.scheduler.waiting) > 0
            self._due = when = queue[0].ends[-1]
            if when > now:
                return when
            self.end_steps(now)

    def _has_requests(self) -> bool:
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting or self._ended)

    def _check_progress(self, now: float) -> None:
        """Raise RuntimeError where no further call would schedule anything either."""
        scheduler = self.scheduler
        busy = scheduler.running or scheduler.batches or scheduler.preempted
        if scheduler.waiting and not busy:
            raise RuntimeError(f"the scheduler does nothing though requests wait, at {now} s")

    def crash(self, *schedulers: SchedulerInterface) -> list[Request]:
        """Lose what is in flight and all requests, which are returned; go on with another."""
        lost = super().crash(*schedulers)
        self._host_free, self._free = 0.0, []
        self._blocked = self._executed = self._ended = False
        return lost

    def catch_up(self) -> None:
        """Do nothing: an outcome is taken in when the loop has waited for it."""


def make_replica(
    env: simpy.Environment,
    scheduler: SchedulerInterface,
    executor: Executor,
    *,
    leap: bool = True,
    timer: Callable[[EngineLoop], Timer] = LoopTimer,
) -> Replica:
    """Make the replica that a scheduler needs; with several stages it does not leap."""
    if isinstance(scheduler, Pipelined):
        if not isinstance(executor, StagedExecutor):
            raise TypeError(f"{type(executor).__name__} does not tell what each stage takes")
        return PipelineReplica(env, scheduler, executor, timer=timer)
    return Replica(env, scheduler, executor, leap=leap, timer=timer)
