"""Statistics over replications: intervals of means and of single runs, paired differences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt

import numpy as np

CONFIDENCE = 0.95
MOST_PAIRS = 10_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric over independent replications."""

    mean: float
    sd: float  # between replications
    count: int
    half_width: float  # of the confidence interval of the mean, Student's t
    prediction_half_width: float  # of the interval that holds one more run
    least: float = -inf  # that the metric can be: no interval goes beyond
    most: float = inf

    @property
    def interval(self) -> tuple[float, float]:
        """The confidence interval of the mean: narrower with every replication."""
        return self._within(self.half_width)

    @property
    def prediction_interval(self) -> tuple[float, float]:
        """The prediction interval of a single further run: as wide as runs differ."""
        return self._within(self.prediction_half_width)

    def _within(self, half_width: float) -> tuple[float, float]:
        return max(self.mean - half_width, self.least), min(self.mean + half_width, self.most)


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Estimate the mean of independent values; of a single one the intervals are infinite."""
    count = len(values)
    if count == 1:
        return Estimate(float(values[0]), 0.0, 1, inf, inf)
    if min(values) == max(values):
        return Estimate(float(values[0]), 0.0, count, 0.0, 0.0)
    from scipy.special import stdtrit  # scipy.stats takes 1 s longer to import

    mean, sd = float(np.mean(values)), float(np.std(values, ddof=1))
    factor = float(stdtrit(count - 1, (1 + confidence) / 2)) * sd
    return Estimate(mean, sd, count, factor / sqrt(count), factor * sqrt(1 + 1 / count))


Span = tuple[float, float, float]
"""The ends of a confidence interval and, between them, the mean."""


MOST_CORRELATION = 0.8  # of successive batches that is allowed for
FEWEST_FREEDOM = 2.0


def batch_interval(runs: Sequence[Sequence[float]], confidence: float = CONFIDENCE) -> Span:
    """Estimate a mean from the means of successive batches of each of several runs.

    By these batches, and by batches twice as long; the outer ends count, as batches that are too
    short for what they measure make the interval too narrow (Law, "Simulation Modeling and
    Analysis", 5th ed., 9.5.3, on batch means).
    """
    low, mean, high = _batch_interval(runs, confidence)
    pairs = [[(a + b) / 2 for a, b in zip(run[::2], run[1::2], strict=False)] for run in runs]
    if not all(pairs):
        return low, mean, high
    wide_low, _, wide_high = _batch_interval(pairs, confidence)
    return min(low, wide_low), mean, max(high, wide_high)


def _batch_interval(runs: Sequence[Sequence[float]], confidence: float) -> Span:
    """Estimate the mean by one size of batches.

    The variance is widened by what correlation of first order there is between successive batches
    of a run, and the degrees of freedom are fewer by as much: of an AR(1) series of n values with
    correlation r, n (1 - r) / (1 + r) count.
    """
    values = np.concatenate([np.asarray(run, float) for run in runs])
    mean, count = float(values.mean()), len(values)
    rest = [np.asarray(run, float) - mean for run in runs]
    power = float(sum(r @ r for r in rest))
    if count < 2:
        return -inf, mean, inf
    if not power:
        return mean, mean, mean
    from scipy.special import stdtrit  # scipy.stats takes 1 s longer to import

    together = float(sum(r[1:] @ r[:-1] for r in rest)) / power
    correlation = min(max(together, 0.0), MOST_CORRELATION)
    counted = count * (1 - correlation) / (1 + correlation)
    score = float(stdtrit(max(counted - 1, FEWEST_FREEDOM), (1 + confidence) / 2))
    sd = sqrt(power / (count - 1))
    skew = 0.0
    if count > 2:
        third = float(((values - mean) ** 3).sum()) * count / ((count - 1) * (count - 2))
        skew = third / (6 * sqrt(counted) * sd**3)
    error = sd / sqrt(counted)
    low, high = (mean - _skew_corrected(t, skew) * error for t in (score, -score))
    return low, mean, high


def _skew_corrected(score: float, skew: float) -> float:
    """Bend a Student's t for the mean of values that are not symmetric.

    `skew` is their third moment over 6 sqrt(n) sd cubed. A few batches hold what breaks a bound,
    so their mean is rather too low than too high (Willink, "A confidence interval and test for the
    mean of an asymmetric distribution", Communications in Statistics 34(4), 2005).
    """
    if abs(skew) < 1e-6:
        return score
    return float(np.cbrt(1 + 6 * skew * (score - skew)) - 1) / (2 * skew)


@dataclass(frozen=True, slots=True)
class Difference:
    """A metric's paired differences between two runs over the same replications."""

    metric: str
    first: Estimate
    other: Estimate
    difference: Estimate  # other - first, pair by pair
    p: float  # two-sided paired t test; 1 where no pair differs
    adjusted: float = 1.0  # by Holm, over all that were tested together
    family: int = 1  # how many these are, times the looks that are taken at them

    @property
    def significant(self) -> bool:
        """Whether the difference is not chance, at 5 % over all comparisons together."""
        return self.adjusted < 1 - CONFIDENCE

    @property
    def needed(self) -> int | None:
        """The pairs that would tell such a difference from chance; None: more than MOST_PAIRS."""
        count, found = 2, self.difference
        while count <= MOST_PAIRS:
            if self.family * _p_value(replace(found, count=count)) < 1 - CONFIDENCE:
                return count
            count = max(count + 1, int(1.05 * count))
        return None


def paired(metric: str, first: Sequence[float], other: Sequence[float]) -> Difference:
    """Compare two runs replication by replication.

    The pairs saw the same requests and the same noise, so what they have in common cancels.
    """
    found = estimate([b - a for a, b in zip(first, other, strict=True)])
    return Difference(metric, estimate(first), estimate(other), found, _p_value(found))


def _p_value(found: Estimate) -> float:
    """Test whether the mean is 0, two-sided."""
    if not found.sd:
        return 1.0 if not found.mean else 0.0
    from scipy.special import stdtr

    score = abs(found.mean) / (found.sd / sqrt(found.count))
    return float(2 * stdtr(found.count - 1, -score))


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p values so that all false findings together stay as rare as one test's would.

    Holm, "A simple sequentially rejective multiple test procedure", 1979: the k-th smallest of m
    is multiplied by m - k + 1 and is never below the one before it.
    """
    adjusted = [0.0] * len(values)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        least = max(least, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = least
    return adjusted


def columns(runs: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, list[float]]:
    """Return the metrics that every run has, by name."""
    return {
        name: [float(run[name]) for run in runs]
        for name in names
        if all(isinstance(run.get(name), int | float) and abs(run[name]) < inf for run in runs)
    }
