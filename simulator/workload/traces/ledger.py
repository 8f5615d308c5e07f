"""What becomes of each column or key of a file: used, without effect, or not understood."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

from simulator.util.errors import printable
from simulator.workload.traces.fields import NAMES, find_fields, plain_words
from simulator.workload.workload import Ints

IDLE = re.compile("|".join(NAMES["without_effect"]))
"""Names of what the simulator works out itself, or what says nothing of the load."""
MOST_NAMED = 12
AT_THEIR_TIMES = "played at their recorded times; workload.max_concurrency limits them again"
"""What is said of requests that waited for the answers to others."""
BESIDE = {"cache_hit": "answered by a proxy's cache"} | dict.fromkeys(
    ("call_type", "modality", "called"), "no calls to generate text"
)
"""Fields that say that a request was no load of an engine, and how it is told."""


@dataclass(slots=True)
class Ledger:
    """The columns of a file by what becomes of them."""

    used: dict[str, str] = field(default_factory=dict)  # column: what it is used as
    idle: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)  # heads and texts
    _notes: dict[tuple[str, str], int] = field(default_factory=dict)
    _named: dict[tuple[str, str], list[Ints]] = field(default_factory=dict)

    def note_repeats(self, text: str, names: Iterable[str], rest: str = "") -> None:
        """Note how many names came before, in this piece of a file or in another."""
        hashes = np.array([hash(name) for name in names], np.int64)
        self._named.setdefault((text, rest), []).append(hashes)

    def note(self, text: str, count: int = 0, rest: str = "") -> None:
        """Note what changes the load; the counts of a text add up over the pieces of a file."""
        self._notes[text, rest] = self._notes.get((text, rest), 0) + count

    @property
    def is_own(self) -> bool:
        """Whether a run of Headway's wrote the file."""
        return "decode_slowed_time" in self.idle

    @property
    def name_of(self) -> dict[str, str]:
        """The first column that each field is found in."""
        return {field: name for name, field in reversed(self.used.items())}

    @property
    def notes(self) -> list[str]:
        """What changes the load, with its counts."""
        every = ((key, np.concatenate(hashes)) for key, hashes in self._named.items())
        again = {key: len(hashes) - len(np.unique(hashes)) for key, hashes in every}
        counted = self._notes | {key: count for key, count in again.items() if count}
        return [
            f"{text}: {count}{rest}" if count else f"{text}{rest}"
            for (text, rest), count in counted.items()
        ]

    def add(self, other: "Ledger") -> None:
        """Take in the columns of another piece of the file."""
        self.used |= other.used
        self.idle = list(dict.fromkeys([*self.idle, *other.idle]))
        self.unknown = list(dict.fromkeys([*self.unknown, *other.unknown]))
        for (text, rest), count in other._notes.items():
            self.note(text, count, rest)
        for key, hashes in other._named.items():
            self._named.setdefault(key, []).extend(hashes)

    def warnings(self) -> list[str]:
        """Return what is to be told of a file, a sentence each."""
        told = [*self.notes]
        if self.unknown:
            named = _listed(self.unknown, 4 * MOST_NAMED)
            told.append(f"not understood, and without effect: {named}")
        return told

    def figures(self) -> dict[str, object]:
        """Return the same for JSON."""
        kinds = {"used": self.used, "without_effect": self.idle, "not_understood": self.unknown}
        return {"columns": kinds, "notes": self.notes}

    def rows(self) -> list[tuple[str, str]]:
        """Return heads and texts for a table."""
        used = [f"{as_what}={name}" for name, as_what in self.used.items()]
        rows = [("columns used", used), ("without effect", self.idle)]
        rows.append(("not understood", self.unknown))
        return [*self.facts, *((head, _listed(names)) for head, names in rows if names)]


def sort_columns(names: Iterable[str], used: Mapping[str, str], idle: Sequence[str] = ()) -> Ledger:
    """Sort the columns of a file, or the flat keys of its objects; `idle`: patterns of the format.

    Of a nested key also its last part is known, as `flat` brings it up.
    """
    ledger = Ledger()
    every = dict.fromkeys(names)
    parts = {name.rpartition(".")[2] for name in every if "." in name}
    rest = {}
    for name in every:
        last = name.rpartition(".")[2]
        if name in parts and "." not in name:
            continue  # the same as a nested one
        if field_name := used.get(name) or used.get(last):
            ledger.used[name] = field_name
        else:
            rest[name] = last
    for name, last in rest.items():
        said = {*ledger.used.values()} & find_fields([last]).keys()  # by another column, too
        if said or IDLE.search(plain_words(last)) or any(fnmatchcase(name, one) for one in idle):
            ledger.idle.append(name)
        else:
            ledger.unknown.append(name)
    return ledger


def is_told(field_name: str, word: str) -> bool:
    """Return whether a value of one of NOTED says anything."""
    plain = re.sub(r"\.0+$", "", word.strip().lower())
    if only := NAMES["only"].get(field_name):
        return bool(re.search(only, plain))
    return plain not in NAMES["untold"] and plain not in NAMES["usual"].get(field_name, ())


def _listed(names: Sequence[str], most: int = MOST_NAMED) -> str:
    more = len(names) - most
    named = ", ".join(printable(name) for name in names[:most])
    return f"{named} and {more} more" if more > 0 else named
