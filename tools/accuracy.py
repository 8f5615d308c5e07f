"""How far predictions are from every measured run at hand, by class; whether they got worse.

    python -m tools.accuracy --data DIR [--quick] [--write]

`DIR/e2e` and `DIR/e2e_stages` are folders of runs in the format of docs/accuracy.md. Each run is
predicted and counts in one class of each kind: size, run, model, GPU, engine, release, source. It
is predicted by the data sheet, too, as if no kernel of its model had been measured: these runs are
a class of their own. A run that is left out is counted by its reason. `headway/report/accuracy.csv`
has the table of the last `--write`: docs/accuracy.md shows it, and reports say the errors of runs
of a kind. Without `--write` a class whose median or 90 % error is `WORSE` or more above that table,
or whose intervals hold less by as much, is printed, and the exit code is 1.
`--quick` leaves out the 95 % intervals, and so their gate; with them all takes 400 s of user CPU.
"""

import argparse
import csv
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from calibration.measured.compare import Outcome
from calibration.measured.engine import (
    gpu_name,
    model_name,
    schedules_asynchronously,
    version,
)
from calibration.measured.predict import ROOFLINE, validate_measured
from calibration.measured.report import outcome_line
from headway.report.text import DATA_SHEET, run_kind
from simulator.models.load import load_model
from simulator.util.errors import HeadwayError
from simulator.util.files import write_atomic
from tools.profiles.compose_run import compose_run

ROOT = Path(__file__).parents[1]
TABLE, PAGE = ROOT / "headway" / "report" / "accuracy.csv", ROOT / "docs" / "accuracy.md"
BEGIN, END = "<!-- make accuracy: begin -->\n", "<!-- make accuracy: end -->"
FOLDERS = {"e2e": (), "e2e_stages": ("prompt_pool=100",)}
"""Folders of runs, with the cells that their README tells of all rows."""
METRICS = {
    "E2EL": "mean_e2el_ms",
    "TPOT": "mean_tpot_ms",
    "TTFT": "mean_ttft_ms",
    "TTFT P99": "p99_ttft_ms",
}
SHOWN = ("all", "run", "model", "GPU", "engine", "release", "source")
"""The kinds of classes that the page shows, those of several runs; the CSV has all."""
WORSE = 0.02  # of a class's error, or of the share that its intervals hold
SMALL = 3e9  # parameters of a dense model, fewer than which make it a small one
SURE = 1e-9  # what rounding leaves


@dataclass(frozen=True)
class Line:
    """The errors of one metric in one class of runs; None: no run of it has one."""

    kind: str
    name: str
    metric: str
    runs: int
    median: float | None
    p90: float | None
    inside: int  # of `intervals`, those that hold the measurement
    intervals: int
    not_predicted: int
    impossible: int
    not_recorded: int

    @property
    def title(self) -> str:
        """What the line is of."""
        return f"{self.name} ({self.kind}), {self.metric}"

    @property
    def share(self) -> float | None:
        """The share of measurements in their intervals."""
        return self.inside / self.intervals if self.intervals else None


def classes(outcome: Outcome, folder: Path) -> dict[str, str]:
    """Return the class of a run by kind."""
    run = outcome.run
    try:
        model = load_model(model_name(run.word("model"), folder))
        name, what = model.name, "experts" if model.num_experts else "dense"
        what = "small" if what == "dense" and model.parameters < SMALL else what
        gpu = gpu_name(run.word("gpu"))
    except ValueError:
        name = what = gpu = "unknown"
    long = run_kind("" if what == "unknown" else what, outcome.computed)
    scheduling = "asynchronous" if schedules_asynchronously(run) else "synchronous"
    release = ".".join(map(str, version(run.word("engine_version"))[:2]))
    return {
        "all": "all runs",
        "size": what,
        "run": long,
        "model": name,
        "GPU": gpu,
        "engine": f"vLLM, {scheduling}",
        "release": release,
        "source": run.source,
    }


