"""Distributions: exact values at given probabilities, bounds, shares, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.workload.distributions import (
    durations,
    parse_distribution,
    parse_lengths,
    token_counts,
    weighted_choice,
)
from simulator.workload.workload import Workload

GRID = (np.arange(100_000) + 0.5) / 100_000  # every probability alike, no luck involved


def at(spec, *u) -> list[int]:
    return token_counts(parse_lengths(spec), np.array(u, float)).tolist()


def spread(spec) -> np.ndarray:
    return token_counts(parse_lengths(spec), GRID)


def error(spec, make=parse_lengths) -> str:
    with pytest.raises(ValueError, match=r": ") as info:
        make(spec)
    return str(info.value)


def mix(*parts) -> dict[str, object]:
    return {"kind": "mixture", "parts": list(parts)}


def test_fixed():
    """A number is itself, also when written as a distribution."""
    assert at(7, 0, 0.5, 0.99) == at({"kind": "fixed", "value": 7}, 0, 0.5, 0.99) == [7, 7, 7]


def test_uniform():
    """Both ends of a uniform range are as likely as what is between them."""
    assert at({"kind": "uniform", "low": 3, "high": 6}, 0, 0.24, 0.26, 0.74, 0.76, 1 - 1e-16) == [
        3,
        3,
        4,
        5,
        6,
        6,
    ]
    assert (
        np.unique(spread({"kind": "uniform", "low": 3, "high": 6}), return_counts=True)[1].tolist()
        == [25_000] * 4
    )


def test_uniform_seconds():
    """Times are not rounded, and their bounds not widened."""
    times = durations(
        parse_distribution({"kind": "uniform", "low": 1, "high": 2}), np.array([0, 0.25, 0.5])
    )
    assert times.tolist() == [1.0, 1.25, 1.5]


def test_lognormal_by_median():
    """Half of it is below the median, and the logarithm deviates by sigma."""
    x = spread({"kind": "lognormal", "median": 5000, "sigma": 0.5})
    assert np.median(x) == 5000
    assert np.log(x).std() == pytest.approx(0.5, rel=1e-3)


def test_lognormal_by_mean():
    """The mean is that of the values, not of their logarithms."""
    assert spread({"kind": "lognormal", "mean": 5000, "sigma": 1.0}).mean() == pytest.approx(
        5000, rel=1e-3
    )


def test_cut_lognormal():
    """Bounds keep what is between them in its old proportions; nothing piles up at a bound."""
    whole = spread({"kind": "lognormal", "median": 20, "sigma": 1})
    kept = spread({"kind": "lognormal", "median": 20, "sigma": 1, "low": 10, "high": 30})
    inside = whole[(whole >= 10) & (whole <= 30)]
    assert (kept.min(), kept.max()) == (10, 30)
    was, now = np.bincount(inside) / len(inside), np.bincount(kept) / len(kept)
    assert now == pytest.approx(was, abs=2e-4)


def test_exponential():
    """An exponential has its mean and, cut, still its shape."""
    u = GRID
    assert durations(
        parse_distribution({"kind": "exponential", "mean": 4}), u
    ).mean() == pytest.approx(4, rel=1e-3)
    cut = durations(parse_distribution({"kind": "exponential", "mean": 4, "low": 1, "high": 5}), u)
    assert 1 <= cut.min() <= cut.max() < 5
    assert np.median(cut) == pytest.approx(1 - 4 * np.log((1 + np.exp(-1)) / 2), rel=1e-3)


def test_zipf():
    """k is drawn in proportion to k ** -alpha, between its bounds."""
    counts = np.bincount(spread({"kind": "zipf", "alpha": 2, "low": 2, "high": 4}))
    shares = np.array([0, 0, 1 / 4, 1 / 9, 1 / 16])
    assert counts / 100_000 == pytest.approx(shares / shares.sum(), abs=1e-4)


def test_quantiles():
    """Between the given quantiles the lines are straight."""
    assert at({"kind": "quantiles", "values": [10, 20, 100]}, 0, 0.25, 0.5, 0.75) == [
        10,
        15,
        20,
        60,
    ]
    uneven = {"kind": "quantiles", "values": [10, 20, 100], "at": [0, 0.9, 1]}
    assert at(uneven, 0.45, 0.9, 0.95) == [15, 20, 60]


def test_empirical():
    """A trace's lengths come out in the trace's proportions."""
    lengths = np.array([5, 5, 5, 9])
    work = Workload(np.zeros(4), lengths, lengths + 100)
    kind = parse_lengths({"kind": "empirical", "path": "a.csv", "column": "output"})
    x = token_counts(kind, GRID, lambda path, form: work)
    assert np.unique(x, return_counts=True)[0].tolist() == [105, 109]
    assert np.count_nonzero(x == 105) == 75_000


def test_mixture():
    """Half of the requests short and half long: no length in between, each part as by itself."""
    short = {"weight": 2, "kind": "uniform", "low": 1, "high": 9}
    long = {"weight": 2.0, "kind": "uniform", "low": 500, "high": 504}
    x = spread(mix(short, long))
    assert np.count_nonzero(x < 10) == 50_000
    assert set(x.tolist()) == {*range(1, 10), *range(500, 505)}
    assert np.bincount(x)[500:].tolist() == [10_000] * 5


def test_mixture_of_mixtures():
    """A part may be a mixture itself; weights multiply."""
    inner = mix(
        {"weight": 1, "kind": "fixed", "value": 1}, {"weight": 3, "kind": "fixed", "value": 2}
    )
    x = spread(mix({"weight": 1} | inner, {"weight": 1, "kind": "fixed", "value": 3}))
    assert np.bincount(x).tolist() == [0, 12_500, 37_500, 50_000]


KINDS = st.one_of(
    st.builds(
        lambda a, b: {"kind": "uniform", "low": min(a, b), "high": max(a, b)},
        st.integers(1, 10**6),
        st.integers(1, 10**6),
    ),
    st.builds(
        lambda m, s, a, b: {
            "kind": "lognormal",
            "median": m,
            "sigma": s,
            "low": a,
            "high": a + b,
        },
        st.floats(10, 1000),
        st.floats(0.5, 3),
        st.integers(1, 50),
        st.integers(1000, 10**6),
    ),
    st.builds(
        lambda m, a, b: {"kind": "exponential", "mean": m, "low": a, "high": a + b},
        st.floats(0.1, 1000),
        st.integers(1, 100),
        st.integers(0, 10**6),
    ),
    st.builds(
        lambda alpha, a, b: {"kind": "zipf", "alpha": alpha, "low": a, "high": a + b},
        st.floats(0, 3),
        st.integers(1, 50),
        st.integers(0, 1000),
    ),
)


@given(KINDS, st.lists(st.floats(0, 1, exclude_max=True), min_size=1))
def test_bounds(spec, u):
    """No draw whatever lies outside the bounds, and lengths ascend with the probability."""
    drawn = at(spec, *sorted(u))
    assert min(drawn) >= spec["low"]
    assert max(drawn) <= spec["high"]
    assert drawn == sorted(drawn)


@given(KINDS, KINDS, st.floats(0, 1, exclude_max=True), st.floats(0.01, 100))
def test_mixture_bounds(one, other, u, weight):
    """A mixture yields nothing that none of its parts would."""
    drawn = at(mix({"weight": weight, **one}, {"weight": 1, **other}), u)[0]
    assert any(spec["low"] <= drawn <= spec["high"] for spec in (one, other))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "normal"}, "kind: 'normal' is unknown; there are fixed, uniform, exponential"),
        ({"low": 1, "high": 2}, "kind: is missing; there are fixed"),
        ({"kind": "uniform", "low": 1}, "high: is missing"),
        ({"kind": "uniform", "low": 1, "hi": 2, "high": 3}, "hi: unknown key"),
        ({"kind": "uniform", "low": "a", "high": 3}, "low: must be a number, not 'a'"),
        ({"kind": "uniform", "low": 4, "high": 3}, "low: 4 is more than high, 3"),
        ({"kind": "uniform", "low": -4, "high": 3}, "low: must be at least 0, not -4"),
        (
            {"kind": "uniform", "low": 4, "high": float("inf")},
            "high: must be less than inf, not inf",
        ),
        ({"kind": "uniform", "low": 0, "high": 3}, ": some lengths would be less than 1 token"),
        ({"kind": "fixed", "value": 0.4}, ": some lengths would be less than 1 token"),
        ({"kind": "lognormal", "sigma": 1}, "median: give either it or mean"),
        (
            {"kind": "lognormal", "sigma": 1, "mean": 1, "median": 1},
            "median: give either it or mean",
        ),
        ({"kind": "lognormal", "sigma": 0, "mean": 9}, "sigma: must be more than 0, not 0"),
        ({"kind": "lognormal", "sigma": 1, "mean": -9}, "mean: must be more than 0, not -9"),
        (
            {"kind": "lognormal", "sigma": 0.1, "median": 10, "low": 900},
            "low: the distribution is not between low and high",
        ),
        ({"kind": "exponential", "mean": 0}, "mean: must be more than 0, not 0"),
        (
            {"kind": "zipf", "alpha": 1, "high": 9.5},
            "high: must be a whole number such as 64, not 9.5",
        ),
        ({"kind": "zipf", "alpha": 1, "high": 9, "low": 0}, "low: must be at least 1, not 0"),
        (
            {"kind": "zipf", "alpha": 1, "high": 10**8},
            "high: must be at most 10000000, not 100000000",
        ),
        ({"kind": "quantiles", "values": [5]}, "values: must be 2 or more numbers"),
        ({"kind": "quantiles", "values": [5, 4]}, "values: must be 2 or more numbers"),
        ({"kind": "quantiles", "values": [5, "x"]}, "values.1: must be a number, not 'x'"),
        ({"kind": "quantiles", "values": [5, 6], "at": [0, 0.5, 1]}, "at: 3 of them for 2 values"),
        ({"kind": "quantiles", "values": [5, 6], "at": [0.1, 1]}, "at: must go from 0 to 1"),
        (
            {"kind": "empirical", "path": "a", "column": "inputs"},
            "column: must be 'input' or 'output', not 'inputs'",
        ),
        (mix(), "parts: must not be empty"),
        (mix(3), "parts.0: 3 is not a mapping"),
        (
            mix({"weight": 0, "kind": "fixed", "value": 1}),
            "parts.0.weight: 0 is not a number",
        ),
        (mix({"weight": 1, "kind": "fixed"}), "parts.0.value: is missing"),
        (mix({"weight": 1, "kind": "fixed", "value": 0}), ": some lengths would be less than 1"),
    ],
)
def test_refusals(spec, message):
    """What is wrong with a distribution is named by its key."""
    assert error(spec).startswith(message)


def test_absurd_lengths():
    """A distribution without an upper bound that runs away is refused, not cut."""
    kind = parse_lengths({"kind": "lognormal", "median": 100, "sigma": 9})
    with pytest.raises(ValueError, match="high: without it a length became"):
        token_counts(kind, GRID)


def test_empty_trace():
    """A trace without requests has no lengths to draw."""
    kind = parse_lengths({"kind": "empirical", "path": "a.csv", "column": "input"})
    empty = Workload(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
    with pytest.raises(ValueError, match=r"path: a\.csv has no requests"):
        token_counts(kind, GRID, lambda path, form: empty)


def test_pick():
    """An index without weight is never picked, not even at the ends of the probabilities."""
    weights = np.array([0.0, 1.0, 0.0, 3.0, 0.0])
    assert weighted_choice(weights, np.array([0, 0.2, 0.25, 0.99, 1 - 1e-16])).tolist() == [
        1,
        1,
        3,
        3,
        3,
    ]


def test_cycle():
    """The values in turn, whatever was drawn, and of its values the least is checked."""
    assert at({"kind": "cycle", "values": [5, 1, 9]}, 0.9, 0.1, 0.5, 0.2) == [5, 1, 9, 5]
    assert error({"kind": "cycle", "values": [5, 0]}) == ": some lengths would be less than 1 token"
    wrong = {
        "values: must not be empty": [],
        "values: must be a list, not 3": 3,
        "values.0: must be at least 0, not -1": [-1],
        "values.0: must be a number, not 'a'": ["a"],
    }
    for message, values in wrong.items():
        assert error({"kind": "cycle", "values": values}) == message
