"""The inputs of a forward pass, on the host and on the device, and how they come out of a step.

They are gathered from the request states into one block of memory. A step in which everybody
decodes on is made out of the one before: every position grows by one, and one sequence in
`block_size` has a new block. Nothing else is looked at, so that its cost hardly depends on how
many sequences there are.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_backend.request_states import RequestStates, RowIndices
from gpu_backend.staging import Ints, StagingBuffer, aligned
from simulator.core.request import Chunk


@dataclass(slots=True)
class HostInputs:
    """What the host knows of a step's n sequences, as int32 arrays."""

    starts: Ints  # [n] tokens in the cache before this step
    counts: Ints  # [n] new tokens
    lengths: Ints  # [n] tokens in the cache after it: starts + counts
    query_starts: Ints  # [n + 1] where each one's new tokens begin among the T
    ids: Ints  # [T] the new tokens
    positions: Ints  # [T]
    slots: Ints  # [T]
    tables: Ints  # [n, width]
    emits: Ints  # [m]


@dataclass(slots=True)
class InputBatch:
    """One step: n sequences with T new tokens, those with one new token first.

    The tensors are int32, views of one block on the device; each begins at a multiple of 16
    numbers. A batch that runs in a CUDA graph has the graph's size as n and T there: rows that only
    pad have length 0 and slot -1, so they read and write no cache.
    """

    decodes: int  # the first so many sequences have one new token each
    ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] where each token's KV goes: block * block_size + offset; -1: nowhere
    lengths: Tensor  # [n] tokens in the cache after this step; 0: a row that only pads
    width: Tensor  # [1] blocks of a row of `tables`, a multiple of 16
    tables: Tensor  # [n, width] blocks, 0 (the null block) beyond each sequence's last
    emits: Tensor  # [m] places among the T of the tokens after which a new one is sampled
    tiles: Tensor | None = None  # [k, 4] as of `prefill_tiles`, where a backend wants them
    bucket: int = 0  # sequences that it is padded to, to run in a CUDA graph; 0: it does not
    on_host: HostInputs | None = None
    scratch: dict[str, Any] = field(default_factory=dict)  # what a backend makes once a step

    @property
    def tokens(self) -> int:
        """T, the new tokens in all."""
        return len(self.ids)

    @property
    def host(self) -> HostInputs:
        """The step on the host, without what only pads; a batch to capture has none."""
        assert self.on_host is not None
        return self.on_host


def prefill_tiles(starts: Ints, new: Ints, first: int, rows: int) -> Ints:
    """Cut chunks into tiles [n, 4]: first row, rows, position of the first, sequence.

    Chunk i has `new[i]` tokens after `starts[i]` cached ones; its rows follow those of the chunks
    before it, from row `first` on. The tiles with the most keys come first, lest they end last.
    """
    counts = -(-new // rows)
    chunk = np.repeat(np.arange(len(new), dtype=np.int32), counts)
    ahead = np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)
    ahead = (ahead * rows).astype(np.int32)
    begin = (first + np.cumsum(new) - new).astype(np.int32)
    tiles = np.stack(
        [begin[chunk] + ahead, np.minimum(rows, new[chunk] - ahead), starts[chunk] + ahead, chunk],
        axis=1,
    )
    order = np.argsort(-(tiles[:, 1] + tiles[:, 2]), kind="stable")
    return np.ascontiguousarray(tiles[order], dtype=np.int32)