def table(outcomes: Sequence[tuple[Outcome, Mapping[str, str]]]) -> list[Line]:
    """Sum up the outcomes of runs, each with its classes."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome, of in outcomes:
        for pair in of.items():
            groups.setdefault(pair, []).append(outcome)
    kinds = list(dict.fromkeys(kind for kind, _ in groups))
    order = sorted(groups, key=lambda pair: (kinds.index(pair[0]), pair[1]))
    return [_line(*pair, metric, groups[pair]) for pair in order for metric in METRICS]


def _line(kind: str, name: str, metric: str, members: Sequence[Outcome]) -> Line:
    good = [one for one in members if not one.reason and not one.impossible]
    errors, inside, intervals = [], 0, 0
    for one in good:
        row = next((row for row in one.rows if row.metric == METRICS[metric]), None)
        if row is None or not isfinite(row.error):
            continue
        errors.append(abs(row.error))
        for moved in one.sensitivity:
            if moved.metric == row.metric and moved.interval is not None:
                intervals += 1
                inside += moved.interval[0] <= row.measured <= moved.interval[1]
    return Line(
        kind,
        name,
        metric,
        runs=len(errors),
        median=round(float(np.median(errors)), 4) if errors else None,
        p90=round(float(np.percentile(errors, 90)), 4) if errors else None,
        inside=inside,
        intervals=intervals,
        not_predicted=sum(bool(one.reason) for one in members),
        impossible=sum(bool(one.impossible) for one in members),
        not_recorded=len(good) - len(errors),
    )


def worse(before: Iterable[Line], now: Iterable[Line]) -> list[str]:
    """Say which classes got worse, or lost runs, a line each."""
    found, after = [], {line.title: line for line in now}
    for old in before:
        what = old.title
        new = after.get(what)
        if new is None or new.runs < old.runs:
            found.append(f"{what}: {0 if new is None else new.runs} runs, {old.runs} before")
            continue
        pairs = {"median error": (old.median, new.median), "90 % error": (old.p90, new.p90)}
        missed = [None if one.share is None else 1.0 - one.share for one in (old, new)]
        pairs["outside their intervals"] = missed[0], missed[1]
        found += [
            f"{what}: {word} {y:.1%}, {x:.1%} before"
            for word, (x, y) in pairs.items()
            if x is not None and y is not None and y - x >= WORSE - SURE
        ]
    return found


def as_csv(lines: Iterable[Line]) -> str:
    """Write the table as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [one.name for one in fields(Line)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, lines))
    return text.getvalue()


def read_csv(text: str) -> list[Line]:
    """Read the table that `as_csv` wrote."""

    def cell(name: str, word: str) -> object:
        if name in ("kind", "name", "metric"):
            return word
        if name in ("median", "p90"):
            return float(word) if word else None
        return int(word)

    return [
        Line(**{name: cell(name, word) for name, word in row.items()})  # type: ignore[arg-type]
        for row in csv.DictReader(io.StringIO(text))
    ]


def as_markdown(lines: Sequence[Line]) -> str:
    """Write the table as the page shows it: a row a class, `median, 90 % (in intervals/runs)`."""
    rows = ["", f"|runs|{'|'.join(METRICS)}|", f"|---|{'---|' * len(METRICS)}"]
    for at in range(0, len(lines), len(METRICS)):
        some = lines[at : at + len(METRICS)]
        kind, name = some[0].kind, some[0].name
        title = (name if kind == "all" else f"{kind}: {name}") + _left_out(some[0])
        if kind in SHOWN and any(one.runs > 1 for one in some):
            rows.append(f"|{title}|{'|'.join(map(_cell, some))}|")
    return "\n".join([*rows, "", ""])


def _cell(line: Line) -> str:
    if line.median is None or line.p90 is None:
        return ""
    inside = f"{line.inside}/" if line.intervals else ""
    return f"{line.median:.1%}, {line.p90:.1%} ({inside}{line.runs})".replace("%", "")


def _left_out(line: Line) -> str:
    counts = {"not predicted": line.not_predicted, "impossible": line.impossible}
    return "".join(f", {count} {why}" for why, count in counts.items() if count)


def with_table(page: str, lines: Sequence[Line]) -> str:
    """Put the table between the marks of a page; HeadwayError where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise HeadwayError(f"docs/accuracy.md: lacks {BEGIN.strip()} or {END}")
    return before + begin + as_markdown(lines) + end + after


def predict_all(data: Path, *, intervals: bool) -> Iterator[tuple[Outcome, Mapping[str, str]]]:
    """Predict the runs of all folders; HeadwayError where one is not there."""
    for name, cells in FOLDERS.items():
        folder = data / name
        if not folder.is_dir():
            raise HeadwayError(f"--data {data}: has no folder {name}")
        given: dict[str, Any] = {"cells": cells, "done": _say}
        compose = partial(compose_run, data)
        for one in validate_measured(folder, sensitivity=intervals, compose=compose, **given):
            yield one, classes(one, folder)
        for one in validate_measured(folder, profile=ROOFLINE, **given):
            yield one, {"run": DATA_SHEET}


def _say(number: int, count: int, one: Outcome) -> None:
    print(f"{number}/{count} {outcome_line(one)}", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Predict, print the table, and compare it with the one that is committed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with e2e and e2e_stages")
    parser.add_argument("--quick", action="store_true", help="leave out the 95 %% intervals")
    parser.add_argument("--write", action="store_true", help="take the table as the new one")
    given = parser.parse_args(words)
    try:
        found = table(list(predict_all(given.data, intervals=not given.quick)))
        print(as_markdown(found))
        if given.write:
            write_atomic(PAGE, with_table(PAGE.read_text("utf-8"), found).encode())
            write_atomic(TABLE, as_csv(found).encode())
            return 0
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return 2
    told = worse(read_csv(TABLE.read_text("utf-8")), found)
    print(*(f"worse: {line}" for line in told), sep="\n")
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main())
