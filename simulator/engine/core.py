"""An engine core: a scheduler, the executor of its steps, and the log of what came of them.

When it schedules is up to an `EngineLoop` (`loop.py`).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import simpy

from simulator.core.executor import CanLeap, Executor, Leap, Timing
from simulator.core.log import (
    LENGTH,
    REJECTED,
    STOP,
    UNFINISHED,
    Log,
    StepRow,
    pack_span,
    pack_step,
)
from simulator.core.request import Request, Step
from simulator.schedulers.interface import LONGEST_LEAP, SchedulerInterface

ScheduledStep = tuple[Step, StepRow]
"""A step, and what the log says of it beside its times."""
ExecutedStep = tuple[Step, StepRow, Timing | Leap]
"""The same and what it takes, or it and its repeats."""


class SchedulerStats(NamedTuple):
    """What an engine says of itself between two events, as vLLM's gauges."""

    running: int  # requests
    waiting: int
    blocks_used: int  # KV blocks


@dataclass(slots=True, eq=False)
class InFlight:
    """A batch that the engine computes; times in s."""

    scheduled: Any  # what is computed: only the loop that scheduled it looks into it
    decided: float
    start: float
    ends: list[float]  # of it and of each of its repeats


class Loop(Protocol):
    """Lets engine cores schedule, as an engine core sees it."""

    cancels: bool
    """Cores have requests to let go when the step in flight ends."""
    batch_queue: deque[Any]
    """The steps in flight."""

    def arrived(self, core: "EngineCore", *, changes: bool) -> None:
        """Wake up for a new request; `changes`: the next step may differ for it."""

    def catch_up(self) -> None:
        """Take in a step that ended before now."""

    def computes(self, core: "EngineCore") -> bool:
        """Say whether the core has a part in the last step in flight."""

    def repeats_scheduled(self, core: "EngineCore") -> int:
        """Count the repeats of its step in flight that have been scheduled by now."""


