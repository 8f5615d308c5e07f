"""What a plan is asked: which bounds to keep, what to search and what to try beside it."""

import re
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal

from headway.planning.design import (
    Axes,
    DesignPoint,
    as_yaml,
    factors,
    load_point,
    load_points,
    need_known_values,
    need_runnable,
    refuse_overridden,
    split_values,
)
from headway.planning.measure import AS_IT_IS, Change
from headway.planning.pods import one_pod
from headway.planning.runs import MetricValues
from headway.planning.search import PlannedRun, Search, as_configured, fewest, largest_rate
from headway.planning.verdict import Criteria, Trial
from simulator.results.service_levels import FINISH, Slo, service_levels
from simulator.scenario.draw import make_workload
from simulator.scenario.load import Source, load_scenario, source_name
from simulator.scenario.planning_config import PlanConfig
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError, HeadwayWarning, MappingError

REPLICAS = "cluster.replicas"
BURST = 400  # requests for each replica, by which it is seen how many it can serve
FIRST_LOAD = 0.75  # of what it serves of a burst: where the search for a rate begins
WHOLE = 0.99  # of a period of the load, from which on it is whole
FEWEST_REQUESTS = 20  # of a run, however slowly they come


@dataclass(slots=True, frozen=True)
class PlanOptions:
    """What the user says; None where the scenario's block `plan` decides."""

    slo: Sequence[str] | None = None
    vary: Sequence[str] | None = None
    fewest: str | None = None
    cheapest: bool = False
    replications: int | None = None
    tolerance: float | None = None
    min_duration: float | None = None  # s
    max_duration: float | None = None  # s
    objective: Literal["cost", "energy"] | None = None
    window: float | None = None  # s


