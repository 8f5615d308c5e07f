"""A model's weights, fused as the engine multiplies them: random, or read from safetensors.

Random weights are made on the device, with the spread that keeps activations of order one; zeros
would be faster than real weights on a GPU, whose power depends on the bits it flips.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpu_backend.safetensors import Checkpoint
from simulator.models.spec import ModelSpec
from simulator.util.errors import HeadwayError


@dataclass(slots=True)
class LayerWeights:
    """One layer; H is the hidden size, I the inner one of the MLP."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(n_q + 2 n_kv) D, H]: queries, keys, values
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Tensor  # [H, n_q D]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]: gate, then up
    down: Tensor  # [H, I]


@dataclass(slots=True)
class Weights:
    """All weights; `head` is `embedding` itself where the two are tied."""

    embedding: Tensor  # [V, H]
    layers: list[LayerWeights]
    norm: Tensor  # [H]
    head: Tensor  # [V, H]


def random_weights(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Weights:
    """Draw matrices from N(0, 1 / fan-in); norms are ones, biases zeros."""
    hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.head_dim
    queries, keys = spec.num_attention_heads * width, spec.num_key_value_heads * width

    def matrix(rows: int, columns: int) -> Tensor:
        empty = torch.empty(rows, columns, device=device, dtype=dtype)
        return empty.normal_(std=columns**-0.5, generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, device=device, dtype=dtype)

    def layer() -> LayerWeights:
        rows = queries + 2 * keys
        bias = torch.zeros(rows, device=device, dtype=dtype) if spec.attention_bias else None
        return LayerWeights(
            input_norm=ones(hidden),
            qkv=matrix(rows, hidden),
            qkv_bias=bias,
            q_norm=ones(width) if spec.qk_norm else None,
            k_norm=ones(width) if spec.qk_norm else None,
            o=matrix(hidden, queries),
            post_norm=ones(hidden),
            gate_up=matrix(2 * inner, hidden),
            down=matrix(hidden, inner),
        )

    embedding = matrix(spec.vocab_size, hidden)
    layers = [layer() for _ in range(spec.num_hidden_layers)]
    head = embedding if spec.tie_word_embeddings else matrix(spec.vocab_size, hidden)
    return Weights(embedding, layers, ones(hidden), head)


def read_weights(
    spec: ModelSpec, folder: Path, device: torch.device, dtype: torch.dtype
) -> Weights:
    """Read the *.safetensors of a Hugging Face checkpoint of the Llama or Qwen family.

    Raises HeadwayError for a file that is damaged, and for tensors that are missing or do not
    have the shape that the config says, all at once.
    """
    reader = _Reader(spec, Checkpoint(folder), device, dtype)
    hidden, vocab = spec.hidden_size, spec.vocab_size
    embedding = reader.take("model.embed_tokens.weight", vocab, hidden)
    layers = [reader.layer(number) for number in range(spec.num_hidden_layers)]
    norm = reader.take("model.norm.weight", hidden)
    head = embedding
    if not spec.tie_word_embeddings:
        head = reader.take("lm_head.weight", vocab, hidden)
    if reader.wrong:
        raise HeadwayError(f"{folder}: {message}" for message in reader.wrong)
    return Weights(embedding, layers, norm, head)


class _Reader:
    """Takes tensors by name and writes down what is wrong with them."""

    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self.wrong: list[str] = []

    def take(self, name: str, *shape: int) -> Tensor:
        """Give a tensor on the device; an empty one, and a complaint, where it is not as said."""
        found = self.checkpoint.shape(name)
        if found is None:
            self.wrong.append(f"{name}: missing")
        elif found != shape:
            self.wrong.append(f"{name}: has shape {list(found)}, the config says {list(shape)}")
        else:
            return self.checkpoint.read(name).to(self.device, self.dtype)
        return torch.empty(0, device=self.device, dtype=self.dtype)

    def fused(self, parts: Iterator[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Put several tensors into one, row after row."""
        tensors = [self.take(name, *shape) for name, shape in parts]
        return torch.cat(tensors) if not self.wrong else tensors[0]

    def layer(self, number: int) -> LayerWeights:
        spec, at = self.spec, f"model.layers.{number}"
        hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.head_dim
        queries, keys = spec.num_attention_heads * width, spec.num_key_value_heads * width
        rows = {"q": queries, "k": keys, "v": keys}
        own = f"{at}.self_attn"
        bias = None
        if spec.attention_bias:
            bias = self.fused((f"{own}.{x}_proj.bias", (n,)) for x, n in rows.items())
        return LayerWeights(
            input_norm=self.take(f"{at}.input_layernorm.weight", hidden),
            qkv=self.fused((f"{own}.{x}_proj.weight", (n, hidden)) for x, n in rows.items()),
            qkv_bias=bias,
            q_norm=self.take(f"{own}.q_norm.weight", width) if spec.qk_norm else None,
            k_norm=self.take(f"{own}.k_norm.weight", width) if spec.qk_norm else None,
            o=self.take(f"{own}.o_proj.weight", hidden, queries),
            post_norm=self.take(f"{at}.post_attention_layernorm.weight", hidden),
            gate_up=self.fused(
                (f"{at}.mlp.{x}_proj.weight", (inner, hidden)) for x in ("gate", "up")
            ),
            down=self.take(f"{at}.mlp.down_proj.weight", hidden, inner),
        )
