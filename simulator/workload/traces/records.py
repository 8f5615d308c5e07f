"""Requests whose fields are given by name: checked, converted, and failed ones left out.

`Records` gathers them from JSON and other files, a mapping for each request, or whole columns from
a CSV; `make_table` works out the rest.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from dataclasses import field as attribute
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import numpy as np

from simulator.util.errors import TraceError
from simulator.util.from_mapping import short_repr
from simulator.workload.traces import fields
from simulator.workload.traces import values as cells
from simulator.workload.traces.format import Format, Numbers, Problems, Table
from simulator.workload.traces.ledger import BESIDE, is_told, sort_columns
from simulator.workload.traces.make_table import UNTOLD, Columns, make_table, pick
from simulator.workload.traces.outcomes import JUDGED, apart, cancelled, failures, unknown_words
from simulator.workload.workload import Ints

WORDED = ("client", "model", "conversation", "prompt_id", "prefix", "media", "request_id")
CHANGING = {*fields.NAMES["changing"].split(), *JUDGED, *fields.NOTED}
"""Fields that are read of any format, whether it asks for them or not."""
NO_VALUE: tuple[object, ...] = (None, "", [], {})
SHOWN = 3  # words
SHEET = (36_526, 73_050)  # 2000 and 2100, days of spreadsheets
TIMED_OUT = (
    "finish_reason: requests that their clients gave up, which ask for all their tokens here; a "
    "cluster.client with the timeout of that run gives them up again"
)
FEW = 9  # times, as people write them by hand
SLOW = 10.0  # s from one request to the next, on average: perhaps not the unit that was meant


@dataclass
class Records:
    """Requests as mappings, or as columns, that become a table; what is wrong is told by line."""

    problems: Problems
    form: Format
    given: fields.Sources | None = None
    _: KW_ONLY
    named: bool = False  # by the user, whose column of arrivals no other goes before
    dotted: bool = False  # decimals have commas, so that dots may mark thousands
    met: set[str] = attribute(default_factory=set)
    names: dict[str, None] = attribute(default_factory=dict)  # of these, those with a value
    lines: Sequence[int] = attribute(default_factory=list)
    labels: list[str] = attribute(default_factory=list)  # before names, where lines tell too little
    parts: list[dict[str, Any]] = attribute(default_factory=list)  # columns of what was converted
    units: dict[str, float] = attribute(default_factory=dict)
    beside: Counter[str] = attribute(default_factory=Counter)  # no load of an engine, by field
    strange: dict[str, Counter[str]] = attribute(default_factory=dict)  # words by field
    unread: int = 0  # failed requests of which nothing is told
    added: int = 0  # requests that were converted

    def __post_init__(self) -> None:
        self.sources = dict(self.form.columns if self.given is None else self.given)
        self.values: dict[str, list[object]] = {field: [] for field in self.sources}

    def add(self, line: int, row: Mapping[str, object], label: str = "") -> None:
        """Take in one request."""
        if not row.keys() <= self.met:
            new = [k for k, value in row.items() if k not in self.met and value not in NO_VALUE]
            self.met.update(new)
            lists = {k for k in new if isinstance(row[k], list)}
            self.meet([k for k in new if not isinstance(row[k], Mapping)], lists)
        self.lines.append(line)  # type: ignore[attr-defined]
        self.labels.append(label)
        for field, found in self.sources.items():
            values = (row.get(name) for name in found.names)
            self.values[field].append(_first_told(field, values))

    def add_columns(self, lines: Sequence[int], columns: Mapping[str, Sequence[str]]) -> None:
        """Take in requests of a table, whose names were met."""
        if not lines:
            return
        self.lines, self.labels = lines, [""] * len(lines)
        for field, source in self.sources.items():
            told = [columns[name] for name in source.names if name in columns]
            if len(told) == 1 and all(told[0]):
                self.values[field] = list(told[0])
            else:
                rows = zip(*told, strict=True) if told else ((),) * len(lines)
                self.values[field] = [_first_told(field, row) for row in rows]
        self._convert()

    def meet(self, names: Sequence[str], lists: Set[str] = frozenset()) -> None:
        """Note names of columns; of those not asked for, take the fields that change a load."""
        self.names |= dict.fromkeys(filter(None, names))  # an index of pandas has no name
        taken = {*fields.used_as(self.sources), *self.form.beside}
        taken |= {name.rpartition(".")[2] for name in taken}
        idle = {n for n in names if any(fnmatchcase(n, one) for one in self.form.idle)}
        found = fields.find_fields(n for n in names if n not in taken | idle)
        for field, source in fields.without_length(found, self.sources).items():
            listed = {*fields.NOTED, *JUDGED, *WORDED, "images", "samples"}
            plain = field in listed or lists.isdisjoint(source.names)
            word = fields.plain_words(source.names[0])
            if field == "arrival" and {word, word.rpartition("_")[0]} & {*fields.SENT}:
                if not self.named:
                    self._prefer(source)  # also with a unit behind its name
            elif plain and field in CHANGING and field not in self.sources:
                self.sources[field] = source
                self.values[field] = [None] * len(self.lines)

    def _prefer(self, sent: fields.Source) -> None:
        """Take when requests were sent before when the format says that they came."""
        old = self.sources.get("arrival", sent)
        unit = sent.per_second or old.per_second
        same = old.names if unit == old.per_second else ()
        self.sources["arrival"] = fields.Source((*sent.names, *same), unit)

    def _convert(self) -> None:
        """Convert what was gathered; what is told of failed requests may be anything."""
        size = len(self.lines)
        rows = np.arange(self.added, self.added + size)
        self.added += size
        words = {
            name: ["" if value is None else str(value) for value in self.values[name]]
            for name in (*JUDGED, *BESIDE)
            if name in self.values
        }
        if "asked" in self.sources:
            self.problems.notes[TIMED_OUT] += words.get("finish", []).count("timeout")
        for field, counts in unknown_words(words).items():
            self.strange.setdefault(field, Counter()).update(counts)
        beside, failed = apart(words, size), failures(words, size)
        if self.sources.keys().isdisjoint({"asked", "cancel_after"}):  # these hang up again
            given_up = int((failed & cancelled(words, size)).sum())
            self.problems.notes["requests left out as cancelled when recorded"] += given_up
        self.beside.update({name: int(mask.sum()) for name, mask in beside.items()})
        aside = np.logical_or.reduce([*beside.values(), np.zeros(size, np.bool_)])
        if (failed | aside).any():
            kept = [k for k in np.flatnonzero(~aside).tolist() if not failed[k] or self._clear(k)]
            self.unread += int(failed[~aside].sum()) - int(failed[kept].sum())
            failed, rows = failed[kept], rows[kept]
            self.lines, self.labels = pick(self.lines, kept), pick(self.labels, kept)
            self.values = {field: pick(values, kept) for field, values in self.values.items()}
        part = {field: self._column(field) for field in self.sources}
        line = np.array(self.lines, np.int64)
        self.parts.append(part | {"line": line, "row": rows, "failed": failed})
        self.lines, self.labels = [], []
        self.values = {field: [] for field in self.sources}

    def table(self) -> Table:
        """Make the table; TraceError with all that is wrong.

        Of failed requests those whose arrival is told are `lost`.
        """
        if self.lines or not self.parts:
            self._convert()
        self.problems.stop()
        columns: dict[str, Any] = {}
        for field, first in self.parts[0].items():
            found = [part[field] for part in self.parts]
            if isinstance(first, list):
                column = list(chain(*found))
                if field in fields.NOTED or not {*column} <= {UNTOLD.get(field, "")}:
                    columns[field] = column
            elif first is not None:
                columns[field] = np.concatenate(found)
        used = {**fields.used_as(self.sources), **self.form.beside}
        ledger = sort_columns(self.names, used, self.form.idle)
        for text, count in (+self.problems.notes).items():
            ledger.note(text, count)
        for field, count in self.beside.items():
            ledger.note(f"{self._name(field)}: requests left out", count, f", {BESIDE[field]}")
        for field, words in self.strange.items():
            named = ", ".join(map(repr, list(words)[:SHOWN]))
            ledger.note(
                f"{self._name(field)}: {named}{', ..' * (len(words) > SHOWN)}: "
                "not understood, and taken as answered by the engine: requests",
                words.total(),
            )
        place, rows, failed = (columns.pop(name) for name in ("line", "row", "failed"))
        self._check_centuries(columns, place)
        self._check_totals(columns, place)
        asked = columns.pop("samples", None) if self.form.beside else None
        if asked is not None and (asked > 1).any():  # its reader has one place for each request
            text = "requests that ask for several answers, played as one of all their tokens"
            ledger.note(f"{self._name('samples')}: {text}", int((asked > 1).sum()))
        gone = {"failed": failed, "unread": self.unread}
        table = make_table(self.problems.path, columns, self.units, place, ledger, **gone)
        table.timed_out = self.problems.notes[TIMED_OUT]
        table.rows, table.images_counted = rows[table.rows], self.form.images_counted
        if "arrival" in self.sources and len(table.time) > 1:
            for doubt in self._doubts(table.time, table.per_second):
                ledger.note(f"{self._name('arrival')}: {doubt}")
            name, unit = self._name("arrival"), self.sources["arrival"].per_second
            if not unit and table.per_second == 1.0 and table.time.max() < fields.DATES[0]:
                told = f"taken as seconds; arrival={name}:ms says ms"
                table.ledger.facts.append(("times", told))
        return table

    def _doubts(self, times: Numbers, per_second: float) -> Iterator[str]:
        """Yield why arrivals may count something else than what they are taken for."""
        name, told = self._name("arrival"), self.sources["arrival"].per_second
        gap, least, most = np.ptp(times) / (len(times) - 1), times.min(), times.max()
        if told and per_second > 1 and fields.DATES[0] < least and most < fields.DATES[1]:
            yield f"are dates, if it counts seconds; arrival={name}:s says that it does"
        if re.search(fields.NAMES["gaps"], fields.plain_words(name)):
            yield "gives gaps between requests by its name, and is taken as times: add them up"
        by_format = self.form.columns.get("arrival", fields.source()).per_second
        if told and (told != by_format or "lanes" in self.form.options):  # agents wait for people
            return
        if not told and not gap and times[0]:
            yield "is the same of each request: all come at once"
        vague = told or len(times) < FEW or (times % 1).any()
        each, slow = gap / per_second, SLOW if vague else 0.99
        if (told or per_second == 1.0) and most / per_second < fields.DATES[0] and each > slow:
            own = f"arrival={name}:ms says that they are not, :s that they are"
            more = "if they are finer, say so, or scale them by workload.trace.rate_scale: 1000"
            said = f"one request in {round(each, 1):,g} s, if its times are"
            yield f"{said} {fields.unit_of(per_second)}; {more if told else own}"
        if per_second == 1.0 and SHEET[0] < least and most < SHEET[1] and gap % 1:
            yield "are a spreadsheet's dates, if it counts days: export them as 2026-03-01 10:00:00"

    def _check_centuries(self, columns: Columns, place: Ints) -> None:
        """Refuse times that no request can have come or ended at."""
        for field in fields.CLOCKS.keys() & columns.keys():
            times, name = np.asarray(columns[field]), self._name(field)
            told = "" if self.form.columns else f"{field}={name}"
            if wrong := fields.wrong_century(times, self.units[field], told):
                k, why = wrong
                raise TraceError(self.problems.path, why, int(place[k]), name)

    def _check_totals(self, columns: Columns, place: Ints) -> None:
        """Refuse rows that sum several requests."""
        count = np.asarray(columns.get("requests", []))
        for k in np.flatnonzero(count > 1).tolist():
            why = f"{count[k]} requests in a row: these are totals, not requests"
            raise TraceError(self.problems.path, why, int(place[k]), self._name("requests"))

    def _clear(self, k: int) -> bool:
        """Return whether the arrival of a failed request is told; keep no more than can be read."""
        for field, values in self.values.items():
            whole = field in fields.COUNTS or field in fields.PRIORITY
            told = cells.is_plain(values[k], whole=whole) or cells.date_of(values[k]) is not None
            if not told and (whole or field in fields.CLOCKS or field in fields.SPANS):
                values[k] = 0 if field in fields.NEEDED and whole else None
        return "arrival" in self.values and self.values["arrival"][k] is not None

    def _name(self, field: str) -> str:
        """Name a field's columns that the file has; where it has none, the first that it may."""
        names = self.sources[field].names
        return " or ".join(name for name in names if name in self.names) or names[0]

    def _column(self, field: str) -> Numbers | list[str] | None:
        """Convert the values of a field; None: it only says which requests are left out."""
        values, source, name = self.values[field], self.sources[field], self._name(field)

        def tell(k: int, why: str) -> None:
            self.problems.add(self.lines[k], f"{self.labels[k]}{name}", why)

        if field in fields.CLOCKS:
            unit = source.per_second or self.units.get(field)
            if field != "arrival":  # -1: it was not taken
                values = [None if value == -1 else value for value in values]
            times, self.units[field] = cells.clock(values, unit, tell)
            if field == "arrival" and "" not in source.names and np.isnan(times).any():
                _need(values, "is no time, as 12.5 or 2023-11-16 18:15:46", tell)
            return times
        if field in {"images", "samples", "prompt", "output"}:
            values = [len(value) if isinstance(value, list) else value for value in values]
        if field == "tpot":
            values = [*map(mean_gap, values, self.values["output"])]
        if field in fields.SPANS:
            return cells.spans(values, tell) / (source.per_second or 1.0)
        if field in fields.COUNTS or field in fields.PRIORITY:
            untold = -1 if field == "prefix_request" else 0
            least: float = 0 if field in fields.NEEDED else -1
            least = -cells.LARGEST if field in fields.PRIORITY else least
            what = cells.WHOLE + " (tokens)" * (field in ("prompt", "output", "max_tokens"))
            # A least of -1: where Parquet has no cell.
            found = cells.counts(values, tell, least, what, dotted=self.dotted)
            if field in fields.NEEDED and (found == cells.LARGEST).any():
                _need(values, f"is not {what}", tell)
            found[found == cells.LARGEST] = untold
            return found if field in fields.PRIORITY else np.maximum(found, untold)
        if field in WORDED:
            return cells.names(values, UNTOLD.get(field, ""), tell)
        told = field in fields.NOTED or field == "total"
        return ["" if value is None else str(value) for value in values] if told else None


def _first_told(field: str, values: Iterable[object]) -> object:
    """Return the first value that there is, and where several columns may tell, that says it."""
    there = [value for value in values if value is not None and value != ""]
    if len(there) > 1 and field in fields.SEVERAL:
        there = [value for value in there if is_told(field, str(value))] or there
    return there[0] if there else None


def mean_gap(gaps: object, output: object) -> object:
    """Return the mean time between tokens of a list of gaps between chunks, as JSON may have it."""
    if isinstance(gaps, str) and gaps.startswith("["):
        with suppress(ValueError):
            gaps = json.loads(gaps)
    if not isinstance(gaps, list) or not all(type(gap) in (int, float) for gap in gaps):
        return gaps
    tokens = float(str(output)) if cells.is_plain(output, whole=True) else 0.0
    return sum(gaps) / (tokens - 1) if tokens > 1 and gaps else None


def _need(values: Sequence[object], why: str, tell: Callable[[int, str], object]) -> None:
    """Tell of values that say nothing."""
    for k, value in enumerate(values):
        if value is None:
            tell(k, "missing")
        elif isinstance(value, str) and value.strip().lower() in cells.NOTHING:
            tell(k, f"{short_repr(value)} {why}")
