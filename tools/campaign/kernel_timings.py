"""Times of single kernels against what the device's memory and matrix units allow.

On CUDA every time is that of a graph of many launches over data that does not fit the L2 cache,
so that neither launch gaps nor cached data flatter it. The ceilings are measured, not looked up.
Without CUDA the same launches are timed by a wall clock, which says nothing but that they work.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import linear

from gpu_backend.input_batch import prefill_tiles

Row = dict[str, object]
Call = Callable[[], object]
REPEATS = 7


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer, and of the data to time it on."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int
    wide: int  # intermediate size of the MLP
    tokens: int  # that the cache under test holds
    page: int = 16

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer, bf16."""
        return 2 * self.kv_heads * self.dim * 2


LLAMA_8B = Shape(32, 8, 128, 4096, 14336, tokens=600_000)
TINY = Shape(4, 2, 64, 256, 704, tokens=2048)


class Bench:
    """A device, its dtype, and how long things take on it."""

    def __init__(self, device: str, shape: Shape) -> None:
        self.device = device
        self.cuda = torch.device(device).type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.shape = shape
        self._random = np.random.default_rng(0)
        torch.manual_seed(0)

    def randn(self, *sizes: int) -> Tensor:
        """Random numbers: zeros make a GPU faster than real data does."""
        return torch.randn(*sizes, dtype=self.dtype, device=self.device)

    def ints(self, values: object) -> Tensor:
        """Send int32 numbers."""
        return torch.as_tensor(np.asarray(values, np.int32)).to(self.device)

    def seconds(self, calls: Sequence[Call]) -> float:
        """Median seconds per call, the calls taking turns."""
        for call in calls[:2]:
            call()
        if not self.cuda:
            start = time.perf_counter()
            calls[0]()
            return time.perf_counter() - start
        rounds = max(1, 16 // len(calls))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        times: list[float] = []
        for _ in range(REPEATS):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return median(times) / rounds / len(calls)

    def row(
        self,
        kernel: str,
        calls: Sequence[Call],
        *,
        moved: int = 0,
        flops: int = 0,
        **columns: object,
    ) -> Row:
        """Time calls that each move so many bytes, or do so many operations; make their row."""
        took = self.seconds(calls)
        row: Row = {"kernel": kernel, **columns, "us": took * 1e6}
        if moved:
            row["gb_s"] = moved / took / 1e9
        if flops:
            row["tflop_s"] = flops / took / 1e12
        return row

    def tables(self, rows: int, pages: int, turns: int) -> list[Tensor]:
        """Page tables [rows, pages], as many as given, each in another part of the cache."""
        have = self.shape.tokens // self.shape.page
        order = self._random.permutation(have)
        start = (np.arange(turns) * rows * pages) % max(1, have - rows * pages + 1)
        return [self.ints(order[at : at + rows * pages].reshape(rows, pages)) for at in start]

    def cache(self) -> tuple[Tensor, Tensor]:
        """Make one layer's keys and values, random."""
        shape = self.shape
        size = (shape.tokens, shape.kv_heads, shape.dim)
        return self.randn(*size), self.randn(*size)


def ceilings(bench: Bench) -> Iterator[Row]:
    """Time a large copy (bytes read and written) and a large matrix product."""
    size = 2**31 if bench.cuda else 2**20
    source, target = (bench.randn(size // bench.dtype.itemsize) for _ in range(2))
    yield bench.row("copy", [partial(target.copy_, source)], moved=2 * size)
    del source, target
    side = 8192 if bench.cuda else 256
    a, b = bench.randn(side, side), bench.randn(side, side)
    yield bench.row("matmul", [lambda: a @ b], flops=2 * side**3)


def decodes(bench: Bench, points: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Time decode attention of one layer at (rows, context), and of rows of unequal lengths."""
    k, v = bench.cache()
    for rows, context in points:
        yield _decode(bench, k, v, np.full(rows, context))
    rows, context = points[0]
    skewed = np.full(max(rows, 8), max(1, context // 4))
    skewed[0] = min(16 * context, bench.shape.tokens // len(skewed))
    yield _decode(bench, k, v, skewed)


def _decode(bench: Bench, k: Tensor, v: Tensor, lengths: npt.NDArray[np.int64]) -> Row:
    """Time it for rows of these lengths, cut as the engine does."""
    from gpu_backend.cuda import ops

    shape, rows = bench.shape, len(lengths)
    splits = ops.splits_for(rows, shape.kv_heads)
    pages = -(-int(lengths.max()) // shape.page)
    turns = max(1, min(16, shape.tokens // (rows * pages * shape.page)))
    width, sizes = bench.ints([pages]), bench.ints(lengths)
    scratch = ops.Scratch(
        torch.empty(rows * shape.heads * splits * shape.dim, device=bench.device),
        torch.empty(rows * shape.heads * splits, device=bench.device),
    )
    q, out = (bench.randn(rows, shape.heads, shape.dim) for _ in range(2))
    calls = [
        partial(ops.decode, q, layer, sizes, out=out, scratch=scratch, splits=splits)
        for layer in (
            ops.PagedLayer(k, v, table, width, shape.page)
            for table in bench.tables(rows, pages, turns)
        )
    ]
    return bench.row(
        "decode" if lengths.min() == lengths.max() else "decode_skewed", calls,
        rows=rows, context=int(lengths.max()), tokens=int(lengths.sum()),
        variant=f"splits={splits}",
        moved=int(lengths.sum()) * shape.key_bytes,
    )  # fmt: skip


def prefills(bench: Bench, points: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Time prefill attention of one layer at (chunk, cached)."""
    from gpu_backend.cuda import ops

    k, v = bench.cache()
    shape = bench.shape
    for new, cached in points:
        pages = -(-(new + cached) // shape.page)
        table, width = bench.tables(1, pages, 1)[0], bench.ints([pages])
        q, out = (bench.randn(new, shape.heads, shape.dim) for _ in range(2))
        one = np.array([[cached], [new]], np.int32)
        tiles = bench.ints(prefill_tiles(one[0], one[1], 0, ops.prefill_cut(bench.dtype).rows))
        layer = ops.PagedLayer(k, v, table, width, shape.page)
        call = partial(ops.prefill, q, layer, tiles, out)
        pairs = new * cached + new * (new + 1) // 2  # of a query and a key that it sees
        flops = 4 * shape.heads * shape.dim * pairs
        yield bench.row("prefill", [call], rows=new, context=cached, flops=flops)


def fused(bench: Bench, sizes: Sequence[int]) -> Iterator[Row]:
    """Time norm, rope with store, and activation at so many rows."""
    from gpu_backend.cuda import ops

    shape = bench.shape
    k, v = bench.cache()
    rotary = torch.randn(4096, shape.dim, device=bench.device)
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    for rows in sizes:
        places = bench.ints(np.arange(rows) % min(4096, shape.tokens))
        x, residual = bench.randn(rows, shape.hidden), bench.randn(rows, shape.hidden)
        weight, qkv = bench.randn(shape.hidden), bench.randn(rows, width)
        gate_up = bench.randn(rows, 2 * shape.wide)
        store = partial(
            ops.rope_store,
            qkv,
            None,
            None,
            turns=rotary,
            positions=places,
            slots=places,
            keys=k,
            values=v,
            eps=1e-6,
        )
        calls: tuple[tuple[str, int, Call], ...] = (
            ("add_rmsnorm", 4 * shape.hidden, partial(ops.add_rmsnorm, x, residual, weight, 1e-6)),
            ("rope_store", 2 * width, store),
            ("silu_mul", 3 * shape.wide, partial(ops.silu_mul, gate_up)),
        )
        for name, numbers, call in calls:
            moved = rows * numbers * bench.dtype.itemsize
            yield bench.row(name, [call], rows=rows, moved=moved)


def matmuls(bench: Bench, sizes: Sequence[int]) -> Iterator[Row]:
    """Time the four matrix products of a layer together, at so many tokens."""
    shape = bench.shape
    pairs = (
        (shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.dim),
        (shape.heads * shape.dim, shape.hidden),
        (shape.hidden, 2 * shape.wide),
        (shape.wide, shape.hidden),
    )
    weights = [bench.randn(after, before) for before, after in pairs]
    numbers = sum(w.numel() for w in weights)
    for rows in sizes:
        inputs = [bench.randn(rows, before) for before, _ in pairs]

        def layer(inputs: list[Tensor] = inputs) -> None:
            for x, weight in zip(inputs, weights, strict=True):
                linear(x, weight)

        yield bench.row(
            "layer_matmuls", [layer], rows=rows, moved=numbers * bench.dtype.itemsize,
            flops=2 * rows * numbers,
        )  # fmt: skip
