# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917
"""The Triton kernels of one transformer layer: attention over a paged KV cache, and whatever else
would cost a launch of its own.

Decode is bound by the bytes of the cache, so the query heads that share a key are one tile (each
key is read once) and a long context is cut into splits that run side by side; a second kernel adds
the splits up by their log-sum-exp. The grid depends on the batch's padded size alone and lengths
are read on the device, so a captured graph serves every batch of its size. Softmax is kept in
powers of two: `exp2` is the instruction, `exp` is two.

A layer of the cache is [slots, kv_heads, dim]; a slot is block * page + offset in the page.
"""

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def _fold(scores, values, top, total, acc):
    """Fold one tile of keys into a running softmax: scores [m, n], values [n, dim]."""
    peak = tl.maximum(top, tl.max(scores, 1))
    fade = tl.exp2(top - peak)
    weights = tl.exp2(scores - peak[:, None])
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return peak, total, acc


@triton.jit
def _offsets(table, keys, inside, page: tl.constexpr, row: tl.constexpr):
    """Where in a layer of the cache the keys' numbers begin: their pages are looked up."""
    block = tl.load(table + keys // page, mask=inside, other=0).to(tl.int64)
    return (block * page + keys % page) * row


@triton.jit
def decode_split(
    q,  # [rows, heads, dim], rows q_stride apart
    k_cache,
    v_cache,
    tables,  # [rows, width] int32
    width,  # [1] int32: on the device, so that a graph serves tables of any width
    lengths,  # [rows] int32, the new token included; 0 marks a row that only pads
    out,  # [rows, heads, dim], written where splits == 1
    part,  # [rows, heads, splits, dim] fp32, and
    lse,  # [rows, heads, splits] fp32, written otherwise
    q_stride,
    scale,  # times log2(e)
    kv_heads: tl.constexpr,
    group: tl.constexpr,  # query heads that share a KV head
    padded: tl.constexpr,  # the same, at least 16: the least that tl.dot takes
    dim: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,  # keys at a time
    splits: tl.constexpr,
    least: tl.constexpr,  # keys under which a split is not worth its launch
):
    """One token each: program (KV head, row, split) attends over its share of the keys."""
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + row)
    table = tables + row * tl.load(width)
    member, across = tl.arange(0, padded), tl.arange(0, dim)
    heads = kv_heads * group
    mine = head * group + member
    span = tl.cdiv(tl.maximum(tl.cdiv(length, splits), least), tile) * tile
    first = split * span
    last = tl.minimum(first + span, length)
    where = mine[:, None] * dim + across[None, :]
    real = (member < group)[:, None]
    query = tl.load(q + row * q_stride + where, mask=real, other=0.0)
    top = tl.full([padded], float("-inf"), tl.float32)
    total = tl.zeros([padded], tl.float32)
    acc = tl.zeros([padded, dim], tl.float32)
    for start in range(first, last, tile):
        keys = start + tl.arange(0, tile)
        inside = keys < last
        at = _offsets(table, keys, inside, page, kv_heads * dim) + head * dim
        k = tl.load(k_cache + at[None, :] + across[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(query, k, input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        v = tl.load(v_cache + at[:, None] + across[None, :], mask=inside[:, None], other=0.0)
        top, total, acc = _fold(scores, v, top, total, acc)
    total = tl.where(total > 0.0, total, 1.0)  # no keys: out is 0, lse is -inf
    acc = acc / total[:, None]
    if splits == 1:
        tl.store(out + row * heads * dim + where, acc.to(out.dtype.element_ty), mask=real)
    else:
        at = (row * heads + mine) * splits + split
        tl.store(lse + at, top + tl.log2(total), mask=member < group)
        if first < last:
            tl.store(part + at[:, None] * dim + across[None, :], acc, mask=real)


@triton.jit
def decode_combine(part, lse, out, dim: tl.constexpr, splits: tl.constexpr):
    """Add up the splits of one (row, head), those without keys left unread."""
    at = tl.program_id(0).to(tl.int64)
    number, across = tl.arange(0, splits), tl.arange(0, dim)
    weight = tl.load(lse + at * splits + number)
    used = weight > float("-inf")
    peak = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(peak > float("-inf"), peak, 0.0))
    where = (at * splits + number)[:, None] * dim + across[None, :]
    piece = tl.load(part + where, mask=used[:, None], other=0.0)
    total = tl.sum(weight, 0)
    mean = tl.sum(piece * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + at * dim + across, mean.to(out.dtype.element_ty))


@triton.jit
def prefill_tile(
    q,  # [rows, heads, dim], rows q_stride apart
    k_cache,
    v_cache,
    tables,  # [sequences, width] int32
    width,  # [1] int32
    tiles,  # [tiles, 4] int32: first row, rows (0: none), position of the first, sequence
    out,  # [rows, heads, dim]
    q_stride,
    scale,  # times log2(e)
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    page: tl.constexpr,
    rows: tl.constexpr,  # queries at a time
    tile: tl.constexpr,  # keys at a time
):
    """Many tokens of a sequence: program (query head, tile) attends over all that came before."""
    head, index = tl.program_id(0), tl.program_id(1)
    begin = tl.load(tiles + 4 * index).to(tl.int64)
    count = tl.load(tiles + 4 * index + 1)
    if count == 0:
        return
    start = tl.load(tiles + 4 * index + 2)
    table = tables + tl.load(tiles + 4 * index + 3).to(tl.int64) * tl.load(width)
    heads = kv_heads * group
    step, across = tl.arange(0, rows), tl.arange(0, dim)
    real = (step < count)[:, None]
    where = head * dim + across[None, :]
    query = tl.load(q + (begin + step)[:, None] * q_stride + where, mask=real, other=0.0)
    top = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, dim], tl.float32)
    seen = (start + 1) // tile * tile  # keys that every query of the tile sees: no mask
    for first in range(0, seen, tile):
        keys = first + tl.arange(0, tile)
        at = _offsets(table, keys, keys >= 0, page, kv_heads * dim) + head // group * dim
        k = tl.load(k_cache + at[None, :] + across[:, None])
        scores = tl.dot(query, k, input_precision="ieee") * scale
        v = tl.load(v_cache + at[:, None] + across[None, :])
        top, total, acc = _fold(scores, v, top, total, acc)
    last = start + count
    for first in range(seen, last, tile):
        keys = first + tl.arange(0, tile)
        inside = keys < last
        at = _offsets(table, keys, inside, page, kv_heads * dim) + head // group * dim
        k = tl.load(k_cache + at[None, :] + across[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(query, k, input_precision="ieee") * scale
        visible = inside[None, :] & (keys[None, :] <= (start + step)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        v = tl.load(v_cache + at[:, None] + across[None, :], mask=inside[:, None], other=0.0)
        top, total, acc = _fold(scores, v, top, total, acc)
    acc = acc / total[:, None]
    where += (begin + step)[:, None] * heads * dim
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=real)


@triton.jit
def add_rmsnorm(
    x,  # [rows, size]
    residual,  # [rows, size], to which x is added where adds
    weight,  # [size]
    out,  # [rows, size]
    eps,
    size: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
):
    """Add a row to the residual stream and normalise the sum by its root mean square."""
    row = tl.program_id(0).to(tl.int64)
    across = tl.arange(0, block)
    real = across < size
    at = row * size + across
    total = tl.load(residual + at, mask=real, other=0.0)
    if adds:
        new = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        total = (total.to(tl.float32) + new).to(residual.dtype.element_ty)
        tl.store(residual + at, total, mask=real)
    value = total.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    value = value * tl.load(weight + across, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=real)


@triton.jit
def _turn(a, b, c, s, low, high, eps, dim: tl.constexpr, norms: tl.constexpr):
    """Normalise (where norms) and rotate heads [m, dim / 2] given as their two halves."""
    a, b = a.to(tl.float32), b.to(tl.float32)
    if norms:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / dim + eps)[:, None]
        a, b = a * scale * low, b * scale * high
    return a * c - b * s, b * c + a * s


@triton.jit
def rope_store(
    qkv,  # [rows, heads + 2 kv_heads, dim]; the queries are turned in place
    q_weight,  # [dim], read where norms
    k_weight,
    turns,  # [positions, dim] fp32: cosines, then sines
    positions,  # [rows] int32
    slots,  # [rows] int32; -1: not stored
    k_cache,
    v_cache,
    eps,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded: tl.constexpr,  # group, a power of two
    dim: tl.constexpr,
    norms: tl.constexpr,
):
    """Norm and turn queries and keys, store keys and values: program (row, KV head)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = dim // 2
    across, member = tl.arange(0, half), tl.arange(0, padded)
    angle = turns + tl.load(positions + row).to(tl.int64) * dim + across
    c, s = tl.load(angle)[None, :], tl.load(angle + half)[None, :]
    low_q, high_q, low_k, high_k = 1.0, 1.0, 1.0, 1.0
    if norms:
        low_q = tl.load(q_weight + across)[None, :].to(tl.float32)
        high_q = tl.load(q_weight + half + across)[None, :].to(tl.float32)
        low_k = tl.load(k_weight + across)[None, :].to(tl.float32)
        high_k = tl.load(k_weight + half + across)[None, :].to(tl.float32)
    heads: tl.constexpr = kv_heads * group
    base = qkv + row * (heads + 2 * kv_heads) * dim
    real = (member < group)[:, None]
    at = base + (head * group + member)[:, None] * dim + across[None, :]
    a, b = tl.load(at, mask=real, other=0.0), tl.load(at + half, mask=real, other=0.0)
    kind = qkv.dtype.element_ty
    a, b = _turn(a, b, c, s, low=low_q, high=high_q, eps=eps, dim=dim, norms=norms)
    tl.store(at, a.to(kind), mask=real)
    tl.store(at + half, b.to(kind), mask=real)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        into = (slot * kv_heads + head) * dim + across[None, :]
        own = base + (heads + head) * dim + across[None, :]
        u, w = tl.load(own), tl.load(own + half)
        u, w = _turn(u, w, c, s, low=low_k, high=high_k, eps=eps, dim=dim, norms=norms)
        tl.store(k_cache + into, u.to(kind))
        tl.store(k_cache + into + half, w.to(kind))
        own += kv_heads * dim
        tl.store(v_cache + into, tl.load(own))
        tl.store(v_cache + into + half, tl.load(own + half))


@triton.jit
def silu_mul(x, out, size: tl.constexpr, block: tl.constexpr):
    """out = silu(gate) * up, gate and up being the halves of a row of x [rows, 2 size]."""
    row = tl.program_id(0).to(tl.int64)
    across = tl.program_id(1) * block + tl.arange(0, block)
    real = across < size
    gate = tl.load(x + row * 2 * size + across, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + across, mask=real, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * size + across, value.to(out.dtype.element_ty), mask=real)
