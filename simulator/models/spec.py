"""What a model weighs and computes, from its Hugging Face config.json alone.

Decoder-only transformers with gated MLPs: the Llama, Mistral, Qwen, DeepSeek, GLM, Gemma, Phi and
gpt-oss families, dense or with a mixture of experts. One token needs 2 FLOPs per weight it meets;
every (query, key) pair of the attention needs 4 more per head dimension, head and layer. What works
on a token's numbers one by one is not counted: which function gates the MLP, Gemma-2's soft caps.
"""

from dataclasses import astuple, dataclass
from functools import cached_property
from typing import NamedTuple

from simulator.models.vision import VisionEncoder

REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
HALF = 2.0  # bytes of fp16 and bf16
BYTES = {
    **dict.fromkeys(("float32", "float", "fp32"), 4.0),
    **dict.fromkeys(("float16", "fp16", "half", "bfloat16", "bf16"), HALF),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 1.0),
    "int4": 0.5,
    "nvfp4": 0.5625,  # with a scale of 8 bits for every 16 numbers
    "mxfp4": 0.53125,  # with one for every 32
}
"""Bytes of one number, by vLLM's words and the short ones."""

EXPERTS_ALONE = {"mxfp4"}
"""Dtypes that quantize the experts and leave attention in 16 bits, as gpt-oss is published."""


def bytes_of(dtype: str) -> float:
    """Return the bytes of one number of a dtype; ValueError for a word that is none."""
    if dtype not in BYTES:
        raise ValueError(f"dtype: {dtype!r} is none of auto, {', '.join(BYTES)}")
    return BYTES[dtype]


class LatentAttention(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, 2024), under the names of config.json.

    The cache holds one vector per token and layer, of `kv_lora_rank` + `qk_rope_head_dim` numbers,
    whatever the heads; so with tensor parallelism every GPU holds all of it (vLLM's
    MLAAttentionSpec, page_size_bytes).
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0  # 0: queries are projected at once

    @property
    def cached(self) -> int:
        """Numbers that a token and layer take in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def parameters(self, hidden: int, heads: int) -> int:
        """Weights of one layer's projections, the norms of the latents left out."""
        width = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        rank = self.q_lora_rank
        query = rank * (hidden + width) if rank else hidden * width
        down = hidden * self.cached
        up = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + down + up + heads * self.v_head_dim * hidden

    @property
    def prompt_flops(self) -> int:
        """FLOPs of a head and (query, key) pair where keys and values are spelt out."""
        return 2 * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)

    @property
    def decode_flops(self) -> int:
        """FLOPs of the same where the query is multiplied with the latents themselves."""
        return 2 * (self.cached + self.kv_lora_rank)


class LinearAttention(NamedTuple):
    """Gated DeltaNet (Qwen3-Next, 2025) in some of the layers; config.json has `linear_` before it.

    A request keeps a state of fixed size in place of a cache. As vLLM's gated_delta_net_state_shape
    (0.24): the last inputs of the convolution, and a matrix for each value head.
    """

    layers: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    @property
    def convolved(self) -> int:
        """Width of the queries, keys and values, over which the convolution goes."""
        keys = self.num_key_heads * self.key_head_dim
        return 2 * keys + self.num_value_heads * self.value_head_dim

    def parameters(self, hidden: int) -> int:
        """Weights of a layer's projections: queries, keys, values, gates; and the convolution."""
        values = self.num_value_heads * self.value_head_dim
        gates = 2 * self.num_value_heads
        return (
            hidden * (self.convolved + 2 * values + gates) + self.convolved * self.conv_kernel_dim
        )

    @property
    def small_parameters(self) -> int:
        """Weights of a layer that are in no matrix: decay and bias of each head, and the norm."""
        return 2 * self.num_value_heads + self.value_head_dim

    @property
    def state(self) -> int:
        """Numbers that a request keeps in a layer."""
        matrices = self.num_value_heads * self.key_head_dim * self.value_head_dim
        return (self.conv_kernel_dim - 1) * self.convolved + matrices

    @property
    def flops(self) -> int:
        """FLOPs of a token in a layer besides the projections: three products with the state."""
        return 6 * self.num_value_heads * self.key_head_dim * self.value_head_dim


