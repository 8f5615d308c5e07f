"""One scenario or several, run K times with other requests and other errors of the cost model."""

import csv
import io
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simulator.costs.noise import Noise
from simulator.planning.intervals import Numbers
from simulator.planning.points import Point, numbers
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.workers import Died, each, use_backend

if TYPE_CHECKING:
    from simulator.scenario.scenario import Scenario

MOST = 10_000
STREAM = 0x4E9  # of the seeds of replications


@dataclass(frozen=True, slots=True)
class Job:
    """One run: a scenario, which already has the replication's seed, and what is cut off."""

    scenario: "Scenario"
    warmup: float = 0.0
    cooldown: float = 0.0


def seeds(seed: int, count: int) -> list[int]:
    """Draw the seeds of the replications: the k-th is the same however many there are."""
    return [
        int(np.random.SeedSequence([seed, STREAM, k]).generate_state(1, np.uint64)[0] >> 1)
        for k in range(count)
    ]


def check_count(count: int, varied: Sequence[str] = ()) -> None:
    """Refuse numbers of replications that give no interval, and a seed that is varied too."""
    if not 2 <= count <= MOST:
        raise HeadwayError(f"--replications {count}: must be 2 to {MOST:,}")
    if "seed" in varied:
        raise HeadwayError("--vary seed: replications draw their seeds themselves; vary other keys")


def replicate(
    scenarios: Sequence["Scenario"],
    count: int,
    *,
    warmup: float = 0.0,
    cooldown: float = 0.0,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Numbers]]:
    """Run every scenario `count` times on all cores; return the numbers of its summaries.

    The k-th replication of each has the same seed: the same arrivals, lengths and errors of the
    cost model, however the scenarios differ otherwise (common random numbers). Raises
    HeadwayError where a run fails.
    """
    work = [
        Job(scenario.model_copy(update={"seed": seed}), warmup, cooldown)
        for scenario in scenarios
        for seed in seeds(scenario.seed, count)
    ]
    found: dict[int, Numbers] = {}
    told: dict[str, None] = {}
    with use_backend("loky", jobs):
        for index, outcome in each(run_job, work, jobs):
            if isinstance(outcome, Died):
                raise HeadwayError(outcome.reason)
            found[index], warned = outcome
            told |= dict.fromkeys(warned)
            if progress is not None:
                progress(len(found), len(work))
    for message in sorted(told):
        warnings.warn(message, HeadwayWarning, stacklevel=2)
    return [[found[k * count + j] for j in range(count)] for k in range(len(scenarios))]


def run_job(job: Job) -> tuple[Numbers, list[str]]:
    """Run one replication in a worker; return its numbers and what it warned of."""
    from simulator.simulation.run import run

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HeadwayWarning)
        try:
            result = run(job.scenario, noise=Noise.drawn(job.scenario.seed))
            result.warmup, result.cooldown = job.warmup, job.cooldown
            row = numbers(result.summary())
        except ValueError as error:  # `field: what is wrong`
            raise HeadwayError(str(error).split("\n")) from None
    return row, [str(w.message) for w in caught if issubclass(w.category, HeadwayWarning)]


def encode_runs(points: Sequence[Point], runs: Sequence[Sequence[Numbers]]) -> bytes:
    """Give every run as CSV: which point, what was varied, which replication, its numbers."""
    rows = [
        {"run": point.folder, **point.varied, "replication": k, **row}
        for point, same in zip(points, runs, strict=True)
        for k, row in enumerate(same)
    ]
    if len(points) == 1:
        rows = [{key: value for key, value in row.items() if key != "run"} for row in rows]
    return encode_csv(rows)


def encode_csv(rows: "Sequence[dict[str, object]]") -> bytes:
    """Give rows as CSV; a cell that a row lacks stays empty."""
    names = dict.fromkeys(key for row in rows for key in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
