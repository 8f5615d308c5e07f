"""Who may board as far as memory goes: vLLM's rules, a reserve for decodes, and reservations."""

from collections.abc import Sequence
from typing import Literal

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter

Reservation = int | Literal["max_tokens", "max_model_len"]
"""Tokens of an answer that admission reserves blocks for: a number, or all that may come."""


class Admission:
    """Admission by free blocks.

    - A request needs blocks for its whole prompt (`scheduler_reserve_full_isl`, as vLLM), or else
      for its first chunk.
    - While others run, a share `watermark` of all blocks stays free (vLLM), and `min_decode_blocks`
      for each request that runs, the new one included: room to decode.
    - With `reserve_output_tokens` a request boards only if prompt and answer fit beside all that
      is promised to the running ones, so that nobody need be preempted: `max_tokens` is what the
      request may generate at most (Orca, OSDI 2022, section 4.2; TGI; TensorRT-LLM's
      GUARANTEED_NO_EVICT), `max_model_len` as much as the engine lets anybody generate, a number
      the same for all. Blocks are promised, not taken, which admits the same requests. A
      request whose answer outgrows the promise goes on as without one. Nobody is promised more
      than the whole cache.

    Raises ValueError where a number is below 0.
    """

    def __init__(
        self,
        blocks: BlockCounter,
        max_model_len: int,
        *,
        scheduler_reserve_full_isl: bool,
        watermark: float,
        min_decode_blocks: int,
        reserve_output_tokens: Reservation | None,
    ) -> None:
        for name, value in (
            ("min_decode_blocks", min_decode_blocks),
            ("reserve_output_tokens", reserve_output_tokens),
        ):
            if isinstance(value, int) and value < 0:
                raise ValueError(f"{name}: must be at least 0, not {value}")
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.whole_prompt = scheduler_reserve_full_isl
        self.watermark_blocks = int(watermark * (blocks.usable + 1))
        self.min_decode_blocks = min_decode_blocks
        self.reserve = reserve_output_tokens

    def lacking(
        self, request: Request, hits: Sequence[int], tokens: int, running: int, need: int = 0
    ) -> int:
        """Count the blocks that lack for a request to board beside so many others; 0: it may.

        It boards with `tokens` tokens at first; `hits` is what `blocks.match` has just found of
        it, `need` what the others will take before.
        """
        blocks = self.blocks
        spare = 0
        if running:
            spare = self.watermark_blocks + self.min_decode_blocks * (running + 1)
        held = request.known if self.whole_prompt else tokens
        lacking = blocks.missing(held, hits) + spare + need - blocks.free
        if self.reserve is not None:
            whole = blocks.missing(self.promise(request), hits)
            lacking = max(lacking, whole - blocks.unreserved)
        return max(lacking, 0)

    def board(self, request: Request) -> None:
        """Promise blocks to a request that boards, if answers are reserved."""
        if self.reserve is not None:
            self.blocks.reserve(request, self.promise(request))

    def promise(self, request: Request) -> int:
        """Give the tokens for which a request has blocks reserved."""
        answer = self.reserve
        if answer == "max_tokens":
            answer = request.max_tokens
        elif answer == "max_model_len" or answer is None:
            answer = self.max_model_len
        tokens = min(request.prompt_tokens + answer, self.max_model_len)
        whole = self.blocks.usable * self.blocks.block_size
        return max(request.known, min(tokens, whole))
