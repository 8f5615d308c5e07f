"""A layer's attention and activation in plain torch: the only backend on CPU, and the yardstick
everywhere.

Attention first writes the new keys and values of *all* sequences into their blocks and then reads
everything from the blocks: a sequence may share a block that another one fills in the same step.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpu_backend.input_batch import InputBatch
from gpu_backend.kv_cache import KVCache
from gpu_backend.weights import LayerWeights
from simulator.models.spec import ModelSpec


class TorchBackend:
    """Gathers each sequence's blocks and attends with torch's SDPA, one sequence at a time.

    Padding the batch to one length instead would cost batch size times the longest context.
    """

    def __init__(self, spec: ModelSpec, cache: KVCache, rotary: Tensor) -> None:
        self.spec = spec
        self.cache = cache
        self.rotary = rotary  # [positions, D]: cosines, then sines

    def add_norm(self, delta: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Add `delta` to the residual stream `x`; return the sum's RMSNorm and the sum."""
        x = delta if x is None else x + delta
        return self._norm(x, weight), x

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.spec.rms_norm_eps)

    def attend(self, number: int, layer: LayerWeights, qkv: Tensor, batch: InputBatch) -> Tensor:
        """Norm and rotate queries and keys, store keys and values, attend over the blocks."""
        if not batch.scratch:
            self._prepare(batch)
        scratch, spec = batch.scratch, self.spec
        queries, keys = spec.num_attention_heads, spec.num_key_value_heads
        heads = qkv.view(-1, queries + 2 * keys, spec.head_dim)
        q, k, v = torch.split(heads, [queries, keys, keys], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = (rotate(x, *scratch["rotation"]) for x in (q, k))
        tokens = len(scratch["slots"])  # those behind them only pad
        self.cache.keys[number].index_copy_(0, scratch["slots"], k[:tokens])
        self.cache.values[number].index_copy_(0, scratch["slots"], v[:tokens])
        out = torch.empty_like(q)
        out[tokens:] = 0.0
        for place, blocks, length, mask in scratch["sequences"]:
            key, value = self.cache.gather(number, blocks, length)
            out[place] = attend(q[place], key, value, mask)
        if number == spec.num_hidden_layers - 1:
            scratch.clear()  # the batch may come again, with other numbers
        return out.flatten(1)

    def _prepare(self, batch: InputBatch) -> None:
        """Make the index tensors and masks that all layers share."""
        host, size = batch.host, self.cache.block_size
        ends = host.query_starts.tolist()
        batch.scratch["rotation"] = self.rotary.index_select(0, batch.positions)[:, None].chunk(
            2, -1
        )
        batch.scratch["slots"] = batch.slots[: ends[-1]].long()
        batch.scratch["sequences"] = [
            (
                slice(ends[i], ends[i + 1]),
                batch.tables[i, : -(-length // size)],
                length,
                None if count == 1 else causal_mask(count, length, batch.ids.device),
            )
            for i, (count, length) in enumerate(
                zip(host.counts.tolist(), host.lengths.tolist(), strict=True)
            )
        ]

    def act(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half times the second half."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D / 2) of each head by the angle of its position."""
    one, two = x.float().chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Say which of `keys` tokens each of the last `queries` of them may see: bool [q, k]."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with [t, n_q, D] queries over [c, n_kv, D] keys and values; returns [t, n_q, D].

    `mask` is None where t is 1: the query heads of a group then take the place of the tokens,
    so that no key is copied.
    """
    heads, width = k.shape[1], q.shape[2]
    key, value = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    if mask is None:
        query = q.view(1, heads, -1, width)
        return functional.scaled_dot_product_attention(query, key, value).reshape(1, -1, width)
    query = q.transpose(0, 1)[None]
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)
