"""A candidate of a plan, what was found out about it, and its row in the table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any, NamedTuple

from headway.planning.design import DesignPoint
from headway.planning.intervals import Estimate
from headway.planning.problem import PlanProblem, is_random, scales
from headway.planning.runs import MetricValues
from headway.planning.search import SearchResult, capacity_ends
from headway.planning.verdict import Trial, interval
from simulator.models.gpus import find_gpu
from simulator.results.cluster_metrics import price_of_cluster
from simulator.results.service_levels import Judged, by_clock, step_span
from simulator.scenario.resolve import resolve_groups
from simulator.scenario.scenario import Scenario

ENERGY = (
    "power_w",
    "joules_per_output_token",
    "wh_per_million_output_tokens",
    "kg_co2_per_million_output_tokens",
)

Row = dict[str, Any]
"""A row of the table that a plan writes, by column."""
SEATS = "engine.max_num_seqs"
SEATED = ("vllm", "textbook")  # engines for which seats are a limit and nothing else


class Speed(NamedTuple):
    """What a load comes to, as a mean of its runs."""

    trial: Trial
    user: float  # tokens/s
    total: float  # tokens/s of all users


@dataclass(slots=True)
class Candidate(DesignPoint):
    """One configuration, at the scenario's own load, and what was found out about it."""

    result: SearchResult = field(default_factory=lambda: SearchResult(None, []))
    done: bool = False  # its search is over
    not_tried: str = ""  # why it was left out for what another was found to do
    within: tuple[int, int] | None = None  # bounds of what is searched, where theory knows them
    fewest: int = 0  # replicas that hold the load, by theory, at least; 0: it says nothing
    start: int | None = None  # where the search begins then
    never: str = ""  # why it cannot hold, whatever a run would say: it costs none
    headroom: float | None = None  # by which the load may grow, relative to it

    @property
    def best(self) -> Trial:
        """Where it just holds; only of one that does."""
        assert self.result.best is not None
        return self.result.best

    def resources_at(self, trial: Trial) -> tuple[float, float | None]:
        """Return the GPUs that it takes and its dollars per hour; None where a GPU has no price.

        Where its replicas come and go, both are what its runs there had and paid on average.
        """
        assert self.scenario is not None
        return resources(self.scenario, trial.runs)

    def spent_at(self, trial: Trial) -> float | None:
        """Return what it costs with as many replicas as were tried; None where it is not known."""
        return None

    @property
    def capacity(self) -> float:
        """The largest load that a long run has held."""
        return self.best.at

    @property
    def capacity_interval(self) -> tuple[float | None, float | None]:
        """The ends of the interval of that load, which has it; None for one that is not known.

        Where nothing is random the load is between the last place that holds and the next.
        """
        assert self.scenario is not None
        low, high = capacity_ends(self.result.trials)
        if not is_random(self.scenario):
            beyond = self.result.beyond
            return self.best.at, None if beyond is None else beyond.at
        if low == high:  # one run, not told by batches
            return None, None
        low = None if low is None else min(low, self.best.at)
        return low, None if high is None else max(high, self.best.at)

    @property
    def rate_unit(self) -> str:
        """The unit of the key that says how fast requests come."""
        assert self.scenario is not None
        load = self.scenario.workload
        unit = "req/s" if load.generator.sessions is None else "sessions/s"
        return unit if load.trace is None else "x the trace's rate"

    @property
    def cut_short(self) -> list[float]:
        """Its answer, or the place next to it, where it was to be looked at for longer."""
        ends = self.result.best, self.result.beyond
        return [end.at for end in ends if end is not None and end.cut_short]

    @property
    def resources(self) -> tuple[float, float | None]:
        """Its GPUs and dollars per hour where it just holds."""
        return self.resources_at(self.best)

    def read(self, metric: str, confidence: float = 0.95) -> Estimate:
        """Return a metric where the configuration just holds."""
        return interval(self.best.runs, metric, confidence)

    def speeds(self, *, of_best: bool) -> Iterator[Speed]:
        """Yield the speed at each load that was tried, by its longest look.

        `of_best`: only of the place that was found, as where the fleet's size was searched for.
        """
        longest = {one.at: one for one in sorted(self.result.trials, key=lambda t: t.looked_at)}
        for trial in longest.values():
            if of_best and trial is not self.result.best:
                continue
            if tpot := interval(trial.runs, "mean_tpot_ms").mean:
                yield Speed(trial, 1000.0 / tpot, interval(trial.runs, "output_throughput").mean)


