"""How many KV blocks fit beside the weights, counted as vLLM counts at start-up.

vLLM takes `gpu_memory_utilization` of the GPU's memory, loads the weights, runs the largest batch
once to see how high the activations rise, and gives the rest to the KV cache. The weights and the
cache follow from config.json; the rest is estimated here:

- the layers' peak: for each of `max_num_batched_tokens` tokens two hidden states and the MLP's
  gate, up and product (with experts: per chosen expert, and what it gives back), 2 bytes each;
- the sampler's peak: `LOGIT_BYTES` per logit of `max_num_seqs` rows of the vocabulary. Layers and
  sampler do not peak together, so the larger counts;
- the states of `max_num_seqs` requests where layers have linear attention (vLLM takes their pages
  as requests come);
- `CONTEXT_BYTES` for what libraries take outside of PyTorch, and `NVLINK_BYTES` between GPUs that
  NVLink connects.

vLLM 0.11 found 119,008 tokens for Llama-2-7B and 40,592 for CodeLlama-34B on an H100 (server logs
of inference-sim, Apache-2.0); the estimates are 0.1 % and 1.5 % above. CUDA graphs lie in what
`gpu_memory_utilization` leaves free.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from simulator.core.engine_config import EngineConfig
from simulator.models.gpus import GIB, NVLINK, Gpu
from simulator.models.sliding_window import LayerGroups, layer_groups
from simulator.models.spec import HALF, ModelSpec, bytes_of

LOGIT_BYTES = 40
"""Peak bytes per logit in vLLM's sampler: float32 copies, 64-bit sort indices, probabilities.
From the 1.26 GiB that vLLM reported for 256 sequences of Llama-3-8B, with TP 1 and TP 2 alike
(vllm-project/vllm, pull request 10511)."""

CONTEXT_BYTES = GIB // 4
"""Bytes outside PyTorch's allocator: cuBLAS, NCCL and attention workspaces (0.1 to 0.3 GiB)."""

NVLINK_BYTES = int(1.79 * GIB)
"""The same that NCCL and vLLM's all-reduce take besides, between GPUs that NVLink connects: vLLM
reported 1.79 GiB for Llama-3-8B on one H100 and 3.58 on each of two (pull request 10511). Between
GPUs without NVLink it reported 0.2 to 0.25 GiB in all (14447, issue 13061), as on one GPU."""

