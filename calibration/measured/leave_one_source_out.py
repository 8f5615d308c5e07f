"""How well an engine's overhead is known: fit it without one source, predict that source.

    python -m calibration.measured.leave_one_source_out --measured DIR

The two terms that a step waits for, `step` and `per_sequence`, are chosen from a grid by the error
of mean TPOT, averaged over the other sources with the same kind of engine; the runs of the source
left out are then predicted with them.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from calibration.measured.engine import schedules_asynchronously, version
from calibration.measured.predict import predict
from calibration.measured.runs import Run, read_runs
from simulator.scenario.engines import ASYNC_SINCE

STEPS = (0.5e-3, 0.75e-3, 1.0e-3, 1.5e-3)  # s
PER_SEQUENCE = (0.0, 10e-6, 20e-6, 40e-6)  # s
METRIC = "mean_tpot_ms"

Terms = tuple[float, float]


def engine_kind(run: Run) -> str:
    """Say which overheads a run's engine has."""
    if not schedules_asynchronously(run):
        return "synchronous"
    late = version(run.word("engine_version")) >= ASYNC_SINCE
    return "asynchronous, from 0.14" if late else "asynchronous, before 0.14"


def errors(run: Run, folder: Path, grid: Sequence[Terms]) -> list[float]:
    """Give the absolute error of a run's mean TPOT under each pair of terms; NaN: no prediction."""
    found = []
    for terms in grid:
        rows = {row.metric: abs(row.error) for row in predict(run, folder, terms).rows}
        found.append(rows.get(METRIC, np.nan))
    return found


def leave_one_source_out(folder: Path) -> list[tuple[str, str, int, Terms, float]]:
    """Give kind of engine, source left out, its runs, the terms of the others, its mean error."""
    grid = list(product(STEPS, PER_SEQUENCE))
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in read_runs(folder):
        groups[engine_kind(run)].append(run)
    found = []
    for name, runs in groups.items():
        sources = sorted({run.source for run in runs})
        if len(sources) < 2:
            continue
        with ProcessPoolExecutor() as pool:
            table = np.array(list(pool.map(partial(errors, folder=folder, grid=grid), runs)))
        for source in sources:
            out = np.array([run.source == source for run in runs])
            each = [s for s in sources if s != source]
            means = [np.nanmean(table[[r.source == s for r in runs]], axis=0) for s in each]
            best = int(np.argmin(np.mean(means, axis=0)))  # every source counts the same
            found.append((name, source, int(out.sum()), grid[best], np.nanmean(table[out, best])))
    return found


def main() -> None:
    """Print a line for each source left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, required=True)
    folder = parser.parse_args().measured
    for name, source, runs, (step, per_sequence), error in leave_one_source_out(folder):
        terms = f"{step * 1e3:.2f} ms + {per_sequence * 1e6:.0f} us"
        print(f"{name:<26}{source:<36}{runs:>4} runs  {terms}  mean |error| of TPOT {error:.1%}")


if __name__ == "__main__":
    main()
