"""Headway's own engine under observation: it behaves as in a simulation, and tells what it does.

What is observed is told to a `Replay`, which keeps a `Row` for every step between its scheduling
and its outcome.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request, Step
from simulator.engine.async_replica import AsyncReplica, Flight
from simulator.engine.replica import Replica
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.installed import InstalledScheduler
from simulator.schedulers.vllm.scheduler import Scheduler

if TYPE_CHECKING:
    from simulator.conformance.replay import Replay


class Cut(Exception):  # noqa: N818  it is no error
    """The case has had its `max_steps`."""


@dataclass(slots=True)
class Row:
    """A step, or a leap of equal ones, from its scheduling until its outcome."""

    t: int  # when the scheduler decided
    tokens: int
    context: int
    decodes: int
    sched: str
    members: list[tuple[int, int]]  # of a leap: id and tokens before its first step
    new: list[tuple[int, int]]
    resumed: list[tuple[int, int]]
    preempted: list[int]
    free: int
    hashed: int
    running: int
    silent: list[int]  # of the scheduled, those whose prompt is not computed to its end
    queue: list[tuple[int, int, int | None]]  # (from when on, waiting, head)
    start: int
    trail: list[tuple[int, int]] = field(default_factory=list)  # (free, hashed) of later steps


class _Trail(BlockCounter):
    """Blocks that note, tick by tick, how many are left."""

    trail: list[tuple[int, int]]

    def take_ticks(self, decodes: DecodeSet, ticks: int, skip: int = 0) -> None:
        left = self.free - decodes.blocks(ticks, skip)
        for tick in range(skip, skip + ticks):
            super().take_ticks(decodes, 1, tick)
            self.trail.append((self.free, self.hashed))
        assert self.free == left


class NotedCounter(_Trail, BlockCounter):
    pass


class NotedManager(_Trail, BlockManager):
    pass


class NotedScheduler(Scheduler):
    """A scheduler that remembers whom it admitted and preempted in this step."""

    replay: "Replay"

    def schedule(self, now: float) -> Step:
        if self.replay.steps == self.replay.case.max_steps:
            raise Cut
        self.boarded: list[Request] = []
        self.evicted: list[int] = []
        return super().schedule(now)

    def _seat(self, request: Request, now: float) -> None:
        self.boarded.append(request)
        super()._seat(request, now)

    def _preempt(self, request: Request) -> None:
        self.evicted.append(request.id)
        super()._preempt(request)


class NotedAsyncScheduler(NotedScheduler, AsyncScheduler):
    pass


class NotedInstalled(NotedScheduler, InstalledScheduler):
    """The installed vLLM's."""


class Clock:
    """The step-time model of a case, in nanoseconds."""

    def __init__(self, replay: "Replay") -> None:
        self.replay = replay
        times = replay.case.step_time
        self.base, self.per_token = times["base_ns"], times["per_token_ns"]
        self.per_context = times["per_context_token_ns"]

    def execute(self, step: Step) -> int:
        row = self.replay.note(step)
        return self.base + self.per_token * row.tokens + self.per_context * row.context

    def leap(self, step: Step, repeats: int) -> list[float]:
        replay = self.replay
        first = self.execute(step)
        if replay.case.max_steps is not None:
            repeats = min(repeats, replay.case.max_steps - replay.steps + 1)
        more = self.per_context * step.decodes
        return [first + more * k for k in range(repeats)]


class Telling(Replica):
    """A replica that takes whatever comes and tells the replay who came and who finished."""

    replay: "Replay"

    def submit(self, request: Request) -> None:
        may_board = self.scheduler.add(request)
        self.replay.note_queue()
        self._arrived(may_board)

    def _end(self, request: Request) -> None:
        self.replay.finished.append(request.id)
        super()._end(request)


class NotedReplica(Telling):
    """Tells the replay of each outcome."""

    def _rest(self, now: float) -> None:
        """Wait for the next arrival; note a step that only preempted."""
        if self.scheduler.preempted:
            self.replay.note(Step([]))
            self.replay.tell([int(now + self.nap)])
            super()._rest(now)

    def _commit(self, step: Step) -> None:
        replay = self.replay
        replay.trail.clear()
        super()._commit(step)
        replay.steps += len(self._ends) - 1
        replay.flying[0].trail = replay.trail[:]
        replay.tell(self._ends)


class NotedAsyncReplica(Telling, AsyncReplica):
    """The same with two batches in flight."""

    def _rest(self, now: float) -> None:
        """Wait for the next arrival."""
        if self.scheduler.preempted:
            super()._rest(now)

    def _launch(self, step: Step, now: float) -> Flight:
        replay = self.replay
        flight = super()._launch(step, now)
        replay.flying[-1].start = int(flight.start)
        replay.tell_empty()
        return flight

    def _wait(self, now: float) -> None:
        replay = self.replay
        replay.tell_empty()
        if self.scheduler.preempted:
            replay.note(Step([]))
            replay.empty = replay.flying.pop()
            if self._flights:
                replay.empty.start = int(self._flights[-1].ends[-1])
        super()._wait(now)

    def _settle(self, flight: Flight) -> None:
        if flight.settled:
            return
        replay = self.replay
        replay.trail.clear()
        super()._settle(flight)
        replay.steps += len(flight.ends) - 1
        replay.flying[-1].trail = replay.trail[:]

    def _land(self, flight: Flight) -> None:
        super()._land(flight)
        self.replay.tell(flight.ends)
