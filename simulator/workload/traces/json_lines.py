"""Formats with one JSON object per line, and the ids of blocks of tokens that some of them have.

The contents of a prompt come as ids of blocks of tokens: equal ids stand for equal tokens, so a
block becomes the segment (("h", id), tokens).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from simulator.core.request import Segments
from simulator.util.from_mapping import short_repr
from simulator.util.json_text import parse_json
from simulator.workload.traces.documents import lines
from simulator.workload.traces.format import Problems, name_problem
from simulator.workload.traces.ledger import Keys

LARGEST_PRIORITY = 10**9
LARGEST = 9e18  # what still fits 64 bits
LABELS: dict[str, tuple[str, float | str | None]] = {
    "client": ("client", None),
    "priority": ("priority", 0),
    "max_tokens": ("max_tokens", 0),
    "cancel_after": ("cancel_after", nan),
    "predicted_output_tokens": ("hint", 0),
    "model": ("model", ""),
}
"""Keys that any line may have: the column of a Table, and what stands there for a line without."""
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

    def number(self, key: str) -> int | float:
        """Return a number that is finite and 0 or more; NaN where it is wrong."""
        value = self.values.get(key)
        if type(value) is not int and type(value) is not float:
            missing = key not in self.values
            self.add_problem(key, "missing" if missing else f"{short_repr(value)} is not a number")
            return nan
        if not 0 <= value < LARGEST:
            self.add_problem(
                key, f"{short_repr(value)} is {'negative' if value < 0 else 'not finite'}"
            )
            return nan
        return value

    def tokens(self, key: str) -> int:
        """Return a whole number of 1 or more; 0 where it is wrong."""
        value = self.number(key)
        if not isnan(value) and (value < 1 or value % 1):
            self.add_problem(key, f"{value} is not a whole number" if value % 1 else "zero")
        return 0 if self.wrong else int(value)

    def label(self, key: str) -> Any:
        """Return what a line says under one of LABELS; None where it says nothing, or is wrong."""
        value = self.values.get(key)
        if value is None:
            return None
        if key in ("client", "model"):
            return self._name(key, value)
        if key == "priority":
            return self._priority(value)
        return self.number(key) if key == "cancel_after" else self.tokens(key)

    def _name(self, key: str, value: object) -> str:
        """Read whose request it is, or for which model: a text or a whole number; "" if wrong."""
        if isinstance(value, str) and (wrong := name_problem(value)):
            self.add_problem(key, f"{short_repr(value)} {wrong}")
        elif (isinstance(value, str) and value) or type(value) is int:
            return str(value)
        else:
            self.add_problem(key, f"{short_repr(value)} is neither a name nor a whole number")
        return ""

    def _priority(self, value: object) -> int | None:
        """Read how urgent it is, the smaller the more."""
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if type(whole) is int and abs(whole) < LARGEST_PRIORITY:
            return whole
        wrong = f"{short_repr(value)} is not a whole number of at most 9 digits"
        self.add_problem("priority", wrong)
        return None

    def hash_ids(self) -> list[int | str]:
        """Return the `hash_ids`; [] for none, or where they are wrong."""
        ids = self.values.get("hash_ids")
        if ids is None:
            return []
        if not isinstance(ids, list) or not all(type(i) is int or type(i) is str for i in ids):
            self.add_problem("hash_ids", "not a list of ids")
            return []
        return ids


class Labels:
    """Whose each request is, how urgent, and how long its answer may be, of the lines `add`ed."""

    def __init__(self, used: Mapping[str, str]) -> None:
        self.lines: list[int] = []
        self.told: dict[str, list[Any]] = {key: [] for key in LABELS}
        self.keys = Keys({**used, **{key: key for key in LABELS}})

    def add(self, row: Row) -> None:
        """Read the labels of one more line."""
        self.keys.meet(row.values)
        self.lines.append(row.line)
        for key, values in self.told.items():
            values.append(row.label(key))

    def columns(self, problems: Problems) -> dict[str, Any]:
        """Return columns of a Table, None for one that no line has.

        A line without `priority` has vLLM's default, 0; but for a line without `client` where
        others have one nobody could be named.
        """
        found: dict[str, Any] = dict.fromkeys(column for column, _ in LABELS.values())
        found["ledger"] = self.keys.ledger()
        for key, (column, untold) in LABELS.items():
            values = self.told[key]
            if all(value is None for value in values):
                continue
            if key == "client":
                for line, client in zip(self.lines, values, strict=True):
                    if client is None:
                        problems.add(line, key, "missing, though other lines have one")
                found[column] = values
            elif key == "model":
                found[column] = ["" if value is None else value for value in values]
            else:
                numbers = [untold if value is None else value for value in values]
                found[column] = np.array(numbers, np.asarray(untold).dtype)
        return found


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

    def hear(self, row: Row) -> None:
        """Take the size of the blocks from the first line, where lines say it."""
        size = row.values.get("hash_block_size")
        if size is None or (type(size) is int and size == self.size):
            self.fixed = True
        elif type(size) is not int or not 0 < size < LARGEST:
            row.add_problem("hash_block_size", f"{short_repr(size)} is not a number of tokens")
        elif self.fixed:
            row.add_problem("hash_block_size", f"{size}, where {self.size} was said before")
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

    def segments(self, ids: Sequence[int | str], tokens: int) -> Segments:
        """Spell out `tokens` tokens; of the last block only those that are left.

        Tokens beyond the last block have no name, so there must not be any.
        """
        full, size = self.full, self.size
        count = tokens // size
        for i in ids[:count]:
            if i not in full:
                full[i] = (("h", i), size)
        spelled = tuple([full[i] for i in ids[:count]])
        rest = tokens - count * size
        return (*spelled, (("h", ids[count]), rest)) if rest else spelled
