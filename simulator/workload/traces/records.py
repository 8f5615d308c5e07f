"""Requests whose fields are told by name: checked, failed ones left out, latencies worked out.

`Records` gathers them from JSON and other files, a mapping for each request; what came as whole
columns, from a CSV, goes to `make_table` at once.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf, isfinite, nan
from pathlib import Path
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
    NO_DATE,
    NOTED,
    PRIORITY,
    SPANS,
    Sources,
    find_fields,
    parse_date,
    units_in,
    used_as,
    wrong_century,
)
from simulator.workload.traces.format import (
    Numbers,
    Problems,
    Table,
    name_problem,
    no_times,
)
from simulator.workload.traces.ledger import BESIDE, Ledger, is_told, sort_columns
from simulator.workload.workload import Floats, Ints

UNKNOWN = "unknown"
"""The client of a request that names none, where others do."""
NAMES = ("client", "model", "conversation", "prompt_id", "prefix", "media")
NOTHING = {"", "none", "null", "nan"}
NO_ERROR = {*NOTHING, "false", "0"}
NO_SUCCESS = {"false", "0", "no"}
CHANGING = {
    *("cache_hit", "call_type", "cancelled", "cached", "prefix", "prefix_tokens", "images"),
    *("cache_write", "asked", "prefix_request", "media", "whole_prompt"),
    *("client_queue", "cancel_after", "hint", "priority", "max_tokens", *NOTED),
}
"""Fields that are read of any format, whether it asks for them or not."""
NO_VALUE: tuple[object, ...] = (None, "", [], {})
YES = {"true", "1", "yes", "hit"}
NO_GENERATION = re.compile(
    r"embed|rerank|score|moderat|transcri|translat|speech|tts|stt|image|video|ocr|tool|file"
)
"""In the type of a call that is none to generate text."""
JUDGED = ("error", "success", "finish", "status", "status_code", "cancelled")
"""Fields that say whether a request failed."""
UNFINISHED = {
    *("rejected", "unfinished", "shed", "timeout", "abort", "error", "cancelled"),
    *("failure", "failed"),
}
LARGEST = 1e15  # tokens
SLOW = 100.0  # s from one request to the next, on average: hardly the unit that was meant
ROUNDING = 2.5e-9  # s: of an arrival, the wait at the client and a latency, added up
NEAREST = 1e-6  # s: a time that is so little below 0 is rounded
Columns = Mapping[str, Numbers | list[str]]


class Records:
    """Requests as mappings, which become a table; what is wrong is told by line and column."""

    def __init__(self, problems: Problems, sources: Sources, idle: Sequence[str] = ()) -> None:
        self.problems = problems
        self.sources = dict(sources)
        self.idle = idle  # names that this format has, and that are without effect
        self.met: set[str] = set()
        self.names: dict[str, None] = {}  # of these, those with a value
        self.lines: list[int] = []
        self.labels: list[str] = []  # before the column's name, where lines do not tell enough
        self.values: dict[str, list[object]] = {field: [] for field in sources}

    def add(self, line: int, row: Mapping[str, object], label: str = "") -> None:
        """Take in one request."""
        if not row.keys() <= self.met:
            self._meet(row)
        self.lines.append(line)
        self.labels.append(label)
        for field, found in self.sources.items():
            values = (row.get(name) for name in found.names)
            self.values[field].append(next((v for v in values if v is not None and v != ""), None))

    def _meet(self, row: Mapping[str, object]) -> None:
        """Note the keys of a request, and add the fields that change a load and were not asked for.

        What an object or a list holds is told by its own keys, or is content.
        """
        new = [k for k, value in row.items() if k not in self.names and value not in NO_VALUE]
        self.met |= row.keys()
        self.names |= {k: None for k in new if not isinstance(row[k], Mapping)}
        taken = {name for source in self.sources.values() for name in source.names}
        free = [k for k in new if k not in taken and not isinstance(row[k], Mapping | list)]
        for field, source in find_fields(free).items():
            if field in CHANGING and field not in self.sources:
                self.sources[field] = source
                self.values[field] = [None] * len(self.lines)

    def table(self) -> Table:
        """Make the table; HeadwayError with all that is wrong.

        What is told of failed requests may be anything; those whose arrival is told are `lost`.
        """
        words = self._words()
        beside = apart(words, len(self.lines))
        failed = failures(words, len(self.lines))
        gone = np.logical_or.reduce([np.zeros(len(failed), np.bool_), *beside.values()])
        kept = [k for k in np.flatnonzero(~gone).tolist() if not failed[k] or self._clear(k)]
        unread = int(failed[~gone].sum()) - int(failed[kept].sum())
        self.lines = [self.lines[k] for k in kept]
        self.labels = [self.labels[k] for k in kept]
        self.values = {name: [values[k] for k in kept] for name, values in self.values.items()}
        columns: dict[str, Numbers | list[str]] = {}
        units: dict[str, float] = {}
        for field, source in self.sources.items():
            values = self.values[field]
            if field in CLOCKS:
                columns[field], units[field] = self._clock(field, values, source.per_second)
            elif field in SPANS:
                columns[field] = self._span(field, values) / (source.per_second or 1.0)
            elif field in COUNTS or field in PRIORITY:
                columns[field] = self._whole(field, values)
            elif field in NAMES and any(value is not None for value in values):
                columns[field] = [self._word(field, k, value) for k, value in enumerate(values)]
            elif field in NOTED:
                columns[field] = ["" if value is None else str(value) for value in values]
        self.problems.stop()
        place = self.lines.__getitem__
        ledger = sort_columns(self.names, used_as(self.sources), self.idle)
        ledger.add_left_out(beside)
        path = self.problems.path
        return make_table(path, columns, units, place, ledger, failed=failed[kept], unread=unread)

    def _clear(self, k: int) -> bool:
        """Return whether the arrival of a failed request is told; keep no more than can be read."""
        for field, values in self.values.items():
            if field in CLOCKS or field in SPANS or field in COUNTS or field in PRIORITY:
                whole = field in COUNTS or field in PRIORITY
                if parse_if_date(values[k]) is None and not _is_plain(values[k], whole):
                    values[k] = 0 if whole else None
        return "arrival" in self.values and self.values["arrival"][k] is not None

    def _words(self) -> dict[str, Sequence[str]]:
        """Return what is said of failures and kinds of calls, as texts."""
        return {
            name: ["" if value is None else str(value) for value in self.values[name]]
            for name in (*JUDGED, *BESIDE)
            if name in self.values
        }

    def _wrong(self, field: str, k: int, why: str) -> None:
        name = self.sources[field].names[0]
        self.problems.add(self.lines[k], f"{self.labels[k]}{name}", why)

    def _word(self, field: str, k: int, value: object) -> str:
        if value is None:
            return "" if field in {"model", "prefix", "media", "prompt_id"} else UNKNOWN
        text = value if isinstance(value, str) else str(value)
        if wrong := name_problem(text):
            self._wrong(field, k, f"{short_repr(text)} {wrong}")
        return text

    def _numbers(self, field: str, values: Sequence[object]) -> Floats:
        """Return numbers, NaN for none."""
        if {type(value) for value in values} <= {int, float}:
            try:
                return np.array(values, np.float64)
            except OverflowError:
                pass
        return np.array([self._number(field, k, value) for k, value in enumerate(values)])

    def _span(self, field: str, values: Sequence[object]) -> Floats:
        """Return lengths of time, in the column's unit."""
        numbers = self._numbers(field, values)
        for k in np.flatnonzero(np.isinf(numbers) | (numbers < -NEAREST)).tolist():
            less = "negative" if numbers[k] < 0 else "not finite"
            self._wrong(field, k, f"{short_repr(values[k])} is {less}")
        return numbers

    def _number(self, field: str, k: int, value: object) -> float:
        if value is None or (isinstance(value, str) and value.strip().lower() in NOTHING):
            return nan
        if not isinstance(value, bool) and isinstance(value, int | float | str):
            try:
                return float(value)
            except (ValueError, OverflowError):
                pass
        self._wrong(field, k, f"{short_repr(value)} is not a number")
        return nan

    def _whole(self, field: str, values: Sequence[object]) -> Ints:
        """Return whole numbers; 0 where `max_tokens` or the like says nothing."""
        numbers = self._numbers(field, values)
        needed = field in {"prompt", "output"}
        least = -LARGEST if field in PRIORITY else 0 if needed else -1  # where Parquet has no cell
        whole = np.isfinite(numbers) & (numbers == np.floor(numbers)) & (numbers >= least)
        whole &= np.abs(numbers) < LARGEST
        if not needed:
            whole |= np.isnan(numbers)
        for k in np.flatnonzero(~whole).tolist():
            if values[k] is None:
                self._wrong(field, k, "missing")
            elif isfinite(numbers[k]) or not isinstance(values[k], str):
                less = "is negative" if numbers[k] < least else "is not a whole number"
                self._wrong(field, k, f"{short_repr(values[k])} {less}")
        untold = -1 if field == "prefix_request" else 0
        found = np.where(whole & ~np.isnan(numbers), numbers, untold).astype(np.int64)
        return found if field in PRIORITY else np.maximum(found, untold)

    def _clock(
        self, field: str, values: Sequence[object], per_second: float | None
    ) -> tuple[Numbers, float]:
        """Return times and their unit; dates count in microseconds."""
        dates = [parse_if_date(value) for value in values]
        if any(date is not None for date in dates):
            for k, date in enumerate(dates):
                if date is None and values[k] is not None:
                    self._wrong(field, k, f"{short_repr(values[k])} {NO_DATE}")
            return np.array([nan if date is None else date for date in dates]), 1e6
        numbers: Numbers
        if values and {type(value) for value in values} == {int}:
            try:
                numbers = np.array(values, np.int64)
            except OverflowError:
                numbers = self._numbers(field, values)
        else:
            numbers = self._numbers(field, values)
        bad = np.isinf(numbers) | (numbers < 0)
        for k in np.flatnonzero(bad).tolist():
            less = "is negative" if numbers[k] < 0 else "is not finite"
            self._wrong(field, k, f"{short_repr(values[k])} {less}")
        if field == "arrival":
            for k in np.flatnonzero(np.isnan(numbers)).tolist():
                if values[k] is None:
                    self._wrong(field, k, "missing")
        if per_second is None:
            known = numbers[~np.isnan(numbers)]
            per_second = units_in(float(known[0])) if len(known) else 1.0
        return numbers, per_second


