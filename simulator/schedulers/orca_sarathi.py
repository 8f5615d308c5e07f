"""Two schedulers of papers that mix prompts and decodes in one step: Orca and Sarathi-Serve."""

from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.continuous_batching import ContinuousBatching, MaxNewTokens


class Orca(ContinuousBatching):
    """Iteration-level scheduling (Yu et al., Orca, OSDI 2022, algorithm 1).

    Requests join and leave between steps. A step computes whole prompts and decodes together, for
    at most `max_num_seqs` requests (`max_bs`), first come, first served. Memory for all tokens
    that a request may have (`max_tokens`) is reserved on admission, so nobody is preempted.
    There is no token budget. Headway leaves out the pipelining over several workers.
    """

    def __init__(
        self,
        blocks: BlockCounter,
        *,
        max_new_tokens: MaxNewTokens = None,
        max_num_seqs: int = 32,
        max_model_len: int = 8192,
    ) -> None:
        super().__init__(
            blocks,
            max_new_tokens=max_new_tokens,
            reserves=True,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs * max_model_len,  # never reached
            max_model_len=max_model_len,
            enable_chunked_prefill=False,
        )


class Sarathi(ContinuousBatching):
    """Stall-free batching with chunked prefill (Agrawal et al., Sarathi-Serve, OSDI 2024).

    Of the budget `max_num_batched_tokens` (`chunk_size`) the decodes get theirs first, then the
    prompts under way, then new ones (`sarathi/core/scheduler/sarathi_scheduler.py`). So a decode
    never waits for a prompt, which vLLM V1 lets happen where the budget does not reach round. All
    blocks of a prompt are set aside on admission, above a `watermark` of free ones. Where decodes
    lack a block the last admitted is preempted, and computed again.

    Headway leaves out dynamic chunk sizes and pipeline parallelism.
    """

    def __init__(
        self,
        blocks: BlockCounter,
        *,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 512,
        max_model_len: int = 8192,
        watermark: float = 0.01,
    ) -> None:
        super().__init__(
            blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            watermark=watermark,
        )
