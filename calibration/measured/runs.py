"""`runs.csv`: one row for each measured configuration, and the measurements in it."""

import csv
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import inf, isfinite
from pathlib import Path
from typing import Any

from simulator.util.csv_text import unescape_formula
from simulator.util.errors import HeadwayError, HeadwayWarning, did_you_mean
from simulator.util.files import check_regular
from simulator.workload.traces.fields import UNITS

RUNS = "runs.csv"
with (Path(__file__).parent / "columns.csv").open(encoding="utf-8", newline="") as file:
    TABLE = [*csv.DictReader(file)]
"""The columns: what a cell holds, what limits it, and vLLM's words for it."""


def _columns_of(kind: str) -> tuple[str, ...]:
    return tuple(row["column"] for row in TABLE if row["kind"] == kind)


def _limited(limit: str) -> set[str]:
    return {row["column"] for row in TABLE if limit in row["limit"].split()}


REQUIRED, COUNTS, NUMBERS = _columns_of("name"), _columns_of("count"), _columns_of("number")
FLAGS, WORDS = _columns_of("flag"), _columns_of("word")
POSITIVE, SHARES = _limited("positive"), _limited("share")
MOST_VARIATION = 10  # of lengths' coefficient of variation: more is a percentage
OPTIONS = {option: row["column"] for row in TABLE for option in row["options"].split()}
"""vLLM's words for what has a column here."""
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"}
"""Our word for a latency, and that of the columns."""
STATISTICS = ("mean", "p50", "p90", "p99")
RATES = {"request_throughput": "req_per_s", "output_throughput": "output_tok_per_s"}
NEAR = 0.85  # of difflib's ratio: columns that are taken for another, misspelt
IDENTITY = {"run_id", "source", "tier", "command"}
"""Columns that name a run, or fill other columns."""
YES = {"true", "1", "1.0", "yes", "y", "on", "enabled"}
NO = {"false", "0", "0.0", "no", "n", "off", "disabled"}
BLANK = {"", "nan", "none", "null", "na", "n/a", "unknown", "auto", "default", "-", "--", "?"}
"""Cells that say that nothing was recorded."""


@dataclass(frozen=True)
class Run:
    """One row: words as they stand there, numbers as numbers; None where a cell is empty."""

    words: Mapping[str, str]
    numbers: Mapping[str, float]
    measured: Mapping[str, float]  # by metric: ms, requests/s, tokens/s
    faults: tuple[str, ...] = ()  # why it cannot be predicted
    remarks: tuple[str, ...] = ()  # cells that are left out
    drafts: Mapping[str, Any] = field(default_factory=dict)  # of its command
    read: set[str] = field(default_factory=set, compare=False)  # columns that were asked for

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.words["run_id"]

    @property
    def source(self) -> str:
        """Who measured it; the part of `run_id` before the first `__` where no column says so."""
        return self.words.get("source") or self.run_id.split("__")[0]

    def word(self, column: str) -> str:
        """Return a cell, "" where it is empty or the column is missing."""
        self.read.add(column)
        return self.words.get(column, "")

    def number(self, column: str) -> float | None:
        """Return a number; None where it is not recorded."""
        self.read.add(column)
        return self.numbers.get(column)

    def count(self, column: str) -> int | None:
        """Return a whole number; None where it is not recorded."""
        value = self.number(column)
        return None if value is None else round(value)

    def flag(self, column: str) -> bool | None:
        """Return true or false; None where it is not recorded."""
        word = self.word(column).partition("(")[0].strip().lower()
        return True if word in YES else False if word in NO else None


def unread_cells(run: Run) -> list[str]:
    """Return the columns of a run's load and engine whose cells no prediction asked for."""
    told = [name for name, cell in run.words.items() if cell.lower() not in BLANK]
    others = {*IDENTITY, *dict(_metric_columns()).values(), *run.read}
    return [name for name in told if name in _columns() and name not in others]


