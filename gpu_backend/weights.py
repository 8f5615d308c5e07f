"""A model's weights, fused as the engine multiplies them: random, or read from safetensors.

Random weights are made on the device, with the spread that keeps activations of order one; zeros
would be faster than real weights on a GPU, whose power depends on the bits it flips.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from simulator.models.spec import ModelSpec
from simulator.util.errors import HeadwayError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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


class Source(Protocol):
    """Where tensors come from; their names are those of a Hugging Face checkpoint."""

    def matrix(self, rows: dict[str, int], columns: int) -> Tensor:
        """Return matrices of so many rows each, one under the other."""

    def bias(self, sizes: dict[str, int]) -> Tensor:
        """Return vectors of these sizes, one behind the other."""

    def norm(self, name: str, size: int) -> Tensor:
        """Return the weight of a norm."""


def random_weights(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Weights:
    """Draw matrices from N(0, 1 / fan-in); norms are ones, biases zeros."""
    return _load(spec, _Random(device, dtype, generator))


def read_weights(
    spec: ModelSpec, folder: Path, device: torch.device, dtype: torch.dtype
) -> Weights:
    """Read the *.safetensors of a Hugging Face checkpoint of the Llama or Qwen family.

    Raises HeadwayError for a file that is damaged, and for tensors that are missing or do not
    have the shape that the config says, all at once.
    """
    checkpoint = _Checkpoint(folder, device, dtype)
    weights = _load(spec, checkpoint)
    if checkpoint.wrong:
        raise HeadwayError(f"{folder}: {message}" for message in checkpoint.wrong)
    return weights


def _load(spec: ModelSpec, source: Source) -> Weights:
    hidden, vocab = spec.hidden_size, spec.vocab_size
    embedding = source.matrix({"model.embed_tokens.weight": vocab}, hidden)
    layers = [_layer(spec, source, number) for number in range(spec.num_hidden_layers)]
    norm, head = source.norm("model.norm.weight", hidden), embedding
    if not spec.tie_word_embeddings:
        head = source.matrix({"lm_head.weight": vocab}, hidden)
    return Weights(embedding, layers, norm, head)


def _layer(spec: ModelSpec, source: Source, number: int) -> LayerWeights:
    at = f"model.layers.{number}"
    attention, mlp = f"{at}.self_attn", f"{at}.mlp"
    hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.head_dim
    queries, keys = spec.num_attention_heads * width, spec.num_key_value_heads * width
    rows = {f"{attention}.{x}_proj": n for x, n in {"q": queries, "k": keys, "v": keys}.items()}
    bias = None
    if spec.attention_bias:
        bias = source.bias({f"{name}.bias": n for name, n in rows.items()})
    return LayerWeights(
        input_norm=source.norm(f"{at}.input_layernorm.weight", hidden),
        qkv=source.matrix({f"{name}.weight": n for name, n in rows.items()}, hidden),
        qkv_bias=bias,
        q_norm=source.norm(f"{attention}.q_norm.weight", width) if spec.qk_norm else None,
        k_norm=source.norm(f"{attention}.k_norm.weight", width) if spec.qk_norm else None,
        o=source.matrix({f"{attention}.o_proj.weight": hidden}, queries),
        post_norm=source.norm(f"{at}.post_attention_layernorm.weight", hidden),
        gate_up=source.matrix(
            {f"{mlp}.gate_proj.weight": inner, f"{mlp}.up_proj.weight": inner}, hidden
        ),
        down=source.matrix({f"{mlp}.down_proj.weight": hidden}, inner),
    )


@dataclass(frozen=True)
class _Random:
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def matrix(self, rows: dict[str, int], columns: int) -> Tensor:
        empty = torch.empty(sum(rows.values()), columns, device=self.device, dtype=self.dtype)
        return empty.normal_(std=columns**-0.5, generator=self.generator)

    def bias(self, sizes: dict[str, int]) -> Tensor:
        return torch.zeros(sum(sizes.values()), device=self.device, dtype=self.dtype)

    def norm(self, name: str, size: int) -> Tensor:
        return torch.ones(size, device=self.device, dtype=self.dtype)


class _Checkpoint:
    """All tensors of the *.safetensors files in a folder, read when asked for.

    A file is a length, a JSON header with names, types, shapes and offsets, and the numbers
    (https://github.com/huggingface/safetensors, format section). The package of that name would
    spare a third of this class, and be one more to carry to a GPU machine without an index.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise HeadwayError(f"{folder}: has no *.safetensors file")
        self.device = device
        self.dtype = dtype
        self.wrong: list[str] = []
        self._places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in files:
            data, header = _header(path)
            for name, entry in header.items():
                if name != "__metadata__":
                    self._places[name] = (path, data, entry)

    def matrix(self, rows: dict[str, int], columns: int) -> Tensor:
        return self._fused({name: (n, columns) for name, n in rows.items()})

    def bias(self, sizes: dict[str, int]) -> Tensor:
        return self._fused({name: (n,) for name, n in sizes.items()})

    def norm(self, name: str, size: int) -> Tensor:
        return self._tensor(name, (size,))

    def _fused(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        tensors = [self._tensor(name, shape) for name, shape in shapes.items()]
        return torch.cat(tensors) if len(tensors) > 1 and not self.wrong else tensors[0]

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor on the device; an empty one, and a complaint, where it is not as said."""
        if name not in self._places:
            self.wrong.append(f"{name}: missing")
        elif (found := self._places[name][2]["shape"]) != [*shape]:
            self.wrong.append(f"{name}: has shape {found}, the config says {[*shape]}")
        else:
            return self._read(name).to(self.device, self.dtype)
        return torch.empty(0, device=self.device, dtype=self.dtype)

    def _read(self, name: str) -> Tensor:
        path, data, entry = self._places[name]
        dtype = DTYPES.get(str(entry["dtype"]))
        if dtype is None:
            raise HeadwayError(f"{path}: {name}: dtype {entry['dtype']} is none of {[*DTYPES]}")
        first, last = entry["data_offsets"]
        if data + last > path.stat().st_size:
            raise HeadwayError(f"{path}: is cut off: {name} ends beyond the end of the file")
        numbers = np.fromfile(path, np.uint8, last - first, offset=data + first)
        return torch.from_numpy(numbers).view(dtype).view(entry["shape"])


def _header(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Read where the numbers begin, and the header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise HeadwayError(f"{path}: is no safetensors file, or is cut off")
        try:
            header = json.loads(file.read(size))
        except ValueError:
            raise HeadwayError(f"{path}: is no safetensors file: its header is no JSON") from None
    if not isinstance(header, dict):
        raise HeadwayError(f"{path}: is no safetensors file: its header is no JSON object")
    return 8 + size, header
