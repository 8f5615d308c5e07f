"""The scheduler of vLLM V1: whoever runs goes on, then others board.

There is no prefill or decode phase: a request wants its computed tokens to catch up with the
known ones, and a decode is the case where one is missing. The rules are those of vLLM 0.33
(`vllm/v1/core/sched/scheduler.py`), for one engine without speculative decoding. The scheduler
owns no clock, no GPU and no I/O.

For speed the requests that decode are not walked one by one but kept as sums (`decodes.py`); the
result is the same as that of vLLM's loop:

- Each decode wants one token. As long as the budget holds all of them, only the requests in
  `partial` (a prompt not yet computed) want looking at.
- When blocks run out, vLLM preempts the last of the running list until the request at hand has
  its block. The victims are always a tail of the list, and the shortest tail whose going lets the
  rest have what they need: so it can be found from the sum of the needs.
- Where the budget does not reach round (only possible with `long_prefill_token_threshold`), and
  where the blocks of a prefix cache run out, the set is dissolved and the running list is walked.
"""

from collections.abc import Sequence

from simulator.blocks import BlockCounter
from simulator.decodes import DecodeSet
from simulator.host import HostMemory
from simulator.log import pack_run
from simulator.policies import Fifo, Policy, Ranked, Waiting
from simulator.request import Chunk, Request, Step

LONGEST_LEAP = 256  # steps; bounds what is computed in vain when an arrival cuts a leap short


