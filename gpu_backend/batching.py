"""From the chunks of a step to the metadata of a forward pass, all of it in one block of memory.

A step in which everybody decodes on is made out of the one before: every position grows by one, and
one sequence in `block_size` has a new page. Nothing else is looked at, so that its cost hardly
depends on how many sequences there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_backend.batch import Batch, HostBatch, Ints
from gpu_backend.rows import GRAIN, Rows, Rows_
from simulator.core.request import Chunk

Bounds = dict[str, tuple[slice, tuple[int, ...]]]
"""Where in the block each part lies, and its shape."""


@dataclass(slots=True)
class _Going:
    """A step of decodes alone that the next one can be made of."""

    rows: Rows_
    host: HostBatch  # views of the block
    tensors: dict[str, Any]  # views of it on the device
    end: int  # numbers of the block that are in use


class Batcher:
    """Builds batches out of the persistent rows; its block on the host is used step after step.

    What a batch holds on the host, and on CPU its tensors, is therefore good until the next one.
    """

    def __init__(self, rows: Rows, block_size: int, device: torch.device) -> None:
        self.rows = rows
        self.block_size = block_size
        self.device = device
        self._going: _Going | None = None
        self._reserve(1 << 14)

    def _reserve(self, size: int) -> None:
        on_cuda = self.device.type == "cuda"
        self._block = torch.zeros(size, dtype=torch.int32, pin_memory=on_cuda)
        self._array: Ints = self._block.numpy()
        self._there = self._block.to(self.device)  # on CPU itself

    def reset(self, rows: Rows) -> None:
        """Build out of other rows from now on."""
        self.rows = rows
        self._going = None

    def build(self, chunks: Sequence[Chunk]) -> tuple[Batch, Rows_]:
        """Gather a step's metadata; also give the rows of the sequences that emit a token.

        Sequences with one new token come first, the others after them, in the order of `chunks`.
        """
        rows, n = self.rows.find(chunks), len(chunks)
        starts = np.fromiter((chunk.start for chunk in chunks), np.int32, n)
        counts = np.fromiter((chunk.tokens for chunk in chunks), np.int32, n)
        decodes = int((counts == 1).sum())
        if decodes < n and (counts[:decodes] != 1).any():
            order = np.argsort(counts != 1, kind="stable")
            rows, starts, counts = rows[order], starts[order], counts[order]
        emitting = starts + counts == self.rows.length[rows]
        return self._pack(decodes, rows, (starts, counts), emitting), rows[emitting]

    def advance(self) -> tuple[Batch, Rows_]:
        """Let everybody of the step before, who must have decoded, decode on: one token each."""
        going = self._going
        assert going is not None, "the step before was not of decodes alone"
        rows, host = going.rows, going.host
        host.positions += 1
        host.lengths += 1
        host.slots += 1
        fresh = np.flatnonzero(host.positions % self.block_size == 0)
        if len(fresh):
            number = host.positions[fresh] // self.block_size
            pages = self.rows.add_pages(rows[fresh], number)
            if int(number.max()) >= host.tables.shape[1]:
                spans = (host.positions.copy(), host.counts.copy())
                return self._pack(len(rows), rows, spans, np.ones(len(rows), bool)), rows
            host.tables[fresh, number] = pages
            host.slots[fresh] = pages * self.block_size
        host.ids[:] = self.rows.text[rows, host.positions]
        self._send(going.end)
        return Batch(len(rows), on_host=host, **going.tensors), rows

    def _pack(
        self, decodes: int, rows: Rows_, spans: tuple[Ints, Ints], emitting: npt.NDArray[np.bool_]
    ) -> Batch:
        """Work out each new token's id, position and slot, and send all of it to the device."""
        size = self.block_size
        starts, counts = spans
        lengths = starts + counts
        ends = np.cumsum(counts, dtype=np.int32)
        total = int(ends[-1])
        if total == len(rows):  # decodes only
            each, positions = rows, starts
        else:
            each = np.repeat(rows, counts)
            positions = np.arange(total, dtype=np.int32) + np.repeat(lengths - ends, counts)
        page, place = np.divmod(positions, size)
        width = -(-int(lengths.max()) // (size * GRAIN)) * GRAIN
        parts = {
            "width": np.array([width], np.int32),
            "ids": self.rows.text[each, positions],
            "positions": positions,
            "slots": self.rows.pages[each, page] * size + place,
            "lengths": lengths,
            "emits": ends[emitting] - 1,
            "tables": self.rows.pages[rows, :width],
        }
        bounds, end = self._fill(parts)
        views = {name: self._array[at].reshape(shape) for name, (at, shape) in bounds.items()}
        del views["width"]
        host = HostBatch(
            starts=views["positions"] if total == len(rows) else starts,
            counts=counts,
            query_starts=np.concatenate((np.zeros(1, np.int32), ends)),
            **views,
        )
        self._send(end)
        tensors: dict[str, Any] = {
            name: self._there[at].view(shape) for name, (at, shape) in bounds.items()
        }
        alone = total == len(rows) and bool(emitting.all())
        self._going = _Going(rows, host, tensors, end) if alone else None
        return Batch(decodes, on_host=host, **tensors)

    def _fill(self, parts: dict[str, Ints]) -> tuple[Bounds, int]:
        """Copy arrays into the block, each to a multiple of GRAIN; also give where they end."""
        bounds: Bounds = {}
        end = 0
        for name, part in parts.items():
            bounds[name] = slice(end, end + part.size), part.shape
            end += -(-part.size // GRAIN) * GRAIN
        if end > len(self._array):
            self._reserve(2 * end)
        for name, part in parts.items():
            self._array[bounds[name][0]] = part.reshape(-1)
        return bounds, end

    def _send(self, end: int) -> None:
        """Bring the block to the device, in one copy; on CPU it is there."""
        if self._there is not self._block:
            self._there[:end].copy_(self._block[:end], non_blocking=True)
