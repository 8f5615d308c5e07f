"""Find the largest load, or the smallest fleet, that keeps the service levels.

A search only says which runs it wants next and is sent their numbers: so many searches share the
workers, and none knows how its runs are made. Far from the edge a single run tells; near it there
are more, and at the answer and its neighbour each run is made twice as long until two successive
lengths agree.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, isfinite, sqrt
from typing import NamedTuple

from headway.planning.runs import MetricValues
from headway.planning.verdict import NOT_KEPT, WARMING_UP, Criteria, Trial, judge


class PlannedRun(NamedTuple):
    """A run: where, which replication, and for how long requests come."""

    at: float  # a rate, a number of replicas
    replication: int = 0
    seconds: float | None = None  # s; None: as long as the scenario says
    warmup: float | None = None  # s, left out; None: as the run itself finds it
    burst: int = 0  # so many requests in its place, all at once


Search = Generator[list[PlannedRun], list[MetricValues], "SearchResult"]

SURE = 0.6  # of half an interval of 99.5 %: with 95 % a mean lies no further to one side
LONG = 4  # times as long as those that decide are the runs that the largest rate has to hold
STEPS = 8  # away from the first place, before a search gives up
FIRST_STEP = 1.25  # from the first rate to the second
LARGEST_STEP = 4.0
FLANK, FLANKS = 1.15, 3
"""Steps, and how many, beyond all places, for the ends of the interval of the largest rate."""


@dataclass(slots=True)
class SearchResult:
    """How a search ended: the best place that holds, all that was tried in order, and the place
    next to the best that does not hold: the nearest to holding, where none does.
    """

    best: Trial | None
    trials: list[Trial]
    beyond: Trial | None = None


def look(
    trial: Trial,
    criteria: Criteria,
    counts: Sequence[int],
    *,
    strict: bool = False,
    quick: bool = False,
) -> Generator[list[PlannedRun], list[MetricValues], Trial]:
    """Run one place, and judge it after so many runs, and after so many, until one tells.

    Where the intervals cannot tell in the end, the means do; `strict`: then it does not hold.
    `quick`: the means do, too, where a run was too short to get warm, but long enough to break the
    bounds: a longer look will tell.
    """
    for count in counts:
        have = len(trial.runs)
        places = [(trial.at, k, trial.seconds, trial.warmup) for k in range(have, count)]
        trial.runs += yield [PlannedRun(*place) for place in places]
        trial.warmup = _mean_warmup(trial)
        found = judge(trial.runs, criteria, strict=strict)
        # One run may be lucky as a whole: that a place holds takes several.
        alone = strict and count < criteria.replications
        if found.kept is False or (found.kept and not alone):
            break
    trial.sure, trial.strict = found.kept is not None, strict
    by_mean = found.mean_kept or (
        quick
        and found.growing == WARMING_UP
        and found.strain[1] <= NOT_KEPT
        and all(slo.duration <= (trial.seconds or inf) for slo in criteria.slos)
    )
    trial.ok = bool(found.kept) or (found.kept is None and by_mean and not strict)
    trial.why, trial.growing, trial.strain = found.why, found.growing, found.strain
    return trial


def _mean_warmup(trial: Trial) -> float | None:
    """Return the warm-up that further runs of a place leave out.

    A run that leaves out what MSER-5 finds in itself leaves out its worst minutes where they come
    early by chance, and then looks better than it is. Those of other runs are no such choice.
    """
    found = [float(run["found_warmup_s"]) for run in trial.runs if "found_warmup_s" in run]
    return sum(found) / len(found) if found else trial.warmup


def largest_rate(start: float, criteria: Criteria, trials: list[Trial] | None = None) -> Search:
    """Search the largest rate that holds: ever larger steps from `start`, then bisection.

    It ends when the lowest rate that fails is within the tolerance of the highest that holds. That
    has to hold in runs that are `LONG` times as long, or the answer is less: near saturation queues
    grow by chance that short runs do not see.
    """

    def next_level(holds: float | None, fails: float | None, tried: int) -> float | None:
        if holds and fails:
            between = rounded(sqrt(holds * fails))
            wide = fails > holds * (1 + criteria.tolerance) and between not in (holds, fails)
            return between if wide else None
        if tried > STEPS:
            return None
        step = min(FIRST_STEP**2 ** min(tried - 1, 3), LARGEST_STEP)
        return rounded(holds * step if holds else (fails or start) / step)

    trials = [] if trials is None else trials
    result = yield from _search(start, criteria, next_level, trials, rising=False)
    if result.best is not None and criteria.replications > 1 and any(not t.ok for t in trials):
        for side, step in enumerate((1 / FLANK, FLANK)):
            for _ in range(FLANKS):
                if capacity_ends(trials)[side] is not None:
                    break
                at = rounded((max if side else min)(trial.at for trial in trials) * step)
                trial = Trial(at, criteria.first_seconds)
                counts = sorted({1, criteria.replications})
                trials.append((yield from look(trial, criteria, counts)))
    seconds = None if result.best is None else result.best.seconds
    longer = min(LONG * (seconds or 0.0), criteria.max_seconds)
    at = start if result.best is None else result.best.at
    for step in range(1, STEPS if criteria.replications > 1 and longer > (seconds or inf) else 1):
        trial = Trial(at, longer)
        trials.append((yield from look(trial, criteria, [criteria.replications])))
        if trial.ok and (1 - SURE) * trial.strain[1] + SURE * trial.strain[2] <= 0:
            trial.superseded = trial.settled = True  # the interval is that of runs alike
            return SearchResult(trial, trials, result.beyond)
        result.beyond = result.beyond if trial.ok else trial
        at = rounded(at / (1.0 + criteria.tolerance / 2) ** step)
    return result


def rounded(rate: float) -> float:
    """Round a load to the four digits that are printed of it: one number stands everywhere."""
    return float(f"{rate:.4g}")


def capacity_ends(trials: Sequence[Trial]) -> tuple[float | None, float | None]:
    """Return the ends of the interval of the load at which the worst bound is just kept.

    Each is where a curve through the places, over the logarithm of the load, crosses the bound:
    for the lower end that of the intervals' upper ends. None: it does so at none of the places.
    """
    known = [trial for trial in trials if not trial.superseded]
    most = max(trial.looked_at for trial in known)
    # A short look that could not tell says less than those around it.
    told = [trial for trial in known if trial.sure or trial.looked_at >= most]
    places = sorted(told, key=lambda trial: trial.at)
    curves = ([trial.strain[k] for trial in places] for k in (2, 0))
    low, high = (_crossing([trial.at for trial in places], curve) for curve in curves)
    return low, high


def _crossing(loads: Sequence[float], strains: Sequence[float]) -> float | None:
    """Get the load at which the strain first is more than 0; None if at none, or at the least."""
    first = next((k for k, strain in enumerate(strains) if strain > 0), 0)
    if not first:
        return None
    (a, b), (below, above) = loads[first - 1 : first + 1], strains[first - 1 : first + 1]
    if not isfinite(above):  # it was broken off, or tells nothing: half way, as a bisection would
        return sqrt(a * b)
    return float(a * (b / a) ** (-below / (above - below)))


def fewest(
    low: int,
    high: int,
    criteria: Criteria,
    trials: list[Trial] | None = None,
    start: int | None = None,
) -> Search:
    """Search the smallest whole number from `low` to `high` that holds: steps, then bisection.

    It begins at `start`, `low` unless given. The place below the answer has been seen to fail,
    unless the answer is `low`.
    """

    def next_level(holds: float | None, fails: float | None, tried: int) -> float | None:
        step = 2 ** (tried - 1)
        if holds is None:
            return None if fails == high else min(int(fails or 0) + step, high)
        if fails is None:
            return None if holds == low else max(int(holds) - step, low)
        return (int(fails) + int(holds)) // 2 if holds - fails > 1 else None

    first = low if start is None else min(max(start, low), high)
    return _search(first, criteria, next_level, trials, rising=True)


def as_configured(criteria: Criteria, trials: list[Trial] | None = None) -> Search:
    """Find out whether the bounds are kept as things are (at 1.0 times the load)."""
    return _search(1.0, criteria, lambda *_: None, trials, rising=True)


def _search(
    start: float,
    criteria: Criteria,
    next_level: Callable[[float | None, float | None, int], float | None],
    trials: list[Trial] | None,
    *,
    rising: bool,
) -> Search:
    """Look at one place after another, then ever longer at the two between which the answer lies.

    `next_level` chooses each from the best that holds, the nearest that fails and how many there
    were; None: the two are found. `rising`: more is better, else worse. Where more is better and
    the intervals cannot tell, a place does not hold.
    """
    trials = [] if trials is None else trials
    places: dict[float, Trial] = {}
    seconds, quick = criteria.first_seconds, True
    at: float | None = start
    while True:
        if at is not None:
            short = quick and seconds is not None
            counts = [1] if short else criteria.counts(strict=rising)
            if at in places:  # a longer look nearby has overturned what led past it
                places[at].superseded = True
            warmup = places[at].warmup if at in places else None
            places[at] = trial = Trial(at, seconds, warmup=warmup)
            strict = rising and not short
            trials.append((yield from look(trial, criteria, counts, strict=strict, quick=short)))
            trial.settled = trial.is_lost(criteria)
            if not quick:
                trial.settled |= trial.agrees(criteria, strict=rising)
        holds, fails = ends(places.values(), rising)
        at = next_level(
            None if holds is None else holds.at, None if fails is None else fails.at, len(places)
        )
        if at is not None:
            continue
        end = next((one for one in (holds, fails) if one is not None and not one.settled), None)
        if end is None:
            for one in (holds, fails):
                if one is not None and one.seconds is not None and not one.is_lost(criteria):
                    one.cut_short |= criteria.wanted(one) > criteria.max_seconds
            return SearchResult(holds, trials, fails)
        longer = criteria.longer(end)
        if longer is None:
            end.settled, end.cut_short = True, end.seconds is not None
            continue
        again = Trial(end.at, longer, warmup=end.warmup)
        counts = [n for n in criteria.counts(strict=rising) if end.sure or n >= len(end.runs)]
        trials.append((yield from look(again, criteria, counts, strict=rising)))
        end.superseded = True
        places[end.at] = again
        again.settled = longer >= criteria.enough(again) and again.agrees(criteria, strict=rising)
        if again.ok != end.ok:  # so long, and so often, it has to be looked at here
            seconds, quick = longer, False
            if not rising and not again.ok:  # nor does a short look just below it tell anything
                near = again.at / (1.0 + criteria.tolerance)
                places = {k: p for k, p in places.items() if not near <= k < again.at}


def ends(places: Iterable[Trial], rising: bool) -> tuple[Trial | None, Trial | None]:
    """Return the best place that holds and, beyond it, the nearest that fails.

    `rising`: more is better (replicas), else worse (load).
    Of places that contradict each other, those that fail are believed.
    """
    sign = 1.0 if rising else -1.0  # the larger sign * at, the better
    fails = max((t for t in places if not t.ok), key=lambda t: sign * t.at, default=None)
    held = [t for t in places if t.ok and (fails is None or sign * t.at > sign * fails.at)]
    return min(held, key=lambda t: sign * t.at, default=None), fails


def not_monotone(trials: Sequence[Trial], rising: bool) -> list[tuple[Trial, Trial]]:
    """List pairs that contradict the search's assumption, both verdicts being sure.

    `rising` says that more of it (replicas) can only help; otherwise more of it (load) only hurt.
    """
    sure = [trial for trial in trials if trial.sure and not trial.superseded]
    return [
        (a, b)
        for a, b in combinations(sorted(sure, key=lambda trial: trial.at), 2)
        if a.at < b.at and (a.ok and not b.ok if rising else b.ok and not a.ok)
    ]
