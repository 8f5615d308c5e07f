"""Formats that are tables in CSV: a time and two counts of tokens, by the names of their columns.

Each may have the columns `client`, `priority`, `max_tokens`, `model` and `images`, too.

Some megabytes of lines at a time are taken apart by one regular expression. Where a line does not
fit it, be it wrong or only unusual (blanks, quotes), these lines are read one by one, by the same
patterns. A million lines take 0.8 s. pandas.read_csv takes 0.4 s and pyarrow 0.15 s, but both let
`+5` and ` 1` pass for plain numbers, and neither says which lines are wrong, and how.
"""

import csv
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from math import nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simulator.util.csv_text import unescape_formula
from simulator.util.errors import HeadwayError
from simulator.workload.traces.documents import first_line, line_blocks, lines
from simulator.workload.traces.fields import (
    CLOCKS,
    COUNTS,
    NEEDED,
    NO_DATE,
    SPANS,
    Sources,
    find_fields,
    parse_date,
    units_in,
)
from simulator.workload.traces.format import (
    Format,
    Numbers,
    Problems,
    Published,
    Table,
    name_problem,
)
from simulator.workload.traces.ledger import sort_columns
from simulator.workload.traces.records import CHANGING, UNKNOWN, make_table


class Column(NamedTuple):
    """How the values of one column are read."""

    name: str
    pattern: str  # of a value that needs no quotes, without groups
    wrong: str  # what is said of a value that does not fit the pattern
    convert: Callable[[Sequence[str]], Numbers]  # ValueError, what is wrong with one of them
    least: float = 0
    per_second: float = 1.0  # of a time
    optional: bool = False
    empty: str | None = None  # what an empty cell stands for; None: it is wrong
    quoted: bool = False  # in quotes a value may be any text

    def read(self, texts: Sequence[str]) -> Numbers:
        """Read values; ValueError, what is wrong with one of them."""
        return self.convert([text or self.empty for text in texts] if self.empty else texts)


def tokens(name: str, least: int = 1) -> Column:
    """Make a column of whole numbers, also as `12.0`, which a table with gaps makes of 12."""
    pattern = r"-?[0-9]{1,15}(?:\.0*)?"
    return Column(name, pattern, "is not a whole number", _whole_numbers, least)


def seconds(name: str, *, optional: bool = False) -> Column:
    """Make a column of times in seconds; without one that is `optional` all arrive at once."""
    wrong = "is not a number of seconds"
    return Column(name, r"[0-9.eE+-]+", wrong, _seconds, optional=optional)


def timestamps(name: str) -> Column:
    """Make a column of days and times, in UTC where they name no zone, in nanoseconds."""
    d = "[0-9]"
    day, clock = f"(?:19|20){d}{d}-{d}{d}-{d}{d}", f"{d}{d}:{d}{d}:{d}{d}"
    zone = f"(?:Z|[+-]{d}{d}:?{d}{d})?"
    return Column(
        name,
        rf"{day}[ T]{clock}(?:\.{d}{{1,9}})?{zone}",
        "is not a time such as 2023-11-16 18:15:46.6805900",
        _nanoseconds,
        per_second=1e9,
    )


def clock(name: str, per_second: float) -> Column:
    """Make a column of times as numbers, so many units to a second."""
    pattern = r"[0-9.eE+-]+"
    return Column(name, pattern, "is not a number", _exact_numbers, per_second=per_second)


def dates(name: str) -> Column:
    """Make a column of days and times, as any date that is read elsewhere; in microseconds."""
    return Column(name, r'[^,"\r\n\0]+', NO_DATE, _microseconds, per_second=1e6)


def span(name: str, per_second: float) -> Column:
    """Make a column of lengths of time, in seconds when read; an empty cell is NaN."""
    pattern = r"(?:-?[0-9]*\.?[0-9]+\.?(?:[eE][+-]?[0-9]+)?|[nN]a[nN]|None)?"
    convert = partial(_spans, per_second=per_second)
    return Column(name, pattern, "is not a number", convert, least=NEAREST, empty="nan")


