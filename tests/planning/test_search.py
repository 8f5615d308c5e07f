"""Searches: the largest rate and the fewest replicas, by functions in place of runs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.planning.search import (
    Criteria,
    Search,
    SearchResult,
    Trial,
    bounds_kept,
    fewest,
    interval,
    largest_rate,
    not_monotone,
)
from simulator.planning.service_levels import parse_slo

SLO = parse_slo("p99_ttft_ms<=100")


def play(search: Search, measure) -> SearchResult:
    """Answer a search's wishes by a function of place and replication."""
    wishes = next(search)
    while True:
        try:
            wishes = search.send([{"p99_ttft_ms": measure(at, k)} for at, k in wishes])
        except StopIteration as end:
            return end.value


@given(st.floats(0.02, 300.0), st.floats(0.5, 5.0))
def test_the_largest_rate_is_found_within_the_tolerance(limit: float, start: float):
    found = play(largest_rate(start, Criteria([SLO])), lambda at, _: 50.0 if at <= limit else 200.0)
    assert found.best is not None
    assert limit / 1.02 <= found.best.at <= limit
    low, high = found.between
    assert low == found.best.at
    assert limit < high <= 1.021 * low


@given(st.integers(1, 64))
def test_the_fewest_is_exact_and_the_place_below_was_seen_to_fail(least: int):
    found = play(fewest(1, 64, Criteria([SLO])), lambda at, _: 50.0 if at >= least else 200.0)
    assert found.best is not None
    assert found.best.at == least
    assert least == 1 or any(t.at == least - 1 and not t.ok for t in found.trials)
    assert len(found.trials) <= 13  # doubling and bisection, not one by one


def test_a_search_without_an_end_gives_up():
    always = play(largest_rate(1.0, Criteria([SLO])), lambda *_: 50.0)
    assert always.best is not None
    assert always.best.at == 2.0**10
    never = play(largest_rate(1.0, Criteria([SLO])), lambda *_: 200.0)
    assert never.best is None
    assert min(trial.at for trial in never.trials) == 2.0**-10
    assert play(fewest(1, 5, Criteria([SLO])), lambda *_: 200.0).best is None


def test_replications_are_added_until_the_interval_tells():
    noise = random.Random(1)

    def noisy(at: float, _: int) -> float:
        return 90.0 * at + noise.gauss(0, 8)

    found = play(largest_rate(1.0, Criteria([SLO], replications=3, most_replications=12)), noisy)
    counts = {len(trial.runs) for trial in found.trials}
    assert 3 in counts  # far from the bound three are enough
    assert 12 in counts  # near to it they are not
    assert all(3 <= count <= 12 for count in counts)
    assert found.best is not None
    assert found.best.at == pytest.approx(100 / 90, rel=0.06)


def test_the_interval_is_students():
    runs = [{"x": value} for value in (1.0, 2.0, 3.0)]
    found = interval(runs, "x", 0.95)
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(
        4.302652729911275 / 3**0.5
    )  # t(0.975, 2) * 1 / sqrt(3)
    assert interval(runs[:1] * 4, "x").half_width == 0.0


def test_the_verdict_is_open_while_the_interval_holds_the_bound():
    criteria = Criteria([SLO])

    def told(*values: float) -> bool | None:
        return bounds_kept([{"p99_ttft_ms": value} for value in values], criteria)

    assert told(50, 51, 52) is True
    assert told(150, 151, 152) is False
    assert told(60, 90, 120) is None
    assert told(99) is True  # a single run has no interval


def test_more_that_is_worse_is_told():
    one, two = Trial(1, ok=True), Trial(2, ok=False)
    assert not_monotone([one, two], rising=True) == [(one, two)]
    assert not_monotone([one, two], rising=False) == []
    two.sure = False
    assert not_monotone([one, two], rising=True) == []
