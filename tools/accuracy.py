"""How far predictions are from every measured run at hand, by class; whether they got worse.

    python -m tools.accuracy --data DIR [--sample | --write]

`DIR/e2e` and `DIR/e2e_stages` are folders of runs in the format of docs/accuracy.md. Each run is
predicted and counts in one class of each kind: size, run, model, GPU, precision, engine,
scheduling, release, source. It is predicted by the data sheet, too, as if no kernel of its model
had been measured: these runs are a class of their own. A run that is left out is counted by its
reason.

`headway/report/accuracy.csv` has the table of the last `--write`: docs/accuracy.md shows it, and
reports say the errors of runs of a kind. Without `--write` a class whose median or 90 % error is
`WORSE` or more above that table, or whose intervals hold less by as much, is printed, and the exit
code is 1.

An interval takes up to seventeen simulations of a run, those of all runs 300 s of user CPU.
`--sample` simulates those of a sample alone: of each combination of classes the run that is the
least work, and every `APART`th of the others, but none of more than `MOST`. The interval
of any other run is as wide, as a share of what is predicted, as `tools/intervals.csv` has it from
the last `--write`, and lies about what is predicted now.
"""

import argparse
import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from math import isfinite, nan
from pathlib import Path

import numpy as np

from calibration.measured.compare import Outcome
from calibration.measured.engine import (
    gpu_name,
    is_sglang,
    model_name,
    quantization,
    schedules_asynchronously,
    version,
)
from calibration.measured.predict import ROOFLINE, predict
from calibration.measured.report import outcome_line
from calibration.measured.runs import Run, parse_cells, read_runs
from headway.planning.sensitivity import Sensitivity
from headway.report.whole_runs import DATA_SHEET, run_kind
from simulator.costs.profile import GPU_KEYS
from simulator.models.load import load_model
from simulator.util.errors import HeadwayError
from simulator.util.files import write_atomic
from simulator.util.workers import WorkerDied, parallel_map
from tools.profiles.compose_run import compose_run

ROOT = Path(__file__).parents[1]
TABLE, PAGE = ROOT / "headway" / "report" / "accuracy.csv", ROOT / "docs" / "accuracy.md"
WIDTHS = ROOT / "tools" / "intervals.csv"
BEGIN, END = "<!-- make accuracy: begin -->\n", "<!-- make accuracy: end -->"
FOLDERS = {"e2e": (), "e2e_stages": ("prompt_pool=100",)}
"""Folders of runs, with the cells that their README tells of all rows."""
METRICS = {
    "E2EL": "mean_e2el_ms",
    "TPOT": "mean_tpot_ms",
    "TTFT": "mean_ttft_ms",
    "TTFT P99": "p99_ttft_ms",
}
SHOWN = {
    **dict.fromkeys(("all", "run", "GPU", "precision"), 1),
    **dict.fromkeys(("model", "scheduling", "release", "source"), 3),
}
"""The kinds of classes that the page shows, and of how many runs at least; the CSV has all."""
HALF = "bf16, fp16"
APART = 6  # of a class's runs that much apart the intervals are simulated, in a sample
MOST = 4e5  # tokens of answers of a run of a sample: one of more takes 12 to 40 s
WORSE = 0.02  # of a class's error, or of the share that its intervals hold
SMALL = 3e9  # parameters of a dense model, fewer than which make it a small one
SURE = 1e-9  # what rounding leaves
Judged = tuple[Outcome, Mapping[str, str]]
"""A run, and its class by kind."""
Widths = Mapping[str, Sequence[tuple[str, float, float]]]
"""By run the metrics whose intervals are known, with their ends as shares of the prediction."""


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
        weights = quantization(run.word("weight_dtype"), run.word("model")) or HALF
    except ValueError:
        name = what = gpu = weights = "unknown"
    long = run_kind("experts" if what == "experts" else "dense", outcome.computed)
    engine = "SGLang" if is_sglang(run) else "vLLM"
    release = ".".join(map(str, version(run.word("engine_version"))[:2]))
    return {
        "all": "all runs",
        "size": what,
        "run": long,
        "model": name,
        "GPU": gpu,
        "precision": weights,
        "engine": f"{engine}{', drafts' if run.count('num_speculative_tokens') else ''}",
        "scheduling": "asynchronous" if schedules_asynchronously(run) else "synchronous",
        "release": f"{engine} {release}",
        "source": run.source,
    }


def table(outcomes: Iterable[Judged]) -> list[Line]:
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
        if ends := one.interval(row.metric):
            intervals += 1
            inside += ends[0] <= row.measured <= ends[1]
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
        if kind in SHOWN and any(one.runs >= SHOWN[kind] for one in some):
            rows.append(f"|{title}|{'|'.join(map(_cell, some))}|")
        if kind == "all":
            counts = (f"{one.not_recorded} not recorded" for one in some)
            rows.append(f"|left out of {name}|{'|'.join(counts)}|")
    rows.append(f"|no run: {', '.join(unjudged(lines))}{'|' * (len(METRICS) + 1)}")
    return "\n".join([*rows, "", ""])


