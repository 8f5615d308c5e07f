"""vLLM's asynchronous scheduling: a step is decided before the tokens of the step before it are
known, so that the GPU never waits for the scheduler (`AsyncScheduler` in vLLM 0.33).

That a request advances is certain as soon as it is scheduled; only what the token is, and that it
was the last one, comes out with the batch. So all counting happens right after a step is decided,
and the outcome of the batch brings times and ends: a request that ends holds its seat and its
blocks for one step longer, without computing. One that is preempted meanwhile gets its late token
all the same, and resumes one token longer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.core.log import pack_run
from simulator.core.request import Request, Step, by_admission
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.vllm.scheduler import LONGEST_LEAP, Scheduler


@dataclass(slots=True)
class _Run:
    """A row of log.RUN in the making: it may end before its first token has come out."""

    start: float = -1.0
    first_tick: int = 0
    ticks: int = -1  # -1: it goes on


@dataclass(slots=True)
class Sent:
    """What a batch in flight will bring."""

    births: list[tuple[Request, _Run]] = field(default_factory=list)  # first tokens of runs
    last: list[Request] = field(default_factory=list)  # whose last token it is


class AsyncScheduler(Scheduler):
    """The scheduler with two batches in flight.

    `schedule` may be called before the outcome of the step before is committed. `commit` wants
    the steps in the order in which they were scheduled, empty ones left out.
    """

    overlaps = True
    cancels = False

    def __init__(self, blocks: BlockCounter, **options: Any) -> None:
        super().__init__(blocks, **options)
        if self.swap_space.free:
            raise ValueError(
                "preemption_mode: swap does not go with async_scheduling: a request may then be "
                "preempted while it is computed"
            )
        blocks.delay = 1
        self.leaving: dict[Request, None] = {}  # of the running, those whose last token is sent
        self.in_flight: deque[Sent] = deque()
        self._open: dict[Request, _Run] = {}  # runs of the members of the decode set

    def schedule(self, now: float) -> Step:
        """Decide the next forward pass and count what it will bring."""
        step = super().schedule(now)
        if not step.decodes and not step.prefills:
            return step
        sent = Sent()
        self.in_flight.append(sent)
        singles = step.singles or []
        if step.decodes > len(singles):
            self._tick(sent, 1)
        for chunk in (*singles, *step.prefills):
            if not chunk.request.pending:
                self._send(sent, chunk.request)
        return step

    def repeat(self, ticks: int) -> None:
        """Schedule the step just scheduled so many times more."""
        self.blocks.take_ticks(self.decodes, ticks)
        self._executed += ticks
        self._tick(self.in_flight[-1], ticks)

    def _tick(self, sent: Sent, ticks: int) -> None:
        for request in self.decodes.advance(ticks):
            self._leave(request)
            self.leaving[request] = None
            sent.last.append(request)

    def _send(self, sent: Sent, request: Request) -> None:
        """Count the token of a request outside the decode set."""
        self.partial.remove(request)
        request.generated += 1
        self.decodes.emitted(request)
        request.unknown = 0
        run = _Run()
        sent.births.append((request, run))
        if request.generated < request.max_tokens:
            self._open[request] = run
            self.decodes.join(request, request.max_tokens - request.generated)
        else:
            run.first_tick, run.ticks = self.decodes.tick, 0
            self.leaving[request] = None
            sent.last.append(request)

    def _leave(self, request: Request) -> None:
        """Take a request out of the decode set and write down its run, if that has begun."""
        run = self._open.pop(request)
        run.first_tick = request.joined
        run.ticks = self.decodes.leave(request)
        request.generated += run.ticks
        if run.start >= 0:
            self.runs += pack_run(run.start, request.id, run.first_tick, run.ticks)

    def _break_up(self) -> None:
        members = [request for request in self.running if request.joined >= 0]
        super()._break_up()
        for request in members:
            request.unknown = 1
        self.partial = [request for request in self.running if request not in self.leaving]

    def _detach(self, request: Request) -> None:
        if request in self.leaving:
            del self.leaving[request]
        else:
            super()._detach(request)
        request.unknown = 0

    def horizon(self, step: Step) -> int:
        """Count how often `step`, just scheduled, is sure to repeat if nobody arrives."""
        decodes = self.decodes
        if step.prefills or step.singles or self.partial or self.leaving or self.preempted:
            return 1
        if not decodes.count or (self.waiting and self._may_fit()):
            return 1
        free = self.blocks.free
        ticks = min(decodes.ticks_to_end(), LONGEST_LEAP)
        if self._cadence is not None and self._cadence.held and self.waiting:
            ticks = min(ticks, self._cadence.left(self._executed) - 1)
        if decodes.count * (ticks // decodes.block_size + 1) > free:
            ticks = decodes.affords(free, ticks, skip=0)
        return 1 + ticks

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Deliver the tokens of the oldest batch in flight; return who finished."""
        sent = self.in_flight.popleft()
        now = ends[-1]
        for request, run in sent.births:
            run.start = now
            if request.first_token < 0:
                request.first_token = now
            if run.ticks >= 0:
                self.runs += pack_run(now, request.id, run.first_tick, run.ticks)
        for request in self.partial:  # decodes for which the budget of the next step was too small
            if request.unknown:
                request.unknown = 0
                self.blocks.register_last(request)
        sent.last.sort(key=by_admission)
        for request in sent.last:
            self._finish(request, now)
        return sent.last

    def _finish(self, request: Request, now: float) -> None:
        """End a request and free what it holds, or take it from the queue if it was preempted."""
        request.finish = now
        if request in self.leaving:
            del self.leaving[request]
            del self.running[request]
            self.blocks.register_last(request)
            self.blocks.release(request)
        else:
            self.waiting.remove(request)

    def stored(self, step: Step) -> int:
        """Tokens that somebody needs in the blocks in use while `step`, just scheduled, runs."""
        tokens = self.decodes.context
        for requests in (self.partial, self.leaving):
            for request in requests:
                tokens += request.computed
        return tokens - self.blocks.shared * self.blocks.block_size