def words(name: str) -> Column:
    """Make a column of any texts."""
    return Column(name, r'[^,"\r\n\0]*', "", _names, empty="", quoted=True)


def _exact_numbers(texts: Sequence[str]) -> Numbers:
    """Read whole numbers as such: nanoseconds since 1970 are more than a float holds."""
    try:
        return np.array(list(map(int, texts)), np.int64)
    except (ValueError, OverflowError):
        return _seconds(texts)


def _microseconds(texts: Sequence[str]) -> Numbers:
    try:
        return np.array([parse_date(text) for text in texts], np.int64)
    except ValueError:
        raise ValueError(NO_DATE) from None


def _spans(texts: Sequence[str], per_second: float) -> Numbers:
    return np.array([nan if text == "None" else float(text) for text in texts]) / per_second


def _names(texts: Sequence[str]) -> Numbers:
    return np.array([unescape_formula(text) for text in texts], object)


def _whole_numbers(texts: Sequence[str]) -> Numbers:
    try:
        return np.array(list(map(int, texts)), np.int64)
    except ValueError:
        return np.array([int(text.partition(".")[0]) for text in texts], np.int64)


def _seconds(texts: Sequence[str]) -> Numbers:
    try:
        values = np.array(list(map(float, texts)))
    except ValueError:
        raise ValueError("is not a number of seconds") from None
    if np.isinf(values).any():
        raise ValueError("is negative" if values.min() < 0 else "is not finite")
    return values


def _nanoseconds(texts: Sequence[str]) -> Numbers:
    if texts and texts[0].endswith("+00:00"):  # faster than numpy's way with a zone
        texts = [text.removesuffix("+00:00") for text in texts]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that other zones become UTC
            return np.array(texts, "datetime64[ns]").astype(np.int64)
    except ValueError as error:
        raise ValueError(f"is not a time: {str(error).split(' in datetime')[0]}") from None


CLIENT = Column(
    "client",
    r'[^\s,"\0](?:[^,"\r\n\0]*[^\s,"\0])?',
    "is not a name",
    _names,
    optional=True,
    quoted=True,
)
PRIORITY = Column(
    "priority",
    r"(?:-?[0-9]{1,9}(?:\.0*)?)?",
    "is not a whole number of at most 9 digits",
    _whole_numbers,
    least=-(10**9),
    optional=True,
    empty="0",
)
"""An empty cell is vLLM's default, 0."""


MAX_TOKENS = Column(
    "max_tokens",
    r"(?:0*[1-9][0-9]{0,8}(?:\.0*)?)?",
    "is not a whole number of 1 or more, of at most 9 digits",
    _whole_numbers,
    optional=True,
    empty="0",
)
"""An empty cell says nothing."""
MODEL = words("model")._replace(optional=True)
"""The adapter or model asked for; an empty cell is the engine's own."""
IMAGES = tokens("images", least=0)._replace(optional=True, empty="0")
"""How many images a request has."""
OPTIONAL = {column.name: column for column in (CLIENT, PRIORITY, MAX_TOKENS, MODEL, IMAGES)}
"""What any table in CSV may say besides, under these names."""
TURN = Column("turn", r"[0-9]{1,9}(?:\.0*)?", "is not a whole number", _whole_numbers)
PLAIN = {**OPTIONAL, "turn": TURN}
NEAREST = -1e-6  # s: rounded to 0


def csv_format(
    name: str,
    begins: str,
    columns: tuple[Column, Column, Column],
    published: tuple[Published, ...] = (),
    idle: tuple[str, ...] = (),
) -> Format:
    """Make a format of its columns: when, how much comes in, how much goes out."""
    lengths = {column.name for column in columns[1:]}
    fields = dict(zip(NEEDED, columns, strict=True))
    return Format(
        name,
        begins,
        detect=lambda head: not lengths.isdisjoint(head.columns),
        read=partial(read_csv, columns=fields, idle=idle),
        published=published,
        used={column.name: field for field, column in fields.items()},
        idle=idle,
    )


