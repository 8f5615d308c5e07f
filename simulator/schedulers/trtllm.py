"""TensorRT-LLM's in-flight batching."""

from simulator.core.request import Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.continuous_batching import ContinuousBatching, MaxNewTokens
from simulator.util.from_mapping import raise_if

GUARANTEED_NO_EVICT, MAX_UTILIZATION, STATIC_BATCH = POLICIES = (
    "GUARANTEED_NO_EVICT",
    "MAX_UTILIZATION",
    "STATIC_BATCH",
)


class TrtLlm(ContinuousBatching):
    """The batch manager of TensorRT-LLM (`capacityScheduler.cpp`, `microBatchScheduler.cpp`; 1.0).

    `capacity_scheduler_policy` decides who may be in memory:

    - GUARANTEED_NO_EVICT (the default there, too): a request is admitted when the blocks that all
      who run may still come to need leave enough for what it may come to need itself.
    - MAX_UTILIZATION: it is admitted when there are blocks for its prompt; when the decodes lack
      one, the last started is paused, and computed again.
    - STATIC_BATCH: as the first, but nobody is admitted until all who run have ended.

    Then `max_num_batched_tokens` (`max_num_tokens`) is shared out: a token for each decode, then
    prompts, first come, first served. Without chunked context a prompt waits until it fits as a
    whole; with it, a chunk that does not end its prompt is a multiple of the block size.

    Headway leaves out that a request is held back while another computes the same prefix.
    """

    caches_prefixes = True

    def __init__(
        self,
        blocks: BlockCounter,
        *,
        capacity_scheduler_policy: str = GUARANTEED_NO_EVICT,
        max_new_tokens: MaxNewTokens = None,
        max_num_seqs: int = 2048,
        max_num_batched_tokens: int = 8192,
        max_model_len: int = 8192,
        enable_chunked_prefill: bool = False,
    ) -> None:
        raise_if(
            (
                capacity_scheduler_policy not in POLICIES,
                f"capacity_scheduler_policy: must be {', '.join(POLICIES)}, not "
                f"{capacity_scheduler_policy!r}",
            )
        )
        super().__init__(
            blocks,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            max_new_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
        )
        self.reserves = capacity_scheduler_policy != MAX_UTILIZATION
        self.policy = capacity_scheduler_policy

    def admit(self, step: Step, budget: int, cap: int) -> None:
        if self.policy != STATIC_BATCH or not self.running:
            super().admit(step, budget, cap)

    def chunk(self, pending: int, budget: int) -> int:
        tokens = super().chunk(pending, budget)
        unit = self.blocks.block_size
        if tokens == pending or unit > self.max_num_batched_tokens:
            return tokens
        return tokens - tokens % unit