@dataclass(slots=True, frozen=True)
class PlanProblem:
    """What is to be found out about every candidate."""

    path: Source
    overrides: Sequence[str]
    seed: int
    criteria: Criteria
    key: str  # that the search sets; "" to run things as they are
    low: int = 0  # for a whole number: from here ...
    high: int = 0  # ... to here; 0: a rate
    axes: Axes = ()  # every combination is a candidate
    name: str = ""  # of the scenario
    change: Change = AS_IT_IS  # of the problem as it is given
    pods: int = 1  # of the fleet, of which one is simulated
    by_energy: bool = False  # the best is the one that draws least, not the cheapest

    @property
    def of_pods(self) -> list[str]:
        """What an answer says first, where the fleet has pods."""
        told = f"one of {self.pods} pods is simulated: rates, replicas and prices are a pod's"
        return [told] if self.pods > 1 else []

    @property
    def under(self) -> str:
        """The service levels, in words."""
        return f"under {', '.join(slo.text for slo in self.criteria.slos)}"

    @property
    def searches_rate(self) -> bool:
        """Whether the largest load is asked for."""
        return bool(self.key) and not self.high

    def search(
        self,
        scenario: Scenario,
        trials: list[Trial],
        within: tuple[int, int] | None = None,
        start: int | None = None,
    ) -> Search:
        """Begin the search for one candidate; what is tried goes into `trials`.

        Of a whole number it may be known `within` which bounds it lies, and where to begin.
        """
        criteria = self.criteria
        if not is_random(scenario):
            criteria = replace(criteria, replications=1, most_replications=1)
        if not self.is_steady(scenario):
            criteria = replace(criteria, min_seconds=None)
        if not self.key:
            return as_configured(criteria, trials)
        if self.key == REPLICAS and scales(scenario):  # it begins with what it is given
            within = (_replicas(scenario),) * 2
        if within is not None:
            return fewest(*within, criteria, trials, start)
        if not self.high:
            return self._largest_rate(scenario, criteria, trials)
        return self._fewest(scenario, criteria, trials)

    def _largest_rate(self, scenario: Scenario, criteria: Criteria, trials: list[Trial]) -> Search:
        """Search from a little below the rate at which a burst of requests is served."""
        start = rate_key(scenario)[1]
        if criteria.min_seconds is not None and _has_fixed_replicas(scenario):
            found = yield from _served_per_second(start, _replicas(scenario))
            start = FIRST_LOAD * found or start
        return (yield from largest_rate(start, criteria, trials))

    def _fewest(self, scenario: Scenario, criteria: Criteria, trials: list[Trial]) -> Search:
        """Search; replicas from as many as serve the load by what the fewest make of a burst."""
        start = None
        few = max(self.low, 1)
        generator = scenario.workload.generator
        rate = generator.request_rate
        if generator.diurnal is not None:
            rate *= generator.diurnal.peak
        known = scenario.workload.trace is None and rate < inf
        if known and _has_fixed_replicas(scenario) and self.key == REPLICAS:
            found = yield from _served_per_second(few, few)
            start = ceil(few * rate / (FIRST_LOAD * found)) if found else None
        return (yield from fewest(self.low, self.high, criteria, trials, start))

    def is_steady(self, scenario: Scenario) -> bool:
        """Say whether the load stays the same for as long as requests come, so that runs can grow.

        Not of a trace, of requests that come all at once, are to end by a time, or whose rate
        changes with time; nor where windows of the load are asked for as it is given.
        """
        generator = scenario.workload.generator
        asked = {self.key, *(key for key, _ in self.axes)}
        return (
            scenario.workload.trace is None
            and all(slo.name != FINISH for slo in self.criteria.slos)
            and self.criteria.window is None
            and generator.ramp_up_strategy is None
            and generator.diurnal is None
            and (self.key == "workload.request_rate" or generator.request_rate < inf)
            and "workload.num_prompts" not in asked
        )

    def settings(self, candidate: DesignPoint, wanted: PlannedRun) -> list[tuple[str, str]]:
        """Return the keys to set for one run."""
        assert candidate.scenario is not None
        keys = [*candidate.varied.items(), ("seed", str(self.seed + wanted.replication))]
        key = candidate.key or self.key
        searched = key == "workload.request_rate"
        if key and not (searched and wanted.burst):
            keys.append((key, str(int(wanted.at)) if self.high else repr(wanted.at)))
        count = wanted.burst
        if count:
            keys.append(("workload.request_rate", ".inf"))
        elif wanted.seconds is not None:
            rate = wanted.at if searched else candidate.scenario.workload.generator.request_rate
            rate *= self.change.load
            count = round(rate * wanted.seconds * _requests_per_arrival(candidate.scenario))
        if self.change.load != 1.0:
            generator = candidate.scenario.workload.generator
            if candidate.scenario.workload.trace is None and generator.request_rate == inf:
                count = count or round(generator.num_prompts * self.change.load)
            else:
                name, now = rate_key(candidate.scenario)
                keys.append((name, repr(now * self.change.load)))
        if count or wanted.seconds is not None:
            keys.append(("workload.num_prompts", str(max(count, FEWEST_REQUESTS))))
        return keys


def scales(scenario: Scenario | None) -> bool:
    """Say whether replicas come and go by need."""
    cluster = None if scenario is None else scenario.cluster
    return cluster is not None and bool(cluster.scalers)


def _has_fixed_replicas(scenario: Scenario) -> bool:
    """Say whether as many replicas serve at all times, and whatever comes."""
    cluster = scenario.cluster
    return cluster is None or not (
        cluster.scalers or cluster.admission or cluster.client or cluster.failures
    )


def _replicas(scenario: Scenario) -> int:
    cluster = scenario.cluster
    if cluster is None:
        return 1
    return sum(group.replicas for group in cluster.replica_groups.values())


def _served_per_second(
    at: float, replicas: int
) -> Generator[list[PlannedRun], list[MetricValues], float]:
    """Find the requests/s that replicas serve of a burst: a fluid estimate of what they can."""
    (run,) = yield [PlannedRun(at, burst=BURST * max(replicas, 1))]
    return float(run["request_throughput"])


def _requests_per_arrival(scenario: Scenario) -> float:
    """Return the mean number of turns of a session; 1 where requests come by themselves."""
    if scenario.workload.generator.sessions is None:
        return 1.0
    workload = make_workload(scenario)
    return len(workload) / (int(workload.sessions().max()) + 1)


