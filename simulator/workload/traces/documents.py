"""Files of traces: lines, plain or packed; JSON, with the line of each request; Parquet.

Parquet, by pyarrow, has the columns of a CSV.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from math import nan
from pathlib import Path
from typing import Any

from simulator.util.environment import need_package
from simulator.util.errors import TraceError, one_line
from simulator.util.files import check_regular
from simulator.util.json_text import parse_json, parse_value, skip_blanks
from simulator.workload.traces.fields import PATTERNS
from simulator.workload.traces.format import Problems
from simulator.workload.traces.packed import text_blocks
from simulator.workload.traces.values import spans

BOM = "\ufeff"
BLOCK = 1 << 22  # bytes read at a time, so that a long file costs its columns and no more
PIECE_ROWS = 1 << 16  # of Parquet, likewise
FIRST_BLOCK = 1 << 16  # likewise, where the first line alone is wanted
MAGIC = b"PAR1"
DETAILS = ("promptTokensDetails", "prompt_tokens_details")
Item = tuple[int, Any]
"""A value in a text, and the line on which it begins."""


def line_blocks(path: Path, size: int = BLOCK) -> Iterator[tuple[int, str]]:
    """Yield whole lines, `size` bytes or more at a time, each time with the number of the first.

    A packed file is known by its first bytes, not by its name. Every block ends with a newline,
    even where the file does not.
    """
    if (only := _ALONE.get(path)) is not None:
        yield from only
        return
    number = 1
    check_regular(path)  # besides, a trace is read more than once
    if path.suffix.lower() == ".parquet" and not parquet_names(path):
        raise TraceError(path, "is not Parquet: does not begin with PAR1")
    for text in text_blocks(path, size):
        whole = text.removesuffix("\n") + "\n"
        yield number, whole.removeprefix(BOM) if number == 1 else whole
        number += whole.count("\n")


_ALONE: dict[Path, list[Item]] = {}


@contextmanager
def alone(path: Path, piece: list[Item]) -> Iterator[None]:
    """Let the readers of a file find some of its lines alone in it, or some of its rows."""
    _ALONE[path] = piece
    try:
        yield
    finally:
        del _ALONE[path]


def pieces(path: Path, *, header: bool) -> Iterator[list[Item]]:
    """Yield a file's rows of Parquet, or its lines, some megabytes at a time, each run with the
    number of its first; `header`: each time behind the first line, where it has names.
    """
    if parquet_names(path):
        rows = parquet_rows(path)
        while some := list(islice(rows, PIECE_ROWS)):
            yield some
        return
    head: list[Item] = []
    if header:
        number, line = first_line(path)
        head = [(number, f"{line}\n")] if line[0] not in "{[" else []
    for first, text in line_blocks(path):
        if head and first <= head[0][0]:
            over = head[0][0] + 1
            yield [*head, (over, text.split("\n", over - first)[-1])]
        else:
            yield [*head, (first, text)]


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, each with its number and without its end."""
    for number, text in line_blocks(path):
        for i, line in enumerate(text.split("\n"), number):
            if line := line.strip():
                yield i, line


def first_line(path: Path) -> tuple[int, str]:
    """Return the first line that is not blank and its number, or raise TraceError."""
    for number, text in line_blocks(path, FIRST_BLOCK):
        if body := text.lstrip():
            blank = text.count("\n", 0, len(text) - len(body))
            return number + blank, body[: body.find("\n")].rstrip()
    raise TraceError(path, "the file is empty: it has no request", 1)


def parquet_names(path: Path) -> tuple[str, ...]:
    """Return the columns of a Parquet file, and what is nested in them; none of any other file."""
    if not path.is_file():  # to open a pipe waits for who writes
        return ()
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                return ()
    except OSError:
        return ()  # told by who reads it
    whole = _open(path)
    return tuple(dict.fromkeys((*whole.schema_arrow.names, *whole.schema.names)))


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows, counted from 1 on; dates as Python's."""
    if (only := _ALONE.get(path)) is not None:
        yield from only
        return
    number = 0
    try:
        for batch in _open(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, ValueError) as error:  # pyarrow's errors are of these
        raise TraceError(path, f"cannot be read: {one_line(error)}", number + 1) from None


def _open(path: Path) -> Any:
    need_package(str(path), "parquet", "pyarrow.parquet")
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except (OSError, ValueError) as error:
        raise TraceError(path, f"cannot be read: {one_line(error)}") from None


def read_text(path: Path) -> str:
    """Read a whole file, plain or packed."""
    return "".join(text for _, text in line_blocks(path))


