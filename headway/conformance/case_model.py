"""What a case file holds: the settings of a scheduler, the time of a step, and requests.

For vLLM's scheduler, and below for SGLang's.
"""

from collections.abc import Callable, Hashable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from headway.vllm.interface import MAMBA
from simulator.core.request import Media, Segments
from simulator.core.speculative_config import DraftConfig, SpeculativeConfig
from simulator.kv_cache.hierarchical_cache import WRITE_POLICIES
from simulator.kv_cache.radix_cache import EVICTION_POLICIES
from simulator.schedulers.sglang.queue_order import ORDERS, WITH_PRIORITIES
from simulator.util.errors import FieldError, MappingError, field_errors
from simulator.util.from_mapping import raise_if

_LIMIT = 2**53  # integers up to here are exact in a float


def _checked(good: Callable[[Any], bool], words: str) -> PlainValidator:
    """Take a value as it is if it is good; else say what it must be."""

    def check(value: Any) -> Any:
        if not good(value):
            raise MappingError("", f"must be {words}, not {value!r}")
        return value

    return PlainValidator(check)


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and least <= value < _LIMIT


def _whole(least: int) -> PlainValidator:
    return _checked(lambda v: _is_whole(v, least), f"a whole number >= {least}")


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


Natural = Annotated[int, _whole(0)]
Positive = Annotated[int, _whole(1)]
PositiveOrNone = Annotated[
    int | None,
    _checked(lambda v: v is None or _is_whole(v, 1), "a whole number >= 1, or null"),
]
Flag = Annotated[bool, _checked(lambda v: isinstance(v, bool), "true or false")]
Share = Annotated[float, _checked(_is_share, "a number from 0 to below 1")]


def _are_groups(value: object) -> bool:
    """Say whether a list has groups of layers of at most two kinds, and not of states alone."""
    if not isinstance(value, list) or not value or (value[0] != 0 and {*value} == {MAMBA}):
        return False
    return all(n == MAMBA or _is_whole(n, 0) for n in value) and len({*value, 0}) < 3


