"""Text Generation Inference: prompts interrupt the batch that decodes, but not too often."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.waiting_queues import Fifo
from simulator.schedulers.continuous_batching import (
    WITH_ANSWER,
    ContinuousBatching,
    MaxNewTokens,
    check_max_new_tokens,
)
from simulator.schedulers.limits import DEFAULT_LIMITS, Limits
from simulator.util.from_mapping import check_least, check_range, raise_if


class Tgi(ContinuousBatching):
    """Text Generation Inference 2: prompts interrupt decodes by the waiting-served ratio.

    The router of Text Generation Inference 2.3 (`backends/v3/src/backend.rs` and `queue.rs`).

    Requests are taken from the queue, first come, first served, for a step of prompts alone: at
    most `max_num_batched_tokens` (`max_batch_prefill_tokens`) of them, and only as long as their
    prompts and the most that they may generate fit into the blocks not reserved yet
    (`max_batch_total_tokens`; None: all there are). So nobody is preempted. While others decode

    - at least `waiting_served_ratio` times as many as decode must be taken together, unless
      `max_waiting_tokens` steps have passed since the last prompts;
    - such a step of prompts is always followed by one of decodes.

    Headway counts the budget in blocks, computes prompts whole, and leaves out prefix caching and
    the chunking of prompts that version 3 brought.
    """

    reserves = True
    whole_prompts = True

    traits = replace(ContinuousBatching.traits, sets_aside=True)

    def __init__(
        self,
        blocks: BlockCounter,
        limits: Limits = DEFAULT_LIMITS,
        *,
        waiting_served_ratio: Annotated[float, "waiting / running requests"] = 0.3,
        max_waiting_tokens: Annotated[int, "decode steps"] = 20,
        max_batch_total_tokens: Annotated[int | None, "tokens"] = None,
        max_new_tokens: MaxNewTokens = None,
    ) -> None:
        total = max_batch_total_tokens
        raise_if(
            check_range("waiting_served_ratio", waiting_served_ratio, 0, 1000),
            check_least("max_waiting_tokens", max_waiting_tokens, 0),
            (
                total is not None and total < blocks.block_size,
                "max_batch_total_tokens",
                f"must be at least block_size ({blocks.block_size}), not {total}",
            ),
        )
        self.max_new_tokens = check_max_new_tokens(max_new_tokens)
        super().__init__(blocks, limits)
        self.queue = self.waiting = Fifo()
        self.waiting_served_ratio = waiting_served_ratio
        self.max_waiting_tokens = max_waiting_tokens
        self.max_batch_total_tokens = total
        self._waited = 0  # steps since the last prompts, as `waiting_tokens` counts them
        self._must_decode = False
        self._asked_queue = False  # in the last call of `schedule`

    @property
    def reservable(self) -> int:
        """Blocks that may be reserved in all."""
        usable, tokens = self.blocks.usable, self.max_batch_total_tokens
        return usable if tokens is None else min(usable, tokens // self.blocks.block_size)

    @property
    def room(self) -> str:
        """What `fits` compares a request with, in words."""
        tokens = self.reservable * self.blocks.block_size
        return f"max_batch_total_tokens ({tokens:,}){WITH_ANSWER}"

    def add(self, request: Request) -> bool:
        super().add(request)
        return len(self.running) < self.max_num_seqs  # it may be the one that makes them enough

    def fill(self, step: Step) -> None:
        self._asked_queue = not (self._must_decode and self.running)
        self._must_decode = False
        if self.waiting and self._asked_queue and self._enough():
            joins = bool(self.running)
            self.admit(step, self.max_num_batched_tokens, self.max_model_len)
            self._must_decode = joins and bool(step.prefills)
        if step.prefills:
            self._waited = 1
        else:
            self.decode_all(step)
            self._waited += bool(step.decodes)

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        self._waited += len(ends) - 1
        return super().commit(step, ends)

    def _enough(self) -> bool:
        """Say whether as many fit as must be taken at least."""
        if not self.running or self._waited >= self.max_waiting_tokens:
            return True
        least = int(len(self.running) * self.waiting_served_ratio)
        return least <= 1 or (len(self.waiting) >= least and self._would_fit(least))

    def _would_fit(self, least: int) -> bool:
        """Say whether so many from the head of the queue fit together."""
        budget, left = self.max_num_batched_tokens, self.unreserved
        if least > self.max_num_seqs - len(self.running):
            return False
        for request, _ in zip(self.queue, range(least), strict=False):
            budget -= request.known
            left -= self.reserved_blocks(request)
            if budget < 0 or left < 0:
                return False
        return True

    def horizon(self, step: Step) -> int:
        sure = super().horizon(step)
        if not self.waiting:
            return sure
        if not self._asked_queue:
            return 1
        if self._waited <= self.max_waiting_tokens:
            return min(sure, self.max_waiting_tokens - self._waited + 1)
        return sure
