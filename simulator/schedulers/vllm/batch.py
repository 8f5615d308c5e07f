"""Who runs and how far: the state of an engine, and what the outcome of a step changes in it.

The requests that decode are kept as sums (`decode_set.py`), all others one by one in `partial`.
"""

from collections.abc import Sequence

from simulator.core.decode_set import DecodeSet
from simulator.core.log import pack_pause, pack_run
from simulator.core.request import Chunk, Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.waiting_queues import WaitingQueue


class Batch:
    """The running and the waiting requests of one engine, and their blocks."""

    def __init__(self, blocks: BlockCounter, waiting: WaitingQueue) -> None:
        self.blocks = blocks
        self.waiting = waiting
        self.running: dict[Request, None] = {}  # in order of admission
        self.partial: list[Request] = []  # of the running, those outside the decode set
        self.decodes = DecodeSet(blocks.block_size, by_phase=blocks.names_blocks)
        self.tells_longest = False  # whether steps say how much their longest decode reads
        self.preempted = 0  # by the last call of `schedule`
        self.runs = bytearray()  # rows of log.RUN, of runs that are over
        self.pauses = bytearray()  # rows of log.PAUSE, of preemptions that are over
        self.drafts = bytearray()  # rows of log.DRAFT
        self.now = 0.0  # of the last call of `schedule`
        self._paused: dict[Request, tuple[float, int]] = {}  # since when, tokens that were computed
        self._seats = 0
        self._executed = 0  # steps with tokens

    def tell_longest(self) -> None:
        """Let every step say how much its longest decode reads, from now on."""
        self.tells_longest = True
        self.decodes.tell_longest()

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Apply the outcome of `step`, repeated once per end time; return who finished."""
        decodes = self.decodes
        now = ends[-1]
        over: list[Request] = []
        if step.decodes and decodes.count:
            ticks = len(ends)
            if ticks > 1:
                self.blocks.take_ticks(decodes, ticks - 1, skip=1)
                self._executed += ticks - 1
            over = decodes.advance(ticks)
        for chunk in step.singles or ():
            self._emit(chunk.request, now, over)
        for chunk in step.prefills:
            self.blocks.cache(chunk.request)
            if not chunk.request.pending:
                self._emit(chunk.request, now, over)
        if len(over) > 1:
            over.sort(key=by_seat)  # blocks are freed in the order of the running list
        for request in over:
            self._finish(request, now)
        return over

    def _emit(self, request: Request, now: float, over: list[Request]) -> None:
        """Bring out the token of a request outside the decode set."""
        request.generated += 1
        self.decodes.emitted(request)
        request.run_start = now
        if request.first_token < 0:
            request.first_token = now
        self._join(request)
        if request.generated == request.max_tokens:
            over.append(request)

    def _join(self, request: Request) -> None:
        """Let a request whose prompt is computed decode."""
        self.partial.remove(request)
        self.decodes.join(request, request.max_tokens - request.generated)

    def _leave(self, request: Request) -> None:
        """Take a request out of the decode set and write down its run."""
        first = request.joined
        ticks = self.decodes.leave(request)
        request.generated += ticks
        self.runs += pack_run(request.run_start, request.id, first, ticks)

    def _finish(self, request: Request, now: float) -> None:
        """End a request and free what it holds."""
        self._leave(request)
        request.finish = now
        del self.running[request]
        self.blocks.release(request)

    def _pause(self, request: Request, computed: int) -> None:
        """Take note that a request is preempted, with so many tokens computed."""
        self._paused[request] = self.now, computed

    def _resume(self, request: Request, start: int) -> None:
        """Write down a preemption that is over: the request goes on from its token `start`."""
        since, computed = self._paused.pop(request, (self.now, start))
        self.pauses += pack_pause(since, self.now, request.id, max(computed - start, 0))

    def close(self, request: Request) -> None:
        """Bring a running request up to date, when the run is stopped before its end."""
        if request.joined >= 0:
            self._leave(request)

    def listed(self, step: Step) -> list[Chunk]:
        """Spell out all work of `step`, just scheduled: prefills, singles, then the decode set.

        Each in running order. An engine that computes must know every sequence; a cost does not.
        """
        chunks = [*step.prefills, *(step.singles or ())]
        if step.decodes and self.decodes.count:
            tick = self.decodes.tick
            chunks += [
                Chunk(request, request.computed + tick - request.joined, 1)
                for request in self.running
                if request.joined >= 0
            ]
        return chunks

    def account(self, step: Step) -> tuple[int, ...]:
        """Return what the log says of `step`, just scheduled: the columns of log.STEP in order.

        They begin after `steps`.
        """
        tokens = pairs = 0
        for chunk in step.prefills:
            size = chunk.tokens
            tokens += size
            pairs += size * chunk.start + size * (size + 1) // 2
        blocks = self.blocks
        wasted = step.ghosts + step.padding
        return (
            step.context,
            pairs,
            self.stored(step),
            tokens - step.padding,
            step.decodes - step.ghosts,
            wasted,
            len(self.running),
            len(self.waiting),
            blocks.used if blocks.reserved else blocks.usable - blocks.free,
            self.preempted,
        )

    def stored(self, step: Step) -> int:
        """Tokens that somebody needs in the blocks in use while `step`, just scheduled, runs."""
        decodes = self.decodes
        tokens = decodes.context
        if step.decodes:
            tokens += decodes.count
        for request in self.partial:
            tokens += request.computed
        return tokens - self.blocks.shared * self.blocks.block_size


def by_seat(request: Request) -> int:
    return request.admission
