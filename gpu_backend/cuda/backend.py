"""The Triton kernels behind the same calls as the plain torch backend."""

import torch
from torch import Tensor

from gpu_backend.cuda import ops
from gpu_backend.input_batch import InputBatch
from gpu_backend.kv_cache import KVCache
from gpu_backend.weights import LayerWeights
from simulator.models.spec import ModelSpec


class CudaBackend:
    """Ten launches a layer, the four matrix products among them.

    `max_num_seqs` is how many sequences may decode in one graph; a larger batch runs too.
    """

    def __init__(self, spec: ModelSpec, cache: KVCache, rotary: Tensor, max_num_seqs: int) -> None:
        self.spec = spec
        self.cache = cache
        self.rotary = rotary  # [positions, D]: cosines, then sines
        self._room = max_num_seqs
        self._scratch = self._make_scratch(max_num_seqs)
        self._outgrown: list[ops.Scratch] = []  # whose addresses captured graphs still use

    def _make_scratch(self, rows: int) -> ops.Scratch:
        spec = self.spec
        heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        return ops.Scratch.for_rows(rows, heads, kv_heads, spec.head_dim, self.rotary.device)

    def add_norm(self, delta: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Add `delta` to the residual stream `x`, in place; return the sum's norm and the sum."""
        eps = self.spec.rms_norm_eps
        if x is None:
            return ops.add_rmsnorm(None, delta, weight, eps), delta
        return ops.add_rmsnorm(delta, x, weight, eps), x

    def attend(self, number: int, layer: LayerWeights, qkv: Tensor, batch: InputBatch) -> Tensor:
        """Norm, rotate and store in one launch; then attend: decodes, then chunks.

        In this order, since in a graph the decodes' launch writes zeros to other rows.
        """
        keys, values = self.cache.keys[number], self.cache.values[number]
        page, decodes = self.cache.block_size, batch.decodes
        q = ops.rope_store(
            qkv, layer.q_norm, layer.k_norm, self.rotary, batch.positions, batch.slots,
            keys, values, self.spec.rms_norm_eps,
        )  # fmt: skip
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decodes:
            self._reserve(decodes)
            ops.decode(
                q[:decodes], keys, values, batch.tables, batch.width, batch.lengths, out,
                self._scratch, page=page,
            )  # fmt: skip
        if batch.tiles is not None:
            ops.prefill(q, keys, values, batch.tables, batch.width, batch.tiles, out, page=page)
        return out.flatten(1)

    def _reserve(self, rows: int) -> None:
        """Make room for more rows than a graph ever has."""
        if rows > self._room:
            self._outgrown.append(self._scratch)
            self._room, self._scratch = rows, self._make_scratch(rows)

    def act(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half times the second half."""
        return ops.silu_mul(gate_up)
