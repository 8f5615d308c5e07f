"""Intervals, paired differences and Holm's adjustment, by hand and by their promises."""

from math import sqrt

import numpy as np
import pytest

from headway.planning.intervals import batch_interval, estimate, holm, paired


def test_intervals_by_hand():
    """Of 1, 2, 3: sd 1, t(0.975, 2) = 4.302653."""
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.sd, found.count) == (2.0, 1.0, 3)
    assert found.half_width == pytest.approx(4.302653 / sqrt(3), rel=1e-6)
    assert found.prediction_half_width == pytest.approx(4.302653 * sqrt(4 / 3), rel=1e-6)
    assert found.interval == (2.0 - found.half_width, 2.0 + found.half_width)
    assert found.prediction_interval == (
        2.0 - found.prediction_half_width,
        2.0 + found.prediction_half_width,
    )
    assert estimate([0.1, 0.1]).half_width == estimate([0.1, 0.1]).sd == 0.0


def test_the_interval_of_batches_by_hand():
    """Of 0, 0, 0, 4 of four runs: sd 2, third moment 16, so skew 16 / (6 x 2 x 8) = 1 / 6.

    t(0.975, 3) = 3.182446 becomes 3 (cbrt(1 + t - 1 / 6) - 1) = 1.768457 below the mean and
    3 (cbrt(1 - t - 1 / 6) - 1) = -6.988007 above it.
    """
    low, mean, high = batch_interval([[0.0], [0.0], [0.0], [4.0]])
    assert mean == 1.0
    assert low == pytest.approx(1 - 1.768457, rel=1e-6)
    assert high == pytest.approx(1 + 6.988007, rel=1e-6)
    assert batch_interval([[1.0]]) == (-np.inf, 1.0, np.inf)
    assert batch_interval([[2.0] * 4, [2.0] * 4]) == (2.0, 2.0, 2.0)


def test_batches_that_follow_from_each_other_count_less():
    """Of 0, 0, 4, 4 and 2 of another run: r = (4 - 4 + 4) / 16, so 5 x 0.75 / 1.25 = 3 count.

    t(0.975, 2) = 4.302653, and the error is 2 / sqrt(3).
    """
    low, mean, high = batch_interval([[0.0, 0.0, 4.0, 4.0], [2.0]])
    assert mean == 2.0
    assert high - mean == mean - low == pytest.approx(4.302653 * 2 / 3**0.5, rel=1e-6)


def test_the_interval_of_batches_covers_what_is_not_symmetric():
    """Three runs of ten batches of gamma values, mean 1, shape 0.2: a few batches have nearly all.

    Without the bend 12 % of the intervals are below the mean, where 2.5 % may be.
    """
    draw = np.random.default_rng(3)
    found = [batch_interval(draw.gamma(0.2, 5.0, (3, 10)).tolist()) for _ in range(1500)]
    assert np.mean([high < 1.0 for _, _, high in found]) < 0.04
    assert np.mean([low > 1.0 for low, _, _ in found]) < 0.025


def test_paired_differences_by_hand():
    """Differences 1, 2, 3: t = 2 / (1 / sqrt 3) = 3.4641 with 2 degrees of freedom, p = 0.0742."""
    found = paired("x", [10.0, 20.0, 30.0], [11.0, 22.0, 33.0])
    assert found.difference.mean == 2.0
    assert found.p == pytest.approx(0.07418, abs=1e-5)
    assert paired("x", [1.0, 2.0], [1.0, 2.0]).p == 1.0
    assert paired("x", [1.0, 2.0], [2.0, 3.0]).p == 0.0


def test_holm_by_hand():
    """Of 0.01, 0.04, 0.03, 0.005: times 3, 1, 2, 4, and never below a smaller one's."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_intervals_cover_as_often_as_they_say():
    """2,000 samples of 6 normal values: both intervals hold what they promise 95 % of the time."""
    draw = np.random.default_rng(1)
    runs = draw.normal(5.0, 2.0, (2000, 7))
    found = [estimate(row[:6].tolist()) for row in runs]
    means = np.mean([e.interval[0] <= 5.0 <= e.interval[1] for e in found])
    pairs = zip(found, runs[:, 6], strict=True)
    single = np.mean([e.prediction_interval[0] <= x <= e.prediction_interval[1] for e, x in pairs])
    assert abs(means - 0.95) < 0.015
    assert abs(single - 0.95) < 0.015


def test_holm_keeps_false_findings_rare():
    """Of 1,000 families of ten true hypotheses, at most some 5 % have any finding."""
    families = np.random.default_rng(2).uniform(size=(1000, 10))
    any_found = np.mean([min(holm(row.tolist())) < 0.05 for row in families])
    assert 0.03 < any_found < 0.07
