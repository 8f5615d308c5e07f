"""Many runs of one scenario with keys varied: one row per point, on all cores or on a cluster.

What is done stands in a journal beside the table, so that a sweep that was stopped goes on where
it was: a point is known by the whole of its scenario.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from headway.planning.design import (
    Axes,
    DesignPoint,
    Factor,
    as_yaml,
    axes_of,
    factors,
    load_points,
    need_runnable,
)
from headway.planning.journal import Journal, Row, open_journal, run_key, scenario_key
from headway.planning.runs import (
    MetricValues,
    encode_csv,
    metric_values,
    run_each,
    run_point,
    scenario_cost_lines,
    warn_once,
)
from headway.report.comparison import row_per_run
from headway.report.winner import best_run, overload_lines
from headway.runs.read import unescape_frame
from simulator.results.metrics import summarize_record
from simulator.scenario.load import Source, load_scenario, load_sweep, source_name
from simulator.scenario.planning_config import SweepConfig
from simulator.scenario.scenario import Scenario
from simulator.simulation.write import write_scenario
from simulator.util.errors import HeadwayError
from simulator.util.files import write_atomic
from simulator.util.workers import use_backend

if TYPE_CHECKING:
    import pandas as pd

TABLE, JOURNAL, BEST = "results.csv", "points.jsonl", "best.yaml"
SHOWN = 40  # points that a table on the screen has
PAUSE = 10.0  # s between two writings of the table while the sweep runs


def load_sweep_points(
    path: Source, vary: Axes = (), overrides: Sequence[str] = (), seed: int | None = None
) -> list[DesignPoint]:
    """Load the scenario once per point: the `sweep` block's points times the values of `vary`.

    The last key varies fastest. A point that contradicts itself is kept, with its error; if all
    do, or there is nothing to vary, HeadwayError says it.
    """
    block, drawn = load_sweep(path, overrides, seed)
    design = [] if block is None else _factors(block, drawn)
    design += factors(vary)
    if not design:
        load_scenario(path, overrides, seed)  # whatever is wrong with it comes first
        raise HeadwayError(
            f"{source_name(path)}: nothing to vary; give --vary key=a,b,c or a block `sweep`"
        )
    points = load_points(path, design, overrides, seed, DesignPoint)
    need_runnable(points)
    return points


def _factors(block: SweepConfig, seed: int) -> list[Factor]:
    """Return the points of a `sweep` block, as factors of a product."""
    design = factors([(key, [as_yaml(v) for v in values]) for key, values in block.grid.items()])
    if block.points:
        design.append([{k: as_yaml(v) for k, v in point.items()} for point in block.points])
    if block.random is not None:
        # The workload's generator takes the children 0 to 5 of the seed itself.
        rng = np.random.default_rng(np.random.SeedSequence([seed, 0x5EED]))
        design.append(
            [
                {key: as_yaml(spread.draw(rng)) for key, spread in block.random.keys.items()}
                for _ in range(block.random.samples)
            ]
        )
    return design


def run_sweep(
    points: Sequence[DesignPoint],
    out: Path,
    *,
    jobs: int | None = None,
    backend: str | None = "loky",
    address: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Run the points that `out` does not have yet; return a row for each, in their order.

    Writes `results.csv` (now and then, and at the end) and the journal, one line for each point
    as it gets done. `progress(done, total)` is called with every one. HeadwayError where another
    sweep or plan is writing to `out`, or `out` vanishes.
    """
    with open_journal(out / JOURNAL) as journal:
        workers = use_backend(backend, jobs, address)
        return _run_missing(points, journal, workers, jobs, progress)


def _run_missing(
    points: Sequence[DesignPoint],
    journal: Journal,
    workers: AbstractContextManager[None],
    jobs: int | None,
    progress: Callable[[int, int], None] | None,
) -> list[Row]:
    """Run the points that the journal does not have; return a row for each point."""
    keys = [
        run_key(one.varied) if one.scenario is None else scenario_key(one.scenario)
        for one in points
    ]
    labels = {key: point.label for key, point in zip(keys, points, strict=True)}
    rows: dict[str, Row] = {}
    tasks: dict[str, Scenario] = {}  # equal points run once
    for key, point in zip(keys, points, strict=True):
        if key in journal.known:
            rows[key] = journal.known[key]
        elif point.scenario is None:
            rows[key] = {"error": point.error}
        else:
            tasks[key] = point.scenario

    def save() -> list[Row]:
        table = [rows.get(key, {}) for key in keys]
        journal.check()  # else a folder taken away would come back with the table alone
        write_table(journal.path.parent / TABLE, points, table)
        return table

    if progress is not None:
        progress(len(keys) - len(tasks), len(keys))
    if not tasks:
        return save()
    warned: set[str] = set()
    names = list(tasks)
    with workers:
        save()
        written = monotonic()
        try:
            for index, outcome in run_each(_measure, list(tasks.values()), jobs):
                name = names[index]
                if outcome.errors:  # what failed is tried again next time
                    rows[name] = {"error": outcome.error}
                else:
                    rows[name] = {**outcome.values}
                    journal.append(name, rows[name])
                warn_once(outcome.warned, warned, labels[name])
                if progress is not None:
                    progress(sum(key in rows for key in keys), len(keys))
                if monotonic() - written > PAUSE:
                    save()
                    written = monotonic()
        finally:
            table = save()
    return table


