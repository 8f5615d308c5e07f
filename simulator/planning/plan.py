"""Which configuration is enough: the largest load it holds, the fewest replicas, the cheapest.

Every place is run several times under seeds that all configurations share (common random
numbers: the same arrivals and lengths), and told by the confidence interval over these runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.models.gpus import find_gpu
from simulator.planning.intervals import Estimate, Numbers
from simulator.planning.search import Answer, Rules, Search, Trial, Wish, interval
from simulator.results.cluster_metrics import price_of_cluster
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError
from simulator.util.workers import Died, each

if TYPE_CHECKING:
    from simulator.scenario.scenario import Scenario

LADDER = (0.125, 0.25, 0.5, 0.75)
"""Shares of the largest load that are run, too, for the front of speed against throughput."""


@dataclass(slots=True)
class Candidate:
    """One configuration and what was found out about it."""

    varied: dict[str, str]  # value by dotted key, as YAML
    scenario: "Scenario | None" = None  # at the scenario's own load
    error: str = ""  # why it cannot be run
    answer: Answer = field(default_factory=lambda: Answer(None, []))
    ladder: list[Trial] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Name it by what it varies."""
        return " ".join(f"{k}={v}" for k, v in self.varied.items()) or "the scenario"

    @property
    def scales(self) -> bool:
        """Whether its replicas come and go, so that what it takes is known by its runs alone."""
        cluster = None if self.scenario is None else self.scenario.cluster
        return cluster is not None and cluster.autoscaling is not None

    def gpus_at(self, trial: Trial) -> float:
        """Count the GPUs that it takes; where it scales, on average over its runs there."""
        assert self.scenario is not None
        return _in_an_hour(trial, "gpu_hours") if self.scales else gpus_of(self.scenario)

    @property
    def gpus(self) -> float:
        """GPUs that it takes where it just holds."""
        assert self.answer.best is not None
        return self.gpus_at(self.answer.best)

    def dollars_at(self, trial: Trial) -> float | None:
        """Give its price per hour, of one that scales what its runs there paid; None: unknown."""
        assert self.scenario is not None
        price = price_of(self.scenario)
        return _in_an_hour(trial, "dollars") if self.scales and price is not None else price

    @property
    def dollars_per_hour(self) -> float | None:
        """Give its price where it just holds, None where a GPU has none."""
        assert self.answer.best is not None
        return self.dollars_at(self.answer.best)

    def read(self, metric: str, confidence: float = 0.95) -> Estimate:
        """Give a metric where the configuration just holds."""
        assert self.answer.best is not None
        return interval(self.answer.best.runs, metric, confidence)


@dataclass(slots=True, frozen=True)
class Question:
    """What is to be found out about every candidate."""

    path: Path
    overrides: Sequence[str]
    seed: int
    rules: Rules
    key: str  # that the search sets; "" to run things as they are
    low: int = 0  # for a whole number: from here ...
    high: int = 0  # ... to here; 0: a rate

    def search(self, scenario: "Scenario") -> Search:
        """Begin the search for one candidate."""
        from simulator.planning.search import fewest, holds, largest_rate

        rules = self.rules
        if not has_chance(scenario):
            rules = replace(rules, replications=1, most_replications=1)
        if not self.key:
            return holds(rules)
        if self.high:
            return fewest(self.low, self.high, rules)
        return largest_rate(rate_key(scenario)[1], rules)

    def settings(self, varied: Mapping[str, str], wish: Wish) -> list[tuple[str, str]]:
        """Give the keys to set for one run."""
        at, replication = wish
        keys = [*varied.items(), ("seed", str(self.seed + replication))]
        if self.key:
            keys.append((self.key, str(int(at)) if self.high else repr(at)))
        return keys


def _in_an_hour(trial: Trial, paid: str) -> float:
    """Give what a place's runs paid for in an hour, on average."""
    return sum(3600.0 * run[paid] / run["duration"] for run in trial.runs) / len(trial.runs)


def rate_key(scenario: "Scenario") -> tuple[str, float]:
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
    return "workload.request_rate", (
        generator.request_rate if generator.request_rate != inf else 1.0
    )


def has_chance(scenario: "Scenario") -> bool:
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
        or any(scenario.of_group(k).engine.data_parallel_size > 1 for k in cluster.kinds)
    )


def gpus_of(scenario: "Scenario") -> int:
    """Count the GPUs of a scenario, in all replicas."""
    if scenario.cluster is None:
        return scenario.gpu.count
    kinds = scenario.cluster.kinds
    return sum(kind.replicas * scenario.of_group(name).gpu.count for name, kind in kinds.items())


def price_of(scenario: "Scenario") -> float | None:
    """Give the dollars per hour of a scenario's GPUs; None where the price of one is unknown."""
    if scenario.cluster is not None:
        return price_of_cluster(scenario)
    price = find_gpu(scenario.gpu.name).dollars_per_hour
    return None if price is None else price * scenario.gpu.count


def load_candidate(
    path: Path, overrides: Sequence[str], seed: int | None, varied: dict[str, str]
) -> Candidate:
    """Load one combination, whatever is wrong with it."""
    try:
        return Candidate(varied, load_scenario(path, overrides, seed, vary=varied.items()))
    except HeadwayError as error:
        return Candidate(varied, None, "; ".join(error.messages))


def find_candidates(
    path: Path,
    axes: Iterable[tuple[str, Sequence[str]]],
    overrides: Sequence[str],
    seed: int | None,
) -> list[Candidate]:
    """Load every combination of the varied keys; HeadwayError if none can be loaded."""
    pairs = [[(key, value) for value in values] for key, values in axes]
    found = [load_candidate(path, overrides, seed, dict(chosen)) for chosen in product(*pairs)]
    if all(candidate.scenario is None for candidate in found):
        raise HeadwayError(dict.fromkeys(candidate.error for candidate in found))
    return found