def unjudged(lines: Iterable[Line]) -> list[str]:
    """Return GPUs with measured kernels, and kinds of engines, of which there is no run."""
    there = [line.name for line in lines if line.kind in ("GPU", "engine") and line.runs]
    found = [gpu for gpu in GPU_KEYS.values() if gpu != "CPU" and gpu not in there]
    return found + [
        word for word in ("SGLang", "drafts") if not any(word in name for name in there)
    ]


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


@dataclass(frozen=True)
class Task:
    """A run to be predicted, and its folder, which lies in that of the tables."""

    run: Run
    folder: Path
    by_sheet: bool  # the data sheet alone
    interval: bool

    def predict(self) -> Outcome:
        """Predict the run, from kernel tables where no profile is shipped."""
        if self.by_sheet:
            return predict(self.run, self.folder, profile=ROOFLINE)
        compose = partial(compose_run, self.folder.parent)
        return predict(self.run, self.folder, sensitivity=self.interval, compose=compose)


def predict_all(data: Path, *, sample: bool) -> list[Judged]:
    """Predict the runs of all folders; HeadwayError where one is not there."""
    runs: list[tuple[Run, Path]] = []
    for name, cells in FOLDERS.items():
        folder = data / name
        if not folder.is_dir():
            raise HeadwayError(f"--data {data}: has no folder {name}")
        runs += [(run, folder) for run in read_runs(folder, parse_cells(cells))]
    widths = read_widths(WIDTHS.read_text("utf-8")) if sample else {}
    chosen = drawn(runs) if sample else [run.run_id for run, _ in runs]
    tasks = [Task(*one, by_sheet=False, interval=one[0].run_id in chosen) for one in runs]
    tasks += [Task(*one, by_sheet=True, interval=False) for one in runs]
    found = [Outcome(task.run) for task in tasks]
    for number, (index, one) in enumerate(parallel_map(Task.predict, tasks), 1):
        if isinstance(one, WorkerDied):
            found[index].reason = one.reason
        else:
            found[index] = one
        print(f"{number}/{len(tasks)} {outcome_line(found[index])}", flush=True)
    judged: list[Judged] = []
    for task, one in zip(tasks, found, strict=True):
        of = {"run": DATA_SHEET} if task.by_sheet else classes(one, task.folder)
        if not (task.by_sheet or task.interval):
            one.sensitivity = as_wide(one, widths)
        judged.append((one, of))
    return judged


def drawn(runs: Iterable[tuple[Run, Path]]) -> list[str]:
    """Name the runs whose intervals a sample simulates: some of each combination of classes."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run, folder in runs:
        if not run.faults and _work(run) <= MOST:
            computed = run.number("mean_input_tokens") or nan
            of = classes(Outcome(run, computed=computed), folder)
            groups.setdefault(tuple(of.values()), []).append(run)
    return [
        run.run_id for members in groups.values() for run in sorted(members, key=_work)[::APART]
    ]


def _work(run: Run) -> float:
    """Return about how much work a simulation is: tokens of answers."""
    requests = run.count("n_requests") or run.count("concurrency") or 1
    return requests * (run.number("mean_output_tokens") or 1.0)


def widths_as_csv(judged: Iterable[Judged]) -> str:
    """Write the ends of all intervals as shares of what is predicted."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("run_id", "metric", "low", "high"))
    for one, _ in judged:
        rows = {row.metric: row.predicted for row in one.rows}
        writer.writerows(
            (one.run.run_id, moved.metric, *(f"{end / value:.6f}" for end in moved.interval))
            for moved in one.sensitivity
            if moved.metric in METRICS.values()
            if moved.interval is not None and (value := rows.get(moved.metric))
        )
    return text.getvalue()


def read_widths(text: str) -> Widths:
    """Read what `widths_as_csv` wrote."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        ends = row["metric"], float(row["low"]), float(row["high"])
        found.setdefault(row["run_id"], []).append(ends)
    return found


def as_wide(outcome: Outcome, widths: Widths) -> list[Sensitivity]:
    """Give a run's predictions the intervals that they had, as shares of them."""
    rows = {row.metric: row.predicted for row in outcome.rows}
    return [
        Sensitivity(metric, rows[metric], nan, (low * rows[metric], high * rows[metric]))
        for metric, low, high in widths.get(outcome.run.run_id, ())
        if metric in rows
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Predict, print the table, and compare it with the one that is committed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with e2e and e2e_stages")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--sample", action="store_true", help="simulate the intervals of a sample")
    how.add_argument("--write", action="store_true", help="take the table as the new one")
    given = parser.parse_args(words)
    try:
        judged = predict_all(given.data, sample=given.sample)
        found = table(judged)
        print(as_markdown(found))
        if given.write:
            write_atomic(PAGE, with_table(PAGE.read_text("utf-8"), found).encode())
            write_atomic(TABLE, as_csv(found).encode())
            write_atomic(WIDTHS, widths_as_csv(judged).encode())
            return 0
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return 2
    told = worse(read_csv(TABLE.read_text("utf-8")), found)
    print(*(f"worse: {line}" for line in told), sep="\n")
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main())
