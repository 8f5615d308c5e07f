"""A model's weights, module by module, under the names that checkpoints have; kinds of attention.

The names are without the parts that wrap a language model. Modules that are alike, as a layer's
experts, are one entry with a `number`. From them follow parameters, bytes in a checkpoint's formats
and each GPU's share. `modules.csv` has a line a module: which part of a model has it, and its sizes
as sums of products of whole numbers and of what ModelSpec, its attention or `layer_modules` of
`spec.py` names. A module with a size of 0 is none.
"""

from collections.abc import Collection, Iterator, Mapping
from math import ceil, prod
from typing import Any, NamedTuple

from simulator.models.dtypes import bytes_of
from simulator.util.files import read_table

ATTENTION = FULL, WINDOW = ("full_attention", "sliding_attention")
"""Kinds of layers that have a KV cache."""
STATES = ("linear_attention", "mamba")
"""Kinds that keep a state of fixed size for each request."""


class Module(NamedTuple):
    """A matrix of a checkpoint, or what is in none (norms, biases, convolutions): one row.

    `split` is how GPUs of a tensor-parallel group share it: `outputs`, its rows; `heads`, those of
    KV heads, of which one is whole on each; `inputs`, its columns; `whole`: not at all.
    """

    name: str
    outputs: int
    inputs: int
    split: str = "whole"
    number: int = 1
    quantizes: bool = True

    @property
    def is_expert(self) -> bool:
        """Whether a token meets it if the router chooses it."""
        return ".experts." in self.name

    @property
    def numbers(self) -> int:
        """Weights of all that are alike."""
        return self.number * self.outputs * self.inputs

    def share(self, gpus: int, kv_heads: int) -> tuple[int, int]:
        """Return the outputs and inputs that each GPU of a group has of it."""
        rows = {"outputs": gpus, "heads": min(gpus, kv_heads)}.get(self.split, 1)
        columns = gpus if self.split == "inputs" else 1
        return ceil(self.outputs / rows), ceil(self.inputs / columns)


ROWS, FORMULAS = read_table(__file__, "modules.csv"), ("outputs", "inputs", "number")


def _evaluate(formula: str, sizes: Mapping[str, Any]) -> int:
    """Work out a sum of products; KeyError for a name that there is no size of."""
    terms = [term.split("*") for term in formula.split("+")]
    return sum(prod(int(n) if n.isdigit() else sizes[n] for n in term) for term in terms)


def modules_of(parts: Collection[str], sizes: Mapping[str, Any]) -> Iterator[Module]:
    """Yield the modules of parts of a model that has these sizes."""
    for row in ROWS:
        if row["of"] not in parts:
            continue
        outputs, inputs, number = (_evaluate(row[key], sizes) for key in FORMULAS)
        if outputs * inputs * number:
            split = row["split"]
            if split == "groups":  # of Mamba-2's heads: a single one is whole on each GPU
                split = "whole" if sizes["num_key_heads"] == 1 else "outputs"
            yield Module(row["name"], outputs, inputs, split, number, quantizes=not row["wide"])


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
        return 2 * self.num_key_heads * self.key_head_dim + self.values

    @property
    def values(self) -> int:
        """Numbers of the values of a token."""
        return self.num_value_heads * self.value_head_dim

    @property
    def matrices(self) -> int:
        """Numbers of a layer's state that are in the matrices of the heads."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim

    def state_bytes(self, width: float, ahead: int = 0) -> float:
        """Bytes of a layer's state; `ahead` tokens lengthen what the convolution keeps."""
        convolved = (self.conv_kernel_dim - 1 + ahead) * self.convolved
        matrices = bytes_of(self.state_dtype) if self.state_dtype else width
        return convolved * width + self.matrices * matrices
