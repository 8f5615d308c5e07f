"""What a plan is asked: which bounds to keep, what to search and what to try beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from simulator.planning.design import Axes, as_yaml, refuse_overridden, split_values
from simulator.planning.search import (
    Criteria,
    PlannedRun,
    Search,
    as_configured,
    fewest,
    largest_rate,
)
from simulator.planning.service_levels import parse_slo
from simulator.scenario.load import load_scenario
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError


@dataclass(slots=True, frozen=True)
class PlanOptions:
    """What the user says; None where the scenario's block `plan` decides."""

    slo: Sequence[str] | None = None
    vary: Sequence[str] | None = None
    fewest: str | None = None
    cheapest: bool = False
    replications: int | None = None
    tolerance: float | None = None


@dataclass(slots=True, frozen=True)
class PlanProblem:
    """What is to be found out about every candidate."""

    path: Path
    overrides: Sequence[str]
    seed: int
    criteria: Criteria
    key: str  # that the search sets; "" to run things as they are
    low: int = 0  # for a whole number: from here ...
    high: int = 0  # ... to here; 0: a rate
    axes: Axes = ()  # every combination is a candidate
    name: str = ""  # of the scenario

    def search(self, scenario: Scenario) -> Search:
        """Begin the search for one candidate."""
        criteria = self.criteria
        if not is_random(scenario):
            criteria = replace(criteria, replications=1, most_replications=1)
        if not self.key:
            return as_configured(criteria)
        if self.high:
            return fewest(self.low, self.high, criteria)
        return largest_rate(rate_key(scenario)[1], criteria)

    def settings(self, varied: Mapping[str, str], wanted: PlannedRun) -> list[tuple[str, str]]:
        """Give the keys to set for one run."""
        at, replication = wanted
        keys = [*varied.items(), ("seed", str(self.seed + replication))]
        if self.key:
            keys.append((self.key, str(int(at)) if self.high else repr(at)))
        return keys


def make_problem(
    path: Path, options: PlanOptions, overrides: Sequence[str] = (), seed: int | None = None
) -> PlanProblem:
    """State the problem that the options pose and the scenario's block `plan`."""
    base = load_scenario(path, overrides, seed)
    block = base.plan
    if options.vary is not None:
        axes = [split_values(item) for item in options.vary]
    else:
        axes = [(key, [as_yaml(v) for v in values]) for key, values in block.vary.items()]
    texts = options.slo if options.slo is not None else block.slo
    bounded = any(base.goodput.model_dump().values())
    if not texts and not bounded:
        raise HeadwayError(f"{path}: no service level; give --slo 'p99_ttft_ms<=1000'")
    slos = [parse_slo(text) for text in texts or ["goodput>=0.99"]]
    if any(s.metric == "goodput" for s in slos) and not bounded:
        raise HeadwayError(f"{path}: --slo goodput: needs bounds in the scenario's `goodput`")
    if all(s.metric != "completion" for s in slos):
        slos.append(parse_slo("completion>=1"))
    count = block.replications if options.replications is None else options.replications
    if count < 1:
        raise HeadwayError(f"--replications {count}: must be at least 1")
    tolerance = block.tolerance if options.tolerance is None else options.tolerance
    if not 0 < tolerance <= 1:
        raise HeadwayError(f"--tolerance {tolerance}: must be more than 0 and at most 1")
    criteria = Criteria(
        slos, count, max(block.most_replications, count), block.confidence, tolerance
    )
    key, low, high = "", 0, 0
    asked = options.fewest or next((f"{k}={v}" for k, v in block.fewest.items()), None)
    if asked is not None:
        key, low, high = _range(asked)
    elif not (options.cheapest or block.cheapest):
        key = rate_key(base)[0]
    refuse_overridden([k for k, _ in axes], overrides, seed, searched=key)
    return PlanProblem(path, overrides, base.seed, criteria, key, low, high, axes, base.name)


def _range(text: str) -> tuple[str, int, int]:
    """Read `key=LOW..HIGH`."""
    key, _, values = text.partition("=")
    low, dots, high = values.partition("..")
    try:
        numbers = int(low), int(high)
    except ValueError:
        numbers = 0, 0
    if not key or not dots or not 0 <= numbers[0] <= numbers[1] or not numbers[1]:
        raise HeadwayError(
            f"--fewest {text}: must be dotted.key=LOW..HIGH with 0 <= LOW <= HIGH and HIGH >= 1"
        )
    return key.strip(), *numbers


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
    router = cluster.router if isinstance(cluster.router, str) else cluster.router["router"]
    return (
        router in ("random", "power_of_two")
        or (cluster.failures is not None and cluster.failures.mtbf is not None)
        or (cluster.client is not None and cluster.client.jitter > 0)
        or any(scenario.of_group(k).engine.data_parallel_size > 1 for k in cluster.replica_groups)
    )
