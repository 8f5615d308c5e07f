"""Attention that keeps no keys and values of heads: latents, and states of fixed size."""

from collections.abc import Iterator
from typing import NamedTuple

from simulator.models.dtypes import bytes_of
from simulator.models.modules import Module


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
    index_n_heads: int = 0  # of DeepSeek-V3.2's indexer; 0: none
    index_head_dim: int = 0

    @property
    def cached(self) -> int:
        """Numbers that a token and layer take in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def index_bytes(self) -> int:
        """Bytes of a token and layer in the indexer's cache: keys in fp8, a scale for each 128."""
        return self.index_head_dim + 4 * -(-self.index_head_dim // 128)

    def unpacked(self, heads: int) -> int:
        """Numbers of a layer that vLLM and SGLang keep in 16 bits beside `kv_b_proj`.

        Both multiply them into queries and outputs of decodes (MLAAttention.W_UK_T and W_UV).
        """
        return self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)

    def modules(self, name: str, hidden: int, heads: int) -> Iterator[Module]:
        """Yield the projections of a layer."""
        width = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        up, rank = heads * (self.qk_nope_head_dim + self.v_head_dim), self.q_lora_rank
        if rank:
            yield Module(f"{name}.q_a_proj", rank, hidden)
            yield Module(f"{name}.q_b_proj", width, rank, "outputs")
        else:
            yield Module(f"{name}.q_proj", width, hidden, "outputs")
        yield Module(f"{name}.kv_a_proj_with_mqa", self.cached, hidden)
        yield Module(f"{name}.kv_b_proj", up, self.kv_lora_rank, "outputs")
        yield Module(f"{name}.o_proj", hidden, heads * self.v_head_dim, "inputs")
        yield Module(f"{name}.norms", 1, self.kv_lora_rank + rank, quantizes=False)
        if self.index_n_heads:
            size = self.index_head_dim
            yield Module(f"{name}.indexer.wq_b", self.index_n_heads * size, rank)
            yield Module(f"{name}.indexer.wk", size, hidden)
            yield Module(
                f"{name}.indexer.weights_proj", self.index_n_heads, hidden, quantizes=False
            )
            yield Module(f"{name}.indexer.norms", 2, size, quantizes=False)

    @property
    def prompt_flops(self) -> int:
        """FLOPs of a head and (query, key) pair where keys and values are spelt out."""
        return 2 * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)

    @property
    def decode_flops(self) -> int:
        """FLOPs of the same where the query is multiplied with the latents themselves."""
        return 2 * (self.cached + self.kv_lora_rank)


class LinearAttention(NamedTuple):
    """Layers that keep a state of fixed size for each request in place of a cache of tokens.

    Gated DeltaNet (Qwen3-Next, 2025; config.json has `linear_` before the names), or Mamba-2
    (Nemotron-H), whose groups are the key heads and whose states are the keys. As vLLM's
    gated_delta_net_state_shape and mamba2_state_shape (0.24): the last inputs of the convolution,
    and a matrix for each value head.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    state_dtype: str = ""  # of the matrices; "": that of the rest
    is_mamba: bool = False

    @property
    def convolved(self) -> int:
        """Width of the queries, keys and values, over which the convolution goes."""
        keys = self.num_key_heads * self.key_head_dim
        return 2 * keys + self.num_value_heads * self.value_head_dim

    def modules(self, head: str, hidden: int) -> Iterator[Module]:
        """Yield a layer's projections of queries, keys, values and gates; convolution; the rest."""
        values, heads = self.num_value_heads * self.value_head_dim, self.num_value_heads
        name = f"{head}.{'mixer' if self.is_mamba else 'linear_attn'}"
        if self.is_mamba:
            yield Module(f"{name}.in_proj", values + self.convolved + heads, hidden, "outputs")
            yield Module(
                f"{name}.norms", 1, hidden + values + 3 * heads + self.convolved, quantizes=False
            )
        else:
            yield Module(f"{name}.in_proj_qkvz", self.convolved + values, hidden, "outputs")
            yield Module(f"{name}.in_proj_ba", 2 * heads, hidden, "outputs", quantizes=False)
            yield Module(f"{name}.norms", 1, 2 * heads + self.value_head_dim, quantizes=False)
        yield Module(f"{name}.out_proj", hidden, values, "inputs")
        kernel = self.conv_kernel_dim
        yield Module(f"{name}.conv1d", self.convolved, kernel, "outputs", quantizes=False)

    @property
    def matrices(self) -> int:
        """Numbers of a layer's state that are in the matrices of the heads."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim

    def state_bytes(self, width: float, ahead: int = 0) -> float:
        """Bytes of a layer's state; `ahead` tokens lengthen what the convolution keeps."""
        convolved = (self.conv_kernel_dim - 1 + ahead) * self.convolved
        matrices = bytes_of(self.state_dtype) if self.state_dtype else width
        return convolved * width + self.matrices * matrices

    @property
    def flops(self) -> int:
        """FLOPs of a token in a layer besides the projections: three products with the state."""
        return 6 * self.matrices
