"""Many runs of one scenario with keys varied: one row per point, on all cores or on a cluster.

What is done stands in a journal beside the table, so that a sweep that was stopped goes on where
it was: a point is known by the whole of its scenario.
"""

import csv
import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from simulator.planning.points import numbers
from simulator.scenario.load import load_scenario, load_sweep
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.files import write_atomic
from simulator.util.version import __version__
from simulator.util.workers import Died, each, use_backend

if TYPE_CHECKING:
    import pandas as pd

    from simulator.scenario.scenario import Scenario
    from simulator.scenario.sweep_config import SweepConfig

TABLE, JOURNAL = "results.csv", "points.jsonl"
PAUSE = 10.0  # s between two writings of the table while the sweep runs

Row = dict[str, Any]
"""A point's numbers by name, or {"error": what was wrong}."""


@dataclass(slots=True, frozen=True)
class Point:
    """One run of a sweep."""

    varied: dict[str, str]  # value by dotted key, as YAML
    scenario: "Scenario | None"  # None: it cannot be loaded
    error: str = ""

    @property
    def key(self) -> str:
        """Tell whether two points are the same run: by the version and the whole scenario."""
        what: Any = self.varied
        if self.scenario is not None:
            what = [str(self.scenario.folder.resolve()), self.scenario.resolved()]
        text = json.dumps([__version__, what], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def plan_points(
    path: Path,
    vary: Iterable[tuple[str, Sequence[str]]] = (),
    overrides: Sequence[str] = (),
    seed: int | None = None,
) -> list[Point]:
    """Load the scenario once per point: the `sweep` block's points times the values of `vary`.

    `vary` has pairs of dotted key and values, as YAML. The last key varies fastest. A point that
    contradicts itself is kept, with its error; if all do, or there is nothing to vary,
    HeadwayError says it.
    """
    block, drawn = load_sweep(path, overrides, seed)
    axes = [] if block is None else _axes(block, drawn)
    axes += [_axis(key, values) for key, values in vary]
    if not axes:
        load_scenario(path, overrides, seed)  # whatever is wrong with it comes first
        raise HeadwayError(f"{path}: nothing to vary; give --vary key=a,b,c or a block `sweep`")
    points = []
    for parts in product(*axes):
        keys = [key for part in parts for key in part]
        if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
            raise HeadwayError(f"{path}: sweep: a key is varied twice: {', '.join(twice)}")
        varied = {key: value for part in parts for key, value in part.items()}
        try:
            points.append(Point(varied, load_scenario(path, overrides, seed, vary=varied.items())))
        except HeadwayError as error:
            points.append(Point(varied, None, "; ".join(error.messages)))
    if all(point.scenario is None for point in points):
        raise HeadwayError(dict.fromkeys(point.error for point in points))
    return points


def _axis(key: str, values: Sequence[str]) -> list[dict[str, str]]:
    return [{key: value} for value in values]


def _axes(block: "SweepConfig", seed: int) -> list[list[dict[str, str]]]:
    """Give the points of a `sweep` block, as factors of a product."""
    axes = [_axis(key, [as_yaml(value) for value in values]) for key, values in block.grid.items()]
    if block.points:
        axes.append([{k: as_yaml(v) for k, v in point.items()} for point in block.points])
    if block.random is not None:
        # The workload's generator takes the children 0 to 5 of the seed itself.
        rng = np.random.default_rng(np.random.SeedSequence([seed, 0x5EED]))
        keys = block.random.keys
        axes.append(
            [
                {key: as_yaml(spread.draw(rng)) for key, spread in keys.items()}
                for _ in range(block.random.samples)
            ]
        )
    return axes


def as_yaml(value: object) -> str:
    """Write a value as YAML, plain words without quotes."""
    if isinstance(value, str) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value)


