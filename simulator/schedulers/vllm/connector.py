"""What a KV connector of vLLM's changes, whatever it loads from (0.33)."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

from simulator.core.request import Chunk, Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.vllm.scheduler import Options, Scheduler


class Loading(Scheduler):
    """Has blocks of requests whose KV comes from elsewhere before they run, too."""

    beyond = 0  # tokens for which those amid their prompts have blocks left to them beside these

    def __init__(self, blocks: BlockCounter, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)
        self._prefilling: list[Request] = []  # before the step, and who is taken up by it
        self._cap = 0

    def admit(self, step: Step, budget: int, cap: int) -> None:
        self._cap = cap
        super().admit(step, budget, cap)

    def _left_to_others(self, step: Step, holding: Iterable[Request]) -> int:
        """Count the blocks that a request leaves to those who hold some, and to the running."""
        chunked = (chunk.request for chunk in step.prefills if chunk.request.pending > 0)
        others = dict.fromkeys((*holding, *self._prefilling, *chunked))
        lacked = (self._whole(one, one.known + self.beyond) for one in others if one.computed)
        spare = sum(lacked) + -(-self.beyond // self.blocks.block_size)
        return spare + (self.admission.watermark_blocks if self.running else 0)

    def _whole(self, request: Request, tokens: int) -> int:
        """Count the blocks that a request lacks for so many tokens, drafts left out."""
        assert request.blocks is not None
        return max(-(-tokens // self.blocks.block_size) - len(request.blocks), 0)

    def _take_up(self, step: Step, request: Request, budget: int) -> int:
        """Admit the head, whose blocks are there; return the tokens left, 0 if it must wait."""
        blocks, interval, known = self.blocks, self.prefill_interval, request.known
        start = min(request.computed, known - 1)
        if interval is not None and interval.refuses(request, start):
            return 0
        tokens = self.chunk(min(known - start, self._cap), budget - self.draft_slots)
        whole = known if self.admission.whole_prompt else start + tokens
        spare = self.admission.watermark_blocks if self.running else 0
        needed = max(blocks.taken(request, start + tokens), self._whole(request, whole))
        if not tokens or needed + spare > blocks.free:
            return 0
        self.waiting.take()
        request.remote = 0
        self._prefilling.append(request)  # until the step is decided
        self.kept_tokens -= request.computed
        request.computed = start
        self.start(request)
        self.admission.reserve(request)
        blocks.extend(request, start + tokens)
        step.prefills.append(Chunk(request, start, tokens))
        if interval is not None:
            interval.scheduled(request, start < known - 1)
        return budget - tokens - self.draft_slots

    def _let_go(self, request: Request) -> None:
        self.kept_tokens -= request.computed
        self.blocks.release(request)


class DefersFrees(Loading):
    """Blocks are free when nobody writes to them any more (`defer_block_free`).

    So whom the batch in flight computes is not preempted: the step goes without those whose blocks
    lack. Who ends meanwhile, by a stop token, keeps its blocks until that batch is over.
    """

    in_flight: deque[Any]  # of who schedules ahead

    def __init__(self, blocks: BlockCounter, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)
        self._annotates = True
        self._last: tuple[int, set[Request]] = 0, set()  # admissions by then, whom it left out
        self._writing: list[Request] = []  # who have ended and are being computed

    def _annotate(self, step: Step) -> None:
        super()._annotate(step)
        if step.decodes or step.prefills:
            chunks = {chunk.request for chunk in (*step.prefills, *(step.singles or ()))}
            left_out = {one for one in self.running.partial if one not in chunks}
            left_out.update(getattr(self.running, "leaving", ()))
            self._last = self.running.admissions, left_out

    def _is_computed(self, request: Request) -> bool:
        """Say whether the batch in flight computes a running request."""
        admissions, left_out = self._last
        return bool(self.in_flight) and request.admission < admissions and request not in left_out

    def spares_victim(self) -> bool:
        return self._is_computed(
            self.running.last() if self.victim is None else self.victim(self.running)
        )

    def free_blocks(self, request: Request) -> None:
        if self._is_computed(request):
            self._writing.append(request)
            self.kept_tokens += request.computed
        else:
            super().free_blocks(request)

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        for request in self._writing:
            self._let_go(request)
        self._writing.clear()
        return super().commit(step, ends)