class RopeScaling(NamedTuple):
    """Rotary embeddings stretched to more positions than the model was first trained on.

    A step takes the same time whatever they are; an engine that runs real weights needs them.
    """

    rope_type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: float = 8192


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
    windowed_layers: int = 0
    full_first: bool = False  # the first layer has no window
    chunked: bool = False  # the window is a chunk of the text, as Llama 4's attention_chunk_size
    norms_per_layer: int = 2  # of the hidden size
    max_position_embeddings: int = 4096
    dtype: str = "bfloat16"  # of the published weights, or of what is not quantized
    quantization: str = ""  # of the published weights
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    vision: VisionEncoder | None = None  # in front of it

    def __post_init__(self) -> None:
        wrong = [
            f"{name}: must be positive, not {getattr(self, name)}"
            for name in (*REQUIRED, "head_dim", "num_key_value_heads")
            if getattr(self, name) < 1
        ]
        if not wrong and self.num_attention_heads % self.num_key_value_heads:
            wrong.append("num_key_value_heads: must divide num_attention_heads")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            wrong.append(f"num_experts_per_tok: must be from 1 to num_experts ({self.num_experts})")
        if wrong:
            raise ValueError("\n".join(wrong))
        bytes_of(self.dtype)
        bytes_of(self.quantization or self.dtype)

    @property
    def output_bytes(self) -> int:
        """Bytes of an encoder token."""
        return int(HALF * self.hidden_size)

    @property
    def largest_image(self) -> int:
        """Tokens of an image at most; 0: nobody knows."""
        return self.vision.most_tokens if self.vision else 0

    @property
    def attention_layers(self) -> int:
        """Layers with a KV cache."""
        return self.num_hidden_layers - (self.linear.layers if self.linear else 0)

    @property
    def shape(self) -> tuple[object, ...]:
        """What decides the time of a step: all but name, length limit, dtypes, angles, encoder."""
        return astuple(self)[1:-7]

    @cached_property
    def attention_parameters(self) -> int:
        """Weights of the projections of the attention of a layer that has a KV cache."""
        if self.latent is not None:
            return self.latent.parameters(self.hidden_size, self.num_attention_heads)
        query = self.num_attention_heads * self.head_dim
        key = self.num_key_value_heads * self.head_dim
        biases = self.attention_bias * (query + 2 * key)
        return self.hidden_size * ((2 + self.attention_gate) * query + 2 * key) + biases

    @cached_property
    def expert_parameters(self) -> int:
        """Weights of one expert of one layer, or of its whole MLP in a dense model."""
        return 3 * self.hidden_size * self.intermediate_size

    def linear_parameters(self, experts: float) -> float:
        """Weights in the matrices of all layers when `experts` of each layer's are counted."""
        layers, dense = self.num_hidden_layers, self.dense_layers
        router = self.hidden_size * (self.num_experts + self.shared_expert_gate)
        met = experts + self.num_shared_experts if self.num_experts else 1
        mlp = (layers - dense) * (router + met * self.expert_parameters)
        mlp += dense * 3 * self.hidden_size * self.dense_intermediate_size
        linear = self.linear
        states = linear.layers * linear.parameters(self.hidden_size) if linear else 0
        return self.attention_layers * self.attention_parameters + states + mlp

    @cached_property
    def head_parameters(self) -> int:
        """Weights of the output projection (lm_head), also where it is the embedding's."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def _half_precision_parameters(self) -> int:
        """What quantization leaves alone: embedding, lm_head and norms."""
        norms = 2 * self.head_dim * self.qk_norm
        if self.latent is not None:
            norms += self.latent.kv_lora_rank + self.latent.q_lora_rank
        norms *= self.attention_layers
        norms += self.norms_per_layer * self.hidden_size * self.num_hidden_layers
        if self.linear is not None:
            norms += self.linear.layers * self.linear.small_parameters
        tables = 1 if self.tie_word_embeddings else 2
        return tables * self.head_parameters + norms + self.hidden_size

    @cached_property
    def parameters(self) -> int:
        """All weights."""
        return self._half_precision_parameters + int(self.linear_parameters(self.num_experts))

    def resolve_dtype(self, dtype: str = "auto") -> str:
        """Return the dtype that vLLM's `auto` stands for: the published one, float32 as float16."""
        if dtype != "auto":
            return dtype
        return "float16" if bytes_of(self.dtype) > HALF else self.dtype

    def weight_dtype(self, dtype: str = "auto") -> str:
        """Return the dtype of the layers' weights; `auto` is as they are published."""
        return (
            self.quantization
            if dtype == "auto" and self.quantization
            else self.resolve_dtype(dtype)
        )

    def matrix_bytes(self, experts: float, dtype: str = "auto") -> float:
        """Bytes of the matrices of all layers when `experts` of each layer's are counted."""
        weights = self.weight_dtype(dtype)
        width = bytes_of(weights)
        if weights not in EXPERTS_ALONE:
            return width * self.linear_parameters(experts)
        others = self.linear_parameters(0)
        return HALF * others + width * (self.linear_parameters(experts) - others)

    def weight_bytes(self, dtype: str = "auto") -> int:
        """Bytes of all weights.

        fp8, int8, int4 and nvfp4 are those of the layers' matrices, mxfp4 of the experts alone;
        embedding, lm_head and norms stay at 2 bytes, as in vLLM. The scales of fp8, int8 and int4
        (1 to 4 % more) are left out.
        """
        width = max(bytes_of(self.weight_dtype(dtype)), HALF)
        rest = width * self._half_precision_parameters
        return int(rest + self.matrix_bytes(self.num_experts, dtype))

    def expert_bytes(self, dtype: str = "auto") -> float:
        """Bytes of all experts that tokens choose among."""
        return self.matrix_bytes(self.num_experts, dtype) - self.matrix_bytes(0, dtype)

    def state_bytes(self, dtype: str = "auto") -> float:
        """Bytes that a request keeps in the layers with linear attention, whatever its length."""
        if self.linear is None:
            return 0.0
        return self.linear.layers * self.linear.state * bytes_of(self.resolve_dtype(dtype))

    def kv_bytes_per_token(self, dtype: str = "auto") -> float:
        """Bytes that the keys and values of one token take in the cache, all layers together."""
        numbers = 2 * self.num_key_value_heads * self.head_dim
        if self.latent is not None:
            numbers = self.latent.cached
        return self.attention_layers * numbers * bytes_of(self.resolve_dtype(dtype))

    def kv_share(self, tensor_parallel_size: int) -> float:
        """Share of the KV cache that each GPU holds; heads fewer than GPUs are copied."""
        if self.latent is not None:
            return 1.0
        held = max(1, self.num_key_value_heads // tensor_parallel_size)
        return held / self.num_key_value_heads

    def check_parallel(self, tensor_parallel_size: int) -> None:
        """Raise ValueError where the heads cannot be shared out evenly, as vLLM does."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        size = tensor_parallel_size
        if size < 1:
            raise ValueError(f"engine.tensor_parallel_size: must be at least 1, not {size}")
        if heads % size:
            raise ValueError(
                f"engine.tensor_parallel_size: {size} does not divide the {heads} attention heads "
                f"of {self.name} (gpu.count, given alone, sets it)"
            )
        if kv_heads % size and size % kv_heads:
            raise ValueError(
                f"engine.tensor_parallel_size: {size} and the {kv_heads} KV heads of {self.name}: "
                "one must divide the other"
            )

    def split_layers(self, pipeline_parallel_size: int) -> list[int]:
        """Share the layers out to stages as vLLM does (`get_pp_indices`, 0.33), the first first.

        What is left over goes to the last stages but one, from there towards the first. Raises
        ValueError where there are more stages than layers.
        """
        layers, stages = self.num_hidden_layers, pipeline_parallel_size
        if stages > layers:
            raise ValueError(
                f"engine.pipeline_parallel_size: must be at most the {layers} layers of "
                f"{self.name}, not {stages}"
            )
        each, left = divmod(layers, stages)
        return [each + (stages - 1 - left <= at < stages - 1) for at in range(stages)]

    @cached_property
    def flops_per_token(self) -> int:
        """FLOPs that a token needs in the layers' matrices and lm_head; attention comes on top."""
        matrices = int(self.linear_parameters(self.num_experts_per_tok))
        states = self.linear.layers * self.linear.flops if self.linear else 0
        return 2 * (matrices + self.head_parameters) + states

    @cached_property
    def attention_flops_per_pair(self) -> int:
        """FLOPs of each (query, key) pair of tokens: scores and weighted sum, all layers."""
        each = 4 * self.head_dim if self.latent is None else self.latent.prompt_flops
        return self.attention_layers * self.num_attention_heads * each

    @property
    def windowed(self) -> float:
        """Share of the layers with a KV cache that see no further than the sliding window."""
        return self.windowed_layers / self.attention_layers

    @property
    def keeps_window(self) -> bool:
        """Whether vLLM's hybrid KV cache manager gives back what has left the window.

        It does not for chunks (VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE, false).
        """
        return self.sliding_window > 0 and not self.chunked

    def expected_experts(self, tokens: int) -> float:
        """Experts of a layer that a step of so many tokens needs, if it chooses them evenly."""
        if not self.num_experts:
            return 0.0
        missed = 1.0 - self.num_experts_per_tok / self.num_experts
        return float(self.num_experts * (1.0 - missed**tokens))
