"""Statistics of values that are not kept, against those of all of them."""

import numpy as np
import pytest

from simulator.util.quantile_sketch import RELATIVE_ERROR, ConcurrencyCounter, QuantileSketch


def test_a_sketch_knows_mean_and_spread_and_nearly_the_percentiles() -> None:
    rng = np.random.default_rng(3)
    values = np.concatenate((np.exp(rng.normal(0, 3, 5000)), np.zeros(50)))
    weights = rng.integers(0, 4, len(values))
    sketch = QuantileSketch()
    for at in range(0, len(values), 700):
        sketch.add(values[at : at + 700], weights[at : at + 700])
    every = np.repeat(values, weights)
    assert sketch.count == len(every)
    assert sketch.mean == pytest.approx(every.mean(), rel=1e-12)
    assert sketch.std == pytest.approx(every.std(), rel=1e-12)
    wanted = [0.0, 0.5, 10.0, 50.0, 99.0, 99.99, 100.0]
    for mine, exact in zip(sketch.percentiles(wanted), np.percentile(every, wanted), strict=True):
        assert mine == pytest.approx(exact, rel=RELATIVE_ERROR, abs=1e-9)
    assert QuantileSketch().percentiles([50.0]) == [0.0]


def test_concurrency_is_counted_at_each_arrival() -> None:
    """Over two parts; who departs at that moment is gone."""
    counter = ConcurrencyCounter()
    assert counter.add(np.array([0.0, 1.0]), np.array([1.0, 9.0])).tolist() == [1, 1]
    assert counter.add(np.array([2.0, 8.0]), np.array([3.0, 10.0])).tolist() == [2, 2]
    assert counter.add(np.array([9.5]), np.empty(0)).tolist() == [2]


def test_who_does_not_stay_is_found_by_nobody() -> None:
    """Four come at once, two of them are turned away; they find who is there."""
    counter, stay = ConcurrencyCounter(), np.array([False, True, False, True])
    assert counter.add(np.zeros(4), np.array([1.0, 2.0]), stay).tolist() == [0, 1, 1, 2]
    assert counter.add(np.array([1.5]), np.empty(0), np.array([False])).tolist() == [1]
