"""The columns of an upload in no known format: their names, and a guess which holds what."""

import csv
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from simulator.util.errors import HeadwayError
from simulator.workload.traces.csv_columns import header, mark_of
from simulator.workload.traces.detect import detect_format
from simulator.workload.traces.documents import first_line, lines, parquet_names
from simulator.workload.traces.fields import NEAR, guess_columns, parse_date
from simulator.workload.traces.format import Problems, Table
from simulator.workload.traces.formats.named import json_requests

ROWS = 50  # that a guess looks at
ROWS_A_VALUE = 12  # at least: as of a flag or a priority


def unknown_columns(path: Path) -> tuple[list[str], str]:
    """Return the names of a file's columns, and which may hold what, as `columns` says it.

    No names where the format is known, or fewer than two columns could hold numbers of tokens.
    """
    try:
        detect_format(path)
    except HeadwayError:
        return columns_of(path)
    return [], ""


def columns_of(path: Path) -> tuple[list[str], str]:
    """Do so for a file of any format."""
    try:
        rows = list(islice(_rows(path), ROWS))
    except (HeadwayError, csv.Error):
        return [], ""
    values: dict[str, list[str]] = {}
    for row in rows:
        for name, value in row.items():
            twice = "." in name and name.rpartition(".")[2] in row  # as `flat` has what was nested
            if not (twice or "," in name or "=" in name or isinstance(value, dict | list)):
                values.setdefault(name, []).extend([] if value in (None, "") else [str(value)])
    values = {name: texts for name, texts in values.items() if texts}
    if sum(any(map(_is_count, texts)) for texts in values.values()) < 2:
        return [], ""
    guess = ",".join(f"{field}={name}" for field, name in _guess(values).items())
    return list(values), guess


def columns_used(path: Path, table: Table) -> dict[str, Any]:
    """Return what became of the columns of a trace, and of its requests, as `read_measured` has it.

    `names`: of all columns, to choose others; none where the format has its own.
    """
    names = columns_of(path)[0] if table.format == "requests" else []
    return {"names": names, "failed": table.failed} | table.ledger.figures()


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if parquet_names(path) or (first := first_line(path)[1])[0] in "{[":
        yield from (row for _, row in json_requests(path, Problems(path)))
    else:
        rows = (line for _, line in islice(lines(path), 1, None))
        cells = csv.reader(rows, delimiter=mark_of(first))
        yield from (dict(zip(header(first), row, strict=False)) for row in cells)


def _guess(values: Mapping[str, list[str]]) -> dict[str, str]:
    """Guess by the names, else by the values: dates or rising numbers, then others that vary."""
    found = guess_columns(values)
    if "arrival" not in found:
        left = [name for name in values if name not in found.values()]
        times = [name for name in left if all(map(_is_date, values[name]))]
        times += [name for name in left if _rises(values[name])]
        found |= {"arrival": times[0]} if times else {}
    for field in ("prompt", "output"):
        left = [name for name in values if name not in found.values()]
        counts = [name for name in left if any(map(_is_count, values[name]))]
        if field not in found and counts:
            found[field] = min(
                counts, key=lambda name: (_is_flag(values[name]), _rises(values[name]))
            )
    return {field: found[field] for field in NEAR if field in found}


def _is_flag(texts: list[str]) -> bool:
    """Say whether the values are few, as flags and priorities are: tokens vary."""
    return len({*texts}) <= max(1, len(texts) // ROWS_A_VALUE)


def _is_count(text: str) -> bool:
    return text.strip().removesuffix(".0").isdecimal()


def _is_date(text: str) -> bool:
    try:
        parse_date(text)
    except ValueError:
        return False
    return True


def _rises(texts: list[str]) -> bool:
    """Say whether the values are numbers that never fall, and not all the same."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return False
    return numbers == sorted(numbers) and len({*numbers}) > 1