class EngineCore:
    """Whatever is submitted to it gets scheduled and executed.

    `on_finish(request)` is called at the moment a request ends or is rejected; it may submit
    others, which the next step sees. `leap=False` executes every step by itself.
    """

    loop: Loop

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: SchedulerInterface,
        executor: Executor,
        *,
        leap: bool = True,
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self.executor = executor
        self.leaper = executor if leap and isinstance(executor, CanLeap) else None
        self.on_finish: Callable[[Request], None] | None = None
        if getattr(executor, "reads_longest", False):
            scheduler.track_longest()
        self.log = Log(
            scheduler.blocks.usable,
            scheduler.blocks.block_size,
            scheduler.num_seats,
            run_rows=scheduler.running.runs,
            pause_rows=scheduler.running.pauses,
            draft_rows=scheduler.drafts,
            seat_rows=scheduler.seat_rows,
            delivers_together=scheduler.delivers_together,
        )
        self.cancelled: dict[Request, None] = {}  # to leave when a step ends
        self._unlogged = 0  # preemptions by empty steps
        self._overlaps = scheduler.traits.overlaps
        self.door = scheduler.door

    @property
    def limits(self) -> str:
        """What has kept requests out, in words; what would, where no limit at the door has."""
        refused = {} if self.door is None else self.door.refusals
        if closed := [f"engine.{why}" for why, count in refused.items() if count]:
            return ", ".join(closed)
        longest = f"prompts of max_model_len ({self.scheduler.max_model_len:,}) tokens or more"
        return f"{longest}, or too large for {self.scheduler.room}"

    def submit(self, request: Request) -> None:
        """Take a request in, now."""
        scheduler = self.scheduler
        if self.keeps_out(request) or not scheduler.fits(request):
            self.record(request, REJECTED)
            return
        self.log.joined.append(self.env.now)
        self.loop.arrived(self, changes=scheduler.add(request))

    def keeps_out(self, request: Request) -> bool:
        """Say whether a limit at the door keeps a request out; one that is in stays in.

        A live server asks the door itself, once for all answers to a request, and a data-parallel
        one before it chooses a rank.
        """
        door = self.door
        if door is None or request in door.present:
            return False
        self.loop.catch_up()
        if door.refuses(self.env.now):
            return True
        door.enter(request)
        return False

    def schedule(self, now: float) -> ScheduledStep | None:
        """Schedule the next step; None: there is nothing to do."""
        scheduler = self.scheduler
        step = scheduler.schedule(now)
        if not step.decodes and not step.prefills:
            self.note_empty_step()
            return None
        row = scheduler.account(step)
        return step, self.with_unlogged(row) if self._unlogged else row

    def begin(self, now: float, start: float) -> InFlight | None:
        """Schedule the next step, now, and its sure repeats; None: there is nothing to do.

        The first begins at `start`. For a core with a loop of its own.
        """
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
            timing = self.executor.execute(step)
            return InFlight((step, row, timing), now, start, [start + timing.seconds])
        leap = leaper.leap(step, repeats)
        ends = list(accumulate(leap.seconds, initial=start))
        del ends[0]
        return InFlight((step, row, leap), now, start, ends)

    def note_empty_step(self) -> None:
        """Keep in mind whom a step without tokens has preempted: it gets no row."""
        if self.scheduler.next_wakeup() is None:
            self._unlogged += self.scheduler.preempted

    def with_unlogged(self, row: StepRow) -> StepRow:
        """Add to a step's row the preemptions by the empty steps before it."""
        unlogged, self._unlogged = self._unlogged, 0
        return *row[:-1], row[-1] + unlogged  # the last column: preempted

    def repeats(self, scheduled: ScheduledStep | None) -> int:
        """Count how often the step just scheduled is sure to repeat if nobody arrives."""
        if scheduled is None:
            return 1 if self.scheduler.waiting or self.scheduler.running else LONGEST_LEAP
        return 1 if self.leaper is None else self.scheduler.horizon(scheduled[0])

    def commit(
        self, scheduled: ExecutedStep, decided: float, start: float, ends: list[float]
    ) -> None:
        """Take in the outcome of a step and its repeats, which ended at `ends`, s."""
        step, row, timing = scheduled
        log, scheduler, steps = self.log, self.scheduler, len(ends)
        log.step_rows += pack_span(start, ends[-1], steps) + pack_step(*row)
        if self._overlaps:
            log.decided.append(decided)
        if timing.host:
            log.host_waits += (
                timing.host if isinstance(timing, Timing) else sum(timing.host[:steps])
            )
        if step.copies is not None:
            log.record_copies(start, step.copies, timing.swap)
        if step.work is not None:
            log.record_work(step.work, ends[-1] - start, timing.features)
        if step.decodes and (step.singles is None or step.decodes > len(step.singles)):
            if steps == 1:
                log.tick_ends.append(ends[0])
            else:
                log.tick_ends.fromlist(ends)  # faster than `extend`
                log.leap_blocks.fromlist(scheduler.leap_blocks(steps - 1))
        if self.cancelled:
            self._commit_with_cancelled(step, ends)
            return
        for request in scheduler.commit(step, ends):
            self._end(request)

    def _commit_with_cancelled(self, step: Step, ends: list[float]) -> None:
        """Do so where requests are about to leave: nobody receives what they still said."""
        before = self.log.written
        ended = self.scheduler.commit(step, ends)
        self.log.drop_rows_of([request.id for request in self.cancelled], before)
        for request in ended:
            self._end(request)

    def _end(self, request: Request) -> None:
        self.record(request, STOP if request.generated == request.output_tokens else LENGTH)

    def record(self, request: Request, reason: int) -> None:
        """Write down that a request has ended, and tell whoever wants to know."""
        if self.door is not None:
            self.door.leave(request)
        if request in self.cancelled:  # it ended as it was about to leave: nobody cares
            self.scheduler.forget(request)
            return
        self.log.record(request, reason, request.generated, request.first_token)
        if self.on_finish is not None:
            self.on_finish(request)

    def record_unfinished(self) -> None:
        """Write down the requests that are still here."""
        scheduler = self.scheduler
        while scheduler.waiting:
            self.record(scheduler.waiting.take(), UNFINISHED)
        for request in scheduler.running:
            if request.state != "finished":
                scheduler.close(request)
                self.record(request, UNFINISHED)

    def final_log(self) -> Log:
        """Return the log of a run that is over, with what only the scheduler knows."""
        tier = self.scheduler.tier
        self.log.offloaded = self.scheduler.blocks.offloaded if tier is None else tier.stored
        return self.log

    def cancel(self, request: Request) -> None:
        """Let a request go at the end of the step in flight."""
        if self.door is not None:
            self.door.leave(request)
        request.received = self._given(request)
        if self.loop.batch_queue or self.scheduler.abandoned(request):
            self.cancelled[request] = None
            self.loop.cancels = True
            self.wake()
        else:
            self.scheduler.cancel(request)

    def _given(self, request: Request) -> int:
        """Count the tokens of a request whose steps have ended before now."""
        self.loop.catch_up()
        if request.first_token < 0 or self.log.delivers_together:
            return 0
        traits, decodes, now = self.scheduler.traits, self.scheduler.decodes, self.env.now
        leapt = sum(end < now for batch in self.loop.batch_queue for end in batch.ends)
        ended = self.log.ticks_before + self.log.size("tick_ends") + leapt
        if request.joined >= 0:
            return decodes.generated(request, decodes.tick - ended)
        ahead = request.last_tick - ended if traits.overlaps else 0
        return request.generated - max(ahead, request.unknown) * traits.counts_ahead

    def drop_cancelled(self) -> None:
        """Let the cancelled requests go: the step in flight has ended."""
        there = [request for request in self.cancelled if request.state != "finished"]
        self.cancelled = dict.fromkeys(filter(self.scheduler.abandoned, there))
        for request in there:
            if request not in self.cancelled:
                self.scheduler.cancel(request)
        self.loop.cancels |= bool(self.cancelled)

    def wake(self) -> None:
        """Decide anew at the end of the step in flight, or now."""
        self.loop.arrived(self, changes=True)

    def restart(self, scheduler: SchedulerInterface) -> list[Request]:
        """Go on with another scheduler; return the requests of the old one, which are lost."""
        old, log = self.scheduler, self.log
        lost = [request for request in old.running if request.state != "finished"]
        while old.waiting:
            lost.append(old.waiting.take())
        lost = [request for request in lost if request not in self.cancelled]
        self.cancelled.clear()
        self.scheduler = scheduler
        log.emptied.append(self.env.now)
        if old.traits.overlaps:
            log.drop_runs_ahead()
        running = scheduler.running
        running.runs, running.pauses = log.run_rows, log.pause_rows
        scheduler.drafts, scheduler.seat_rows = log.draft_rows, log.seat_rows
        scheduler.decodes.tick = log.ticks_before + len(log.column("tick_ends"))
        return lost

    def stats(self) -> SchedulerStats:
        """Say what the core has before anything happens at this instant, also within a leap.

        Nobody outside reads the scheduler between two events: it is where the leap began.
        """
        scheduler = self.scheduler
        blocks = scheduler.blocks
        first = 0 if scheduler.traits.overlaps else 1  # the first step's blocks are taken already
        used = blocks.usable - blocks.free
        if repeats := self.loop.repeats_scheduled(self):
            used += scheduler.decodes.blocks(repeats, skip=first)
        return SchedulerStats(len(scheduler.running), len(scheduler.waiting), used)
