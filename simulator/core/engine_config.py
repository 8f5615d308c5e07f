"""The blocks `engine`, `gpu` and `host` of a scenario, with vLLM's names and meanings."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from simulator.core.multimodal_config import MultimodalConfig
from simulator.core.speculative_config import SpeculativeConfig
from simulator.util.config import (
    INT32,
    Amount,
    Config,
    Count,
    Named,
    PositiveAmount,
    PositiveShare,
    WholeNumber,
    read_named,
)
from simulator.util.errors import MappingError
from simulator.util.from_mapping import Field, short_repr

VLLM = "vllm"
"""The engine whose overheads are known, and stand for those of all others."""
TEXTBOOK = "textbook"
"""The engine that decides one step after another, with the same sizes on every GPU."""
AUTO: Literal["auto"] = "auto"
UNIFORM: Literal["uniform"] = "uniform"
"""The routing of tokens that choose their experts evenly, each by itself."""

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}


def _dtype(value: object) -> object:
    """Write a short name of a dtype in full; let through everything else."""
    return DTYPES.get(value, value) if isinstance(value, str) else value


Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], _dtype]


def version_text(value: object) -> object:
    """Write a version as text that YAML takes for a number, as 0.19; without the v of a tag.

    Raises ValueError for 0.1, 0.2 and so on: whether 0.20 was written nobody can say any more.
    """
    if isinstance(value, str):
        return value[1:] if re.match(r"v\d", value) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    text = str(value)
    if text in ("0.1", "0.2", "0.3"):
        raise MappingError(
            "", f"{text} may be {text} or {text}0: write '{text}0' in quotes, or {text}0.0"
        )
    return text


def _tokens(least: int, *words: str) -> Callable[[object], object]:
    """Let through a number of tokens, a word for it, or null."""

    def check(value: object) -> object:
        whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= INT32
        if not whole and value not in (*words, None):
            raise MappingError(
                "",
                f"must be a whole number of tokens, at least {least}, or {' or '.join(words)}, "
                f"not {short_repr(value)}",
            )
        return value

    return check


class PowerConfig(Config):
    """Readings of your own, as of nvidia-smi."""

    idle: Amount | None = Field(None, description="W of an idle GPU; null: 17 % of max")
    max: PositiveAmount | None = Field(None, description="W at most; null: by its data sheet")


class GpuConfig(Config):
    """The hardware."""

    name: str = Field(
        "A100-80GB",
        description="short: `gpu: L4`",
    )
    count: Count = Field(
        1,
        description="GPUs of one engine; left out: product of the parallel sizes; "
        "alone, it sets tensor_parallel_size",
    )
    dollars_per_hour: Amount | None = Field(None, description="$/h of a GPU; null: its list price")
    power: PowerConfig = Field(PowerConfig(), description="what a GPU draws: see metrics.md")
    carbon_intensity: Amount = Field(
        473.0, description="g CO2e per kWh; 473: the world's in 2024 (Ember)"
    )


def _interval(value: object) -> object:
    """Take two ascending numbers of seconds, which YAML has in a list."""
    if value is None:
        return None
    ends = value if isinstance(value, list | tuple) else ()
    numbers = [float(end) for end in ends if type(end) in (int, float)]
    if len(ends) != 2 or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1] <= 1:
        raise MappingError("", f"must be [low, high], s, from 0 to 1, not {short_repr(value)}")
    return numbers[0], numbers[1]


class HostConfig(Config):
    """The server's CPU: its work in each step, in place of what the engine's version says."""

    per_step: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="s in each step, hidden by asynchronous scheduling; null: by `engine.version`",
    )
    per_sequence: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="s more for each sequence; null: by `engine.version`"
    )
    launch_gap: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="s of each step that nothing hides; null: by `engine.version`",
    )
    per_step_interval: Annotated[tuple[float, float] | None, _interval] = Field(
        None,
        description="[low, high], s, 95 % interval; null: by `engine.version`, none with per_step",
    )


def _not_host(value: object) -> object:
    if value == "host":
        raise MappingError("", "is the name of the memory before these tiers")
    return value


class SecondaryTierConfig(Config):
    """A disk, or a store that replicas share, behind the host's memory."""

    type: Annotated[str, _not_host, Field(pattern=r"^[a-z][a-z0-9_]{0,30}$")] = Field(
        "fs", description="a name, which requests.csv has"
    )
    size: PositiveAmount = Field(description="GiB for KV blocks")
    bandwidth: PositiveAmount = Field(
        description="GB/s of its link, reads and writes together; of a shared one, for all replicas"
    )
    latency: Amount = Field(0.0, description="ms until the first block of a prompt comes")
    shared: bool = Field(False, description="one for all replicas; false: each has its own")


