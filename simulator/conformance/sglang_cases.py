"""Case files of SGLang's scheduler: the settings and requests that differ from vLLM's."""

from typing import Annotated, ClassVar, Literal

from pydantic import model_validator

from simulator.conformance.case_model import (
    Case,
    CaseRequest,
    Flag,
    Natural,
    Positive,
    _checked,
    _is_whole,
    _Model,
)
from simulator.kv_cache.radix_cache import EVICTION_POLICIES
from simulator.schedulers.sglang.queue_order import ORDERS, WITH_PRIORITIES


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _or_none(least: int) -> object:
    words = f"a whole number >= {least} or null"
    return _checked(lambda v: v is None or _is_whole(v, least), words)


Ratio = Annotated[float, _checked(lambda v: _is_number(v, 0, 1), "a number from 0 to 1")]
Factor = Annotated[float, _checked(lambda v: _is_number(v, 0, 1000), "a number from 0 to 1000")]
Order = Annotated[str, _checked(lambda v: v in ORDERS and v != "random", "an order of SGLang's")]
Eviction = Annotated[
    str, _checked(lambda v: v in EVICTION_POLICIES, f"one of {', '.join(EVICTION_POLICIES)}")
]
Retraction = Annotated[
    Literal["length", "priority"],
    _checked(lambda v: v in ("length", "priority"), "length or priority"),
]
PrefillSize = Annotated[
    int, _checked(lambda v: _is_whole(v, 1) or v == -1, "a whole number >= 1, or -1")
]


class SglangConfig(_Model):
    """Settings of SGLang's scheduler, with its names; four are its environment variables."""

    schedule_policy: Order = "fcfs"
    schedule_conservativeness: Factor = 1.0
    chunked_prefill_size: PrefillSize = 2048
    max_prefill_tokens: Positive = 16384
    prefill_max_requests: Annotated[int | None, _or_none(1)] = None
    max_running_requests: Positive = 128
    max_total_tokens: Positive = 20000
    page_size: Positive = 1
    context_length: Positive = 8192
    enable_mixed_chunk: Flag = False
    disable_radix_cache: Flag = False
    radix_eviction_policy: Eviction = "lru"
    disable_overlap_schedule: Flag = True
    enable_priority_scheduling: Flag = False
    disable_priority_preemption: Flag = False
    schedule_low_priority_values_first: Flag = False
    priority_scheduling_preemption_threshold: Natural = 10
    retraction_policy: Retraction = "length"
    prefill_decode_interval: Natural = 0
    min_free_slots_delay: Annotated[int | None, _or_none(1)] = None
    init_new_token_ratio: Ratio = 0.7
    min_new_token_ratio_factor: Ratio = 0.14
    new_token_ratio_decay_steps: Positive = 600
    retract_decode_steps: Natural = 20
    hash_id_tokens: Positive = 512

    @model_validator(mode="after")
    def _refuse_what_sglang_refuses(self) -> "SglangConfig":
        wrong = []
        if self.max_total_tokens < self.page_size:
            wrong.append(f"max_total_tokens: must be >= page_size ({self.page_size})")
        if self.enable_priority_scheduling and self.schedule_policy not in WITH_PRIORITIES:
            wrong.append("schedule_policy: with priorities must be fcfs or lof")
        if self.disable_radix_cache and self.schedule_policy == "shortest-prefill-first":
            wrong.append("schedule_policy: shortest-prefill-first wants a prefix cache")
        if wrong:
            raise ValueError("\n".join(wrong))
        return self


class SglangRequest(CaseRequest):
    """One request; the client allows `max_new_tokens`, by default what it will say."""

    max_new_tokens: Annotated[int | None, _or_none(1)] = None
    ignore_eos: Flag = False


class SglangCase(Case):
    """One case for SGLang's scheduler, with all defaults filled in."""

    length_key: ClassVar[str] = "context_length"

    config: SglangConfig = SglangConfig()  # type: ignore[assignment]
    requests: list[SglangRequest]  # type: ignore[assignment]
