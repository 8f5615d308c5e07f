"""The Triton kernels and CUDA graphs, behind the same calls as the plain torch backend."""

import torch
from torch import Tensor

from gpu_backend import cuda_attention
from gpu_backend.batch import Batch
from gpu_backend.cache import KVCache
from gpu_backend.graphs import DecodeGraphs, Decodes
from gpu_backend.model import Transformer
from gpu_backend.rows import GRAIN
from gpu_backend.weights import LayerWeights
from simulator.model import ModelSpec


class CudaBackend:
    """Ten launches a layer: decodes through split-KV decode, chunks through tiled prefill."""

    def __init__(self, spec: ModelSpec, cache: KVCache, table: Tensor, max_num_seqs: int) -> None:
        self.spec = spec
        self.cache = cache
        self.ops = cuda_attention.TritonOps()
        self.cos, self.sin = (half.contiguous() for half in table.chunk(2, -1))
        self._room = max_num_seqs
        self._scratch = self._make_scratch(max_num_seqs)

    def _make_scratch(self, rows: int) -> cuda_attention.Scratch:
        spec, device = self.spec, str(self.cache.kv.device)
        heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        return cuda_attention.Scratch.for_rows(rows, heads, kv_heads, spec.head_dim, device)

    def add_norm(self, delta: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        eps = self.spec.rms_norm_eps
        if x is None:
            return self.ops.add_rmsnorm(None, delta, weight, eps), delta
        return self.ops.add_rmsnorm(delta, x, weight, eps), x

    def attend(self, number: int, layer: LayerWeights, qkv: Tensor, batch: Batch) -> Tensor:
        keys, values = self.cache.kv[0, number], self.cache.kv[1, number]
        q = self.ops.rope_store(
            qkv, layer.q_norm, layer.k_norm, self.cos, self.sin,
            batch.positions, batch.slots, keys, values, self.spec.rms_norm_eps,
        )  # fmt: skip
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        ones = batch.decodes
        if ones:
            if ones > self._room:  # only ever in eager steps: graphs are no larger than the room
                self._room, self._scratch = ones, self._make_scratch(ones)
            cuda_attention.decode(
                q[:ones], keys, values, batch.tables[:ones], batch.width,
                batch.lengths[:ones], out[:ones], self._scratch,
            )  # fmt: skip
        if batch.tokens > ones:
            tiles = self._tiles(batch)
            cuda_attention.prefill(
                q, keys, values, batch.tables[ones:], batch.width, tiles, out
            )
        return out.flatten(1)

    def _tiles(self, batch: Batch) -> Tensor:
        """Cut the chunks into tiles, once for all layers."""
        if "tiles" not in batch.scratch:
            assert batch.host is not None
            ones, host = batch.decodes, batch.host
            cut = cuda_attention.prefill_tiles(host.starts[ones:], host.counts[ones:], ones)
            batch.scratch["tiles"] = torch.from_numpy(cut).to(batch.ids.device)
        return batch.scratch["tiles"]  # type: ignore[return-value]

    def act(self, gate_up: Tensor) -> Tensor:
        return self.ops.silu_mul(gate_up)


class Graphs:
    """Sends steps that hold only decodes through CUDA graphs, the others through the model."""

    def __init__(self, model: Transformer, cache: KVCache, max_num_seqs: int) -> None:
        self.model = model
        positions = model.spec.max_position_embeddings
        pages = -(-positions // (cache.block_size * GRAIN)) * GRAIN
        with torch.inference_mode():
            self.graphs = DecodeGraphs(self._forward, max_num_seqs, pages, str(cache.kv.device))
        self.most = max_num_seqs

    def _forward(self, decodes: Decodes) -> Tensor:
        rows = len(decodes.ids)
        batch = Batch(
            decodes=rows,
            ids=decodes.ids,
            positions=decodes.positions,
            slots=decodes.slots,
            lengths=decodes.lengths,
            width=decodes.width,
            tables=decodes.tables.view(rows, -1),
            emits=decodes.ids,  # every row
        )
        return self.model.sample(batch)

    def sample(self, batch: Batch) -> Tensor:
        """Run a step; give the next tokens [m]."""
        host = batch.host
        assert host is not None
        rows = batch.decodes
        if not rows == batch.tokens == len(host.emits) <= self.most:
            return self.model.sample(batch)
        return self.graphs.run(host.ids, host.positions, host.slots, host.lengths, host.tables)
