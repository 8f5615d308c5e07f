"""CUDA graphs of decode steps, in sizes: one launch from the host instead of some three hundred.

A graph replays its kernels on the addresses it was captured with, so a step's numbers (token ids,
positions, slots, lengths, block tables) go into one block of int32 that lies at the same place
every time, with one copy from pinned memory. A batch runs in the graph of the next size; rows
that only pad have length 0 and slot -1, so they read and write no cache. What the matrix products
cost follows the padded size, not the batch's.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpu_backend.input_batch import InputBatch
from gpu_backend.kv_cache import KVCache
from gpu_backend.model import Transformer
from gpu_backend.staging import ALIGN, Ints, StagingBuffer, aligned


def sizes_for(most: int) -> tuple[int, ...]:
    """Sizes of the graphs for batches of up to `most`: 1, 2, 4, then multiples of 8."""
    return (*(size for size in (1, 2, 4, *range(8, most, 8)) if size < most), most)


class Graphs:
    """Runs a model's decode steps, each in the graph of the next size; other steps as they come.

    All sizes up to `most` are captured when it is made. Without CUDA the same padded batches run
    uncaptured.
    """

    def __init__(self, model: Transformer, cache: KVCache, most: int = 256) -> None:
        self.sizes = sizes_for(most)
        self._model = model
        limit = -(-model.spec.max_position_embeddings // cache.block_size)
        blocks = aligned(min(limit, cache.num_blocks))
        size = ALIGN + 4 * aligned(most) + aligned(most * blocks)
        self._staging = StagingBuffer(size, cache.kv.device, fixed=True)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # and its tokens
        if cache.kv.is_cuda:
            self._capture_all()

    def bucket(self, batch: InputBatch) -> int:
        """The size that a batch is padded to, 0 where it runs outside the graphs."""
        rows = batch.decodes
        if not rows == batch.tokens == len(batch.emits) <= self.sizes[-1]:
            return 0
        return self.sizes[bisect_left(self.sizes, rows)]

    def sample(self, batch: InputBatch) -> Tensor:
        """Run a step; give the likeliest next tokens, int64 [m], good until the next step.

        Nothing waits for the device.
        """
        size = self.bucket(batch)
        if not size:
            return self._model.sample(batch)
        host = batch.host
        parts = (host.ids, host.positions, host.slots, host.lengths)
        padded = self._pad(size, parts, host.tables)
        if size not in self._captured:
            return self._model.sample(padded)[: batch.decodes]
        graph, tokens = self._captured[size]
        graph.replay()
        return tokens[: batch.decodes]

    def _pad(self, size: int, parts: Sequence[Ints], tables: Ints) -> InputBatch:
        """Send ids, positions, slots and lengths, padded to `size`, to where its graph reads."""
        rows, blocks = tables.shape
        whole = np.zeros((4, size), np.int32)
        whole[2] = -1
        for line, part in zip(whole, parts, strict=True):
            line[:rows] = part
        _, sent = self._staging.stage([np.array([blocks], np.int32), *whole, tables])
        width, ids, positions, slots, lengths, flat = sent
        return InputBatch(
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

    def _capture(self, size: int, pool: object) -> tuple[torch.cuda.CUDAGraph, Tensor]:
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
        return graph, tokens
