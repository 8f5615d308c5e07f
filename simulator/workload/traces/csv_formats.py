"""Traces that are published as CSV: Azure, BurstGPT, and plain lengths (Splitwise, Vidur).

A block of lines is converted column by column. Whatever that refuses, be it a bad line or only an
unusual one, is walked line by line, with the same result where both can read it.
"""

import csv
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simulator.workload.traces.lines import Numbers, Problems, Table, blocks, first_line, lines

COMMA, NEWLINE = ord(","), ord("\n")
MARKS = ((b"-", 2), (b" ", 1), (b":", 2))  # in a plain time, and how many
STAMP = re.compile(
    r"((?:19|20)\d\d-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:\.\d{1,9})?)(Z|[+-]\d\d:?\d\d)?"
)


def _bulk_tokens(column: list[bytes]) -> Numbers:
    if not b"".join(column).isdigit() or max(map(len, column)) > 15:
        raise ValueError
    return np.array(list(map(int, column)))


def _one_token(text: str) -> int:
    """Read a count of tokens, also as `12.0`, which a table with gaps makes of 12."""
    match = re.fullmatch(r"(-?\d{1,15})(?:\.0*)?", text)
    if not match:
        raise ValueError("is not a whole number")
    return int(match[1])


def _bulk_seconds(column: list[bytes]) -> Numbers:
    if b"".join(column).translate(None, b"0123456789.eE+-"):
        raise ValueError
    seconds = np.array(list(map(float, column)))
    if not np.isfinite(seconds).all() or (seconds < 0).any():
        raise ValueError
    return seconds


def _one_second(text: str) -> float:
    if not re.fullmatch(r"[0-9.eE+-]+", text):
        raise ValueError("is not a number of seconds")
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError("is not a number of seconds") from None
    if not 0 <= seconds < np.inf:
        raise ValueError("is negative" if seconds < 0 else "is not finite")
    return seconds


def _bulk_stamps(column: list[bytes]) -> Numbers:
    """Read times of day in UTC into nanoseconds since 1970."""
    if column[0].endswith(b"+00:00"):
        column = [stamp.removesuffix(b"+00:00") for stamp in column]
    text = np.array(column)
    width = text.dtype.itemsize
    letters = text.view(np.uint8).reshape(-1, width)
    joined = b"".join(column)
    if (
        not 19 <= width <= 29
        or joined.translate(None, b"0123456789-: .")
        or any(joined.count(mark) != n * len(column) for mark, n in MARKS)
        or joined.endswith(b".")
        or (letters[:, [4, 7, 10, 13, 16]] != np.frombuffer(b"-- ::", np.uint8)).any()
        or not np.isin(text.astype("S2"), (b"19", b"20")).all()
        or (width > 20 and ((letters[:, 19] == ord(".")) & (letters[:, 20] == 0)).any())
    ):
        raise ValueError
    return text.astype("datetime64[ns]").astype(np.int64)


def _one_stamp(text: str) -> int:
    match = STAMP.fullmatch(text)
    if not match:
        raise ValueError("is not a time such as 2023-11-16 18:15:46.6805900")
    day, clock, zone = match.groups()
    try:
        stamp = int(np.datetime64(f"{day}T{clock}", "ns").astype(np.int64))
    except ValueError as error:
        raise ValueError(f"is not a time: {str(error).split(' in datetime')[0]}") from None
    if zone in (None, "Z"):
        return stamp
    minutes = int(zone[1:3]) * 60 + int(zone[-2:])
    return stamp - int(f"{zone[0]}1") * minutes * 60 * 10**9


@dataclass(frozen=True, slots=True)
class Column:
    """How one column is read, in bulk and one by one; both raise ValueError."""

    name: str
    bulk: Callable[[list[bytes]], Numbers]
    one: Callable[[str], int | float]
    least: int = 0


@dataclass(frozen=True, slots=True)
class CsvForm:
    """A format: which columns say when, how much comes in and how much goes out."""

    time: Column
    prompt: Column
    output: Column
    per_second: float = 1.0
    timed: bool = True  # False: without the time column everything arrives at once

    @property
    def columns(self) -> tuple[Column, Column, Column]:
        """List the columns, the time first."""
        return self.time, self.prompt, self.output


def _tokens(name: str, least: int = 1) -> Column:
    return Column(name, _bulk_tokens, _one_token, least)


def _seconds(name: str) -> Column:
    return Column(name, _bulk_seconds, _one_second)


