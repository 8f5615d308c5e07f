"""The inputs of a forward pass, on the host and on the device, and how they come out of a step.

They are gathered from the request states into one block of memory. A step in which everybody
decodes on is made out of the one before: every position grows by one, and one sequence in
`block_size` has a new block. Where somebody has joined or left, the others' rows are known still.
Nothing else is looked at, so that its cost hardly depends on how many sequences there are.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_backend.request_states import RequestStates, RowIndices
from gpu_backend.staging import Ints, StagingBuffer, aligned
from simulator.core.executor import MIXED_GRAPH_PROMPTS
from simulator.core.request import Chunk, Request

IDS, POSITIONS, SLOTS, LENGTHS = range(4)
"""Lines of a step's numbers, one below the other; a step with prompts has lengths apart."""
NONE: Ints = np.zeros(0, np.int32)
NO_TILES: Ints = np.zeros((0, 4), np.int32)


@dataclass(slots=True)
class HostInputs:
    """What the host knows of a step's n sequences, as int32 arrays."""

    counts: Ints  # [n] new tokens
    lengths: Ints  # [n] tokens in the cache after it, the new ones included
    query_starts: Ints  # [n + 1] where each one's new tokens begin among the T
    tables: Ints  # [n, width]
    emits: Ints  # [m]
    longest: int  # of the lengths


@dataclass(slots=True)
class InputBatch:
    """One step: n sequences with T new tokens, those with one new token first.

    The tensors are int32, views of one block on the device; each begins at a multiple of 16
    numbers. A batch that runs in a CUDA graph has the graph's size as T there, and n, where nobody
    has more than one token, too: rows that only pad have length 0 and slot -1, so they read and
    write no cache.
    """

    decodes: int  # the first so many sequences have one new token each
    ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] where each token's KV goes: block * block_size + offset; -1: nowhere
    lengths: Tensor  # [n] tokens in the cache after this step; of decodes alone in a mixed graph
    width: Tensor  # [1] blocks of a row of `tables`, a multiple of 16
    tables: Tensor  # [n, width] blocks, 0 (the null block) beyond each sequence's last
    emits: Tensor  # [m] places among the T of the tokens after which a new one is sampled
    tiles: Tensor | None = None  # [k, 4] as of `prefill_tiles`, where a backend wants them
    bucket: int = 0  # tokens that it is padded to, to run in a CUDA graph; 0: it does not
    mixed: bool = False  # that graph is one of steps with prompts
    on_host: HostInputs | None = None
    scratch: dict[str, Any] = field(default_factory=dict)  # what a backend makes for all layers

    @property
    def tokens(self) -> int:
        """T, the new tokens in all."""
        return len(self.ids)

    @property
    def host(self) -> HostInputs:
        """The step on the host, without what only pads; a batch to capture has none."""
        assert self.on_host is not None
        return self.on_host


def prefill_tiles(starts: Ints, new: Ints, first: int, rows: int, sequence: int = 0) -> Ints:
    """Cut chunks into tiles [n, 4]: first row, rows, position of the first, sequence.

    Chunk i has `new[i]` tokens after `starts[i]` cached ones, and is sequence `sequence` + i; its
    rows follow those of the chunks before it, from row `first` on. The tiles with the most keys
    come first, lest they end last.
    """
    counts = -(-new // rows)
    chunk = np.repeat(np.arange(len(new), dtype=np.int32), counts)
    ahead = np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)
    ahead = (ahead * rows).astype(np.int32)
    begin = (first + np.cumsum(new) - new).astype(np.int32)
    tiles = np.stack(
        [
            begin[chunk] + ahead,
            np.minimum(rows, new[chunk] - ahead),
            starts[chunk] + ahead,
            sequence + chunk,
        ],
        axis=1,
    )
    order = np.argsort(-(tiles[:, 1] + tiles[:, 2]), kind="stable")
    return np.ascontiguousarray(tiles[order], dtype=np.int32)


def most_tiles(tokens: int, rows: int) -> int:
    """Count the tiles of `rows` that a graph of so many tokens has room for.

    A chunk fills all of its tiles but one.
    """
    return tokens // rows + MIXED_GRAPH_PROMPTS


@dataclass(slots=True)
class _Decodes:
    """A step of decodes alone, as the next one goes on from it."""

    batch: InputBatch
    rows: RowIndices
    lines: Ints  # [4, n]: ids, positions, slots, lengths, where they are sent from
    staging: StagingBuffer


