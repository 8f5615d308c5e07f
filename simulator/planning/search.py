"""Find the largest load, or the smallest fleet, that keeps the service levels.

A search only says which runs it wants next and is sent their numbers: so many searches share the
workers, and none knows how its runs are made.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import isfinite, sqrt

from simulator.planning.intervals import CONFIDENCE, Estimate, estimate
from simulator.planning.runs import MetricValues
from simulator.planning.service_levels import Slo

PlannedRun = tuple[float, int]
"""A run: where (a rate, a number of replicas), and which replication."""
Search = Generator[list[PlannedRun], list[MetricValues], "SearchResult"]

DOUBLINGS = 10  # of the first rate, or halvings, before a search gives up


@dataclass(slots=True)
class Trial:
    """What is known about one place of the search."""

    at: float
    runs: list[MetricValues] = field(default_factory=list)
    ok: bool = False
    sure: bool = True  # the confidence interval decided it, not the mean alone

    def violation(self, slos: Sequence[Slo]) -> float:
        """Say how far the worst metric is from its bound, relative to it."""
        return max(slo.violation(interval(self.runs, slo.metric).mean) for slo in slos)


@dataclass(slots=True)
class SearchResult:
    """How a search ended: the best place that holds, and all that was tried, in order."""

    best: Trial | None
    trials: list[Trial]

    @property
    def between(self) -> tuple[float | None, float | None]:
        """Give the best place that surely holds and, beyond it, the first that surely fails.

        Between the two the confidence intervals cannot tell. None where there is no such place.
        """
        if self.best is None:
            return None, None
        sure = [trial for trial in self.trials if trial.sure]
        fail = [t.at for t in sure if not t.ok]
        rising = any(t.at < self.best.at for t in self.trials if not t.ok)
        hold = [t.at for t in sure if t.ok]
        pick = (min, max) if rising else (max, min)
        return pick[0](hold, default=None), pick[1](fail, default=None)


@dataclass(slots=True, frozen=True)
class Criteria:
    """When a place holds: every bound kept, with confidence, by the mean over replications."""

    slos: Sequence[Slo]
    replications: int = 3  # first, at every place
    most_replications: int = 12
    confidence: float = CONFIDENCE
    tolerance: float = 0.02  # of a rate, relative


def interval(runs: Sequence[MetricValues], metric: str, confidence: float = CONFIDENCE) -> Estimate:
    """Estimate a metric over independent runs; of a single one the interval is infinite."""
    return estimate([float(run[metric]) for run in runs], confidence)


def bounds_kept(runs: Sequence[MetricValues], criteria: Criteria) -> bool | None:
    """Say whether the bounds are kept; None where the confidence intervals cannot tell."""
    unsure = False
    for slo in criteria.slos:
        found = interval(runs, slo.metric, criteria.confidence)
        low, high = found.interval
        if not isfinite(found.half_width):
            low = high = found.mean  # a single run has no interval: its value decides
        best, worst = (low, high) if slo.at_most else (high, low)
        if not slo.met(best):
            return False
        unsure |= not slo.met(worst)
    return None if unsure else True


def evaluate(
    at: float, criteria: Criteria, trials: list[Trial]
) -> Generator[list[PlannedRun], list[MetricValues], Trial]:
    """Run one place, with as many replications as its verdict needs."""
    trial = Trial(at)
    trials.append(trial)
    wanted = criteria.replications
    while True:
        have = len(trial.runs)
        trial.runs += yield [(at, k) for k in range(have, wanted)]
        kept = bounds_kept(trial.runs, criteria)
        if kept is not None or wanted >= criteria.most_replications:
            break
        wanted = min(2 * wanted, criteria.most_replications)
    trial.sure = kept is not None
    if kept is None:
        kept = all(slo.met(interval(trial.runs, slo.metric).mean) for slo in criteria.slos)
    trial.ok = kept
    return trial


def largest_rate(start: float, criteria: Criteria) -> Search:
    """Search the largest rate that holds: doubling or halving from `start`, then bisection.

    It ends when the lowest rate that fails is within the tolerance of the highest that holds.
    """

    def next_level(holds: float | None, fails: float | None, tried: int) -> float | None:
        if holds and fails:
            return sqrt(holds * fails) if fails > holds * (1 + criteria.tolerance) else None
        if tried > DOUBLINGS:
            return None
        return holds * 2 if holds else (fails or start) / 2

    return _search(start, criteria, next_level)


def fewest(low: int, high: int, criteria: Criteria) -> Search:
    """Search the smallest whole number from `low` to `high` that holds: doubling, then bisection.

    The place below the answer has been seen to fail, unless the answer is `low`.
    """

    def next_level(holds: float | None, fails: float | None, tried: int) -> float | None:
        below = low - 1 if fails is None else int(fails)
        if holds is None:
            return None if below == high else min(max(2 * below, 1), high)
        return (below + int(holds)) // 2 if holds - below > 1 else None

    return _search(low, criteria, next_level)


def as_configured(criteria: Criteria) -> Search:
    """Find out whether the bounds are kept as things are (at 1.0 times the load)."""
    return _search(1.0, criteria, lambda *_: None)


def _search(
    start: float,
    criteria: Criteria,
    next_level: Callable[[float | None, float | None, int], float | None],
) -> Search:
    """Evaluate one place after another.

    `next_level` chooses each from the last that holds, the last that fails and how many there were;
    None: the search is over.
    """
    trials: list[Trial] = []
    best: Trial | None = None
    fails: float | None = None
    at: float | None = start
    while at is not None:
        trial = yield from evaluate(at, criteria, trials)
        if trial.ok:
            best = trial
        else:
            fails = at
        at = next_level(None if best is None else best.at, fails, len(trials))
    return SearchResult(best, trials)


def not_monotone(trials: Sequence[Trial], rising: bool) -> list[tuple[Trial, Trial]]:
    """List pairs that contradict the search's assumption, both verdicts being sure.

    `rising` says that more of it (replicas) can only help; otherwise more of it (load) only hurt.
    """
    sure = sorted((trial for trial in trials if trial.sure), key=lambda trial: trial.at)
    return [
        (a, b)
        for a, b in combinations(sure, 2)
        if a.at < b.at and (a.ok and not b.ok if rising else b.ok and not a.ok)
    ]
