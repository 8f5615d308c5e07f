"""DeepSpeed-FastGen's Dynamic SplitFuse."""

from simulator.core.request import Request, Step
from simulator.schedulers.continuous_batching import ContinuousBatching


class FastGen(ContinuousBatching):
    """DeepSpeed-FastGen: Dynamic SplitFuse.

    Dynamic SplitFuse (Holmes et al., DeepSpeed-FastGen, 2024; DeepSpeed-MII 0.3).

    Every step is filled up to the same number of tokens, `max_num_batched_tokens`
    (`max_ragged_batch_size`): first one for each request that generates, then prompts in order of
    arrival; long ones are split and short ones fused. A prompt goes on or starts only while all
    that is left of it fits into the free blocks (`mii/batching/ragged_batching.py`).

    Nobody is preempted for a block: a request that lacks one waits where it is and takes the
    first that is free. Where nobody at all can go on, MII calls it a deadlock, drops the whole
    cache and computes every request again; so does this class, as a preemption of each.
    """

    def fill(self, step: Step) -> None:
        self._try_fill(step)
        if self.running and not step.decodes and not step.prefills:
            for request in reversed(list(self.running)):
                self.preempt(request)
            self._try_fill(step)

    def _try_fill(self, step: Step) -> None:
        for request in list(self.running.partial):
            if request.pending == 1:  # it has waited for a block: it comes first
                self._decode(step, request)
        if self.decodes.count and self.decodes.blocks(1) > self.blocks.free:
            self._decode_some(step)
        else:
            self.decode_all(step)
        budget = self.continue_prefills(step, self.max_num_batched_tokens - step.tokens)
        self.admit(step, budget, self.max_model_len)

    def _decode_some(self, step: Step) -> None:
        """Let those of the decode set decode for whom there is a block, in order of admission."""
        ready = [request for request in self.running if request.joined >= 0]
        self.running.dissolve()
        for request in ready:
            self._decode(step, request)

    def _decode(self, step: Step, request: Request) -> None:
        """Let a request compute its one token, if that needs no block or there is one."""
        if request.computed % self.blocks.block_size or self.blocks.free:
            self.schedule_tokens(step, request, 1)

    def continue_prefills(self, step: Step, budget: int) -> int:
        """Let prompts under way compute; return the tokens left, 0 where one must wait."""
        for request in self.running.partial:
            if request.pending < 2:
                continue
            if not budget or self.blocks.taken(request, request.known) > self.blocks.free:
                return 0
            tokens = min(request.pending, budget)
            self.schedule_tokens(step, request, tokens)
            budget -= tokens
        return budget

    def blocks_of_prefills(self) -> int:
        return 0  # a prompt that is admitted only has to fit by itself
