"""Checks of the Triton kernels, and of an engine that runs on them, against plain torch.

Every check draws random inputs, fills outputs with NaN first, and compares with float64 or with
the reference engine. `python -m gpu_backend.campaign.checks` prints a line of JSON per check; on a
machine without CUDA it wants TRITON_INTERPRET=1.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from gpu_backend.cuda import ops
from gpu_backend.cuda.backend import CudaBackend
from gpu_backend.cuda.graphs import Graphs
from gpu_backend.engine import Engine
from gpu_backend.model import rotary_table
from gpu_backend.torch_backend import TorchBackend
from simulator.core.request import Chunk, Request
from simulator.models.spec import ModelSpec

Row = dict[str, object]
PAGE = 16
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
SMALL = ModelSpec("small", 2, 64, 4, 2, 32, 96, 256, max_position_embeddings=512)
NORMED = ModelSpec("normed", 2, 64, 4, 2, 32, 96, 256, qk_norm=True, max_position_embeddings=512)


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


def _row(check: str, found: float, limit: float) -> Row:
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
        self.k, self.v = (self.randn(blocks * PAGE, sizes.kv_heads, sizes.dim) for _ in range(2))
        self.tables = torch.randint(1, blocks, (8, self.pages), dtype=torch.int32, device=device)
        self.width = torch.tensor([self.pages], dtype=torch.int32, device=device)

    def randn(self, *shape: int) -> Tensor:
        """Random numbers in the dtype under test."""
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def dense(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Gather a row's keys and values."""
        pages = self.tables[row].long()
        shape = (-1, PAGE, *self.k.shape[1:])
        k, v = (x.view(shape)[pages].flatten(0, 1)[:length] for x in (self.k, self.v))
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
        ops.decode(
            q, self.k, self.v, self.tables, self.width, sent, out, scratch,
            page=PAGE, splits=splits,
        )  # fmt: skip
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
        tiles = ops.prefill_tiles(np.array(starts, np.int32), np.array(new, np.int32), 1)
        there = torch.from_numpy(tiles).to(self.device)
        ops.prefill(q, self.k, self.v, self.tables, self.width, there, out, page=PAGE)
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
        yield _row(f"decode {about} splits={splits or 'auto'}", found, limit)
    found = data.prefill([0, 62, 63, 128, 600], [50, 200, 3, 1, 100])
    yield _row(f"prefill {about}", found, limit)


