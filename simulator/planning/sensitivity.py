"""How far a result moves with its cost model: for 1 % of step time, and as far as that is unsure.

A run in which every step takes 1 % longer gives the elasticity of a metric, d ln metric / d ln step
time: 1 where nobody waits, far more near saturation, where a small error of the cost model is a
large one of the result.

The interval is that of the cost model's own uncertainty. Each cause is taken to both ends of its
95 %: the `residuals` of decode steps and of steps with prompts, each a factor of all these steps
(`costs/noise.py`), and the host's interval. What they move a metric by is added in squares, up and
down each by itself, as of causes that do not depend on one another.

An elasticity has an interval of its own, that of chance: a request meets another moment of the step
under way in steps that are 1 % longer, and waits more or less for its end. Where that is all there
is to wait for, means of TTFT move by it as much as by the steps. The interval is that of the
differences request by request, by means of successive batches of them. How far other requests
would move the metric is no part of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import hypot, log, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.costs.cost_model import CostModel
from simulator.costs.noise import QUANTILE, Noise, ScaledCost
from simulator.planning.runs import MetricValues, metric_values, run_all, run_point
from simulator.results.steady_state import measurement_window
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.simulation.result import Result
from simulator.util.errors import HeadwayError

LONGER = 1.01  # times as long as it should be is each step of the run that tells the elasticity
BATCHES = 20  # of requests, the means of which say what is chance
CLIFF = 5.0  # an elasticity above it is worth a warning
METRICS = ("mean_e2el_ms", "mean_ttft_ms")
BATCH_MEANS = "batches"  # beside them: their means over batches of requests

STEPS = "steps"
"""The change that tells the elasticity; the others are causes, at their lower and upper end."""


@dataclass(frozen=True)
class Sensitivity:
    """What a metric does when the cost model changes."""

    metric: str
    value: float
    elasticity: float  # d ln metric / d ln step time
    interval: tuple[float, float] | None  # 95 %; None: nothing is known of the model's error
    chance: float | None = None  # half the width of the elasticity's 95 %; None: too few requests

    @property
    def elasticity_95(self) -> tuple[float, float] | None:
        """Where the elasticity lies with 95 %."""
        if self.chance is None:
            return None
        return self.elasticity - self.chance, self.elasticity + self.chance

    @property
    def resolved(self) -> bool:
        """Whether the elasticity is told from chance."""
        return self.chance is None or abs(self.elasticity) > self.chance

    @property
    def cliff(self) -> bool:
        """Whether a small error of the cost model is a large one of the metric."""
        return self.elasticity > CLIFF and self.resolved


def changed_costs(cost: CostModel) -> dict[str, CostModel]:
    """Return a cost model changed in each way: steps 1 % longer, and each cause at both ends.

    Raises HeadwayError for ranks in lock-step, whose parts are priced apart.
    """
    if cost.joint is not None:
        raise HeadwayError("--sensitivity: not for data-parallel ranks of experts")
    found: dict[str, CostModel] = {STEPS: ScaledCost(cost, LONGER, LONGER)}
    sd = cost.residuals or {}
    for end, sign in (("low", -QUANTILE), ("high", QUANTILE)):
        if sd.get("decode"):
            found[f"decode {end}"] = Noise(sign, 0.0).apply(cost)
        if sd.get("prompts"):
            found[f"prompts {end}"] = Noise(0.0, sign).apply(cost)
    ends = cost.host_work.interval if cost.host_work else ()
    return found | {
        f"host {end}": cost.with_host(host=host)
        for end, host in zip(("low", "high"), ends, strict=False)
    }


def sensitivities(
    base: Mapping[str, Any], changed: Mapping[str, Mapping[str, Any]]
) -> list[Sensitivity]:
    """Put together what metrics are, and what they become under each change.

    Each has METRICS and, under BATCH_MEANS, their means over batches of requests.
    """
    found = []
    for metric in METRICS:
        value = base.get(metric, 0.0)
        values = {name: one[metric] for name, one in changed.items() if metric in one}
        if value <= 0 or values.get(STEPS, 0.0) <= 0:
            continue
        longer = values.pop(STEPS)
        elasticity = log(longer / value) / log(LONGER)
        moved = [one - value for one in values.values()]
        ends = (
            value - hypot(*(min(one, 0.0) for one in moved)),
            value + hypot(*(max(one, 0.0) for one in moved)),
        )
        chance = _chance(*(one.get(BATCH_MEANS, {}).get(metric) for one in (base, changed[STEPS])))
        chance = None if chance is None else chance / (longer * log(LONGER))
        found.append(Sensitivity(metric, value, elasticity, ends if moved else None, chance))
    return found


def _chance(base: Sequence[float] | None, longer: Sequence[float] | None) -> float | None:
    """Return the half-width of the interval, 95 %, of how far a mean moved; None: nobody knows.

    Both are means of successive batches. Neighbours of them share what moves slowly, such as a
    queue that grows, which is no chance: the variance is that of the differences of neighbours
    (von Neumann, "Distribution of the ratio of the mean square successive difference to the
    variance", 1941).
    """
    if base is None or longer is None:
        return None
    moved = np.subtract(longer, base)
    moved = moved[~np.isnan(moved)]
    apart = np.diff(moved)
    if not len(apart):
        return None
    from scipy.special import stdtrit  # scipy.stats takes 1 s longer to import

    variance = float(apart @ apart) / (2 * len(apart))
    return float(stdtrit(len(apart), 0.975)) * sqrt(variance / len(moved))


def batch_means(
    columns: Mapping[str, npt.NDArray[np.float64]], counted: npt.NDArray[np.bool_]
) -> dict[str, list[float]]:
    """Return the means of columns over batches of requests by id; NaN: nobody of it is counted."""
    batches = np.array_split(np.arange(len(counted)), min(BATCHES, max(len(counted), 1)))
    return {
        name: [
            float(column[ids][kept].mean()) if (kept := counted[ids]).any() else float("nan")
            for ids in batches
        ]
        for name, column in columns.items()
    }


def latencies(result: Result) -> dict[str, Any]:
    """Return the numbers of a run's summary, and the means of its batches."""
    table, within = result.request_table(), measurement_window(result)
    counted = table.completed
    if within is not None:
        counted = counted & (table.sent >= within[0]) & (table.sent <= within[1])
    columns = dict(zip(METRICS, (1e3 * table.e2el, 1e3 * table.ttft), strict=True))
    return metric_values(result.summary()) | {BATCH_MEANS: batch_means(columns, counted)}


def scenario_costs(scenario: Scenario) -> dict[str, CostModel]:
    """Return a scenario's cost model changed in each way.

    Raises HeadwayError of clusters whose groups may differ in cost.
    """
    first, *others = scenario.groups.values()
    if others:
        raise HeadwayError("--sensitivity: not for clusters of several groups")
    return changed_costs(resolve(first).cost)


def measure_sensitivity(
    result: Result,
    costs: Mapping[str, CostModel],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Sensitivity]:
    """Run a result's scenario under each change, up to seven times, on all cores.

    Raises HeadwayError where a run fails.
    """
    measure = partial(_measure, result.scenario, result.warmup, result.cooldown)
    outcomes = run_all(measure, [*costs.values()], None, progress, must=True)
    found = {name: one.values for name, one in zip(costs, outcomes, strict=True)}
    return sensitivities(latencies(result), found)


def _measure(scenario: Scenario, warmup: float, cooldown: float, cost: CostModel) -> MetricValues:
    """Run a scenario on a changed cost model, in a worker."""
    result = run_point(scenario, cost=cost)
    result.warmup, result.cooldown = warmup, cooldown
    return latencies(result)


def as_summary(found: list[Sensitivity]) -> dict[str, object]:
    """Return what `summary.json` has of it, by metric."""
    return {
        one.metric: {
            "elasticity": one.elasticity,
            "elasticity_95": None if (ends := one.elasticity_95) is None else [*ends],
            "resolved": one.resolved,
            "cliff": one.cliff,
            "interval_95": None if one.interval is None else [*one.interval],
        }
        for one in found
    }
