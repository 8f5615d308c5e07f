"""The default scheduler of vLLM before V1: prompts first, whole, and a queue of those swapped."""

from collections.abc import Sequence

from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.host_memory import SwapSpace
from simulator.policies.waiting_queues import Fifo
from simulator.schedulers.batching import Batching, whole
from simulator.util.from_mapping import refuse


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


class VllmV0(Batching):
    """`_schedule_default` of vLLM 0.4 to 0.6 (`vllm/core/scheduler.py`).

    - A step is either prompts or decodes. As long as the head of the queue fits, prompts board,
      whole, and all decodes wait.
    - A prompt fits when its blocks leave `watermark` of all blocks free.
    - A decode needs a free block at hand, even where its own last block has room; where there is
      none, the last admitted is preempted: computed again, or, with `swap_blocks` on the host, the
      blocks of a victim are copied there, as vLLM does for requests of several sequences.
    - While anybody is swapped out no prompt boards; who is swapped comes back, first of all, in a
      step of decodes without a preemption.
    - `scheduler_delay_factor` holds prompts back until the oldest has waited so many times as long
      as the last step of prompts took, while others run.

    Headway differs for a request that is alone: neither the watermark nor the block at hand is
    asked of it, where vLLM would drop it or preempt it for ever. There is no prefix cache here;
    vLLM's was off by default.
    """

    headroom = 1

    def __init__(
        self,
        blocks: BlockCounter,
        *,
        scheduler_delay_factor: float = 0.0,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 8192,
        watermark: float = 0.01,
        swap_blocks: int = 0,
    ) -> None:
        refuse(
            (
                not 0 <= scheduler_delay_factor <= 1000,
                f"scheduler_delay_factor: must be from 0 to 1000, not {scheduler_delay_factor}",
            )
        )
        super().__init__(
            blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=whole(max_num_batched_tokens, max_model_len),
            max_model_len=max_model_len,
            enable_chunked_prefill=False,
            watermark=watermark,
        )
        self.queue = self.waiting = SwappedByArrival()
        self.swap_space = SwapSpace(swap_blocks, blocks.block_size)
        self.delay = scheduler_delay_factor
        self._prompts_at = -1.0  # when the last step began, if it was one of prompts
        self._latency = 0.0  # s that the last step of prompts took

    def _compose(self, step: Step, now: float) -> None:
        if not self._swapped() and self._passed_delay(now):
            self._board(step, self.max_num_batched_tokens, 0, now)
        if step.prefills:
            self._prompts_at = now
            return
        self._free_blocks()
        self._decode(step)
        if not self.preempted:
            self._swap_in(step, now)
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

    def _free_blocks(self) -> None:
        decodes, blocks, running = self.decodes, self.blocks, self.running
        while decodes.count:
            last = next(reversed(running))
            # The last in order finds what the others have left, and wants one block at hand.
            asks = (last.computed + decodes.tick - last.joined) % blocks.block_size
            if decodes.blocks(1) + bool(asks) <= blocks.free or (decodes.count == 1 and asks):
                break
            self._save(last)
            self._preempt(last)

    def _swap_in(self, step: Step, now: float) -> None:
        """Bring back who is swapped, as long as there is room for it and its next token."""
        blocks, waiting = self.blocks, self.waiting
        while self._swapped() and len(self.running) < self.max_num_seqs:
            request = waiting.head()
            need = blocks.missing(request.swapped, ()) + 1 + self.admission.watermark_blocks
            if not self.running:
                need = blocks.missing(request.known, ())
            if need > blocks.free:
                break
            waiting.take()
            self._seat(request, now)
            start = request.swapped
            blocks.admit(request, (), start + 1)
            self._resume(request, start)
            self.swap_space.swap_in(step, request, 0)
            self._single(step, request, start)

    def _fits_now(self, request: Request, hits: Sequence[int]) -> bool:
        spare = self.admission.watermark_blocks if self.running else 0
        return self.blocks.missing(request.known, hits) + spare <= self.blocks.free

    def horizon(self, step: Step) -> int:
        if self.waiting and (self.delay or self._swapped()):
            return 1  # time, or a block that a victim leaves, may let the head in
        return super().horizon(step)
