"""Headway's own engine under observation: it behaves as in a simulation, and tells a recorder."""

from collections.abc import Sequence

from simulator.conformance.cases import StepTime
from simulator.conformance.recorder import Recorder
from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request, Step
from simulator.engine.core import ScheduledStep
from simulator.engine.loop import EngineLoop
from simulator.engine.replica import Replica
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.installed import InstalledScheduler
from simulator.schedulers.vllm.scheduler import Scheduler


class _RecordedBlocks(BlockCounter):
    """Blocks that tell, step by step of a leap, how many are left."""

    recorder: Recorder

    def take_ticks(self, decodes: DecodeSet, ticks: int, skip: int = 0) -> None:
        left = self.free - decodes.blocks(ticks, skip)
        for tick in range(skip, skip + ticks):
            super().take_ticks(decodes, 1, tick)
            self.recorder.blocks.append((self.free, self.hashed))
        assert self.free == left


class RecordedCounter(_RecordedBlocks, BlockCounter):
    """Blocks without prefix caching."""


class RecordedManager(_RecordedBlocks, BlockManager):
    """Blocks with prefix caching."""


class RecordedScheduler(Scheduler):
    """A scheduler that tells whom it admits and preempts."""

    recorder: Recorder

    def schedule(self, now: float) -> Step:
        self.recorder.begin_step()
        return super().schedule(now)

    def start(self, request: Request) -> None:
        self.recorder.admitted.append(request)
        super().start(request)

    def preempt(self, request: Request) -> None:
        self.recorder.preempted.append(request.id)
        super().preempt(request)


class RecordedAsyncScheduler(RecordedScheduler, AsyncScheduler):
    """The same, asynchronous."""


class RecordedInstalledScheduler(RecordedScheduler, InstalledScheduler):
    """The installed vLLM's."""


class RecordedClock:
    """The step-time model of a case, in nanoseconds; an executor of a recorded engine."""

    def __init__(self, recorder: Recorder, times: StepTime) -> None:
        self.recorder, self.times = recorder, times

    def execute(self, step: Step) -> int:
        row, times = self.recorder.add_step(step), self.times
        return (
            times.base_ns
            + times.per_token_ns * row.tokens
            + times.per_context_token_ns * row.context
        )

    def leap(self, step: Step, repeats: int) -> list[float]:
        recorder = self.recorder
        first = self.execute(step)
        if recorder.max_steps is not None:
            repeats = min(repeats, recorder.max_steps - recorder.steps + 1)
        more = self.times.per_context_token_ns * step.decodes
        return [first + more * k for k in range(repeats)]


class RecordedReplica(Replica):
    """A replica that takes whatever comes, and tells who came, who finished and each outcome."""

    recorder: Recorder

    def submit(self, request: Request) -> None:
        changes = self.scheduler.add(request)
        self.recorder.queue_changed()
        self.arrived(self, changes=changes)

    def _end(self, request: Request) -> None:
        self.recorder.finished.append(request.id)
        super()._end(request)

    def _rest(self, now: float) -> None:
        """Wait for the next arrival; tell of a step that only preempted."""
        if self.scheduler.preempted:
            self.recorder.add_step(Step([]))
            self.recorder.write_outcome([int(now + self.empty_step_seconds)])
            super()._rest(now)

    def commit(
        self, scheduled: ScheduledStep, decided: float, start: float, ends: Sequence[float]
    ) -> None:
        recorder = self.recorder
        recorder.blocks.clear()
        super().commit(scheduled, decided, start, ends)
        recorder.add_leap(recorder.pending[0], len(ends) - 1)
        recorder.write_outcome(ends)

    def cut(self) -> None:
        """Tell of the steps that are over when a case is cut short."""


class RecordedAsyncReplica(RecordedReplica):
    """The same with two batches in flight."""

    def _rest(self, now: float) -> None:
        """Wait for the batch in flight or the next arrival; tell of a step that only preempted."""
        recorder, queue = self.recorder, self.batch_queue
        recorder.write_empty()
        if self.scheduler.preempted:
            recorder.add_step(Step([]))
            recorder.empty = recorder.pending.pop()
            if queue:
                recorder.empty.start = int(queue[-1][3][-1])
        if queue or self.scheduler.preempted:
            EngineLoop._rest(self, now)

    def execute(self, scheduled: ScheduledStep, start: float) -> list[float]:
        ends = super().execute(scheduled, start)
        self.recorder.pending[-1].start = int(start)
        self.recorder.write_empty()
        return ends

    def repeat(self, scheduled: ScheduledStep, times: int) -> None:
        recorder = self.recorder
        recorder.blocks.clear()
        super().repeat(scheduled, times)
        recorder.add_leap(recorder.pending[-1], times)

    def commit(
        self, scheduled: ScheduledStep, decided: float, start: float, ends: Sequence[float]
    ) -> None:
        Replica.commit(self, scheduled, decided, start, ends)
        self.recorder.write_outcome(ends)

    def cut(self) -> None:
        recorder = self.recorder
        if recorder.pending and len(recorder.pending[0].blocks) > 1:
            leap = recorder.pending[0]
            recorder.write_outcome(self.batch_queue[0][3][:-1])
            recorder.pending.append(leap)
