"""Checks of the Triton kernels against float64: random inputs, outputs that were NaN before."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_backend.cuda import ops
from gpu_backend.input_batch import prefill_tiles

Row = dict[str, object]
PAGE = 16
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class AttentionShape:
    """What a layer's attention is made of."""

    heads: int
    kv_heads: int
    dim: int


def error(out: Tensor, reference: Tensor) -> float:
    """Relative distance |out - reference| / |reference| of the worst row; NaN: not written."""
    out, reference = (x.double().flatten(1) for x in (out, reference))
    size = reference.norm(dim=1)
    away = (out - reference).norm(dim=1)
    return float((away / torch.where(size > 0, size, 1.0)).max())


def make_row(check: str, found: float, limit: float) -> Row:
    """Write down an error and what it may be at most."""
    return {"check": check, "error": found, "limit": limit, "ok": bool(found <= limit)}


def reference_attention(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Causal attention in float64 of q [n, heads, dim], the first at position `start`."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * q.shape[2] ** -0.5
    last = start + torch.arange(len(q), device=q.device)
    hidden = torch.arange(len(k), device=q.device)[None] > last[:, None]
    weights = scores.masked_fill(hidden[None], -math.inf).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, v)


class AttentionCase:
    """Random pages and sequences to attend over."""

    def __init__(
        self, sizes: AttentionShape, device: str, dtype: torch.dtype, longest: int
    ) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.pages = -(-longest // PAGE)
        blocks = 4 * self.pages
        keys, values = (self.randn(blocks * PAGE, sizes.kv_heads, sizes.dim) for _ in range(2))
        tables = torch.randint(1, blocks, (8, self.pages), dtype=torch.int32, device=device)
        width = torch.tensor([self.pages], dtype=torch.int32, device=device)
        self.layer = ops.PagedLayer(keys, values, tables, width, PAGE)

    def randn(self, *shape: int) -> Tensor:
        """Random numbers in the dtype under test."""
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def dense(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Gather a row's keys and values."""
        layer = self.layer
        pages = layer.tables[row].long()
        shape = (-1, PAGE, *layer.keys.shape[1:])
        k, v = (x.view(shape)[pages].flatten(0, 1)[:length] for x in (layer.keys, layer.values))
        return k, v

    def decode(self, lengths: list[int], splits: int) -> float:
        """Error of a decode of rows with so many keys; 0 is a row that only pads."""
        sizes, rows = self.sizes, len(lengths)
        # queries as they lie in a row of q | k | v
        wide = self.randn(rows, sizes.heads + 2 * sizes.kv_heads, sizes.dim)
        q = wide[:, : sizes.heads]
        out = torch.full_like(q, math.nan, memory_format=torch.contiguous_format)
        cells = rows * sizes.heads * max(splits, ops.MAX_SPLITS)
        scratch = ops.Scratch(
            torch.full((cells * sizes.dim,), math.nan, device=self.device),
            torch.full((cells,), math.nan, device=self.device),
        )
        sent = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        ops.decode(q, self.layer, sent, out, scratch, splits=splits)
        wanted = torch.zeros(out.shape, dtype=torch.float64, device=self.device)
        for row, length in enumerate(lengths):
            if length:
                k, v = self.dense(row, length)
                wanted[row] = reference_attention(q[row : row + 1], k, v, length - 1)[0]
        return error(out, wanted)

    def prefill(self, starts: list[int], new: list[int]) -> float:
        """Error of chunks of `new` tokens after `starts` cached ones, behind one row of others."""
        total = 1 + sum(new)
        q = self.randn(total, self.sizes.heads, self.sizes.dim)
        out = torch.full_like(q, math.nan)
        pieces = np.array([starts, new], np.int32)
        tiles = prefill_tiles(pieces[0], pieces[1], 1, ops.prefill_cut(self.dtype).rows)
        there = torch.from_numpy(tiles).to(self.device)
        ops.prefill(q, self.layer, there, out)
        wanted, first = [], 1
        for row, (start, count) in enumerate(zip(starts, new, strict=True)):
            k, v = self.dense(row, start + count)
            wanted.append(reference_attention(q[first : first + count], k, v, start))
            first += count
        return error(out[1:], torch.cat(wanted))


def check_attention(device: str, dtype: torch.dtype, sizes: AttentionShape) -> Iterator[Row]:
    """Check decode at several cuts, and prefill."""
    about = f"{sizes.heads}/{sizes.kv_heads}x{sizes.dim} {str(dtype).removeprefix('torch.')}"
    limit = LIMITS[dtype]
    data = AttentionCase(sizes, device, dtype, longest=700)
    for splits in (0, 1, 2, 8):
        found = data.decode([1, 17, 300, 0, 700], splits)
        yield make_row(f"decode {about} splits={splits or 'auto'}", found, limit)
    found = data.prefill([0, 62, 63, 128, 600], [50, 200, 3, 1, 100])
    yield make_row(f"prefill {about}", found, limit)


def check_fused(device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Check norm and activation."""
    about = str(dtype).removeprefix("torch.")
    x, old = (torch.randn(5, 96, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(96, dtype=dtype, device=device)
    new = (x + old).double()
    normed = new * (new.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    stream = old.clone()
    out = ops.add_rmsnorm(x, stream, weight, 1e-6)
    yield make_row(
        f"add_rmsnorm {about}", max(error(out, normed), error(stream, new)), LIMITS[dtype]
    )
    gate, up = torch.randn(5, 192, dtype=dtype, device=device).chunk(2, -1)
    out = ops.silu_mul(torch.cat((gate, up), -1))
    wanted = gate.double() * gate.double().sigmoid() * up.double()
    yield make_row(f"silu_mul {about}", error(out, wanted), LIMITS[dtype])


def check_rope(device: str, dtype: torch.dtype) -> Row:
    """Check norm, rotation and store; slot -1 leaves the cache and what is before it."""
    rows, heads, kv_heads, dim, eps = 3, 4, 2, 64, 1e-6
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
    one, two = (torch.randn(dim, dtype=dtype, device=device) for _ in range(2))
    table = torch.randn(16, dim, device=device)
    places, slots = [9, 0, 15], [4, -1, 0]
    memory = torch.full((2, 7, kv_heads, dim), math.nan, dtype=dtype, device=device)
    keys, values = memory[0, 1:], memory[1, 1:]
    q, k, v = (
        part.double() for part in qkv.view(rows, -1, dim).tensor_split((heads, heads + kv_heads), 1)
    )
    cos, sin = (half.double()[:, None] for half in table[places].chunk(2, 1))

    def rotated(x: Tensor, weight: Tensor) -> Tensor:
        x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    sent = [torch.tensor(part, dtype=torch.int32, device=device) for part in (places, slots)]
    out = ops.rope_store(
        qkv.clone(),
        one,
        two,
        turns=table,
        positions=sent[0],
        slots=sent[1],
        keys=keys,
        values=values,
        eps=eps,
    )
    wanted_k, stored = rotated(k, two), [0, 2]
    found = max(
        error(out, rotated(q, one)),
        error(keys[[4, 0]], wanted_k[stored]),
        error(values[[4, 0]], v[stored]),
    )
    untouched = memory[:, [0, 2, 3, 4, 6]].isnan().all()
    about = str(dtype).removeprefix("torch.")
    return make_row(f"rope_store {about}", found if untouched else math.nan, LIMITS[dtype])
