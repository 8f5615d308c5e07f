"""The Triton kernels behind the same calls as the plain torch backend."""

import torch
from torch import Tensor

from gpu_backend.batch import Batch
from gpu_backend.cache import KVCache
from gpu_backend.cuda import attention as launch
from gpu_backend.cuda.graphs import Staging, aligned
from gpu_backend.weights import LayerWeights
from simulator.models.spec import ModelSpec


class CudaBackend:
    """Ten launches a layer, the four matrix products among them.

    `max_num_seqs` is how many sequences may decode in one graph; a larger batch runs too.
    """

    def __init__(self, spec: ModelSpec, cache: KVCache, table: Tensor, max_num_seqs: int) -> None:
        self.spec = spec
        self.cache = cache
        self.table = table  # [positions, D]: cosines, then sines
        self._room = max_num_seqs
        self._scratch = self._make_scratch(max_num_seqs)
        self._outgrown: list[launch.Scratch] = []  # whose addresses captured graphs still use
        self._staging: Staging | None = None

    def _make_scratch(self, rows: int) -> launch.Scratch:
        spec = self.spec
        heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        return launch.Scratch.for_rows(rows, heads, kv_heads, spec.head_dim, self.table.device)

    def add_norm(self, delta: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Add `delta` to the residual stream `x`, in place; return the sum's norm and the sum."""
        eps = self.spec.rms_norm_eps
        if x is None:
            return launch.add_rmsnorm(None, delta, weight, eps), delta
        return launch.add_rmsnorm(delta, x, weight, eps), x

    def attend(self, number: int, layer: LayerWeights, qkv: Tensor, batch: Batch) -> Tensor:
        """Norm, turn and store in one launch; then attend, decodes and chunks apart."""
        keys, values = self.cache.keys[number], self.cache.values[number]
        page, ones = self.cache.block_size, batch.decodes
        q = launch.rope_store(
            qkv, layer.q_norm, layer.k_norm, self.table, batch.positions, batch.slots,
            keys, values, self.spec.rms_norm_eps,
        )  # fmt: skip
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if ones:
            self._reach(ones)
            launch.decode(
                q[:ones], keys, values, batch.tables, batch.width, batch.lengths, out,
                self._scratch, page=page,
            )  # fmt: skip
        if batch.tokens > ones:
            launch.prefill(
                q, keys, values, batch.tables[ones:], batch.width, self._tiles(batch), out,
                page=page,
            )  # fmt: skip
        return out.flatten(1)

    def _reach(self, rows: int) -> None:
        """Make room for more rows than a graph ever has."""
        if rows > self._room:
            self._outgrown.append(self._scratch)
            self._room, self._scratch = rows, self._make_scratch(rows)

    def _tiles(self, batch: Batch) -> Tensor:
        """Cut the chunks into tiles and send them, once for all layers."""
        tiles = batch.scratch.get("tiles")
        if not isinstance(tiles, Tensor):
            ones, host = batch.decodes, batch.host
            cut = launch.prefill_tiles(host.starts[ones:], host.counts[ones:], ones)
            if self._staging is None or aligned(cut.size) > self._staging.size:
                self._staging = Staging(2 * aligned(cut.size), self.table.device)
            tiles = batch.scratch["tiles"] = self._staging.send([cut])[0].view(-1, 4)
        return tiles

    def act(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half times the second half."""
        return launch.silu_mul(gate_up)
