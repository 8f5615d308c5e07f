"""Measured steps: what each computed and how long it took, as rows of `steps.csv.gz`.

A file grows by whole gzip members, each a batch of rows, so that whatever ends a measurement
leaves a file that can be read. The same columns describe the steps of a live run.
"""

import csv
import gzip
import io
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from calibration.text_files import read_csv, read_text
from simulator.core.request import Chunk, Copies, Request, Step, Swap
from simulator.util.errors import HeadwayError, HeadwayWarning

T = TypeVar("T")
Chunks: TypeAlias = tuple[tuple[int, int], ...]
"""Pieces of prompts: (tokens in the cache before, tokens computed)."""

ROWS_PER_MEMBER = 100  # rows of a gzip member


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured step, or one swap; times in seconds."""

    run: str  # rows of one run were measured one after the other
    kind: str  # decode, prefill, mixed, onpolicy, probe, swap_out, swap_in
    point: int = -1  # number of the grid's point, -1: none
    turn: int  # the pass, or the number of the step in its run
    path: str = "eager"  # how it was launched: eager, graph
    bucket: int = 0  # tokens that a graph was padded to, 0: none
    decodes: int = 0
    context: int = 0  # KV entries that the decodes read, each one's new token included
    longest: int = 0  # the most of them in one sequence
    chunks: Chunks = ()  # of prompts
    swapped_out: tuple[int, ...] = ()  # blocks of each request that goes to the host
    swapped_in: tuple[int, ...] = ()
    device_s: float  # CPU time of the forward pass, or between two CUDA events
    host_s: float = 0.0  # CPU time of what the host does for it
    wall_s: float  # from the inputs to the tokens
    schedule_s: float | None = None  # CPU time of scheduler and log before it; a grid has neither
    launch_s: float | None = None  # CPU time of the launches, on a GPU
    unique_ctx: int | None = None  # KV entries that all running requests hold, shared ones once
    n_logits: int | None = None  # tokens after which a new one was sampled
    sm_mhz: float | None = None  # the GPU's clock and power, at most a second old
    power_w: float | None = None

    @property
    def step(self) -> Step:
        """The step as a cost model sees it."""
        return make_step(self.chunks, self.decodes, self.context, self.swapped_out, self.swapped_in)

    @property
    def tokens(self) -> int:
        """Count the tokens that pass through the model."""
        return self.decodes + sum(new for _, new in self.chunks)

    @property
    def pairs(self) -> int:
        """Count the (query, key) pairs of the prompts."""
        return sum(new * start + new * (new + 1) // 2 for start, new in self.chunks)


COLUMNS = tuple(field.name for field in fields(Row))
SWAPPED = ("swapped_out", "swapped_in")
TIMES = ("device_s", "host_s", "wall_s")
OPTIONAL = ("schedule_s", "launch_s", "unique_ctx", "n_logits", "sm_mhz", "power_w")
"""Empty where nobody knows; older files lack these columns."""
PLACEHOLDER = Request(-1, 0.0, 1, 1)


def make_step(
    chunks: Chunks,
    decodes: int,
    context: int,
    swapped_out: Sequence[int] = (),
    swapped_in: Sequence[int] = (),
) -> Step:
    """Make a step of sums and pieces of prompts."""
    step = Step([Chunk(PLACEHOLDER, start, new) for start, new in chunks], decodes, context)
    if swapped_out or swapped_in:
        outgoing = [Swap(PLACEHOLDER, count) for count in swapped_out]
        step.copies = Copies(outgoing, [Swap(PLACEHOLDER, count) for count in swapped_in])
    return step


def write_chunks(chunks: Iterable[tuple[int, int]]) -> str:
    """Write pieces of prompts as `cached+new`, with blanks between them."""
    return " ".join(f"{start}+{new}" for start, new in chunks)


def read_chunks(text: str) -> Chunks:
    """Read what `write_chunks` wrote; ValueError for anything else."""
    found = []
    for piece in text.split():
        start, plus, new = piece.partition("+")
        if not plus or int(start) < 0 or int(new) < 1:
            raise ValueError(f"{piece!r} is no piece of a prompt: cached+new")
        found.append((int(start), int(new)))
    return tuple(found)


def write_counts(counts: Iterable[int]) -> str:
    """Write counts with blanks between them."""
    return " ".join(map(str, counts))


def read_counts(text: str) -> tuple[int, ...]:
    """Read what `write_counts` wrote; ValueError for anything else."""
    counts = tuple(map(int, text.split()))
    if any(count < 1 for count in counts):
        raise ValueError(f"{text!r}: counts must be at least 1")
    return counts


WRITERS: dict[str, Callable[[Any], str]] = {
    "chunks": write_chunks,
    **dict.fromkeys(SWAPPED, write_counts),
    **dict.fromkeys(TIMES, "{:.4g}".format),
    **dict.fromkeys(("schedule_s", "launch_s"), lambda s: "" if s is None else f"{s:.4g}"),
}
"""Of the columns that are not written as they are; csv writes None as nothing."""
READERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(TIMES, float),
    **dict.fromkeys(("unique_ctx", "n_logits"), lambda text: int(float(text)) if text else None),
    **dict.fromkeys(
        ("schedule_s", "launch_s", "sm_mhz", "power_w"), lambda text: float(text) if text else None
    ),
    **dict.fromkeys(("run", "kind", "path"), str),
    **dict.fromkeys(("point", "turn", "bucket", "decodes", "context", "longest"), int),
    "chunks": read_chunks,
    **dict.fromkeys(SWAPPED, read_counts),
}


class RowFile:
    """A growing `steps.csv.gz`; `add` keeps up to BATCH rows back, `flush` none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: list[Row] = []
        try:
            with path.open("xb") as file:
                file.write(_pack([COLUMNS]))
        except FileExistsError:
            raise HeadwayError(
                f"{path}: is there already; give another --out, or refit it with --from"
            ) from None
        except OSError as error:
            raise HeadwayError(f"{path}: cannot write: {error.strerror}") from error

    def add(self, row: Row) -> None:
        """Take a row."""
        self._held.append(row)
        if len(self._held) >= ROWS_PER_MEMBER:
            self.flush()

    def flush(self) -> None:
        """Write down every row taken so far."""
        if not self._held:
            return
        try:
            with self.path.open("ab") as file:
                file.write(_pack(map(_line, self._held)))
        except OSError as error:
            raise HeadwayError(f"{self.path}: cannot write: {error.strerror}") from error
        self._held.clear()