def make_problem(
    path: Source, options: PlanOptions, overrides: Sequence[str] = (), seed: int | None = None
) -> PlanProblem:
    """State the problem that the options pose and the scenario's block `plan`."""
    axes = [split_values(item) for item in options.vary or ()]
    base = _first_that_loads(path, axes, overrides, seed)
    pods, said = 1, overrides
    if changed := one_pod(base):
        assert base.cluster is not None
        keys = [*(key for key, _ in axes), (options.fewest or "").partition("=")[0]]
        if wrong := [key for key in keys if key in ("cluster.pods", "cluster.router")]:
            raise HeadwayError(f"{wrong[0]}: a plan simulates one pod; vary cluster.pod_router")
        renamed = {"cluster.pod_router": "cluster.router"}
        axes = [(renamed.get(key, key), values) for key, values in axes]
        pods, overrides = base.cluster.pods or 1, [*overrides, *changed]
        base = _first_that_loads(path, axes, overrides, seed)
    numbers = ("min_duration", "max_duration", "replications", "tolerance", "window")
    given = {name: got for name in numbers if (got := getattr(options, name)) is not None}
    block = _with_options(base.plan, given)
    if options.vary is None:
        axes = [(key, [as_yaml(v) for v in values]) for key, values in block.vary.items()]
    given_by = "--slo" if options.slo else "plan.slo" if block.slo else "slo"
    slos = service_levels(base, options.slo or block.slo, given_by)
    if not slos:
        raise HeadwayError(f"{source_name(path)}: no service level; give --slo 'p99_ttft_ms<=1000'")
    criteria = Criteria(
        slos,
        block.replications,
        block.most_replications,
        block.confidence,
        block.tolerance,
        min_seconds=block.min_duration,
        min_e2els=block.min_e2els,
        max_seconds=block.max_duration,
        window=block.window,
    )
    key, low, high = "", 0, 0
    asked = options.fewest or next((f"{k}={v}" for k, v in block.fewest.items()), None)
    if options.fewest and options.cheapest:
        raise HeadwayError(
            "--cheapest: cannot be used with --fewest, which chooses the cheapest of --vary itself"
        )
    if asked is not None:
        firsts = {name: values[0] for name, values in axes}
        key, low, high = _range(asked, path, firsts, overrides, seed)
    elif not (options.cheapest or block.cheapest):
        key = rate_key(base)[0]
    _check_window(block.window, slos, at_a_load=bool(high) or not key)
    refuse_overridden([k for k, _ in axes], said, seed, searched=key)
    _check_price(base, axes)
    _warn_of_part_of_a_period(base)
    by_energy = (options.objective or block.objective) == "energy"
    what = path, overrides, base.seed, criteria, key, low, high, axes, base.name
    return PlanProblem(*what, by_energy=by_energy, pods=pods)


def _with_options(block: PlanConfig, given: Mapping[str, float]) -> PlanConfig:
    """Put options over the block `plan`; a longest or most that they exceed follows them."""
    most = {
        "max_duration": max(block.max_duration, given.get("min_duration", 0.0)),
        "most_replications": max(block.most_replications, given.get("replications", 0)),
    }
    try:
        return PlanConfig(**block.model_dump(exclude_unset=True) | most | {**given})
    except MappingError as error:
        raise HeadwayError(
            f"--{key.replace('_', '-')} {given[key]:g}: {what}"
            for (key,), what, _ in error.faults
            if key in given
        ) from None


def _first_that_loads(
    path: Source, axes: Axes, overrides: Sequence[str], seed: int | None
) -> Scenario:
    """Load the scenario as it is, else the first candidate: the model need not fit its GPU.

    Raises HeadwayError where none loads.
    """
    try:
        return load_scenario(path, overrides, seed)
    except HeadwayError:
        points = load_points(path, factors(axes), overrides, seed, DesignPoint)
        need_runnable(points)
        return next(point.scenario for point in points if point.scenario is not None)


