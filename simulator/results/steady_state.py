"""Whether a run reached a steady state, and the part of it that is measured.

The series looked at is the number of requests in the system, as each request that is sent finds it:
it grows with any backlog, wherever that is. Poisson arrivals see time averages.
"""

from collections.abc import Mapping
from math import exp, inf, isfinite, lgamma, log, log1p, sqrt
from typing import NamedTuple

import numpy as np

from simulator.results.record import Record
from simulator.results.request_table import Floats, Ints, RequestTable, Rows
from simulator.results.time_series import mean_in_bins
from simulator.util.errors import HeadwayError
from simulator.util.quantile_sketch import ConcurrencyCounter

BATCHES = 20  # means that the trend is sought in
MIN_REQUESTS = 5 * BATCHES  # requests
SIGNIFICANCE_LEVEL = 0.01  # of the test
MATERIAL_CHANGE = 0.2  # of the mean: a smaller change over the run is no matter
MATERIAL_USAGE = 0.05  # of the KV cache: a smaller change is no matter
MOST_UNSERVED = 0.05  # of the requests that come, at the end of a run that keeps up
MOST_CHANCE = 3.0  # standard deviations by which two Poisson numbers of one mean may differ
ROUNDING = 1e-20
MSER_BATCH = 5  # values in a batch of MSER-5
TERMS = 100  # of a continued fraction; 40 give every digit for up to 18 degrees of freedom

ASK = "`headway plan` finds the load that keeps service levels for good"
TREND = ("stationary", "trend_per_s", "trend_p_value", "served_by_last_arrival")
Window = tuple[float, float]


def measurement_window(record: Record) -> Window | None:
    """Return the seconds between warm-up and cool-down; None where the whole run counts.

    The warm-up counts from the first request sent, the cool-down back from the last. Raises
    HeadwayError where no request is sent between them.
    """
    if not record.warmup and not record.cooldown:
        return None
    sent = record.sent[~np.isnan(record.sent)]
    first, last = float(sent.min(initial=inf)), float(sent.max(initial=-inf))
    low, high = first + record.warmup, last - record.cooldown
    if low >= high or not ((sent >= low) & (sent <= high)).any():
        span = last - first if isfinite(last - first) else 0.0
        raise HeadwayError(
            f"--warmup {record.warmup:g}, --cooldown {record.cooldown:g}: the run's requests are "
            f"sent within {span:.1f} s: none is left to measure"
        )
    return low, high