def sweep_points(
    points: Sequence[Point],
    out: Path,
    *,
    jobs: int | None = None,
    backend: str | None = "loky",
    address: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Run the points that `out` does not have yet; return a row for each, in their order.

    Writes `results.csv` (now and then, and at the end) and the journal, one line for each point
    as it gets done. `progress(done, total)` is called with every one.
    """
    journal = out / JOURNAL
    known = read_journal(journal)
    keys = [point.key for point in points]
    rows: dict[str, Row] = {key: known[key] for key in keys if key in known}
    rows |= {
        key: {"error": point.error}
        for key, point in zip(keys, points, strict=True)
        if point.scenario is None
    }
    todo = {
        key: point for key, point in zip(keys, points, strict=True) if key not in rows
    }  # equal points run once

    def table() -> list[Row]:
        return [rows.get(key, {}) for key in keys]

    write_table(out / TABLE, points, table())
    if progress is not None:
        progress(len(keys) - len(todo), len(keys))
    told: set[str] = set()
    written = monotonic()
    if todo:
        names, work = list(todo), [point.scenario for point in todo.values() if point.scenario]
        try:
            with use_backend(backend, jobs, address), journal.open("ab") as file:
                for index, outcome in each(run_point, work, jobs):
                    row, warned = _outcome(outcome)
                    rows[names[index]] = row
                    if "error" not in row:  # what failed is tried again next time
                        line = json.dumps({"point": names[index], "row": row})
                        file.write(line.encode() + b"\n")
                        file.flush()
                    _tell(warned, told)
                    if progress is not None:
                        progress(sum(key in rows for key in keys), len(keys))
                    if monotonic() - written > PAUSE:
                        write_table(out / TABLE, points, table())
                        written = monotonic()
        finally:
            write_table(out / TABLE, points, table())
    return table()


def _outcome(outcome: "tuple[Row, list[str]] | Died") -> tuple[Row, list[str]]:
    return ({"error": outcome.reason}, []) if isinstance(outcome, Died) else outcome


def _tell(warned: Iterable[str], told: set[str]) -> None:
    """Pass on what workers warned of, each once."""
    for message in warned:
        if message not in told:
            told.add(message)
            warnings.warn(message, HeadwayWarning, stacklevel=2)


def run_point(scenario: "Scenario") -> tuple[Row, list[str]]:
    """Run one point in a worker; return its numbers, or its error, and what it warned of."""
    from simulator.simulation.run import run

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HeadwayWarning)
        try:
            row: Row = {**numbers(run(scenario).summary())}
        except HeadwayError as error:
            row = {"error": "; ".join(error.messages)}
        except Exception as error:  # one bad point must not end the sweep
            row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    return row, [str(w.message) for w in caught if issubclass(w.category, HeadwayWarning)]


def read_journal(path: Path) -> dict[str, Row]:
    """Read the rows by point; a last line that a kill cut short is taken out of the file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise HeadwayError(f"{path}: cannot read: {error.strerror}") from error
    whole = data[: data.rfind(b"\n") + 1]
    rows: dict[str, Row] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            entry = json.loads(line)
            rows[entry["point"]] = dict(entry["row"])
        except (ValueError, KeyError, TypeError):
            raise HeadwayError(
                f"{path}:{number}: is no line of a sweep; take it out, or the whole file"
            ) from None
    if len(whole) < len(data):
        write_atomic(path, lambda file: file.write(whole))
    return rows


def write_table(path: Path, points: Sequence[Point], rows: Sequence[Row]) -> None:
    """Write the varied keys, then the metrics, then `error`; points not yet run are left out."""
    varied = dict.fromkeys(key for point in points for key in point.varied)
    metrics = dict.fromkeys(key for row in rows for key in row if key != "error")
    text = io.StringIO()
    columns = [*varied, *(key for key in metrics if key not in varied), "error"]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for point, row in zip(points, rows, strict=True):
        if row:
            writer.writerow({**row, **point.varied})
    write_atomic(path, lambda file: file.write(text.getvalue().encode()))


def sweep(
    scenario: str | Path,
    vary: Mapping[str, Sequence[object]] | None = None,
    *,
    out: str | Path,
    jobs: int | None = None,
    backend: str | None = None,
    address: str | None = None,
) -> "pd.DataFrame":
    """Run a scenario file at every combination of values; return one row per point.

    `vary` maps dotted keys to values, beside the scenario's own `sweep` block. `out` is the
    folder of results.csv; points that it has already are not run again. Runs on joblib's active
    backend unless `backend` names one (loky, dask, ray). A point that fails has its `error`.

        sweep("demo.yaml", {"engine.max_num_seqs": [64, 256]}, out="out/seats")
    """
    import pandas as pd

    axes = [(key, [as_yaml(value) for value in values]) for key, values in (vary or {}).items()]
    points = plan_points(Path(scenario), axes)
    sweep_points(points, Path(out), jobs=jobs, backend=backend, address=address)
    return pd.read_csv(Path(out) / TABLE)
