"""From the chunks of a step to the metadata of a forward pass, all of it in one block of memory."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu_backend.batch import Batch, HostBatch, Ints
from gpu_backend.rows import GRAIN, Rows, Rows_
from simulator.request import Chunk


class Batcher:
    """Builds batches out of the persistent rows; its buffer on the host is used step after step."""

    def __init__(self, rows: Rows, block_size: int, device: torch.device) -> None:
        self.rows = rows
        self.block_size = block_size
        self.device = device
        self._buffer = self._allocate(1 << 14)

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def build(self, chunks: Sequence[Chunk]) -> tuple[Batch, Rows_]:
        """Gather a step's metadata; also give the rows of the sequences that emit a token.

        Sequences with one new token come first, the others after them, in the order of `chunks`.
        """
        rows = self.rows.find(chunks)
        pairs = [(chunk.start, chunk.tokens) for chunk in chunks]
        starts, counts = np.array(pairs, np.int32).T
        decodes = int((counts == 1).sum())
        if decodes < len(counts) and (counts[:decodes] != 1).any():
            order = np.argsort(counts != 1, kind="stable")
            rows, starts, counts = rows[order], starts[order], counts[order]
        emitting = starts + counts == self.rows.length[rows]
        return self._pack(decodes, rows, (starts, counts), emitting), rows[emitting]

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
        device = self._send(parts)
        host = HostBatch(
            starts=starts,
            counts=counts,
            query_starts=np.concatenate((np.zeros(1, np.int32), ends)),
            **{name: part for name, part in parts.items() if name != "width"},
        )
        return Batch(decodes=decodes, on_host=host, **device)  # type: ignore[arg-type]

    def _send(self, parts: dict[str, Ints]) -> dict[str, torch.Tensor]:
        """Copy arrays to the device, all in one copy; on CPU into one block of memory."""
        bounds, end = {}, 0
        for name, part in parts.items():
            bounds[name] = slice(end, end + part.size)
            end += -(-part.size // GRAIN) * GRAIN
        if end > len(self._buffer):
            self._buffer = self._allocate(2 * end)
        there = self._buffer[:end]
        array = there.numpy()
        for name, part in parts.items():
            array[bounds[name]] = part.reshape(-1)
        if there.is_pinned():
            there = there.to(self.device, non_blocking=True)
        return {name: there[bound].view(parts[name].shape) for name, bound in bounds.items()}
