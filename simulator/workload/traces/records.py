"""Requests whose fields are told by name: checked, failed ones left out, latencies worked out.

`Records` gathers them from JSON and other files, a mapping for each request; what came as whole
columns, from a CSV, goes to `make_table` at once.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from math import nan
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.from_mapping import short_repr
from simulator.workload.prefixes import read_prefixes
from simulator.workload.select import renumbered
from simulator.workload.traces.fields import (
    CLOCKS,
    COUNTS,
    NEEDED,
    NOTED,
    PRIORITY,
    SENT,
    SPANS,
    Source,
    Sources,
    find_fields,
    plain_words,
    used_as,
    without_length,
    wrong_century,
)
from simulator.workload.traces.format import Measured, Numbers, Problems, Table, no_times
from simulator.workload.traces.ledger import BESIDE, Ledger, is_told, sort_columns
from simulator.workload.traces.values import (
    LARGEST,
    NEAREST,
    NOTHING,
    clock,
    counts,
    date_of,
    is_plain,
    names,
    spans,
)
from simulator.workload.workload import Floats, Ints

UNTOLD = {"client": "unknown", "conversation": "unknown"}
"""What a request that names none has there, where others do."""
NAMES = ("client", "model", "conversation", "prompt_id", "prefix", "media")
JUDGED = ("error", "success", "finish", "status", "status_code", "cancelled")
"""Fields that say whether a request failed."""
CHANGING = {
    *("cache_hit", "call_type", "cancelled", "cached", "prefix", "prefix_tokens", "images"),
    *JUDGED,
    *("cache_write", "thoughts", "requests", "asked", "prefix_request", "media", "whole_prompt"),
    *("client", "model", "client_queue", "cancel_after", "hint", "priority", "max_tokens", *NOTED),
    "conversation",
    "total",
}
"""Fields that are read of any format, whether it asks for them or not."""
NO_VALUE: tuple[object, ...] = (None, "", [], {})
YES = r"true|t|yes|y|on|1|1\.0"
NO = r"false|f|no|n|off|0|0\.0"
UNSAID = r"none|null|nan|n/?a|-|\[\]|\{\}|"
"""How columns write yes, no and nothing, in lower case."""
NO_GENERATION = re.compile(
    r"embed|rerank|score|moderat|transcri|translat|speech|tts|stt|image|video|ocr|tool|file|batch|"
    r"chain|retriev|pars|agent|guardrail|evaluat|^prompt$"
)
"""In the type of a call that is none to generate text."""
UNFINISHED = re.compile(
    r"reject|unfinished|shed|time.?out|timed|abort|error|cancel|fail|exception|dropp|disconnect|closed|kill|"
    r"refus|throttl|rate.?limit|unavail|interrupt|hung|crash|denied|invalid|overload|^[45]\d\d\b"
)
"""In a word for how a request ended that is none for a whole answer, such as 429 or 503."""
FINISHED = re.compile(
    rf"{YES}|{UNSAID}|(none|null|nan|ok|okay|true|yes|stop|eos|len|max_|model_length|end|succe|complete|finish|done|"
    r"pass|tool|function|content_filter|default|unset|normal|recitation|safety|debug|info|warn|"
    r"[123]\d\d\b).*"
)
"""Of those that have an answer."""
UUID = "[0-9a-f]{8}-[0-9a-f-]{27}"
"""Of the answer that Helicone's cache gave; of zeros where it gave none."""
HIT = re.compile(rf"^({YES}|.*\bhit\b.*|cached|(?!0{{8}}-){UUID})$")
MISSED = re.compile(
    rf"{NO}|{UNSAID}|(none|null|nan|false|0|no|.*miss|bypass|disabled|expired|refresh).*"
)
KNOWN = {
    **dict.fromkeys(("finish", "status", "status_code"), (UNFINISHED, FINISHED)),
    "error": (re.compile(rf"^(?!({NO}|{UNSAID})$)"), re.compile(rf"{NO}|{UNSAID}")),
    "success": (re.compile(rf"^({NO})$|{UNFINISHED.pattern}"), FINISHED),
    "cancelled": (
        re.compile(rf"^({YES}|cancell?ed|aborted)$"),
        re.compile(rf"{NO}|{UNSAID}"),
    ),
    "cache_hit": (HIT, MISSED),
}
"""Words of fields that say that a request was not answered by the engine, and that it was; others
are named.
"""
LARGEST_SHOWN = 3  # words
LONG = 120.0  # s that half of the requests take: likewise
SLOW = 100.0  # s from one request to the next, on average: hardly the unit that was meant
ROUNDING = 2.5e-9  # s: of an arrival, the wait at the client and a latency, added up
Columns = dict[str, Any]  # arrays of numbers, lists of words