def pack_rows(rows: Sequence[Row]) -> bytes:
    """Return a whole file, the same bytes for the same rows."""
    return _pack([COLUMNS, *map(_line, rows)])


def _line(row: Row) -> list[object]:
    values = {name: getattr(row, name) for name in COLUMNS}
    return [WRITERS[name](value) if name in WRITERS else value for name, value in values.items()]


def _pack(lines: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return gzip.compress(text.getvalue().encode(), mtime=0)


def read_rows(path: Path) -> list[Row]:
    """Read measured steps; HeadwayError names the file and line where it is damaged.

    A file whose last batch was cut off while it was written is read without that batch, and a
    warning tells.
    """
    needed = [name for name in COLUMNS if name not in OPTIONAL]
    try:
        text = read_text(path, packed=True)
    except HeadwayError:
        text = _whole_members(path)
        if text.count("\n") < 2:  # not even a batch after the columns' names
            raise
        warnings.warn(f"{path}: is cut off; read without its end", HeadwayWarning, stacklevel=2)
    lines = read_csv(path, text, needed, "no measured steps: ")
    return parse_rows(path, lines, parse_row)


def _whole_members(path: Path) -> str:
    """Unpack the gzip members that are whole, up to the first that is not."""
    rest, found = path.read_bytes(), b""
    try:
        while rest:
            unpacker = zlib.decompressobj(wbits=31)  # gzip's header and checksum
            content = unpacker.decompress(rest)
            if not unpacker.eof:
                break
            found, rest = found + content, unpacker.unused_data
    except zlib.error:
        pass
    return found.decode(errors="replace")


def parse_rows(
    path: Path,
    lines: Iterable[tuple[int, Mapping[str, str]]],
    parse: Callable[[Mapping[str, str]], T],
) -> list[T]:
    """Parse all lines; HeadwayError names the file and line of a wrong value, or a lack of rows."""
    found = []
    for number, line in lines:
        try:
            found.append(parse(line))
        except ValueError as error:
            raise HeadwayError(f"{path}:{number}: {error}") from None
    if not found:
        raise HeadwayError(f"{path}: has no rows")
    return found


def parse_row(values: Mapping[str, str]) -> Row:
    """Make a row of a line's values; ValueError says what is wrong with them."""
    row = Row(**{name: read(values.get(name, "")) for name, read in READERS.items()})
    times = {name: getattr(row, name) for name in TIMES}
    if not all(0 <= time < float("inf") for time in times.values()) or not row.wall_s:
        raise ValueError(f"times must be seconds, at least 0, not {times}")
    if min(row.decodes, row.context) < 0:
        raise ValueError("counts must be at least 0")
    if row.bucket and row.bucket < row.tokens:
        raise ValueError(f"bucket {row.bucket} is less than its {row.tokens} tokens")
    if row.context < row.decodes:
        raise ValueError(f"context {row.context} is less than its {row.decodes} decodes")
    if not row.tokens and not row.swapped_out and not row.swapped_in:
        raise ValueError("the step computes nothing")
    return row
