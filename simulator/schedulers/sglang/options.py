"""What SGLang's scheduler is asked beside the limits that all schedulers know."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.radix_cache import EVICTION_POLICIES
from simulator.kv_cache.unshared_radix_cache import UnsharedRadixCache
from simulator.schedulers.continuous_batching import MaxNewTokens, check_max_new_tokens
from simulator.schedulers.sglang.queue_order import CACHE_AWARE, ORDERS, WITH_PRIORITIES
from simulator.util.from_mapping import check_least, check_range, raise_if

RETRACTION_POLICIES = ("length", "priority")


@dataclass(frozen=True, kw_only=True)
class SglangOptions:
    """Arguments of SGLang 0.5.23, by their names there.

    Those of its environment variables are the ratio's start, floor and fall. `ignore_eos`: all
    answers are as long as their clients allow. Of its options for one engine the order by routing
    key is left out, and `random` draws other numbers. ValueError where a value is none of SGLang's.
    """

    order: str = "fcfs"
    schedule_conservativeness: Annotated[float, "factor"] = 1.0
    max_prefill_tokens: Annotated[int, "tokens"] = 16384
    prefill_max_requests: Annotated[int | None, "requests"] = None
    prefill_decode_interval: Annotated[int, "decode steps"] = 0
    min_free_slots_delay: Annotated[int | None, "requests"] = None
    enable_mixed_chunk: bool = False
    enable_priority_scheduling: bool = False
    disable_priority_preemption: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: Annotated[int, "priorities"] = 10
    retraction_policy: Literal["length", "priority"] = "length"
    radix_eviction_policy: str = "lru"
    init_new_token_ratio: Annotated[float, "share of the tokens to come"] = 0.7
    min_new_token_ratio_factor: Annotated[float, "share of init_new_token_ratio"] = 0.14
    new_token_ratio_decay_steps: Annotated[int, "steps"] = 600
    retract_decode_steps: Annotated[int, "steps"] = 20
    max_new_tokens: MaxNewTokens = None
    ignore_eos: bool = False
    seed: Annotated[int, "of order: random"] = 0

    def __post_init__(self) -> None:
        check_max_new_tokens(self.max_new_tokens)
        words = (
            (
                self.order not in ORDERS,
                "order",
                f"must be {', '.join(ORDERS)}, or a policy as in {{policy: sjf}}, "
                f"not {self.order!r}",
            ),
            (
                self.retraction_policy not in RETRACTION_POLICIES,
                "retraction_policy",
                f"must be length or priority, not {self.retraction_policy!r}",
            ),
            (
                self.radix_eviction_policy not in EVICTION_POLICIES,
                "radix_eviction_policy",
                f"must be {', '.join(EVICTION_POLICIES)}, not {self.radix_eviction_policy!r}",
            ),
            (
                self.enable_priority_scheduling and self.order not in WITH_PRIORITIES,
                "enable_priority_scheduling",
                f"needs order fcfs and lof, not {self.order}",
            ),
        )
        numbers = (
            check_range("schedule_conservativeness", self.schedule_conservativeness, 0, 1000),
            check_least("max_prefill_tokens", self.max_prefill_tokens, 1),
            check_least("prefill_max_requests", self.prefill_max_requests or 1, 1),
            check_least("prefill_decode_interval", self.prefill_decode_interval, 0),
            check_least("min_free_slots_delay", self.min_free_slots_delay or 1, 1),
            check_least("new_token_ratio_decay_steps", self.new_token_ratio_decay_steps, 1),
            check_least("retract_decode_steps", self.retract_decode_steps, 0),
            check_range("init_new_token_ratio", self.init_new_token_ratio, 0, 1),
            check_range("min_new_token_ratio_factor", self.min_new_token_ratio_factor, 0, 1),
        )
        raise_if(*words, *numbers)

    @property
    def serves_unshared(self) -> bool:
        """Say whether an UnsharedRadixCache does where prompts share nothing."""
        return self.order not in CACHE_AWARE and self.radix_eviction_policy == "lru"

    def check_beside(self, blocks: BlockCounter, policy: Any) -> None:
        """Refuse blocks, or a policy of Headway's, beside which these have no place."""
        raise_if(
            (
                policy is not None and (self.order != "fcfs" or self.enable_priority_scheduling),
                "order",
                "a policy of Headway's needs order fcfs, without priorities",
            ),
            (
                self.order == "shortest-prefill-first" and not blocks.prefix_caching,
                "order",
                "shortest-prefill-first wants a prefix cache",
            ),
            (
                isinstance(blocks, UnsharedRadixCache) and not self.serves_unshared,
                "blocks",
                "UnsharedRadixCache has the policy lru, and does not serve orders by the tree",
            ),
        )