def _measure(scenario: Scenario) -> MetricValues:
    """Run one point, in a worker."""
    return metric_values(summarize_record(run_point(scenario, tells=True).whole()))


def write_table(path: Path, points: Sequence[DesignPoint], rows: Sequence[Row]) -> None:
    """Write the varied keys, then the metrics, then `error`; points not yet run are left out."""
    varied = dict.fromkeys(key for point in points for key in point.varied)
    metrics = dict.fromkeys(key for row in rows for key in row if key != "error")
    text = encode_csv(
        [{**row, **point.varied} for point, row in zip(points, rows, strict=True) if row],
        [*varied, *metrics, "error"],
    )
    write_atomic(path, text)


def _as_summary(row: Row) -> dict[str, object]:
    """Return a row of the table as the summary that it was made of, as far as it says."""
    return {"completed": 0, "headway": {}, **row}


def best_point(points: Sequence[DesignPoint], rows: Sequence[Row]) -> tuple[int | None, str]:
    """Return the best point and why, by `headway.report.winner.best_run`.

    Of points that are alike the one with the fewest seats: more would serve nobody.
    """
    seats = [0 if one.scenario is None else one.scenario.engine.max_num_seqs for one in points]
    order = sorted(range(len(points)), key=seats.__getitem__)
    place, why = best_run([_as_summary(rows[k]) for k in order])
    return None if place is None else order[place], why


def write_best(points: Sequence[DesignPoint], rows: Sequence[Row], folder: Path) -> bool:
    """Write the scenario of the best point, and say whether there is one; else take away a former.

    What best means is said at `best_point`.
    """
    place, _ = best_point(points, rows)
    scenario = None if place is None else points[place].scenario
    if scenario is None:
        (folder / BEST).unlink(missing_ok=True)
        return False
    write_atomic(folder / BEST, partial(write_scenario, scenario))
    return True


def sweep_table(points: Sequence[DesignPoint], rows: Sequence[Row]) -> str:
    """Return a row for each point, the best of each column marked, and the best point.

    Of more than SHOWN points those are shown that come first.
    """
    keys = dict.fromkeys(key for point in points for key in point.varied)
    varied = [key for key in keys if len({point.varied.get(key) for point in points}) > 1]
    labels = [
        " ".join(
            f"{key.rpartition('.')[2]}={point.varied[key]}" for key in varied if key in point.varied
        )
        or point.label
        for point in points
    ]
    summaries = [_as_summary(row) for row in rows]
    lines = [row_per_run(labels[:SHOWN], summaries[:SHOWN], f"All metrics are in {TABLE}.")]
    if len(points) > SHOWN:
        lines.append(f"{len(points) - SHOWN:,} more points are there, too.")
    ran = [
        (label, point.scenario)
        for label, point, row in zip(labels[:SHOWN], points, rows, strict=False)
        if point.scenario is not None and not row.get("error")
    ]
    lines += scenario_cost_lines([label for label, _ in ran], [scenario for _, scenario in ran])
    lines += overload_lines(labels[:SHOWN], summaries[:SHOWN])
    place, why = best_point(points, rows)
    lines.append(f"No best point: {why}." if place is None else f"Best: {labels[place]}: {why}.")
    return "\n".join(lines)


def sweep(
    scenario: Source,
    vary: Mapping[str, Sequence[object]] | None = None,
    slo: Sequence[str] = (),
    *,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    backend: str | None = None,
    address: str | None = None,
) -> "pd.DataFrame":
    """Run a scenario at every combination of values; return one row per point.

    `plan` takes the same arguments by name. A point that fails has its `error`.

        sweep("demo.yaml", {"engine.max_num_seqs": [64, 256]}, out="out/max_num_seqs")

    Args:
        scenario: the file, a shipped one's name, or what a file would hold, a dict.
        vary: values of dotted keys, beside the scenario's own `sweep` block.
        slo: bounds, as `p99_ttft_ms<=1000`: whether a point keeps them is in its row.
        overrides: `dotted.key=value`, put over the file.
        seed: in place of the scenario's.
        out: folder of results.csv; points that it has already are not run again. None: no files.
        jobs: workers.
        backend: loky, dask or ray; None: joblib's active one.
        address: of a Dask scheduler or Ray cluster.
    """
    import pandas as pd

    if jobs == 0:
        raise HeadwayError("jobs: 0: must be 1 or more; None is one worker per core")
    axes = axes_of(vary)
    slo = [slo] if isinstance(slo, str) else slo
    more = [f"slo={json.dumps([*slo])}"] if slo else []
    points = load_sweep_points(scenario, axes, [*overrides, *more], seed)
    with TemporaryDirectory() if out is None else nullcontext(out) as folder:
        run_sweep(points, Path(folder), jobs=jobs, backend=backend, address=address)
        return unescape_frame(pd.read_csv(Path(folder) / TABLE))