def _check_price(base: Scenario, axes: Axes) -> None:
    """Refuse one GPU's price for several."""
    if base.gpu.dollars_per_hour is not None and any(name == "gpu.name" for name, _ in axes):
        raise HeadwayError(
            "gpu.dollars_per_hour: is of one GPU; where gpu.name is varied, vary both: --vary "
            "'gpu={name: H100, dollars_per_hour: 2.49},{name: L40S}'"
        )


def _warn_of_part_of_a_period(base: Scenario) -> None:
    """Warn where a load that changes with time ends within its first period."""
    load, curve = base.workload.generator, base.workload.generator.diurnal
    whole = load.request_rate * curve.period if curve else 0.0  # at least; sessions have turns
    if curve and base.workload.trace is None and load.num_prompts < WHOLE * whole:
        told = f"{load.num_prompts:,} of the {whole:,.0f} requests of {curve.period / 3600:.3g} h"
        warnings.warn(f"workload.num_prompts: {told}: no full period", HeadwayWarning, stacklevel=2)


def _check_window(window: float | None, slos: Sequence[Slo], *, at_a_load: bool) -> None:
    """Refuse a window, or an end, that has no meaning."""
    if ends := [slo.text for slo in slos if slo.name == FINISH and not at_a_load]:
        raise HeadwayError(
            f"--slo {ends[0]}: needs --fewest or --cheapest, at the scenario's own load: runs "
            "in search of a load are as long as the plan likes"
        )
    if window is None:
        return
    if not at_a_load:
        raise HeadwayError("--window: needs --fewest or --cheapest, at the scenario's own load")
    if whole := [slo.text for slo in slos if not (slo.of_requests or slo.name == FINISH)]:
        raise HeadwayError(
            f"--window: cannot be used with {', '.join(whole)}: it is of a whole run"
        )


def _range(
    text: str, path: Source, varied: dict[str, str], overrides: Sequence[str], seed: int | None
) -> tuple[str, int, int]:
    """Read `key=LOW..HIGH`; HeadwayError, too, where the scenario takes neither end for the key."""
    match = re.fullmatch(r"\s*([^=\s]+)\s*=\s*(\d+)\.\.(\d+)\s*", text)
    key, low, high = match.groups() if match else ("", "0", "0")
    if not int(low) <= int(high) or not int(high):
        raise HeadwayError(
            f"--fewest {text}: must be dotted.key=LOW..HIGH with 0 <= LOW <= HIGH and HIGH >= 1, "
            "as engine.max_num_seqs=1..256"
        )
    given = overrides, seed, DesignPoint
    points = [load_point(path, varied | {key: n}, *given, option="--fewest") for n in (low, high)]
    need_known_values(points)
    wrong = [t for point in points for t in point.errors if t.startswith(f"--fewest {key}=")]
    if wrong and all(point.errors for point in points):
        raise HeadwayError(wrong[0])
    return key, int(low), int(high)


def rate_key(scenario: Scenario) -> tuple[str, float]:
    """Find the key that says how fast requests come, and the rate to begin with."""
    if scenario.workload.trace is not None:
        return "workload.trace.rate_scale", scenario.workload.trace.rate_scale
    generator = scenario.workload.generator
    if generator.ramp_up_strategy is not None:
        raise HeadwayError(
            "workload.ramp_up_strategy: a plan searches the rate itself; give request_rate"
        )
    if generator.max_concurrency is not None:
        raise HeadwayError(
            "workload.max_concurrency: clients that wait for answers slow down with the server, so "
            "there is no largest rate; take it out, or vary it with --fewest or --cheapest"
        )
    rate = generator.request_rate
    return "workload.request_rate", rate if rate != inf else 1.0


def is_random(scenario: Scenario) -> bool:
    """Say whether another seed gives another run: a trace alone is replayed as recorded."""
    engine, cluster = scenario.engine, scenario.cluster
    if scenario.workload.trace is None or scenario.predictor or engine.speculative_config:
        return True
    if cluster is None:
        return False
    return (
        cluster.router_name in ("random", "power_of_two")
        or (cluster.failures is not None and cluster.failures.mtbf is not None)
        or (cluster.client is not None and cluster.client.jitter > 0)
        or any(own.engine.data_parallel_size > 1 for own in scenario.groups.values())
    )
