"""`runs.csv`: one row for each measured configuration, and the measurements in it."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

from simulator.errors import HeadwayError

RUNS = "runs.csv"
REQUIRED = ("run_id", "gpu", "model")
COUNTS = (
    "tp",
    "dp",
    "n_gpus",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "kv_capacity_tokens",
    "block_size",
    "concurrency",
    "n_requests",
)
NUMBERS = (
    "gpu_mem_util",
    "rate_rps",
    "duration_s",
    "mean_input_tokens",
    "mean_output_tokens",
    "prefix_hit_frac",
)
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"}
"""Our word for a latency, and that of the columns."""
STATISTICS = ("mean", "p50", "p90", "p99")
RATES = {"request_throughput": "req_per_s", "output_throughput": "output_tok_per_s"}


@dataclass(frozen=True)
class Run:
    """One row: words as they stand there, numbers as numbers; None where a cell is empty."""

    words: Mapping[str, str]
    numbers: Mapping[str, float]
    measured: Mapping[str, float]  # by metric: ms, requests/s, tokens/s

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.words["run_id"]

    @property
    def source(self) -> str:
        """Who measured it; the part of `run_id` before the first `__` where no column says so."""
        return self.words.get("source") or self.run_id.split("__")[0]

    def word(self, column: str) -> str:
        """Give a cell, "" where it is empty or the column is missing."""
        return self.words.get(column, "")

    def number(self, column: str) -> float | None:
        """Give a number; None where it is not recorded."""
        return self.numbers.get(column)

    def count(self, column: str) -> int | None:
        """Give a whole number; None where it is not recorded."""
        value = self.numbers.get(column)
        return None if value is None else round(value)

    def flag(self, column: str) -> bool | None:
        """Give true or false; None where it is not recorded."""
        word = self.word(column).lower()
        if word in {"true", "1", "1.0", "yes", "on"}:
            return True
        return False if word in {"false", "0", "0.0", "no", "off"} else None


def read_runs(folder: Path) -> list[Run]:
    """Read DIR/runs.csv; HeadwayError names every line and column that is wrong."""
    path = folder / RUNS
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            known = list(reader.fieldnames or ())
    except OSError as error:
        raise HeadwayError(f"{path}: cannot read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise HeadwayError(f"{path}: no CSV: {error}") from None
    if lacking := [column for column in REQUIRED if column not in known]:
        raise HeadwayError(
            f"{path}:1: lacks the column {', '.join(lacking)}; it needs {', '.join(REQUIRED)}"
        )
    wrong: list[str] = []
    runs = [_run(f"{path}:{line}", row, wrong) for line, row in enumerate(rows, 2)]
    seen: set[str] = set()
    for line, run in enumerate(runs, 2):
        if run.run_id in seen:
            wrong.append(f"{path}:{line}: run_id: {run.run_id!r} is there twice")
        seen.add(run.run_id)
    if wrong:
        raise HeadwayError(wrong)
    if not runs:
        raise HeadwayError(f"{path}: has no rows")
    return runs


def _run(place: str, row: Mapping[str | None, object], wrong: list[str]) -> Run:
    words = {
        key: value.strip() for key, value in row.items() if key and isinstance(value, str) and value
    }
    wrong += [f"{place}: {column}: is empty" for column in REQUIRED if not words.get(column)]
    numbers = {}
    for column in (*COUNTS, *NUMBERS, "preemptions"):
        if (value := _number(place, words, column, wrong)) is not None:
            numbers[column] = value
    measured = {}
    for name, column in _metric_columns():
        if (value := _number(place, words, column, wrong)) is not None:
            measured[name] = value
    words.setdefault("run_id", "")
    return Run(words, numbers, measured)


def _metric_columns() -> list[tuple[str, str]]:
    latencies = [
        (f"{statistic}_{ours}_ms", f"{theirs}_{statistic}_ms")
        for ours, theirs in LATENCIES.items()
        for statistic in STATISTICS
    ]
    return [*latencies, *RATES.items()]


def _number(place: str, words: Mapping[str, str], column: str, wrong: list[str]) -> float | None:
    """Read a cell, `~` and a remark in brackets aside; an empty one or `nan` is None."""
    text = words.get(column, "")
    if not text or text.lower() in {"nan", "none", "null", "na", "n/a", "unknown", "auto"}:
        return None
    match = re.fullmatch(r"[~≈]?([-+0-9.eE]+)( *\(.*\))?", text.replace(",", ""))
    try:
        value = float(match[1]) if match else float("nan")
    except ValueError:
        value = float("nan")
    if text.lower() in {"inf", "infinity"} and column == "rate_rps":
        return inf  # all at once
    if not isfinite(value) or value < 0:
        wrong.append(f"{place}: {column}: must be a number, 0 or more, not {text!r}")
        return None
    return value


def choose(runs: list[Run], wanted: list[str], folder: Path) -> list[Run]:
    """Keep the runs that are asked for; HeadwayError names those that are not there."""
    if not wanted:
        return runs
    by_id = {run.run_id: run for run in runs}
    if unknown := [name for name in wanted if name not in by_id]:
        from difflib import get_close_matches

        near = get_close_matches(unknown[0], by_id, 3, cutoff=0.0)
        raise HeadwayError(
            f"--run {unknown[0]}: no such run in {folder / RUNS}; did you mean {', '.join(near)}?"
        )
    return [by_id[name] for name in dict.fromkeys(wanted)]