class InputBatchBuilder:
    """Builds batches out of the request states; its block on the host is used step after step.

    What a batch holds on the host, and on CPU its tensors, is therefore good until the next one.
    Steps in which every sequence decodes and emits are padded to the next of `capture_sizes`
    (ascending) and lie where the CUDA graph of that size reads them; a row of their block tables
    has up to `max_blocks`. So are steps with prompts, to the next of `mixed_sizes`, where these are
    few. Chunks are cut into tiles of `tile_rows` queries, 0: into none. One copy per step goes to
    the device.
    """

    def __init__(
        self,
        states: RequestStates,
        block_size: int,
        device: torch.device,
        *,
        capture_sizes: Sequence[int] = (),
        mixed_sizes: Sequence[int] = (),
        max_blocks: int = 0,
        tile_rows: int = 0,
    ) -> None:
        self.states = states
        self.block_size = block_size
        self.device = device
        self.capture_sizes = [*capture_sizes]
        self.mixed_sizes = [*mixed_sizes]
        self.tile_rows = tile_rows
        self._max_decodes = max(capture_sizes, default=0)
        self._staging = StagingBuffer(1 << 14, device)
        self._graph_staging: StagingBuffer | None = None
        if capture_sizes:
            longest = max(*capture_sizes, *mixed_sizes)
            rows = self._max_decodes + MIXED_GRAPH_PROMPTS
            tiles = most_tiles(longest, tile_rows) if tile_rows else 0
            size = aligned(1) + 4 * aligned(longest) + aligned(4 * tiles) + aligned(rows)
            self._graph_staging = StagingBuffer(
                size + aligned(rows * aligned(max_blocks)), device, fixed=True
            )
        self._last: _Decodes | None = None  # the step before, if it was of decodes alone

    def reset(self, states: RequestStates) -> None:
        """Build out of other states from now on."""
        self.states = states
        self._last = None

    def bucket(self, decodes: int) -> int:
        """The size that so many decodes are padded to, 0 where there is no graph for them."""
        return next_size(self.capture_sizes, decodes)

    def padding(self, size: int, *, mixed: bool = False) -> InputBatch:
        """Make a batch of rows that only pad, to capture the graph of a size with."""
        tables = np.zeros((1, aligned(1)), np.int32)
        lines = np.zeros((3 if mixed else 4, 0), np.int32)
        if mixed:
            return self._send_mixed(size, lines, tables)[0]
        return self._send_decodes(size, lines, tables)[0]

    def build(
        self, chunks: Sequence[Chunk], decoding: Sequence[Request] = ()
    ) -> tuple[InputBatch, RowIndices]:
        """Gather a step's inputs; also give the rows of the sequences that emit a token.

        Sequences with one new token come first, the others after them, in the order of `chunks`.
        `decoding` are requests that go on by the token that has come out of them last.
        """
        states, last, self._last = self.states, self._last, None
        if last is not None:
            states.num_computed[last.rows] = last.lines[LENGTHS]
        rows = states.rows_of(decoding)
        starts = states.num_computed[rows]
        fresh = (starts % self.block_size == 0).nonzero()[0]
        if len(fresh):
            states.add_blocks(rows[fresh], starts[fresh] // self.block_size)
        if not chunks:
            return self._gather_decodes(rows, starts, states.newest(rows)), rows
        n = len(chunks)
        rows = np.concatenate((states.find(chunks), rows))
        begun = np.fromiter((chunk.start for chunk in chunks), np.int32, n)
        starts = np.concatenate((begun, starts))
        counts = np.ones(len(rows), np.int32)
        counts[:n] = [chunk.tokens for chunk in chunks]
        decodes = int((counts == 1).sum())
        if decodes < len(rows) and (counts[:decodes] != 1).any():
            order = np.argsort(counts != 1, kind="stable")
            rows, starts, counts = rows[order], starts[order], counts[order]
        emitting = starts + counts == states.num_tokens[rows]
        if decodes == len(rows) and emitting.all():
            return self._gather_decodes(rows, starts, states.token_ids[rows, starts]), rows
        return self._gather(decodes, rows, starts, counts, emitting), rows[emitting]

    def advance(self) -> tuple[InputBatch, RowIndices]:
        """Let everybody of the step before, who must have decoded, decode on: one token each."""
        last = self._last
        assert last is not None, "the step before was not of decodes alone"
        batch, rows, lines = last.batch, last.rows, last.lines
        host = batch.host
        lines[IDS] = self.states.newest(rows)
        lines[POSITIONS:] += 1
        host.longest += 1
        positions = lines[POSITIONS]
        fresh = (positions % self.block_size == 0).nonzero()[0]
        if len(fresh):
            number = positions[fresh] // self.block_size
            blocks = self.states.add_blocks(rows[fresh], number)
            if host.longest > host.tables.shape[1] * self.block_size:
                return self._gather_decodes(rows, positions.copy(), lines[IDS].copy()), rows
            host.tables[fresh, number] = blocks
            lines[SLOTS, fresh] = blocks * self.block_size
        last.staging.send()
        return batch, rows

    def _gather_decodes(
        self, rows: RowIndices, starts: Ints, ids: npt.NDArray[np.integer]
    ) -> InputBatch:
        """Send a step in which each row computes one token and emits the next one."""
        n, size = len(rows), self.block_size
        longest = int(np.maximum.reduce(starts)) + 1  # as .max(), which takes longer
        tables = self.states.block_tables[rows, : aligned(-(-longest // size))]
        block, offset = np.divmod(starts, size)
        each = np.arange(n + 1, dtype=np.int32)
        slots = tables[each[:n], block] * size + offset
        lines = np.array((ids, starts, slots, starts + 1), np.int32)
        batch, lines, tables, staging = self._send_decodes(self.bucket(n), lines, tables)
        batch.on_host = HostInputs(
            counts=np.ones(n, np.int32),
            lengths=lines[LENGTHS],
            query_starts=each,
            tables=tables,
            emits=each[:n],
            longest=longest,
        )
        self._last = _Decodes(batch, rows, lines, staging)
        return batch

    def _send_decodes(
        self, bucket: int, lines: Ints, tables: Ints
    ) -> tuple[InputBatch, Ints, Ints, StagingBuffer]:
        """Send ids, positions, slots and lengths [4, n], padded to a graph's size if there is one.

        Also give them and the tables where they are sent from.
        """
        staging = self._graph_staging if bucket else self._staging
        assert staging is not None
        n, width = lines.shape[1], tables.shape[1]
        size = bucket or n
        parts = [np.array([width], np.int32), *_padded(lines, size), tables]
        if not bucket:  # a graph emits a token after every row
            parts.append(np.arange(n, dtype=np.int32))
        arrays, (there, ids, positions, slots, lengths, blocks, *emits) = staging.stage(parts)
        batch = InputBatch(
            decodes=size, ids=ids, positions=positions, slots=slots, lengths=lengths,
            width=there, tables=blocks.view(-1, width), emits=emits[0] if emits else ids,
            bucket=bucket,
        )  # fmt: skip
        return batch, staging.lines(4, size)[:, :n], arrays[5].reshape(-1, width), staging

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
        states.num_computed[rows] = lengths
        ends = np.cumsum(counts, dtype=np.int32)
        total, longest = int(ends[-1]), int(lengths.max())
        each = np.repeat(rows, counts)
        positions = np.arange(total, dtype=np.int32) + np.repeat(lengths - ends, counts)
        block, offset = np.divmod(positions, size)
        slots = states.block_tables[each, block] * size + offset
        tables = states.block_tables[rows, : aligned(-(-longest // size))]
        lines = np.array((states.token_ids[each, positions], positions, slots), np.int32)
        tiles = NO_TILES
        if self.tile_rows and decodes < len(rows):
            tiles = prefill_tiles(
                starts[decodes:], counts[decodes:], decodes, self.tile_rows, decodes
            )
        bucket = 0
        if 0 < len(rows) - decodes <= MIXED_GRAPH_PROMPTS and decodes <= self._max_decodes:
            bucket = next_size(self.mixed_sizes, total)
        emits = ends[emitting] - 1
        batch, tables = self._send_mixed(
            bucket, lines, tables, decodes=decodes, lengths=lengths, tiles=tiles, emits=emits
        )
        batch.on_host = HostInputs(
            counts=counts,
            lengths=lengths,
            query_starts=np.append(np.zeros(1, np.int32), ends),
            tables=tables,
            emits=emits,
            longest=longest,
        )
        return batch

    def _send_mixed(
        self,
        bucket: int,
        lines: Ints,
        tables: Ints,
        *,
        decodes: int = 0,
        lengths: Ints = NONE,
        tiles: Ints = NO_TILES,
        emits: Ints = NONE,
    ) -> tuple[InputBatch, Ints]:
        """Send ids, positions and slots [3, T] and what attention needs, padded if so wanted.

        A graph launches attention for the most rows and tiles that it has room for; those without
        keys end at once. Also give the tables where they are sent from.
        """
        staging = self._graph_staging if bucket else self._staging
        assert staging is not None
        size, width = bucket or lines.shape[1], tables.shape[1]
        if bucket:
            rows = min(size, self._max_decodes)
            lengths = _grown(lengths[:decodes], rows)
            decodes = rows
            if self.tile_rows:
                tiles = _grown(tiles, most_tiles(size, self.tile_rows))
        parts = [np.array([width], np.int32), *_padded(lines, size), lengths, tiles, tables, emits]
        arrays, (there, ids, positions, slots, ends, cut, blocks, last) = staging.stage(parts)
        batch = InputBatch(
            decodes=decodes, ids=ids, positions=positions, slots=slots, lengths=ends,
            width=there, tables=blocks.view(-1, width), emits=last,
            tiles=cut.view(-1, 4) if len(tiles) else None, bucket=bucket, mixed=bool(bucket),
        )  # fmt: skip
        return batch, arrays[6].reshape(-1, width)


def next_size(sizes: Sequence[int], count: int) -> int:
    """Return the first of ascending sizes that holds so many, 0 where none does."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else 0


def _padded(lines: Ints, size: int) -> Ints:
    """Return ids, positions, slots and so on with columns that only pad: they have no slot."""
    real = lines.shape[1]
    if real == size:
        return lines
    found: Ints = np.zeros((len(lines), size), np.int32)
    found[:, :real] = lines
    found[SLOTS, real:] = -1
    return found


def _grown(rows: Ints, count: int) -> Ints:
    """Return an array with zeros behind it, `count` rows in all."""
    found: Ints = np.zeros((count, *rows.shape[1:]), np.int32)
    found[: len(rows)] = rows
    return found