class Records:
    """Requests as mappings, or as columns, that become a table; what is wrong is told by line."""

    def __init__(
        self,
        problems: Problems,
        sources: Sources,
        idle: Sequence[str] = (),
        used: Mapping[str, str] = MappingProxyType({}),
        *,
        named: bool = False,
    ) -> None:
        self.problems = problems
        self.sources = dict(sources)
        self.idle = idle  # names that this format has, and that are without effect
        self.used = used  # names that the format reads itself, and as what
        self.named = named  # by the user, whose column of arrivals no other goes before
        self.met: set[str] = set()
        self.names: dict[str, None] = {}  # of these, those with a value
        self.lines: Sequence[int] = []
        self.labels: list[str] = []  # before the column's name, where lines do not tell enough
        self.values: dict[str, list[object]] = {field: [] for field in sources}
        self.parts: list[dict[str, Any]] = []  # columns of what was converted
        self.units: dict[str, float] = {}
        self.beside: Counter[str] = Counter()  # requests that are no load of an engine, by field
        self.strange: dict[str, Counter[str]] = {}  # words that are not understood, by field
        self.unread = 0  # failed requests of which nothing is told
        self.added = 0  # requests that were converted

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
            self.values[field].append(next((v for v in values if v is not None and v != ""), None))

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
                self.values[field] = [next((v for v in row if v), None) for row in rows]
        self._convert()

    def meet(self, names: Sequence[str], lists: Set[str] = frozenset()) -> None:
        """Note names of columns; of those not asked for, take the fields that change a load."""
        self.names |= dict.fromkeys(names)
        taken = {name for source in self.sources.values() for name in source.names} | {*self.used}
        taken |= {name.rpartition(".")[2] for name in taken}
        idle = {n for n in names if any(fnmatchcase(n, one) for one in self.idle)}
        found = find_fields(n for n in names if n not in taken | idle)
        for field, source in without_length(found, self.sources).items():
            plain = field in {*NOTED, *NAMES, "images"} or lists.isdisjoint(source.names)
            word = plain_words(source.names[0])
            if field == "arrival" and {word, word.rpartition("_")[0]} & {*SENT.split()}:
                if not self.named:
                    self._prefer(source)  # also with a unit behind its name
            elif plain and field in CHANGING and field not in self.sources:
                self.sources[field] = source
                self.values[field] = [None] * len(self.lines)

    def _prefer(self, sent: Source) -> None:
        """Take when requests were sent before when the format says that they came."""
        old = self.sources.get("arrival", sent)
        unit = sent.per_second or old.per_second
        same = old.names if unit == old.per_second else ()
        self.sources["arrival"] = Source((*sent.names, *same), unit)

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
        for field in KNOWN.keys() & words.keys():
            for word, count in Counter(words[field]).items():
                bad, good = KNOWN[field]
                plain = word.strip().lower()
                if not bad.search(plain) and not good.fullmatch(plain):
                    self.strange.setdefault(field, Counter())[word] += count
        beside, failed = apart(words, size), failures(words, size)
        self.beside.update({name: int(mask.sum()) for name, mask in beside.items()})
        gone = np.logical_or.reduce([failed, *beside.values()])
        if gone.any():
            gone &= ~failed | np.logical_or.reduce([gone & False, *beside.values()])
            kept = [k for k in np.flatnonzero(~gone).tolist() if not failed[k] or self._clear(k)]
            self.unread += int(failed[~gone].sum()) - int(failed[kept].sum())
            failed, rows = failed[kept], rows[kept]
            self.lines, self.labels = _pick(self.lines, kept), _pick(self.labels, kept)
            self.values = {field: _pick(values, kept) for field, values in self.values.items()}
        part = {field: self._column(field) for field in self.sources}
        line = np.array(self.lines, np.int64)
        self.parts.append(part | {"line": line, "row": rows, "failed": failed})
        self.lines, self.labels = [], []
        self.values = {field: [] for field in self.sources}

    def table(self) -> Table:
        """Make the table; HeadwayError with all that is wrong.

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
                if field in NOTED or not {*column} <= {UNTOLD.get(field, "")}:
                    columns[field] = column
            elif first is not None:
                columns[field] = np.concatenate(found)
        ledger = sort_columns(self.names, {**used_as(self.sources), **self.used}, self.idle)
        for field, count in self.beside.items():
            name, why = ledger.name_of[field], BESIDE[field]
            ledger.note(f"{name}: requests left out", count, f", {why}")
        for field, words in self.strange.items():
            named = ", ".join(map(repr, list(words)[:LARGEST_SHOWN]))
            ledger.note(
                f"{self._name(field)}: {named}{', ..' * (len(words) > LARGEST_SHOWN)}: "
                "not understood, and taken as answered by the engine: requests",
                words.total(),
            )
        place, rows, failed = (columns.pop(name) for name in ("line", "row", "failed"))
        path = self.problems.path
        self._check_centuries(columns, place)
        self._check_totals(columns, place)
        gone = {"failed": failed, "unread": self.unread}
        table = make_table(path, columns, self.units, place, ledger, **gone)
        table.rows = rows[table.rows]
        arrival = self.sources.get("arrival")
        if arrival is not None and arrival.per_second is None and len(table.time) > 1:
            gap = np.ptp(table.time) / (len(table.time) - 1)
            if table.per_second == 1.0 and gap > SLOW and not (table.time % 1).any():
                name = self._name("arrival")
                told = f"one request in more than {SLOW:g} s, if its times are seconds"
                ledger.note(f"{name}: {told}; arrival={name}:ms says that they are not")
        return table

    def _check_centuries(self, columns: Columns, place: Ints) -> None:
        """Refuse times that no request can have come or ended at."""
        for field in CLOCKS.keys() & columns.keys():
            if wrong := wrong_century(np.asarray(columns[field]), self.units[field]):
                name, (k, why) = self._name(field), wrong
                why = why.replace("arrival=NAME", f"{field}={name}")
                why = why.partition(", say")[0] if self.idle or self.used else why
                raise HeadwayError(f"{self.problems.path}:{place[k]}: {name}: {why}")

    def _check_totals(self, columns: Columns, place: Ints) -> None:
        """Refuse rows that sum several requests."""
        count = np.asarray(columns.get("requests", [0]))
        k = int(count.argmax()) if len(count) else -1
        if k >= 0 and count[k] > 1:
            name = self._name("requests")
            why = f"{count[k]} requests in a row: these are totals, not requests"
            raise HeadwayError(f"{self.problems.path}:{place[k]}: {name}: {why}")

    def _clear(self, k: int) -> bool:
        """Return whether the arrival of a failed request is told; keep no more than can be read."""
        for field, values in self.values.items():
            whole = field in COUNTS or field in PRIORITY
            told = is_plain(values[k], whole=whole) or date_of(values[k]) is not None
            if not told and (whole or field in CLOCKS or field in SPANS):
                values[k] = 0 if field in NEEDED and whole else None
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

        if field in CLOCKS:
            unit = source.per_second or self.units.get(field)
            if field != "arrival":  # -1: it was not taken
                values = [None if value == -1 else value for value in values]
            times, self.units[field] = clock(values, unit, tell)
            if field == "arrival" and "" not in source.names and np.isnan(times).any():
                _need(values, "is no time", tell)
            return times
        if field in {"images", "samples"}:
            values = [len(value) if isinstance(value, list) else value for value in values]
        if field == "tpot":
            values = [*map(mean_gap, values, self.values["output"])]
        if field in SPANS:
            return spans(values, tell) / (source.per_second or 1.0)
        if field in COUNTS or field in PRIORITY:
            untold = -1 if field == "prefix_request" else 0
            least = -LARGEST if field in PRIORITY else 0 if field in NEEDED else -1
            found = counts(values, tell, least)  # -1: where Parquet has no cell
            if field in NEEDED and (found == LARGEST).any():
                _need(values, "is not a whole number", tell)
            found[found == LARGEST] = untold
            return found if field in PRIORITY else np.maximum(found, untold)
        if field in NAMES:
            return names(values, UNTOLD.get(field, ""), tell)
        told = field in NOTED or field == "total"
        return ["" if value is None else str(value) for value in values] if told else None


def mean_gap(gaps: object, output: object) -> object:
    """Return the mean time between tokens of a list of gaps between chunks, as JSON may have it."""
    if isinstance(gaps, str) and gaps.startswith("["):
        with suppress(ValueError):
            gaps = json.loads(gaps)
    if not isinstance(gaps, list) or not all(type(gap) in (int, float) for gap in gaps):
        return gaps
    tokens = float(str(output)) if is_plain(output, whole=True) else 0.0
    return sum(gaps) / (tokens - 1) if tokens > 1 and gaps else None


def _need(values: Sequence[object], why: str, tell: Callable[[int, str], object]) -> None:
    """Tell of values that say nothing."""
    for k, value in enumerate(values):
        if value is None:
            tell(k, "missing")
        elif isinstance(value, str) and value.strip().lower() in NOTHING:
            tell(k, f"{short_repr(value)} {why}")


def _pick(values: Sequence[Any], kept: Sequence[int]) -> list[Any]:
    return [values[k] for k in kept]


def failures(words: Mapping[str, Sequence[str]], size: int) -> npt.NDArray[np.bool_]:
    """Return which requests failed, by what is said of errors, success, finish and status."""
    return _any(words, {field: KNOWN[field][0].search for field in JUDGED}, size)


def apart(words: Mapping[str, Sequence[str]], size: int) -> dict[str, npt.NDArray[np.bool_]]:
    """Return which requests no engine had to generate text for, by the field that says so."""
    hits = _any(words, {"cache_hit": HIT.search}, size)
    others = _any(words, {"call_type": NO_GENERATION.search}, size)
    found = {"cache_hit": hits, "call_type": others & ~hits}
    return {name: mask for name, mask in found.items() if mask.any()}


def _any(
    words: Mapping[str, Sequence[str]], checks: Mapping[str, Callable[[str], object]], size: int
) -> npt.NDArray[np.bool_]:
    """Return of which requests one of some fields says a word that a check takes."""
    found = np.zeros(size, np.bool_)
    for name in checks.keys() & words.keys():
        known = {word: bool(checks[name](word.strip().lower())) for word in set(words[name])}
        found |= np.array([known[word] for word in words[name]], np.bool_)
    return found


def make_table(
    path: Path,
    columns: Columns,
    units: dict[str, float],
    place: Ints,
    ledger: Ledger,
    *,
    failed: npt.NDArray[np.bool_],
    unread: int,
) -> Table:
    """Make a table of whole columns, by field; clocks in their units, the rest in s and tokens.

    A request without output tokens, or that is said to have failed, is left out and counted, as
    are `unread` others; the latter is one of `lost`, where its arrival is told. One that broke off
    in a run of Headway's stays: it says what was asked for. HeadwayError where times contradict
    each other; `place` has the requests' lines.
    """
    if "arrival" not in columns and {"end", "e2el"} <= columns.keys():
        columns["arrival"] = columns["end"] - columns["e2el"] * units["end"]
        units["arrival"] = units["end"]
        if (lacking := np.flatnonzero(np.isnan(columns["arrival"]))).size:
            raise HeadwayError(f"{path}:{place[lacking[0]]}: end: how long it took is missing")
    asked = columns.get("asked", np.zeros(len(failed), np.int64))
    output = columns["output"] + columns.get("thoughts", 0)  # Gemini's API counts them apart
    columns["output"] = output = np.where(asked > 0, asked, output)
    columns["prompt"] = _whole_prompts(columns, ledger)
    _add_apart(columns)
    output = columns["output"]
    broken, failed = failed & (asked > 0), failed & (asked <= 0)
    kept = np.flatnonzero((output > 0) & ~failed)
    part = _part(columns, kept)
    table = _rows(part, units)
    table.ledger, table.rows = ledger, kept
    if empty := int((table.prompt < 1).sum()):
        text = f"{path}: {empty} prompts of no tokens are taken as of one"
        warnings.warn(text, HeadwayWarning, stacklevel=4)
        table.prompt = np.maximum(table.prompt, 1)
    table.failed = unread + len(output) - len(kept)
    if table.measured is not None:
        for k, problem in _measure(table, table.measured, part, units):
            raise HeadwayError(f"{path}:{place[kept[k]]}: {problem}")
        if "client_queue" in columns:
            _send_with_answers(table)
        for values in (table.measured.ttft, table.measured.tpot, table.measured.e2el):
            values[broken[kept]] = nan
    _add_contents(path, table, columns, kept)
    _add_notes(table, part)
    if "arrival" in columns and failed.any():
        lost = _part(columns, np.flatnonzero(failed))
        table.lost = _rows(lost, units)
        table.lost.cancel_after = np.fmax(
            _span_of("e2el", lost), _since("end", table.lost, lost, units)
        )
    return table


def _part(columns: Columns, rows: Ints) -> Columns:
    """Return some rows of each column."""
    return {
        field: _pick(column, rows.tolist()) if isinstance(column, list) else column[rows]
        for field, column in columns.items()
    }


def _send_with_answers(table: Table) -> None:
    """Put what a client sent when an answer came just before that answer.

    A table of Headway's has nanoseconds: rounded up, such a request would miss the next step.
    """
    assert table.measured is not None
    ends = np.sort(table.time + table.measured.e2el)  # NaN last
    near = ends[np.minimum(np.searchsorted(ends, table.time - ROUNDING), len(ends) - 1)]
    ties = np.abs(near - table.time) <= ROUNDING
    table.time = np.where(ties, np.maximum(table.time - 2 * ROUNDING, 0.0), table.time)


def _whole_prompts(columns: Columns, ledger: Ledger) -> Ints:
    """Return the tokens of prompts with what some logs count apart: prefixes, and what was cached.

    BLIS counts a prefix apart from `input_tokens`, its server does not; Anthropic's API counts what
    its cache had, and what went into it.
    """
    prompt = columns["prompt"]
    if "whole_prompt" in columns:
        whole = columns["whole_prompt"]
        return np.asarray(np.where(whole > 0, whole, prompt + columns.get("prefix_tokens", 0)))
    names = {k: plain_words(name.rpartition(".")[2]) for k, name in ledger.name_of.items()}
    apart_from = names.get("cached", "").startswith("cache_read") or "cache_write" in columns
    if apart_from and names.get("prompt") in {"input_tokens", "input_token_count"}:
        prompt = prompt + columns.get("cached", 0) + columns.get("cache_write", 0)
    return np.asarray(prompt)


def _add_apart(columns: Columns) -> None:
    """Add to lengths what a log counts apart from them, as its totals show: cached, reasoning.

    Langfuse does so, and some servers of models that reason.
    """
    total, reasoning = (
        np.array([float(w) if is_plain(w, whole=True) else 0.0 for w in columns[name]], np.int64)
        if name in columns
        else np.zeros(len(columns["output"]), np.int64)
        for name in ("total", "reasoning")
    )
    cached = columns.get("cached", np.zeros_like(total))
    more = total - columns["prompt"] - columns["output"]
    for prompt, output in ((cached, 0), (0, reasoning), (cached, reasoning)):
        apart = (more > 0) & (more == prompt + output)
        columns["prompt"] = columns["prompt"] + apart * prompt
        columns["output"] = columns["output"] + apart * output
        more = np.where(apart, 0, more)


def _add_contents(path: Path, table: Table, columns: Columns, kept: Ints) -> None:
    """Add what prompts share, where columns tell it; names of answers go by the table's rows."""
    prompts = np.maximum(columns["prompt"], 1)
    try:
        found = read_prefixes(columns, prompts.tolist(), columns["output"].tolist())
    except ValueError as error:
        raise HeadwayError(f"{path}: prefix: {error}") from None
    if found is not None:
        place = np.full(len(found) + 1, -1)
        place[kept] = np.arange(len(kept))
        table.segments = renumbered([found[k] for k in kept.tolist()], place)
        table.has_sessions = True