def read_runs(folder: Path, cells: Mapping[str, str] | None = None) -> list[Run]:
    """Read DIR/runs.csv; HeadwayError where it is no such table, or no row of it is good.

    What is wrong with some rows is told in their `faults`, with line and column. `cells` stand
    where a row's own, by their columns, are empty.
    """
    path = folder / RUNS
    check_regular(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = [
                (reader.line_num, {name: unescape_formula(cell) for name, cell in row.items()})
                for row in reader
            ]
            known = list(reader.fieldnames or ())
    except OSError as error:
        what = f"no {RUNS} to be read in it ({error.strerror}); docs/accuracy.md has its columns"
        raise HeadwayError(f"--measured {folder}: {what}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise HeadwayError(f"{path}: no CSV: {error}") from None
    if lacking := [column for column in REQUIRED if column not in known]:
        raise HeadwayError(
            f"{path}:1: lacks the column {', '.join(lacking)}; it needs {', '.join(REQUIRED)}"
        )
    _check_columns(path, known)
    if not rows:
        raise HeadwayError(f"{path}: has no rows")
    runs: list[Run] = []
    seen: set[str] = set()
    filled: set[str] = set()
    for line, row in rows:
        for column, value in (cells or {}).items():
            if str(row.get(column) or "").strip().lower() in BLANK:
                row[column] = value
                filled.add(column)
        faults, drafts = _fill_by_command(f"{path}:{line}", row)
        run = _run(f"{path}:{line}", row)
        run = replace(run, faults=(*faults, *run.faults), drafts=drafts)
        if run.run_id in seen:
            told = f"{path}:{line}: run_id: {run.run_id!r} is there twice"
            run = replace(run, faults=(told, *run.faults))
        seen.add(run.run_id)
        runs.append(run)
    if idle := [
        f"{column}={value}" for column, value in (cells or {}).items() if column not in filled
    ]:
        text = f"--set {', '.join(idle)}: without effect: each row of {path} has its own"
        warnings.warn(text, HeadwayWarning, stacklevel=2)
    if all(run.faults for run in runs):
        raise HeadwayError(fault for run in runs for fault in run.faults)
    return runs


def _fill_by_command(place: str, row: dict[Any, Any]) -> tuple[list[str], dict[str, Any]]:
    """Fill a row's empty cells by its launch command; return what has no column, and its drafts."""
    command = str(row.get("command") or "").strip()
    if command.lower() in BLANK:
        return [], {}
    from simulator.launch.keys import read_launch

    try:
        launch = read_launch(command, str(row.get("engine_version") or "").strip() or None)
    except HeadwayError as error:
        told = (one.removeprefix("--command: ") for one in error.messages)
        return [f"{place}: command: {one}" for one in told], {}
    drafts = launch.engine.pop("speculative_config", {})
    own_sizes = {**launch.pool, "num_speculative_tokens": drafts.get("num_speculative_tokens")}
    said = {**launch.engine, **own_sizes, "model": launch.model}
    own = {"name": "engine", "version": "engine_version"}
    wrong = []
    for key, value in said.items():
        column = own.get(key) or OPTIONS.get(key, key)
        if column not in _columns():
            wrong.append(
                f"{place}: command: {launch.words.get(('engine', key), key)}: has no column"
            )
        elif value is not None and str(row.get(column) or "").strip().lower() in BLANK:
            row[column] = str(value)
    return wrong, drafts


def parse_cells(given: Sequence[str]) -> dict[str, str]:
    """Read `COLUMN=VALUE`s of `--set`; HeadwayError where one is none."""
    pairs = [(one, *one.partition("=")) for one in given]
    for one, column, equals, value in pairs:
        if not equals or not value.strip():
            raise HeadwayError(f"--set {one}: is not COLUMN=VALUE, as model=llama-3-8b")
        if column not in _columns():
            near = did_you_mean(column, _columns())
            raise HeadwayError(f"--set {one}: {column}: no column of runs.csv{near}")
    cells = {column: value for _, column, _, value in pairs}
    if wrong := _run("--set", {**dict.fromkeys(REQUIRED, "1"), **cells}).faults:
        raise HeadwayError(wrong)
    return cells


def _columns() -> list[str]:
    """Return the columns that are read."""
    return [*REQUIRED, *COUNTS, *NUMBERS, *WORDS, *FLAGS, *dict(_metric_columns()).values()]


def _check_columns(path: Path, given: Sequence[str]) -> None:
    """Refuse columns that are misspelt, or of vLLM's words; warn of others that nobody reads."""
    there = [name.strip() for name in given if name and name.strip()]
    known = _columns()
    free = [name for name in known if name not in there]
    unread, wrong = [name for name in there if name not in known], []
    for name in [*unread]:
        plain = re.sub(r"\W+", "_", name.lower()).strip("_")
        near = [each for each in free if _digits(each) == _digits(plain)]  # P95 is no P90
        meant = [OPTIONS[plain]] if plain in OPTIONS else get_close_matches(plain, near, 1, NEAR)
        if meant and meant[0] in free:
            wrong.append(f"{path}:1: {name}: unknown column; did you mean {meant[0]}?")
    if wrong:
        raise HeadwayError(wrong)
    if unread:
        warnings.warn(
            f"{path}:1: columns that are not read: {', '.join(unread)}",
            HeadwayWarning,
            stacklevel=3,
        )


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def _run(place: str, row: Mapping[Any, object]) -> Run:
    words = {
        key.strip(): value.strip()
        for key, value in row.items()
        if key and isinstance(value, str) and value.strip()
    }
    faults = [f"{place}: {column}: is empty" for column in REQUIRED if column not in words]
    if None in row:
        faults.append(f"{place}: has more cells than there are columns")
    remarks: list[str] = []
    numbers = _numbers(place, words, {name: name for name in (*COUNTS, *NUMBERS)}, faults)
    for column, value in numbers.items():
        if column in COUNTS and round(value) < 1:
            faults.append(f"{place}: {column}: must be 1 or more, not {words[column]!r}")
        most = 1 if column in SHARES else MOST_VARIATION if column[-3:] == "_cv" else inf
        if value > most:
            faults.append(f"{place}: {column}: must be at most {most}, not {words[column]!r}")
        if column in POSITIVE and value <= 0:
            faults.append(f"{place}: {column}: must be more than 0, not {words[column]!r}")
    measured = _numbers(place, words, dict(_metric_columns()), remarks)
    measured = {name: value for name, value in measured.items() if value > 0}
    for column in FLAGS:
        word = words.get(column, "")
        if word.lower() not in BLANK and Run(words, {}, {}).flag(column) is None:
            faults.append(f"{place}: {column}: must be true or false, not {word!r}")
    words.setdefault("run_id", place.rpartition("/")[2])
    return Run(words, numbers, measured, tuple(faults), tuple(remarks))


def _metric_columns() -> list[tuple[str, str]]:
    latencies = [
        (f"{statistic}_{ours}_ms", f"{theirs}_{statistic}_ms")
        for ours, theirs in LATENCIES.items()
        for statistic in STATISTICS
    ]
    return [*latencies, *RATES.items()]


def _numbers(
    place: str, words: Mapping[str, str], columns: Mapping[str, str], wrong: list[str]
) -> dict[str, float]:
    """Read the cells of columns, by our names for them; tell those that hold no number."""
    found = {}
    for name, column in columns.items():
        text = words.get(column, "")
        if text.lower() in BLANK:
            continue
        if column == "rate_rps" and text.lower() in {"inf", "infinity"}:
            found[name] = inf  # all at once
        elif (value := _number(text, column)) is None:
            wrong.append(f"{place}: {column}: must be a number, 0 or more, not {text!r}")
        elif column in COUNTS and value % 1:
            wrong.append(f"{place}: {column}: must be a whole number, not {text!r}")
        else:
            found[name] = value
    return found


def _number(text: str, column: str) -> float | None:
    """Read a cell, `~` and a remark in brackets aside, in its column's unit; None: no number.

    95% is 0.95; in a column of times 30 ms, 0.03 s and 0.03 seconds are alike.
    """
    own = "%" if "_per_" in column else column.rpartition("_")[2]
    units = {unit: size / UNITS[own] for unit, size in UNITS.items()} if own in UNITS else {}
    units |= {"": 1.0, "%": 100.0}
    match = re.fullmatch(r"[~≈]?([-+0-9.eE]+) ?(%|[a-z]*)( *\(.*\))?", text.replace(",", ""))
    if not match or match[2] not in units:
        return None
    try:
        value = float(match[1]) / units[match[2]]
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None


def select_runs(runs: list[Run], wanted: list[str], folder: Path) -> list[Run]:
    """Keep the runs that are asked for; HeadwayError names those that are not there."""
    if not wanted:
        return runs
    by_id = {run.run_id: run for run in runs}
    if unknown := [name for name in wanted if name not in by_id]:
        near = get_close_matches(unknown[0], by_id, 3, cutoff=0.0)
        raise HeadwayError(
            f"--run {unknown[0]}: no such run in {folder / RUNS}; did you mean {', '.join(near)}?"
        )
    return [by_id[name] for name in dict.fromkeys(wanted)]
