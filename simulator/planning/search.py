"""Find the largest load, or the smallest fleet, that keeps the service levels.

A search only says which runs it wants next and is sent their numbers: so many searches share the
workers, and none knows how its runs are made. Far from the edge a single run tells; near it there
are more, and at the answer and its neighbour each run is made twice as long until two successive
lengths agree.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import inf, isfinite, log, sqrt
from typing import NamedTuple

from simulator.planning.intervals import CONFIDENCE, Estimate, Span, batch_interval, estimate
from simulator.planning.runs import MetricValues
from simulator.results.service_levels import SHARES, Slo


class PlannedRun(NamedTuple):
    """A run: where, which replication, and for how long requests come."""

    at: float  # a rate, a number of replicas
    replication: int = 0
    seconds: float | None = None  # s; None: as long as the scenario says
    warmup: float | None = None  # s, left out; None: as the run itself finds it
    burst: int = 0  # so many requests in its place, all at once


Search = Generator[list[PlannedRun], list[MetricValues], "SearchResult"]

CERTAIN = 5.0  # times what a bound allows the whole run: then the rest of it is spared
LOST = 100  # requests beyond such a bound: no chance, and no longer look would say otherwise
WARMING_UP = "still warming up"
BEYOND = 20  # requests beyond a percentile, for it to be known
TOO_CLOSE = "too close to tell"
MIN_MISSED = 1e-3  # of a share that is missed: a plot over logarithms has no 0
STEPS = 8  # away from the first place, before a search gives up
FIRST_STEP = 1.25  # from the first rate to the second
LARGEST_STEP = 4.0
FLANK, FLANKS = 1.15, 3
"""Steps, and how many, beyond all places, for the ends of the interval of the largest rate."""


@dataclass(slots=True)
class Trial:
    """What is known about one place of the search."""

    at: float
    seconds: float | None = None  # for which requests came in each of its runs
    runs: list[MetricValues] = field(default_factory=list)
    ok: bool = False
    sure: bool = True  # the confidence interval decided it, not the mean alone
    strict: bool = False  # where the intervals could not tell it does not hold, whatever the mean
    why: str = ""  # the bound that is broken, or nearest to it
    growing: str = ""  # what grows
    strain: Span = (0.0, 0.0, 0.0)  # of the worst bound, what is above it relative to it
    settled: bool = False  # runs half as long said the same
    superseded: bool = False  # by longer runs at the same place
    cut_short: bool = False  # it was to be looked at for longer than is allowed
    warmup: float | None = None  # s: the mean of what the runs before found

    @property
    def breaks(self) -> str:
        """Name the bound that is broken; "" if none is, or if it takes certainty and there is none.

        Of a place that is judged by its means where intervals cannot tell, it is by the mean.
        """
        undecided = self.strict and not self.sure
        return "" if self.ok or undecided or self.strain[1] <= NOT_KEPT else self.why

    @property
    def reason(self) -> str:
        """Say why it does not hold."""
        if self.ok or self.breaks:
            return self.breaks
        return self.growing or f"{self.why} {TOO_CLOSE}"

    def ratios(self, slos: Sequence[Slo]) -> dict[str, float]:
        """Divide metrics by their bounds; above 1 a bound is broken. Completion only where it is.

        Of a share it is what is missed by what may be: 2 where goodput is 0.98 and 0.99 is wanted.
        """
        found: dict[str, float] = {}
        for slo in slos:
            value = interval(self.runs, slo.metric).mean
            if slo.metric == "completion" and slo.met(value):
                continue  # as a rule all are served, and the others tell more
            if slo.metric in SHARES:
                ratio = max(1.0 - value, MIN_MISSED) / max(1.0 - slo.bound, MIN_MISSED)
            else:
                over, under = (value, slo.bound) if slo.at_most else (slo.bound, value)
                ratio = max(over, 1e-9) / max(under, 1e-9)
            found[slo.metric] = max(ratio, found.get(slo.metric, 0.0))
        return found

    def violation(self, slos: Sequence[Slo]) -> float:
        """Say how far the worst metric is from its bound, relative to it."""
        return max(slo.violation(interval(self.runs, slo.metric).mean) for slo in slos)

    def agrees(self, criteria: "Criteria", *, strict: bool) -> bool:
        """Say whether the first half of the runs says what the whole of them does.

        Where the intervals cannot tell it does so if the means agree, or are near to the bound.
        """
        if self.growing or (strict and not self.sure):
            return False
        half = judge([_first_half(run) for run in self.runs], criteria)
        return half.mean_kept == self.ok or not self.sure

    def is_lost(self, criteria: "Criteria") -> bool:
        """Say whether so many requests broke a bound for certain that it was no chance."""
        limits = {slo.metric: slo.limit for slo in criteria.slos if slo.is_share}
        return all(
            CERTAIN * limits.get(run.get("broken", ""), 0.0) * run.get("num_prompts", 0) >= LOST
            for run in self.runs
        )

    @property
    def looked_at(self) -> float:
        """The simulated seconds of load of all its runs together."""
        return (self.seconds or 0.0) * len(self.runs)


@dataclass(slots=True)
class SearchResult:
    """How a search ended: the best place that holds, all that was tried in order, and the place
    next to the best that does not hold: the nearest to holding, where none does.
    """

    best: Trial | None
    trials: list[Trial]
    beyond: Trial | None = None


@dataclass(slots=True, frozen=True)
class Criteria:
    """When a place holds: every bound kept, with confidence, and nothing grows."""

    slos: Sequence[Slo]
    replications: int = 3  # at the answer and its neighbour, and where one run cannot tell
    most_replications: int = 96
    confidence: float = CONFIDENCE
    tolerance: float = 0.05  # of a rate, relative
    min_seconds: float | None = None  # of load in a run that decides; None: as the scenario says
    min_e2els: float = 20.0  # likewise, in P99 E2EL
    max_seconds: float = inf
    window: float | None = None  # s of arrivals, each of which must keep the bounds by itself

    @property
    def first_seconds(self) -> float | None:
        """The seconds of load in the first runs: half of what it takes to decide."""
        return None if self.min_seconds is None else self.min_seconds / 2

    def enough(self, trial: Trial) -> float:
        """Return the seconds of load that a run needs for the verdict on a place to stand.

        At most those that are allowed.
        """
        return min(self.wanted(trial), self.max_seconds)

    def wanted(self, trial: Trial) -> float:
        """Return the seconds of load that a run should have, whatever is allowed."""
        assert self.min_seconds is not None
        assert trial.seconds is not None
        longest = max(float(run["p99_e2el_ms"]) for run in trial.runs) if trial.ok else 0.0
        shares = [slo.limit for slo in self.slos if slo.is_share and slo.limit]
        requests = BEYOND / min(shares, default=1.0)
        for_share = trial.seconds * requests / trial.runs[0]["num_prompts"]
        return float(max(self.min_seconds, self.min_e2els * longest / 1000.0, for_share))

    def counts(self, *, strict: bool) -> list[int]:
        """Return after how many runs a place is judged that is looked at closely.

        A rate that is searched for is never far from the edge: more runs would not tell.
        """
        first, most = self.replications, self.most_replications
        if not strict:
            return [first]
        counts = [first]
        while counts[-1] < most:
            counts.append(min(2 * counts[-1], most))
        batched = self.min_seconds is not None or self.window is not None
        if batched and all(slo.of_requests for slo in self.slos):
            return sorted({1, *counts})
        return counts

    def longer(self, trial: Trial) -> float | None:
        """Return the seconds of load for another, longer look; None where there is none."""
        if trial.seconds is None or trial.seconds >= self.max_seconds:
            return None
        return min(max(2.0 * trial.seconds, self.enough(trial)), self.max_seconds)


def interval(runs: Sequence[MetricValues], metric: str, confidence: float = CONFIDENCE) -> Estimate:
    """Estimate a metric over independent runs; of a single one the interval is infinite."""
    return estimate([float(run[metric]) for run in runs], confidence)


class Verdict(NamedTuple):
    """What runs of one place say."""

    kept: bool | None  # None: the confidence intervals cannot tell
    mean_kept: bool  # by the means alone
    why: str  # the bound that is broken, or nearest to it
    strain: Span  # of that bound: how far it is exceeded, relative to it; inf: no telling
    growing: str = ""  # what grows


BROKEN: Span = (inf, inf, inf)
LOOKS = 10
NOT_KEPT = 1e-9  # by which a bound that is kept counts as exceeded where something grows


def judge(runs: Sequence[MetricValues], criteria: Criteria, *, strict: bool = False) -> Verdict:
    """Say whether the bounds are kept; `strict`: so that it may be judged several times over.

    Runs that were broken off decide against, and those that grow tell nothing, if they are the
    most. One is enough that lost a request where none may be.
    """
    broken = [str(run["broken"]) for run in runs if run.get("broken")]
    none_may = {slo.metric for slo in criteria.slos if slo.is_share and not slo.limit}
    lost = next((metric for metric in broken if metric in none_may), "")
    if lost or 2 * len(broken) > len(runs):
        return Verdict(False, False, lost or broken[0], BROKEN)
    whole = [run for run in runs if not run.get("broken")]
    confidence = criteria.confidence
    if strict:  # a place is judged after ever more runs, and ever longer ones (Bonferroni)
        confidence = 1.0 - (1.0 - confidence) / LOOKS
    spans = {slo.metric: _relative_excess(whole, slo, confidence) for slo in criteria.slos}
    why = max(spans, key=lambda metric: spans[metric][1])
    low, mean, high = (max(span[k] for span in spans.values()) for k in range(3))
    if low > 0:
        return Verdict(False, False, why, (low, mean, high))
    growing = [str(run["growing"]) for run in whole if run.get("growing")]
    if broken or 2 * len(growing) > len(whole):
        if broken:
            least, why = 2 * NOT_KEPT, broken[0] if mean <= 0 else why
            return Verdict(None, False, why, (low, max(mean, least), inf))
        return Verdict(None, False, why, (low, max(mean, NOT_KEPT), inf), growing[0])
    if high > 0 and mean <= 0:  # the one that the intervals leave open
        why = max(spans, key=lambda metric: spans[metric][2])
    return Verdict(None if high > 0 else True, mean <= 0, why, (low, mean, high))


def _first_half(run: MetricValues) -> MetricValues:
    """Return what a run would have told by its first half, as far as it is known by batches."""
    if "batches" not in run:
        return run
    half = {name: means[: len(means) // 2] for name, means in run["batches"].items()}
    return {**run, "batches": half, "measured": run["measured"] // 2}


def _relative_excess(runs: Sequence[MetricValues], slo: Slo, confidence: float) -> Span:
    """Return by how much a bound is exceeded, relative to it; below 0 it is kept.

    By batches of requests where the bound is on requests and there are batches, else run by run.
    """
    if slo.of_requests and all("batches" in run for run in runs):
        batches = [run["batches"][slo.text] for run in runs]
        low, mean, high = batch_interval(batches, confidence)
        if slo.is_share and not slo.limit:  # then one request that misses it breaks it
            return (mean, mean, mean) if mean > 0 else (-1.0, -1.0, -1.0)
        if slo.is_share:
            # None among n says no more than that it is less than one in n / 3, or so.
            count = sum(run["measured"] for run in runs)
            high = max(high, -log(1.0 - confidence) / max(count, 1))
        scale = slo.limit or 1.0
        return low / scale - 1.0, mean / scale - 1.0, high / scale - 1.0
    found = interval(runs, slo.metric, confidence)
    low, high = found.interval
    if not isfinite(found.half_width):
        low = high = found.mean  # a single run has no interval: its value decides
    scale = (1.0 if slo.at_most else -1.0) * (abs(slo.bound) or 1.0)
    ends = sorted((end - slo.bound) / scale for end in (low, high))
    return ends[0], (found.mean - slo.bound) / scale, ends[1]


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

    It ends when the lowest rate that fails is within the tolerance of the highest that holds.
    """

    def next_level(holds: float | None, fails: float | None, tried: int) -> float | None:
        if holds and fails:
            return sqrt(holds * fails) if fails > holds * (1 + criteria.tolerance) else None
        if tried > STEPS:
            return None
        step = min(FIRST_STEP**2 ** min(tried - 1, 3), LARGEST_STEP)
        return float(holds * step if holds else (fails or start) / step)

    trials = [] if trials is None else trials
    result = yield from _search(start, criteria, next_level, trials, rising=False)
    if result.best is not None and criteria.replications > 1 and any(not t.ok for t in trials):
        for side, step in ((0, 1 / FLANK), (2, FLANK)):
            for _ in range(FLANKS):
                if capacity(trials)[side] is not None:
                    break
                at = (max if side else min)(trial.at for trial in trials) * step
                trial = Trial(at, criteria.first_seconds)
                counts = sorted({1, criteria.replications})
                trials.append((yield from look(trial, criteria, counts)))
    return result


def capacity(trials: Sequence[Trial]) -> tuple[float | None, float | None, float | None]:
    """Return the load at which the worst bound is just kept, between the ends of its interval.

    Each is where a curve through the places, over the logarithm of the load, crosses the bound:
    for the lower end that of the intervals' upper ends. None: it does so at none of the places.
    """
    known = [trial for trial in trials if not trial.superseded]
    most = max(trial.looked_at for trial in known)
    # A short look that could not tell says less than those around it.
    told = [trial for trial in known if trial.sure or trial.looked_at >= most]
    places = sorted(told, key=lambda trial: trial.at)
    curves = ([trial.strain[k] for trial in places] for k in (2, 1, 0))
    low, mean, high = (_crossing([trial.at for trial in places], curve) for curve in curves)
    return low, mean, high


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