def parse_if_date(value: object) -> float | None:
    """Read a date and time, as a text or an object: us since 1970; None if it is a number."""
    if value is None or isinstance(value, int | float):
        return None
    text = str(value).strip()
    if not text[:1].isdigit() or text.replace(".", "", 1).isdigit():
        return None
    try:
        return parse_date(text)
    except ValueError:
        return None


def _is_plain(value: object, whole: bool) -> bool:
    """Tell a finite number, 0 or more; where it is to be whole, one that is."""
    try:
        number = float(str(value))
    except ValueError:
        return False
    return 0 <= number < inf and (not whole or (number < LARGEST and number.is_integer()))


def _is_http_error(word: str) -> bool:
    """Tell a status such as 429 or 503."""
    return len(word) == 3 and word.isdigit() and word >= "400"


def failures(words: Mapping[str, Sequence[str]], size: int) -> npt.NDArray[np.bool_]:
    """Return which requests failed, by what is said of errors, success, finish and status."""
    told: dict[str, Callable[[str], bool]] = {
        "error": lambda word: word not in NO_ERROR,
        "success": lambda word: word in NO_SUCCESS,
        "cancelled": lambda word: word in YES,
    }
    told |= dict.fromkeys(
        ("finish", "status", "status_code"),
        lambda word: word in UNFINISHED or _is_http_error(word),
    )
    return _any(words, told, size)


