"""What a model weighs and computes, from its Hugging Face config.json alone.

Decoder-only transformers: the Llama, Mistral, Qwen, DeepSeek, GLM, Gemma, Phi, gpt-oss, MiniMax,
Granite and Nemotron families, dense or with a mixture of experts. One token needs 2 FLOPs per
weight it meets; every (query, key) pair of the attention needs 4 more per head dimension, head and
layer. What works on a token's numbers one by one is not counted: which function gates the MLP,
Gemma-2's soft caps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any, NamedTuple

from simulator.models.config_keys import REQUIRED
from simulator.models.dtypes import HALF, bytes_of
from simulator.models.modules import (
    ATTENTION,
    FULL,
    STATES,
    WINDOW,
    LatentAttention,
    LinearAttention,
    Module,
    modules_of,
)
from simulator.models.quantization import DEFAULTS, Quantization, in_one_format
from simulator.models.vision import VisionEncoder
from simulator.util.errors import MappingError, ScenarioError

SMALL = ("norm", "norms", "experts.bias")  # names of no matrix that a token is multiplied with
USUAL_IMAGE = 1024  # tokens: the default of workload.multimodal


def module_bytes(
    module: Module, formats: Quantization | None, width: float, gpus: int = 1, kv_heads: int = 1
) -> float:
    """Bytes of a module on each GPU of a group: as the formats say, else `width` a number."""
    outputs, inputs = module.share(gpus, kv_heads)
    found = None
    if formats is not None and module.quantizes:
        found = formats.of(module.name)
    if found is None:
        return width * module.number * outputs * inputs
    return module.number * found.bytes_of(outputs, inputs)


COUNTED = ("su", "longrope", "llama3", "proportional")
"""Scalings whose files have max_position_embeddings as long as they stretch to."""
LONGROPE, LONGROPE_SINCE = ("su", "longrope"), (0, 11, 1)  # pull request 27431
YARN_COUNTED_SINCE = (0, 30, 0)  # of vLLM; before, yarn stretched the original length


class RopeScaling(NamedTuple):
    """Rotary embeddings stretched to more positions than the model was first trained on.

    A step takes the same time whatever they are; an engine that runs real weights needs them.
    """

    rope_type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 8192
    is_counted: bool = False  # max_position_embeddings are those that it stretches to


@dataclass(frozen=True)
class ModelSpec:
    """The sizes of a decoder-only transformer, under their names in config.json."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int  # of the MLP, or of one expert
    vocab_size: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on the query, key and value projections
    qk_norm: bool = False
    qk_norm_whole: bool = False  # over all heads together
    num_experts: int = 0  # 0: a dense model
    num_experts_per_tok: int = 0
    num_shared_experts: int = 0  # that every token meets, beside the chosen ones
    dense_layers: int = 0  # layers without experts
    dense_intermediate_size: int = 0  # of their MLP
    shared_expert_gate: bool = False
    attention_gate: bool = False  # as wide as the query, which it multiplies behind the attention
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    sliding_window: int = 0  # tokens; 0: none
    chunked: bool = False  # the window is a chunk of the text, as Llama 4's attention_chunk_size
    norms_per_layer: int = 2  # of the hidden size
    gated_mlp: bool = True  # with three matrices, not two
    moe_latent_size: int = 0  # experts work on so many numbers, not on the hidden size
    expert_bias: bool = False
    single_blocks: bool = False  # a layer is attention, MLP or experts (Nemotron-H), not a pair
    full_head_dim: int = 0  # of layers without a window; 0: as the others
    full_kv_heads: int = 0
    kv_shared_layers: int = 0  # the last layers, which read the cache of others
    wide_shared_mlp: bool = False  # their MLPs are twice as wide
    learned_positions: bool = False  # a table of them, with two more (OPT), not rotary embeddings
    per_layer_input: int = 0  # numbers that each layer has of a token in a table of its own
    kinds: tuple[str, ...] = ()  # of each layer; (): all have full attention
    has_mtp: bool = False  # layers that draft, or a family that has some
    dense_drafts: bool = False  # which have no experts (vLLM's ErnieMTP)
    no_angles: bool = False  # no table of them in vLLM (its _TRANSFORMERS_SUPPORTED_MODELS)
    embeds_on_each: bool = False  # pipeline stage, where others have it on the first
    head_on_each: bool = False  # likewise, where others have it on the last
    family: str = ""  # its model_type
    max_position_embeddings: int = 4096
    dtype: str = "bfloat16"  # of the published weights, or of what is not quantized
    pools: bool = False  # a reward or embedding model's: it has no lm_head and samples no token
    no_float16: bool = False  # its numbers overflow there
    checkpoint: Quantization | None = None  # formats of the published weights; None: `dtype`
    unread: str = ""  # what of the config.json is not counted
    draft_vocab_size: int = 0  # tokens that an EAGLE-3 head may draft; 0: all
    rotary_dim: int = 0  # numbers of a head that are turned; 0: all
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    vision: VisionEncoder | None = None  # in front of it
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        wrong = {
            name: f"must be positive, not {getattr(self, name)}"
            for name in (*REQUIRED, "head_dim", "num_key_value_heads")
            if getattr(self, name) < 1
        }
        if not wrong and self.num_attention_heads % self.num_key_value_heads:
            wrong["num_key_value_heads"] = "must divide num_attention_heads"
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            wrong["num_experts_per_tok"] = f"must be from 1 to num_experts ({self.num_experts})"
        if wrong:
            raise MappingError.of(wrong)

    def longest(self, release: tuple[int, int, int], asked: bool = True) -> int:
        """Tokens of a request at most, as a release of vLLM derives them (_get_and_verify_max_len).

        SGLang's get_context_length gives what the newest gives. Where nobody has `asked` for a
        length, those of LongRoPE are the original ones.
        """
        most, scaling = self.max_position_embeddings, self.rope_scaling
        if scaling is None or scaling.is_counted:
            return most
        original = scaling.original_max_position_embeddings
        if not asked and scaling.rope_type in LONGROPE and release >= LONGROPE_SINCE:
            return int(original)
        is_yarn = scaling.rope_type == "yarn"
        if scaling.rope_type in COUNTED or (is_yarn and release >= YARN_COUNTED_SINCE):
            return most
        return int((original if is_yarn else most) * scaling.factor)

    @property
    def quantization(self) -> str:
        """What most matrices are published in, or the experts alone; "": as the rest."""
        return self.checkpoint.word if self.checkpoint else ""

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """What each layer is: full_attention, sliding_attention, linear_attention, ..."""
        return self.kinds or (FULL,) * self.num_hidden_layers

    def head_size(self, kind: str) -> int:
        """Numbers of a head in layers of a kind."""
        return self.full_head_dim if self.full_head_dim and kind == FULL else self.head_dim

    def kv_heads(self, kind: str) -> int:
        """Heads of keys and values in layers of a kind."""
        return (self.full_kv_heads if kind == FULL else 0) or self.num_key_value_heads

    @property
    def output_bytes(self) -> int:
        """Bytes of an encoder token."""
        return int(HALF * self.hidden_size)

    @property
    def largest_image(self) -> int:
        """Tokens of an image at most; without a vision_config, of a usual one."""
        return self.vision.most_tokens if self.vision else USUAL_IMAGE

    @property
    def attention_layers(self) -> int:
        """Layers with a KV cache."""
        return sum(kind in ATTENTION for kind in self.layer_kinds)

    @property
    def state_layers(self) -> int:
        """Layers with linear attention, which keep states."""
        return sum(kind in STATES for kind in self.layer_kinds)

    @property
    def shape(self) -> tuple[object, ...]:
        """What decides the time of a step: all but name, length limit, dtypes, angles, encoder."""
        names = [one.name for one in fields(self)]
        last = names.index("max_position_embeddings")
        return tuple(getattr(self, name) for name in names[1:last])

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """Matrices of all layers, and what is in none; of layers that are alike worked out once."""
        alike: dict[tuple[str, bool, bool], list[Module]] = {}
        found: list[Module] = []
        for at, kind in enumerate(self.layer_kinds):
            caches = at < self.num_hidden_layers - self.kv_shared_layers
            key = (kind, caches, at < self.dense_layers)
            if key not in alike:
                alike[key] = [*layer_modules(self, *key)]
            found += [one._replace(name=f"layers.{at}.{one.name}") for one in alike[key]]
        return tuple(found)

    @cached_property
    def outer(self) -> tuple[Module, ...]:
        """Tables of tokens and positions, the last norm, and lm_head where it is no table."""
        positions = (self.max_position_embeddings + 2) * self.learned_positions
        untied = not (self.tie_word_embeddings or self.pools)
        more = {"untied": untied, "positions": positions}
        return tuple(modules_of(["outer"], vars(self) | more))

    @cached_property
    def head_parameters(self) -> int:
        """Weights of the output projection (lm_head), also where it is the embedding's."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def parameters(self) -> int:
        """All weights."""
        return sum(one.numbers for one in (*self.outer, *self.modules))

    def resolve_dtype(self, dtype: str = "auto") -> str:
        """Return the dtype that vLLM's `auto` stands for: the published, float32 as bfloat16."""
        if dtype != "auto":
            return dtype
        return "bfloat16" if bytes_of(self.dtype) > HALF else self.dtype

    def weight_dtype(self, dtype: str = "auto") -> str:
        """Return the dtype of the layers' weights; 16 bits and `auto` are as they are published."""
        if self.quantization and bytes_of("float16" if dtype == "auto" else dtype) >= HALF:
            return self.quantization
        return self.resolve_dtype(dtype)

    def formats(self, dtype: str = "auto") -> Quantization | None:
        """Return the formats of the weights, as published or for a dtype of fewer bits.

        Raises ValueError, `model: what is not known`, where the checkpoint does not say them.
        """
        word = self.weight_dtype(dtype)
        if word in DEFAULTS:
            own = self.checkpoint
            return own if own and own.word == word else in_one_format(word)
        if self.checkpoint and not self.checkpoint.rules:
            what = "which of its modules are quantized is not said; engine.quantization says it"
            raise ScenarioError("model", f"{self.name}: quantized_layers is empty: {what}")
        return None

    def matrix_bytes(self, experts: float, dtype: str | None = "auto") -> float:
        """Bytes of the matrices of all layers when `experts` of each layer's are counted.

        Of dtype None: how many weights they are.
        """
        shared, one = _matrices(self, dtype)
        return shared + experts * one

    def weight_bytes(self, dtype: str = "auto") -> int:
        """Bytes of all weights of a checkpoint, towers apart."""
        formats, width = self.formats(dtype), self.wide(dtype)
        return int(sum(module_bytes(one, formats, width) for one in (*self.outer, *self.modules)))

    def wide(self, dtype: str = "auto") -> float:
        """Bytes of a number that is not quantized."""
        return max(bytes_of(self.resolve_dtype(dtype)), HALF)

    @property
    def state_bytes(self) -> float:
        """Bytes that a request keeps in the layers with linear attention, whatever its length."""
        return self.state_layers * self.linear.state_bytes(HALF) if self.linear else 0.0

    def cache_dtype(self, dtype: str = "auto") -> str:
        """Return the dtype of the KV cache; `auto` is as the checkpoint says, else as the rest."""
        own = self.checkpoint.cache if self.checkpoint and dtype == "auto" else ""
        return own or self.resolve_dtype(dtype)

    def layer_bytes(self, kind: str, dtype: str = "auto", gpus: int = 1) -> float:
        """Bytes of a token on each GPU in the cache of one layer of a kind.

        Heads fewer than GPUs are copied; latents are whole on each.
        """
        width = bytes_of(self.cache_dtype(dtype))
        if self.latent is None:
            return 2 * max(1, self.kv_heads(kind) // gpus) * self.head_size(kind) * width
        index = self.latent.index_head_dim  # keys in fp8, a scale for each 128
        is_narrow = self.latent.index_n_heads and width < HALF  # fp8_ds_mla: rope in 16 bits
        own = 656 if is_narrow else self.latent.cached * width
        return own + index + 4 * -(-index // 128)

    @cached_property
    def cached_layers(self) -> dict[str, int]:
        """Layers of each kind that have a KV cache of their own."""
        own = self.layer_kinds[: self.num_hidden_layers - self.kv_shared_layers]
        return {kind: own.count(kind) for kind in ATTENTION if kind in own}

    def kv_bytes_per_token(self, dtype: str = "auto", gpus: int = 1) -> float:
        """Bytes that the keys and values of one token take on each GPU, all layers together."""
        layers = self.cached_layers.items()
        return sum(n * self.layer_bytes(kind, dtype, gpus) for kind, n in layers)

    def check_parallel(self, tensor_parallel_size: int) -> None:
        """Raise ValueError where the heads cannot be shared out evenly, as vLLM does."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        size, key = tensor_parallel_size, "engine.tensor_parallel_size"
        if heads % size:
            what = f"does not divide the {heads} attention heads of {self.name}"
            raise ScenarioError(key, f"{size} {what} (gpu.count, given alone, sets it)", "model")
        if kv_heads % size and size % kv_heads:
            what = f"{size} and the {kv_heads} KV heads of {self.name}: one must divide the other"
            raise ScenarioError(key, what, "model")

    def split_layers(self, pipeline_parallel_size: int) -> list[int]:
        """Share the layers out to stages as vLLM does (`get_pp_indices`, 0.33), the first first.

        What is left over goes to the last stages but one, from there towards the first. Raises
        ValueError where there are more stages than layers.
        """
        layers, stages = self.num_hidden_layers, pipeline_parallel_size
        if stages > layers:
            what = f"must be at most the {layers} layers of {self.name}, not {stages}"
            raise ScenarioError("engine.pipeline_parallel_size", what)
        each, left = divmod(layers, stages)
        return [each + (stages - 1 - left <= at < stages - 1) for at in range(stages)]

    @cached_property
    def flops_per_token(self) -> int:
        """FLOPs that a token needs in the layers' matrices and lm_head; attention comes on top."""
        matrices = int(self.matrix_bytes(self.num_experts_per_tok, None))
        # Beside the projections three products with each layer's state.
        states = 6 * self.state_layers * self.linear.matrices if self.linear else 0
        return 2 * (matrices + self.head_parameters) + states

    @cached_property
    def attention_flops_per_pair(self) -> int:
        """FLOPs of each (query, key) pair of tokens: scores and weighted sum, all layers."""
        each = 4 * self.head_dim
        if (own := self.latent) is not None:  # keys and values are spelt out
            each = 2 * (own.qk_nope_head_dim + own.qk_rope_head_dim + own.v_head_dim)
        return self.attention_layers * self.num_attention_heads * each

    @property
    def windowed(self) -> float:
        """Share of the layers with a KV cache that see no further than the sliding window."""
        layers = self.layer_kinds.count(WINDOW) if self.sliding_window else 0
        return layers / self.attention_layers

    @property
    def keeps_window(self) -> bool:
        """Whether a run gives back what has left the window; it does not for chunks."""
        return self.sliding_window > 0 and not self.chunked

    def expected_experts(self, tokens: int) -> float:
        """Experts of a layer that a step of so many tokens needs, if it chooses them evenly."""
        if not self.num_experts:
            return 0.0
        missed = 1.0 - self.num_experts_per_tok / self.num_experts
        return float(self.num_experts * (1.0 - missed**tokens))


@cache
def _matrices(model: ModelSpec, dtype: str | None) -> tuple[float, float]:
    """Bytes of the matrices that all tokens meet, and of an expert of each layer; None: weights."""
    matrices = [one for one in model.modules if not one.name.endswith(SMALL)]
    formats, width = (model.formats(dtype), model.wide(dtype)) if dtype else (None, 1.0)
    sizes = [module_bytes(one, formats, width) for one in matrices]
    chosen = sum(size for one, size in zip(matrices, sizes, strict=True) if one.is_expert)
    return sum(sizes) - chosen, chosen / max(model.num_experts, 1)


def layer_modules(model: ModelSpec, kind: str, caches: bool, dense: bool) -> Iterator[Module]:
    """Yield the modules of a layer of a kind; `caches`: it has a KV cache of its own."""
    latent, linear = model.latent, model.linear
    inner = model.dense_intermediate_size if dense else model.intermediate_size
    sizes: dict[str, Any] = {
        "heads": model.num_attention_heads,
        "kv_heads": model.kv_heads(kind) * caches,
        "head": model.head_size(kind),
        "qk_norm_whole": model.qk_norm and model.qk_norm_whole,
        "norm_of_head": model.qk_norm and not model.qk_norm_whole,
        "inner": inner * (1 if caches or not model.wide_shared_mlp else 2),
        "expert_inputs": model.moe_latent_size or model.hidden_size,
    }
    part = "attention" if kind in ATTENTION else kind
    if latent is not None and kind in ATTENTION:
        part, sizes = "latent", sizes | latent._asdict() | {"whole_query": not latent.q_lora_rank}
    if linear is not None:
        sizes |= linear._asdict() | {"values": linear.values, "convolved": linear.convolved}
    parts = [part, "block", "" if kind == "mamba" else "norms"]
    if kind in ("moe", "mlp") or not model.single_blocks:
        plain = dense or not model.num_experts or kind == "mlp"
        parts.append("dense" if plain else "experts")
    return modules_of(parts, vars(model) | sizes)
