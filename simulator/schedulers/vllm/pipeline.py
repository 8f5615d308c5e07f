"""vLLM's scheduler under pipeline parallelism: several batches are in flight (0.33).

A request that decodes is in one batch at a time: it is scheduled again when its token has come out
or, with asynchronous scheduling, `pipeline_parallel_size` calls of `schedule` later, empty ones
counted (`next_decode_eligible_step`, Model Runner V2). The chunks of a prompt follow one another
from batch to batch. So the batches in flight share no decode, and each seat belongs to one of them.

Who is preempted while it is computed gets its late token all the same. Until all that is in flight
of it has come back it is not admitted again, and others may be admitted before it.

Each running request is scheduled by itself, so a step costs as much as it has requests, and none is
leapt over.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from simulator.core.log import pack_run
from simulator.core.request import Request, Step, by_admission
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.interface import Traits
from simulator.schedulers.vllm.scheduler import Options, Scheduler


@dataclass(slots=True, eq=False)
class Batch:
    """A batch in flight."""

    parts: list[tuple[Request, int, bool]] = field(default_factory=list)
    """Requests, the tokens computed of each, and whether it yields one."""
    after: float = 0.0  # s, when all tokens that it begins with have come out
    end: float = 0.0  # s


class Pipelined(Scheduler):
    """Has `pipeline_parallel_size` batches in flight, or one more if asynchronous.

    `commit` wants the steps in the order in which they were scheduled, empty ones left out.
    """

    traits = Traits(overlaps=True)
    batches: deque[Any]

    def __init__(self, blocks: BlockCounter, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)
        self.async_scheduling = self.limits.async_scheduling
        self.pipeline_parallel_size = self.limits.pipeline_parallel_size
        self.current_step = 0  # calls of `schedule` so far
        self.heard = 0.0  # s, when the engine last looked at an outcome: it may have slept
        self._late: list[Request] = []  # taken from the queue's head, to be put back

    @property
    def max_concurrent_batches(self) -> int:
        """Batches in flight, at most."""
        return self.pipeline_parallel_size + self.async_scheduling

    def admit(self, step: Step, budget: int, cap: int) -> None:
        super().admit(step, budget, cap)
        while self._late:
            self.waiting.put_back(self._late.pop())

    def pull(self, step: Step, request: Request, budget: int) -> int:
        """Pass over a head of the queue of which something is still in flight."""
        self._late.append(self.waiting.take())
        self._deferred.add(request)
        return budget

    def horizon(self, step: Step) -> int:
        return 1


class PipelineScheduler(Pipelined):
    """The scheduler of a pipeline's stages. The arguments are those of Scheduler."""

    def __init__(self, blocks: BlockCounter, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)
        blocks.delay = int(self.async_scheduling)
        self.batches: deque[Batch] = deque()
        self._ready: list[Request] = []  # running, and maybe some who ran, with tokens to compute
        self._eligible: dict[int, list[Request]] = {}  # asynchronous: by step, who gets ready
        self._in_flight: dict[Request, int] = {}  # tokens that are being computed
        self._yielding: dict[Request, Batch] = {}  # the batch that yields a token not known yet

    def schedule(self, now: float) -> Step:
        """Decide the next forward pass and count what it will bring."""
        self.current_step += 1
        if not self.running:  # nobody is left of those who got ready
            self._ready.clear()
            self._eligible.pop(self.current_step, None)
        step = super().schedule(now)
        if step.decodes or step.prefills:
            self._send(step)
        return step

    def plan(self, cap: int) -> list[tuple[Request, int]] | None:
        return None

    def _walk(self, step: Step, cap: int) -> int:
        """Go through those who are ready, in the order of the running list; return tokens left."""
        budget, interval = self.max_num_scheduled_tokens, self.prefill_interval
        ready = self._ready
        ready += self._eligible.pop(self.current_step, ())
        ready.sort(key=by_admission)
        self._ready = []
        for at, request in enumerate(ready):
            if not budget:
                self._ready += ready[at:]
                break
            if request not in self.running:  # preempted
                continue
            if interval is not None and interval.holds(request):
                self._ready.append(request)
                continue
            tokens = min(request.pending, cap, budget)
            need = self.blocks.growth(request, request.computed + tokens)
            while need > self.blocks.free and request in self.running:
                budget += self._make_room(step)[1]
            if request in self.running:
                self.schedule_tokens(step, request, tokens)
                budget -= tokens
            elif not self.rules.walks_on_after_self:
                self._ready += ready[at + 1 :]
                break
        return budget

    def _send(self, step: Step) -> None:
        """Note what a batch will bring; who has tokens left to compute stays ready."""
        batch = Batch()
        for chunk in (*(step.singles or ()), *step.prefills):
            request = chunk.request
            if request in self._yielding:
                batch.after = max(batch.after, self._yielding[request].end)
            self._in_flight[request] = self._in_flight.get(request, 0) + chunk.tokens
            ghost = request.generated == request.output_limit  # a stop token is on its way
            step.ghosts += ghost
            yields = not request.pending and not ghost
            batch.parts.append((request, chunk.tokens, yields))
            if not yields:
                if not ghost:
                    self._ready.append(request)
                continue
            request.generated += 1
            request.unknown += 1
            self._yielding[request] = batch
            allowed = min(request.max_tokens or 0, self.max_model_len - request.prompt_tokens)
            if self.async_scheduling and request.generated < max(request.output_limit, allowed):
                step_number = self.current_step + self.pipeline_parallel_size
                self._eligible.setdefault(step_number, []).append(request)
        self.batches.append(batch)

    def preempt(self, request: Request) -> None:
        super().preempt(request)
        request.remote = int(request in self._in_flight)
        for eligible in self._eligible.values():
            if request in eligible:
                eligible.remove(request)

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Deliver the tokens of the oldest batch in flight; return who finished."""
        batch, now = self.batches.popleft(), max(ends[-1], self.heard)
        over: list[Request] = []
        for request, tokens, yields in batch.parts:
            if request.finish >= 0 or request not in self._in_flight:  # nobody wants it any more
                continue
            self._in_flight[request] -= tokens
            if not self._in_flight[request]:
                del self._in_flight[request]
                request.remote = 0
            if yields:
                self._deliver(request, batch, now, over)
        over.sort(key=by_admission)
        for request in over:
            self.finish(request, now)
        return over

    def _deliver(self, request: Request, batch: Batch, now: float, over: list[Request]) -> None:
        """Bring out a request's token."""
        request.unknown -= 1
        if request.first_token < 0:
            request.first_token = now
        self.running.runs += pack_run(now, request.id, 0, 0)
        self.decodes.joins += 1
        if self._yielding[request] is batch:
            del self._yielding[request]
        if self.async_scheduling and request in self.running:
            self.blocks.register_last(request, self._in_flight.get(request, 0))
        if request.generated - request.unknown == request.output_limit:
            over.append(request)
        elif not self.async_scheduling and request in self.running:
            self._ready.append(request)

    def finish(self, request: Request, now: float) -> None:
        """End a request and free what it holds, or take it from the queue if it was preempted."""
        self._in_flight.pop(request, None)
        if request in self.running:
            super().finish(request, now)
        else:
            request.finish = now
            self.waiting.remove(request)
            self._deferred.discard(request)

    def cancel(self, request: Request) -> None:
        """Let a request go: what is in flight of it is thrown away."""
        self._in_flight.pop(request, None)
        self._yielding.pop(request, None)
        super().cancel(request)