def answer(
    question: Question,
    candidates: Sequence[Candidate],
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Search for every candidate, all at once; what is found is written into them.

    `progress(runs)` is called after every round of so many runs.
    """
    active: list[tuple[Candidate, Search, list[Wish]]] = []
    for candidate in candidates:
        if candidate.scenario is None:
            continue
        search = question.search(candidate.scenario)
        active.append((candidate, search, next(search)))
    while active:
        work = [(c, wish) for c, _, wishes in active for wish in wishes]
        results = _run_all(question, work, jobs)
        still = []
        for candidate, search, wishes in active:
            own = [results.pop(0) for _ in wishes]
            if (error := next((run for run in own if isinstance(run, str)), None)) is not None:
                candidate.error = error
                continue
            try:
                wanted = search.send([run for run in own if not isinstance(run, str)])
                still.append((candidate, search, wanted))
            except StopIteration as end:
                candidate.answer = end.value
                _settle(question, candidate)
        active = still
        if progress is not None:
            progress(len(work))


def _settle(question: Question, candidate: Candidate) -> None:
    """Let a candidate be what the search has found: GPUs and price may depend on it."""
    if question.high and candidate.answer.best is not None:
        found = question.settings(candidate.varied, (candidate.answer.best.at, 0))
        candidate.scenario = load_scenario(question.path, question.overrides, vary=found)


def climb(question: Question, candidates: Sequence[Candidate], jobs: int | None = None) -> None:
    """Run every candidate that holds at lower loads, too, once each."""
    places = [
        (candidate, share * candidate.answer.best.at)
        for candidate in candidates
        if candidate.answer.best is not None
        for share in LADDER
    ]
    results = _run_all(question, [(candidate, (at, 0)) for candidate, at in places], jobs)
    for (candidate, at), run in zip(places, results, strict=True):
        if not isinstance(run, str):
            candidate.ladder.append(Trial(at, [run]))


def _run_all(
    question: Question, work: Sequence[tuple[Candidate, Wish]], jobs: int | None
) -> list[Numbers | str]:
    """Make the runs; give each one's numbers, or what is wrong with it."""
    tasks = [
        (
            question.path,
            tuple(question.overrides),
            question.settings(c.varied, wish),
            question.rules,
        )
        for c, wish in work
    ]
    results: list[Numbers | str] = [""] * len(tasks)
    for index, outcome in each(_run, tasks, jobs):
        results[index] = outcome.reason if isinstance(outcome, Died) else outcome
    return results


def _run(task: tuple[Path, Sequence[str], list[tuple[str, str]], Rules]) -> Numbers | str:
    """Make one run, in a worker."""
    import warnings

    from simulator.planning.service_levels import read_numbers
    from simulator.simulation.run import run
    from simulator.util.errors import HeadwayWarning

    path, overrides, settings, rules = task
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadwayWarning)  # told when the candidates were loaded
        try:
            result = run(load_scenario(path, overrides, vary=settings))
            return read_numbers(result, rules.slos)
        except HeadwayError as error:
            return "; ".join(error.messages)
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"


def best_of(question: Question, candidates: Sequence[Candidate]) -> Candidate:
    """Choose: at a fixed load the cheapest; else the most requests per dollar.

    Where a price is unknown, GPUs count in place of dollars. Raises HeadwayError, which names the
    candidate that comes closest, where none holds.
    """
    holding = [candidate for candidate in candidates if candidate.answer.best is not None]
    if not holding:
        raise HeadwayError(_nobody(question, candidates))
    prices = [candidate.dollars_per_hour for candidate in holding]
    weights = [float(c.gpus) for c in holding] if None in prices else [p or 0.0 for p in prices]

    def rank(k: int) -> tuple[float, float]:
        candidate = holding[k]
        rate = candidate.read("request_throughput").mean
        if question.high or not question.key:
            return weights[k], -rate
        return -rate / weights[k] if weights[k] else -rate, weights[k]

    return holding[min(range(len(holding)), key=rank)]


def _nobody(question: Question, candidates: Sequence[Candidate]) -> str:
    slos = question.rules.slos
    tried = [(c, trial) for c in candidates for trial in c.answer.trials if trial.runs]
    if not tried:
        return next(c.error for c in candidates if c.error)
    closest, trial = min(tried, key=lambda pair: (pair[1].miss(slos), pair[1].at))
    got = ", ".join(f"{slo.metric} {interval(trial.runs, slo.metric).mean:.4g}" for slo in slos)
    wanted = " and ".join(slo.text for slo in slos)
    place = f" at {question.key}={trial.at:g}" if question.key else ""
    return f"no configuration meets {wanted}; the closest is {closest.label}{place}: {got}"


def speeds(candidate: Candidate) -> Iterator[tuple[Trial, float, float]]:
    """Give, for each load tried, tokens/s per user and tokens/s per GPU.

    Of a fleet whose size was searched for, only the place that was found.
    """
    best, tried = candidate.answer.best, candidate.answer.trials
    fleet = candidate.scenario is not None and candidate.scenario.cluster is not None
    if fleet and not candidate.ladder:
        tried = [trial for trial in tried if trial is best]
    for trial in [*tried, *candidate.ladder]:
        tpot = interval(trial.runs, "mean_tpot_ms").mean
        if tpot:
            tokens = interval(trial.runs, "output_throughput").mean
            yield trial, 1000.0 / tpot, tokens / candidate.gpus_at(trial)