def json_values(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yield where each JSON value of a text begins, and it; TraceError names a damaged line."""
    at = skip_blanks(text, 0)
    if at == len(text):
        raise TraceError(path, "the file is empty: it has no request", 1)
    while at < len(text):
        try:
            value, end = parse_value(text, at)
        except json.JSONDecodeError as error:
            raise TraceError(path, f"bad JSON: {error.msg}", error.lineno, "line") from None
        yield at, value
        at = end


def first_value(path: Path, line: str) -> Any:
    """Read the first JSON value of a file that begins with `line`; None if there is none."""
    decode = json.JSONDecoder().raw_decode
    with suppress(ValueError, RecursionError):
        return decode(line)[0]
    with suppress(ValueError, RecursionError):
        return decode(read_text(path).lstrip())[0]
    return None


def is_json_lines(path: Path) -> bool:
    """Tell a file of several lines, an object each, from one that is a single JSON text."""
    found = lines(path)
    try:
        return isinstance(parse_json(next(found)[1]), dict) and next(found, None) is not None
    except (ValueError, StopIteration):  # not JSON, or empty
        return False


@dataclass(slots=True)
class Row:
    """The object in one line; what is wrong with a value that is asked for becomes a problem."""

    line: int
    values: dict[str, object]
    problems: Problems
    wrong: bool = False

    def add_problem(self, key: str, why: str) -> int:
        """Note what is wrong with a value, and return the problem's number."""
        self.wrong = True
        return self.problems.add(self.line, key, why)

    def number(self, key: str) -> float:
        """Return a number that is finite and 0 or more; NaN where it is wrong, or not told."""
        value = self.values.get(key)
        if value is None:
            return nan
        return float(spans([value], lambda _, why: self.add_problem(key, why))[0])

    def ids(self, ids: object, key: str = "hash_ids") -> list[int | str]:
        """Return the ids of blocks under a key; [] for none, or where they are wrong."""
        if ids is None:
            return []
        if not isinstance(ids, list) or not {*map(type, ids)} <= {int, str}:
            self.add_problem(key, "not a list of ids")
            return []
        return ids


def rows(path: Path, problems: Problems) -> Iterator[Row]:
    """Yield the objects of a file."""
    for number, line in lines(path):
        try:
            values = parse_json(line)
        except ValueError as error:
            problems.add(number, "line", f"bad JSON: {error}")
            continue
        if not isinstance(values, dict):
            problems.add(number, "line", "not a JSON object")
            continue
        yield Row(number, values, problems)


def json_objects(
    path: Path, problems: Problems, inside: Callable[[dict[str, Any]], Collection[str] | None]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file with their lines: one a line, one after the other, or in lists.

    `inside` says which keys of an object have what is meant, lists or objects; None: it is meant.
    """
    if is_json_lines(path):
        yield from ((row.line, row.values) for row in rows(path, problems))
        return
    text = read_text(path)
    line, seen = 1, 0
    for at, value in json_values(path, text):
        line, seen = line + text.count("\n", seen, at), at
        keys = inside(value) if isinstance(value, dict) else ()
        if keys is None:
            yield line, value
        elif isinstance(value, dict):
            for key, start, one in _members(text, at):
                line, seen = line + text.count("\n", seen, start), start
                if key in keys and isinstance(one, dict):
                    yield line, one
                elif key in keys:
                    yield from items(text, (), problems, line, start)
        elif isinstance(value, list):
            yield from items(text, (), problems, line, at)
        else:
            problems.add(line, "line", "not a JSON object")


def items(
    text: str, steps: Sequence[str | int], problems: Problems, line: int = 1, begin: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of the list at the end of `steps`: keys of objects, places in lists.

    The text must be good JSON from `begin` on, which is on line `line`; nothing is yielded if
    there is no such list.
    """
    at, seen = _find(text, steps, skip_blanks(text, begin)), begin
    if at is None or text[at] != "[":
        return
    for _, start, value in _members(text, at):
        line, seen = line + text.count("\n", seen, start), start
        if isinstance(value, dict):
            yield line, value
        else:
            problems.add(line, "line", "not a JSON object")


def _find(text: str, steps: Sequence[str | int], at: int) -> int | None:
    """Return where a value begins, at the end of steps from another."""
    for step in steps:
        if text[at] != ("[" if isinstance(step, int) else "{"):
            return None
        found = next((start for key, start, _ in _members(text, at) if key == step), None)
        if found is None:
            return None
        at = found
    return at


def _members(text: str, at: int) -> Iterator[tuple[str | int, int, Any]]:
    """Yield the key or place of each member of the object or list at `at`, its start and value."""
    decode = json.JSONDecoder().raw_decode
    named = text[at] == "{"
    at, count = skip_blanks(text, at + 1), 0
    while text[at] not in "]}":
        key: str | int = count
        if named:
            key, at = decode(text, at)
            at = skip_blanks(text, skip_blanks(text, at) + 1)
        value, end = decode(text, at)
        yield key, at, value
        at, count = skip_blanks(text, end), count + 1
        if text[at] == ",":
            at = skip_blanks(text, at + 1)


def objects_of(whole: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the objects in the list under a key; what is none is nobody's."""
    found = whole.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def flat(row: Mapping[str, Any], cells: Collection[str] = ()) -> dict[str, Any]:
    """Bring what is nested up: under `usage.prompt_tokens` and, where that is free, the last name.

    Also what is nested as JSON in a text, but for what clients and models wrote, unless `cells`
    names its key.

    Lists stay as they are.
    """
    found = dict(row)
    for key, value in row.items():
        packed = isinstance(value, str) and value[:1] == "{"
        if packed and (key in cells or PATTERNS["JSON in cells"].search(key)):
            with suppress(ValueError):
                found[key] = parse_json(value)
        if isinstance(whole := found[key], Mapping):
            inner = sorted(_paths(whole), key=len)
            found |= {f"{key}.{'.'.join(path)}": deep for *path, deep in inner}
            for *path, deep in inner:
                # The type of tool_choice or response_format is none of the request.
                if path[1:][-1:] != ["type"]:
                    found.setdefault(path[-1].rpartition(".")[2], deep)
    # Gemini's are a list of {modality, tokenCount}.
    for key in [one for one in found if one.endswith(DETAILS)]:
        for one in objects_of(found, key):
            count = one.get("tokenCount", one.get("token_count"))
            found[f"{str(one.get('modality')).lower()}_tokens"] = count
    return found


def _paths(row: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value that is no object, and the value."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from ((key, *path) for path in _paths(value))
        else:
            yield key, value