def apart(words: Mapping[str, Sequence[str]], size: int) -> dict[str, npt.NDArray[np.bool_]]:
    """Return which requests no engine had to generate text for, by the field that says so."""
    hits = _any(words, {"cache_hit": lambda word: word in YES}, size)
    others = _any(words, {"call_type": lambda word: bool(NO_GENERATION.search(word))}, size)
    found = {"cache_hit": hits, "call_type": others & ~hits}
    return {name: mask for name, mask in found.items() if mask.any()}


def _any(
    words: Mapping[str, Sequence[str]], checks: Mapping[str, Callable[[str], bool]], size: int
) -> npt.NDArray[np.bool_]:
    """Return of which requests one of some fields says a word that a check takes."""
    found = np.zeros(size, np.bool_)
    for name in checks.keys() & words.keys():
        known = {word: checks[name](word.strip().lower()) for word in set(words[name])}
        found |= np.array([known[word] for word in words[name]], np.bool_)
    return found


def make_table(
    path: Path,
    columns: Columns,
    units: Mapping[str, float],
    place: Callable[[int], int],
    ledger: Ledger,
    *,
    failed: npt.NDArray[np.bool_] | None = None,
    unread: int = 0,
) -> Table:
    """Make a table of whole columns, by field; clocks in their units, the rest in s and tokens.

    A request without output tokens, or that is said to have failed, is left out and counted, as
    are `unread` others; the latter is one of `lost`, where its arrival is told. One that broke off
    in a run of Headway's stays: it says what was asked for. HeadwayError where times contradict
    each other; `place` gives a request's line.
    """
    size = len(columns["output"])
    _check_centuries(path, columns, units, place, ledger)
    words: Any = {name: columns[name] for name in (*JUDGED, *BESIDE) if name in columns}
    beside = apart(words, size)
    ledger.add_left_out(beside)
    gone = np.logical_or.reduce([np.zeros(size, np.bool_), *beside.values()])
    failed = failures(words, size) if failed is None else failed
    output, asked = _asked(columns)
    columns = {**columns, "output": output, "prompt": _whole_prompts(columns, ledger)}
    broken = failed & asked
    failed = failed & ~asked & ~gone
    kept = np.flatnonzero((output > 0) & ~failed & ~gone)
    table = _rows(columns, units, kept)
    table.ledger = ledger
    if empty := int((table.prompt < 1).sum()):
        text = f"{path}: {empty} prompts of no tokens are taken as of one"
        warnings.warn(text, HeadwayWarning, stacklevel=4)
        table.prompt = np.maximum(table.prompt, 1)
    table.failed = unread + size - int(gone.sum()) - len(kept)
    if np.isnan(table.time).any():
        k = int(np.isnan(table.time).argmax())
        raise HeadwayError(f"{path}:{place(int(kept[k]))}: arrival: is empty")
    if table.measured is not None:
        for k, problem in _measure(table, columns, kept, units):
            raise HeadwayError(f"{path}:{place(int(kept[k]))}: {problem}")
        if "client_queue" in columns:
            _send_with_answers(table)
        for values in (table.measured.ttft, table.measured.tpot, table.measured.e2el):
            values[broken[kept]] = nan
    _add_contents(path, table, columns, kept)
    _add_notes(table, columns, kept)
    if "arrival" in columns and failed.any():
        gone = np.flatnonzero(failed & ~np.isnan(columns["arrival"]))
        table.lost = _rows(columns, units, gone)
        ended = _since("end", table.lost, columns, gone, units)
        table.lost.cancel_after = np.fmax(_span_of("e2el", columns, gone), ended)
    return table


