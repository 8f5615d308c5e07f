"""Many runs on workers: the numbers of each, or why it failed, and what it warned of."""

import csv
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headway.report.text import cost_lines
from simulator.diagnosis.feasibility import warn_of_obstacles
from simulator.results.metrics import PERCENTILES, summarize_record
from simulator.results.record import Record
from simulator.results.run_info import engines_of
from simulator.results.service_levels import Slo, goodput_of
from simulator.scenario.draw import make_workload
from simulator.scenario.resolve import describe_costs
from simulator.scenario.scenario import Scenario
from simulator.simulation.result import Result
from simulator.simulation.run import run
from simulator.util.csv_text import escape_formula
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.files import resolve
from simulator.util.user_code import failure_lines
from simulator.util.workers import WorkerDied, parallel_map, use_backend
from simulator.workload.workload import Workload

T = TypeVar("T")

MetricValues = Mapping[str, Any]
"""What a run has measured, by name: numbers, and what a plan judges by."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """What came of a run."""

    values: MetricValues
    errors: Sequence[str] = ()  # why there are no numbers
    warned: Sequence[str] = ()

    @property
    def error(self) -> str:
        """Why there are no numbers, in one line."""
        return "; ".join(self.errors)


def run_each(
    measure: Callable[[T], MetricValues], tasks: Sequence[T], jobs: int | None
) -> Iterator[tuple[int, Outcome]]:
    """Call `measure` with every task on workers; yield (index, outcome) as they get done.

    Whatever it raises is an outcome too: one bad run ends no other.
    """
    for index, outcome in parallel_map(partial(_outcome, measure), tasks, jobs):
        yield index, Outcome({}, [outcome.reason]) if isinstance(outcome, WorkerDied) else outcome


def run_all(
    measure: Callable[[T], MetricValues],
    tasks: Sequence[T],
    jobs: int | None,
    progress: Callable[[int, int], None] | None = None,
    *,
    must: bool = False,
) -> list[Outcome]:
    """Do the same on this machine, and return the outcomes in the order of the tasks.

    `progress(done, total)` is called with every one. With `must` the first that fails raises its
    HeadwayError, and ends the others.
    """
    found: dict[int, Outcome] = {}
    with use_backend("loky", jobs):
        for index, outcome in run_each(measure, tasks, jobs):
            if must and outcome.errors:
                raise HeadwayError(outcome.errors)
            found[index] = outcome
            if progress is not None:
                progress(len(found), len(tasks))
    return [found[index] for index in range(len(tasks))]


def _outcome(measure: Callable[[T], MetricValues], task: T) -> Outcome:
    """Make one run, in a worker."""
    values: MetricValues = {}
    errors: Sequence[str] = ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HeadwayWarning)
        try:
            values = measure(task)
        except (Exception, SystemExit) as error:
            errors = failure_lines(error)
    warned = [str(w.message) for w in caught if issubclass(w.category, HeadwayWarning)]
    return Outcome(values, errors, warned)


_LAST_TRACE: dict[tuple[str, Path, int], Workload] = {}
"""What `run_point` read last in this process, by the block `workload`, the file and its time."""


def run_point(scenario: Scenario, *, tells: bool = False, **options: Any) -> Result:
    """Run one of many scenarios; a trace that the one before it was given is not read again.

    `tells` warns first of what can never hold.
    """
    workload = requests_of(scenario)
    if tells:
        warn_of_obstacles(scenario, workload)
    return run(scenario, workload=workload, **options)


def requests_of(scenario: Scenario) -> Workload:
    """Get the requests of a scenario; a trace that was read last is not read again."""
    block = scenario.workload
    if block.trace is None or block.given:
        return make_workload(scenario)
    place = resolve(block.trace.path, scenario.folder)
    if not place.is_file():
        return make_workload(scenario)
    key = repr(block), place, place.stat().st_mtime_ns
    if key not in _LAST_TRACE:
        _LAST_TRACE.clear()
        _LAST_TRACE[key] = make_workload(scenario)
    return _LAST_TRACE[key]


def warn_once(messages: Iterable[str], given: set[str], label: str = "") -> None:
    """Pass on what workers warned of, unless it has been given; `label` names the first run."""
    for message in messages:
        if message not in given:
            given.add(message)
            told = f"{label}: {message}" if label else message
            warnings.warn(told, HeadwayWarning, stacklevel=3)


def metric_values(summary: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the single numbers of a summary: vLLM's words, our own, a cluster's as a whole."""
    own = summary["headway"]
    cluster = own.get("cluster", {})
    links = {f"kv_transfer_{key}": value for key, value in cluster.get("kv_transfer", {}).items()}
    links |= {f"ec_transfer_{key}": value for key, value in cluster.get("ec_transfer", {}).items()}
    values = {**summary, **own, **cluster, **links}
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def read_metric_values(result: Record, slos: Sequence[Slo]) -> MetricValues:
    """Return a run's numbers by name, with those percentiles and shares that the bounds ask for."""
    asked = {slo.percentile for slo in slos if slo.percentile is not None}
    found = metric_values(summarize_record(result, percentiles=sorted({*PERCENTILES, *asked})))
    total = len(result.workload) or 1
    good = (found.get("request_goodput") or 0.0) * found["duration"]
    found |= {"goodput": good / total, "completion": found["completed"] / total}
    if apart := [slo for slo in slos if slo.counted_apart]:
        table = result.request_table()
        goodput = goodput_of(result.scenario.goodput, table.workload)
        warm = table.sent >= float(np.nanmin(table.sent)) + result.warmup
        found |= {slo.metric: slo.value(table, warm, goodput) for slo in apart}
    return found


def scenario_cost_lines(labels: Sequence[str], scenarios: Sequence[Scenario]) -> list[str]:
    """Say what the step times of scenarios come from, and how far off they may be."""
    costs = [describe_costs(one) | {"engines": engines_of(one)} for one in scenarios]
    return cost_lines(labels, costs)


def encode_csv(rows: Sequence[Mapping[str, object]], columns: Iterable[str] = ()) -> bytes:
    """Return rows as CSV, in the order of `columns` and then of the rows' further keys.

    A cell that a row lacks stays empty. Python writes each float with the digits that tell it.
    """
    names = dict.fromkeys([*columns, *(key for row in rows for key in row)])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, names))
    writer.writerows([_cell(row.get(name, "")) for name in names] for row in rows)
    return text.getvalue().encode()


def _cell(value: object) -> object:
    """Escape a text that a spreadsheet would run; a number that was written already is none."""
    is_text = isinstance(value, str) and not re.fullmatch(r"-[0-9]+\.?[0-9]*(e[+-]?[0-9]+)?", value)
    return escape_formula(str(value)) if is_text else value
