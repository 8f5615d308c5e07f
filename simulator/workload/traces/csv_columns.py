"""Tables in CSV, read some megabytes at a time, as columns of texts that `records.py` converts.

A million lines take 1.6 s. pandas.read_csv and pyarrow are faster, but both let `+5` and ` 1` pass
for plain numbers, and neither says which lines are wrong, and how.
"""

import csv
import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from simulator.util.csv_text import unescape_formula
from simulator.workload.traces import documents
from simulator.workload.traces.fields import COUNTS, PRIORITY, WORDS, Source, Sources, used_as
from simulator.workload.traces.format import Format, Problems, Table
from simulator.workload.traces.records import Records

csv.field_size_limit(1 << 30)  # logs have whole conversations in a cell
MARKS = ",;\t|"
"""What parts the values of a line: whichever the header has most of."""
MET = 1000  # rows that say which cells have JSON


def header(line: str) -> list[str]:
    """Return the names of the columns, none if the line is no CSV; of megabytes only the first."""
    line = line[:10_000]
    try:
        return [name.strip() for name in next(csv.reader([line], delimiter=mark_of(line)))]
    except csv.Error:
        return []


def mark_of(line: str) -> str:
    """Return what parts the values of a header."""
    return max(MARKS, key=line.count)


def json_rows(path: Path, problems: Problems) -> Iterator[documents.Item]:
    """Yield the rows of a CSV with their lines, flat with the objects that cells have as JSON."""
    number, line = documents.first_line(path)
    names = header(line)
    split = partial(_split, mark_of(line), len(names), problems)
    for first, text in _blocks(path, number + 1, documents.FIRST_BLOCK):
        numbers, columns = split(first, text)
        for at, *cells in zip(numbers, *columns, strict=True):
            yield at, documents.flat(dict(zip(names, cells, strict=True)))


def json_keys(path: Path, names: Sequence[str], cells: Collection[str] = ()) -> list[str]:
    """Return what the objects in the cells of the first rows of a table add to its columns."""
    packed = documents.parquet_names(path)
    some = documents.parquet_rows(path) if packed else json_rows(path, Problems(path))
    found = (name for _, row in islice(some, MET) for name in documents.flat(row, cells))
    return [name for name in dict.fromkeys(found) if name not in names]


def read_csv(
    path: Path, form: Format, sources: Sources | None = None, *, named: bool = False
) -> Table:
    """Read a CSV by the names in its header; TraceError names every line that is wrong.

    A column of arrivals may be missing where `sources` says so by a name "". `named`: by the user.
    """
    number, line = documents.first_line(path)
    names, mark, problems = header(line), mark_of(line), Problems(path)
    if not any(names):
        problems.add(number, "line", f"no header of a CSV: {line[:80]!r}")
    problems.stop()
    found = dict(form.columns if sources is None else sources)
    for field, source in [*found.items()]:
        there = [name for name in source.names if name in names]
        if not there and "" in source.names:
            del found[field]
        elif not there:
            problems.add(number, source.names[0], f"missing column; the header is {line[:80]!r}")
        else:
            found[field] = Source(tuple(there), source.per_second)
    problems.stop()
    records = Records(problems, form, found, named=named)
    records.meet(names)
    records.dotted = mark == ";"
    used = used_as(records.sources)
    for name in used:
        if (count := names.count(name)) > 1:
            problems.add(number, name, f"{count} columns of this name")
    problems.stop()
    split = partial(_split, mark, len(names), problems)
    for first, text in _blocks(path, number + 1):
        lines, columns = split(first, text)
        told = {n: c for n, c in zip(names, columns, strict=True) if n in used}
        records.add_columns(lines, {n: _clean(c, used[n], mark) for n, c in told.items()})
    return records.table()


def _clean(texts: Sequence[str], field: str, mark: str) -> Sequence[str]:
    """Undo what Headway's own tables do to names, and commas in decimals.

    A count as `1,024` stays as it is, to be refused: its comma may mark thousands.
    """
    if field in WORDS:
        return [unescape_formula(text.strip()) for text in texts]
    if mark != ";":
        return texts
    thousands = re.compile(r"(?=.*,\d{3}$)" if field in COUNTS or field in PRIORITY else r"(?!)")
    return [text if thousands.match(text) else text.replace(",", ".") for text in texts]


def _blocks(path: Path, begin: int, size: int = documents.BLOCK) -> Iterator[tuple[int, str]]:
    """Yield lines from `begin` on, some megabytes at a time, and the number of the first.

    A cell in quotes may go on over several lines.
    """
    held: list[str] = []
    quotes = 0
    for first, block in documents.line_blocks(path, size):
        begin = begin if held else max(begin, first)
        held.append(block.split("\n", begin - first)[-1] if first < begin else block)
        quotes += held[-1].count('"')
        if quotes % 2 == 0:
            text = "".join(held)
            yield begin, text
            begin, held = begin + text.count("\n"), []
    if held:
        yield begin, "".join(held)


def _split(
    mark: str, width: int, problems: Problems, first: int, text: str
) -> tuple[Sequence[int], Sequence[Sequence[str]]]:
    """Return the number of the line of each row, and the columns; tell which lines are wrong."""
    text = text.removesuffix("\n").replace("\r\n", "\n")
    lines = text.split("\n")
    if '"' not in text and width > 1 and {line.count(mark) for line in lines} == {width - 1}:
        cells = text.replace("\n", mark).split(mark)  # half the time of a split for each line
        return range(first, first + len(lines)), [cells[k::width] for k in range(width)]
    reader = csv.reader((f"{line}\n" for line in lines), delimiter=mark, strict=True)
    numbers, rows, at = [], [], first
    try:
        for row in reader:
            if len(row) > width:
                problems.add(at, "line", f"{len(row)} values under {width} columns")
            elif len(row) > 1 or "".join(row).strip():
                numbers.append(at)
                rows.append((*row, *[""] * (width - len(row))))
            at = first + reader.line_num
    except csv.Error as error:  # a quote that is left open, for one
        problems.add(at, "line", f"cannot be split: {error}")
    return numbers, [*zip(*rows, strict=True)] or [()] * width