class Trend:
    """Whether a series of `total` values, which may come in parts, rises or falls."""

    def __init__(self, total: int) -> None:
        size, more = divmod(total, BATCHES)
        self._sizes = np.array([size + 1] * more + [size] * (BATCHES - more))
        self._sums = np.zeros(BATCHES)
        self._total, self._seen = total, 0
        self._first, self._last = inf, 0.0  # s
        self._backlog = 0  # in the system, as the last comes

    def add(self, times: Floats, values: Ints) -> None:
        """Add values and the times (ascending, s) at which they were."""
        if len(times):
            self._first, self._last = min(self._first, float(times[0])), float(times[-1])
        batch = np.searchsorted(
            np.cumsum(self._sizes), self._seen + np.arange(len(values)), "right"
        )
        self._sums += np.bincount(batch, values, BATCHES)
        self._seen += len(values)
        self._backlog = int(values[-1]) if len(values) else self._backlog

    @property
    def means(self) -> Floats:
        """The means of 20 successive parts of the series."""
        means: Floats = self._sums / self._sizes
        return means

    def test(self) -> dict[str, object]:
        """Judge the series; `stationary` is null where there are too few values to tell."""
        if not (self._total >= MIN_REQUESTS and self._last > self._first):  # or a time is unknown
            return dict.fromkeys(TREND)
        slope, p = linear_trend(self.means)
        mean = max(float(self._sums.sum()) / self._total, 1.0)
        # To fill a system bends the line: of a queue beside that the second half alone may tell.
        late, chance = self.means[-1] - self.means[BATCHES // 2 - 1], MOST_CHANCE * sqrt(2.0 * mean)
        outrun = late > max(MOST_UNSERVED * self._total / 2, chance)
        trend = p < SIGNIFICANCE_LEVEL and abs(slope) / mean > MATERIAL_CHANGE
        return {
            "stationary": not (trend or outrun),
            "trend_per_s": slope / (self._last - self._first),
            "trend_p_value": p,
            "served_by_last_arrival": max(1.0 - self._backlog / self._total, 0.0),
        }


class SteadyState:
    """Tests the requests in the system for a trend, and suggests a warm-up.

    A request comes when it is due where a rate says so, else as it is sent: behind
    `max_concurrency` alone the rest wait by intent.
    """

    def __init__(self, total: int | None = None, within: Window | None = None) -> None:
        """`total` requests come in parts; None: all come at once, and of these `within` counts.

        Only of all at once a warm-up is suggested.
        """
        self._within = within
        self._in_system = ConcurrencyCounter()
        self._trend = None if total is None else Trend(total)
        self._warmup: float | None = None

    def add(self, stays: Rows) -> None:
        """Add requests, rows of STAY; those of a later part come later."""
        times, level, _ = requests_in_system(stays, self._in_system)
        if self._trend is None:
            suggested = mser5(level)
            if suggested is not None:
                self._warmup = float(times[suggested] - times[0])
            if self._within is not None:
                kept = (times >= self._within[0]) & (times <= self._within[1])
                times, level = times[kept], level[kept]
            self._trend = Trend(len(level))
        self._trend.add(times, level)

    def summary(self) -> dict[str, object]:
        """Return the keys of the summary."""
        assert self._trend is not None
        return self._trend.test() | {"suggested_warmup_s": self._warmup}


STAY = np.dtype([("due", "f8"), ("sent", "f8"), ("left", "f8"), ("completed", "?")])
"""A request: when it was due, when it was sent, and when it was over for its client, in s."""


def stays_of(table: RequestTable) -> Rows:
    """Return the stays of the requests that were sent."""
    rows = np.empty(len(table.sent), STAY)
    rows["due"] = table.arrival if isfinite(table.workload.request_rate) else table.sent
    rows["sent"], rows["left"], rows["completed"] = table.sent, table.left, table.completed
    sent = ~np.isnan(table.sent)
    return rows if sent.all() else rows[sent]


class InSystem(NamedTuple):
    """Requests in the system, as those that come find it."""

    times: Floats  # when they come, s, ascending
    level: Ints  # how many each finds, with itself
    left: Floats  # when requests left, s


def requests_in_system(stays: Rows, counter: ConcurrencyCounter) -> InSystem:
    """Return when requests came, how many each found, and when they left."""
    order = np.argsort(stays["due"], kind="stable")
    times, left = stays["due"][order], stays["left"][order]
    stay = ~(left <= times)  # else it was rejected at once, and nobody ever found it there
    over = stay & ~np.isnan(left)
    return InSystem(times, counter.add(times, left[over], stay), left[over])


def find_warmup(record: Record) -> float | None:
    """Return the seconds by which a run from an empty system is warm, by MSER-5; None: too short.

    The series is the number of requests in the system, as each that comes finds it. Of too few to
    tell nothing is left out.
    """
    times, level, _ = requests_in_system(stays_of(record.request_table()), ConcurrencyCounter())
    if len(times) < MIN_REQUESTS:
        return 0.0
    begin = mser5(level)
    return None if begin is None else float(times[begin] - times[0])


def find_growth(record: Record) -> str:
    """Say what grows from the warm-up to the last arrival of a run; "" if nothing does.

    Three signs that a load is more than can be served for long: requests in the system, or KV
    blocks in use, have a rising trend that is significant and material (`linear_trend`), or fewer
    requests are over than come, by more than chance. To fill an empty system is none: the warm-up
    is left out.
    """
    stays = stays_of(record.request_table())
    times, level, left = requests_in_system(stays, ConcurrencyCounter())
    low, high = float(times[0]) + record.warmup, float(times[-1])
    level, times = level[times >= low], times[times >= low]
    trend = Trend(len(level))
    trend.add(times, level)
    found = trend.test()
    if found["stationary"] is False and trend.means[-1] > trend.means[0]:
        return "requests in the system"
    more = len(times) - int(((left >= low) & (left <= high)).sum())
    chance = MOST_CHANCE * sqrt(2.0 * float(level.mean()))
    if len(times) >= MIN_REQUESTS and more > max(MOST_UNSERVED * len(times), chance):
        return "served requests fall behind offered ones"
    usage = _kv_usage(record, np.linspace(low, high, BATCHES + 1))
    change, p = linear_trend(usage)
    mean = float(usage.mean())
    if p < SIGNIFICANCE_LEVEL and change > max(MATERIAL_CHANGE * mean, MATERIAL_USAGE):
        return "KV cache usage"
    return ""


def _kv_usage(record: Record, edges: Floats) -> Floats:
    """Average the share of all KV blocks in use over each bin."""
    used = np.zeros(len(edges) - 1)
    for rows in (replica.steps for replica in record.logs):
        used += mean_in_bins(rows["start"], rows["end"], rows["blocks_used"], edges)
    return used / max(sum(replica.num_blocks for replica in record.logs), 1)


def linear_trend(means: Floats) -> tuple[float, float]:
    """Return the change over a series by a straight line, and the two-sided p value.

    The line goes through the batch means. Its slope's variance is widened by first-order
    correlation of what is left, and the degrees of freedom fewer by as much.
    """
    at = np.arange(BATCHES) - (BATCHES - 1) / 2
    slope = float(at @ means / (at @ at))
    rest = means - means.mean() - slope * at
    power = float(rest @ rest)
    if power <= ROUNDING * float(means @ means):  # what is left of a line is rounding
        return slope * BATCHES, 0.0 if abs(slope) > ROUNDING else 1.0
    correlation = min(max(float(rest[1:] @ rest[:-1]) / power, 0.0), 0.8)
    fewer = (1 - correlation) / (1 + correlation)
    freedom = max(BATCHES * fewer, 4.0) - 2.0
    error = sqrt(power / (BATCHES - 2) / float(at @ at) / fewer)
    return slope * BATCHES, t_test_p_value(slope / error, freedom)


def t_test_p_value(score: float, freedom: float) -> float:
    """Return Student's two-sided p value; scipy.special takes 0.2 s to load, a third of a run.

    It is the regularized incomplete beta function at freedom / (freedom + score^2), whose
    continued fraction converges fast on one side of the mean; the other side is its complement.
    """
    at, a, b = freedom / (freedom + score * score), freedom / 2, 0.5
    if at > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, score * score / (freedom + score * score))
    return _incomplete_beta(a, b, at)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function, for x below its mean or so.

    By the continued fraction of the NIST Handbook (8.17.22), evaluated from its far end.
    """
    if not x:
        return 0.0
    fraction = 1.0
    for m in range(TERMS, 0, -1):
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        fraction = 1.0 + odd / (1.0 + even / fraction)
    front = lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)
    return exp(front) / (a * fraction)


def mser5(values: Floats | Ints) -> int | None:
    """Return how many values to leave out for the mean to be known best.

    White, "An effective truncation heuristic for bias reduction in simulation output", 1997: of
    batches of five, leave out those whose absence makes the mean's standard error least. None
    where that is half of them: the run is too short.
    """
    count = len(values) // MSER_BATCH
    if count < 2 * BATCHES // MSER_BATCH:
        return None
    means = values[: count * MSER_BATCH].reshape(count, MSER_BATCH).mean(axis=1)
    left = np.arange(count, 0, -1)
    total, squares = (np.cumsum(x[::-1])[::-1] for x in (means, means**2))
    error = (squares - total**2 / left) / left**2
    best = int(np.argmin(error[: count // 2 + 1]))
    return None if best >= count // 2 else best * MSER_BATCH


def overload(found: Mapping[str, object]) -> float | None:
    """Return the share of its requests that a run served while they came, if a queue grows.

    `found` has the keys of TREND. None: no queue grows, or nobody can tell, as in a run in which
    no request was over as the last one came: it may be shorter than a request.
    """
    slope, served = found.get("trend_per_s"), found.get("served_by_last_arrival")
    if found.get("stationary") is not False or not isinstance(slope, float) or slope <= 0:
        return None
    return served if isinstance(served, float) and 0.0 < served < 1.0 - MOST_UNSERVED else None


def trend_warning(found: Mapping[str, object]) -> str:
    """Say in a line that a run is not stationary; "" where it is, or nobody can tell."""
    slope = found.get("trend_per_s")
    if found.get("stationary") is not False or not isinstance(slope, float):
        return ""
    word, more = "grows" if slope > 0 else "falls", ""
    if (served := overload(found)) is not None:
        more = f" Overloaded: {served:.0%} of the requests were served by the last arrival. {ASK}."
    return (
        f"Not stationary: the number of requests in the system {word} by {abs(slope):.3g}/s "
        f"(p = {found['trend_p_value']:.2g}); means and percentiles depend on the run's length."
        f"{more}"
    )
