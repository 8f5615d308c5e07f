"""Which configuration is enough: the largest load it holds, the fewest replicas, the cheapest.

Every place is run several times under seeds that all configurations share (common random
numbers: the same arrivals and lengths), and told by the confidence interval over these runs.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import process_time
from typing import Protocol

from headway.planning.alone import broken_alone
from headway.planning.candidate import Candidate, PlanAnswer, by_seats, resources
from headway.planning.design import (
    factors,
    fold_errors,
    load_point,
    load_points,
    need_known_values,
    need_runnable,
)
from headway.planning.journal import Journal, scenario_key
from headway.planning.measure import AS_IT_IS, measure_run
from headway.planning.problem import REPLICAS, PlanProblem, scales
from headway.planning.runs import MetricValues, Outcome, requests_of, run_each
from headway.planning.search import PlannedRun, Search
from headway.planning.verdict import Trial
from simulator.diagnosis.feasibility import never_holds
from simulator.models.gpus import find_gpu
from simulator.results.service_levels import Slo, default_levels, need_parts, short
from simulator.results.steady_state import overload
from simulator.scenario.load import load_scenario
from simulator.scenario.scenario import Scenario
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError, HeadwayWarning, NoAnswerError

JOURNAL = "runs.jsonl"
AUTOSCALING = "cluster.autoscaling"
TARGETS = {"queue_depth": [0.5, 0.1], "slo_attainment": [0.995]}
LOWER = (2, 4, 8)
"""What an autoscaler is tried with that comes too late, and by what its own target, or the KV usage
that it let come, is divided."""
HEADROOM_TOLERANCE = 0.1  # relative
WORTH = 2.0  # s of runs for which workers are started
BATCH = 4  # candidates that Optuna names at a time


class Progress(Protocol):
    """Who is told how a search goes on."""

    def __call__(
        self, candidates: Sequence[Candidate], runs: int, decided: Candidate | None
    ) -> None:
        """Hear of all candidates, the runs made since the last call, one that got a new trial."""

    def enter(self, phase: str) -> None:
        """Hear what begins."""


LoadedRun = tuple[Scenario, bool, float | None, float | None]
"""The scenario of one run, whether its load stays the same, its warm-up (s) if it is known, and
the windows (s) by which it is judged."""


@dataclass(slots=True)
class Runs:
    """How runs are made: on how many workers, who is told of them, and where they stand."""

    jobs: int | None = None
    progress: Progress | None = None
    journal: Journal | None = None
    seconds: float | None = None  # that a run took in this process; None: none was made yet

    def enter(self, phase: str) -> None:
        """Tell what begins."""
        if self.progress is not None:
            self.progress.enter(phase)

    def make(
        self, measure: Callable[[LoadedRun], MetricValues], tasks: Sequence[LoadedRun]
    ) -> Iterator[tuple[int, Outcome]]:
        """Make runs, on workers as soon as that takes less time than to start them."""
        spent = len(tasks) * (self.seconds or 0.0)
        here = self.jobs is None and spent < WORTH and (len(tasks) == 1 or self.seconds is not None)
        begin = process_time()
        yield from run_each(measure, tasks, 1 if here else self.jobs)
        if here and tasks:
            self.seconds = (process_time() - begin) / len(tasks)
        elif tasks:
            self.seconds = inf


def find_best(problem: PlanProblem, optuna: int | None, runs: Runs) -> PlanAnswer:
    """Search for every candidate, or for `optuna` of them; return them answered, and the best.

    Runs that the journal has are not made again, and it gets those that are. Raises HeadwayError
    where none can be run, or none holds.
    """
    progress = runs.progress
    if optuna is None:
        design = factors(problem.axes)
        given = problem.overrides, problem.seed, Candidate
        candidates = load_points(problem.path, design, *given)
        if problem.key == REPLICAS and all(scales(one.scenario) for one in candidates):
            others = [axis for axis in problem.axes if not axis[0].startswith(AUTOSCALING)]
            design = [*factors(others), [{AUTOSCALING: "null"}]]
            candidates += load_points(problem.path, design, *given)
        need_runnable(candidates)
        _need_power(problem, candidates)
        rule_out(problem, candidates)
        for candidate in candidates:
            if candidate.never and progress is not None:
                progress(candidates, 0, candidate)
        if problem.key or problem.by_energy:
            for wave in by_seats(candidates):
                search_all(problem, wave, runs, candidates)
        else:
            search_by_price(problem, candidates, runs)
        candidates += scale_sooner(problem, candidates, runs)
    else:
        candidates = search_by_optuna(problem, optuna, runs)
    for candidate in candidates:
        if candidate.not_tried and progress is not None:
            progress(candidates, 0, candidate)
    find_headroom(problem, candidates, runs)
    return PlanAnswer(candidates, choose_best(problem, candidates))


def rule_out(problem: PlanProblem, candidates: Sequence[Candidate]) -> None:
    """Mark the candidates that can never hold: they cost no run."""
    lost = max(slo.limit for slo in problem.criteria.slos if slo.metric == "completion")
    for candidate in candidates:
        if candidate.scenario is None:
            continue
        keys: list[tuple[str, str]] = []
        if problem.high and not scales(candidate.scenario):
            keys = problem.settings(candidate, PlannedRun(problem.high))
        try:
            most = load_scenario(
                problem.path, problem.overrides, vary=keys or candidate.varied.items()
            )
        except HeadwayError:
            continue  # its run will tell
        steady = problem.is_steady(most) and not problem.searches_rate
        load = requests_of(most)
        need_parts(problem.criteria.slos, most, load)
        candidate.never = never_holds(most, load, lost=lost, steady=steady)
        candidate.never = candidate.never or broken_alone(
            problem, most, dict(keys or candidate.varied)
        )
        candidate.done = bool(candidate.never)


def _need_power(problem: PlanProblem, candidates: Sequence[Candidate]) -> None:
    """Refuse candidates whose power nobody knows, if they are to be ranked by it."""
    for candidate in candidates if problem.by_energy else ():
        for own in candidate.scenario.groups.values() if candidate.scenario else ():
            if own.gpu.power.max is None and find_gpu(own.gpu.name).max_power is None:
                raise HeadwayError(
                    f"objective energy: {own.gpu.name} has no power in the table; give "
                    "gpu.power.max"
                )


def search_all(
    problem: PlanProblem,
    candidates: Sequence[Candidate],
    runs: Runs,
    shown: Sequence[Candidate] | None = None,
) -> None:
    """Search for every candidate, all at once; what is found is written into them.

    The progress is told of all that are `shown`, which may be more.
    """
    shown, progress = candidates if shown is None else shown, runs.progress
    active: list[tuple[Candidate, Search, list[PlannedRun]]] = []
    for candidate in candidates:
        if candidate.scenario is not None and not candidate.never:
            search = problem.search(
                candidate.scenario, candidate.result.trials, candidate.within, candidate.start
            )
            active.append((candidate, search, next(search)))
    while active:
        work = [(candidate, wanted) for candidate, _, places in active for wanted in places]
        outcomes = iter(_run_all(problem, work, runs, shown))
        still = []
        for candidate, search, places in active:
            results = [next(outcomes) for _ in places]
            if failed := [outcome for outcome in results if outcome.errors]:
                candidate.errors, candidate.done = failed[0].errors, True
                continue
            known = len(candidate.result.trials)
            try:
                still.append((candidate, search, search.send([one.values for one in results])))
            except StopIteration as end:
                candidate.result, candidate.done = end.value, True
                if problem.high and candidate.result.best is not None:
                    # GPUs and price may depend on what the search has found. A change of the load
                    # is left out: the runs of a further search would have it twice.
                    given = replace(problem, change=AS_IT_IS)
                    found = given.settings(candidate, PlannedRun(candidate.best.at))
                    candidate.scenario = load_scenario(problem.path, problem.overrides, vary=found)
            if progress is not None and (len(candidate.result.trials) > known or candidate.done):
                progress(shown, 0, candidate)
        active = still


def search_by_price(problem: PlanProblem, candidates: Sequence[Candidate], runs: Runs) -> None:
    """Try candidates from the cheapest on, until one holds: those that cost more are not tried.

    What a fleet costs that scales is known only of its runs: all of these are tried.
    """
    loaded = [c for c in candidates if c.scenario is not None]
    found = [resources(c.scenario) for c in loaded if c.scenario is not None]
    by_gpus = any(price is None for _, price in found)
    weights = [float(gpus if by_gpus or price is None else price) for gpus, price in found]
    limit = inf
    for k in sorted(range(len(loaded)), key=lambda k: (scales(loaded[k].scenario), weights[k])):
        candidate = loaded[k]
        if weights[k] > limit and not scales(candidate.scenario) and not candidate.never:
            candidate.not_tried, candidate.done = "costs more than one that is enough", True
            continue
        search_all(problem, [candidate], runs, candidates)
        if candidate.result.best is not None:
            limit = min(limit, weights[k])


def scale_sooner(
    problem: PlanProblem, candidates: Sequence[Candidate], runs: Runs
) -> list[Candidate]:
    """Try other targets, metrics and least replicas until one holds, where they come too late.

    Only where a fixed number holds, and none of these keys is varied. A queue says nothing of the
    time between tokens as long as there are seats. The least replicas stay below the fixed number.
    """
    held = [one for one in candidates if one.result.best is not None]
    late = [one for one in candidates if scales(one.scenario) and one.result.trials]
    asked = any(key.startswith(AUTOSCALING) for key, _ in problem.axes)
    if not held or not late or asked or any(scales(one.scenario) for one in held):
        return []
    scenario, last = late[0].scenario, late[0].result.trials[-1]
    block = scenario.cluster.autoscaling if scenario and scenario.cluster else None
    if scenario is None or block is None:  # of groups each has its own
        return []
    upward = block.metric == "slo_attainment"
    own = [(1.0 + block.target) / 2] if upward else [block.target / k for k in LOWER]
    used = max(float(run.get("kv_cache_usage_max", 1.0)) for run in last.runs)
    others = {"kv_usage": [used / k for k in LOWER], **TARGETS}
    others.pop(block.metric, None)
    if last.why.endswith(("tpot_ms", "itl_ms")):
        others.pop("queue_depth", None)
    if not default_levels(scenario.goodput):
        others.pop("slo_attainment", None)
    targets = [
        (metric, one) for metric, each in [(block.metric, own), *others.items()] for one in each
    ]
    settings = [
        {f"{AUTOSCALING}.metric": k, f"{AUTOSCALING}.target": f"{to:.3g}"} for k, to in targets
    ]
    settings += [
        {f"{AUTOSCALING}.min_replicas": f"{least}", REPLICAS: f"{least}"}
        for least in range(block.min_replicas + 1, int(min(one.best.at for one in held)))
    ]
    tried: list[Candidate] = []
    for keys in settings:
        given = late[0].varied | keys, problem.overrides, problem.seed, Candidate
        tried.append(load_point(problem.path, *given))
        search_all(problem, tried[-1:], runs, [*candidates, *tried])
        if tried[-1].result.best is not None:
            break
    return tried


def find_headroom(problem: PlanProblem, candidates: Sequence[Candidate], runs: Runs) -> None:
    """Find by how much the load may grow until each candidate that holds no longer does.

    Of a load that was searched for this is known. Else it is searched for by single runs.
    """
    criteria = replace(
        problem.criteria,
        replications=1,
        tolerance=HEADROOM_TOLERANCE,
        max_seconds=problem.criteria.first_seconds or inf,
    )
    loaded = replace(problem, criteria=criteria, key="workload.request_rate", low=0, high=0)
    twins = []
    for candidate in candidates:
        scenario = candidate.scenario
        if candidate.result.best is None or scenario is None or not problem.is_steady(scenario):
            continue
        generator = scenario.workload.generator
        if generator.max_concurrency:
            continue
        if problem.key != "workload.request_rate":
            keys = {problem.key: str(int(candidate.best.at))} if problem.key else {}
            twins.append((candidate, Candidate(candidate.varied | keys, scenario)))
        elif generator.request_rate != inf:
            candidate.headroom = candidate.capacity / generator.request_rate - 1.0
    search_all(loaded, [twin for _, twin in twins], replace(runs, progress=None))
    for candidate, twin in twins:
        if twin.result.best is not None and candidate.scenario is not None:
            # A single run may call a load broken that the answer's own runs hold.
            offered = candidate.scenario.workload.generator.request_rate
            candidate.headroom = max(twin.best.at / offered - 1.0, 0.0)


def _run_all(
    problem: PlanProblem,
    work: Sequence[tuple[Candidate, PlannedRun]],
    runs: Runs,
    shown: Sequence[Candidate],
) -> list[Outcome]:
    """Make the runs. What they warn of was told when the candidates were loaded."""
    journal, progress = runs.journal, runs.progress
    known = {} if journal is None else journal.known
    bounds = sorted(slo.text for slo in problem.criteria.slos)
    outcomes: dict[int, Outcome] = {}
    missing: list[tuple[int, str, LoadedRun]] = []  # place, key in the journal, the run
    for k, (candidate, wanted) in enumerate(work):
        loaded = _load(problem, candidate, wanted)
        if isinstance(loaded, Outcome):
            outcomes[k] = loaded
            continue
        scenario, steady, warmup, window = loaded
        parts: list[object] = [steady, warmup, bounds]
        parts += [] if problem.change == AS_IT_IS else [[*problem.change]]
        parts += [] if window is None else [window]
        key = scenario_key(scenario, "plan", *parts)
        if key in known:
            outcomes[k] = Outcome(known[key])
        else:
            missing.append((k, key, loaded))
    measured = runs.make(partial(_measure, problem), [run for *_, run in missing])
    for index, outcome in measured:
        k, key, _ = missing[index]
        outcomes[k] = outcome
        if progress is not None:
            progress(shown, 1, None)
        if journal is not None and not outcome.errors:
            journal.append(key, outcome.values)
    return [outcomes[k] for k in range(len(work))]


def _load(problem: PlanProblem, candidate: Candidate, wanted: PlannedRun) -> LoadedRun | Outcome:
    """Load the scenario of one run, or tell what is wrong with it."""
    settings = problem.settings(candidate, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadwayWarning)
        try:
            scenario = load_scenario(problem.path, problem.overrides, vary=settings)
        except HeadwayError as error:
            messages = error.messages
            if problem.high:
                by = (f"--vary {problem.key}=", f"--fewest {problem.key}=")
                messages = [text.replace(*by) for text in messages]
            return Outcome({}, messages)
    window = None if wanted.burst else problem.criteria.window
    return scenario, wanted.seconds is not None, wanted.warmup, window


def _measure(problem: PlanProblem, run: LoadedRun) -> MetricValues:
    """Make one run, in a worker."""
    scenario, steady, warmup, window = run
    slos, change = problem.criteria.slos, problem.change
    return measure_run(scenario, slos, steady=steady, warmup=warmup, window=window, change=change)


def choose_best(problem: PlanProblem, candidates: Sequence[Candidate]) -> Candidate:
    """Choose: at a fixed load the cheapest, of equals the most headroom; else the most requests
    per dollar.

    Where a price is unknown GPUs count, not dollars; by energy watts. Raises NoAnswerError, which
    names the candidate that comes closest, where none holds, and HeadwayError where none could run.
    """
    holding = [candidate for candidate in candidates if candidate.result.best is not None]
    if not any(one.result.trials or one.never for one in candidates):
        raise HeadwayError(text for _, text in fold_errors(candidates))
    if not holding:
        raise NoAnswerError(none_holds(problem, candidates))
    found = ranks(problem, holding)
    return holding[found.index(min(found))]


def ranks(problem: PlanProblem, holding: Sequence[Candidate]) -> list[tuple[float, float]]:
    """Return what `choose_best` goes by, of each candidate that holds: the least is the best."""
    gpus, prices = zip(*(candidate.resources for candidate in holding), strict=True)
    weights: Sequence[float] = gpus if None in prices else prices
    if problem.by_energy:
        weights = [candidate.read("power_w").mean for candidate in holding]

    def rank(k: int) -> tuple[float, float]:
        if not problem.searches_rate:
            return weights[k], -(holding[k].headroom or 0.0)
        rate = holding[k].read("request_throughput").mean
        return -rate / weights[k] if weights[k] else -rate, weights[k]

    return [rank(k) for k in range(len(holding))]


def none_holds(problem: PlanProblem, candidates: Sequence[Candidate]) -> str:
    """Say so, and what comes closest."""
    slos = problem.criteria.slos
    tried = [(c, trial) for c in candidates for trial in c.result.trials if not trial.superseded]
    if not tried:
        return next((c.never for c in candidates if c.never), "") or next(
            text for _, text in fold_errors(candidates)
        )
    closest, trial = min(tried, key=lambda pair: (pair[1].violation(slos), pair[1].at))
    got = ", ".join(f"{slo.metric} {short(trial.value(slo))}" for slo in slos)
    wanted = " and ".join(slo.text for slo in slos)
    place = f" at {problem.key}={trial.at:g}" if problem.key else ""
    if not trial.violation(slos):
        # One that holds by itself counts for nothing where a run could not be made, or a place that
        # should be easier has failed.
        failed = [text for _, text in fold_errors([closest])]
        failed += [other.reason for other in closest.result.trials if other.reason]
        got += f", but fails: {next(filter(None, (trial.reason, *failed)), trial.why)}"
    said = f"no configuration meets {wanted}; the closest is {closest.label}{place}: {got}"
    if trial.violation(slos) and any(run.get("broken") for run in trial.runs):
        trial = _to_its_end(problem, closest, trial)
    others = "`headway plan --buy` tries other GPUs, sizes and precisions"
    return f"{said}; {_keeps(slos, trial)}{others}"


def _keeps(slos: Sequence[Slo], trial: Trial) -> str:
    """Say which bounds its runs keep in place of those they break; "" where something grows."""
    broken = [slo for slo in slos if not slo.met(trial.value(slo))]
    kept = " and ".join(slo.loosened(trial.value(slo)) for slo in broken)
    return f"its runs keep {kept}; " if kept and not trial.growing else ""


def _to_its_end(problem: PlanProblem, candidate: Candidate, trial: Trial) -> Trial:
    """Return a place whose runs were ended as they broke a bound, by a run that is not."""
    loaded = _load(problem, candidate, PlannedRun(trial.at, seconds=trial.seconds))
    if isinstance(loaded, Outcome) or loaded[-1] is not None:  # a day takes long
        return replace(trial, growing="unknown")
    slos, change = problem.criteria.slos, problem.change
    values = measure_run(loaded[0], slos, steady=False, change=change)
    growing = "" if overload(values) is None else "the queue"
    return Trial(trial.at, runs=[values], growing=growing)


def search_by_optuna(problem: PlanProblem, trials: int, runs: Runs) -> list[Candidate]:
    """Search among the combinations by Optuna's TPE; return those it tried, answered.

    The batches are of one size whatever `jobs` says, so the same seed tries the same ones.
    """
    need_package("--optuna", "optuna", "optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=problem.seed % 2**32, constant_liar=True),
    )
    firsts = {key: values[0] for key, values in problem.axes}
    singles = [firsts | {key: value} for key, values in problem.axes for value in values]
    need_known_values(
        [load_point(problem.path, s, problem.overrides, problem.seed, Candidate) for s in singles]
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
                _need_power(problem, [candidate])
                rule_out(problem, [candidate])
                tried[values] = candidate
                fresh.append(candidate)
        search_all(problem, fresh, runs)
        for trial, values in zip(asked, chosen, strict=True):
            study.tell(trial, _objective(tried[values], problem))
    return list(tried.values())


def _objective(candidate: Candidate, problem: PlanProblem) -> float:
    """Rate a candidate for Optuna: more is better, and less than nothing where it does not hold."""
    if candidate.result.best is None:
        violations = [trial.violation(problem.criteria.slos) for trial in candidate.result.trials]
        return -1e6 - min(violations, default=1e6)
    gpus, price = candidate.resources
    weight = candidate.read("power_w").mean if problem.by_energy else price or gpus
    if problem.high or not problem.key:
        return -weight
    return candidate.read("request_throughput").mean / weight
