"""What a trace may say of each request: its fields, the names that columns have for them, units.

A file whose columns are called by these names is read as it is. Of any other, `--columns` or
`workload.columns` says which column holds what: `arrival=timestamp,prompt=prompt_tokens`.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import product
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.util.errors import MappingError, TraceError, did_you_mean
from simulator.util.yaml_lines import read_own

NAMES: Any = read_own(Path(__file__).with_name("names.yaml"))
"""What people call things: every name that this package looks for in a file of no format's own."""
UNITS: dict[str, float] = NAMES["units"]
"""Of times, by the end of a column's name: how many there are in a second."""
PATTERNS = {name: re.compile(pattern) for name, pattern in NAMES["patterns"].items()}
SENT = NAMES["sent"].split()
CLOCKS, COUNTS, WORDS, PRIORITY, SPANS = (
    {field: tuple(text.split()) for field, text in NAMES[kind].items()}
    for kind in ("clocks", "counts", "words", "priority", "spans")
)
CLOCKS["arrival"] = (*SENT, *CLOCKS["arrival"])
NOTED = {field: (tuple(one["names"].split()), one["told"]) for field, one in NAMES["noted"].items()}
"""Fields that change a load and cannot be simulated from a column alone, and what is said of the
requests that have one."""
SEVERAL = {*NAMES["several"].split(), *NOTED}
FIELDS = {
    **CLOCKS, **COUNTS, **WORDS, **PRIORITY, **SPANS, **{k: v for k, (v, _) in NOTED.items()},
}  # fmt: skip
"""The names of columns that are known to hold each field, the first that is there taken; in lower
case with `_` between words, for `startTime` and `Prompt tokens`, too."""
IN_MS = {"native_tokens_prompt", "request_created_at", "req_units", "timings_latency"}
"""Names of exports (OpenRouter, Helicone, Portkey, Cloudflare) whose lengths of time are ms without
saying so."""
NEEDED = ("arrival", "prompt", "output")
TELLABLE: str = NAMES["tellable"]
"""Fields that people name most."""
NEAR: dict[str, str] = NAMES["near"]
NO_DATE = "is not a date and time as 2023-11-16 18:15:46 (UTC, or with +01:00 behind it)"
DATES, EARLIEST = (946_684_800.0, 4_102_444_800.0), 315_532_800.0
"""2000, 2100 and 1980, s since 1970."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LONGEST = 160
"""Characters of a line that proposes a mapping."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a field is found: the first of these columns that has a value; units in a second."""

    names: tuple[str, ...]
    per_second: float | None = None  # None: told by the values, else seconds


def source(*names: str, unit: str | None = None) -> Source:
    """Name the columns of a field and the unit of its times."""
    return Source(names, None if unit is None else UNITS[unit])


Sources = Mapping[str, Source]


def column_source(text: str) -> Source:
    """Read `COLUMN|COLUMN:UNIT`: the first of some columns that has a value."""
    names, _, unit = text.partition(":")
    return source(*names.split("|"), unit=unit or None)


def used_as(sources: Sources) -> dict[str, str]:
    """Return what each column is used as."""
    return {name: field for field, found in sources.items() for name in found.names}


def find_fields(names: Iterable[str]) -> dict[str, Source]:
    """Find the fields whose columns have a known name; times may have a unit behind it."""
    known: dict[str, str] = {}
    for name in names:
        known.setdefault(plain_words(name), name)
    words = {*known}
    found = {
        field: source(known.pop(word))
        for mark, columns in NAMES["exports"].items()
        for word, field in columns.items()
        if {mark, word} <= words
    }
    for field, spellings in FIELDS.items():
        ends = ["", *(f"_{unit}" for unit in UNITS)] if field in {*CLOCKS, *SPANS} else [""]
        ends = [end for end in ends if end != "_min" or field in CLOCKS]  # else the least of some
        there = [(w + end, end[1:]) for w, end in product(spellings, ends) if w + end in known]
        there = there if field in SEVERAL else there[:1]
        if there:
            found[field] = source(*(known[word] for word, _ in there), unit=there[0][1] or None)
        for word, _ in there if field != "client" else ():  # a session's id is a conversation's
            del known[word]
    for field, pattern in NAMES["like"].items():
        near = None if field in found else next((w for w in known if re.search(pattern, w)), None)
        if near is not None:
            found[field] = source(known.pop(near))
    if not IN_MS.isdisjoint(words):
        for field in SPANS.keys() & found.keys():
            found[field] = replace(found[field], per_second=found[field].per_second or 1e3)
    return found