def _check_centuries(
    path: Path,
    columns: Columns,
    units: Mapping[str, float],
    place: Callable[[int], int],
    ledger: Ledger,
) -> None:
    """Refuse times that no request can have come or ended at."""
    names = {field: name for name, field in ledger.used.items()}
    for field in CLOCKS.keys() & columns.keys():
        if wrong := wrong_century(np.asarray(columns[field]), units[field]):
            name = names.get(field, field)
            why = wrong[1].replace("arrival=NAME", f"{field}={name}")
            raise HeadwayError(f"{path}:{place(wrong[0])}: {name}: {why}")


def _send_with_answers(table: Table) -> None:
    """Put what a client sent when an answer came just before that answer.

    A table of Headway's has nanoseconds: rounded up, such a request would miss the next step.
    """
    assert table.measured is not None
    ends = np.sort(table.time + table.measured.e2el)  # NaN last
    near = ends[np.minimum(np.searchsorted(ends, table.time - ROUNDING), len(ends) - 1)]
    ties = np.abs(near - table.time) <= ROUNDING
    table.time = np.where(ties, np.maximum(table.time - 2 * ROUNDING, 0.0), table.time)


def _asked(columns: Columns) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the output tokens asked for, and of which requests a run of Headway's tells them."""
    output: Any = columns["output"]
    asked: Any = columns.get("asked", np.zeros(len(output), np.int64))
    return np.where(asked > 0, asked, output), asked > 0