def check_fused(device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Check norm and activation."""
    about = str(dtype).removeprefix("torch.")
    x, old = (torch.randn(5, 96, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(96, dtype=dtype, device=device)
    new = (x + old).double()
    normed = new * (new.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    stream = old.clone()
    out = ops.add_rmsnorm(x, stream, weight, 1e-6)
    yield _row(f"add_rmsnorm {about}", max(error(out, normed), error(stream, new)), LIMITS[dtype])
    gate, up = torch.randn(5, 192, dtype=dtype, device=device).chunk(2, -1)
    out = ops.silu_mul(torch.cat((gate, up), -1))
    wanted = gate.double() * gate.double().sigmoid() * up.double()
    yield _row(f"silu_mul {about}", error(out, wanted), LIMITS[dtype])


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
    out = ops.rope_store(qkv.clone(), one, two, table, sent[0], sent[1], keys, values, eps)
    wanted_k, stored = rotated(k, two), [0, 2]
    found = max(
        error(out, rotated(q, one)),
        error(keys[[4, 0]], wanted_k[stored]),
        error(values[[4, 0]], v[stored]),
    )
    untouched = memory[:, [0, 2, 3, 4, 6]].isnan().all()
    about = str(dtype).removeprefix("torch.")
    return _row(f"rope_store {about}", found if untouched else math.nan, LIMITS[dtype])


def reference_engine(spec: ModelSpec, device: str, dtype: torch.dtype) -> Engine:
    """Make an engine in plain torch, also on CUDA."""
    engine = Engine(spec, 64, PAGE, device, dtype, graphs=False)
    table = rotary_table(spec, spec.max_position_embeddings, engine.device)
    engine.model.backend = TorchBackend(spec, engine.cache, table)
    _vary_norms(engine)
    return engine


def triton_engine(spec: ModelSpec, device: str, dtype: torch.dtype) -> Engine:
    """Make an engine on the Triton kernels and graphs, also on CPU (in the interpreter)."""
    most = 8  # sequences of a graph
    engine = Engine(spec, 64, PAGE, device, dtype, graphs=False)
    table = rotary_table(spec, spec.max_position_embeddings, engine.device)
    engine.model.backend = CudaBackend(spec, engine.cache, table, most)
    _vary_norms(engine)
    engine.graphs = Graphs(engine.model, engine.cache, most)
    return engine


def _vary_norms(engine: Engine) -> None:
    """Make the weights of the heads' norms other than ones, the same in every engine."""
    random = torch.Generator(engine.device).manual_seed(1)
    for layer in engine.model.weights.layers:
        for weight in (layer.q_norm, layer.k_norm):
            if weight is not None:
                weight.normal_(mean=1.0, std=0.3, generator=random)


def _requests(lengths: Iterable[tuple[int, int]]) -> list[Request]:
    """Make requests with page tables that nobody shares."""
    requests, block = [], 1
    for number, (prompt, answer) in enumerate(lengths):
        request = Request(number, 0.0, prompt, answer)
        count = -(-(prompt + answer) // PAGE)
        request.blocks = list(range(block + count - 1, block - 1, -1))
        block += count
        requests.append(request)
    return requests


def _generate(engine: Engine, requests: list[Request], budget: int) -> list[list[int]]:
    """Run requests together, `budget` tokens of prompts a step, and give their texts."""
    done = dict.fromkeys(requests, 0)
    while True:
        chunks, left = [], budget
        for request in requests:
            prompt, start = request.prompt_tokens, done[request]
            count = 1 if start >= prompt else min(prompt - start, left)
            if start < prompt:
                left -= count
            if count and start < prompt + request.output_tokens - 1:
                chunks.append(Chunk(request, start, count))
        if not chunks:
            return [engine.tokens(request.id) for request in requests]
        engine.execute(chunks)
        for chunk in chunks:
            done[chunk.request] += chunk.tokens


def check_texts(device: str, spec: ModelSpec) -> Row:
    """Count the tokens that differ: batched on Triton in chunks, against each request alone."""
    lengths = [(40, 3), (9, 6), (21, 2)]
    alone = [
        _generate(reference_engine(spec, device, torch.float32), [request], 512)[0]
        for request in _requests(lengths)
    ]
    together = _generate(triton_engine(spec, device, torch.float32), _requests(lengths), 24)
    pairs = zip(chain(*alone), chain(*together), strict=True)
    wrong = sum(one != other for one, other in pairs)
    return _row(f"greedy text, {spec.name} model, tokens that differ", wrong, 0)


def check_logits(device: str, spec: ModelSpec) -> Row:
    """Compare logits of a mixed step in bf16 with those of the reference."""
    requests = _requests([(200, 9), (90, 9), (33, 9)])
    chunks = [Chunk(requests[0], 0, 200), Chunk(requests[1], 0, 90), Chunk(requests[2], 0, 33)]
    logits = []
    for make in (reference_engine, triton_engine):
        engine = make(spec, device, torch.bfloat16)
        batch, _ = engine.inputs.build(chunks)
        with torch.inference_mode():
            logits.append(engine.model.logits(batch))
    return _row(f"logits, {spec.name}, bf16", error(logits[1], logits[0]), 3e-2)


def run_checks(device: str) -> Iterator[Row]:
    """Run all checks: small on CPU, with the shipped models' shapes on CUDA.

    A check that raises becomes a row that says so, and the next one begins.
    """
    torch.manual_seed(0)
    small, bf16 = torch.float32, torch.bfloat16
    checks: list[Callable[[], Iterable[Row]]] = [
        lambda: check_attention(device, small, AttentionShape(4, 2, 64)),
        lambda: check_fused(device, small),
        lambda: [check_rope(device, small)],
        lambda: [check_texts(device, SMALL)],
        lambda: [check_texts(device, NORMED)],
    ]
    if torch.device(device).type == "cuda":
        shape = ModelSpec("8b_shape", 2, 4096, 32, 8, 128, 14336, 128256, rms_norm_eps=1e-5)
        checks += [
            lambda: check_attention(device, bf16, AttentionShape(32, 8, 128)),
            lambda: check_attention(device, bf16, AttentionShape(32, 8, 64)),
            lambda: check_attention(device, bf16, AttentionShape(16, 8, 128)),
            lambda: check_fused(device, bf16),
            lambda: [check_rope(device, bf16)],
            lambda: [check_logits(device, shape)],
        ]
    for number, check in enumerate(checks):
        try:
            yield from check()
        except Exception as error:  # whatever it is, the other checks go on
            yield _row(f"group {number}: {error!r:.200}", math.nan, 0.0)


def main() -> int:
    """Print every check as a line of JSON; the exit code is 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    if device == "cpu":
        ops.MIN_PROGRAMS = 8  # the interpreter runs them one after the other
    wrong = 0
    for row in run_checks(device):
        wrong += not row["ok"]
        print(json.dumps(row), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
