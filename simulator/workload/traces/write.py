"""Workloads written as Mooncake JSONL, which other simulators and load generators read too."""

import gzip
import json
from collections.abc import Hashable, Iterator
from contextlib import nullcontext
from math import ceil
from pathlib import Path
from typing import BinaryIO

import numpy as np

from simulator.core.request import Segments
from simulator.util.errors import HeadwayError, warn
from simulator.util.files import write_atomic
from simulator.workload.prefixes import shared_prefix_tokens
from simulator.workload.unused import has_media
from simulator.workload.workload import Workload

BLOCK = 512  # tokens that one id stands for
NOTICEABLE = 0.005  # of the input tokens
Piece = tuple[tuple[Hashable, int, int], ...]  # what one block says: (name, first token, tokens)


def write_mooncake(workload: Workload, path: Path) -> None:
    """Write a workload as Mooncake JSONL, packed by gzip if the name ends in .gz.

    Times are rounded to milliseconds. Ids count up from 0, one per 512 tokens, each chained to
    the ids before it: equal ids if and only if everything up to the end of their blocks is equal.
    Turns of a session are written as AIPerf reads them. A request's `client`, `priority`,
    `max_tokens`, `cancel_after` and `predicted_output_tokens`, which Mooncake's traces have not,
    become keys that `read_trace` reads.
    HeadwayWarning if much less of the prompts is shared in the file than before. HeadwayError if
    the path cannot be written or a turn does not continue its session; nothing is left
    half-written.
    """
    if has_media(workload) or (workload.images is not None and workload.images.any()):
        raise HeadwayError(f"{path}: images and clips cannot be written as hash_ids")
    write_atomic(path, lambda file: _write(workload, path, file))
    if before := (shared_prefix_tokens(workload) or 0) / max(workload.total_input, 1):
        _warn_lost_sharing(path, before)


def write_timed_trace(workload: Workload, block: int, file: BinaryIO) -> None:
    """Write a workload as a `timed_trace`.

    Times are seconds to the last bit; a prompt's blocks of `block` tokens become its `hash_ids`,
    and each line says the `block`: so the file is known by itself. Clients without a name are
    called "-"; images and clips become text.
    """
    ids: dict[Piece, int] = {}
    for i, segments in enumerate(workload.segments or ()):
        row: dict[str, object] = {
            "timestamp": float(workload.arrival[i]),
            "input_length": int(workload.prompt_tokens[i]),
            "output_length": int(workload.output_tokens[i]),
            "hash_ids": [ids.setdefault(one, len(ids)) for one in _pieces(segments or (), block)],
            "hash_block_size": block,
        }
        if workload.client is not None:
            row["client"] = workload.client[i] or "-"
        file.write(json.dumps(row | _labels(workload, i)).encode() + b"\n")


def _warn_lost_sharing(path: Path, before: float) -> None:
    """Read a file again and warn where blocks of 512 tokens are too coarse for its sharing."""
    from simulator.workload.traces.formats import FORMATS

    table = FORMATS["mooncake"].read(path)
    times = table.time.astype(np.float64)
    again = Workload(times, table.prompt, table.output, segments=table.segments)
    after = (shared_prefix_tokens(again) or 0) / again.total_input
    if before - after > NOTICEABLE:
        warn(
            f"{path}: {after:.1%} of its input tokens are a prefix of an earlier prompt, before "
            f"they were {before:.1%}: an id has {BLOCK} tokens, so shorter shared prefixes "
            "are lost",
        )


def _write(workload: Workload, path: Path, file: BinaryIO) -> None:
    """Write the lines into an open file; the same workload gives the same bytes."""
    packed = path.name.endswith(".gz")
    with gzip.GzipFile("", "wb", fileobj=file, mtime=0) if packed else nullcontext(file) as out:
        for row in _rows_of(workload, path):
            out.write(json.dumps(row).encode() + b"\n")