def _add_notes(table: Table, columns: Columns) -> None:
    """Tell of what changes the load, and cannot be simulated."""
    assert table.ledger is not None
    names = table.ledger.name_of
    for field in sorted(NOTED.keys() & columns.keys() & names.keys()):
        count = sum(is_told(field, word) for word in columns[field])
        differ = "model" not in columns and len({*columns[field]}) > 1
        if count and (differ or field != "group"):
            table.ledger.note(f"{names[field]}: requests that {NOTED[field][1]}", count)
    cached = columns.get("cached")
    if cached is not None and cached.any():
        share = f"{cached.sum() / table.prompt.sum():.1%} of input tokens"
        table.ledger.facts.append(("cached as told", share))
        if table.segments is None:
            table.ledger.note(
                f"{names['cached']}: input tokens that the engine's cache had when it was recorded",
                int(cached.sum()),
                "; nothing says which prompts share them, so none do here: name prefix=, or "
                f"cached={names['cached']} lets all begin alike",
            )
    for field in ("ttft", "e2el", "decode") if table.measured is not None else ():
        spent = _span_of(field, columns)
        spent = spent[~np.isnan(spent)]
        if field in names and len(spent) and np.median(spent) > LONG:
            name = names[field]
            table.ledger.note(
                f"{name}: half of the requests take more than {LONG:g} s, if it counts seconds; "
                f"{field}={name}:ms says that it does not"
            )
    several = [one for one in columns.get("conversation", ()) if one != UNTOLD["conversation"]]
    if table.segments is None and (later := len(several) - len(set(several))):
        name = names["conversation"]
        told = f"; their prompts share nothing here, but with prefix={name}"
        table.ledger.note(f"{name}: requests that continue a conversation", later, told)


