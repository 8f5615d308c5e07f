"""Speculative decoding as vLLM V1 schedules it (0.33): decodes verify drafts beside their token.

Every request that decodes wants 1 + k tokens of the budget, k drafts included; of the drafts those
up to the first rejected one come out, and one token more. A prompt's last chunk has no drafts to
verify, nor has a request that is computed again after a preemption. Where the budget ends, drafts
are cut off. The slots of rejected drafts stay in the request's table for the next step.
"""

from collections.abc import Sequence

from simulator.core.log import pack_draft, pack_run
from simulator.core.request import Chunk, Request, Step
from simulator.core.speculative_config import SpeculativeConfig
from simulator.kv_cache.slot_counter import SlotCounter
from simulator.schedulers.vllm.drafts import DraftedSet
from simulator.schedulers.vllm.scheduler import Scheduler


class Speculative(Scheduler):
    """The scheduler of vLLM V1 with speculative decoding; the arguments are those of Scheduler.

    `seed` is that of what is accepted. There is no prefix cache, and no leap: a step is cheap.
    Without `speculation` there are no drafts: so it runs models whose layers keep a window alone,
    by the groups of `blocks`.
    """

    caches_prefixes = False
    cancels = False
    blocks: SlotCounter
    decodes: DraftedSet

    def __init__(
        self,
        blocks: SlotCounter,
        *,
        speculation: SpeculativeConfig | None = None,
        seed: int = 0,
        **options: object,
    ) -> None:
        super().__init__(blocks, **options)  # type: ignore[arg-type]
        self.speculation = speculation
        self.seed = seed
        self._streams: dict[Request, Sequence[int]] = {}
        self._ready: set[Request] = set()  # outside the set though they have drafts to verify
        self.most_drafts = 0 if speculation is None else speculation.num_speculative_tokens
        self.decodes = DraftedSet(blocks, self.most_drafts, self.accepted)
        if 0 < self.long_prefill_token_threshold <= self.most_drafts:
            raise ValueError(
                f"long_prefill_token_threshold: {self.long_prefill_token_threshold} would cut off "
                f"drafts: must be 0 or more than num_speculative_tokens ({self.most_drafts})"
            )

    def accepted(self, request: Request) -> Sequence[int]:
        """Give how many drafts are accepted at each position of a request's answer."""
        stream = self._streams.get(request)
        if stream is None:
            stream = [0] * request.max_tokens
            if self.speculation is not None:
                stream = self.speculation.accepted(self.seed, request.id, request.max_tokens)
            self._streams[request] = stream
        return stream

    def fits(self, request: Request) -> bool:
        """Say whether the request could ever run: its last drafts need blocks, too."""
        last = request.prompt_tokens + self._max_tokens(request) - 1
        blocks = self.blocks
        slots = min(last + self.most_drafts + blocks.lookahead, self.max_model_len)
        most = blocks.groups.most(slots, blocks.block_size)
        return request.prompt_tokens < self.max_model_len and most <= blocks.usable

    def schedule(self, now: float) -> Step:
        self.now = now
        self.preempted = 0
        cadence = self._cadence
        if cadence is not None:
            cadence.begin(self._executed, self._may_decode())
        cap = self._cap() if self.long_prefill_token_threshold else self.max_num_batched_tokens
        step = Step([])
        chunks = self._plan(cap)
        budget = self._walk(step, cap) if chunks is None else self._advance(step, chunks)
        if budget and not self.preempted and self.waiting:
            self._board(step, budget, cap, now)
        if cadence is not None:
            self._executed += bool(step.decodes or step.prefills)
            cadence.end(self._executed, not self.preempted, bool(self.waiting))
        return step

    def _plan(self, cap: int) -> list[tuple[Request, int]] | None:
        if self._ready:
            return None
        blocks = self.blocks
        while True:
            queries, _, need, taken, *_ = self.decodes.now()
            left = self.max_num_batched_tokens - queries
            if left < 0:
                return None
            chunks = []
            for request in self.partial:
                if self._cadence is not None and self._holds(request):
                    continue
                tokens = min(request.pending, cap)
                if tokens > left:
                    if self._decodes_behind(request):
                        return None
                    tokens = left
                if tokens:
                    chunks.append((request, tokens))
                    left -= tokens
                    need += blocks.growth(request, request.computed + tokens)
                    taken += blocks.taken(request, request.computed + tokens)
            if taken <= blocks.free:
                return chunks
            if self._victim is not None or taken > need:
                return None  # what leaves a window comes too late for those before
            self._preempt(next(reversed(self.running)))

    def _advance(self, step: Step, chunks: list[tuple[Request, int]]) -> int:
        budget = self.max_num_batched_tokens
        count = self.decodes.count
        if count:
            queries, step.context, need, *_ = self.decodes.now()
            self.blocks.free -= need
            step.decodes = count
            step.drafts = queries - count
            budget -= queries
        for request, tokens in chunks:
            self._give(step, request, tokens)
            budget -= tokens
        return budget

    def _wanted(self, request: Request) -> int:
        if request not in self._ready:
            return request.pending
        room = self.max_model_len - 1 - request.computed
        return min(1 + self.most_drafts, room)

    def _growth(self, request: Request, tokens: int) -> int:
        return self.blocks.growth(request, request.computed + tokens)

    def _break_up(self) -> None:
        self._ready.update(request for request in self.running if request.joined >= 0)
        super()._break_up()

    def _join(self, request: Request) -> None:
        self._ready.discard(request)
        super()._join(request)

    def _leave(self, request: Request) -> None:
        first = request.joined
        ticks = self.decodes.leave(request)
        self.runs += pack_run(request.run_start, request.id, first, ticks)

    def _evict(self, request: Request) -> None:
        self._ready.discard(request)
        super()._evict(request)

    def _finish(self, request: Request, now: float) -> None:
        self._streams.pop(request, None)
        super()._finish(request, now)

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Apply the outcome of `step`; what its drafts bring out, the last token included."""
        for chunk in step.singles or ():
            chunk.request.generated += self._outcome(chunk)[0] - 1
        return super().commit(step, ends)

    def _outcome(self, chunk: Chunk) -> tuple[int, int]:
        """Give the tokens that come out of a decode outside the set, and the drafts accepted."""
        request, drafts = chunk.request, chunk.tokens - 1
        if not drafts:
            return 1, 0
        accepted = min(self.accepted(request)[request.generated], drafts)
        return min(1 + accepted, request.max_tokens - request.generated), accepted

    def horizon(self, step: Step) -> int:
        return 1

    def account(self, step: Step) -> tuple[int, ...]:
        """Return the columns of log.STEP; rejected drafts are wasted. Note the drafts, too."""
        row = list(super().account(step))
        if step.decodes:
            tokens, accepted = self._brought(step)
            row[4] = tokens
            row[5] = step.decodes + step.drafts - tokens
            if self.speculation is not None:
                self.drafts += pack_draft(self.now, step.decodes, step.drafts, accepted)
        return tuple(row)

    def _brought(self, step: Step) -> tuple[int, int]:
        """Give the tokens that a step's decodes bring out, and the drafts that they accept."""
        *_, tokens, accepted, _ = self.decodes.now()
        for chunk in step.singles or ():
            out, right = self._outcome(chunk)
            tokens += out
            accepted += right
        return tokens, accepted

    def stored(self, step: Step) -> int:
        """Tokens of use in the blocks in use when `step`, just scheduled, is over."""
        out = {chunk.request: self._outcome(chunk)[0] - 1 for chunk in step.singles or ()}
        stored = self.decodes.now()[-1]
        for request in self.partial:
            tokens = min(request.computed, request.known) + out.get(request, 0)
            stored += self.blocks.stored(tokens)
        return stored
