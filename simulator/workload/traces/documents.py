"""Files that are one JSON text, and the requests in them, each with its line.

What is one object a line is read by `json_lines.py`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from simulator.util.errors import HeadwayError
from simulator.util.json_text import parse_json
from simulator.workload.traces.lines import line_blocks, lines

BLANK = re.compile(r"[ \t\r\n]*")
Item = tuple[int, Any]
"""A value in a text, and the line on which it begins."""


def read_text(path: Path) -> str:
    """Read a whole file, plain or packed by gzip."""
    return "".join(text for _, text in line_blocks(path))


def parse(path: Path, text: str) -> Any:
    """Read a JSON text; HeadwayError names the line that is damaged."""
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise HeadwayError(f"{path}:{error.lineno}: line: bad JSON: {error.msg}") from None


def parse_object(path: Path, text: str) -> dict[str, Any]:
    """Read a JSON text that must be an object."""
    whole = parse(path, text)
    if not isinstance(whole, dict):
        raise HeadwayError(f"{path}:1: line: not a JSON object")
    return whole


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
    except ValueError:
        return False


def items(text: str, steps: Sequence[str | int] = ()) -> Iterator[Item]:
    """Yield the elements of the list at the end of `steps`: keys of objects, places in lists.

    The text must be good JSON; nothing is yielded if there is no such list.
    """
    at = _find(text, steps)
    line, seen = 1, 0
    if at is None or text[at] != "[":
        return
    for _, start, value in _members(text, at):
        line, seen = line + text.count("\n", seen, start), start
        yield line, value


def _find(text: str, steps: Sequence[str | int]) -> int | None:
    """Give where a value begins."""
    at = _skip(text, 0)
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
    at, count = _skip(text, at + 1), 0
    while text[at] not in "]}":
        key: str | int = count
        if named:
            key, at = decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        value, end = decode(text, at)
        yield key, at, value
        at, count = _skip(text, end), count + 1
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    blank = BLANK.match(text, at)
    return blank.end() if blank else at


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Bring what is nested up: under `usage.prompt_tokens` and, where that is free, the last name.

    Lists stay as they are.
    """
    found: dict[str, Any] = dict(row)
    for key, value in row.items():
        if isinstance(value, Mapping):
            for inner, deep in flat(value).items():
                found[f"{key}.{inner}"] = deep
                if not isinstance(deep, Mapping):
                    found.setdefault(inner.rpartition(".")[2], deep)
    return found
