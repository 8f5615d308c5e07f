"""The default scheduler of vLLM before V1: prompts first, whole, and a queue of those swapped."""

from typing import Annotated

from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.waiting_queues import Fifo
from simulator.schedulers.continuous_batching import ContinuousBatching
from simulator.schedulers.interface import Traits
from simulator.schedulers.limits import BUDGET, DEFAULT_LIMITS, Limits
from simulator.util.from_mapping import check_range, raise_if


class SwappedByArrival(Fifo):
    """First come, first served, but before all others those whose blocks are on the host."""

    def put_back(self, request: Request) -> None:
        """Put a victim before those who have not run yet, swapped ones by arrival."""
        ahead = 0
        for other in self:
            if not other.swapped or (request.swapped and other.arrival > request.arrival):
                break
            ahead += 1
        self.insert(ahead, request)


class VllmV0(ContinuousBatching):
    """vLLM 0.4 to 0.6: steps of whole prompts before steps of decodes, a swapped queue.

    `_schedule_default` of vLLM 0.4 to 0.6 (`vllm/core/scheduler.py`).

    - A step is either prompts or decodes. As long as the head of the queue fits, prompts are
      admitted, whole, and all decodes wait.
    - A prompt fits when its blocks leave `watermark` of all blocks free.
    - A decode needs a free block at hand, even where its own last block has room; where there is
      none, the last admitted is preempted: computed again, or, with `swap_blocks` on the host, the
      blocks of a victim are copied there, as vLLM does for requests of several sequences.
    - While anybody is swapped out no prompt is admitted; who is swapped comes back, first of all,
      in a step of decodes without a preemption.
    - `scheduler_delay_factor` holds prompts back until the oldest has waited so many times as long
      as the last step of prompts took, while others run.

    Headway differs for a request that is alone: neither the watermark nor the block at hand is
    asked of it, where vLLM would drop it or preempt it for ever. There is no prefix cache here;
    vLLM's was off by default.
    """

    traits = Traits(
        caches_prefixes=False,
        has_host_tier=False,
        headroom=1,
        obeys=BUDGET | {"watermark", "swap_blocks"},
    )
    whole_prompts = True

    def __init__(
        self,
        blocks: BlockCounter,
        limits: Limits = DEFAULT_LIMITS,
        *,
        scheduler_delay_factor: Annotated[float, "times the last step of prompts"] = 0.0,
    ) -> None:
        raise_if(check_range("scheduler_delay_factor", scheduler_delay_factor, 0, 1000))
        super().__init__(blocks, limits)
        self.queue = self.waiting = SwappedByArrival()
        self.delay = scheduler_delay_factor
        self._prompts_at = -1.0  # when the last step began, if it was one of prompts
        self._latency = 0.0  # s that the last step of prompts took

    def fill(self, step: Step) -> None:
        if not self._swapped() and self._passed_delay(self.now):
            self.admit(step, self.max_num_batched_tokens, self.max_model_len)
        if step.prefills:
            self._prompts_at = self.now
            return
        self.make_room()
        self.decode_all(step)
        if not self.preempted:
            self._swap_in(step)
        if self.swap_space.outgoing and step.decodes:
            self.swap_space.send(step)

    def _passed_delay(self, now: float) -> bool:
        if self._prompts_at >= 0:
            self._latency = now - self._prompts_at
            self._prompts_at = -1.0
        if not self.delay or not self.waiting or not self.running:
            return True
        oldest = min(request.arrival for request in self.queue)
        return now - oldest > self.delay * self._latency

    def _swapped(self) -> bool:
        """Say whether anybody waits on the host."""
        return bool(self.waiting) and self.waiting.head().swapped > 0

    def make_room(self) -> None:
        decodes, blocks = self.decodes, self.blocks
        while decodes.count:
            last = self.running.last()
            # The last in order finds what the others have left, and wants one block at hand.
            asks = decodes.computed(last) % blocks.block_size
            if decodes.blocks(1) + bool(asks) <= blocks.free or (decodes.count == 1 and asks):
                break
            self.swap_out(last)
            self.preempt(last)

    def _swap_in(self, step: Step) -> None:
        """Bring back who is swapped, as long as there is room for it and its next token."""
        blocks = self.blocks
        while self._swapped() and len(self.running) < self.max_num_seqs:
            request = self.waiting.head()
            need = blocks.missing(request.swapped, ()) + 1 + self.watermark_blocks
            if not self.running:
                need = blocks.missing(request.known, ())
            if need > blocks.free:
                break
            self.admit_head(step, (), request.swapped, 1)

    def horizon(self, step: Step) -> int:
        if self.waiting and (self.delay or self._swapped()):
            return 1  # time, or a block that a victim leaves, may let the head in
        return super().horizon(step)