def without_length(found: dict[str, Source], others: Iterable[str]) -> dict[str, Source]:
    """Return fields, of which a prefix whose length no field tells is only `shared`."""
    if "prefix" in found and "prefix_tokens" not in {*found, *others}:
        found["shared"] = found.pop("prefix")
    return found


def has_requests(names: Iterable[str]) -> bool:
    """Return whether columns of known names say when each request came and how long it was."""
    return not lacks(find_fields(names))


def lacks(fields: Iterable[str]) -> list[str]:
    """Return which of NEEDED are not told; the end of a request and how long it took do for one."""
    there = {*fields}
    there |= {"arrival"} if {"end", "e2el"} <= there else set()
    return [field for field in NEEDED if field not in there]


def check_needed(sources: Iterable[str], path: Path, line: int) -> None:
    """Raise TraceError unless it is told when each request came and how long it was."""
    if lacking := lacks(sources):
        names = ", ".join(FIELDS[field][0] for field in lacking)
        fields = ", ".join(lacking)
        raise TraceError(path, f"lacks a column of each request's {fields} ({names})", line)


def parse_columns(given: str | Mapping[str, str]) -> dict[str, Source]:
    """Read `arrival=timestamp,prompt=prompt_tokens`, or a mapping that says the same.

    A time's unit is told by `:ms` behind its column, or by the column's name (`start_ms`).
    MappingError for fields that there are not.
    """
    if isinstance(given, str):
        pairs = [part.partition("=") for part in given.split(",") if part.strip()]
        if wrong := [one for one, equals, name in pairs if not equals or not name.strip()]:
            what = f"{wrong[0]!r} must be FIELD=COLUMN, as arrival=start_ms"
            raise MappingError("columns", what, "value")
        fields = [field.strip() for field, _, _ in pairs]
        if twice := [field for field in dict.fromkeys(fields) if fields.count(field) > 1]:
            raise MappingError("columns", f"{twice[0]}: is given twice", "value")
        given = {field.strip(): name.strip() for field, _, name in pairs}
    if "prefix_group" in given and "prefix" not in given:
        given = {"prefix" if k == "prefix_group" else k: name for k, name in given.items()}
    for field in given:
        if field not in FIELDS:
            what = f"not a field{did_you_mean(field, FIELDS)}; there are {TELLABLE}"
            raise MappingError("columns", f"{field}: {what}", "value")
    if given.get("prompt", "prompt") == given.get("output", "output"):
        raise MappingError("columns", f"prompt and output: are both {given['prompt']!r}", "value")
    return {field: _source(field, name) for field, name in given.items()}


def _source(field: str, name: str) -> Source:
    column, colon, unit = name.rpartition(":")
    if colon and unit in UNITS:
        return source(column, unit=unit)
    if field not in {*CLOCKS, *SPANS}:
        return source(name)
    ending = re.search(rf"[ _(\[]({'|'.join(UNITS)})[)\]]?$", name, re.IGNORECASE)
    return source(name, unit=ending[1].lower() if ending else None)


