"""Speculative decoding with a prefix cache, or a step ahead: request by request, as vLLM's loop.

A step that is scheduled while the one before it runs counts all drafts of that as accepted; its
outcome takes the rejected ones back. So a request may read, and take blocks, a step further than
it gets; who ends computes in the step that has been scheduled meanwhile, unless that its last token
is on its way was certain.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Unpack

from simulator.core.log import StepRow, pack_draft, pack_run
from simulator.core.request import Chunk, Request, Step
from simulator.features.drafts.as_sums import Speculative
from simulator.features.drafts.blocks import DraftBlocks
from simulator.features.drafts.rows import verified_row
from simulator.schedulers.interface import Traits
from simulator.schedulers.vllm.offloading import Ahead, Offloading
from simulator.schedulers.vllm.pipeline import Pipelined
from simulator.schedulers.vllm.scheduler import Options, Scheduler


class Drafted:
    """How far a request is that has been admitted."""

    __slots__ = ("batch", "drafts", "next_step", "places", "said")

    def __init__(self) -> None:
        self.batch: DraftBatch | None = None  # of pipeline stages, the last with it
        self.next_step = 0  # the first of theirs that it may decode in
        self.drafts = 0  # made for its next step
        self.said = 0  # tokens of its answer when all steps in flight are over
        self.places = -1  # in steps in flight, of tokens and drafts; -1: it has no drafts yet


class Outcome:
    """What a step brings to a request: of `drafts` verified ones `right` are accepted."""

    __slots__ = ("drafts", "out", "request", "right", "tokens", "verifies")

    def __init__(self, request: Request, tokens: int) -> None:
        self.request = request
        self.tokens = tokens  # computed
        self.verifies = False  # not a chunk of a prompt
        self.drafts = self.right = 0
        self.out = 0  # tokens that come out; 0: amid a prompt, or beyond its end


class DraftBatch:
    """A step in flight: when it was decided, and what it brings."""

    def __init__(self, decided: float, outcomes: list[Outcome]) -> None:
        self.decided = decided
        self.outcomes = outcomes
        self.after = self.end = 0.0  # s, of pipeline stages: when what it begins with is there

    def verified(self) -> Iterator[Outcome]:
        """Yield what comes of those who decode and have not ended before."""
        return (one for one in self.outcomes if one.verifies and one.out)


class DraftWalk(Speculative):
    """The scheduler of vLLM V1 with drafts, one request after the other."""

    traits = Traits(counts_ahead=False)

    def __init__(self, blocks: DraftBlocks, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)  # type: ignore[arg-type]
        blocks.lookahead, blocks.max_model_len = self.speculation.lookahead, self.max_model_len
        reads_next = self.speculation.reads_next
        beyond = self.rules.hashes_beyond and not self.speculation.disable_lookahead_block_hashes
        blocks.hashes_beyond, blocks.drops_last = reads_next and beyond, reads_next > beyond
        self.in_flight: deque[DraftBatch] = deque()
        self._drafted: dict[Request, Drafted] = {}
        self._slots_ahead += 1 + self.traits.overlaps * (1 + self.most_drafts)
        self._last_end = 0.0  # of the steps whose outcome is there
        self._caches_outcomes = self.traits.overlaps or self.rules.caches_outcomes

    # A step is decided.

    def schedule(self, now: float) -> Step:
        step = super().schedule(now)
        chunks = [*(step.singles or ()), *step.prefills]
        if chunks:
            step.drafting = self.speculation.drafts_after(len(chunks))
            chunks.sort(key=lambda chunk: chunk.request.admission)
            outcomes = [self._send(chunk, step.drafting) for chunk in chunks]
            self.in_flight.append(DraftBatch(now, outcomes))
        return step

    def _send(self, chunk: Chunk, drafting: int) -> Outcome:
        """Count what a chunk just scheduled will bring, all of its drafts as accepted.

        After it so many drafts are made for the next step.
        """
        request = chunk.request
        one, drafted = Outcome(request, chunk.tokens), self._drafted[request]
        request.unknown += chunk.tokens
        places, said = drafted.places, drafted.said
        one.verifies = verifies = places >= 0
        if not verifies:
            places = 0
        one.drafts = drafts = request.computed - request.known - places
        if drafts < 0:  # amid its prompt
            return one
        if left := request.output_limit - said:
            if verifies:  # else nobody has drafted what is in these places
                right = self.accepted(request)[said]
                one.right = right if right < drafts else drafts
            one.out = out = 1 + one.right if one.right < left else left
            drafted.said += out
        drafted.places, drafted.drafts = places + 1 + drafts, drafting
        return one

    def plan(self, cap: int) -> list[tuple[Request, int]] | None:
        return None if self.running else []

    def tokens_wanted(self, request: Request) -> int:
        drafted, computed = self._drafted[request], request.computed
        places = drafted.places
        if places < 0:
            return request.pending
        allowed = request.max_tokens or request.output_limit
        if places and computed + 2 - places >= request.prompt_tokens + allowed:
            return 0  # its last token is on its way, even if all drafts are rejected
        room = self.max_model_len - 1 - computed
        return min(request.known + drafted.drafts + places - computed, room)

    def schedule_tokens(self, step: Step, request: Request, tokens: int) -> None:
        if self._drafted[request].places >= 0:
            step.add_single(request, request.computed, tokens)
        else:
            step.prefills.append(Chunk(request, request.computed, tokens))
        self.blocks.extend(request, request.computed + tokens)
        if self.prefill_interval is not None:
            self.prefill_interval.scheduled(request, request.mid_prefill)

    def _find_prefix(self, request: Request) -> tuple[Sequence[int], int, int]:
        found = super()._find_prefix(request)
        self._start = found[2]
        return found

    def admit_head(self, step: Step, hits: Sequence[int], start: int, tokens: int) -> None:
        Scheduler.admit_head(self, step, hits, start, tokens)

    def start(self, request: Request) -> None:
        super().start(request)
        self._drafted.setdefault(request, Drafted())

    def preempt(self, request: Request) -> None:
        super().preempt(request)
        self._drafted[request].places = -1

    # A step is over.

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        batch, now = self.in_flight.popleft(), ends[-1]
        self._note_drafts(batch, now)
        over = []
        for one in batch.outcomes:
            request = one.request
            if request not in self._drafted:
                continue  # it has ended, or nobody wants its answer any more
            request.unknown -= one.tokens
            if not one.out:
                continue
            runs = request in self.running  # else it was preempted, and gets its tokens yet
            if runs:
                self._drafted[request].places -= 1 + one.drafts
                request.computed -= 1 + one.drafts - one.out
            request.generated += one.out
            self._bring(request, now)
            if runs and self._caches_outcomes:
                self.blocks.register_last(request, request.unknown)
            if request.generated == request.output_limit:
                self.finish(request, now)
                over.append(request)
        self.ended = bool(over)
        return over

    def _bring(self, request: Request, now: float) -> None:
        """Write down that tokens of a request have come out, in one piece."""
        if request.first_token < 0:
            request.first_token = now
        self.running.runs += pack_run(now, request.id, 0, 0)
        self.running.decodes.joins += 1

    def _note_drafts(self, batch: DraftBatch, end: float) -> None:
        """Write down what a step that ended at `end` verified; it began when the GPU was free."""
        verified = list(batch.verified())
        if verified:
            drafts, right = sum(one.drafts for one in verified), sum(one.right for one in verified)
            start = max(batch.decided, self._last_end)
            self.drafts += pack_draft(start, len(verified), drafts, right)
        self._last_end = end

    def finish(self, request: Request, now: float) -> None:
        del self._drafted[request]
        if request in self.running:
            super().finish(request, now)
            return
        self._streams.pop(request, None)
        request.finish = now
        self.waiting.remove(request)
        self._deferred.discard(request)
        self.blocks.finished(request)

    def cancel(self, request: Request) -> None:
        self._drafted.pop(request, None)
        super().cancel(request)

    # What is written down of a step.

    def account(self, step: Step) -> StepRow:
        tokens = sum(one.out for one in self.in_flight[-1].verified()) if step.decodes else 0
        return verified_row(Scheduler.account(self, step), step, tokens)

    def stored(self, step: Step) -> int:
        tokens = 0
        for request in self.running:
            said = self._drafted[request].said
            tokens += min(request.computed, request.prompt_tokens + max(said - 1, 0))
        return self.blocks.in_use(tokens + self.kept_tokens)


class AsyncDraftWalk(DraftWalk):
    """The same with two batches in flight."""

    traits = Traits(counts_ahead=False, overlaps=True)


class PipelineDrafts(Pipelined, AsyncDraftWalk):
    """The same with the batches of pipeline stages in flight, as in vLLM 0.33.

    In step, vLLM schedules drafts there before it knows the token that they follow, and stops.
    """

    traits = AsyncDraftWalk.traits

    def __init__(self, blocks: DraftBlocks, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)
        self.batches = self.in_flight

    def schedule(self, now: float) -> Step:
        self.current_step += 1
        step = super().schedule(now)
        if step.decodes or step.prefills:
            batch = self.in_flight[-1]
            for one in batch.outcomes:
                drafted = self._drafted[one.request]
                if drafted.batch is not None:
                    batch.after = max(batch.after, drafted.batch.end)
                if drafted.places >= 0:
                    drafted.batch = batch
                    drafted.next_step = self.current_step + self.pipeline_parallel_size
        return step

    def tokens_wanted(self, request: Request) -> int:
        early = self.current_step < self._drafted[request].next_step
        return 0 if early else super().tokens_wanted(request)

    def preempt(self, request: Request) -> None:
        super().preempt(request)
        request.remote = int(request.unknown > 0)

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        batch = self.in_flight[0]
        over = super().commit(step, [max(ends[-1], self.heard)])
        for one in batch.outcomes:
            if not one.request.unknown:
                one.request.remote = 0
        return over


class Connected(DraftWalk):
    """With a KV connector, as vLLM 0.32 and 0.33.

    A block's hash covers its own tokens alone (`num_hash_lookahead_tokens`), so under EAGLE and MTP
    the last block that a prompt finds is not used. A request that loads takes no slots ahead
    (`limit_lookahead_tokens`). It leaves free, for itself and for each prompt under way, what 1 + k
    tokens and the slots ahead take beyond the prompt (`_spec_decode_step_blocks`,
    `_request_remaining_blocks`), also beyond `max_model_len`.
    """

    def __init__(self, blocks: DraftBlocks, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)
        blocks.hashes_beyond = 0
        blocks.drops_last = self.speculation.reads_next
        self.beyond = 1 + self.most_drafts + self.speculation.lookahead


class HostDrafts(Offloading, Connected):
    """Verifies drafts, with blocks of the prefix cache in host memory."""

    traits = replace(Offloading.traits, counts_ahead=False)
    blocks: DraftBlocks  # type: ignore[assignment]

    def _take_up(self, step: Step, request: Request, budget: int) -> int:
        self._start = min(request.computed, request.known - 1)
        return super()._take_up(step, request, budget)

    def _load(self, step: Step, request: Request, hits: Sequence[int], count: int) -> bool:
        ahead = self.blocks.lookahead
        self.blocks.lookahead = 0
        loads = super()._load(step, request, hits, count)
        self.blocks.lookahead = ahead
        return loads


class AsyncHostDrafts(HostDrafts, Ahead, AsyncDraftWalk):
    """The same with two batches in flight."""

    traits = replace(Offloading.traits, counts_ahead=False, overlaps=True)
