"""When a place of a plan holds: what is known of it, and what its runs say of the bounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, log, nextafter
from typing import NamedTuple

import numpy as np

from headway.planning.intervals import CONFIDENCE, Estimate, Span, batch_interval, estimate
from headway.planning.runs import MetricValues
from simulator.results.service_levels import SHARES, Slo

CERTAIN = 5.0  # times what a bound allows the whole run: then the rest of it is spared
LOST = 100  # requests beyond such a bound: no chance, and no longer look would say otherwise
WARMING_UP = "still warming up"
BEYOND = 20  # requests beyond a percentile, for it to be known
TOO_CLOSE = "too close to tell"
LIKELY = 0.5  # by which a bound is exceeded, relative to it, that is more than close
MIN_MISSED = 1e-3  # of a share that is missed: a plot over logarithms has no 0
LEVELS = 1.0 - np.linspace(1.0, 0.0, 101) ** 3  # of quantiles that runs leave: most near the top


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
        likely = LIKELY <= self.strain[1] < inf  # the mean is far beyond, the runs differ much
        return self.growing or f"{self.why} {'likely broken' if likely else TOO_CLOSE}"

    def value(self, slo: Slo) -> float:
        """Return a bounded number of all runs together, on that side of the bound where they are.

        Of a percentile that of all their requests, which a mean of percentiles is not.
        """
        if not slo.of_requests or any("batches" not in run for run in self.runs):
            return interval(self.runs, slo.metric).mean
        mean = float(np.mean(np.concatenate([run["batches"][slo.text] for run in self.runs])))
        if slo.name in SHARES:
            return 1.0 - mean
        if slo.percentile is None:
            return mean
        told = [run for run in self.runs if run.get("quantiles", {}).get(slo.text)]
        if not told:
            return interval(self.runs, slo.metric).mean
        each = [run["quantiles"][slo.text] for run in told]
        at = np.unique(np.concatenate(each))
        below = [np.interp(at, values, LEVELS) for values in each]
        share = np.average(below, axis=0, weights=[run["measured"] for run in told])
        found = float(np.interp(slo.percentile / 100.0, share, at))
        kept = mean <= slo.limit
        return min(found, slo.bound) if kept else max(found, nextafter(slo.bound, inf))

    def ratios(self, slos: Sequence[Slo]) -> dict[str, float]:
        """Divide metrics by their bounds; above 1 a bound is broken. Completion only where it is.

        Of a share it is what is missed by what may be: 2 where goodput is 0.98 and 0.99 is wanted.
        """
        found: dict[str, float] = {}
        for slo in slos:
            value = self.value(slo)
            if slo.metric == "completion" and slo.met(value):
                continue  # as a rule all are served, and the others tell more
            if slo.name in SHARES:
                ratio = max(1.0 - value, MIN_MISSED) / max(1.0 - slo.bound, MIN_MISSED)
            else:
                over, under = (value, slo.bound) if slo.at_most else (slo.bound, value)
                ratio = max(over, 1e-9) / max(under, 1e-9)
            found[slo.metric] = max(ratio, found.get(slo.metric, 0.0))
        return found

    def violation(self, slos: Sequence[Slo]) -> float:
        """Say how far the worst metric is from its bound, relative to it."""
        return max(slo.violation(self.value(slo)) for slo in slos)

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
        longest = max(float(run.get("p99_e2el_ms", 0)) for run in trial.runs) if trial.ok else 0.0
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
    """Estimate a metric over independent runs; of a single one the interval is infinite.

    Runs that served no request have no latency, and do not count; if none did, it is 0.
    """
    return estimate([float(run[metric]) for run in runs if metric in run] or [0.0], confidence)


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
            count = sum(run.get("counts", {}).get(slo.text, run["measured"]) for run in runs)
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
