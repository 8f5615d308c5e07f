"""What a format of traces is: how its files begin, and how they are read into columns.

How to add one is told in the package's `__init__`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.util.errors import TraceError, TraceFault
from simulator.workload.traces.fields import PATTERNS, Sources, used_as
from simulator.workload.traces.ledger import Ledger
from simulator.workload.workload import Floats, Ints, Requests, rows_of

MAX_MESSAGES = 20  # problems told one by one; the rest are counted
MAX_ALIKE = 5  # likewise, where only the value differs

Numbers = npt.NDArray[np.int64 | np.float64]


def name_problem(name: str) -> str:
    """Say what is wrong with a client's name, if anything: it must fit into tables, as UTF-8."""
    if "\0" in name:
        return "has the character NUL"
    return "is no Unicode text" if any("\ud800" <= one <= "\udfff" for one in name) else ""


@dataclass(slots=True)
class Table(Requests):
    """What a file says, in its own unit of time and its own order of lines."""

    time: Numbers  # NaN: `delay` after the end of the request `after`
    per_second: float  # units of `time` in a second
    prompt: Ints
    output: Ints
    format: str = ""
    failed: int = 0  # requests left out because the file marks them as failed
    timed_out: int = 0  # in a run of Headway's, at a time that its file does not have
    measured: "Measured | None" = None
    lost: "Table | None" = None
    """Of the failed ones, those whose arrival is told; lengths of 0 are not told, `cancel_after` is
    when each failed, s after its arrival, NaN: not told."""
    has_sessions: bool = False  # then a line says little without those before it
    ledger: Ledger = field(default_factory=Ledger)
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of these requests among all that the file has."""
    line: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def take(self, rows: Ints) -> "Table":
        """Return some requests, in this order; `after` and `lost` stay as they are."""
        found = rows_of(self, rows)
        found.measured = None if self.measured is None else rows_of(self.measured, rows)
        return found


@dataclass(slots=True)
class Measured:
    """How long the requests of a run took, s (NaN: not told), and what else a harness notes."""

    ttft: Floats
    tpot: Floats
    e2el: Floats
    conversation: list[str] | None = None  # whose next turn it is
    turn: Ints | None = None
    prompt_id: list[str] | None = None  # requests of one id have the same prompt


def no_times(size: int) -> Measured:
    """Return what was measured where nothing was."""
    return Measured(np.full(size, np.nan), np.full(size, np.nan), np.full(size, np.nan))


@dataclass(frozen=True, slots=True)
class Head:
    """How a file begins: the names of a CSV's columns, or its first JSON object."""

    columns: tuple[str, ...] = ()
    first: Mapping[str, object] = field(default_factory=dict)
    line: str = ""  # the first one, where it is text

    @property
    def keys(self) -> Set[str]:
        """The keys of the first JSON object."""
        return self.first.keys()

    @property
    def inner(self) -> Iterator[str]:
        """The keys of the first object in each list in it."""
        for value in self.first.values():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                yield from (f"[].{one}" for one in value[0])


TABLE = "tables.read_table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of traces, as `formats.yaml` has it."""

    name: str
    begins: str
    known_by: str | Sequence[str]  # a pattern or a function by name, or names that it has
    columns: Sources
    beside: Mapping[str, str]  # what its reader takes besides, and as what
    idle: Sequence[str] = ()
    requests: str = ""
    read_by: str = TABLE
    options: Sequence[str] = ()
    block_size: int = 0
    images_counted: bool = False
    blocks_of_output: bool = False
    files: Mapping[str, str]

    @property
    def used(self) -> dict[str, str]:
        """What its columns or keys are used as; {}: by the well-known names."""
        return {k: what for k, what in {**used_as(self.columns), **self.beside}.items() if k}

    def detect(self, head: Head) -> bool:
        """Return whether a file that begins so is in this format."""
        if isinstance(self.known_by, str):
            pattern = PATTERNS.get(self.known_by)
            return bool(pattern.search(head.line) if pattern else reader(self.known_by)(head))
        is_csv = not self.requests and self.read_by == TABLE
        names = {*head.columns} if is_csv else {*head.first, *head.inner}
        return any(names.issuperset(one.split(", ")) for one in self.known_by)

    def read(self, path: Path, **options: Any) -> Table:
        """Read a file; TraceError with all that is wrong in it, see `Problems`."""
        found: Table = reader(self.read_by)(path, self, **options)
        return found


def reader(place: str) -> Any:
    """Return a function of the readers, which are imported when they are asked for."""
    module, _, name = place.partition(".")
    return getattr(import_module(f"{__package__}.formats.{module}"), name)


@dataclass(slots=True)
class Problems:
    """What is wrong in one file, in the order of its lines: `FILE:LINE: column: what is wrong`."""

    path: Path
    count: int = 0
    faults: list[TraceFault] = field(default_factory=list)
    kinds: set[tuple[str, str]] = field(default_factory=set)  # columns and what is wrong with them
    notes: Counter[str] = field(default_factory=Counter)  # what changes the load, with its counts

    def add(self, line: int, column: str, wrong: str) -> int:
        """Note a problem and return its number from 0 on; past the first few it is only counted."""
        self.count += 1
        if len(self.kinds) < 2:  # as long as all may be alike
            self.kinds.add((column, re.sub(r"^('.*'|\".*\"|\S+) ", "", wrong)))
        if self.count <= MAX_MESSAGES:
            self.faults.append(TraceFault(self.path, wrong, line, column))
        return self.count - 1

    def extend(self, number: int, more: str) -> None:
        """Add to what a problem says, if it is one of those that are told."""
        if number < len(self.faults):
            fault = self.faults[number]
            self.faults[number] = fault._replace(what=fault.what + more)

    def stop(self) -> None:
        """Raise TraceError with all problems, if there are any; many that are alike as one."""
        if self.count > MAX_ALIKE and len(self.kinds) == 1:
            self.extend(0, f", and so in {self.count - 1:,} more places")
            del self.faults[1:]
        elif self.count > MAX_MESSAGES:
            rest = f"... and {self.count - MAX_MESSAGES} more"
            self.faults.append(TraceFault(self.path, rest))
        if self.faults:
            first, *more = self.faults
            raise TraceError(*first, *more)
