"""Hugging Face `generate` in a loop: the naive baseline."""

from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.static import Static


class HfStatic(Static):
    """`model.generate` of transformers on up to `batch_size` (8) requests at a time, in order.

    Whoever waits when a batch is over makes up the next one, without a timeout. Prompts are
    padded in front to the longest, all in one forward pass whatever its size, and every member is
    paid for until the longest answer has ended (`GenerationMixin`, transformers 4). An answer is
    given when it ends, where `generate` returns all answers of a batch together.
    """

    def __init__(
        self,
        blocks: BlockCounter,
        *,
        batch_size: int | None = None,
        max_num_seqs: int = 256,
        max_model_len: int = 8192,
    ) -> None:
        super().__init__(
            blocks,
            batch_size=min(8, max_num_seqs) if batch_size is None else batch_size,
            timeout=0.0,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs * max_model_len,  # never reached
            max_model_len=max_model_len,
        )