def _whole_prompts(columns: Columns, ledger: Ledger) -> Ints:
    """Return the tokens of prompts with what some logs count apart: prefixes, and what was cached.

    BLIS counts a prefix apart from `input_tokens`, its server does not; Anthropic's API counts what
    its cache had, and what went into it.
    """
    prompt: Any = columns["prompt"]
    none = np.zeros(len(prompt), np.int64)
    if "whole_prompt" in columns:
        whole: Any = columns["whole_prompt"]
        prompt = np.where(whole > 0, whole, prompt + columns.get("prefix_tokens", none))
        return np.asarray(prompt)
    names = {field: name.rpartition(".")[2] for name, field in ledger.used.items()}
    apart_from = names.get("cached") == "cache_read_input_tokens" or "cache_write" in columns
    if apart_from and names.get("prompt") == "input_tokens":
        prompt = prompt + columns.get("cached", none) + columns.get("cache_write", none)
    return np.asarray(prompt)


def _add_contents(path: Path, table: Table, columns: Columns, kept: Ints) -> None:
    """Add what prompts share, where columns tell it; names of answers go by the table's rows."""
    prompts: Any = np.maximum(columns["prompt"], 1)
    outputs: Any = columns["output"]
    try:
        found = read_prefixes(columns, prompts.tolist(), outputs.tolist())
    except ValueError as error:
        raise HeadwayError(f"{path}: prefix: {error}") from None
    if found is not None:
        place = np.full(len(found) + 1, -1)
        place[kept] = np.arange(len(kept))
        table.segments = renumbered([found[k] for k in kept.tolist()], place)
        table.has_sessions = True


def _add_notes(table: Table, columns: Columns, kept: Ints) -> None:
    """Tell of what changes the load, and cannot be simulated."""
    assert table.ledger is not None
    names = {field: name for name, field in table.ledger.used.items()}
    for field in sorted(NOTED.keys() & columns.keys() & names.keys()):
        words = _take(columns, field, kept)
        table.ledger.add_noted(names[field], field, sum(is_told(field, word) for word in words))
    cached = _take(columns, "cached", kept)
    if cached is not None and cached.any():
        share = f"{cached.sum() / table.prompt.sum():.1%} of input tokens"
        table.ledger.facts.append(("cached as told", share))
        if table.segments is None:
            table.ledger.notes.append(
                f"{names['cached']}: {share} were in the engine's cache when it was recorded; "
                "nothing says which prompts share them, so none do here: name prefix=, or "
                f"cached={names['cached']} lets all begin alike"
            )
    gap = np.ptp(table.time) / table.per_second / max(len(kept) - 1, 1) if len(kept) else 0.0
    if table.per_second == 1.0 and gap > SLOW and not (table.time % 1).any():
        name = names.get("arrival", "arrival")
        told = f"one request in {gap:,.0f} s, if its times are seconds"
        table.ledger.notes.append(f"{name}: {told}; arrival={name}:ms says that they are not")
    several = _take(columns, "conversation", kept)
    if table.segments is None and several and (later := len(several) - len(set(several))):
        table.ledger.notes.append(
            f"{names['conversation']}: {later} requests continue a conversation; their prompts "
            f"share nothing here, but with prefix={names['conversation']}"
        )