def header(line: str) -> list[str]:
    """Return the names of the columns, none if the line is no CSV; of megabytes only the first."""
    try:
        return [name.strip() for name in next(csv.reader([line[:10_000]]))]
    except csv.Error:
        return []


def check_commas(path: Path, number: int, line: str) -> None:
    """Raise HeadwayError where a header's names are parted by something else than commas."""
    others = {";": "semicolons", "\t": "tabs", "|": "bars"}
    found = [word for mark, word in others.items() if line.count(mark) >= 2 and "," not in line]
    if found and line[0] not in "{[":
        raise HeadwayError(
            f"{path}:{number}: line: values are parted by {found[0]}; write the CSV with commas, "
            "and points in its decimals"
        )


def read_csv(path: Path, columns: Mapping[str, Column], idle: Sequence[str] = ()) -> Table:
    """Read a CSV trace, by the names in its header; HeadwayError names every line that is wrong.

    A request with no output tokens, where the format means by it that the request failed, is left
    out and counted.
    """
    number, line = first_line(path)
    check_commas(path, number, line)
    names = header(line)
    problems = Problems(path)
    if not any(names):
        raise HeadwayError(f"{path}:{number}: line: no header of a CSV: {line[:80]!r}")
    for column in columns.values():
        if column.name not in names and not column.optional:
            problems.add(number, column.name, f"missing column; the header is {line[:80]!r}")
    problems.stop()
    columns = {**columns, **_more_columns(path, names, columns, idle)}
    for column in columns.values():
        if names.count(column.name) > 1:
            problems.add(number, column.name, f"{names.count(column.name)} columns of this name")
    problems.stop()
    there = {field: column for field, column in columns.items() if column.name in names}
    wanted = {names.index(column.name): column for column in there.values()}
    parts = []
    for first, block in line_blocks(path):
        start = max(first, number + 1)  # the header is no request
        text = block.split("\n", start - first)[-1]
        try:
            parts.append(read_block(text, len(names), wanted))
        except ValueError:
            parts.append(read_lines(text, start, len(names), wanted, problems))
    problems.stop()
    read = dict(
        zip(
            wanted,
            (np.concatenate(part) for part in zip(*parts, strict=True)),
            strict=True,
        )
    )
    values = {field: read[names.index(column.name)] for field, column in there.items()}
    units = {field: column.per_second for field, column in there.items()}
    texts = {k: v.tolist() if v.dtype == object else v for k, v in values.items()}
    ledger = sort_columns(names, {column.name: field for field, column in there.items()}, idle)
    place = _line_of(path)
    return make_table(path, texts, units, place, ledger)


def _line_of(path: Path) -> Callable[[int], int]:
    """Return what gives the line of a request."""
    return lambda k: next(islice(lines(path), k + 1, None))[0]


def _more_columns(
    path: Path, names: Sequence[str], columns: Mapping[str, Column], idle: Sequence[str]
) -> dict[str, Column]:
    """Make columns of fields that were not asked for, and that change a load."""
    taken = {column.name for column in columns.values()}
    free = [name for name in names if name not in taken and name not in idle]
    found = {
        field: source
        for field, source in find_fields(free).items()
        if field not in columns and field in (*CHANGING, *OPTIONAL)
    }
    more = named_columns(path, found)
    return more | (
        {"client": CLIENT._replace(name=more["client"].name)} if "client" in more else {}
    )


def named_columns(path: Path, sources: Sources) -> dict[str, Column]:
    """Make columns for the fields of a CSV; what its first clocks show tells what they count in."""
    _, line = first_line(path)
    names = header(line)
    example = next((row for i, (_, row) in enumerate(lines(path)) if i), "")
    cells = dict(zip(names, header(example), strict=False))
    return {
        field: _named_column(field, name, found.per_second, cells.get(name, ""))
        for field, found in sources.items()
        if (name := next((one for one in found.names if one in names), found.names[0]))
    }