FractionOf = Literal["all", "static", "free"]
"""What `gpu_memory_utilization` is a share of. `all`: of the GPU's memory, of which weights,
activations and libraries leave the rest to the cache (vLLM). `static`: likewise, but activations
and libraries lie outside (SGLang's `mem_fraction_static`). `free`: of what weights, activations and
libraries leave (TensorRT-LLM's `free_gpu_memory_fraction`; TGI)."""

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens per request in the memory table."""


class MemoryBudget(NamedTuple):
    """The memory of one GPU, line by line, and the KV cache that is left; bytes per GPU."""

    model: ModelSpec
    gpu: Gpu
    tensor_parallel_size: int
    gpu_memory_utilization: float
    weight_dtype: str
    kv_cache_dtype: str
    block_size: int  # tokens
    weights: int
    activations: int
    context: int
    kv_bytes_per_token: float
    fraction_of: FractionOf = "all"
    hybrid: bool = False  # vLLM's hybrid KV cache manager: a block holds one group of layers
    states: int = 0  # of the requests in layers with linear attention
    extras: int = 0  # slots of adapters (LoRA), an encoder with its cache
    pipeline_parallel_size: int = 1
    layers: int = 0  # of the stage with the least room, whose lines these are; 0: all

    @property
    def gpus(self) -> int:
        """GPUs that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def block_bytes(self) -> float:
        """Bytes of a KV block."""
        model = self.model
        layers = model.num_hidden_layers
        held = layer_groups(layers, model.windowed_layers)[2] if self.hybrid else layers
        return self.block_size * self.kv_bytes_per_token * held / layers

    @property
    def usable(self) -> int:
        """Bytes that the engine may use."""
        return int(self.gpu.memory * self.gpu_memory_utilization)

    @property
    def kv_cache(self) -> int:
        """Bytes left for the KV cache; negative where the model does not fit."""
        if self.fraction_of == "static":
            return self.usable - self.weights - self.states
        beside = self.weights + self.activations + self.context + self.states + self.extras
        if self.fraction_of == "free":
            return int((self.gpu.memory - beside) * self.gpu_memory_utilization)
        return self.usable - beside

    @property
    def num_gpu_blocks(self) -> int:
        """KV blocks that fit, vLLM's null block included."""
        return int(self.kv_cache // self.block_bytes)

    @property
    def tokens(self) -> int:
        """Tokens whose KV fits; as in vLLM's log, the null block counts."""
        return self.num_gpu_blocks * self.block_size

    def concurrent_windowed(self, tokens: int) -> int:
        """Requests of so many tokens each, decoding, that fit where a window's layers keep no more.

        That is vLLM's default, its hybrid KV cache manager.
        """
        model, size = self.model, self.block_size
        full, windowed, _ = layer_groups(model.num_hidden_layers, model.windowed_layers)
        groups = LayerGroups(full, windowed, model.sliding_window)
        held = groups.blocks_held(-(-tokens // size), groups.blocks_outside(tokens - 1, size))
        return (self._replace(hybrid=True).num_gpu_blocks - 1) // held

    def concurrent(self, tokens: int) -> int:
        """Requests of so many tokens each that fit at once, in whole blocks."""
        blocks = -(-tokens // self.block_size)
        return (self.num_gpu_blocks - 1) // blocks


def kv_block_bytes(model: ModelSpec, engine: EngineConfig) -> float:
    """Bytes of a KV block on each GPU, all layers together."""
    share = model.kv_share(engine.tensor_parallel_size)
    return engine.block_size * model.kv_bytes_per_token(engine.cache_dtype) * share


def activation_bytes(
    model: ModelSpec, tensor_parallel_size: int, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Estimate the peak of the activations on each GPU, as told at the head of this module."""
    hidden = model.hidden_size
    inner = 3 * model.intermediate_size / tensor_parallel_size
    if model.num_experts:
        inner = (model.num_experts_per_tok + model.num_shared_experts) * (inner + hidden)
        inner = max(inner, 3 * model.dense_intermediate_size / tensor_parallel_size)
    layers = max_num_batched_tokens * (2 * hidden + inner) * HALF
    sampler = max_num_seqs * model.vocab_size * LOGIT_BYTES
    return int(max(layers, sampler))


def kv_budget(
    model: ModelSpec,
    gpu: Gpu,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    gpu_memory_utilization: float = 0.92,
    dtype: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
    fraction_of: FractionOf = "all",
    hybrid: bool = False,
    extras: int = 0,
) -> MemoryBudget:
    """Work out the budget of a GPU with its share of the model.

    Of a data-parallel server it is that of one rank, whose experts are spread over all ranks; of
    pipeline stages that of the one with the least room, which all follow, as in vLLM.

    `quantization` (fp8, int8, int4) overrides `dtype` for the weights; the KV cache follows
    `kv_cache_dtype`, with `auto` meaning the `dtype`. The peak of vLLM's sampler counts with
    `fraction_of` all alone. `hybrid` counts the blocks of vLLM's hybrid KV cache manager;
    `extras` are bytes set aside for adapters and an encoder. Raises ValueError if fewer than two
    blocks are left, saying how much is missing.
    """
    model.check_parallel(tensor_parallel_size)
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(
            f"engine.gpu_memory_utilization: must be above 0 and at most 1, "
            f"not {gpu_memory_utilization}"
        )
    weights = quantization or model.weight_dtype(dtype)
    on_other_ranks = int((1 - 1 / data_parallel_size) * model.expert_bytes(weights))
    linked = tensor_parallel_size > 1 and gpu.link_bandwidth > NVLINK
    cache = model.resolve_dtype(dtype) if kv_cache_dtype == "auto" else kv_cache_dtype
    budget = MemoryBudget(
        model=model,
        gpu=gpu,
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        weight_dtype=weights,
        kv_cache_dtype=cache,
        block_size=block_size,
        weights=(model.weight_bytes(weights) - on_other_ranks) // tensor_parallel_size,
        activations=activation_bytes(
            model,
            tensor_parallel_size,
            max_num_batched_tokens,
            max_num_seqs if fraction_of == "all" else 0,
        ),
        context=CONTEXT_BYTES + (NVLINK_BYTES if linked else 0),
        kv_bytes_per_token=model.kv_bytes_per_token(cache) * model.kv_share(tensor_parallel_size),
        fraction_of=fraction_of,
        hybrid=hybrid and model.keeps_window,
        states=int(max_num_seqs * model.state_bytes(dtype) / tensor_parallel_size),
        extras=extras,
    )
    if pipeline_parallel_size > 1:
        inner = activation_bytes(model, tensor_parallel_size, max_num_batched_tokens, 0)
        layers = model.split_layers(pipeline_parallel_size)
        peaks = [inner] * (len(layers) - 1) + [budget.activations]  # the last has the sampler
        stages = [_stage_budget(budget, layers, at, peak) for at, peak in enumerate(peaks)]
        budget = min(stages, key=lambda stage: stage.kv_cache / stage.block_bytes)
    missing = 2 * budget.block_bytes - budget.kv_cache
    if missing > 0:
        raise ValueError(_too_big(budget, missing))
    return budget


def _stage_budget(
    whole: MemoryBudget, layers: Sequence[int], at: int, activations: int
) -> MemoryBudget:
    """Get the budget of a stage, of which the first has the embedding and the last the lm_head."""
    model, gpus = whole.model, whole.tensor_parallel_size
    share = layers[at] / model.num_hidden_layers
    table = int(max(bytes_of(whole.weight_dtype), HALF) * model.head_parameters) // gpus
    inner = whole.weights - table * (1 if model.tie_word_embeddings else 2)
    return whole._replace(
        weights=int(inner * share) + table * ((at == 0) + (at + 1 == len(layers))),
        activations=activations,
        kv_bytes_per_token=whole.kv_bytes_per_token * share,
        states=int(whole.states * share),
        pipeline_parallel_size=len(layers),
        layers=layers[at],
    )


def _too_big(budget: MemoryBudget, missing: float) -> str:
    """Say what is in the way, and what it would take."""
    gpus = budget.gpus
    beside = budget.activations + budget.context + budget.states + budget.extras
    each = "" if gpus == 1 else f" on each of {gpus} GPUs"
    return (
        f"gpu: {budget.model.name} in {budget.weight_dtype} does not fit the {budget.gpu.name}: "
        f"{_gib(budget.weights)} of weights and {_gib(beside)} of "
        f"activations{each} exceed {budget.gpu_memory_utilization:g} of {_gib(budget.gpu.memory)} "
        f"by {_gib(missing)}"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def memory_table(budget: MemoryBudget, *, max_model_len: int | None = None) -> str:
    """Write the budget and the requests that fit as text.

    The requests are given by their tokens (prompt and answer so far), with paging and with
    contiguous allocation, which reserves `max_model_len` (by default the model's) for each.
    """
    model, gpus = budget.model, budget.gpus
    longest = max_model_len or model.max_position_embeddings
    each = "" if gpus == 1 else f", each of {gpus}"
    all_layers = f"{budget.layers} of {model.num_hidden_layers}"
    rows = [
        *([("layers of the fullest stage", all_layers)] if budget.layers else []),
        (f"memory of the {budget.gpu.name}{each}", _gib(budget.gpu.memory)),
        (f"usable (gpu_memory_utilization {budget.gpu_memory_utilization:g})", _gib(budget.usable)),
        (f"weights ({model.parameters / 1e9:.2f} B, {budget.weight_dtype})", _gib(budget.weights)),
        ("peak activations (estimate)", _gib(budget.activations)),
        ("CUDA libraries (estimate)", _gib(budget.context)),
        *([("states of max_num_seqs requests", _gib(budget.states))] if budget.states else []),
        ("KV cache", _gib(budget.kv_cache)),
        (f"KV per token ({budget.kv_cache_dtype})", f"{budget.kv_bytes_per_token / 1024:,.1f} KiB"),
        (f"blocks of {budget.block_size} tokens", f"{budget.num_gpu_blocks:,}"),
        ("tokens", f"{budget.tokens:,}"),
    ]
    width = max(len(label) for label, _ in rows)
    title = f"{model.name} on {gpus} x {budget.gpu.name}"
    lines = [title, ""] + [f"{label:<{width}}  {value:>12}" for label, value in rows]
    lines += _requests(budget, longest)
    return "\n".join(lines)


def memory_figures(budget: MemoryBudget, max_model_len: int | None = None) -> dict[str, Any]:
    """Return what `memory_table` shows as plain numbers, bytes of each GPU."""
    longest = max_model_len or budget.model.max_position_embeddings
    return {
        "model": budget.model.name,
        "gpu": budget.gpu.name,
        "gpus": budget.gpus,
        "memory_bytes": budget.gpu.memory,
        "usable_bytes": budget.usable,
        "weights_bytes": budget.weights,
        "activations_bytes": budget.activations,
        "context_bytes": budget.context,
        "states_bytes": budget.states,
        "kv_cache_bytes": budget.kv_cache,
        "kv_bytes_per_token": budget.kv_bytes_per_token,
        "block_size": budget.block_size,
        "num_gpu_blocks": budget.num_gpu_blocks,
        "tokens": budget.tokens,
        "max_model_len": longest,
        "concurrent": {str(tokens): budget.concurrent(tokens) for tokens in _lengths(longest)},
    }


def _lengths(longest: int) -> list[int]:
    """Return the tokens of the requests that are counted, the longest last."""
    return sorted({*(n for n in LENGTHS if n < longest), longest})


def _requests(budget: MemoryBudget, longest: int) -> list[str]:
    """Say how many requests fit, by their tokens."""
    model = budget.model
    window = model.sliding_window if model.keeps_window else 0
    head = f"{'tokens each':>12}{'paged':>12}" + (f"{'windowed':>12}" if window else "")
    lines = ["", "requests that fit at once", head + f"{'contiguous':>12}"]
    slots = budget.concurrent(longest)
    for tokens in _lengths(longest):
        paged = f"{tokens:>12,}{budget.concurrent(tokens):>12,}"
        paged += f"{budget.concurrent_windowed(tokens):>12,}" if window else ""
        lines.append(f"{paged}{slots:>12,}")
    lines += ["", f"contiguous: each request reserves max_model_len = {longest:,}"]
    if window:
        lines += [
            f"windowed: {model.windowed_layers} of {model.num_hidden_layers} layers keep "
            f"{window:,} tokens (disable_hybrid_kv_cache_manager: false)",
        ]
    return lines
