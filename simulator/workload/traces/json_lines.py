"""Formats with one JSON object per line, and the ids of blocks of tokens that some of them have.

The contents of a prompt come as ids of blocks of tokens: equal ids stand for equal tokens, so a
block becomes the segment (("h", id), tokens).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, nan
from pathlib import Path
from typing import Any

from simulator.core.request import Segments
from simulator.util.from_mapping import short_repr
from simulator.util.json_text import parse_json
from simulator.workload.traces.documents import (
    is_json_lines,
    items,
    json_values,
    lines,
    read_text,
)
from simulator.workload.traces.format import Problems
from simulator.workload.traces.values import spans

LARGEST = 9e18  # what still fits 64 bits
COMMON_SIZES = (16, 512, *(2**k for k in range(13)))  # sizes of blocks, the best known first


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
        if not isinstance(ids, list) or not all(type(i) is int or type(i) is str for i in ids):
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
    path: Path, problems: Problems, inside: Callable[[dict[str, Any]], Sequence[str] | None]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file with their lines: one a line, one after the other, or in lists.

    `inside` says to which list in an object keys lead, where its elements are meant; None: to none.
    """
    if is_json_lines(path):
        yield from ((row.line, row.values) for row in rows(path, problems))
        return
    text = read_text(path)
    line, seen = 1, 0
    for at, value in json_values(path, text):
        line, seen = line + text.count("\n", seen, at), at
        steps = inside(value) if isinstance(value, dict) else ()
        if steps is None:
            yield line, value
        elif isinstance(value, dict | list):
            yield from items(text, steps, problems, line, at)
        else:
            problems.add(line, "line", "not a JSON object")


class HashBlocks:
    """Turns ids of blocks of `size` tokens into segments; the same id is the same segment.

    `open_end`: a last block that is not full may have no id. `fixed`: lines that say another size
    are wrong; else the first may say it.
    """

    def __init__(self, size: int, *, open_end: bool = False, fixed: bool = False) -> None:
        self.size = size
        self.fixed = fixed
        self.open_end = open_end
        self.full: dict[int | str, tuple[tuple[str, int | str], int]] = {}
        self.least, self.most = 1, LARGEST  # the sizes that would fit every line so far
        self.misfits = 0
        self.place = 0  # of the first misfit among the messages

    def hear(self, row: Row, size: object, key: str = "hash_block_size") -> None:
        """Take the size of the blocks from the first line, where lines say it under a key."""
        if size is None or (type(size) is int and size == self.size):
            self.fixed = True
        elif type(size) is not int or not 0 < size < LARGEST:
            row.add_problem(key, f"{short_repr(size)} is not a number of tokens")
        elif self.fixed:
            row.add_problem(key, f"{size}, where {self.size} was said before")
        else:
            self.size, self.fixed = size, True

    def check(self, row: Row, count: int, tokens: int) -> None:
        """Refuse a row whose ids do not fit its tokens; only the first such row is told."""
        size = self.size
        self.least = max(
            self.least, tokens // (count + 1) + 1 if self.open_end else -(-tokens // count)
        )
        if count > 1:
            self.most = min(self.most, (tokens - 1) // (count - 1))
        need = ceil(tokens / size)
        if (tokens // size if self.open_end else need) <= count <= need:
            return
        row.wrong = True
        if not self.misfits:
            wrong = f"{count} blocks of {size} tokens do not fit {tokens} tokens, which take {need}"
            self.place = row.add_problem("hash_ids", wrong)
        self.misfits += 1

    def add_summary(self, problems: Problems) -> None:
        """Add to what was told of the first misfit how many there are, and what would fit."""
        if not self.misfits:
            return
        others = self.misfits - 1
        more = f", and so in {others} more line{'s' * (others > 1)}" if others else ""
        powers = [size for size in COMMON_SIZES if self.least <= size <= self.most]
        if powers or self.least == self.most:
            size = powers[0] if powers else self.least
            more += f"; {size} tokens fit every line: say hash_block_size: {size}"
            if size == 16 and not self.open_end:
                more += (
                    ", and time_unit: s if its times are in seconds (format: timed_trace is both)"
                )
        else:
            more += ": wrong hash_block_size?"
        problems.extend(self.place, more)

    def with_tail(
        self, ids: Sequence[int | str], tokens: int, number: int, scope: str = ""
    ) -> Segments | None:
        """Spell out a prompt that goes on behind its blocks, with what is request `number`'s own.

        `scope` goes before the ids; None: there are none. Of the last block only what is left.
        """
        if not ids:
            return None
        full, size = self.full, self.size
        named = min(tokens, len(ids) * size)
        count, rest = divmod(named, size)
        keys = [f"{scope}{one}" for one in ids] if scope else ids
        for key in keys[:count]:
            if key not in full:
                full[key] = (("h", key), size)
        found = tuple([full[key] for key in keys[:count]])
        found += ((("h", keys[count]), rest),) if rest else ()
        return (*found, (("tail", number), tokens - named)) if named < tokens else found
