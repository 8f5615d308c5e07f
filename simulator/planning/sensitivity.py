"""How far a result moves with its cost model: for 1 % of step time, and as far as that is unsure.

A run in which every step takes 1 % longer gives the elasticity of a metric, d ln metric / d ln step
time: 1 where nobody waits, far more near saturation, where a small error of the cost model is a
large one of the result.

The interval is that of the cost model's own uncertainty. Each cause is taken to both ends of its
95 %: the `residuals` of decode steps and of steps with prompts, each a factor of all these steps
(`costs/noise.py`), and the host's interval. What they move a metric by is added in squares, up and
down each by itself, as of causes that do not depend on one another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import hypot, log

from simulator.costs.cost_model import CostDecorator, CostModel
from simulator.costs.data_parallel import DataParallelCost
from simulator.costs.noise import Noise, ScaledCost
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.pipeline import PipelineCost
from simulator.planning.runs import MetricValues, metric_values, run_each, run_point
from simulator.scenario.assemble import assemble
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError
from simulator.util.workers import use_backend

LONGER = 1.01  # times as long as it should be is each step of the run that tells the elasticity
QUANTILE = 1.96  # standard deviations on either side that hold 95 % of a normal variable
CLIFF = 5.0  # an elasticity above it is worth a warning
METRICS = ("mean_e2el_ms", "mean_ttft_ms")

STEPS = "steps"
"""The change that tells the elasticity; the others are causes, at their lower and upper end."""


@dataclass(frozen=True)
class Sensitivity:
    """What a metric does when the cost model changes."""

    metric: str
    value: float
    elasticity: float  # d ln metric / d ln step time
    interval: tuple[float, float] | None  # 95 %; None: nothing is known of the model's error

    @property
    def cliff(self) -> bool:
        """Whether a small error of the cost model is a large one of the metric."""
        return self.elasticity > CLIFF


def changed_costs(cost: CostModel) -> dict[str, CostModel]:
    """Give a cost model changed in each way: steps 1 % longer, and each cause at both ends.

    Raises HeadwayError for ranks in lock-step and pipelines, whose parts are priced apart.
    """
    if isinstance(cost, DataParallelCost | PipelineCost):
        raise HeadwayError("--sensitivity: not for pipelines and data-parallel ranks of experts")
    found: dict[str, CostModel] = {STEPS: ScaledCost(cost, LONGER, LONGER)}
    sd = cost.residuals or {}
    for end, sign in (("low", -QUANTILE), ("high", QUANTILE)):
        if sd.get("decode"):
            found[f"decode {end}"] = Noise(sign, 0.0).apply(cost)
        if sd.get("prompts"):
            found[f"prompts {end}"] = Noise(0.0, sign).apply(cost)
    ends = _innermost(cost).host_interval
    return found | {
        f"host {end}": _with_host(cost, host)
        for end, host in zip(("low", "high"), ends, strict=False)
    }


def _innermost(cost: CostModel) -> PiecewiseCost:
    """Give the piecewise cost within; one without a host where there is none."""
    while isinstance(cost, CostDecorator):
        cost = cost.inner
    return cost if isinstance(cost, PiecewiseCost) else PiecewiseCost([[1, 1.0]])


def _with_host(cost: CostModel, host: float) -> CostModel:
    if isinstance(cost, CostDecorator):
        return replace(cost, inner=_with_host(cost.inner, host))
    assert isinstance(cost, PiecewiseCost)
    return replace(cost, host=host)


def sensitivities(
    base: Mapping[str, float], changed: Mapping[str, Mapping[str, float]]
) -> list[Sensitivity]:
    """Put together what metrics are, and what they become under each change."""
    found = []
    for metric in METRICS:
        value = base.get(metric, 0.0)
        values = {name: one[metric] for name, one in changed.items() if metric in one}
        if value <= 0 or values.get(STEPS, 0.0) <= 0:
            continue
        elasticity = log(values.pop(STEPS) / value) / log(LONGER)
        moved = [one - value for one in values.values()]
        ends = (
            value - hypot(*(min(one, 0.0) for one in moved)),
            value + hypot(*(max(one, 0.0) for one in moved)),
        )
        found.append(Sensitivity(metric, value, elasticity, ends if moved else None))
    return found


def scenario_costs(scenario: Scenario) -> dict[str, CostModel]:
    """Give a scenario's cost model changed in each way.

    Raises HeadwayError of clusters whose groups may differ in cost.
    """
    if scenario.cluster is not None:
        names = [*scenario.cluster.replica_groups]
        if len(names) > 1:
            raise HeadwayError("--sensitivity: not for clusters of several groups")
        scenario = scenario.of_group(names[0])
    return changed_costs(assemble(scenario).cost)


def measure_sensitivity(
    scenario: Scenario,
    base: Mapping[str, float],
    costs: Mapping[str, CostModel],
    *,
    warmup: float = 0.0,
    cooldown: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Sensitivity]:
    """Run a scenario under each change, up to seven times, on all cores.

    `base` are the numbers of its own summary. Raises HeadwayError where a run fails.
    """
    found: dict[str, MetricValues] = {}
    with use_backend("loky", None):
        measure = partial(_measure, scenario, warmup, cooldown)
        for index, outcome in run_each(measure, [*costs.values()], None):
            if outcome.errors:
                raise HeadwayError(outcome.errors)
            found[[*costs][index]] = outcome.values
            if progress is not None:
                progress(len(found), len(costs))
    return sensitivities(base, found)


def _measure(scenario: Scenario, warmup: float, cooldown: float, cost: CostModel) -> MetricValues:
    """Run a scenario on a changed cost model, in a worker."""
    result = run_point(scenario, cost=cost)
    result.warmup, result.cooldown = warmup, cooldown
    return metric_values(result.summary())


def as_summary(found: list[Sensitivity]) -> dict[str, object]:
    """Give what `summary.json` has of it, by metric."""
    return {
        one.metric: {
            "elasticity": one.elasticity,
            "cliff": one.cliff,
            "interval_95": None if one.interval is None else [*one.interval],
        }
        for one in found
    }
