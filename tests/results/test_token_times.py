"""The pooled inter-token gaps against the list that they stand for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.log import Log
from simulator.results.token_times import SLICE, GapDistribution, TokenTimes
from tests.support.logs import TICK, LoggedRun, add_run, logged_runs


def pool_of(story: LoggedRun) -> GapDistribution:
    completed = np.array([r.completed for r in story.requests], bool)
    return GapDistribution([TokenTimes(log, completed) for log in story.logs])


def listed(story: LoggedRun) -> np.ndarray:
    gaps = [np.diff(r.tokens) for r in story.requests if r.completed]
    return np.concatenate(gaps) if gaps else np.empty(0)


@pytest.mark.parametrize("slice_", [1, 3, SLICE])
@given(logged_runs())
def test_the_pool_is_the_list(slice_: int, story: LoggedRun) -> None:
    """Count, mean, deviation and every percentile equal numpy's on the listed gaps.

    So they do however many gaps are looked at together.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simulator.results.token_times.SLICE", slice_)
        _check_pool(story)


def _check_pool(story: LoggedRun) -> None:
    pool, gaps = pool_of(story), listed(story)
    wanted = [0.0, 12.5, 50.0, 90.0, 99.9, 100.0]
    assert pool.count == len(gaps)
    assert pool.mean == pytest.approx(gaps.mean() if len(gaps) else 0.0, rel=1e-12)
    assert pool.std == pytest.approx(gaps.std() if len(gaps) else 0.0, rel=1e-9, abs=1e-12)
    expected = np.percentile(gaps, wanted).tolist() if len(gaps) else [0.0] * 6
    assert pool.percentiles(wanted) == expected


@given(logged_runs(), st.integers(0, 100))
def test_tokens_per_second_are_counted(story: LoggedRun, offset: int) -> None:
    """Each token of a completed request falls into its one-second bucket."""
    completed = np.array([r.completed for r in story.requests], bool)
    for number, log in enumerate(story.logs):
        tokens = [
            t for r in story.requests if r.completed and r.replica == number for t in r.tokens
        ]
        start = min(tokens, default=0.0) - offset * TICK
        seconds = int(max(tokens, default=0.0) - start) + 1
        expected = [0] * seconds
        for token in tokens:
            expected[int(token - start)] += 1
        assert TokenTimes(log, completed).per_second(start, seconds).tolist() == expected


def test_one_long_gap_does_not_blur_the_short_ones() -> None:
    """Milliseconds are told apart beside a gap of weeks."""
    log = Log(10, 16)
    ends = np.cumsum(np.random.default_rng(0).uniform(0.008, 0.05, 50_000))
    log.tick_ends.extend(ends.tolist())
    log.tick_ends.append(ends[-1] + 1e6)
    add_run(log, 0, 0.0, 0, len(log.tick_ends))
    pool = GapDistribution([TokenTimes(log, np.array([True]))])
    gaps = np.diff([0.0, *log.tick_ends])
    wanted = [1.0, 50.0, 99.0, 99.99, 100.0]
    assert pool.percentiles(wanted) == np.percentile(gaps, wanted).tolist()


def test_equal_gaps() -> None:
    """A constant step time is every percentile, without a division by its zero spread."""
    log = Log(10, 16)
    log.tick_ends.extend([TICK * i for i in range(1, 9)])
    for number in range(3):
        add_run(log, number, 0.0, 0, 8)
    pool = GapDistribution([TokenTimes(log, np.ones(3, bool))])
    assert (pool.count, pool.mean, pool.std) == (24, TICK, 0.0)
    assert pool.percentiles([0.0, 50.0, 100.0]) == [TICK] * 3


def test_no_time_at_all_between_tokens() -> None:
    """Gaps of zero, as a cost of zero makes them, are gaps."""
    log = Log(10, 16)
    log.tick_ends.extend([1.0, 1.0, 2.0])
    add_run(log, 0, 1.0, 0, 3)
    pool = GapDistribution([TokenTimes(log, np.array([True]))])
    assert (pool.count, pool.mean) == (3, pytest.approx(1 / 3))
    assert pool.percentiles([0.0, 50.0, 100.0]) == [0.0, 0.0, 1.0]


def test_preemption_gap() -> None:
    """A preempted request's gap reaches from its last token to the one after recomputation."""
    log = Log(10, 16)
    log.tick_ends.extend([2.0, 3.0, 4.0, 9.0])
    add_run(log, 0, 1.0, 0, 1)  # tokens at 1, 2; then preempted
    add_run(log, 0, 7.0, 3, 1)  # tokens at 7, 9
    pool = GapDistribution([TokenTimes(log, np.array([True]))])
    assert pool.count == 3
    assert pool.percentiles([0.0, 50.0, 100.0]) == [1.0, 2.0, 5.0]
