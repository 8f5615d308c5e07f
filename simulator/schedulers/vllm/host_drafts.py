"""Drafts beside vLLM's OffloadingConnector: what differs from either alone.

As in vLLM 0.32 and 0.33:

- With a connector a block's hash covers its own tokens alone (`num_hash_lookahead_tokens`), so
  under EAGLE and MTP the last block that a prompt finds is not used.
- A request that loads takes no slots ahead (`limit_lookahead_tokens`). It leaves free, for itself
  and for each prompt under way, what 1 + k tokens and the slots ahead take beyond the prompt
  (`_spec_decode_step_blocks`, `_request_remaining_blocks`), also beyond `max_model_len`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from simulator.core.request import Request, Step
from simulator.kv_cache.draft_blocks import DraftBlocks
from simulator.schedulers.vllm.drafts_ahead import AsyncDraftWalk, DraftWalk
from simulator.schedulers.vllm.offloading import Ahead, Offloading
from simulator.schedulers.vllm.scheduler import Options


class HostDrafts(Offloading, DraftWalk):
    """Verifies drafts, with blocks of the prefix cache in host memory."""

    traits = replace(Offloading.traits, counts_ahead=False)
    blocks: DraftBlocks  # type: ignore[assignment]

    def __init__(self, blocks: DraftBlocks, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)
        blocks.hashes_beyond = 0
        blocks.drops_last = self.speculation.reads_next
        self.beyond = 1 + self.most_drafts + self.speculation.lookahead

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
