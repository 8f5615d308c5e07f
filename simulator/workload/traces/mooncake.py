"""Mooncake's JSONL, which vLLM, guidellm and AIPerf replay too: our own format for workloads.

One object per line: `timestamp`, `input_length`, `output_length`, and `hash_ids`, one id per
512 tokens of the prompt, the last one cut at `input_length`. AIPerf adds `session_id` and `delay`:
a later line of a session is sent `delay` after the answer to the line before, and says what it
adds to the conversation so far, not the whole prompt.
"""

import gzip
import json
import warnings
from collections.abc import Hashable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import ceil, isnan, nan
from pathlib import Path
from typing import BinaryIO

import numpy as np

from simulator.core.request import Segments
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.files import write_atomic
from simulator.workload.traces.describe import shared_prefix_tokens
from simulator.workload.traces.json_formats import Blocks, Row, number_of, rows, tokens_of
from simulator.workload.traces.lines import Problems, Table
from simulator.workload.workload import Workload

BLOCK = 512  # tokens that one id stands for
NOTICEABLE = 0.005  # of the input tokens
Piece = tuple[tuple[Hashable, int, int], ...]  # what one block says: (name, first token, tokens)


@dataclass(slots=True)
class _Columns:
    """The lines of a file, one list per column; sessions are linked once all are there."""

    line: list[int] = field(default_factory=list)
    time: list[float] = field(default_factory=list)  # NaN: none
    delay: list[float] = field(default_factory=list)  # NaN: none
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    segments: list[Segments | None] = field(default_factory=list)
    session: list[str | int | None] = field(default_factory=list)

    def link(self, *, whole: bool) -> list[int]:
        """Give the turn before each request, or -1; a later turn's prompt takes in its history."""
        after: list[int] = []
        latest: dict[str | int, int] = {}
        opening: dict[str | int, Segments | None] = {}
        repeating = 0
        for i, session in enumerate(self.session):
            last = -1 if session is None else latest.get(session, -1)
            after.append(last)
            if session is None:
                continue
            latest[session] = i
            own = self.segments[i]
            if last < 0:
                opening[session] = own
            elif not whole:
                first = opening[session]
                repeating += bool(own and first and own[0] == first[0])
                self._take_in(last, i)
        if repeating:
            warnings.warn(
                f"session_turns: {repeating} later turns begin like their session; if every line "
                "holds its whole prompt, say session_turns: whole",
                HeadwayWarning,
                stacklevel=4,
            )
        return after

    def _take_in(self, last: int, i: int) -> None:
        """Put the conversation up to the answer to turn `last` before what turn `i` adds."""
        history = self.segments[last] or ((("turn", last), self.prompt[last]),)
        own = self.segments[i] or ((("turn", i), self.prompt[i]),)
        self.segments[last] = history
        self.segments[i] = (*history, (("out", last), self.output[last]), *own)
        self.prompt[i] += self.prompt[last] + self.output[last]


def read_mooncake(path: Path, block: int, per_second: float, *, whole: bool) -> Table:
    """Read Mooncake's JSONL with ids of `block` tokens and `per_second` units of time in a second.

    Without any `timestamp` in the file everything arrives at once. A later turn of a session
    that has a `timestamp` and no `delay` arrives at that time, whatever has been answered by then.
    `whole`: the line of a later turn holds its whole prompt, contrary to AIPerf.
    """
    problems, blocks, columns = Problems(path), Blocks(block), _Columns()
    for number, row in rows(path, problems):
        _read_row(problems, number, row, blocks, columns)
    blocks.conclude(problems)
    problems.stop()
    if not columns.line:
        return Table(np.zeros(0), per_second, *(np.zeros(0, dtype=np.int64),) * 2)
    after = np.array(columns.link(whole=whole), dtype=np.int64)
    time, delay = np.array(columns.time), np.array(columns.delay)
    waits = (after >= 0) & (~np.isnan(delay) | np.isnan(time))
    lost = np.flatnonzero(np.isnan(time) & ~waits)
    if not np.isnan(time).all():
        for i in lost:
            problems.add(columns.line[i], "timestamp", "missing")
        problems.stop()
    time[lost] = 0.0
    delay = np.nan_to_num(delay)
    time = np.where(waits, nan, time + np.where(after < 0, delay, 0.0))
    return Table(
        time,
        per_second,
        np.array(columns.prompt),
        np.array(columns.output),
        columns.segments if any(columns.segments) else None,
        np.where(waits, after, -1) if waits.any() else None,
        delay / per_second if waits.any() else None,
    )


def _read_row(problems: Problems, number: int, row: Row, blocks: Blocks, columns: _Columns) -> None:
    """Add one line to the columns, or a problem for each column of it that is wrong."""
    before = problems.count
    found: dict[str, float] = {}
    for key in ("input_length", "output_length", "timestamp", "delay"):
        try:
            found[key] = _number(row, key)
        except ValueError as error:
            problems.add(number, key, str(error))
    session = row.get("session_id")
    if session is not None and not isinstance(session, str | int):
        problems.add(number, "session_id", "neither a text nor a whole number")
    if session is None and not isnan(found.get("delay", nan)):
        problems.add(number, "delay", "needs a session_id, to say whose answer it waits for")
    tokens = int(found.get("input_length", 0))
    try:
        ids = blocks.ids(row)
    except ValueError as error:
        problems.add(number, "hash_ids", str(error))
        return
    fits = not (ids and tokens) or blocks.fit(problems, number, len(ids), tokens)
    if problems.count > before or not fits:
        return
    columns.line.append(number)
    columns.time.append(found["timestamp"])
    columns.delay.append(found["delay"])
    columns.prompt.append(tokens)
    columns.output.append(int(found["output_length"]))
    columns.segments.append(blocks.segments(ids, tokens) if ids else None)
    columns.session.append(session if isinstance(session, str | int) else None)