class InputBatchBuilder:
    """Builds batches out of the request states; its block on the host is used step after step.

    What a batch holds on the host, and on CPU its tensors, is therefore good until the next one.
    Steps in which every sequence decodes and emits are padded to the next of `capture_sizes`
    (ascending) and lie where the CUDA graph of that size reads them; a row of their block tables
    has up to `max_blocks`. Chunks are cut into tiles of `tile_rows` queries, 0: into none. One
    copy per step goes to the device.
    """

    def __init__(
        self,
        states: RequestStates,
        block_size: int,
        device: torch.device,
        *,
        capture_sizes: Sequence[int] = (),
        max_blocks: int = 0,
        tile_rows: int = 0,
    ) -> None:
        self.states = states
        self.block_size = block_size
        self.device = device
        self.capture_sizes = [*capture_sizes]
        self.tile_rows = tile_rows
        self._staging = StagingBuffer(1 << 14, device)
        self._graph_staging: StagingBuffer | None = None
        if capture_sizes:
            most = capture_sizes[-1]
            size = aligned(1) + 4 * aligned(most) + aligned(most * aligned(max_blocks))
            self._graph_staging = StagingBuffer(size, device, fixed=True)
        # The step before, if it was of decodes alone, and the block that it lies in.
        self._last: tuple[InputBatch, RowIndices, StagingBuffer] | None = None

    def reset(self, states: RequestStates) -> None:
        """Build out of other states from now on."""
        self.states = states
        self._last = None

    def bucket(self, decodes: int) -> int:
        """The size that so many decodes are padded to, 0 where there is no graph for them."""
        place = bisect_left(self.capture_sizes, decodes)
        return self.capture_sizes[place] if place < len(self.capture_sizes) else 0

    def padding(self, size: int) -> InputBatch:
        """Make a batch of rows that only pad, to capture the graph of a size with."""
        no = np.zeros(0, np.int32)
        width = aligned(1)
        tables = np.zeros((size, width), np.int32)
        return self._pad(size, (no, no, no, no), tables)[0]

    def build(self, chunks: Sequence[Chunk]) -> tuple[InputBatch, RowIndices]:
        """Gather a step's inputs; also give the rows of the sequences that emit a token.

        Sequences with one new token come first, the others after them, in the order of `chunks`.
        """
        rows, n = self.states.find(chunks), len(chunks)
        starts = np.fromiter((chunk.start for chunk in chunks), np.int32, n)
        counts = np.fromiter((chunk.tokens for chunk in chunks), np.int32, n)
        decodes = int((counts == 1).sum())
        if decodes < n and (counts[:decodes] != 1).any():
            order = np.argsort(counts != 1, kind="stable")
            rows, starts, counts = rows[order], starts[order], counts[order]
        emitting = starts + counts == self.states.num_tokens[rows]
        return self._gather(decodes, rows, starts, counts, emitting), rows[emitting]

    def advance(self) -> tuple[InputBatch, RowIndices]:
        """Let everybody of the step before, who must have decoded, decode on: one token each."""
        assert self._last is not None, "the step before was not of decodes alone"
        batch, rows, staging = self._last
        host = batch.host
        host.positions += 1
        host.lengths += 1
        host.slots += 1
        fresh = np.flatnonzero(host.positions % self.block_size == 0)
        if len(fresh):
            number = host.positions[fresh] // self.block_size
            blocks = self.states.add_blocks(rows[fresh], number)
            if int(number.max()) >= host.tables.shape[1]:
                everybody = np.ones(len(rows), bool)
                starts, counts = host.positions.copy(), host.counts.copy()
                return self._gather(len(rows), rows, starts, counts, everybody), rows
            host.tables[fresh, number] = blocks
            host.slots[fresh] = blocks * self.block_size
        host.ids[:] = self.states.token_ids[rows, host.positions]
        staging.send()
        return replace(batch, scratch={}), rows

    def _gather(
        self,
        decodes: int,
        rows: RowIndices,
        starts: Ints,
        counts: Ints,
        emitting: npt.NDArray[np.bool_],
    ) -> InputBatch:
        """Work out each new token's id, position and slot, and send all of it to the device."""
        states, size = self.states, self.block_size
        lengths = starts + counts
        ends = np.cumsum(counts, dtype=np.int32)
        total = int(ends[-1])
        decodes_only = total == len(rows)
        if decodes_only:
            each, positions = rows, starts
        else:
            each = np.repeat(rows, counts)
            positions = np.arange(total, dtype=np.int32) + np.repeat(lengths - ends, counts)
        block, offset = np.divmod(positions, size)
        slots = states.block_tables[each, block] * size + offset
        width = aligned(-(-int(lengths.max()) // size))
        tables = states.block_tables[rows, :width]
        ids = states.token_ids[each, positions]
        everybody = decodes_only and bool(emitting.all())
        bucket = self.bucket(len(rows)) if everybody else 0
        if bucket:
            batch, host = self._pad(bucket, (ids, positions, slots, lengths), tables)
        else:
            parts = {
                "width": np.array([width], np.int32), "ids": ids, "positions": positions,
                "slots": slots, "lengths": lengths, "emits": ends[emitting] - 1, "tables": tables,
            }  # fmt: skip
            if self.tile_rows and decodes < len(rows):
                parts["tiles"] = prefill_tiles(
                    starts[decodes:], counts[decodes:], decodes, self.tile_rows
                )
            batch, host = self._send(decodes, parts)
        batch.on_host = HostInputs(
            starts=host["positions"] if decodes_only else starts,
            counts=counts,
            query_starts=np.concatenate((np.zeros(1, np.int32), ends)),
            **host,
        )
        staging = self._graph_staging if bucket else self._staging
        assert staging is not None
        self._last = (batch, rows, staging) if everybody else None
        return batch

    def _send(self, decodes: int, parts: dict[str, Ints]) -> tuple[InputBatch, dict[str, Ints]]:
        """Send a step that is launched kernel by kernel; also give its arrays on the host."""
        arrays, tensors = self._staging.stage([*parts.values()])
        host = dict(zip(parts, arrays, strict=True))
        width = int(host.pop("width")[0])
        host.pop("tiles", None)
        host["tables"] = host["tables"].reshape(-1, width)
        there: dict[str, Any] = dict(zip(parts, tensors, strict=True))
        there["tables"] = there["tables"].view(-1, width)
        if "tiles" in there:
            there["tiles"] = there["tiles"].view(-1, 4)
        return InputBatch(decodes, **there), host

    def _pad(
        self, size: int, parts: Sequence[Ints], tables: Ints
    ) -> tuple[InputBatch, dict[str, Ints]]:
        """Send ids, positions, slots and lengths, padded to `size`, to where its graph reads."""
        assert self._graph_staging is not None
        rows, width = len(parts[0]), tables.shape[1]
        whole = np.zeros((4, size), np.int32)
        whole[2] = -1
        for line, part in zip(whole, parts, strict=True):
            line[:rows] = part
        sent = [np.array([width], np.int32), *whole, tables]
        arrays, tensors = self._graph_staging.stage(sent)
        names = ("ids", "positions", "slots", "lengths")
        host = {name: array[:rows] for name, array in zip(names, arrays[1:5], strict=True)}
        host["tables"] = arrays[5].reshape(-1, width)
        host["emits"] = np.arange(rows, dtype=np.int32)
        there: dict[str, Any] = dict(zip(names, tensors[1:5], strict=True))
        batch = InputBatch(
            decodes=size,
            width=tensors[0],
            tables=tensors[5],
            emits=there["ids"],  # as many as rows: a token comes out after every one
            bucket=size,
            **there,
        )
        return batch, host
