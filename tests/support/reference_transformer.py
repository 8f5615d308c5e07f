"""A forward pass as plain as it can be: no cache, no blocks, no batch, one head at a time.

The yardstick for the engine, whose weights it uses; importing it needs torch.
"""

import numpy as np
import torch
from torch import Tensor

from gpu_backend.engine import Engine
from simulator.models.spec import ModelSpec


def likeliest(engine: Engine, text: list[int]) -> list[int]:
    """Return the token that is likeliest after each one of a text and those before it."""
    return logits(engine, text).argmax(-1).tolist()


def logits(engine: Engine, text: list[int]) -> Tensor:
    """Return all logits [t, V] of a text."""
    spec, weights = engine.spec, engine.model.weights
    queries, keys, width = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    x = weights.embedding[text]
    angles = torch.outer(torch.arange(len(text)).double(), inverse_frequencies(spec))
    later = torch.ones(len(text), len(text)).triu(1).bool()
    for layer in weights.layers:
        h = norm(x, layer.input_norm, spec)
        heads = (h @ layer.qkv.T).view(len(text), -1, width)
        if layer.qkv_bias is not None:
            heads = heads + layer.qkv_bias.view(-1, width)
        seen = []
        for head in range(queries):
            own = queries + head // (queries // keys)
            q = rotate(norm(heads[:, head], layer.q_norm, spec), angles)
            k = rotate(norm(heads[:, own], layer.k_norm, spec), angles)
            scores = (q @ k.T / width**0.5).masked_fill(later, -torch.inf)
            seen.append(scores.softmax(-1) @ heads[:, own + keys])
        x = x + torch.cat(seen, -1) @ layer.o.T
        h = norm(x, layer.post_norm, spec)
        gate, up = (h @ layer.gate_up.T).split(spec.intermediate_size, -1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ layer.down.T
    return norm(x, weights.norm, spec) @ weights.head.T


def norm(x: Tensor, weight: Tensor | None, spec: ModelSpec) -> Tensor:
    if weight is None:
        return x
    return x / (x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate by complex multiplication."""
    half = x.shape[-1] // 2
    rotated = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angles).to(torch.complex64)
    return torch.cat((rotated.real, rotated.imag), -1)


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position of each pair, as in the paper of Llama 3.1's release."""
    found = []
    for pair in range(spec.head_dim // 2):
        speed = spec.rope_theta ** (-2 * pair / spec.head_dim)
        if (s := spec.rope_scaling) is not None:
            wave = 2 * np.pi / speed
            if wave > s.original_max_position_embeddings / s.low_freq_factor:
                speed /= s.factor
            elif wave > s.original_max_position_embeddings / s.high_freq_factor:
                smooth = s.original_max_position_embeddings / wave - s.low_freq_factor
                smooth /= s.high_freq_factor - s.low_freq_factor
                speed = (1 - smooth) * speed / s.factor + smooth * speed
        found.append(speed)
    return torch.tensor(found, dtype=torch.float64)
