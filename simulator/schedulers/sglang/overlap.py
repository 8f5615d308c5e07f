"""SGLang's overlap schedule: a pass chooses its batch while the one before is computed, and does
not know its tokens."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from simulator.core.log import pack_run
from simulator.core.request import Chunk, Request, Step, by_admission
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.interface import Traits
from simulator.schedulers.running_requests import PreemptionLoop, RunningRequests
from simulator.schedulers.sglang.scheduler import SgLang
from simulator.schedulers.vllm.async_scheduler import AsyncRunning, Run


class OverlappedRunning(AsyncRunning):
    """The running list where tokens are counted before they have come out."""

    __slots__ = ("ended", "lost")

    def __init__(self, blocks: BlockCounter, loop: PreemptionLoop) -> None:
        super().__init__(blocks, loop)
        self.lost = 0  # tokens in flight of the request that is sent away
        self.ended: dict[Request, None] = {}  # members whose last token is in flight

    def remove(self, request: Request) -> None:
        if request.joined >= 0:
            self.stop_decoding(request)
        elif request in self.leaving:
            del self.leaving[request]
        else:
            self.partial.remove(request)
        del self[request]

    def stop_decoding(self, request: Request) -> None:
        """Take a request out of the decode set and write down its run, if that has begun."""
        run = self.open.pop(request)
        run.first_tick = request.joined
        generated = request.generated + self.decodes.tick - request.joined
        lost = self.lost or max(generated - request.output_limit, 0)  # else a decode in vain
        request.generated = generated - lost
        run.ticks = self.decodes.leave(request) - lost
        if run.start >= 0:
            self.runs += pack_run(run.start, request.id, run.first_tick, run.ticks)


class BatchInFlight:
    """What a batch in flight will bring."""

    __slots__ = ("decodes", "ending", "leap_blocks", "prompts")

    def __init__(self, decodes: bool) -> None:
        self.decodes = decodes
        self.prompts: Sequence[tuple[Request, Run, int]] = ()
        """Whose prompts it completes, and how many tokens go into the tree then."""
        self.ending: Sequence[Request] = ()  # who gets its last token
        self.leap_blocks: list[int] | None = None  # its repeats'; None: none was scheduled

    def drop(self, request: Request) -> None:
        """Bring nothing to a request: SGLang throws away what a retracted one gets."""
        self.prompts = [row for row in self.prompts if row[0] is not request]
        self.ending = [one for one in self.ending if one is not request]


class OverlappedSgLang(SgLang):
    """The scheduler with two batches in flight (`event_loop_overlap` in SGLang's `scheduler.py`).

    The result of a batch is processed after the next one is chosen. Who ends at its limit is known
    to do so, and leaves before that; who ends by itself decodes once in vain. If decodes do not
    fit but somebody is about to end, none runs in that pass, rather than be retracted. Who is
    retracted loses the token in flight.

    `commit` wants the steps in the order in which they were scheduled.
    """

    traits: ClassVar[Traits] = replace(SgLang.traits, overlaps=True)
    running_type: ClassVar[type[RunningRequests]] = OverlappedRunning
    running: OverlappedRunning

    def _begin(self) -> None:
        super()._begin()
        self.in_flight: deque[BatchInFlight] = deque()

    def _is_idle(self) -> bool:
        return not self.in_flight

    def schedule(self, now: float) -> Step:
        """Choose the next batch and count what it will bring."""
        step = SgLang.schedule(self, now)
        if step.decodes:
            batch = BatchInFlight(True)
            self.in_flight.append(batch)
            step.ghosts = len(self.running.ended)  # nobody knows that they have ended
            if over := self.batch.advance(1):
                self._note_ends(batch, over)
        elif step.prefills:
            batch = BatchInFlight(False)
            self.in_flight.append(batch)
        if step.prefills:
            self._note_prompts(batch, step.prefills)
        return step

    def _note_prompts(self, batch: BatchInFlight, chunks: Sequence[Chunk]) -> None:
        """Note that a batch brings the first tokens of those whose prompts it completes."""
        running, chunked = self.running, self.chunked
        prompts, over = [], []
        for chunk in chunks:
            request = chunk.request
            if request is chunked:
                continue
            run = Run()
            prompts.append((request, run, request.computed))
            request.generated += 1
            running.open[request] = run
            self.batch.emitted(request)
            running.start_decoding(request)
            if request.generated == request.output_limit:
                over.append(request)
        batch.prompts = prompts
        if over:
            self._note_ends(batch, over)

    def _note_ends(self, batch: BatchInFlight, over: list[Request]) -> None:
        """Note that a batch brings the last tokens of members of the decode set.

        They end in the order that the batch has now: a retraction may change that of the next one.
        """
        ended = self.running.ended
        if ended:
            over = [r for r in over if r not in ended]
        if len(over) > 1:
            over.sort(key=by_admission)
        for request in over:
            ended[request] = None
        batch.ending = [*batch.ending, *over] if batch.ending else over

    def repeat(self, ticks: int) -> None:
        """Schedule the step just scheduled so many times more."""
        batch = self.in_flight[-1]
        batch.leap_blocks = self.batch.growth(ticks)  # nothing is reserved here
        self.take_ticks(ticks, 0)
        self._note_ends(batch, self.batch.advance(ticks))

    def leap_blocks(self, ticks: int) -> list[int]:
        # A failure cuts a leap short, also one whose repeats have not been told of yet.
        scheduled = self.in_flight[0].leap_blocks
        return self._count_growth(ticks, skip=0) if scheduled is None else scheduled[:ticks]

    def horizon(self, step: Step) -> int:
        flight = self.in_flight
        # What the batch before brings must be taken in at its end, if it is more than tokens.
        if self.running.ended or (len(flight) > 1 and self._changes_memory(flight[-2])):
            return 1
        return SgLang.horizon(self, step)

    def _changes_memory(self, batch: BatchInFlight) -> bool:
        """Say whether there may be more or less memory when a batch is over.

        A prompt goes into the tree then. Of one that shares nothing and was never retracted,
        nothing is there yet, so that no block is given back for it.
        """
        if batch.ending or (batch.prompts and self.host is not None):
            return True
        if self.tree is not None:
            for request, _, _ in batch.prompts:
                if request.segments is not None or request.preemptions:
                    return True
        return False

    # What is known.

    def _lag(self, request: Request) -> int:
        """Count the tokens of a request that are in flight."""
        if not self.in_flight or request.joined < 0:
            return 0
        last = self.in_flight[-1]
        return int(last.decodes or any(request is one for one, _, _ in last.prompts))

    def received(self, request: Request) -> int:
        return super().received(request) - self._lag(request)

    def remaining(self) -> float:
        flight, batch, ratio = self.in_flight, self.batch, self.ratio.value
        if not flight or flight[-1].decodes:
            return batch.remaining(ratio, len(flight))
        # Those whose prompts are computed now have a token left more than the batch has counted.
        fresh = [one for one, _, _ in flight[-1].prompts if one.joined >= 0]
        counted = sum([batch.expected(one, ratio, 1) - batch.expected(one, ratio) for one in fresh])
        return batch.remaining(ratio) + counted

    # Who leaves.

    def _let_go(self) -> bool:
        """Take those out of the running batch who end at their limit; say whether any does."""
        if not self.running.ended:
            return False
        decodes = self.batch
        tick = decodes.tick
        going = [
            r
            for r in self.running.ended
            if r.joined >= 0 and r.generated + tick - r.joined >= r.allowed
        ]
        for request in going:
            self.running.stop_decoding(request)
            self.running.leaving[request] = None
            del self.running.ended[request]
        if going:
            self.full = False
        return bool(going)

    def _decode(self, step: Step) -> bool:
        if self.running.ended and self._let_go() and (not self.batch.count or not self._has_room()):
            return False
        return SgLang._decode(self, step)

    def _join_prefill(self, step: Step) -> None:
        self._let_go()
        super()._join_prefill(step)

    def send_away(self, request: Request, left: int) -> None:
        self.running.lost = self._lag(request)
        super().send_away(request, left)
        self.running.lost = 0
        self._drop_in_flight(request)

    def _abort(self, request: Request) -> None:
        self.running.lost = self._lag(request)
        super()._abort(request)
        self.running.lost = 0
        self._drop_in_flight(request)

    def cancel(self, request: Request) -> None:
        self._drop_in_flight(request)
        super().cancel(request)

    def _drop_in_flight(self, request: Request) -> None:
        """Throw away what the batch in flight computes of a request."""
        self.running.ended.pop(request, None)
        for batch in self.in_flight:
            batch.drop(request)

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Deliver the tokens of the oldest batch in flight; return who finished."""
        batch = self.in_flight.popleft()
        if batch.leap_blocks is not None and len(ends) <= len(batch.leap_blocks):
            batch.ending = ()  # a failure broke the leap off: last tokens come with its end
        over: list[Request] = []
        if batch.prompts or batch.ending or self.aborted:
            self._deliver(batch, ends[-1], over)
        if self.host is not None:
            loads, in_flight = step.copies is not None, bool(self.in_flight)
            self.host.end_step(ends[-1], loads=loads, in_flight=in_flight)
        return over

    def _deliver(self, batch: BatchInFlight, now: float, over: list[Request]) -> None:
        """Take in what a batch has brought; add who finished to `over`."""
        ending, tree = batch.ending, self.tree
        for request, run, tokens in batch.prompts:
            run.start = now
            if request.first_token < 0:
                request.first_token = now
            if run.ticks >= 0:  # it has left already
                self.running.runs += pack_run(now, request.id, run.first_tick, run.ticks)
            if ending and request in ending:
                ending = [one for one in ending if one is not request]
                self.finish(request, now)
                over.append(request)
            elif tree is not None:
                tree.insert(request, tokens)
        for request in ending:
            self.finish(request, now)
            over.append(request)
        if self.aborted:
            over += self.aborted
            self.aborted.clear()

    def finish(self, request: Request, now: float) -> None:
        running = self.running
        if request not in running.leaving:  # else the running batch gets no smaller by it
            self.full = False
        running.ended.pop(request, None)
        if request.joined >= 0:  # as `remove`, without a call
            running.stop_decoding(request)
            del running[request]
        else:
            running.remove(request)
        request.finish = now
        self.blocks.release(request)
        self._forget(request)

    def stored(self, step: Step) -> int:
        """Tokens that somebody needs in the blocks in use while `step`, just scheduled, runs."""
        running, blocks = self.running, self.blocks
        tokens: int = self.batch.context
        for request in running.partial:
            tokens += request.computed
        for request in running.leaving:
            tokens += request.computed
        return tokens - blocks.shared * blocks.block_size if blocks.shared else tokens
