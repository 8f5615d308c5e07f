"""A decoder-only transformer of the Llama and Qwen3 families: RMSNorm, rotary embedding, grouped
query attention, SwiGLU, and greedy sampling at its end."""

from math import pi
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gpu_backend.input_batch import InputBatch
from gpu_backend.weights import LayerWeights, Weights
from simulator.models.spec import ModelSpec


class Backend(Protocol):
    """What a layer does between its matrix products."""

    def add_norm(self, delta: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Add `delta` to the residual stream `x`; return the sum's RMSNorm and the sum."""

    def attend(self, number: int, layer: LayerWeights, qkv: Tensor, batch: InputBatch) -> Tensor:
        """Store the new keys and values of layer `number` and attend over the blocks, causally.

        `qkv` is [T, (n_q + 2 n_kv) D] as it comes out of the product: the heads of q and k are
        first normalised (where the layer has norms) and rotated. Returns [T, n_q D].
        """

    def act(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half times the second half."""


def rotary_table(spec: ModelSpec, positions: int, device: torch.device) -> Tensor:
    """Make the table of rotations: float32 [positions, D], cosines, then sines.

    With `rope_scaling` of type llama3, frequencies whose wavelength exceeds the original context
    are slowed down by `factor`, short ones kept, those between blended (Llama 3.1).
    """
    half = torch.arange(0, spec.head_dim, 2, device=device, dtype=torch.float64)
    speed = spec.rope_theta ** (-half / spec.head_dim)
    scaling = spec.rope_scaling
    if scaling is not None and scaling.rope_type == "linear":
        speed = speed / scaling.factor
    elif scaling is not None:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = scaling.original_max_position_embeddings * speed / (2 * pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        speed = speed * (keep + (1 - keep) / scaling.factor)
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float64), speed)
    return torch.cat((angles.cos(), angles.sin()), -1).float()


class Transformer:
    """The forward pass from a batch's token ids to the next tokens."""

    def __init__(self, spec: ModelSpec, weights: Weights, backend: Backend) -> None:
        self.spec = spec
        self.weights = weights
        self.backend = backend

    def hidden(self, batch: InputBatch) -> tuple[Tensor, Tensor]:
        """Run all layers: [T, H] of the last layer's output, and of the stream it adds to."""
        backend = self.backend
        delta = functional.embedding(batch.ids, self.weights.embedding)
        x: Tensor | None = None
        for number, layer in enumerate(self.weights.layers):
            h, x = backend.add_norm(delta, x, layer.input_norm)
            qkv = functional.linear(h, layer.qkv, layer.qkv_bias)
            h = functional.linear(backend.attend(number, layer, qkv, batch), layer.o)
            h, x = backend.add_norm(h, x, layer.post_norm)
            delta = functional.linear(backend.act(functional.linear(h, layer.gate_up)), layer.down)
        assert x is not None
        return delta, x

    def logits(self, batch: InputBatch) -> Tensor:
        """Run the model; give the logits [m, V] after the tokens `batch.emits`."""
        return self.head(*self.hidden(batch), batch)

    def head(self, delta: Tensor, x: Tensor, batch: InputBatch) -> Tensor:
        """Return the logits [m, V] after the tokens `batch.emits`, of what `hidden` gave."""
        if len(batch.emits) != len(x):
            delta = delta.index_select(0, batch.emits)
            x = x.index_select(0, batch.emits)
        h, _ = self.backend.add_norm(delta, x, self.weights.norm)
        return functional.linear(h, self.weights.head)

    def sample(self, batch: InputBatch) -> Tensor:
        """Run the model; give the likeliest next tokens, int64 [m]."""
        return self.next_tokens(*self.hidden(batch), batch)

    def next_tokens(self, delta: Tensor, x: Tensor, batch: InputBatch) -> Tensor:
        """Return the likeliest next tokens, int64 [m], of what `hidden` gave."""
        if not len(batch.emits):
            return batch.emits
        return self.head(delta, x, batch).argmax(-1)