def _rows_of(workload: Workload, path: Path) -> Iterator[dict[str, object]]:
    """Yield the lines of a workload, in its order."""
    ids = _Ids()
    sessions = _sessions(workload, path)
    for i, length in enumerate(workload.prompt_tokens.tolist()):
        added = length
        row: dict[str, object] = {}
        before = -1 if workload.after is None else int(workload.after[i])
        parts = workload.segments[i] if workload.segments else None
        if before >= 0:
            parts = _added(workload, i, before, path)
            added = length - int(workload.prompt_tokens[before] + workload.output_tokens[before])
            delay = 0.0 if workload.delay is None else float(workload.delay[i])
            row["delay"] = round(delay * 1e3)
        else:
            row["timestamp"] = round(float(workload.arrival[i]) * 1e3)
        if i in sessions:
            row["session_id"] = sessions[i]
        row |= {"input_length": added, "output_length": int(workload.output_tokens[i])}
        row["hash_ids"] = ids.chained(parts, before) if parts else ids.fresh(added)
        if workload.client is not None:
            row["client"] = workload.client[i]
        yield row | _labels(workload, i)


def _labels(workload: Workload, i: int) -> dict[str, object]:
    """Return what else is told of a request, as keys that `read_trace` reads."""
    found: dict[str, object] = {}
    if workload.model is not None and workload.model[i]:
        found["model"] = workload.model[i]
    if workload.priority is not None:
        found["priority"] = int(workload.priority[i])
    if workload.max_tokens is not None and workload.max_tokens[i]:
        found["max_tokens"] = int(workload.max_tokens[i])
    if workload.cancel_after is not None and not np.isnan(workload.cancel_after[i]):
        found["cancel_after"] = float(workload.cancel_after[i])
    if workload.hint is not None and workload.hint[i]:
        found["predicted_output_tokens"] = int(workload.hint[i])
    return found


def _sessions(workload: Workload, path: Path) -> dict[int, str]:
    """Name the session of every request that has turns before or after it."""
    names: dict[int, str] = {}
    latest: dict[str, int] = {}
    for i, before in enumerate([] if workload.after is None else workload.after.tolist()):
        if before < 0:
            continue
        name = names.setdefault(before, f"session-{before}")
        if latest.get(name, before) != before:
            raise HeadwayError(
                f"{path}: request {before}: two requests follow it; AIPerf's has one"
            )
        names[i], latest[name] = name, i
    return names


def _added(workload: Workload, i: int, before: int, path: Path) -> Segments:
    """Return what turn `i` adds to the conversation up to the answer to turn `before`."""
    spelled = workload.segments or []
    history, parts = (spelled[before], spelled[i]) if spelled else (None, None)
    answered = (*(history or ()), (("out", before), int(workload.output_tokens[before])))
    if not history or not parts or parts[: len(answered)] != answered or parts == answered:
        raise HeadwayError(
            f"{path}: request {i}: its prompt does not continue request {before} and its answer, "
            "as a turn of a session must in Mooncake JSONL"
        )
    return parts[len(answered) :]


class _Ids:
    """Hands out ids of blocks, counted up from 0."""

    def __init__(self) -> None:
        self.count = 0
        self.known: dict[tuple[int, Piece], int] = {}

    def fresh(self, tokens: int) -> list[int]:
        """Return ids that nobody else has."""
        first = self.count
        self.count += ceil(tokens / BLOCK)
        return list(range(first, self.count))

    def chained(self, parts: Segments, before: int) -> list[int]:
        """Return the ids of a prompt, or of what it adds to the answer to request `before`."""
        found: list[int] = []
        parent = -1 if before < 0 else -2 - before
        for piece in _pieces(parts):
            if (parent, piece) not in self.known:
                self.known[parent, piece] = self.count
                self.count += 1
            parent = self.known[parent, piece]
            found.append(parent)
        return found


def _pieces(parts: Segments, block: int = BLOCK) -> Iterator[Piece]:
    """Cut a prompt into blocks, in tokens, the last one shorter."""
    piece: list[tuple[Hashable, int, int]] = []
    room = block
    for name, count in parts:
        start = 0
        while start < count:
            taken = min(room, count - start)
            piece.append((name, start, taken))
            start += taken
            room -= taken
            if not room:
                yield tuple(piece)
                piece, room = [], block
    if piece:
        yield tuple(piece)