class Scheduler:
    """Decides what each step computes.

    `policy` orders the waiting queue, None is first come, first served. The other arguments are
    vLLM's, by name. `max_model_len`, in tokens, ends a request whatever it still wanted to say.
    `swap_blocks` is host memory, in KV blocks: as long as a preempted request fits into it, its
    blocks are copied there and, before it runs again, back; otherwise they are computed again.
    """

    def __init__(
        self,
        blocks: BlockCounter,
        *,
        policy: Policy | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 8192,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        scheduler_reserve_full_isl: bool = True,
        watermark: float = 0.0,
        swap_blocks: int = 0,
    ) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be >= max_num_seqs "
                f"({max_num_seqs}) and that >= 1"
            )
        if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be >= max_model_len "
                f"({max_model_len}) without chunked prefill"
            )
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.scheduler_reserve_full_isl = scheduler_reserve_full_isl
        self.watermark_blocks = int(watermark * (blocks.usable + 1))
        self.waiting: Waiting = Fifo() if policy is None else Ranked(policy.key)
        self.running: dict[Request, None] = {}  # in order of admission
        self.partial: list[Request] = []  # of the running, those outside the decode set
        self.decodes = DecodeSet(blocks.block_size, by_phase=blocks.names_blocks)
        self.preempted = 0  # by the last call of `schedule`
        self.host = HostMemory(swap_blocks, blocks.block_size)
        self.runs = bytearray()  # rows of log.RUN, of runs that are over
        self._seats = 0

    def fits(self, request: Request) -> bool:
        """Say whether the request could ever run: vLLM refuses a prompt without room to answer.

        A request that needs more blocks than there are would be preempted for ever.
        """
        if request.prompt_tokens >= self.max_model_len:
            return False
        tokens = request.prompt_tokens + self._max_tokens(request) - 1
        return -(-tokens // self.blocks.block_size) <= self.blocks.usable

    def _max_tokens(self, request: Request) -> int:
        return min(request.output_tokens, self.max_model_len - request.prompt_tokens)

    def add(self, request: Request) -> bool:
        """Take a new request; say whether the next step may differ for it."""
        request.max_tokens = self._max_tokens(request)
        return self.waiting.add(request) and len(self.running) < self.max_num_seqs

    def wakes_at(self) -> float | None:
        """Return the time at which a step becomes possible though nothing happens until then."""
        return None

    # ------------------------------------------------------------------ deciding

    def schedule(self, now: float) -> Step:
        """Decide the next forward pass. An empty step means that there is nothing to do."""
        self.preempted = 0
        decodes, blocks = self.decodes, self.blocks
        count = decodes.count
        budget = self.max_num_batched_tokens
        cap = self.long_prefill_token_threshold
        if not cap or len(self.running) + len(self.waiting) == 1:
            cap = budget  # vLLM lifts the cap for a request that is alone
        if self.partial or count > budget or blocks.free < count:
            step = Step([])
            chunks = self._plan(cap)
            budget = self._walk(step, cap) if chunks is None else self._advance(step, chunks)
            self.host.send(step)
        else:  # the common case in a few words: everybody decodes, and there are blocks for all
            step = Step([], count, decodes.context + count)
            budget -= count
            if count:
                blocks.take_ticks(decodes, 1)
        if budget and not self.preempted and self.waiting:
            self._board(step, budget, cap, now)
        return step

    def _plan(self, cap: int) -> list[tuple[Request, int]] | None:
        """Share the budget out among the running, preempting the last while blocks lack.

        Return tokens per partial request, or None where only a walk can tell.
        """
        decodes, blocks = self.decodes, self.blocks
        size = blocks.block_size
        while True:
            left = self.max_num_batched_tokens - decodes.count
            need = decodes.phases[decodes.tick % size]
            chunks = []
            for request in self.partial:
                tokens = request.pending
                tokens = min(tokens, cap)
                if tokens > left:
                    if self._decodes_behind(request):
                        return None
                    tokens = left
                if tokens:
                    chunks.append((request, tokens))
                    left -= tokens
                    done = request.computed
                    need += -(-(done + tokens) // size) - -(-done // size)
            if need <= blocks.free:
                return chunks
            if blocks.prefix_caching:
                return None  # which blocks are evicted depends on when the victims go
            self._preempt(next(reversed(self.running)))

    def _decodes_behind(self, request: Request) -> bool:
        """Say whether a member of the decode set was admitted after `request`."""
        for other in reversed(self.running):
            if other is request:
                return False
            if other.joined >= 0:
                return True
        return False

    def _advance(self, step: Step, chunks: list[tuple[Request, int]]) -> int:
        """Carry out the plan; return the tokens left."""
        decodes = self.decodes
        budget = self.max_num_batched_tokens
        if decodes.count:
            self.blocks.take_ticks(decodes, 1)
            step.decodes = decodes.count
            step.context = decodes.context + decodes.count
            budget -= decodes.count
        for request, tokens in chunks:
            self._give(step, request, tokens)
            budget -= tokens
        return budget

    def _give(self, step: Step, request: Request, tokens: int) -> None:
        """Let a running request compute `tokens` more."""
        if request.generated and request.pending == 1:
            self._single(step, request, request.computed)
        else:
            step.prefills.append(Chunk(request, request.computed, tokens))
        self.blocks.extend(request, request.computed + tokens)

    def _single(self, step: Step, request: Request, start: int) -> None:
        """Let a request outside the decode set decode."""
        if step.singles is None:
            step.singles = []
        step.singles.append(Chunk(request, start, 1))
        step.decodes += 1
        step.context += start + 1

    def _walk(self, step: Step, cap: int) -> int:
        """Go through the running list one by one, as vLLM does; return the tokens left."""
        for request in self.running:
            if request.joined >= 0:
                self._leave(request)
        self.partial = list(self.running)
        size = self.blocks.block_size
        budget = self.max_num_batched_tokens
        for request in list(self.running):
            if not budget:
                break
            tokens = min(request.pending, cap, budget)
            done = request.computed
            need = -(-(done + tokens) // size) - -(-done // size)
            while need > self.blocks.free and request in self.running:
                self._preempt(next(reversed(self.running)))
            if request not in self.running:
                break
            self._give(step, request, tokens)
            budget -= tokens
        return budget

    def _board(self, step: Step, budget: int, cap: int, now: float) -> None:
        """Admit from the head of the waiting queue; nobody overtakes a head that does not fit."""
        blocks, waiting, running = self.blocks, self.waiting, self.running
        while budget and waiting and len(running) < self.max_num_seqs:
            request = waiting.head()
            hits = blocks.match(request)
            start = max(len(hits) * blocks.block_size, request.swapped)
            tokens = min(request.known - start, cap)
            if tokens > budget:
                if not self.enable_chunked_prefill:
                    break
                tokens = budget
            held = request.known if self.scheduler_reserve_full_isl else start + tokens
            spare = self.watermark_blocks if running else 0
            if blocks.missing(held, hits) + spare > blocks.free:
                break
            waiting.take()
            self._seat(request, now)
            blocks.admit(request, hits, start + tokens)
            if request.preemptions == 0:
                request.cached = start
            if request.swapped:
                self.host.restore(step, request, len(hits))
                if request.generated and tokens == 1 and not request.pending:
                    self._single(step, request, start)
                    budget -= 1
                    continue
            step.prefills.append(Chunk(request, start, tokens))
            budget -= tokens

    def _seat(self, request: Request, now: float) -> None:
        request.seat = self._seats
        self._seats += 1
        self.running[request] = None
        self.partial.append(request)
        if request.first_scheduled < 0:
            request.first_scheduled = now

    def _preempt(self, request: Request) -> None:
        """Put a running request back into the queue, without its blocks."""
        if request.joined >= 0:
            self._leave(request)
        else:
            self.partial.remove(request)
        del self.running[request]
        if self.host.free:
            self.host.save(request)
        self.blocks.release(request)
        request.padding = 0
        request.preemptions += 1
        self.preempted += 1
        self.waiting.put_back(request)

    # ---------------------------------------------------------------- committing

    def horizon(self, step: Step) -> int:
        """Count how often `step`, just scheduled, is sure to repeat if nobody arrives."""
        decodes = self.decodes
        if step.prefills or self.partial or self.preempted or not decodes.count:
            return 1
        if self.waiting and self.blocks.names_blocks:
            return 1  # blocks registered meanwhile may let the head of the queue fit
        return self._sure_ticks()

    def _sure_ticks(self) -> int:
        """Ticks for which the decode set stays as it is and has its blocks; one is taken."""
        decodes, free = self.decodes, self.blocks.free
        ticks = decodes.ticks_to_end()
        ticks = min(ticks, LONGEST_LEAP)
        if ticks > 1 and decodes.count * (ticks // decodes.block_size + 1) > free:
            return 1 + decodes.affords(free, ticks - 1)
        return ticks

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Apply the outcome of `step`, repeated once per end time; return who finished."""
        decodes = self.decodes
        now = ends[-1]
        over: list[Request] = []
        if step.decodes and decodes.count:
            ticks = len(ends)
            if ticks > 1:
                self.blocks.take_ticks(decodes, ticks - 1, skip=1)
            over = decodes.advance(ticks)
        for chunk in step.singles or ():
            self._emit(chunk.request, now, over)
        for chunk in step.prefills:
            if not chunk.request.pending:
                self._emit(chunk.request, now, over)
        if len(over) > 1:
            over.sort(key=_seat)  # blocks are freed in the order of the running list
        for request in over:
            self._finish(request, now)
        return over

    def _emit(self, request: Request, now: float, over: list[Request]) -> None:
        """Bring out the token of a request outside the decode set."""
        request.generated += 1
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

    def close(self, request: Request) -> None:
        """Bring a running request up to date, when the run is stopped before its end."""
        if request.joined >= 0:
            self._leave(request)

    # ----------------------------------------------------------------- accounting

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
            blocks.usable - blocks.free,
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


def _seat(request: Request) -> int:
    return request.seat