FORMS = {
    "azure": CsvForm(
        Column("TIMESTAMP", _bulk_stamps, _one_stamp),
        _tokens("ContextTokens"),
        _tokens("GeneratedTokens"),
        per_second=1e9,
    ),
    "burstgpt": CsvForm(
        _seconds("Timestamp"),
        _tokens("Request tokens"),
        _tokens("Response tokens", least=0),  # 0: the request failed
    ),
    "lengths": CsvForm(
        _seconds("arrived_at"),
        _tokens("num_prefill_tokens"),
        _tokens("num_decode_tokens"),
        timed=False,
    ),
}


def header(line: str) -> list[str]:
    """Give the names of the columns, none if the line is no CSV; of megabytes only the first."""
    try:
        return [name.strip() for name in next(csv.reader([line[:10_000]]))]
    except csv.Error:
        return []


def read_csv(path: Path, form: CsvForm) -> Table:
    """Read a CSV trace, by the names in its header; HeadwayError names every line that is wrong.

    A request with no output tokens, where the format means by it that the request failed, is left
    out and counted.
    """
    number, line = first_line(path)
    names = header(line)
    problems = Problems(path)
    for column in form.columns[0 if form.timed else 1 :]:
        if column.name not in names:
            problems.add(number, column.name, f"missing column; the header is {line[:80]!r}")
    problems.stop()
    wanted = {names.index(c.name): c for c in form.columns if c.name in names}
    try:
        parts = _read_fast(path, number, len(names), wanted)
    except ValueError:
        parts = _read_slow(path, number, len(names), wanted)
    prompt, output = parts[-2].astype(np.int64), parts[-1].astype(np.int64)
    time = parts[0] if len(parts) == 3 else np.zeros(len(prompt))
    fine = output > 0
    failed = int((~fine).sum())
    return Table(time[fine], form.per_second, prompt[fine], output[fine], failed=failed)


def _read_fast(path: Path, number: int, width: int, wanted: dict[int, Column]) -> list[Numbers]:
    """Convert whole columns, or raise ValueError where a line is not as plain as that needs."""
    parts: list[list[Numbers]] = [[] for _ in wanted]
    for first, block in blocks(path):
        body = block.split(b"\n", number - first + 1)[-1] if first <= number else block
        body = body.replace(b"\r\n", b"\n").rstrip(b"\n")
        if not body:
            continue
        for part, values in zip(parts, _convert(body + b"\n", width, wanted), strict=True):
            part.append(values)
    return [np.concatenate(part) if part else np.zeros(0) for part in parts]


def _convert(body: bytes, width: int, wanted: dict[int, Column]) -> Iterable[Numbers]:
    """Convert the wanted columns of some lines, all of `width` columns and without quotes."""
    raw = np.frombuffer(body, np.uint8)
    marks = raw[(raw == COMMA) | (raw == NEWLINE)]
    if marks.size % width or b'"' in body:
        raise ValueError
    grid = marks.reshape(-1, width)
    if (grid[:, :-1] != COMMA).any() or (grid[:, -1] != NEWLINE).any():
        raise ValueError
    fields = body.replace(b"\n", b",").split(b",")
    for i, column in wanted.items():
        values = column.bulk(fields[i:-1:width])
        if values.min() < column.least:
            raise ValueError
        yield values


def _read_slow(path: Path, number: int, width: int, wanted: dict[int, Column]) -> list[Numbers]:
    """Read line by line; raise HeadwayError with every line that is wrong."""
    problems = Problems(path)
    rows: list[list[int | float]] = []
    for i, line in lines(path):
        if i <= number:
            continue
        row: list[int | float] = []
        try:
            fields = _fields(line, width)
        except ValueError as error:
            problems.add(i, "line", str(error))
            continue
        for place, column in wanted.items():
            try:
                row.append(_one(fields, place, column))
            except ValueError as error:
                problems.add(i, column.name, str(error))
        rows.append(row)
    problems.stop()
    return [np.array(values) for values in zip(*rows, strict=True)] or [np.zeros(0)] * len(wanted)


def _fields(line: str, width: int) -> list[str]:
    """Split a line under `width` columns, or raise ValueError with what is wrong with it."""
    try:
        fields = [field.strip() for field in next(csv.reader([line]))]
    except csv.Error as error:
        raise ValueError(f"cannot be split: {error}") from None
    if len(fields) > width:
        raise ValueError(f"{len(fields)} values under {width} columns")
    return fields


def _one(fields: list[str], place: int, column: Column) -> int | float:
    """Read one value of a line, or raise ValueError with what is wrong with it."""
    if place >= len(fields):
        raise ValueError("missing")
    text = fields[place]
    if not text:
        raise ValueError("empty")
    try:
        value = column.one(text)
    except ValueError as error:
        raise ValueError(f"{text[:40]!r} {error}") from None
    if value < column.least:
        raise ValueError(f"{text[:40]!r} is {'negative' if value < 0 else 'zero'}")
    return value