def _named_column(field: str, name: str, per_second: float | None, example: str) -> Column:
    if field in CLOCKS:
        return _named_clock(name, per_second, example)
    column = words(name)._replace(optional=True)
    if field in SPANS:
        column = span(name, per_second or 1.0)
    elif field in {"prompt", "output"}:
        column = tokens(name, least=0)
    elif field == "client":
        column = words(name)._replace(empty=UNKNOWN)
    elif field in PLAIN:
        column = PLAIN[field]._replace(name=name, optional=False)
    elif field in COUNTS:
        empty = "-1" if field == "prefix_request" else "0"
        column = tokens(name, least=int(empty))._replace(empty=empty)
    return column


def _named_clock(name: str, per_second: float | None, example: str) -> Column:
    if re.fullmatch(r"[0-9.eE+-]*", example):
        told = units_in(float(example)) if re.fullmatch(r"[0-9]+\.?[0-9]*", example) else 1.0
        return clock(name, per_second or told)
    stamps = timestamps(name)
    return stamps if re.fullmatch(stamps.pattern, example) else dates(name)


def read_block(text: str, width: int, wanted: dict[int, Column]) -> list[Numbers]:
    """Read the wanted of `width` columns; ValueError if a line is not as plain as this needs."""
    cells = [f"({wanted[i].pattern})" if i in wanted else r'[^,"\r\n]*' for i in range(width)]
    line = re.compile(rf"^{','.join(cells)}\r?$", re.MULTILINE)
    texts = line.split(text)  # what lies between two lines, then the wanted values of the next
    step = len(wanted) + 1
    if "".join(texts[::step]).strip():
        raise ValueError
    values = {i: wanted[i].read(texts[k::step]) for k, i in enumerate(sorted(wanted), 1)}
    if any((values[i] < c.least).any() for i, c in wanted.items() if not c.quoted):
        raise ValueError
    return [values[i] for i in wanted]


def read_lines(
    text: str, number: int, width: int, wanted: dict[int, Column], problems: Problems
) -> list[Numbers]:
    """Read the wanted of `width` columns in lines from `number` on, and tell what is wrong."""
    texts: list[list[str]] = [[] for _ in wanted]
    inside = False
    for i, line in enumerate(text.split("\n"), number):
        if not line.strip():
            continue
        if line.count('"') % 2:  # where a cell of several lines begins, or ends
            if not inside:
                problems.add(i, "line", "a quoted cell goes on in the next; write a request a line")
            inside = not inside
        if inside or line.count('"') % 2:
            continue
        try:
            fields = [field.strip() for field in next(csv.reader([line.strip()]))]
        except csv.Error as error:
            problems.add(i, "line", f"cannot be split: {error}")
            continue
        if len(fields) > width:
            problems.add(i, "line", f"{len(fields)} values under {width} columns")
            continue
        for found, (place, column) in zip(texts, wanted.items(), strict=True):
            value = fields[place] if place < len(fields) else None
            if wrong := _wrong(value, column):
                problems.add(i, column.name, wrong)
            else:
                found.append(value or "")
    return [c.read(found) for c, found in zip(wanted.values(), texts, strict=True)]


def _wrong(text: str | None, column: Column) -> str:
    """Say what is wrong with one value of a line, if anything is."""
    if not text:
        if column.empty is not None:
            return ""
        return "missing" if text is None else "empty"
    if column.quoted:
        wrong = name_problem(unescape_formula(text))
        return f"{text[:40]!r} {wrong}" if wrong else ""
    if not re.fullmatch(column.pattern, text):
        return f"{text[:40]!r} {column.wrong}"
    try:
        value = column.convert([text])[0]
    except ValueError as error:
        return f"{text[:40]!r} {error}"
    return f"{text[:40]!r} is {'negative' if value < 0 else 'zero'}" if value < column.least else ""
