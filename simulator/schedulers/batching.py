"""What the schedulers of other engines share. Each is a subclass that says who boards and when.

A step of `Batching` is mixed: everybody whose prompt is computed decodes, prompts under way go on,
then others board. The blocks of a whole prompt are promised to it when it boards, and the last
admitted is preempted, to be computed again, when the decodes lack a block.
"""

from collections.abc import Sequence

from simulator.core.request import Chunk, Request, Step
from simulator.schedulers.vllm.scheduler import Scheduler


class Batching(Scheduler):
    """The pieces; `_compose` puts a step together, `_board` admits."""

    caches_prefixes = False
    cancels = False

    def schedule(self, now: float) -> Step:
        self.now = now
        self.preempted = 0
        step = Step([])
        self._compose(step, now)
        return step

    def _compose(self, step: Step, now: float) -> None:
        self._free_blocks()
        self._decode(step)
        budget = self._go_on(step, self.max_num_batched_tokens - step.decodes)
        if self.waiting and not self.preempted:
            self._board(step, budget, 0, now)

    def _board(self, step: Step, budget: int, cap: int, now: float) -> None:
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.head()
            hits = self.blocks.match(request)
            start = len(hits) * self.blocks.block_size
            tokens = self._chunk(request.known - start, budget)
            if not tokens or not self._fits_now(request, hits):
                break
            self._admit(step, request, hits, tokens, now)
            budget -= tokens

    def _chunk(self, pending: int, budget: int) -> int:
        """Give the tokens of a prompt that the budget lets a step compute; 0: it must wait."""
        if pending > budget:
            return budget if self.enable_chunked_prefill else 0
        return pending

    def _fits_now(self, request: Request, hits: Sequence[int]) -> bool:
        """Say whether there is memory for the head of the queue."""
        spare = self.admission.watermark_blocks if self.running else 0
        missing = self.blocks.missing(request.known, hits)
        return missing + spare <= self.blocks.free - self._promised()

    def _admit(
        self, step: Step, request: Request, hits: Sequence[int], tokens: int, now: float
    ) -> None:
        """Seat the head of the queue and let it compute `tokens` beyond what the cache has."""
        start = len(hits) * self.blocks.block_size
        self.waiting.take()
        self._seat(request, now)
        self.blocks.admit(request, hits, start + tokens)
        if request.preemptions == 0:
            request.cached = start
        else:
            self._resume(request, start)
        step.prefills.append(Chunk(request, start, tokens))

    def _promised(self) -> int:
        """Count the blocks that prompts under way have not taken yet."""
        size = self.blocks.block_size
        return sum(
            -(-request.known // size) - -(-request.computed // size) for request in self.partial
        )

    def _free_blocks(self) -> None:
        """Preempt the last admitted until there are blocks for all who decode."""
        decodes, blocks = self.decodes, self.blocks
        while decodes.count and decodes.blocks(1) > blocks.free - self._promised():
            self._preempt(next(reversed(self.running)))

    def _decode(self, step: Step) -> None:
        """Let everybody in the decode set decode."""
        decodes = self.decodes
        if decodes.count:
            self.blocks.take_ticks(decodes, 1)
            step.decodes += decodes.count
            step.context += decodes.context + decodes.count

    def _go_on(self, step: Step, budget: int) -> int:
        """Let prompts under way compute, in order of admission; return the tokens left."""
        for request in self.partial:
            tokens = min(request.pending, budget)
            if not tokens:
                break
            self._give(step, request, tokens)
            budget -= tokens
        return budget


def whole(max_num_batched_tokens: int, max_model_len: int) -> int:
    """Raise a budget so that a step can hold the longest prompt, where prompts are not split."""
    return max(max_num_batched_tokens, max_model_len)
