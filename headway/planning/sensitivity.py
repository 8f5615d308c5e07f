"""How far a result moves with its cost model: for 1 % of step time, and as far as that is unsure.

A run in which every step takes 1 % longer gives the elasticity of a metric, d ln metric / d ln step
time: 1 where nobody waits, far more near saturation, where a small error of the cost model is a
large one of the result.

The interval, 95 %, is that of what a prediction does not know, cause by cause, each taken to both
ends of its own: the profile's `residuals`, a factor of all decode steps and one of those with
prompts (`costs/noise.py`), named after the GPU where nobody measured kernels there; the host's
work; whether clients ask for top-p or top-k, where they are only taken to do so; the KV cache's
size, where it is computed and not told; which requests come, where they are drawn. Each of these is
a simulation. What clients add to a TTFT, and the rest that
no cause explains, come on top; each is as wide as its regime asks (open load or closed loop, flags
told or not, experts or none) in half of the measured sets, and was judged by the other half
(docs/accuracy.md). What the causes move a metric by is added in squares, up and
down each by itself, as of causes that do not depend on one another; a cause's share is that of its
squares.

An elasticity has an interval of its own, that of chance: a request meets another moment of the step
under way in steps that are 1 % longer, and waits more or less for its end. Where that is all there
is to wait for, means of TTFT move by it as much as by the steps. The interval is that of the
differences request by request, by means of successive batches of them. How far other requests
would move the metric is no part of it.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import hypot, log, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.planning.runs import MetricValues, metric_values, run_all, run_point
from simulator.build.engine_spec import EngineSpec
from simulator.build.settle_cost import version_overhead
from simulator.core.engine_config import AUTO, UNIFORM
from simulator.costs.cost_model import CostModel
from simulator.costs.noise import QUANTILE, Noise, ScaledCost
from simulator.costs.overhead import samples_truncated
from simulator.costs.profile import EXPERT_KERNELS, FINE_EXPERTS, POWER_LAWS
from simulator.costs.roofline import OVER_PCIE
from simulator.results.metrics import summarize_record
from simulator.results.steady_state import measurement_window
from simulator.scenario.resolve import engine_specs, resolve
from simulator.scenario.scenario import Scenario
from simulator.simulation.result import Result
from simulator.util.errors import HeadwayError

LONGER = 1.01  # times as long as it should be is each step of the run that tells the elasticity
BATCHES = 20  # of requests, the means of which say what is chance
CLIFF = 5.0  # an elasticity above it is worth a warning
METRICS = ("mean_e2el_ms", "mean_ttft_ms", "mean_tpot_ms", "p99_ttft_ms")
MEANS = METRICS[:3]  # that batches of requests have
HOST = 0.1e-3  # s a step by which the waits of a host that nobody gave an interval may be off
LESS_CACHE = 0.85  # of the KV cache that is computed, where a server's log does not tell it
CLIENT = (4.0, 4.0)  # ms that clients may take off a TTFT, and add to it
IN_MEAN = 0.3
"""Of a profile's residuals, which are those of single steps, what is left in the mean of a run."""
REST = {
    "mean_e2el_ms": (0.03, 0.03),
    "mean_ttft_ms": (0.03, 0.05),
    "mean_tpot_ms": (0.024, 0.024),
    "p50_ttft_ms": (0.08, 0.06),
    "p99_ttft_ms": (0.05, 0.33),  # servers that are cold at first have long tails
    "p99_tpot_ms": (0.05, 0.1),
    "p99_e2el_ms": (0.05, 0.12),
}
"""By what share of the metric it may be less, and more, for what no cause explains."""
EXPERTS = dict(zip(METRICS, ((0.06, 0.06), (0.06, 0.25), (0.06, 0.06), (0.06, 0.7)), strict=True))
"""The same besides where tokens choose experts: nobody knows which, and kernels differ."""
OF_MANY = EXPERTS | dict.fromkeys(("mean_e2el_ms", "mean_tpot_ms"), (0.21, 0.47))
"""And where there are many: gpt-oss-120b's decodes take 0.8 times, Qwen3-30B-A3B's 1.3 to 1.47."""
STEADY, FIRST = (0.03, 0.03), (0.11, 0.155)
DRAWN = dict(zip(METRICS, (STEADY, FIRST, STEADY, FIRST), strict=True))
"""The same in a closed loop whose requests nobody recorded: prompts meet in waves."""
UNTOLD = {"mean_ttft_ms": (0.31, 0.31), "p99_ttft_ms": (0.31, 0.31)}
"""And where nobody told the engine's budget of tokens for a step, either."""
ALIKE = {"mean_ttft_ms": (0.4, 0.79), "p99_ttft_ms": (0.4, 0.79)}
"""And where nobody told how equal answers are. Equal ones keep clients in step, and prompts meet (a
blind set: 1.79 times the TTFT predicted); answers that end by themselves spread them (0.6)."""
LINKS = dict(zip(METRICS, ((0.0, 1.0), (0.0, 9.5), (0.0, 0.4), (0.0, 9.5)), strict=True))
"""And where nobody measured sums over PCIe: two RTX 4090 took 9 to 10 times the TTFT predicted."""
# ms that a first request may wait for an engine that no other has warmed, by its GPUs: six recorded
# runs' on one took 237, 175, 81, 62, 1 and -57 longer than predicted, and the first 32 of 64
# clients 104 to 130. Twins, runs of the same prompts, clients and GPUs, on two to eight B200 differ
# as if first requests waited for up to 350 more.
COLD = {1: 240.0, 2: 590.0}
CAUSES = {"decode": "profile", "prompts": "profile", "KV": "KV cache"}
"""What the changes are called in a report, by their first word; the others by this itself."""
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
    shares: Mapping[str, float] = field(default_factory=dict)
    """Of the interval, by cause, the largest first; they sum to 1."""

    @property
    def elasticity_95(self) -> tuple[float, float] | None:
        """Where the elasticity lies with 95 %."""
        if self.chance is None:
            return None
        return self.elasticity - self.chance, self.elasticity + self.chance

    @property
    def resolved(self) -> bool:
        """Whether the elasticity is told from chance; a percentile's is not."""
        return self.metric in MEANS and (self.chance is None or abs(self.elasticity) > self.chance)

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
    of, reach = "", QUANTILE * IN_MEAN
    if cost.unmeasured.startswith("kernels of"):
        of, reach = "GPU ", QUANTILE
    for end, sign in (("low", -reach), ("high", reach)):
        if sd.get("decode"):
            found[f"{of}decode {end}"] = Noise(sign, 0.0).apply(cost)
        if sd.get("prompts"):
            found[f"{of}prompts {end}"] = Noise(0.0, sign).apply(cost)
    ends = cost.host_work.interval if cost.host_work else ()
    for end, host in zip(("low", "high"), ends, strict=False):
        found[f"host {end}"] = cost.with_host(host=host)
    if sd and (work := cost.host_work) is not None:
        for end, seconds in zip(("low", "high"), work.gap_interval, strict=False):
            longer = seconds - (work.launch_gap or 0.0)
            found[f"host gap {end}"] = cost.with_waits(longer, 0.0)
        for end, seconds in zip(("low", "high"), work.stream_interval, strict=False):
            found[f"host stream {end}"] = cost.with_host(stream_per_sequence=seconds)
    if sd and not ends:
        for end, more in (("low", -HOST), ("high", HOST)):
            found[f"host {end}"] = cost.with_waits(more, 0.0)
    return found


