"""Which configuration is enough: the largest load it holds, the fewest replicas, the cheapest.

Every place is run several times under seeds that all configurations share (common random
numbers: the same arrivals and lengths), and told by the confidence interval over these runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.models.gpus import find_gpu
from simulator.planning.design import (
    DesignPoint,
    as_yaml,
    factors,
    load_point,
    load_points,
    need_runnable,
)
from simulator.planning.intervals import Estimate
from simulator.planning.journal import Journal, scenario_key
from simulator.planning.problem import PlanOptions, PlanProblem, make_problem
from simulator.planning.runs import MetricValues, Outcome, run_each
from simulator.planning.search import PlannedRun, Search, SearchResult, Trial, interval
from simulator.planning.service_levels import read_metric_values
from simulator.results.cluster_metrics import price_of_cluster
from simulator.scenario.load import load_scenario
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    import pandas as pd

LOWER_LOADS = (0.125, 0.25, 0.5, 0.75)
"""Shares of the largest load that are run, too, for the front of speed against throughput."""
JOURNAL = "runs.jsonl"
BATCH = 4  # candidates that Optuna names at a time

Progress = Callable[[int], None]
"""Called after every round of so many runs."""


@dataclass(slots=True)
class Candidate(DesignPoint):
    """One configuration, at the scenario's own load, and what was found out about it."""

    result: SearchResult = field(default_factory=lambda: SearchResult(None, []))
    lower_loads: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial:
        """Where it just holds; only of one that does."""
        assert self.result.best is not None
        return self.result.best

    def resources_at(self, trial: Trial) -> tuple[float, float | None]:
        """Give the GPUs that it takes and its dollars per hour; None where a GPU has no price.

        Where its replicas come and go, both are what its runs there had and paid on average.
        """
        assert self.scenario is not None
        gpus, price = resources(self.scenario)
        cluster = self.scenario.cluster
        if cluster is None or cluster.autoscaling is None:
            return gpus, price
        return (
            _per_hour(trial, "gpu_hours"),
            None if price is None else _per_hour(trial, "dollars"),
        )

    @property
    def resources(self) -> tuple[float, float | None]:
        """Give its GPUs and dollars per hour where it just holds."""
        return self.resources_at(self.best)

    def read(self, metric: str, confidence: float = 0.95) -> Estimate:
        """Give a metric where the configuration just holds."""
        return interval(self.best.runs, metric, confidence)

    def speeds(self) -> Iterator[tuple[Trial, float, float]]:
        """Give, for each load tried, tokens/s per user and tokens/s per GPU.

        Of a fleet whose size was searched for, only the place that was found.
        """
        tried = self.result.trials
        fleet = self.scenario is not None and self.scenario.cluster is not None
        if fleet and not self.lower_loads:
            tried = [trial for trial in tried if trial is self.result.best]
        for trial in [*tried, *self.lower_loads]:
            tpot = interval(trial.runs, "mean_tpot_ms").mean
            if tpot:
                tokens = interval(trial.runs, "output_throughput").mean
                yield trial, 1000.0 / tpot, tokens / self.resources_at(trial)[0]


def _per_hour(trial: Trial, paid: str) -> float:
    """Give what a place's runs paid for in an hour, on average."""
    return sum(3600.0 * run[paid] / run["duration"] for run in trial.runs) / len(trial.runs)


def resources(scenario: Scenario) -> tuple[int, float | None]:
    """Count a scenario's GPUs, and their dollars per hour; None where the price is unknown."""
    if scenario.cluster is None:
        count, price = scenario.gpu.count, find_gpu(scenario.gpu.name).dollars_per_hour
        return count, None if price is None else price * count
    kinds = scenario.cluster.replica_groups
    count = sum(kind.replicas * scenario.of_group(name).gpu.count for name, kind in kinds.items())
    return count, price_of_cluster(scenario)


def plan(
    scenario: str | Path,
    slo: Sequence[str] = (),
    vary: Mapping[str, Sequence[object]] | None = None,
    *,
    fewest: str | None = None,
    cheapest: bool = False,
    jobs: int | None = None,
) -> "pd.DataFrame":
    """Find what `headway plan` finds; return a row per candidate, the best first.

    Runs on joblib's active backend. HeadwayError where no candidate keeps the bounds.
    """
    import pandas as pd

    items = [f"{k}={','.join(as_yaml(v) for v in values)}" for k, values in (vary or {}).items()]
    options = PlanOptions([*slo] or None, items or None, fewest, cheapest)
    problem = make_problem(Path(scenario), options)
    candidates, best = find_best(problem, jobs=jobs)
    ordered = [best, *(c for c in candidates if c is not best)]
    return pd.DataFrame([result_row(problem, candidate) for candidate in ordered])


