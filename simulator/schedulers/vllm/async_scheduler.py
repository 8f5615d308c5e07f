"""vLLM's asynchronous scheduling: a step is decided before the tokens of the step before it are
known, so that the GPU never waits for the scheduler (`AsyncScheduler` in vLLM 0.33).

That a request advances is certain as soon as it is scheduled; only what the token is, and that it
was the last one, comes out with the batch. So all counting happens right after a step is decided,
and the outcome of the batch brings times and ends: a request that ends holds its place and its
blocks for one step longer, without computing. One that is preempted meanwhile gets its late token
all the same, and resumes one token longer.

A request that ends before its `max_tokens`, by a stop token, computes in that step, too: nobody
knows yet that it has ended. It is a ghost, whose token is dropped. Before vLLM 0.11.1 all are.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Unpack

from simulator.core.log import pack_run
from simulator.core.request import Request, Step, by_admission
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.interface import Traits
from simulator.schedulers.running_requests import PreemptionLoop, RunningRequests
from simulator.schedulers.vllm.scheduler import Options, Scheduler
from simulator.util.errors import ScenarioError

_schedule = Scheduler.schedule  # as `super().schedule`, in the time of a plain call


@dataclass(slots=True, eq=False)
class Run:
    """A row of log.RUN in the making: it may end before its first token has come out."""

    start: float = -1.0
    first_tick: int = 0
    ticks: int = -1  # -1: it goes on


@dataclass(slots=True, eq=False)
class BatchInFlight:
    """What a batch in flight will bring."""

    first_tokens: Sequence[tuple[Request, Run]] = ()  # of runs of decodes
    ending: Sequence[Request] = ()  # who gets its last token
    leap_blocks: list[int] | None = None  # its repeats'; None: none was scheduled

    def drop(self, request: Request) -> None:
        """Bring nothing to a request: nobody wants it any more."""
        self.first_tokens = [pair for pair in self.first_tokens if pair[0] is not request]
        self.ending = [other for other in self.ending if other is not request]


class AsyncRunning(RunningRequests):
    """The running list where tokens are counted before they have come out.

    A request whose last token is sent is in `leaving`, neither in `partial` nor in the decode set.
    """

    __slots__ = ("leaving", "open")

    def __init__(self, blocks: BlockCounter, loop: PreemptionLoop) -> None:
        super().__init__(blocks, loop)
        self.leaving: dict[Request, None] = {}
        self.open: dict[Request, Run] = {}  # runs of the members of the decode set

    def stop_decoding(self, request: Request) -> None:
        """Take a request out of the decode set and write down its run, if that has begun."""
        run = self.open.pop(request)
        run.first_tick = request.joined
        run.ticks = ticks = self.decodes.leave(request)  # all of its members are alike
        request.generated += ticks
        request.unknown = 1
        if run.start >= 0:
            self.runs += pack_run(run.start, request.id, run.first_tick, run.ticks)

    def remove(self, request: Request) -> None:
        if request in self.leaving:
            del self.leaving[request]
            del self[request]
        else:
            super().remove(request)
        request.unknown = 0

    def discard(self, request: Request) -> None:
        self.open.pop(request, None)
        if request in self.leaving:
            del self.leaving[request]
            del self[request]
        else:
            super().discard(request)


class AsyncScheduler(Scheduler):
    """The scheduler with two batches in flight.

    `schedule` may be called before the outcome of the step before is committed. `commit` wants
    the steps in the order in which they were scheduled, empty ones left out.
    """

    traits: ClassVar[Traits] = Traits(overlaps=True)
    running_type: ClassVar[type[RunningRequests]] = AsyncRunning
    running: AsyncRunning

    def __init__(self, blocks: BlockCounter, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)
        if self.swap_space.free:
            what = "swap cannot be used with async_scheduling: a request may then be preempted "
            raise ScenarioError("engine.preemption_mode", f"{what}while it is computed")
        blocks.delay = 1
        self.in_flight: deque[BatchInFlight] = deque()
        self._tells_blocks = type(blocks).begin_step is not BlockCounter.begin_step

    def schedule(self, now: float) -> Step:
        """Decide the next forward pass and count what it will bring."""
        if self._tells_blocks:
            self.blocks.begin_step(in_flight=bool(self.in_flight))
        step = _schedule(self, now)
        if not step.decodes and not step.prefills:
            return step
        batch = BatchInFlight()
        self.in_flight.append(batch)
        running, singles = self.running, step.singles
        if step.decodes > (len(singles) if singles else 0):
            for request in running.decodes.advance(1):  # as `_tick`, without a call
                running.stop_decoding(request)
                self._leave(batch, request)
        for chunk in (*singles, *step.prefills) if singles else step.prefills:
            request = chunk.request
            if request.computed == request.padding + request.prompt_tokens + request.generated:
                if request.generated < request.output_limit:
                    self._send(batch, request)
                else:
                    step.ghosts += 1
        return step

    def tokens_wanted(self, request: Request) -> int:
        return 0 if request in self.running.leaving else request.pending

    def repeat(self, ticks: int) -> None:
        """Schedule the step just scheduled so many times more."""
        self.in_flight[-1].leap_blocks = self._count_growth(ticks, 0)
        self.take_ticks(ticks, 0)
        self._tick(self.in_flight[-1], ticks)

    def _tick(self, batch: BatchInFlight, ticks: int) -> None:
        running = self.running
        for request in running.decodes.advance(ticks):
            running.stop_decoding(request)
            self._leave(batch, request)

    def _leave(self, batch: BatchInFlight, request: Request) -> None:
        """Note that a batch brings the last token of a request, which is in no set."""
        running = self.running
        batch.ending = [*batch.ending, request]
        allowed = request.max_tokens
        says_when = allowed is None or request.generated >= allowed  # else by a stop token
        if (self.rules.stops_at_last_token and says_when) or request.known == self.max_model_len:
            running.leaving[request] = None
        else:
            request.unknown = 1
            running.partial.append(request)
            running.partial.sort(key=by_admission)

    def _send(self, batch: BatchInFlight, request: Request) -> None:
        """Count the token of a request outside the decode set."""
        running = self.running
        decodes = running.decodes
        request.generated += 1
        decodes.emitted(request)
        request.unknown = 0
        run = Run()
        batch.first_tokens = [*batch.first_tokens, (request, run)]
        if request.generated < request.output_limit:
            running.open[request] = run
            running.start_decoding(request)
        else:
            run.first_tick, run.ticks = decodes.tick, 0
            running.partial.remove(request)
            self._leave(batch, request)

    def horizon(self, step: Step) -> int:
        return 1 if self.running.leaving else super().horizon(step)

    def leap_blocks(self, ticks: int) -> list[int]:
        # A failure cuts a leap short, also one whose repeats have not been told of yet.
        scheduled = self.in_flight[0].leap_blocks
        return self._count_growth(ticks, skip=0) if scheduled is None else scheduled[:ticks]

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Deliver the tokens of the oldest batch in flight; return who finished."""
        batch = self.in_flight.popleft()
        if batch.leap_blocks is not None and len(ends) <= len(batch.leap_blocks):
            batch.ending = ()  # a failure broke the leap off: last tokens come with its end
        now = ends[-1]
        for feature in self.features:
            feature.on_commit(step, batch.ending)
        for request, run in batch.first_tokens:
            run.start = now
            if request.first_token < 0:
                request.first_token = now
            if run.ticks >= 0:
                self.running.runs += pack_run(now, request.id, run.first_tick, run.ticks)
        for request in self.running.partial:  # the budget of the next step was too small for them
            if request.unknown and request.generated < request.output_limit:
                request.unknown = 0
                self.blocks.register_last(request)
        ending = sorted(batch.ending, key=by_admission) if batch.ending else []
        for request in ending:
            self.finish(request, now)
        self.ended = bool(ending)
        return ending

    def cancel(self, request: Request) -> None:
        """Let a request go: what the batch in flight computes of it is thrown away.

        Its blocks are free at once, as in vLLM (`Scheduler.finish_requests`): who takes them writes
        to them in a later batch.
        """
        for batch in self.in_flight:
            batch.drop(request)
        super().cancel(request)

    def finish(self, request: Request, now: float) -> None:
        """End a request and free what it holds, or take it from the queue if it was preempted."""
        if request in self.running:
            # Before 0.11.1 it may compute a token after its last one.
            self.blocks.register_last(request, 0 if request.pending else 1)
            Scheduler.finish(self, request, now)
        else:
            request.finish = now
            self.waiting.remove(request)
            self._deferred.discard(request)
            self.blocks.finished(request)

    def stored(self, step: Step) -> int:
        """Tokens that somebody needs in the blocks in use while `step`, just scheduled, runs."""
        running = self.running
        tokens = running.decodes.context
        for request in running.partial:
            tokens += request.computed
        for request in running.leaving:
            tokens += request.computed
        return self.blocks.in_use(tokens + self.kept_tokens)