class PlanAnswer(NamedTuple):
    """What a plan has found."""

    candidates: list[Candidate]
    best: Candidate
    lines: Sequence[str] = ()  # in words, where a table does not say it


def resources(scenario: Scenario, runs: Sequence[MetricValues] = ()) -> tuple[float, float | None]:
    """Count a scenario's GPUs, and their dollars per hour; None where the price is unknown.

    Where its replicas come and go both are means of what its `runs` had and paid, if there are any.
    """
    if runs and scales(scenario):
        hours = [run.get("run_duration", run["duration"]) / 3600.0 for run in runs]
        means = [
            sum(run.get(key, nan) / own for run, own in zip(runs, hours, strict=True)) / len(runs)
            for key in ("gpu_hours", "dollars")
        ]
        return means[0], None if isnan(means[1]) else means[1]
    if scenario.cluster is None:
        own = scenario.gpu
        price = find_gpu(own.name, own.dollars_per_hour).dollars_per_hour
        return own.count, None if price is None else price * own.count
    cluster = scenario.cluster
    groups = cluster.replica_groups.items()
    count = sum(group.replicas * scenario.of_group(name).gpu.count for name, group in groups)
    return count, price_of_cluster(scenario)


def by_seats(candidates: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """Yield candidates in turns, each after those that have fewer seats and are else alike.

    Where no run has filled the seats, more are never better: they take memory from the KV cache.
    Such a candidate is not tried.
    """
    alike: dict[tuple[tuple[str, str], ...], list[Candidate]] = {}
    for candidate in candidates:
        others = tuple(pair for pair in candidate.varied.items() if pair[0] != SEATS)
        alike.setdefault(others, []).append(candidate)
    for rows in alike.values():
        rows.sort(key=lambda one: 0 if one.scenario is None else one.scenario.engine.max_num_seqs)
    for k in range(max(map(len, alike.values()), default=0)):
        wave = []
        for rows in alike.values():
            if k < len(rows):
                if not (why := _seats_to_spare(rows[:k], rows[k])):
                    wave.append(rows[k])
                rows[k].not_tried, rows[k].done = why, rows[k].done or bool(why)
        yield wave


def _seats_to_spare(fewer: Sequence[Candidate], candidate: Candidate) -> str:
    """Say which number of fewer seats no run has filled; "" if none, or if the rule is unknown."""
    for other in fewer:
        if other.scenario is None or candidate.scenario is None or candidate.never:
            continue
        own, seats = candidate.scenario.engine, other.scenario.engine.max_num_seqs
        most = max((r["max_running"] for t in other.result.trials for r in t.runs), default=seats)
        same = own.model_copy(update={"max_num_seqs": seats}) == other.scenario.engine
        if same and own.name in SEATED and most < seats:
            return f"at most {most} of {seats} seats were taken with {other.label}"
    return ""


def looked_at(trial: Trial) -> str:
    """Write how many runs there are of a place, and for how long requests came in each."""
    seconds = trial.seconds or sum(run["duration"] for run in trial.runs) / len(trial.runs)
    length = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.3g} min"
    length = length if seconds < 7200 else f"{seconds / 3600:.3g} h"
    return f"{len(trial.runs)} x {length}"


