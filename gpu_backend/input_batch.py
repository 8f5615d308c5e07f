"""The inputs of a forward pass, on the host and on the device, and how they come out of a step.

They are gathered from the request states into one block of memory. A step in which everybody
decodes on is made out of the one before: every position grows by one, and one sequence in
`block_size` has a new block. Nothing else is looked at, so that its cost hardly depends on how
many sequences there are.
"""

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
    numbers. A batch in a CUDA graph has the sizes of the graph and nothing on the host.
    """

    decodes: int  # the first so many sequences have one new token each
    ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] where each token's KV goes: block * block_size + offset; -1: nowhere
    lengths: Tensor  # [n] tokens in the cache after this step; 0: a row that only pads
    width: Tensor  # [1] blocks of a row of `tables`, a multiple of 16
    tables: Tensor  # [n, width] blocks, 0 (the null block) beyond each sequence's last
    emits: Tensor  # [m] places among the T of the tokens after which a new one is sampled
    on_host: HostInputs | None = None
    scratch: dict[str, Any] = field(default_factory=dict)  # what a backend makes once a step

    @property
    def tokens(self) -> int:
        """T, the new tokens in all."""
        return len(self.ids)

    @property
    def host(self) -> HostInputs:
        """The step on the host; a batch in a CUDA graph has none."""
        assert self.on_host is not None
        return self.on_host


class InputBatchBuilder:
    """Builds batches out of the request states; its block on the host is used step after step.

    What a batch holds on the host, and on CPU its tensors, is therefore good until the next one.
    """

    def __init__(self, states: RequestStates, block_size: int, device: torch.device) -> None:
        self.states = states
        self.block_size = block_size
        self._staging = StagingBuffer(1 << 14, device)
        self._last: tuple[InputBatch, RowIndices] | None = None  # if it was of decodes alone

    def reset(self, states: RequestStates) -> None:
        """Build out of other states from now on."""
        self.states = states
        self._last = None

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
        batch, rows = self._last
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
        self._staging.send()
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
        width = aligned(-(-int(lengths.max()) // size))
        parts = {
            "width": np.array([width], np.int32),
            "ids": states.token_ids[each, positions],
            "positions": positions,
            "slots": states.block_tables[each, block] * size + offset,
            "lengths": lengths,
            "emits": ends[emitting] - 1,
            "tables": states.block_tables[rows, :width],
        }
        arrays, tensors = self._staging.stage([*parts.values()])
        views = dict(zip(parts, arrays, strict=True))
        del views["width"]
        views["tables"] = views["tables"].reshape(-1, width)
        there: dict[str, Any] = dict(zip(parts, tensors, strict=True))
        there["tables"] = there["tables"].view(-1, width)
        host = HostInputs(
            starts=views["positions"] if decodes_only else starts,
            counts=counts,
            query_starts=np.concatenate((np.zeros(1, np.int32), ends)),
            **views,
        )
        batch = InputBatch(decodes, on_host=host, **there)
        self._last = (batch, rows) if decodes_only and emitting.all() else None
        return batch