def find_best(
    problem: PlanProblem,
    optuna: int | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> tuple[list[Candidate], Candidate]:
    """Search for every candidate, or for `optuna` of them; return them answered, and the best.

    Runs that the journal has are not made again, and it gets those that are.
    Raises HeadwayError where none can be run, or none holds.
    """
    if optuna is None:
        design = factors(problem.axes)
        candidates = load_points(problem.path, design, problem.overrides, problem.seed, Candidate)
        need_runnable(candidates)
        search_all(problem, candidates, jobs, progress, journal)
    else:
        candidates = search_by_optuna(problem, optuna, jobs, progress, journal)
    best = choose_best(problem, candidates)
    if problem.key and not problem.high:
        run_lower_loads(problem, candidates, jobs, journal)
    return candidates, best


def search_all(
    problem: PlanProblem,
    candidates: Sequence[Candidate],
    jobs: int | None = None,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> None:
    """Search for every candidate, all at once; what is found is written into them."""
    active: list[tuple[Candidate, Search, list[PlannedRun]]] = []
    for candidate in candidates:
        if candidate.scenario is not None:
            search = problem.search(candidate.scenario)
            active.append((candidate, search, next(search)))
    while active:
        work = [(candidate, wanted) for candidate, _, runs in active for wanted in runs]
        outcomes = iter(_run_all(problem, work, jobs, journal))
        still = []
        for candidate, search, runs in active:
            results = [next(outcomes) for _ in runs]
            if failed := [outcome for outcome in results if outcome.errors]:
                candidate.errors = failed[0].errors
                continue
            try:
                still.append((candidate, search, search.send([one.values for one in results])))
            except StopIteration as end:
                candidate.result = end.value
                if problem.high and candidate.result.best is not None:
                    # GPUs and price may depend on what the search has found.
                    found = problem.settings(candidate.varied, (candidate.best.at, 0))
                    candidate.scenario = load_scenario(problem.path, problem.overrides, vary=found)
        active = still
        if progress is not None:
            progress(len(work))


def run_lower_loads(
    problem: PlanProblem,
    candidates: Sequence[Candidate],
    jobs: int | None = None,
    journal: Journal | None = None,
) -> None:
    """Run every candidate that holds at lower loads, too, once each."""
    places = [
        (candidate, share * candidate.best.at)
        for candidate in candidates
        if candidate.result.best is not None
        for share in LOWER_LOADS
    ]
    work = [(candidate, (at, 0)) for candidate, at in places]
    outcomes = _run_all(problem, work, jobs, journal)
    for (candidate, at), outcome in zip(places, outcomes, strict=True):
        if not outcome.errors:
            candidate.lower_loads.append(Trial(at, [outcome.values]))


def _run_all(
    problem: PlanProblem,
    work: Sequence[tuple[Candidate, PlannedRun]],
    jobs: int | None,
    journal: Journal | None,
) -> list[Outcome]:
    """Make the runs. What they warn of was told when the candidates were loaded."""
    tasks = [problem.settings(candidate.varied, wanted) for candidate, wanted in work]
    keys = [None if journal is None else _key(problem, task) for task in tasks]
    outcomes: dict[int, Outcome] = {}
    if journal is not None:
        known = {key: Outcome(row) for key, row in journal.known.items()}
        outcomes = {k: known[key] for k, key in enumerate(keys) if key in known}
    missing = [k for k in range(len(tasks)) if k not in outcomes]
    measured = run_each(partial(_measure, problem), [tasks[k] for k in missing], jobs)
    for index, outcome in measured:
        k = missing[index]
        outcomes[k] = outcome
        if journal is not None and (key := keys[k]) is not None and not outcome.errors:
            journal.append(key, outcome.values)
    return [outcomes[k] for k in range(len(tasks))]


def _key(problem: PlanProblem, settings: Sequence[tuple[str, str]]) -> str | None:
    """Tell whether two runs are the same, and measured alike; None of one that cannot be loaded."""
    try:
        scenario = load_scenario(problem.path, problem.overrides, vary=settings)
    except HeadwayError:
        return None
    asked = {slo.percentile for slo in problem.criteria.slos if slo.percentile is not None}
    return scenario_key(scenario, "plan", sorted(asked))


def _measure(problem: PlanProblem, settings: Sequence[tuple[str, str]]) -> MetricValues:
    """Make one run, in a worker."""
    result = run(load_scenario(problem.path, problem.overrides, vary=settings))
    return read_metric_values(result, problem.criteria.slos)


def choose_best(problem: PlanProblem, candidates: Sequence[Candidate]) -> Candidate:
    """Choose: at a fixed load the cheapest; else the most requests per dollar.

    Where a price is unknown, GPUs count in place of dollars. Raises HeadwayError, which names the
    candidate that comes closest, where none holds.
    """
    holding = [candidate for candidate in candidates if candidate.result.best is not None]
    if not holding:
        raise HeadwayError(_none_holds(problem, candidates))
    gpus, prices = zip(*(candidate.resources for candidate in holding), strict=True)
    weights: Sequence[float] = gpus if None in prices else prices

    def rank(k: int) -> tuple[float, float]:
        rate = holding[k].read("request_throughput").mean
        if problem.high or not problem.key:
            return weights[k], -rate
        return -rate / weights[k] if weights[k] else -rate, weights[k]

    return holding[min(range(len(holding)), key=rank)]


def _none_holds(problem: PlanProblem, candidates: Sequence[Candidate]) -> str:
    """Say so, and what comes closest."""
    slos = problem.criteria.slos
    tried = [(c, trial) for c in candidates for trial in c.result.trials if trial.runs]
    if not tried:
        return next(c.error for c in candidates if c.errors)
    closest, trial = min(tried, key=lambda pair: (pair[1].violation(slos), pair[1].at))
    got = ", ".join(f"{slo.metric} {interval(trial.runs, slo.metric).mean:.4g}" for slo in slos)
    wanted = " and ".join(slo.text for slo in slos)
    place = f" at {problem.key}={trial.at:g}" if problem.key else ""
    return f"no configuration meets {wanted}; the closest is {closest.label}{place}: {got}"


def search_by_optuna(
    problem: PlanProblem,
    trials: int,
    jobs: int | None = None,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> list[Candidate]:
    """Search among the combinations by Optuna's TPE; return those it tried, answered.

    The batches are of one size whatever `jobs` says, so the same seed tries the same ones.
    """
    try:
        import optuna
    except ImportError:
        raise HeadwayError("--optuna: needs optuna; pip install headway[optuna]") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=problem.seed % 2**32, constant_liar=True),
    )
    tried: dict[tuple[str, ...], Candidate] = {}
    for begin in range(0, trials, BATCH):
        asked = [study.ask() for _ in range(min(BATCH, trials - begin))]
        chosen = [
            tuple(trial.suggest_categorical(key, list(values)) for key, values in problem.axes)
            for trial in asked
        ]
        fresh = []
        for values in chosen:
            if values not in tried:
                varied = {key: v for (key, _), v in zip(problem.axes, values, strict=True)}
                candidate = load_point(
                    problem.path, varied, problem.overrides, problem.seed, Candidate
                )
                tried[values] = candidate
                fresh.append(candidate)
        search_all(problem, fresh, jobs, progress, journal)
        for trial, values in zip(asked, chosen, strict=True):
            study.tell(trial, _objective(tried[values], problem))
    return list(tried.values())


def _objective(candidate: Candidate, problem: PlanProblem) -> float:
    """Rate a candidate for Optuna: more is better, and less than nothing where it does not hold."""
    if candidate.result.best is None:
        violations = [trial.violation(problem.criteria.slos) for trial in candidate.result.trials]
        return -1e6 - min(violations, default=1e6)
    gpus, price = candidate.resources
    weight = price or gpus
    if problem.high or not problem.key:
        return -weight
    return candidate.read("request_throughput").mean / weight


def result_row(problem: PlanProblem, candidate: Candidate) -> dict[str, Any]:
    """Tell one candidate's answer: where it just holds, and what it does there."""
    row: dict[str, Any] = {**candidate.varied, "holds": candidate.result.best is not None}
    row |= {"at": None, "surely_holds": None, "surely_fails": None}
    row["error"] = candidate.error or None
    if candidate.result.best is None:
        return row
    surely, surely_not = candidate.result.between
    row |= {"at": candidate.best.at, "surely_holds": surely, "surely_fails": surely_not}
    row["replications"] = len(candidate.best.runs)
    metrics = dict.fromkeys([slo.metric for slo in problem.criteria.slos])
    for metric in (*metrics, "request_throughput", "output_throughput"):
        found = candidate.read(metric, problem.criteria.confidence)
        row[metric] = found.mean
        row[f"{metric}_half_width"] = found.half_width if found.count > 1 else None
    tokens = row["output_throughput"]
    gpus, price = candidate.resources
    tpot = candidate.read("mean_tpot_ms").mean
    row["gpus"] = gpus
    row["tokens_per_s_per_gpu"] = tokens / gpus
    row["tokens_per_s_per_user"] = 1000.0 / tpot if tpot else None
    row["dollars_per_hour"] = price
    row["dollars_per_million_output_tokens"] = (
        price / 3600.0 / tokens * 1e6 if price is not None and tokens else None
    )
    return row