def greedy_cost(spec: EngineSpec) -> dict[str, CostModel]:
    """Return the cost without top-p and top-k, where nobody told that requests ask for it."""
    engine, gpu = spec.engine, spec.gpu
    terms = version_overhead(engine, gpu)
    sampled = samples_truncated(spec.model, engine.generation_config)
    if not spec.cost.residuals or not sampled or not terms.sampling:
        return {}
    each = spec.model.vocab_size * terms.logit_seconds(gpu)
    return {"sampling low": spec.cost.with_waits(-terms.sampling, -each)}


def other_experts(scenario: Scenario) -> dict[str, CostModel]:
    """Return the cost with experts as they may be, where nobody told: routed otherwise.

    And with each kernel that the profile has times of.
    """
    engine, spec = scenario.engine, resolve(scenario)
    name = spec.cost.name.partition(" ")[0]
    told = engine.expert_routing != AUTO or scenario.cost or name == "roofline"
    if told or not spec.model.num_experts:
        return {}
    changes: dict[str, dict[str, Any]] = {
        routing: {"engine": engine.model_copy(update={"expert_routing": routing})}
        for routing in (UNIFORM, POWER_LAWS[-1])
    } | {kernel: {"cost": {"profile": name, "experts": kernel}} for kernel in EXPERT_KERNELS}
    found = {}
    for word, change in changes.items():
        with suppress(HeadwayError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[f"experts {word}"] = resolve(scenario.model_copy(update=change)).cost
    return found


def sensitivities(
    base: Mapping[str, Any],
    changed: Mapping[str, Mapping[str, Any]],
    more: Mapping[str, Mapping[str, tuple[float, float]]] | None = None,
    metrics: Sequence[str] = METRICS,
) -> list[Sensitivity]:
    """Put together what metrics are, and what they become under each change.

    Each has `metrics` and, under BATCH_MEANS, their means over batches of requests. `more` has, by
    cause and metric, by how much they may be less, and more, besides, ms.
    """
    found = []
    for metric in metrics:
        value = base.get(metric, 0.0)
        values = {name: one[metric] for name, one in changed.items() if metric in one}
        if value <= 0 or values.get(STEPS, 0.0) <= 0:
            continue
        longer = values.pop(STEPS)
        elasticity = log(longer / value) / log(LONGER)
        causes: dict[str, list[float]] = {}
        for name, one in values.items():
            word = name.split()[0]
            causes.setdefault(CAUSES.get(word, word), []).append(one - value)
        for name, off in (more or {}).items():
            if metric in off:
                less, greater = off[metric]
                causes.setdefault(name, []).extend((-less, greater))
        interval, shares = _combine(value, causes)
        chance = _chance(*(one.get(BATCH_MEANS, {}).get(metric) for one in (base, changed[STEPS])))
        chance = None if chance is None else chance / (longer * log(LONGER))
        found.append(Sensitivity(metric, value, elasticity, interval, chance=chance, shares=shares))
    return found


def _combine(
    value: float, causes: Mapping[str, Sequence[float]]
) -> tuple[tuple[float, float] | None, dict[str, float]]:
    """Add what each cause moves a metric by in squares; return the interval and their shares."""
    if not causes:
        return None, {}
    down, up = (
        {name: hypot(*(pick(one, 0.0) for one in moved)) for name, moved in causes.items()}
        for pick in (min, max)
    )
    squares = {name: down[name] ** 2 + up[name] ** 2 for name in causes}
    whole = sum(squares.values())
    largest = sorted(squares.items(), key=lambda pair: -pair[1])
    shares = {name: square / whole for name, square in largest if square} if whole else {}
    return (max(value - hypot(*down.values()), 0.0), value + hypot(*up.values())), shares


def unexplained(
    base: Mapping[str, Any],
    spec: EngineSpec,
    metrics: Sequence[str] = METRICS,
    *,
    drawn: bool,
    told: bool = True,
    alike: bool = False,
    first: float = 0.0,
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return how far client effects and unknown causes may move each metric down and up, ms.

    `drawn` says that it is a closed loop whose requests are not recorded, `told` that the engine's
    flags are, `alike` that answers may be equal or not; `first` is the share of requests that come
    at once to an engine that may be cold.
    """
    timed = {metric: base[metric] for metric in metrics if metric in base}
    whole = [one for one in timed if _as_wide(one) != "mean_tpot_ms"]
    found = {"client": dict.fromkeys(whole, CLIENT)}
    cold = max(ms for gpus, ms in COLD.items() if gpus <= spec.engine.tensor_parallel_size)
    found["cold engine"] = {one: (0.0, cold * _late(one, first)) for one in whole if first}
    experts = spec.model.num_experts
    off = OF_MANY if experts >= FINE_EXPERTS else EXPERTS
    shares = {"rest": REST} | ({"experts": off} if experts else {})
    shares |= {"links": LINKS} if OVER_PCIE in spec.cost.unmeasured else {}
    if drawn:
        shares |= {"requests": DRAWN | (ALIKE if alike else {})}
        shares |= {} if told else {"flags": UNTOLD}
    for cause, share in shares.items():
        widths = {one: share.get(one) or share.get(_as_wide(one)) for one in timed}
        found[cause] = {
            one: (width[0] * timed[one], width[1] * timed[one])
            for one, width in widths.items()
            if width
        }
    return found


def _as_wide(metric: str) -> str:
    """Return which of METRICS has the widths of a latency: TTFT's tail, else the latency's mean."""
    statistic, latency, _ = metric.split("_")
    if latency == "ttft" and statistic in ("p90", "p99"):
        return "p99_ttft_ms"
    return f"mean_{'tpot' if latency == 'itl' else latency}_ms"


def _late(metric: str, first: float) -> float:
    """Return by what part a share of first requests that come late moves a metric."""
    statistic = metric.partition("_")[0]
    return first if statistic == "mean" else float(100 * first >= 100 - int(statistic[1:]))


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
    columns = {f"mean_{one}_ms": 1e3 * getattr(table, one) for one in ("e2el", "ttft", "tpot")}
    return metric_values(summarize_record(result)) | {BATCH_MEANS: batch_means(columns, counted)}


Change = tuple[Scenario, CostModel]


def changed_runs(scenario: Scenario) -> dict[str, Change]:
    """Return a scenario and its cost model changed in each way.

    Raises HeadwayError of clusters whose groups may differ in cost.
    """
    spec, *others = engine_specs(scenario).values()
    if others:
        raise HeadwayError("--sensitivity: not for clusters of several groups")
    costs = changed_costs(spec.cost) | greedy_cost(spec)
    if spec.cost.residuals:
        costs |= other_experts(scenario)
    found: dict[str, Change] = {name: (scenario, cost) for name, cost in costs.items()}
    if not spec.cost.residuals:
        return found
    if spec.engine.num_gpu_blocks_override is None:
        blocks = {"num_gpu_blocks_override": max(int(LESS_CACHE * spec.num_gpu_blocks), 1)}
        engine = scenario.engine.model_copy(update=blocks)
        found["KV low"] = scenario.model_copy(update={"engine": engine}), spec.cost
    if scenario.workload.trace is None:
        other = scenario.model_copy(update={"seed": scenario.seed + 1})
        found["requests drawn"] = other, spec.cost
    return found


def measure_sensitivity(
    result: Result,
    changes: Mapping[str, Change],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Sensitivity]:
    """Run a result's scenario under each change, up to ten times, on all cores.

    What nobody knows is no part of costs that a scenario gives without residuals: of no server.
    Raises HeadwayError where a run fails.
    """
    measure = partial(_measure, result.warmup, result.cooldown)
    outcomes = run_all(measure, [*changes.values()], None, progress, must=True)
    found = {name: one.values for name, one in zip(changes, outcomes, strict=True)}
    base, load = latencies(result), result.scenario.workload
    drawn = load.trace is None and load.max_concurrency is not None
    more = unexplained(base, result.spec, drawn=drawn) if result.spec.cost.residuals else None
    return sensitivities(base, found, more)


def _measure(warmup: float, cooldown: float, change: Change) -> MetricValues:
    """Run a changed scenario on a changed cost model, in a worker."""
    scenario, cost = change
    result = run_point(scenario, cost=cost).whole()
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
            "shares": dict(one.shares),
        }
        for one in found
    }
