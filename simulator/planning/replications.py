"""One scenario or several, run K times with other requests and other errors of the cost model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from simulator.costs.noise import Noise
from simulator.planning.runs import MetricValues, metric_values, run_each, warn_once
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from simulator.util.workers import use_backend

MAX_REPLICATIONS = 10_000
SEED_STREAM = 0x4E9  # of the seeds of replications


@dataclass(frozen=True, slots=True)
class Replication:
    """One run: a scenario, which already has the replication's seed, and what is cut off."""

    scenario: Scenario
    warmup: float
    cooldown: float


def seeds(seed: int, count: int) -> list[int]:
    """Draw the seeds of the replications: the k-th is the same however many there are."""
    return [
        int(np.random.SeedSequence([seed, SEED_STREAM, k]).generate_state(1, np.uint64)[0] >> 1)
        for k in range(count)
    ]


def check_count(count: int, varied: Sequence[str] = ()) -> None:
    """Refuse numbers of replications that give no interval, and a seed that is varied too."""
    if not 2 <= count <= MAX_REPLICATIONS:
        raise HeadwayError(f"--replications {count}: must be 2 to {MAX_REPLICATIONS:,}")
    if "seed" in varied:
        raise HeadwayError("--vary seed: replications draw their seeds themselves; vary other keys")


def replicate(
    scenarios: Sequence[Scenario],
    count: int,
    *,
    warmup: float = 0.0,
    cooldown: float = 0.0,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[MetricValues]]:
    """Run every scenario `count` times on all cores; return the numbers of its summaries.

    The k-th replication of each has the same seed: the same arrivals, lengths and errors of the
    cost model, however the scenarios differ otherwise (common random numbers). Raises
    HeadwayError where a run fails.
    """
    work = [
        Replication(scenario.model_copy(update={"seed": seed}), warmup, cooldown)
        for scenario in scenarios
        for seed in seeds(scenario.seed, count)
    ]
    found: dict[int, MetricValues] = {}
    warned: set[str] = set()
    with use_backend("loky", jobs):
        for index, outcome in run_each(_measure, work, jobs):
            if outcome.errors:
                raise HeadwayError(outcome.errors)
            found[index] = outcome.values
            warned.update(outcome.warned)
            if progress is not None:
                progress(len(found), len(work))
    warn_once(sorted(warned), set())
    return [[found[k * count + j] for j in range(count)] for k in range(len(scenarios))]


def _measure(replication: Replication) -> MetricValues:
    """Make one run, in a worker."""
    result = run(replication.scenario, noise=Noise.draw(replication.scenario.seed))
    result.warmup, result.cooldown = replication.warmup, replication.cooldown
    return metric_values(result.summary())