def guess_columns(names: Iterable[str]) -> dict[str, str]:
    """Return which column may hold each field, by their names; no more than these tell."""
    left = list(dict.fromkeys(name for name in names if "," not in name and "=" not in name))
    exact = find_fields(left)
    found: dict[str, str] = {}
    for field, pattern in NEAR.items():
        near = [exact[field].names[0]] if field in exact else []
        near += sorted(
            (name for name in left if re.search(pattern, plain_words(name))),
            key=lambda name: ("token" not in plain_words(name), "total" in plain_words(name)),
        )
        if near := [name for name in near if name in left]:
            found[field] = near[0]
            left.remove(near[0])
    return found


def propose(names: Iterable[str], option: str, length: int) -> str:
    """Return the `columns` that may be meant, as a shell takes it behind `option`; "" for none.

    The fields that can be done without go first where it would take more than `length` characters.
    """
    found = guess_columns(names)
    if "prompt" not in found or "output" not in found:
        return ""
    while True:
        text = option + shlex.quote(",".join(f"{k}={v}" for k, v in found.items()))
        if len(text) <= length:
            return text
        more = [field for field in found if field not in NEEDED]
        if not more:
            return ""
        del found[more[-1]]


def plain_words(name: str) -> str:
    """Write a name in lower case, with `_` between its words."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
    return re.sub(r"[^a-z0-9]+", "_", words).strip("_")


def unit_of(per_second: float) -> str:
    """Return the whole name of a unit of time, as `seconds`, of which a second has so many."""
    return next((unit for unit in reversed(UNITS) if UNITS[unit] == per_second), "its unit")


def units_in(number: float) -> float:
    """Return how many units a second has of a clock that shows this: since 1970, if it can be."""
    for per_second in (1e9, 1e6, 1e3):
        if number >= 1e8 * per_second:  # 1973
            return per_second
    return 1.0


def wrong_century(
    times: npt.NDArray[Any], per_second: float, column: str
) -> tuple[int, str] | None:
    """Return the place of a time that no request can have come at, and why; None: there is none.

    A time after 2100, or before 1970, or one before 1980 among dates after 2000. `column` is said
    to have another unit, as arrival=NAME; "": none can be said.
    """
    seconds = times / per_second
    dated = (seconds > DATES[0]) & (seconds < DATES[1])

    def year(k: int) -> str:
        when = np.datetime64(floor(seconds[k]), "s")
        told = when if per_second == 1e9 and times.dtype == np.int64 else times[k]  # of a date
        return f"{told} is the year {when.astype('datetime64[Y]')}"

    for k in np.flatnonzero(seconds >= DATES[1])[:1].tolist():
        for unit in ("ms", "us", "ns"):
            if DATES[0] < times[k] / UNITS[unit] < DATES[1]:
                more = f", say {column}:{unit}" if column else ""
                more = ", others are of this century" if dated.any() else more
                return k, f"{year(k)}: its unit is {unit}{more}"
        return k, year(k)
    for k in np.flatnonzero(seconds < (EARLIEST if dated.any() else 0))[:1].tolist():
        return k, year(k) + (", others after 2000" if dated.any() else "")
    return None


def parse_date(text: str) -> int:
    """Read a date and time, in UTC where it names no zone: us since 1970; ValueError if it is none.

    ISO 8601, also with ` UTC` or a blank before its zone, as 16.11.2023 18:15:46, or as web servers
    log it: 16/Nov/2023:18:15:46 +0000.
    """
    plain = re.sub(r" ?(?:UTC|GMT)$", "+00:00", text)
    plain = re.sub(r"^(\d\d)\.(\d\d)\.(\d{4})(?=[ T])", r"\3-\2-\1", plain)
    try:
        when = datetime.fromisoformat(re.sub(r" (?=[+-][0-9]{2}:?[0-9]{2}$)", "", plain))
    except ValueError:
        when = datetime.strptime(text, "%d/%b/%Y:%H:%M:%S %z")
    whole = when if when.tzinfo else when.replace(tzinfo=UTC)
    return (whole - EPOCH) // timedelta(microseconds=1)
