"""Launches of the Triton kernels: how many programs, which tile sizes, and where scratch lies.

Two launches (and a sum) per layer: rows with one new token go through split-KV decode, rows with
more through the tiled prefill. They add up, so a mixed step costs what its two parts cost.
`CudaBackend` has them behind the same calls as the plain torch backend.
"""

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_backend.cuda import kernels
from gpu_backend.input_batch import InputBatch
from gpu_backend.kv_cache import KVCache
from gpu_backend.weights import LayerWeights
from simulator.models.spec import ModelSpec


def _constant(name: str, value: int) -> int:
    """Return a constant, or what the variable HEADWAY_NAME says in its place."""
    return int(os.environ.get(f"HEADWAY_{name}", value))


MIN_PROGRAMS = 264  # that decode wants in flight: two for each of an H200's 132 multiprocessors
MAX_SPLITS = 32
MIN_SPLITS = 4  # so that one long context among many short ones does not hold up the rest
MANY_PROGRAMS = 1024  # (row, KV head) pairs from which on MANY_SPLITS are enough: the parts of more
MANY_SPLITS = _constant("MANY_SPLITS", 2)  # are written and read, 16.8 MB a layer at 256 rows
MIN_SPLIT_KEYS = 256  # of a split
DECODE_TILE = _constant("DECODE_TILE", 0)  # keys; 0: as of `decode_tile`
DECODE_WARPS = _constant("DECODE_WARPS", 4)
DECODE_STAGES = _constant("DECODE_STAGES", 5)  # fewer than 5 and no load overlaps a product
PREFILL_ROWS = _constant("PREFILL_ROWS", 128)  # queries of a prefill tile
PREFILL_TILE = _constant("PREFILL_TILE", 64)  # keys
PREFILL_WARPS = _constant("PREFILL_WARPS", 8)