def _rows(columns: Columns, units: Mapping[str, float]) -> Table:
    """Make a table of rows as they stand; the times that each took are not worked out."""
    names = ("client", "priority", "model", "images", "max_tokens", "hint", "cancel_after")
    told: dict[str, Any] = {name: columns.get(name) for name in names}
    for name in ("max_tokens", "hint"):
        told[name] = told[name] if told[name] is not None and told[name].any() else None
    per_second, size = units.get("arrival", 1.0), len(columns["output"])
    arrival = columns.get("arrival", np.zeros(size))
    if "arrival" in columns and "client_queue" in columns:
        waited = np.nan_to_num(columns["client_queue"]) * per_second
        fine = arrival.dtype == np.int64 and per_second > 1
        arrival = arrival + (np.rint(waited).astype(np.int64) if fine else waited)
    table = Table(arrival, per_second, columns["prompt"], columns["output"], **told)
    timed = {*SPANS, "first", "end"} - {"client_queue", "cancel_after"}
    if (timed | {"conversation", "prompt_id"}) & columns.keys():
        table.measured = no_times(size)
        for name in ("conversation", "turn", "prompt_id"):
            setattr(table.measured, name, columns.get(name))
    return table


def _since(name: str, table: Table, columns: Columns, units: Mapping[str, float]) -> Floats:
    """Return how long after each arrival a clock was read, s."""
    if name not in columns:
        return np.full(len(table.time), nan)
    since: Floats = columns[name] / units[name] - table.time / table.per_second
    return since