Groups = Annotated[
    list[int | Literal["mamba"]],
    _checked(
        _are_groups,
        "a list of windows in tokens, all alike, or mamba for states, with 0 for full attention",
    ),
]
Names = Annotated[
    list[str],
    _checked(
        lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
        "a list of names",
    ),
]
Policy = Annotated[
    Literal["fcfs", "priority"], _checked(lambda v: v in ("fcfs", "priority"), "fcfs or priority")
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Speculation(_Model):
    """Drafts, by vLLM's names; `acceptance` is the probability that one is right.

    Which are is drawn as in a simulation of seed 0: by request and place in its answer.
    """

    method: Literal["ngram", "eagle", "mtp", "draft_model"]
    num_speculative_tokens: Positive
    num_speculative_tokens_per_batch_size: list[list[int]] | None = None
    disable_eagle_block_drop: Flag = False
    disable_lookahead_block_hashes: Flag = False
    acceptance: Annotated[float, _checked(lambda v: _is_number(v, 0, 1), "a number from 0 to 1")]

    def settings(self) -> SpeculativeConfig:
        """Make the block of a scenario that says the same."""
        draft = None if self.method == "ngram" else DraftConfig()
        return SpeculativeConfig(**self.model_dump(), draft=draft)


class VllmConfig(_Model):
    """Settings of vLLM's scheduler: its names, but for `scheduler_reserve_full_isl`."""

    policy: Policy = "fcfs"
    max_num_seqs: Positive = 128
    max_num_active_seqs: PositiveOrNone = None
    max_num_batched_tokens: Positive = 2048
    max_num_scheduled_tokens: PositiveOrNone = None
    max_model_len: Positive = 8192
    enable_chunked_prefill: Flag = True
    long_prefill_token_threshold: Natural = 0
    long_prefill_token_threshold_adaptive: Flag = False
    reserve_full_isl: Flag = True
    watermark: Share = 0.0
    prefill_schedule_interval: Positive = 1
    async_scheduling: Flag = False
    pipeline_parallel_size: Positive = 1
    block_size: Positive = 16
    num_gpu_blocks: Annotated[int, _whole(2)] = 10000
    enable_prefix_caching: Flag = True
    hash_id_tokens: Positive = 512
    kv_cache_groups: Groups = [0]
    num_prefill_checkpoint_blocks: Natural = 0
    """Of mamba groups: states beside that of its end that their kernels keep of a chunk, 0 or 1."""
    prefill_checkpoint_alignment: Positive = 1
    """Tokens at whose multiples, from the beginning of a chunk on, they keep one."""
    prefix_cache_retention_interval: Annotated[
        int | None,
        _checked(lambda v: v is None or _is_whole(v, 0), "a whole number >= 0, or null"),
    ] = None
    prefix_match_unit: PositiveOrNone = None
    max_loras: Natural = 0
    encoder_cache_size: Natural = 0
    max_num_encoder_input_tokens: Natural = 0
    disable_chunked_mm_input: Flag = False
    ec_cache: Names = []
    """Images, by their hashes, whose outputs an EC connector has; []: there is no connector."""
    kv_offloading_blocks: Natural = 0
    kv_role: Literal["kv_consumer"] | None = None
    """A consumer pulls each prompt's blocks in `load_block_ns` each."""
    store_threshold: Natural = 0
    speculative_config: Speculation | None = None

    @property
    def checkpoints(self) -> int:
        """Tokens between places at which kernels keep a state inside a chunk; 0: they do not."""
        return self.num_prefill_checkpoint_blocks * self.prefill_checkpoint_alignment

    @model_validator(mode="after")
    def _refuse_what_vllm_refuses(self) -> "VllmConfig":
        tokens = self.max_num_batched_tokens
        wrong = []
        if self.kv_offloading_blocks and (
            not self.enable_prefix_caching or any(self.kv_cache_groups) or self.encoder_cache_size
        ):
            what = "needs enable_prefix_caching, without windows and encoder"
            raise MappingError("kv_offloading_blocks", what)
        if tokens < self.max_num_seqs:
            wrong.append(f"must be >= max_num_seqs ({self.max_num_seqs}), not {tokens}")
        if not self.enable_chunked_prefill and tokens < self.max_model_len:
            wrong.append(f"without chunked prefill must be >= max_model_len, not {tokens}")
        others = self.encoder_cache_size, self.kv_offloading_blocks
        if drafts := self.speculative_config:
            if self.encoder_cache_size:
                what = "cannot be used with an encoder"
                raise MappingError("speculative_config", what)
            verified = self.max_num_seqs * (1 + drafts.num_speculative_tokens)
            if self.max_loras and tokens < verified:
                wrong.append(f"with adapters and drafts must be >= {verified}, not {tokens}")
        if (self.prefix_cache_retention_interval or 0) % self.block_size:
            what = f"must be a multiple of block_size ({self.block_size})"
            raise MappingError("prefix_cache_retention_interval", what)
        if self.prefix_cache_retention_interval and not any(self.kv_cache_groups):
            raise MappingError("prefix_cache_retention_interval", "needs windows")
        if self.block_size % (self.prefix_match_unit or 1):
            what = f"must divide block_size ({self.block_size})"
            raise MappingError("prefix_match_unit", what)
        if MAMBA in self.kv_cache_groups and (
            any(others) or self.max_loras or self.speculative_config
        ):
            raise MappingError(
                "kv_cache_groups", "mamba cannot be used with adapters, encoder and drafts"
            )
        if MAMBA in self.kv_cache_groups and not (
            self.enable_prefix_caching and self.enable_chunked_prefill
        ):
            raise MappingError("kv_cache_groups", "mamba needs prefix caching and chunked prefill")
        if wrong:
            raise MappingError([FieldError(("max_num_batched_tokens",), what) for what in wrong])
        return self

    @model_validator(mode="after")
    def _refuse_beside_others(self) -> "VllmConfig":
        others = self.encoder_cache_size, self.kv_offloading_blocks, self.max_loras
        for key in ("pipeline_parallel_size", "kv_role"):
            if getattr(self, key) not in (1, None) and any((*others, *self.kv_cache_groups)):
                raise MappingError(key, "is compared without other features")
        if self.kv_role and (self.pipeline_parallel_size > 1 or not self.speculative_config):
            raise MappingError("kv_role", "needs drafts, and pipeline_parallel_size: 1")
        if (
            self.pipeline_parallel_size > 1
            and self.speculative_config
            and not self.async_scheduling
        ):
            raise MappingError("async_scheduling", "must be true with drafts on pipeline stages")
        return self


class StepTime(_Model):
    """A step takes base + per_token * tokens + per_context_token * context, an empty one empty.

    With `kv_offloading_blocks`, and SGLang's `enable_hierarchical_cache`, copies of blocks from the
    host and to it take their turns, each way on a link of its own, beside the steps. A step of
    SGLang's ends no sooner than its loads.
    """

    base_ns: Natural = 6_000_000
    per_token_ns: Natural = 40_000
    per_context_token_ns: Natural = 40
    empty_ns: Natural = 1_000_000
    load_block_ns: Natural = 0
    store_block_ns: Natural = 0

    def duration(self, tokens: int, context: int) -> int:
        """Return what a step with tokens takes, ns."""
        return self.base_ns + self.per_token_ns * tokens + self.per_context_token_ns * context


class CaseRequest(_Model):
    """One request of a case; its prompt may be named by `segments` or `hash_ids`."""

    id: Any = None  # its position: checked by the case
    arrival_ns: Natural
    prompt_len: Positive
    output_len: Positive
    priority: Annotated[
        int | None, _checked(lambda v: not v or type(v) is int, "a whole number")
    ] = 0
    segments: Any = None
    hash_ids: Any = None
    max_tokens: PositiveOrNone = None
    """What the client allows; more than `output_len`: the answer ends by a stop token."""
    adapter: Natural = 0
    """The number of its LoRA adapter; 0: none."""

    def named_prompt(self, hash_id_tokens: int) -> Segments | None:
        """Name the prompt's tokens; MappingError has the key that is wrong."""
        if self.segments is not None:
            if self.hash_ids is not None:
                raise MappingError("segments", "give segments or hash_ids, not both")
            try:
                named = [(_segment_name(name), count) for name, count in self.segments]
            except (TypeError, ValueError):
                raise MappingError("segments", "must be a list of [name, tokens]") from None
            if not all(_is_whole(count, 1) for _, count in named):
                raise MappingError("segments", "tokens must be whole numbers >= 1")
            if sum(count for _, count in named) != self.prompt_len:
                raise MappingError("segments", f"must add up to prompt_len ({self.prompt_len})")
            return tuple(named)
        if (ids := self.hash_ids) is None:
            return None
        if not isinstance(ids, list) or not all(type(key) is int for key in ids):
            raise MappingError("hash_ids", "must be a list of whole numbers")
        if len(ids) * hash_id_tokens < self.prompt_len:
            raise MappingError("hash_ids", f"have fewer tokens than prompt_len ({self.prompt_len})")
        full, rest = divmod(self.prompt_len, hash_id_tokens)
        whole = [(("h", key), hash_id_tokens) for key in ids[:full]]
        return tuple(whole + ([(("h", ids[full]), rest)] if rest else []))


def _segment_name(name: object) -> Hashable:
    """Translate a segment's name: `in:3` and `out:3` are request 3's prompt and answer.

    `image:a` is an image with that hash, all of whose tokens an encoder makes.
    """
    if not isinstance(name, str):
        raise TypeError(name)
    kind, _, number = name.partition(":")
    if kind in {"in", "out"} and number.isdecimal() and str(int(number)) == number:
        return kind, int(number)
    return Media(kind, number) if kind == "image" else name


class Case(_Model):
    """One case, with all defaults filled in."""

    length_key: ClassVar[str] = "max_model_len"
    """The setting that bounds prompts."""

    version: Annotated[int, _checked(lambda v: v == 1, "1")] = Field(alias="schema")
    name: str
    about: Any = None
    config: VllmConfig = VllmConfig()
    step_time: StepTime = StepTime()
    max_steps: Annotated[
        int | None, _checked(lambda v: v is None or _is_whole(v, 1), "a whole number >= 1")
    ] = None
    requests: list[CaseRequest]

    def with_retention(self, tokens: int | None) -> "Case":
        """Fill in `prefix_cache_retention_interval` where the case leaves it open.

        vLLM's default is that of the release; recordings that do not name it are older than it.
        """
        config, name = self.config, "prefix_cache_retention_interval"
        if name in config.model_fields_set or name not in type(config).model_fields:
            return self
        return self.model_copy(update={"config": config.model_copy(update={name: tokens})})

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: object) -> object:
        if not isinstance(raw, dict):
            return raw
        needed = dict.fromkeys(("schema", "name", "requests"))  # what is not there is null
        return needed | raw | {"step_time": raw.get("step_time") or {}}

    @model_validator(mode="after")
    def _check_requests(self) -> "Case":
        wrong: list[FieldError] = []
        sizes: dict[Hashable, int] = {}  # of images
        longest = getattr(self.config, self.length_key)
        for index, request in enumerate(self.requests):
            at = ("requests", str(index))
            if getattr(request, "adapter", 0) and not getattr(self.config, "max_loras", 0):
                wrong.append(FieldError((*at, "adapter"), "needs config.max_loras"))
            if request.id != index:
                what = f"must be {index}, its position, not {request.id!r}"
                wrong.append(FieldError((*at, "id"), what))
            if request.prompt_len >= longest:
                what = f"must be less than {self.length_key} ({longest})"
                wrong.append(FieldError((*at, "prompt_len"), what))
            try:
                named = request.named_prompt(self.config.hash_id_tokens)
                self._check_images(named or (), sizes)
            except ValueError as error:
                wrong += field_errors(at, error)
        if wrong:
            raise MappingError(wrong)
        return self

    def _check_images(self, named: Segments, sizes: dict[Hashable, int]) -> None:
        """See that each image has its one size, and can be encoded."""
        config = self.config
        most = min(
            getattr(config, "encoder_cache_size", 0),
            getattr(config, "max_num_encoder_input_tokens", 0),
        )
        for name, count in named:
            if isinstance(name, Media) and count > most:
                raise MappingError("segments", f"the encoder takes images of {most} tokens at most")
            if isinstance(name, Media) and sizes.setdefault(name, count) != count:
                raise MappingError("segments", f"image:{name.name} has {sizes[name]} tokens, too")


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
WritePolicy = Annotated[
    Literal["write_back", "write_through", "write_through_selective"],
    _checked(lambda v: v in WRITE_POLICIES, f"one of {', '.join(WRITE_POLICIES)}"),
]
PrefillSize = Annotated[
    int, _checked(lambda v: _is_whole(v, 1) or v == -1, "a whole number >= 1, or -1")
]