def splits_for(rows: int, kv_heads: int) -> int:
    """Splits of each context, a power of two: fixed by the padded batch, as a graph needs it."""
    wanted = -(-MIN_PROGRAMS // (rows * kv_heads))
    least = MIN_SPLITS if rows * kv_heads < MANY_PROGRAMS else MANY_SPLITS
    return min(max(1 << (wanted - 1).bit_length(), least), MAX_SPLITS)


def decode_tile(dim: int, dtype: torch.dtype) -> int:
    """Return the keys of a decode tile: 16 KiB of keys, whatever a head's size.

    For heads of 64 that keeps Triton 3.6 from spilling registers; float32 has no room for it.
    """
    return DECODE_TILE or (128 if dim <= 64 and dtype.itemsize == 2 else 64)


class PrefillCut(NamedTuple):
    """How prefill is cut into programs."""

    rows: int  # queries of a tile
    tile: int  # keys at a time
    warps: int


def prefill_cut(dtype: torch.dtype) -> PrefillCut:
    """Return the cut of prefill; float32 has room for fewer queries."""
    if dtype.itemsize > 2:
        return PrefillCut(rows=32, tile=PREFILL_TILE, warps=4)
    return PrefillCut(PREFILL_ROWS, PREFILL_TILE, PREFILL_WARPS)


@dataclass(slots=True)
class Scratch:
    """Where the splits of a decode leave their parts: fp32, shared by all layers and graphs."""

    part: Tensor
    lse: Tensor

    @classmethod
    def for_rows(
        cls, rows: int, heads: int, kv_heads: int, dim: int, device: torch.device
    ) -> "Scratch":
        """Make room for any batch of up to `rows` rows."""
        cells = max(n * splits_for(n, kv_heads) for n in range(1, rows + 1)) * heads
        return cls(
            torch.empty(cells * dim, dtype=torch.float32, device=device),
            torch.empty(cells, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """Keys and values of one layer, and the pages in which each sequence finds its own."""

    keys: Tensor  # [slots, kv_heads, dim]
    values: Tensor
    tables: Tensor  # [sequences, width[0]] int32
    width: Tensor  # [1] int32
    page: int = 16  # slots


def decode(
    q: Tensor, layer: PagedLayer, lengths: Tensor, out: Tensor, scratch: Scratch, *, splits: int = 0
) -> None:
    """Attend for one new token per row.

    q and out are [rows, heads, dim], q with any row stride; lengths [rows] int32 with the new
    token. 0 for `splits` takes what `splits_for` says.
    """
    rows, heads, dim = q.shape
    kv_heads = layer.keys.shape[1]
    splits = splits or splits_for(rows, kv_heads)
    kernels.decode_split[kv_heads, rows, splits](
        q=q, k_cache=layer.keys, v_cache=layer.values, tables=layer.tables, width=layer.width,
        lengths=lengths, out=out, part=scratch.part, lse=scratch.lse,
        q_stride=q.stride(0), scale=dim**-0.5 * kernels.LOG2E,
        kv_heads=kv_heads, group=heads // kv_heads, padded=max(16, _power_of_2(heads // kv_heads)),
        dim=dim, page=layer.page, tile=decode_tile(dim, q.dtype), splits=splits,
        least=MIN_SPLIT_KEYS, num_warps=DECODE_WARPS, num_stages=DECODE_STAGES,
    )  # fmt: skip
    if splits > 1:
        kernels.decode_combine[(rows * heads,)](
            part=scratch.part, lse=scratch.lse, out=out, dim=dim, splits=splits, num_warps=4
        )


def prefill(q: Tensor, layer: PagedLayer, tiles: Tensor, out: Tensor) -> None:
    """Attend causally for chunks of sequences whose keys are all in the cache already.

    `tiles` [n, 4] int32 is that of `prefill_tiles`, cut for as many rows as `prefill_cut` says; its
    rows are rows of q and out, its sequences rows of the layer's tables. The rest is as in
    `decode`.
    """
    _, heads, dim = q.shape
    kv_heads = layer.keys.shape[1]
    cut = prefill_cut(q.dtype)
    kernels.prefill_tile[heads, len(tiles)](
        q=q, k_cache=layer.keys, v_cache=layer.values, tables=layer.tables, width=layer.width,
        tiles=tiles, out=out, q_stride=q.stride(0), scale=dim**-0.5 * kernels.LOG2E,
        kv_heads=kv_heads, group=heads // kv_heads, dim=dim, page=layer.page,
        rows=cut.rows, tile=cut.tile, num_warps=cut.warps, num_stages=3,
    )  # fmt: skip


def rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    *,
    turns: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    eps: float,
) -> Tensor:
    """Norm (where weights are given) and turn queries and keys; store keys and values.

    qkv is [rows, (heads + 2 kv_heads) * dim], turns [positions, dim] fp32, cosines first. Return
    the queries, turned in place, as a view [rows, heads, dim].
    """
    rows = len(qkv)
    kv_heads, dim = keys.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    kernels.rope_store[rows, kv_heads](
        qkv=qkv,
        q_weight=qkv if q_weight is None else q_weight,
        k_weight=qkv if k_weight is None else k_weight,
        turns=turns, positions=positions, slots=slots, k_cache=keys, v_cache=values, eps=eps,
        kv_heads=kv_heads, group=heads // kv_heads, padded=_power_of_2(heads // kv_heads),
        dim=dim, norms=q_weight is not None, num_warps=1,
    )  # fmt: skip
    return qkv[:, : heads * dim].view(rows, heads, dim)


def add_rmsnorm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x [rows, size] to the residual in place, return the sum normalised and scaled."""
    rows, size = residual.shape
    out = torch.empty_like(residual)
    kernels.add_rmsnorm[(rows,)](
        x=residual if x is None else x, residual=residual, weight=weight, out=out, eps=eps,
        size=size, block=_power_of_2(size), adds=x is not None, num_warps=8 if size > 2048 else 4,
    )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Gate: silu of the first half of each row [rows, 2 size] times the second."""
    rows, both = gate_up.shape
    size = both // 2
    out = gate_up.new_empty(rows, size)
    programs = rows, -(-size // 1024)
    kernels.silu_mul[programs](x=gate_up, out=out, size=size, block=1024, num_warps=4)
    return out


def _power_of_2(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


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
        self._outgrown: list[Scratch] = []  # whose addresses captured graphs still use

    def _make_scratch(self, rows: int) -> Scratch:
        spec = self.spec
        heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        return Scratch.for_rows(rows, heads, kv_heads, spec.head_dim, self.rotary.device)

    def add_norm(self, delta: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Add `delta` to the residual stream `x`, in place; return the sum's norm and the sum."""
        eps = self.spec.rms_norm_eps
        if x is None:
            return add_rmsnorm(None, delta, weight, eps), delta
        return add_rmsnorm(delta, x, weight, eps), x

    def attend(self, number: int, layer: LayerWeights, qkv: Tensor, batch: InputBatch) -> Tensor:
        """Norm, rotate and store in one launch; then attend: decodes, then chunks.

        In this order, since in a graph the decodes' launch writes zeros to other rows.
        """
        keys, values = self.cache.keys[number], self.cache.values[number]
        paged = PagedLayer(keys, values, batch.tables, batch.width, self.cache.block_size)
        decodes = batch.decodes
        q = rope_store(
            qkv, layer.q_norm, layer.k_norm,
            turns=self.rotary, positions=batch.positions, slots=batch.slots,
            keys=keys, values=values, eps=self.spec.rms_norm_eps,
        )  # fmt: skip
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decodes:
            self._reserve(decodes)
            decode(q[:decodes], paged, batch.lengths, out, self._scratch)
        if batch.tiles is not None:
            prefill(q, paged, batch.tiles, out)
        return out.flatten(1)

    def _reserve(self, rows: int) -> None:
        """Make room for more rows than a graph ever has."""
        if rows > self._room:
            self._outgrown.append(self._scratch)
            self._room, self._scratch = rows, self._make_scratch(rows)

    def act(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half times the second half."""
        return silu_mul(gate_up)