def _span_of(name: str, columns: Columns) -> Floats:
    found: Floats = columns.get(name, np.full(len(columns["output"]), nan))
    return found


def _measure(
    table: Table, measured: Measured, columns: Columns, units: Mapping[str, float]
) -> Iterator[tuple[int, str]]:
    """Work out what a layout leaves to be worked out; yield what is impossible, and of which."""
    since = partial(_since, table=table, columns=columns, units=units)
    told = partial(_span_of, columns=columns)
    gaps = table.output - 1
    several = gaps > 0
    ttft, tpot, e2el = (told(name) for name in ("ttft", "tpot", "e2el"))
    ttft = np.where(np.isnan(ttft), since("first"), ttft)
    e2el = np.where(np.isnan(e2el), since("end"), e2el)
    e2el = np.where(np.isnan(e2el), ttft + told("decode"), e2el)
    worked_out = np.where(several, (e2el - ttft) / np.where(several, gaps, 1), nan)
    tpot = np.where(several & np.isnan(tpot), worked_out, np.where(several, tpot, nan))
    e2el = np.where(np.isnan(e2el), ttft + np.where(several, tpot * gaps, 0.0), e2el)
    for name, values in (("first token", ttft), ("last token", e2el)):
        for k in np.flatnonzero(values < -NEAREST).tolist():
            yield k, f"the {name} comes {-values[k]:g} s before the arrival: impossible"
    for k in np.flatnonzero(e2el < ttft - 1e-3).tolist():
        ends = f"the last token comes {e2el[k]:g} s after the arrival, the first one {ttft[k]:g} s"
        yield k, f"{ends}: impossible"
    measured.ttft, measured.tpot, measured.e2el = ttft, tpot, e2el