def _take(columns: Columns, name: str, kept: Ints) -> Any:
    """Return some rows of a column; None: there is none."""
    column = columns.get(name)
    if isinstance(column, list):
        return [column[k] for k in kept.tolist()]
    return None if column is None else column[kept]


def _rows(columns: Columns, units: Mapping[str, float], kept: Ints) -> Table:
    """Make a table of some rows, as they stand; the times that each took are not worked out."""
    take = partial(_take, columns, kept=kept)
    most, hint, arrival, client = map(take, ("max_tokens", "hint", "arrival", "client"))
    per_second = units.get("arrival", 1.0)
    if arrival is not None and (held := take("client_queue")) is not None:
        waited = np.nan_to_num(held) * per_second
        fine = arrival.dtype == np.int64 and per_second > 1
        arrival = arrival + (np.rint(waited).astype(np.int64) if fine else waited)
    table = Table(
        np.zeros(len(kept)) if arrival is None else arrival,
        per_second,
        take("prompt"),
        take("output"),
        client=None if client is None or {*client} <= {UNKNOWN} else client,
        priority=take("priority"),
        model=take("model"),
        max_tokens=most if most is not None and most.any() else None,
        cancel_after=take("cancel_after"),
        hint=hint if hint is not None and hint.any() else None,
        images=take("images"),
    )
    timed = {*SPANS, "first", "end"} - {"client_queue", "cancel_after"}
    if (timed | {"conversation", "prompt_id"}) & columns.keys():
        table.measured = no_times(len(kept))
        table.measured.conversation = take("conversation")
        table.measured.turn = take("turn")
        table.measured.prompt_id = take("prompt_id")
    return table


def _since(
    name: str, table: Table, columns: Columns, kept: Ints, units: Mapping[str, float]
) -> Floats:
    """Return how long after each arrival a clock was read, s."""
    values = _take(columns, name, kept)
    if values is None:
        return np.full(len(kept), nan)
    return np.asarray(values / units[name] - table.time / table.per_second, np.float64)


def _span_of(name: str, columns: Columns, kept: Ints) -> Floats:
    values = _take(columns, name, kept)
    return np.full(len(kept), nan) if values is None else values


def _measure(
    table: Table, columns: Columns, kept: Ints, units: Mapping[str, float]
) -> Iterator[tuple[int, str]]:
    """Work out what a layout leaves to be worked out; yield what is impossible, and of which."""
    since = partial(_since, table=table, columns=columns, kept=kept, units=units)
    told = partial(_span_of, columns=columns, kept=kept)
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
        if (bad := np.flatnonzero(values < -NEAREST)).size:
            yield (
                int(bad[0]),
                f"the {name} comes {-values[bad[0]]:g} s before the arrival: impossible",
            )
    if (bad := np.flatnonzero(e2el < ttft - 1e-3)).size:
        yield (
            int(bad[0]),
            f"the last token comes {e2el[bad[0]]:g} s after the arrival, the first one "
            f"{ttft[bad[0]]:g} s: impossible",
        )
    assert table.measured is not None
    table.measured.ttft, table.measured.tpot, table.measured.e2el = ttft, tpot, e2el
