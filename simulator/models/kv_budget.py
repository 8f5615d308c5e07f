"""How many KV blocks fit beside the weights, counted as an engine counts at start-up.

vLLM takes `gpu_memory_utilization` of the GPU's memory, loads the weights (`loaded.py`), runs the
largest batch once to see how high the activations rise, from 0.21 on captures some CUDA graphs to
see what they take, and gives the rest to the KV cache (`kv_layout.py`). Weights and cache follow
from config.json; the rest is estimated here:

- the layers' peak: for each of `max_num_batched_tokens` tokens hidden states and the MLP's
  gate, up and product (with experts: per chosen expert, and what it gives back), 2 bytes each;
- the sampler's peak: bytes for each logit of `max_num_seqs` rows of the vocabulary. Layers and
  sampler do not peak together, so the larger counts;
- an encoder's peak, likewise, and its outputs, which stay through the other two;
- what libraries take outside of PyTorch, and between GPUs that NVLink connects.

`memory_terms.csv` has the bytes of each of these by engine and release, with sources.

vLLM 0.11 found 119,008 tokens for Llama-2-7B and 40,592 for CodeLlama-34B on an H100 (server logs
of inference-sim, Apache-2.0); the estimates are 0.1 % and 1.5 % above. docs/memory.md compares
them with more logs.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from simulator.core.engine_config import EngineConfig
from simulator.models.config_parts import TABLE
from simulator.models.dtypes import HALF
from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import GIB, NVLINK, Gpu
from simulator.models.kv_layout import KvLayout, exports_states, kv_layout, model_groups
from simulator.models.loaded import Loaded, loaded
from simulator.models.sliding_window import LayerGroups
from simulator.models.spec import ModelSpec
from simulator.util.errors import ScenarioError

LEFT_OVER = "left over"
REFUSALS: dict[str, str] = TABLE["no memory"]
UNREAD: dict[str, str] = TABLE["unread"]
"""What engines say where memory lacks; what takes memory and is not counted."""
SURE = 0.95  # of the KV cache: the most that is advised, as bytes are worked out within 5 %
PEERS = 3  # other GPUs of a group whose buffers count


class MemoryBudget(NamedTuple):
    """The memory of one GPU, part by part, and the KV cache that is left; bytes per GPU."""

    model: ModelSpec
    gpu: Gpu
    sizes: EngineSizes
    weights: int  # all that is loaded, towers and drafts too
    activations: int
    context: int
    graphs: int
    kv_bytes_per_token: float
    layout: KvLayout
    tower: int = 0  # of the weights
    drafts: int = 0  # of the weights
    layers: int = 0  # of the stage with the least room, whose parts these are; 0: all

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request."""
        return (self.longest or 1) if self.sizes.max_model_len == "auto" else self.wanted

    @property
    def wanted(self) -> int:
        """Most tokens of a request where there is room for them."""
        given = self.sizes.max_model_len
        most = self.sizes.positions or self.model.max_position_embeddings
        return given if isinstance(given, int) else most

    @property
    def usable(self) -> int:
        """Bytes that the engine may use."""
        return int(self._whole * self.sizes.gpu_memory_utilization)

    @property
    def _whole(self) -> int:
        return self.gpu.memory - (self.context if self.sizes.fraction_of == "static" else 0)

    @property
    def beside(self) -> int:
        """Bytes of what is neither loaded nor cache."""
        return self.activations + self.context + self.graphs

    @property
    def loaded(self) -> int:
        """Bytes of weights and slots of adapters."""
        return self.weights + self.sizes.adapters

    def left(self, share: float) -> int:
        """Bytes that a share leaves for the KV cache; negative where the model does not fit."""
        static, free = (self.sizes.fraction_of == one for one in ("static", "free"))
        beside = self.loaded + (0 if static else self.beside)
        return int((self._whole - beside) * share) if free else int(self._whole * share) - beside

    @property
    def share(self) -> float:
        """Share of the memory that counts: the whole where num_gpu_blocks_override is given."""
        given = self.sizes.num_gpu_blocks_override
        return self.sizes.gpu_memory_utilization if given is None else 1.0

    @property
    def room(self) -> int:
        """Bytes that the KV cache may take; negative where the model does not fit."""
        return self.left(self.share)

    @property
    def kv_cache(self) -> int:
        """Bytes of the KV cache: those of num_gpu_blocks_override, else all its room."""
        given = self.sizes.num_gpu_blocks_override
        return self.room if given is None else int(given * self.layout.block_bytes)

    @property
    def logged_blocks(self) -> int:
        """Blocks of the pool, vLLM's null block included."""
        fit = int(max(self.kv_cache, 0) // self.layout.block_bytes)
        return self.sizes.num_gpu_blocks_override or fit

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part of the GPU's memory that there is, in the order of being taken."""
        parts = {
            "weights": self.weights - self.tower - self.drafts,
            "encoders": self.tower,
            "drafts": self.drafts,
            "adapters": self.sizes.adapters,
            "peak activations": self.activations,
            "CUDA graphs": self.graphs,
            "CUDA libraries": self.context,
            "KV cache": max(self.kv_cache, 0),
        }
        return {name: size for name, size in parts.items() if size} | {
            LEFT_OVER: max(self.gpu.memory - sum(parts.values()), 0)
        }

    @property
    def unread(self) -> str:
        """What takes memory and is not counted; "": nothing is known to."""
        sizes, packed = self.sizes, self.model.checkpoint
        drafts = sizes.speculative_config
        told = [self.model.unread]
        if drafts and not sizes.draft and (drafts.model or drafts.method == "draft_model"):
            told.append(UNREAD.get(str(drafts.method), ""))
        int4 = packed and (packed.method, packed.word) == ("compressed-tensors", "int4")
        if int4 and self.model.num_experts and sizes.fraction_of == "all":
            told.append(UNREAD["int4 experts"])
        return "; ".join(filter(None, told))

    @property
    def num_gpu_blocks(self) -> int:
        """KV blocks of `block_size` tokens, the null block included.

        Where the engine has longer blocks or keeps states in some of them (Gemma 4, Qwen3-Next),
        as many as hold the same number of the longest requests. Chunks keep all tokens in a run.
        """
        if self.model.chunked:
            return self.logged_blocks // sum(one.number for one in self.layout.tables)
        if self.layout.even or self.caches_states:
            return self.logged_blocks
        window = self.model.sliding_window
        groups = LayerGroups(*model_groups(self.model), window, self.sizes.in_flight)
        most = groups.max_blocks(self.max_model_len, self.sizes.block_size)
        return int(self.max_concurrency * most) + 1

    @property
    def caches_states(self) -> bool:
        """Whether the prefix cache has states, in blocks as the engine has them."""
        return self.model.linear is not None and self.sizes.mamba_cache_mode == "align"

    @property
    def block_size(self) -> int:
        """Tokens of one of `num_gpu_blocks`."""
        return self.layout.least_block if self.caches_states else self.sizes.block_size

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` tokens that fit: vLLM's `Maximum concurrency`."""
        return self.logged_blocks / self.needed(self.max_model_len)

    def needed(self, tokens: int) -> int:
        """Blocks of the pool that a request of so many tokens needs."""
        return self.layout.needed(tokens, self.sizes.in_flight)

    @property
    def tokens(self) -> int:
        """What the engine's log calls the size of its KV cache; as there, the null block counts."""
        if self.sizes.term("tokens by concurrency"):
            return int(self.max_concurrency * self.max_model_len)
        tables = sum(one.number for one in self.layout.tables)
        return self.logged_blocks // tables * self.layout.least_block

    def concurrent(self, tokens: int) -> int:
        """Requests of so many tokens each that fit at once, in whole blocks."""
        return max(self.logged_blocks - 1, 0) // self.needed(tokens)

    @property
    def speaks(self) -> str:
        """In whose words its log is: as `fraction_of`, or TensorRT-LLM's own."""
        return "trtllm" if self.sizes.name == "tensorrt-llm" else self.sizes.fraction_of

    @property
    def refusal(self) -> str:
        """What the engine's error says where it does not start for want of memory; "": it starts.

        As check_enough_kv_cache_memory (vLLM 0.11 to 0.33), MemoryPoolConfig (SGLang 0.5) and
        get_max_atten_window_upper_bound (TensorRT-LLM 1): the last two start with room for
        shorter requests.
        """
        if self.speaks in ("static", "trtllm"):
            starts = self.logged_blocks > 0 and self.kv_cache <= self.room
            return "" if starts else REFUSALS[self.speaks]
        if self.room <= 0:
            return REFUSALS[self.speaks].format(tokens=self.sizes.max_num_batched_tokens)
        if self.kv_cache <= self.room:
            return self._too_long
        cache, room = gib(self.kv_cache), gib(self.room)
        return REFUSALS["override"].format(blocks=self.logged_blocks, cache=cache, room=room)

    @property
    def _too_long(self) -> str:
        """What vLLM's error says where the longest request has no room; "": it has."""
        if self.sizes.max_model_len == "auto" and not self.longest:
            return REFUSALS["auto"]
        if self.longest >= self.max_model_len:
            return ""
        needed = gib(self.needed(self.max_model_len) * self.layout.block_bytes)
        enough = REFUSALS["enough"].format(fits=self.longest) if self.longest else ""
        return REFUSALS["long"].format(
            longest=self.max_model_len, needed=needed, cache=gib(self.kv_cache), enough=enough
        )

    @property
    def longest(self) -> int:
        """Most tokens of a request that there is room for, up to max_model_len."""
        lengths = range(1, self.wanted + 1)
        return bisect_right(lengths, self.logged_blocks, key=self.needed)

    @property
    def safe_length(self) -> int:
        """Most tokens of a request that are advised: fewer, as the server's own room may be less.

        Of whole blocks, without vLLM's null block; `wanted` where there is room for it.
        """
        size = self.sizes.block_size
        if self.longest == self.wanted:
            return self.wanted
        return int(SURE * (self.longest // size - 1)) * size

    @property
    def contiguous(self) -> int:
        """Requests that fit where each reserves `max_model_len` tokens in all layers."""
        return int(self.kv_cache // (self.max_model_len * self.kv_bytes_per_token))


def kv_block_bytes(model: ModelSpec, engine: EngineConfig) -> float:
    """Bytes of a KV block on each GPU, all layers together."""
    gpus = engine.tensor_parallel_size
    return engine.block_size * model.kv_bytes_per_token(engine.cache_dtype, gpus)


def activation_bytes(model: ModelSpec, sizes: EngineSizes, samples: bool = True) -> int:
    """Estimate the peak of the activations on each GPU, as told at the head of this module.

    The last stage `samples`.
    """
    hidden, gpus = model.hidden_size, sizes.tensor_parallel_size
    inner = 3 * model.intermediate_size / gpus
    if model.num_experts:
        inner = (model.num_experts_per_tok + model.num_shared_experts) * (inner + hidden)
        inner = max(inner, 3 * model.dense_intermediate_size / gpus)
    layers = int(sizes.max_num_batched_tokens * (sizes.term("hidden") * hidden + inner) * HALF)
    samples = samples and not model.pools
    return max(layers, samples * sizes.max_num_seqs * model.vocab_size * sizes.term("logit"))


def _encoder_bytes(model: ModelSpec, sizes: EngineSizes) -> tuple[int, int]:
    """Return the encoder's peak and its outputs: of as many tokens as its budget, or an image."""
    vision = model.vision
    if vision is None or not sizes.encodes(*vision.modalities) or sizes.fraction_of != "all":
        return 0, 0
    tokens = max(sizes.max_num_batched_tokens, model.largest_image)
    images = sizes.multimodal_config
    kept = (images and images.encoder_cache_size) or tokens
    patches = tokens * vision.patches_per_token
    inner = 2 * vision.intermediate_size / sizes.tensor_parallel_size
    return int(patches * (2 * vision.hidden_size + inner) * HALF), kept * model.output_bytes


def fitting(budget: MemoryBudget) -> MemoryBudget:
    """Return the budget; ValueError if fewer than two blocks are left, with how much is missing."""
    if why := too_big(budget):
        raise ScenarioError("gpu", why)
    return budget


def estimate(model: ModelSpec, gpu: Gpu, sizes: EngineSizes) -> MemoryBudget:
    """Work out the budget of a GPU with its share of the model, whether anything is left or not.

    Of a data-parallel server it is that of one rank, whose experts are spread over all ranks; of
    pipeline stages that of the one with the least room, which all follow, as in vLLM.

    `quantization` (fp8, int8, int4, nvfp4, mxfp4) overrides `dtype` for the weights; the KV cache
    follows `kv_cache_dtype`, with `auto` meaning what the checkpoint says, else the `dtype`.
    """
    model.check_parallel(sizes.tensor_parallel_size)
    sizes = sizes.on(gpu, model) if sizes.fraction_of != "free" else sizes
    if sizes.mamba_cache_mode == "align":
        exports = exports_states(model, gpu, sizes)
        sizes = sizes.model_copy(update={"exports_states": exports})
    parts, layers = loaded(model, gpu, sizes), model.split_layers(sizes.pipeline_parallel_size)
    stages = [_stage(model, gpu, sizes, parts, layers[:at]) for at in range(1, len(layers) + 1)]
    return min(stages, key=lambda stage: stage.room / stage.layout.block_bytes)


def _context(gpu: Gpu, sizes: EngineSizes) -> int:
    """Bytes of libraries; under SGLang what is not free before it loads."""
    own = sizes.term("context") + sizes.term("trtllm") * (sizes.name == "tensorrt-llm")
    peers = sizes.tensor_parallel_size - 1
    if peers and gpu.link_bandwidth > NVLINK:
        own += sizes.term("nvlink") + min(peers, PEERS) * sizes.term("peer")
    return own


def _stage(
    model: ModelSpec, gpu: Gpu, sizes: EngineSizes, parts: Loaded, layers: Sequence[int]
) -> MemoryBudget:
    """Get the budget of the last of some stages, of `layers` each: the first has the embedding.

    The last of all has the lm_head, the sampler and what drafts, whose layers want a table of
    tokens there (`maybe_share_target_embed`, 0.33). All have encoders, and some models' classes
    both tables (read in vLLM 0.32).
    """
    cache, gpus = sizes.cache(model), sizes.tensor_parallel_size
    first, last = len(layers) == 1, len(layers) == sizes.pipeline_parallel_size
    share, before = layers[-1] / model.num_hidden_layers, sum(layers[:-1])
    has_table = first or model.embeds_on_each
    head = parts.head or parts.embedding * (not has_table)
    weights = sum(parts.layers[before : sum(layers)]) + parts.rest + parts.tower
    weights += parts.embedding * has_table + head * (last or model.head_on_each)
    encoder, outputs = _encoder_bytes(model, sizes)
    left_out = sizes.enforce_eager or (gpu.is_amd and not sizes.term("graphs of AMD's"))
    graph = 0 if left_out else sizes.term("expert_graph" if model.num_experts else "dense_graph")
    each = model.layer_bytes(max(model.cached_layers), cache, gpus)
    more = sizes.more_layers(model) * each
    per_token = model.kv_bytes_per_token(cache, gpus) + more
    weights += parts.embedding * (last and more > 0 and not has_table)
    share += more * (last - share) / (per_token or 1.0)  # of what is cached
    layout = kv_layout(model, sizes)
    return MemoryBudget(
        model=model,
        gpu=gpu,
        sizes=sizes,
        weights=int(weights + parts.drafts * last),
        activations=max(encoder, activation_bytes(model, sizes, last)) + outputs,
        context=_context(gpu, sizes),
        graphs=graph * layers[-1],
        kv_bytes_per_token=per_token * share,
        layout=layout._replace(block_bytes=layout.block_bytes * share),
        tower=int(parts.tower),
        drafts=int(parts.drafts * last),
        layers=0 if first and last else layers[-1],
    )


def too_big(budget: MemoryBudget) -> str:
    """Say what is in the way of two blocks, and how much is missing; "": nothing is."""
    sizes, dtype = budget.sizes, budget.model.weight_dtype(budget.sizes.weight_dtype)
    missing = 2 * budget.layout.block_bytes - budget.room
    if missing <= 0:
        return ""
    each = "" if sizes.gpus == 1 else f" on each of {sizes.gpus} GPUs"
    return (
        f"{budget.model.name} in {dtype} does not fit the {budget.gpu.name}: "
        f"{gib(budget.weights)} of weights and {gib(budget.beside + sizes.adapters)} of "
        f"activations{each} exceed {budget.share:g} of {gib(budget.gpu.memory)} "
        f"by {gib(missing)}"
    )


def gib(size: float) -> str:
    """Write bytes as GiB."""
    return f"{size / GIB:.2f} GiB"
