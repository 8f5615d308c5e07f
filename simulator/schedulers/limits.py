"""The knobs of a scheduler, by vLLM's names: every scheduler is given all of them in one piece."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Literal, Self

from simulator.core.speculative_config import SpeculativeConfig
from simulator.kv_cache.host_memory import Prices

Reservation = int | Literal["max_tokens", "max_model_len"]
"""Tokens of an answer that admission reserves blocks for: a number, or all that may come."""
DecodeScope = Literal["running", "newcomer"]
"""Whose room to decode admission asks for: everybody's who runs, the new one's alone."""


@dataclass(frozen=True, kw_only=True)
class VllmLimits:
    """What vLLM's scheduler is asked, too; its documentation says what each does."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    """Tokens; they end a request whatever it still wanted to say."""
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    prefill_schedule_interval: int = 1
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    max_num_active_seqs: int | None = None
    max_num_scheduled_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Limits(VllmLimits):
    """What an engine asks of its scheduler; `Traits.obeys` says what a kind of scheduler heeds."""

    min_decode_blocks: int = 0
    min_decode_blocks_scope: DecodeScope = "running"
    reserve_output_tokens: Reservation | None = None
    pipeline_parallel_size: int = 1
    async_scheduling: bool = False
    speculation: SpeculativeConfig | None = None
    draft_seed: int = 0
    swap_blocks: int = 0
    """Host memory, in KV blocks: as long as a preempted request fits into it, its blocks are copied
    there and, before it runs again, back; otherwise they are computed again."""
    swap_prices: Prices | None = None
    """What both cost: where computing is cheaper it is done. None: nobody compares."""
    load_time: Callable[[int], float] | None = None
    """Seconds that so many blocks take from host memory beside the steps; None: they do not."""
    store_time: Callable[[int], float] | None = None
    """Seconds that so many blocks take to host memory; None likewise."""

    def only(self, names: Iterable[str]) -> Self:
        """Return these limits with the fields of `names` alone; others have their defaults."""
        return type(self)(**{name: getattr(self, name) for name in names})


ADMISSION_RULES = ("min_decode_blocks", "min_decode_blocks_scope", "reserve_output_tokens")
"""What vLLM does not have, and other schedulers refuse unless they obey it."""
VLLM_LIMITS = tuple(field.name for field in fields(VllmLimits))
ALL_LIMITS = frozenset(field.name for field in fields(Limits))
SIZES = frozenset({"max_num_seqs", "max_model_len"})
BUDGET = SIZES | {"max_num_batched_tokens"}
DEFAULT_LIMITS = Limits()
