"""CUDA graphs of decode steps, in sizes: one launch from the host instead of some three hundred.

A graph replays its kernels on the addresses it was captured with, so a step's numbers (token ids,
positions, slots, lengths, page tables) go into one block of int32 that lies at the same place
every time, with one copy from pinned memory. A batch runs in the graph of the next size; rows
that only pad have length 0 and slot -1, so they read and write no cache. What the matrix products
cost follows the padded size, not the batch's.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_backend.batch import Batch, Ints
from gpu_backend.cache import KVCache
from gpu_backend.model import Transformer

ALIGN = 16  # int32: sections begin at 64 bytes, as the kernels' wide loads want them
SMALL = (1, 2, 4)
STEP = 8


def sizes_for(most: int) -> tuple[int, ...]:
    """Sizes of the graphs for batches of up to `most`: 1, 2, 4, then multiples of 8."""
    sizes = {size for size in SMALL if size < most} | set(range(STEP, most, STEP))
    return (*sorted(sizes), most)


def aligned(size: int) -> int:
    """The size of a section, rounded up to where the next one may begin."""
    return -(-size // ALIGN) * ALIGN


class Staging:
    """A block of int32 that is filled on the host and lands on the device in one copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._on_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=self._on_cuda)
        self._there = self._host.to(device)
        self._array: Ints = self._host.numpy()
        self._landed: torch.cuda.Event | None = None
        if self._on_cuda:
            self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, parts: Sequence[Ints]) -> list[Tensor]:
        """Send arrays, all in one copy; return them as flat tensors on the device.

        Parts of equal sizes always land at the same addresses. The tensors are good until the
        next call. Raises ValueError where the block is too small.
        """
        ends = np.cumsum([0, *(aligned(part.size) for part in parts)]).tolist()
        if ends[-1] > self.size:
            raise ValueError(f"a step needs {ends[-1]} numbers and the block holds {self.size}")
        if self._landed is not None:
            self._landed.synchronize()  # the copy before this one has left the block
        for first, part in zip(ends, parts, strict=False):
            self._array[first : first + part.size] = part.reshape(-1)
        if self._landed is not None:
            self._there[: ends[-1]].copy_(self._host[: ends[-1]], non_blocking=True)
            self._landed.record()
        return [
            self._there[first : first + part.size] for first, part in zip(ends, parts, strict=False)
        ]


@dataclass(slots=True)
class _Captured:
    """A graph, and where it leaves its tokens."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor


class Graphs:
    """Runs a model's decode steps, each in the graph of the next size; other steps as they come.

    All sizes up to `most` are captured when it is made. Without CUDA the same padded batches run
    uncaptured.
    """

    def __init__(self, model: Transformer, cache: KVCache, most: int = 256) -> None:
        self.sizes = sizes_for(most)
        self._model = model
        limit = -(-model.spec.max_position_embeddings // cache.block_size)
        pages = aligned(min(limit, cache.num_blocks))
        self._staging = Staging(ALIGN + 4 * aligned(most) + aligned(most * pages), cache.kv.device)
        self._captured: dict[int, _Captured] = {}
        if cache.kv.is_cuda:
            self._capture_all()

    def bucket(self, batch: Batch) -> int:
        """The size that a batch is padded to, 0 where it runs outside the graphs."""
        rows = batch.decodes
        if not rows == batch.tokens == len(batch.emits) <= self.sizes[-1]:
            return 0
        return self.sizes[bisect_left(self.sizes, rows)]

    def sample(self, batch: Batch) -> Tensor:
        """Run a step; give the likeliest next tokens, int64 [m], good until the next step.

        Nothing waits for the device.
        """
        size = self.bucket(batch)
        if not size:
            return self._model.sample(batch)
        host = batch.host
        parts = (host.ids, host.positions, host.slots, host.lengths)
        padded = self._pad(size, parts, host.tables)
        captured = self._captured.get(size)
        if captured is None:
            return self._model.sample(padded)[: batch.decodes]
        captured.graph.replay()
        return captured.tokens[: batch.decodes]

    def _pad(self, size: int, parts: Sequence[Ints], tables: Ints) -> Batch:
        """Send ids, positions, slots and lengths, padded to `size`, to where its graph reads."""
        rows, pages = tables.shape
        whole = np.zeros((4, size), np.int32)
        whole[2] = -1
        for line, part in zip(whole, parts, strict=True):
            line[:rows] = part
        sent = self._staging.send([np.array([pages], np.int32), *whole, tables])
        width, ids, positions, slots, lengths, flat = sent
        return Batch(
            decodes=size,
            ids=ids,
            positions=positions,
            slots=slots,
            lengths=lengths,
            width=width,
            tables=flat,
            emits=ids,  # as many as rows: a token comes out after every one
        )

    def _capture_all(self) -> None:
        """Capture every size, the largest first: its memory then serves the others."""
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            for size in reversed(self.sizes):
                self._captured[size] = self._capture(size, pool)
            torch.cuda.synchronize()

    def _capture(self, size: int, pool: object) -> _Captured:
        """Capture the graph of one size."""
        one = np.ones(size, np.int32)
        tables = np.zeros((size, ALIGN), np.int32)
        batch = self._pad(size, (one, one, -one, one), tables)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._model.sample(batch)  # compiles and makes handles, which a capture may not
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]
            tokens = self._model.sample(batch)
        return _Captured(graph, tokens)
