"""Drafts in engines that prefill for others, and in those that decode what others prefilled.

Read in vLLM 0.33 (`v1/core/sched/scheduler.py`, with a NixlConnector). A producer verifies none:
its requests end with their first token. A consumer takes blocks for a prompt without slots ahead;
once the KV is there, the request's first step has 1 + k places, none of them drafted.
"""

from collections.abc import Sequence

from simulator.core.request import Request, Step
from simulator.features.drafts.as_sums import Speculative
from simulator.features.drafts.blocks import DraftBlocks
from simulator.features.drafts.walk import AsyncDraftWalk, Connected
from simulator.schedulers.vllm.connector import DefersFrees, Loading
from simulator.schedulers.vllm.kv_roles import ARRIVED, Consumer, Producer


class DraftProducer(Producer, Connected):
    """Computes prompts. The drafts after each step go unused, so none are made (`skip_drafts`)."""

    def schedule(self, now: float) -> Step:
        step = super().schedule(now)
        step.drafting = 0
        return step

    def finish(self, request: Request, now: float) -> None:
        if request in self.running:
            del self._drafted[request]
            self._streams.pop(request, None)
        super().finish(request, now)


class AsyncDraftProducer(DraftProducer, AsyncDraftWalk):
    """The same with two batches in flight."""


class DraftConsumer(Consumer, Connected):
    """Decodes with drafts what others prefilled."""

    blocks: DraftBlocks  # type: ignore[assignment]

    def schedule(self, now: float) -> Step:
        self._prefilling = [one for one in self.running if self._drafted[one].places < 0]
        return super().schedule(now)

    def pull(self, step: Step, request: Request, budget: int) -> int:
        ahead, self._start = self.blocks.lookahead, request.known - 1
        if request.remote == ARRIVED:
            self.blocks.publish(request)
            return Loading._take_up(self, step, request, budget)
        self.blocks.lookahead = 0
        left = super().pull(step, request, budget)
        self.blocks.lookahead = ahead
        return left

    def _lacks_room(self, step: Step, request: Request, hits: Sequence[int]) -> bool:
        spare = self._left_to_others(step, (*self.loading, *(one for _, one in self.waiting.front)))
        blocks, lacks = self.blocks, super()._lacks_room(step, request, hits)
        return lacks or blocks.missing(request.known, hits) + spare > blocks.free


class AsyncDraftConsumer(DefersFrees, DraftConsumer, AsyncDraftWalk):
    """The same with two batches in flight."""


KINDS: dict[str, tuple[type[Speculative], ...]] = {
    "kv_producer": (DraftProducer, AsyncDraftProducer),
    "kv_consumer": (DraftConsumer, AsyncDraftConsumer),
}
"""Of each role, in step and ahead."""
