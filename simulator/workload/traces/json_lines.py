"""Formats with one JSON object per line, and the ids of blocks of tokens that some of them have.

The contents of a prompt come as ids of blocks of tokens: equal ids stand for equal tokens, so a
block becomes the segment (("h", id), tokens).
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, isnan, nan
from pathlib import Path
from typing import TypedDict

import numpy as np

from simulator.core.request import Segments
from simulator.util.errors import HeadwayWarning
from simulator.util.from_mapping import short_repr
from simulator.util.json_text import parse_json
from simulator.workload.traces.format import Problems, name_problem
from simulator.workload.traces.lines import lines
from simulator.workload.workload import Floats, Ints

LARGEST_PRIORITY = 10**9
LARGEST = 9e18  # what still fits 64 bits
LABELS = ("client", "priority", "max_tokens", "cancel_after", "predicted_output_tokens")
COMMON_SIZES = (16, 512, *(2**k for k in range(13)))  # sizes of blocks, the best known first


@dataclass(slots=True)
class Row:
    """The object in one line; what is wrong with a value that is asked for becomes a problem."""

    line: int
    values: dict[str, object]
    problems: Problems
    wrong: bool = False

    def add_problem(self, key: str, why: str) -> int:
        """Note what is wrong with a value, and give the problem's number."""
        self.wrong = True
        return self.problems.add(self.line, key, why)

    def number(self, key: str) -> int | float:
        """Give a number that is finite and 0 or more; NaN where it is wrong."""
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
        """Give a whole number of 1 or more; 0 where it is wrong."""
        value = self.number(key)
        if not isnan(value) and (value < 1 or value % 1):
            self.add_problem(key, f"{value} is not a whole number" if value % 1 else "zero")
        return 0 if self.wrong else int(value)

    def client(self) -> str | None:
        """Give whose request it is, a text or a whole number; None for nobody's, "" if wrong."""
        value = self.values.get("client")
        if isinstance(value, str) and (wrong := name_problem(value)):
            self.add_problem("client", f"{short_repr(value)} {wrong}")
            return ""
        if value is None or (isinstance(value, str) and value) or type(value) is int:
            return None if value is None else str(value)
        self.add_problem("client", f"{short_repr(value)} is neither a name nor a whole number")
        return ""

    def priority(self) -> int | None:
        """Give how urgent it is, the smaller the more; None where the line does not say."""
        value = self.values.get("priority")
        if value is None:
            return None
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if type(whole) is not int or abs(whole) >= LARGEST_PRIORITY:
            self.add_problem(
                "priority", f"{short_repr(value)} is not a whole number of at most 9 digits"
            )
            return None
        return whole

    def max_tokens(self) -> int:
        """Give the output tokens that its client allows; 0 where the line does not say."""
        return 0 if self.values.get("max_tokens") is None else self.tokens("max_tokens")

    def cancel_after(self) -> float:
        """Give when its client hangs up, s after it is sent; NaN: never."""
        return nan if self.values.get("cancel_after") is None else self.number("cancel_after")

    def predicted(self) -> int:
        """Give the output tokens that its client predicts; 0 where the line does not say."""
        key = "predicted_output_tokens"
        return 0 if self.values.get(key) is None else self.tokens(key)

    def hash_ids(self) -> list[int | str]:
        """Give the `hash_ids`; [] for none, or where they are wrong."""
        ids = self.values.get("hash_ids")
        if ids is None:
            return []
        if not isinstance(ids, list) or not all(type(i) is int or type(i) is str for i in ids):
            self.add_problem("hash_ids", "not a list of ids")
            return []
        return ids


class LabelColumns(TypedDict):
    """The columns of a Table that any line may add to."""

    client: list[str] | None
    priority: Ints | None
    max_tokens: Ints | None
    cancel_after: Floats | None
    hint: Ints | None


@dataclass(slots=True)
class Labels:
    """Whose each request is, how urgent, and how long its answer may be, of the lines `add`ed."""

    lines: list[int] = field(default_factory=list)
    clients: list[str | None] = field(default_factory=list)
    priorities: list[int | None] = field(default_factory=list)
    max_tokens: list[int] = field(default_factory=list)
    cancels: list[float] = field(default_factory=list)
    hints: list[int] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)  # of all lines

    def add(self, row: Row) -> None:
        """Read the labels of one more line."""
        if not row.values.keys() <= self.keys:
            self._warn_alike(row)
            self.keys |= row.values.keys()
        self.lines.append(row.line)
        self.clients.append(row.client())
        self.priorities.append(row.priority())
        self.max_tokens.append(row.max_tokens())
        self.cancels.append(row.cancel_after())
        self.hints.append(row.predicted())

    def _warn_alike(self, row: Row) -> None:
        """Warn of keys that a line is the first to have and that are a label but for their case."""
        for key in row.values.keys() - self.keys:
            name = key.lower()
            if name in LABELS and name not in row.values:
                text = (
                    f"{row.problems.path}:{row.line}: {key}: is not read: the key's name is {name}"
                )
                warnings.warn(text, HeadwayWarning, stacklevel=2)

    def columns(self, problems: Problems) -> LabelColumns:
        """Give the columns, None for one that no line has.

        A line without `priority` has vLLM's default, 0; but for a line without `client` where
        others have one nobody could be named.
        """
        clients = [client for client in self.clients if client is not None]
        if clients and len(clients) < len(self.clients):
            for line, client in zip(self.lines, self.clients, strict=True):
                if client is None:
                    problems.add(line, "client", "missing, though other lines have one")
        given = any(priority is not None for priority in self.priorities)
        priorities = np.array([priority or 0 for priority in self.priorities], np.int64)
        limits, hints = np.array(self.max_tokens, np.int64), np.array(self.hints, np.int64)
        cancels = np.array(self.cancels)
        return {
            "client": clients or None,
            "priority": priorities if given else None,
            "max_tokens": limits if limits.any() else None,
            "cancel_after": None if np.isnan(cancels).all() else cancels,
            "hint": hints if hints.any() else None,
        }


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
                more += ", or format: timed_trace if its times are in seconds"
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
