"""How well an engine's overhead is known: fit it without one source, predict that source.

    python -m tools.profiles.leave_one_source_out --measured DIR [DIR ...]

The two terms that a step waits for, `step` and `per_sequence`, are chosen from a grid by the error
of mean TPOT, averaged over the other sources with the same kind of engine: the mean of all pairs
within one standard error of the best (Breiman et al., Classification and Regression Trees, 1984,
take the simplest of these), since the others cannot tell them apart. The runs of the source left
out are then predicted with them. Kernels come from tables that know none of the sources.
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from calibration.measured.engine import schedules_asynchronously, version
from calibration.measured.predict import predict
from calibration.measured.runs import Run, read_runs
from simulator.scenario.engine_defaults import ASYNC_SINCE
from simulator.util.errors import HeadwayError

STEPS = (0.1e-3, 0.5e-3, 0.75e-3, 1.0e-3, 1.25e-3)  # s
PER_SEQUENCE = (0.0, 10e-6, 20e-6, 30e-6)  # s
METRICS = "mean_tpot_ms", "mean_e2el_ms"

Terms = tuple[float, float]


def engine_kind(run: Run) -> str:
    """Say which overheads a run's engine has."""
    if not schedules_asynchronously(run):
        return "synchronous"
    late = version(run.word("engine_version")) >= ASYNC_SINCE
    return "asynchronous, from 0.14" if late else "asynchronous, before 0.14"


def errors(run: tuple[Run, Path], grid: Sequence[Terms]) -> list[tuple[float, float]]:
    """Return a run's absolute errors of METRICS under each pair of terms; NaN: no prediction."""
    found = []
    for terms in grid:
        rows = {row.metric: abs(row.error) for row in predict(*run, terms).rows}
        tpot, e2el = (rows.get(metric, np.nan) for metric in METRICS)
        found.append((tpot, e2el))
    return found


class LeftOut(NamedTuple):
    """A source that was left out, and how well the terms of the others predict it."""

    kind: str  # of engine
    source: str
    runs: int
    terms: Terms  # of the others
    tpot: float  # median |error|
    e2el: float  # the same; NaN: none was measured


def leave_one_source_out(folders: Sequence[Path]) -> Iterator[LeftOut]:
    """Leave out each source of each kind of engine in turn."""
    grid = list(product(STEPS, PER_SEQUENCE))
    groups: dict[str, list[tuple[Run, Path]]] = defaultdict(list)
    for folder in folders:
        for run in read_runs(folder):
            groups[engine_kind(run)].append((run, folder))
    for name, runs in groups.items():
        sources = np.array([run.source for run, _ in runs])
        if len(set(sources)) < 2:
            continue
        with ProcessPoolExecutor() as pool:
            table = np.array(list(pool.map(partial(errors, grid=grid), runs)))
            for source in sorted(set(sources)):
                others = [table[sources == one, :, 0] for one in sorted({*sources} - {source})]
                terms = mean_of_best(grid, others)
                here = [run for run, name in zip(runs, sources, strict=True) if name == source]
                found = np.array(list(pool.map(partial(errors, grid=[terms]), here)))[:, 0]
                with warnings.catch_warnings():  # of a source that has no E2EL
                    warnings.simplefilter("ignore", RuntimeWarning)
                    tpot, e2el = np.nanmedian(found, axis=0)
                yield LeftOut(
                    kind=name,
                    source=source,
                    runs=len(here),
                    terms=terms,
                    tpot=float(tpot),
                    e2el=float(e2el),
                )


def mean_of_best(grid: Sequence[Terms], sources: Sequence[npt.NDArray[np.float64]]) -> Terms:
    """Return the mean of the pairs that the sources cannot tell from the best.

    `sources` has an array each, runs by pairs, of absolute errors; every source counts the same.
    The standard error is that of a pair's difference from the best, run by run; a single run of a
    source tells nothing of it.
    """
    mean = np.mean([np.nanmean(runs, axis=0) for runs in sources], axis=0)
    best = int(np.argmin(mean))
    variance = np.zeros(len(grid))
    for runs in sources:
        known = runs[~np.isnan(runs[:, best])]
        if len(known) > 1:
            variance += np.var(known - known[:, [best]], axis=0, ddof=1) / len(known)
    near = mean - mean[best] <= np.sqrt(variance) / len(sources)
    step, per_sequence = np.array(grid)[near].mean(axis=0)
    return float(step), float(per_sequence)


def main() -> None:
    """Print a line for each source left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, required=True, nargs="+")
    try:
        found = leave_one_source_out(parser.parse_args().measured)
        for one in found:
            step, per_sequence = one.terms
            terms = f"{step * 1e3:.2f} ms + {per_sequence * 1e6:.0f} us"
            e2el = "" if np.isnan(one.e2el) else f", E2EL {one.e2el:.1%}"
            told = f"{one.runs:>4} runs  {terms}  median |error| TPOT {one.tpot:.1%}{e2el}"
            print(f"{one.kind:<26}{one.source:<36}{told}", flush=True)
    except HeadwayError as error:
        parser.error(f"--measured: {error}")


if __name__ == "__main__":
    main()
