"""Whether a run reached a steady state, and the part of it that is measured.

The series looked at is the number of requests in the system, as each request that is sent finds it:
it grows with any backlog, wherever that is. Poisson arrivals see time averages.
"""

from collections.abc import Mapping
from math import atan2, exp, inf, isfinite, lgamma, pi, sqrt
from typing import TYPE_CHECKING

import numpy as np

from simulator.results.tables import Floats, RequestTable
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from simulator.results.record import Record

BATCHES = 20  # means that the trend is sought in
FEWEST = 5 * BATCHES  # requests
LEVEL = 0.01  # of the test
MATERIAL = 0.2  # of the mean: a smaller change over the run is no matter
EXACT = 1e-20
FIVE = 5  # values in a batch of MSER-5

Window = tuple[float, float]


def window(result: "Record") -> Window | None:
    """Give the seconds between warm-up and cool-down; None where the whole run counts.

    The warm-up counts from the first request sent, the cool-down back from the last. Raises
    HeadwayError where no request is sent between them.
    """
    if not result.warmup and not result.cooldown:
        return None
    sent = result.sent[~np.isnan(result.sent)]
    first, last = float(sent.min(initial=inf)), float(sent.max(initial=-inf))
    low, high = first + result.warmup, last - result.cooldown
    if low >= high or not ((sent >= low) & (sent <= high)).any():
        span = last - first if isfinite(last - first) else 0.0
        raise HeadwayError(
            f"--warmup {result.warmup:g}, --cooldown {result.cooldown:g}: the run's requests are "
            f"sent within {span:.1f} s: none is left to measure"
        )
    return low, high


def steady_state(table: RequestTable, within: Window | None) -> dict[str, object]:
    """Test the requests in the system for a trend; suggest a warm-up.

    `stationary` is null where there are too few requests to tell.
    """
    times, level = in_system(table)
    suggested = mser5(level)
    warmup = None if suggested is None else float(times[suggested] - times[0])
    if within is not None:
        kept = (times >= within[0]) & (times <= within[1])
        times, level = times[kept], level[kept]
    found: dict[str, object] = dict.fromkeys(("stationary", "trend_per_s", "trend_p_value"))
    if len(level) >= FEWEST and times[-1] > times[0]:
        found = judged(batch_means(level), float(level.mean()), float(times[-1] - times[0]))
    return found | {"suggested_warmup_s": warmup}


def judged(means: Floats, mean: float, seconds: float) -> dict[str, object]:
    """Judge a series by its batch means, its mean and its length, s."""
    slope, p = line(means)
    change = slope / max(mean, 1.0)
    return {
        "stationary": not (p < LEVEL and abs(change) > MATERIAL),
        "trend_per_s": slope / seconds,
        "trend_p_value": p,
    }


def in_system(table: RequestTable) -> tuple[Floats, Floats]:
    """Give when each request came, ascending, and how many were then in the system, it included.

    A request comes when it is due where a rate says so, else as it is sent: behind
    `max_concurrency` alone the rest wait by intent.
    """
    sent = ~np.isnan(table.sent)
    due = table.arrival if isfinite(table.workload.request_rate) else table.sent
    times = np.sort(due[sent])
    left = table.left[sent]
    ends = np.sort(left[~np.isnan(left)])
    here = np.arange(1, len(times) + 1) - np.searchsorted(ends, times, side="right")
    return times, here.astype(np.float64)


def batch_means(values: Floats) -> Floats:
    """Give the means of 20 successive parts of a series."""
    return np.array([part.mean() for part in np.array_split(values, BATCHES)])


def line(means: Floats) -> tuple[float, float]:
    """Give the change over the whole series by a straight line, and the two-sided p value.

    The line goes through the batch means. Its slope's variance is widened by first-order
    correlation of what is left, and the degrees of freedom fewer by as much.
    """
    at = np.arange(BATCHES) - (BATCHES - 1) / 2
    slope = float(at @ means / (at @ at))
    rest = means - means.mean() - slope * at
    power = float(rest @ rest)
    if power <= EXACT * float(means @ means):  # what is left of a line is rounding
        return slope * BATCHES, 0.0 if abs(slope) > EXACT else 1.0
    correlation = min(max(float(rest[1:] @ rest[:-1]) / power, 0.0), 0.8)
    fewer = (1 - correlation) / (1 + correlation)
    freedom = max(BATCHES * fewer, 4.0) - 2.0
    error = sqrt(power / (BATCHES - 2) / float(at @ at) / fewer)
    return slope * BATCHES, two_sided(slope / error, freedom)


def two_sided(score: float, freedom: float) -> float:
    """Give Student's two-sided p value; scipy would take longer to load than a short run."""
    angle = np.linspace(atan2(abs(score), sqrt(freedom)), pi / 2, 2001)
    height = np.maximum(np.cos(angle), 0.0) ** (freedom - 1)
    area = float(((height[1:] + height[:-1]) / 2 * np.diff(angle)).sum())
    return min(1.0, 2 * area / sqrt(pi) * exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2)))


def mser5(values: Floats) -> int | None:
    """Give how many values to leave out for the mean to be known best.

    White, "An effective truncation heuristic for bias reduction in simulation output", 1997: of
    batches of five, leave out those whose absence makes the mean's standard error least. None
    where that is half of them: the run is too short.
    """
    count = len(values) // FIVE
    if count < 2 * BATCHES // FIVE:
        return None
    means = values[: count * FIVE].reshape(count, FIVE).mean(axis=1)
    left = np.arange(count, 0, -1)
    total, squares = (np.cumsum(x[::-1])[::-1] for x in (means, means**2))
    error = (squares - total**2 / left) / left**2
    best = int(np.argmin(error[: count // 2 + 1]))
    return None if best >= count // 2 else best * FIVE


def told(found: Mapping[str, object]) -> str:
    """Say in a line that a run is not stationary; "" where it is, or nobody can tell."""
    slope = found.get("trend_per_s")
    if found.get("stationary") is not False or not isinstance(slope, float):
        return ""
    word = "grows" if slope > 0 else "falls"
    return (
        f"Not stationary: the number of requests in the system {word} by {abs(slope):.3g}/s "
        f"(p = {found['trend_p_value']:.2g}); means and percentiles depend on the run's length."
    )
