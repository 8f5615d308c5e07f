"""Files of text that others wrote, CSV and JSON, packed by gzip or not."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from simulator.util.csv_text import unescape_formula
from simulator.util.errors import HeadwayError
from simulator.util.files import check_regular
from simulator.util.json_text import parse_json


def read_text(path: Path, *, packed: bool = False) -> str:
    """Read a text, unpacked where it is gzip's or must be, `packed`.

    HeadwayError where it cannot be read or is damaged.
    """
    check_regular(path)
    try:
        raw = path.read_bytes()
        packed = packed or raw[:2] == b"\x1f\x8b"
        return (gzip.decompress(raw) if packed else raw).decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise HeadwayError(f"{path}: damaged: {error}") from None
    except OSError as error:
        raise HeadwayError(f"{path}: cannot read: {error.strerror or error}") from None


def read_csv(
    path: Path, text: str, needed: Sequence[str], what: str = ""
) -> Iterator[tuple[int, dict[str, str]]]:
    """Read the text of a CSV file: the cells of each row by column, and its line.

    HeadwayError names file and line where a column that is needed is lacking, or a value is; `what`
    then says what the file is not.
    """
    lines = csv.reader(io.StringIO(text))
    head = next(lines, [])
    if lacking := [name for name in needed if name not in head]:
        raise HeadwayError(f"{path}:1: {what}lacks columns {', '.join(lacking)}")
    for line in lines:
        if len(line) != len(head):
            raise HeadwayError(f"{path}:{lines.line_num}: has {len(line)} values, not {len(head)}")
        yield lines.line_num, dict(zip(head, line, strict=True))


def read_json(path: Path) -> dict[str, object]:
    """Read what JSON's keys hold, nothing where it has none; HeadwayError where it is damaged."""
    try:
        found = parse_json(read_text(path))
    except json.JSONDecodeError as error:
        raise HeadwayError(f"{path}: damaged: {error}") from None
    return found if isinstance(found, dict) else {}


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read CSV, or an object a line of JSON: a mapping of texts for each row."""
    text = read_text(path)
    if text.lstrip()[:1] != "{":
        try:
            rows = csv.DictReader(io.StringIO(text))
            return [
                {key.strip(): unescape_formula(cell or "") for key, cell in row.items() if key}
                for row in rows
            ]
        except csv.Error as error:
            raise HeadwayError(f"{path}: no CSV: {error}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except json.JSONDecodeError as error:
            raise HeadwayError(f"{path}:{number}: not JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise HeadwayError(f"{path}:{number}: not a JSON object")
        found.append({key: "" if cell is None else str(cell) for key, cell in row.items()})
    return found