def verdicts(problem: PlanProblem, candidate: Candidate, trial: Trial) -> list[Judged]:
    """Hold the numbers of a candidate at one place against the bounds and the clock.

    Of a share of requests the clock's error is not counted.
    """
    assert candidate.scenario is not None
    span = step_span(spec.cost for spec in resolve_groups(candidate.scenario).values())
    found = []
    for slo in problem.criteria.slos:
        value = trial.value(slo)
        ends = None if span is None else by_clock(slo, value, span)
        found.append(Judged(slo, value, ends, span))
    return found


def result_row(problem: PlanProblem, candidate: Candidate) -> Row:
    """Tell one candidate's answer: where it just holds, and what it does there.

    What does not hold has figures only where it was tried at one place, in whole runs: one that
    scales, or at the load that is given.
    """
    best = candidate.result.best
    row: Row = {**candidate.varied, "holds": best is not None, "at": None}
    row["candidate"] = candidate.label
    if problem.searches_rate:
        row |= dict.fromkeys(("capacity", "capacity_low", "capacity_high"))
    row["error"] = candidate.error or None
    row["not_tried"] = candidate.not_tried or None
    row["never_holds"] = candidate.never or None
    beyond = candidate.result.beyond
    row["broke"] = (beyond.breaks if beyond is not None else "") or None
    row["reason"] = (beyond.reason if beyond is not None else "") or None
    if best is not None and beyond is None and 1 < best.at <= candidate.fewest:
        row["reason"] = "fewer: too slow by theory"
    judged = best or (candidate.result.trials[-1] if candidate.result.trials else None)
    row["looked_at"] = looked_at(judged) if judged is not None else None
    row["cut_short"] = bool(candidate.cut_short)
    if best is not None:
        row["at"] = best.at
        if problem.searches_rate:
            row["capacity_low"], row["capacity_high"] = candidate.capacity_interval
            row["capacity"] = candidate.capacity
        return row | _figures(problem, candidate, best)
    at_one_place = not problem.key or scales(candidate.scenario)
    if judged is None or not at_one_place or any(run.get("broken") for run in judged.runs):
        return row
    return row | _figures(problem, candidate, judged)


def _figures(problem: PlanProblem, candidate: Candidate, trial: Trial) -> Row:
    """Return what the runs of a place say: the bounded metrics, what it takes and what it gives."""
    ratios = trial.ratios(problem.criteria.slos)
    nearest = max(ratios, key=ratios.__getitem__) if ratios else trial.why
    row: Row = {"nearest_bound": nearest, "headroom": candidate.headroom}
    shares = [float(run["attainment"]) for run in trial.runs if "attainment" in run]
    row["attainment"] = sum(shares) / len(shares) if shares else None
    row["seconds_of_load"] = trial.seconds
    row["replications"] = len(trial.runs)
    values = {slo.metric: trial.value(slo) for slo in problem.criteria.slos}
    for metric in values:
        key = f"worst_window_{metric}"
        if key in trial.runs[0]:
            row[key] = trial.runs[0][key]
    for metric in (*values, "request_throughput", "output_throughput"):
        found = interval(trial.runs, metric, problem.criteria.confidence)
        row[metric] = values.get(metric, found.mean)
        row[f"{metric}_half_width"] = found.half_width if found.count > 1 else None
    row["verdicts"] = [f"{one.slo.text}: {one}" for one in verdicts(problem, candidate, trial)]
    tokens = row["output_throughput"]
    gpus, price = candidate.resources_at(trial)
    tpot = interval(trial.runs, "mean_tpot_ms").mean
    row["gpus"] = gpus
    row["tokens_per_s_per_gpu"] = tokens / gpus
    row["tokens_per_s_per_user"] = 1000.0 / tpot if tpot else None
    row["dollars_per_hour"] = price
    row["dollars_per_day"] = None if price is None else 24.0 * price
    row["dollars_per_million_output_tokens"] = (
        price / 3600.0 / tokens * 1e6 if price is not None and tokens else None
    )
    for metric in ENERGY:
        known = all(metric in run for run in trial.runs)
        row[metric] = interval(trial.runs, metric).mean if known else None
    return row