Ordering = Annotated[
    dict[str, Any] | None,
    _checked(
        lambda v: v is None or (isinstance(v, dict) and isinstance(v.get("policy"), str)),
        'an object such as {"policy": "sjf"}, or null',
    ),
]
Client = Annotated[str, _checked(lambda v: isinstance(v, str), "a text")]


class SglangConfig(_Model):
    """Settings of SGLang's scheduler, with its names; four are its environment variables.

    `scheduling_policy` is one of Headway's, which orders the queue there by `headway.sglang`.
    """

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
    enable_hierarchical_cache: Flag = False
    hicache_ratio: Annotated[float, _checked(lambda v: _is_number(v, 0.01, 1000), "a number")] = 2.0
    hicache_write_policy: WritePolicy = "write_through"
    hash_id_tokens: Positive = 512
    scheduling_policy: Ordering = None
    speculative_algorithm: Literal["EAGLE"] | None = None
    speculative_num_steps: Annotated[int | None, _or_none(1)] = None
    speculative_eagle_topk: Positive = 1
    speculative_num_draft_tokens: Annotated[int | None, _or_none(2)] = None
    acceptance: Annotated[
        float, _checked(lambda v: _is_number(v, 0, 1), "a number from 0 to 1")
    ] = 0
    """The probability that a draft is right if all before are; which are is drawn by seed 0."""

    @property
    def drafts(self) -> SpeculativeConfig | None:
        """The block of a scenario that says the same."""
        if self.speculative_algorithm is None:
            return None
        return SpeculativeConfig(
            method="eagle",
            num_speculative_tokens=self.speculative_num_steps,
            speculative_eagle_topk=self.speculative_eagle_topk,
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            acceptance=self.acceptance,
            draft=DraftConfig(),
        )

    @property
    def host_blocks(self) -> int:
        """Pages of host memory: SGLang adds one to what the ratio says."""
        usable = self.max_total_tokens // self.page_size * self.page_size
        return int(usable * self.hicache_ratio) // self.page_size + 1

    @model_validator(mode="after")
    def _refuse_what_sglang_refuses(self) -> "SglangConfig":
        ranks, policy = self.enable_priority_scheduling, self.schedule_policy
        unkept = self.enable_hierarchical_cache and self.disable_radix_cache
        unread = self.disable_radix_cache and policy == "shortest-prefill-first"
        twice = self.scheduling_policy is not None and (policy != "fcfs" or ranks)
        short = f"must be >= page_size ({self.page_size})"
        unranked = ranks and policy not in WITH_PRIORITIES
        raise_if(
            (unkept, "enable_hierarchical_cache", "needs a radix cache"),
            (self.max_total_tokens < self.page_size, "max_total_tokens", short),
            (unranked, "schedule_policy", "with priorities must be fcfs or lof"),
            (twice, "scheduling_policy", "needs schedule_policy fcfs, without priorities"),
            (unread, "schedule_policy", "shortest-prefill-first wants a prefix cache"),
        )
        return self


class SglangRequest(CaseRequest):
    """One request; the client allows `max_new_tokens`, by default what it will say.

    `client` and `hint`, the predicted length, are for a policy of Headway's.
    """

    max_new_tokens: Annotated[int | None, _or_none(1)] = None
    ignore_eos: Flag = False
    client: Client = ""
    hint: Annotated[int | None, _or_none(1)] = None


class SglangCase(Case):
    """One case for SGLang's scheduler, with all defaults filled in."""

    length_key: ClassVar[str] = "context_length"

    config: SglangConfig = SglangConfig()  # type: ignore[assignment]
    requests: list[SglangRequest]  # type: ignore[assignment]