class EngineConfig(Config):
    """The engine's knobs, with vLLM's names and meanings."""

    name: Literal[
        "vllm",
        "textbook",
        "vllm-v0",
        "sglang",
        "tensorrt-llm",
        "tgi",
        "deepspeed-fastgen",
        "orca",
        "hf",
    ] = Field(
        "vllm",
        description="sets the defaults (engines.md; below are vllm's); short: `engine: sglang`",
    )
    version: Annotated[str | None, version_text] = Field(
        None,
        description="a release of vLLM, as 0.11.2 (0.11: its last), for rules (conformance.md), "
        "overheads and vllm's defaults; null: 0.33",
    )
    generation_config: Literal["auto", "vllm"] = Field(
        "auto",
        description="auto: as the model's generation_config.json; vllm: without top_p and top_k "
        "(cost-models.md)",
    )
    scheduling_policy: Annotated[Named, read_named("policy", "module:Class")] = Field(
        Named("fcfs"),
        description="a name, package.module:Class, or {policy: name, argument: value}",
    )
    scheduler: Literal["headway", "vllm"] = Field(
        "headway",
        description="vllm: the installed vLLM decides (slow; conformance.md)",
    )
    scheduler_cls: str | None = Field(
        None,
        description="under scheduler vllm: your own, as package.module.Class",
    )
    max_num_seqs: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        256,
        description="most running requests; left out, 256, or 1024 on GPUs from 70 GiB on, "
        "except A100",
    )
    max_num_batched_tokens: Count = Field(
        2048,
        description="most tokens of a step, max_num_seqs or more; left out, 2048; 8192 "
        "where 1024 max_num_seqs is the default; 16384 on GPUs from 160 GiB on",
    )
    max_num_active_seqs: Count | None = Field(
        None,
        description="most running requests, if fewer than max_num_seqs (vLLM 0.31 on)",
    )
    max_num_scheduled_tokens: Count | None = Field(
        None,
        description="most tokens of a step, if fewer than max_num_batched_tokens (vLLM 0.26 on)",
    )
    max_num_queued_reqs: WholeNumber | None = Field(
        None,
        description="queued requests at which a server rejects the next, HTTP 503 (vLLM 0.29 on)",
    )
    max_num_queued_tokens: WholeNumber | None = Field(
        None,
        description="most queued prompt tokens; beyond, HTTP 503 (vLLM 0.29 on)",
    )
    block_size: Annotated[int, Field(ge=1, le=65_536)] = Field(
        16, description="tokens in a block of the KV cache; vllm: a multiple of 16"
    )
    gpu_memory_utilization: PositiveShare = Field(
        0.92, description="share of its GPU's memory that an engine uses"
    )
    num_gpu_blocks_override: Annotated[int, Field(ge=2, le=10_000_000)] | None = Field(
        None, description="KV blocks, vLLM's null block included; null: all that fit"
    )
    enable_prefix_caching: bool = Field(
        True, description="reuse KV blocks for prompts that begin alike"
    )
    prefix_cache: Literal["hash", "radix"] = Field(
        "hash",
        description="hash: by hashes of blocks, as vLLM; radix: in a tree, as SGLang (always, "
        "under sglang)",
    )
    kv_offloading_size: PositiveAmount | None = Field(
        None,
        description="GiB of host memory for blocks of the prefix cache, over all GPUs; null: none",
    )
    kv_offloading_bandwidth: PositiveAmount | None = Field(
        None,
        description="GB/s back to each GPU; null: as swap_bandwidth",
    )
    kv_offloading_latency: Amount = Field(
        0.0, description="ms until a prompt's first block is back"
    )
    hicache_write_policy: Literal["write_back", "write_through", "write_through_selective"] = Field(
        "write_back",
        description="when blocks are copied to the host: evicted; write_through: computed (vLLM; "
        "SGLang's default); write_through_selective: requested twice (SGLang)",
    )
    store_threshold: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        0, description="write_through copies a block when it is offered for the n-th time"
    )
    secondary_tiers: Annotated[list[SecondaryTierConfig], Field(max_length=2)] = Field(
        [], description="disks and stores behind host memory, the nearest first (memory.md)"
    )
    enable_chunked_prefill: bool = Field(
        True,
        description="split prompts; false: only with max_num_batched_tokens >= max_model_len",
    )
    max_model_len: Annotated[int | Literal["auto"] | None, _tokens(1, "auto")] = Field(
        None,
        description="most tokens of prompt and answer; null: the model's; auto: the most that fit",
    )
    enforce_eager: bool = Field(
        False, description="no CUDA graphs: their memory goes to the KV cache"
    )
    dtype: Dtype = Field(
        "auto",
        description="of weights and activations; auto: the model's; or bf16, fp16, half, fp32, "
        "float",
    )
    quantization: Literal["fp8", "int8", "int4", "nvfp4", "mxfp4", "bitsandbytes"] | None = Field(
        None,
        description="of the weights; mxfp4: of experts alone; null: by config.json",
    )
    kv_cache_dtype: Annotated[
        Literal[
            "auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4"
        ],
        _dtype,
    ] = Field("auto", description="of the KV cache; auto: as dtype")
    tensor_parallel_size: Count = Field(1, description="GPUs that share each layer")
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=1024)] = Field(
        1,
        description="stages, each on tensor_parallel_size GPUs (engines.md)",
    )
    pipeline_parallel_bandwidth: PositiveAmount | None = Field(
        None,
        description="GB/s between GPUs of two stages; null: the server's link",
    )
    enable_expert_parallel: bool = Field(
        False, description="each GPU has whole experts, not slices"
    )
    expert_routing: Literal["auto", "uniform", "power_law_1.01", "power_law_1.2"] = Field(
        AUTO,
        description="how unevenly tokens choose experts; auto: by the model (cost-models.md)",
    )
    data_parallel_size: Annotated[int, Field(ge=1, le=1024)] = Field(
        1,
        description="engine cores of one server (fleet.md); other sizes are of one core",
    )
    api_server_count: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None,
        description="front ends, which share a token's time; null: data_parallel_size",
    )
    long_prefill_token_threshold: WholeNumber = Field(
        0, description="most tokens of one prompt in a step; 0: no limit"
    )
    long_prefill_token_threshold_adaptive: bool = Field(
        False,
        description="raise that limit to max_num_batched_tokens / requests",
    )
    prefill_schedule_interval: Count = Field(
        1, description="while decodes run, compute prompts in each n-th step"
    )
    async_scheduling: bool = Field(
        True,
        description="decide a step while another runs; left out, false with drafts, swap and a "
        "radix tree",
    )
    disable_hybrid_kv_cache_manager: bool = Field(
        True,
        description="false (vllm's default): windowed layers keep KV of the window alone",
    )
    prefix_cache_retention_interval: WholeNumber | None = Field(
        0,
        description="tokens between blocks that a windowed layer caches (0: none), beside "
        "ends of prompts and branches; null: all, as before 0.29",
    )
    prefix_match_unit: Annotated[int, Field(ge=1)] | None = Field(
        None, description="tokens between boundaries that prompts match at; null: block_size"
    )
    mamba_cache_mode: Literal["none", "align"] = Field(
        "none",
        description="align: cache states, vllm's default from 0.30",
    )
    mamba_ssm_cache_dtype: Dtype = Field("auto", description="of states; auto: by config.json")
    hf_overrides: dict[str, Any] | None = Field(None, description="laid over config.json")
    speculative_config: SpeculativeConfig | None = Field(
        None, description="speculative decoding (speculative.md); null: none"
    )
    scheduler_reserve_full_isl: bool = Field(
        True, description="admit a request only while its whole prompt fits"
    )
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of KV blocks that admission leaves free"
    )
    min_decode_blocks: WholeNumber = Field(
        0,
        description="KV blocks that admission leaves free for each running request and the new one",
    )
    min_decode_blocks_scope: Literal["running", "newcomer"] = Field(
        "running",
        description="newcomer: in all, not for each running request",
    )
    reserve_output_tokens: Annotated[
        int | Literal["max_tokens", "max_model_len"] | None,
        _tokens(0, "max_tokens", "max_model_len"),
    ] = Field(
        None,
        description="tokens of answer that a request reserves; max_tokens: its limit; null: none",
    )
    preemption_mode: Literal["recompute", "swap", "auto"] = Field(
        "recompute",
        description="swap: copy KV blocks to the host and back; auto: the cheaper",
    )
    swap_space: Amount = Field(
        4.0,
        description="GiB of host memory per GPU",
    )
    swap_bandwidth: PositiveAmount | None = Field(
        None,
        description="GB/s, each way; null: by the cost profile, else 85 % of the bus",
    )
    swap_overlap: bool = Field(
        False,
        description="a step takes the longer of compute and copies, not the sum",
    )
    enable_lora: bool = Field(
        False,
        description="serve adapters; a request may ask for one (memory.md)",
    )
    max_loras: Annotated[int, Field(ge=1, le=100_000)] = Field(
        1, description="adapters that run at once"
    )
    max_cpu_loras: Annotated[int, Field(ge=1, le=10_000_000)] | None = Field(
        None, description="adapters in host memory; null: max_loras, the least"
    )
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = Field(
        16, description="rank of every slot"
    )
    lora_load_bandwidth: PositiveAmount = Field(
        2.1,
        description="GB/s into host memory; 2.1: vLLM's loader from the page cache",
    )
    multimodal_config: MultimodalConfig | None = Field(
        None, description="images and clips in prompts; null: text alone"
    )
    allocation: Literal["paged", "contiguous"] = Field(
        "paged", description="contiguous: reserve max_model_len on admission"
    )

    @property
    def most_running(self) -> int:
        """Requests that run at once at most."""
        return self.max_num_active_seqs or self.max_num_seqs

    @property
    def most_tokens(self) -> int:
        """Tokens that a step computes at most."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @property
    def draft_method(self) -> str | None:
        """How drafts are made; None: there are none."""
        return self.speculative_config.method if self.speculative_config else None

    @property
    def drafts_ahead(self) -> bool:
        """Whether drafts are verified a step ahead, beside a prefix cache, or vary in number."""
        drafts = self.speculative_config
        return drafts is not None and (
            self.async_scheduling
            or self.enable_prefix_caching
            or drafts.num_speculative_tokens_per_batch_size is not None
        )

    @property
    def loads_beside(self) -> bool:
        """Whether blocks come from host memory as by vLLM's connector, while others compute."""
        return (
            self.kv_offloading_size is not None
            and self.hicache_write_policy == "write_through"
            and not self.secondary_tiers
            and self.enable_prefix_caching
        )

    @property
    def policy_name(self) -> str:
        """Name of `scheduling_policy`, which may have arguments."""
        return str(self.scheduling_policy.name)

    @property
    def follows_vllm(self) -> bool:
        """Whether rules and overheads are those of the vLLM that `version` names."""
        return self.name in (VLLM, TEXTBOOK)

    @property
    def gpus(self) -> int:
        """GPUs of one server."""
        return self.gpus_per_rank * self.data_parallel_size

    @property
    def gpus_per_rank(self) -> int:
        """GPUs of one engine core."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def cpu_loras(self) -> int:
        """Adapters kept in host memory."""
        return self.max_cpu_loras or self.max_loras

    @property
    def weight_dtype(self) -> str:
        """Numbers of the layers' weights; auto: the model's."""
        return self.quantization or self.dtype

    @property
    def cache_dtype(self) -> str:
        """Numbers in the KV cache; auto: the model's."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