def _number(row: Row, key: str) -> float:
    """Give one number of a line; a time that is not there is NaN."""
    if key.endswith("length"):
        if key not in row and ("text_input" in row or "messages" in row):
            raise ValueError("missing; counting the tokens of a text needs a tokenizer")
        return tokens_of(row, key)
    return nan if row.get(key) is None else number_of(row, key)


def write_mooncake(workload: Workload, path: Path) -> None:
    """Write a workload as Mooncake JSONL, packed by gzip if the name ends in .gz.

    Times are rounded to milliseconds. Ids count up from 0, one per 512 tokens, each chained to
    the ids before it: equal ids if and only if everything up to the end of their blocks is equal.
    Turns of a session are written as AIPerf reads them. HeadwayWarning if much less of the
    prompts is shared in the file than before. HeadwayError if the path cannot be written or a turn
    does not continue its session; nothing is left half-written.
    """
    for name in ("client", "priority"):
        if getattr(workload, name) is not None:
            text = f"{name}: Mooncake JSONL has no place for it; {path} is written without"
            warnings.warn(text, HeadwayWarning, stacklevel=2)
    write_atomic(path, lambda file: _write(workload, path, file))
    if before := (shared_prefix_tokens(workload) or 0) / max(workload.total_input, 1):
        _tell_lost(path, before)


def _tell_lost(path: Path, before: float) -> None:
    """Read a file again and warn where blocks of 512 tokens are too coarse for its sharing."""
    table = read_mooncake(path, BLOCK, 1e3, whole=False)
    times = table.time.astype(np.float64)
    again = Workload(times, table.prompt, table.output, segments=table.segments)
    after = (shared_prefix_tokens(again) or 0) / again.total_input
    if before - after > NOTICEABLE:
        warnings.warn(
            f"{path}: {after:.1%} of its input tokens are a prefix of an earlier prompt, before "
            f"they were {before:.1%}: an id stands for {BLOCK} tokens, so shorter shared prefixes "
            "are lost",
            HeadwayWarning,
            stacklevel=3,
        )


def _write(workload: Workload, path: Path, file: BinaryIO) -> None:
    """Write the lines into an open file; the same workload gives the same bytes."""
    packed = path.name.endswith(".gz")
    with gzip.GzipFile("", "wb", fileobj=file, mtime=0) if packed else nullcontext(file) as out:
        for row in _rows_of(workload, path):
            out.write(json.dumps(row).encode() + b"\n")


def _rows_of(workload: Workload, path: Path) -> Iterator[dict[str, object]]:
    """Give the lines of a workload, in its order."""
    ids = _Ids()
    sessions = _sessions(workload, path)
    columns = zip(
        workload.arrival.tolist(),
        workload.prompt_tokens.tolist(),
        workload.output_tokens.tolist(),
        strict=True,
    )
    for i, (arrival, prompt, output) in enumerate(columns):
        row: dict[str, object] = {}
        added = prompt
        before = -1 if workload.after is None else int(workload.after[i])
        parts = workload.segments[i] if workload.segments else None
        if before >= 0:
            parts = _added(workload, i, before, path)
            added = prompt - int(workload.prompt_tokens[before] + workload.output_tokens[before])
            delay = 0.0 if workload.delay is None else float(workload.delay[i])
            row["delay"] = round(delay * 1e3)
        else:
            row["timestamp"] = round(arrival * 1e3)
        if i in sessions:
            row["session_id"] = sessions[i]
        row |= {"input_length": added, "output_length": output}
        row["hash_ids"] = ids.chained(parts, before) if parts else ids.fresh(added)
        yield row


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
    """Give what turn `i` adds to the conversation up to the answer to turn `before`."""
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
        """Give ids that nobody else has."""
        first = self.count
        self.count += ceil(tokens / BLOCK)
        return list(range(first, self.count))

    def chained(self, parts: Segments, before: int) -> list[int]:
        """Give the ids of a prompt, or of what it adds to the answer to request `before`."""
        found: list[int] = []
        parent = -1 if before < 0 else -2 - before
        for piece in _pieces(parts):
            if (parent, piece) not in self.known:
                self.known[parent, piece] = self.count
                self.count += 1
            parent = self.known[parent, piece]
            found.append(parent)
        return found


def _pieces(parts: Segments) -> Iterator[Piece]:
    """Cut a prompt into blocks of 512 tokens, the last one shorter."""
    piece: list[tuple[Hashable, int, int]] = []
    room = BLOCK
    for name, count in parts:
        start = 0
        while start < count:
            taken = min(room, count - start)
            piece.append((name, start, taken))
            start += taken
            room -= taken
            if not room:
                yield tuple(piece)
                piece, room = [], BLOCK
    if piece:
        yield tuple(piece)
