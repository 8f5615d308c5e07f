"""A model's weights, module by module, under the names that checkpoints have.

The names are without the parts that wrap a language model. Modules that are alike, as a layer's
experts, are one entry with a `number`. From them follow parameters, bytes in a checkpoint's formats
and each GPU's share.
"""

from math import ceil
from typing import Literal, NamedTuple

ATTENTION = FULL, WINDOW = ("full_attention", "sliding_attention")
"""Kinds of layers that have a KV cache."""
STATES = ("linear_attention", "mamba")
"""Kinds that keep a state of fixed size for each request."""

Split = Literal["outputs", "heads", "inputs", "whole"]
"""How GPUs of a tensor-parallel group share a matrix: its rows; those of KV heads, of which one is
whole on each; its columns; not at all."""


class Module(NamedTuple):
    """A matrix of a checkpoint, or what is in none (norms, biases, convolutions): one row."""

    name: str
    outputs: int
    inputs: int
    split: Split = "whole"
    number: int = 1
    quantizes: bool = True

    @property
    def is_small(self) -> bool:
        """Whether it is no matrix that a token is multiplied with."""
        return self.name.endswith(("norm", "norms", "experts.bias"))

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
        if self.split == "outputs":
            return ceil(self.outputs / gpus), self.inputs
        if self.split == "heads":
            return ceil(self.outputs / min(gpus, kv_heads)), self.inputs
        if self.split == "inputs":
            return self.outputs, ceil(self.inputs / gpus)
        return self.outputs, self.inputs
