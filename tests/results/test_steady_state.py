"""Warm-up and steady state."""

from dataclasses import replace
from math import inf, sqrt

import numpy as np
import pytest
from scipy.special import stdtr

from headway.report.text import run_table
from simulator.results.steady_state import Trend, linear_trend, mser5, t_test_p_value, trend_warning
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from tests.support.scenarios import SMALL

LOADED = SMALL.replace("num_prompts: 40", "num_prompts: 800")


@pytest.fixture
def steady(write):
    """A run of 800 requests, 20 a second, which the engine can serve."""
    return run(load_scenario(write(LOADED)))


def test_a_backlog_is_told(write):
    """At twice what the engine serves the queue grows by about the difference of the rates."""
    text = LOADED.replace("request_rate: 20", "request_rate: 300")
    result = run(load_scenario(write(text)))
    block = result.summary()["headway"]
    served = result.summary()["request_throughput"]
    assert block["stationary"] is False
    assert block["trend_per_s"] == pytest.approx(300 - served, rel=0.2)
    text = run_table(result.summary())
    assert "Not stationary: the number of requests in the system grows" in text


def test_a_light_load_is_steady(steady):
    """Where the queue is stable, nothing is said."""
    block = steady.summary()["headway"]
    assert block["stationary"] is True
    assert trend_warning(block) == ""
    assert block["suggested_warmup_s"] is not None


def test_a_run_shorter_than_a_request_is_not_overloaded(write):
    """All 200 that come in 20 s run at once, for 40 s: nobody waits, and none is over."""
    text = LOADED.replace("request_rate: 20", "request_rate: 10")
    slow = ["cost={kind: linear, base: 1}", "workload.output_len=40", "workload.num_prompts=200"]
    block = run(load_scenario(write(text), [*slow, "engine.max_num_seqs=256"])).summary()["headway"]
    assert (block["stationary"], block["served_by_last_arrival"]) == (False, 0.0)
    assert "Overloaded" not in trend_warning(block)
    assert "Overloaded" in trend_warning(block | {"served_by_last_arrival": 0.2})


def test_a_queue_that_grows_in_the_second_half_is_told_beside_one_that_fills_the_system() -> None:
    """A line through 250 requests that fill it in a quarter bends: its p value is 0.03."""
    fill = np.linspace(0, 250, 500)
    for growth, stationary in ((150, False), (20, True)):
        trend = Trend(2000)
        trend.add(
            np.arange(2000.0),
            np.concatenate([fill, 250 + np.linspace(0, growth, 1500)]).astype(int),
        )
        found = trend.test()
        assert found["trend_p_value"] > 0.01
        assert found["stationary"] is stationary


def test_few_requests_tell_nothing(write):
    """Under a hundred requests the test abstains."""
    block = run(load_scenario(write(SMALL))).summary()["headway"]
    assert (block["stationary"], block["trend_p_value"]) == (None, None)


def batch_means(values: np.ndarray) -> np.ndarray:
    trend = Trend(len(values))
    trend.add(np.arange(len(values)), values)
    return trend.means


def test_seldom_a_false_alarm():
    """Correlated but stationary series (AR(1)) are called unsteady in few per cent of cases."""
    draw = np.random.default_rng(3)
    alarms = 0
    for _ in range(300):
        noise = draw.normal(size=2000)
        values = np.empty(2000)
        level = 0.0
        for k, kick in enumerate(noise):
            level = 0.97 * level + kick
            values[k] = level
        alarms += linear_trend(batch_means(values))[1] < 0.01
    assert alarms <= 9


def test_trend_by_hand():
    """A line from 0 to 99 is one; noise that alternates around a level is none."""
    assert linear_trend(batch_means(np.arange(100.0))) == (pytest.approx(100.0), 0.0)
    assert linear_trend(batch_means(np.ones(100))) == (0.0, 1.0)
    change, p = linear_trend(batch_means(np.tile([1.0, 3.0], 10)))
    # Slope 10 / 665 a batch; the squares left, 20 - 100 / 665, over 18 and 665.
    assert change == pytest.approx(20 * 10 / 665)
    assert p == pytest.approx(stdtr(18, -change / 20 / sqrt((20 - 100 / 665) / 18 / 665)) * 2)


@pytest.mark.parametrize("score", [0.0, 0.5, -2.0, 4.0, 9.0])
@pytest.mark.parametrize("freedom", [2.0, 5.3, 18.0])
def test_students_p_value(score, freedom):
    """As scipy has it."""
    expected = 2 * stdtr(freedom, -abs(score))
    assert t_test_p_value(score, freedom) == pytest.approx(expected, rel=1e-10, abs=1e-300)


def test_mser5_leaves_out_the_start():
    """Ten values of 100 before ninety around 0: the best mean leaves out just these ten."""
    values = np.concatenate([np.full(10, 100.0), np.tile([1.0, -1.0], 45)])
    assert mser5(values) == 10
    assert mser5(np.arange(100.0)) is None
    assert mser5(np.ones(20)) is None


def test_warmup_and_cooldown_by_hand(steady):
    """Latencies are of the requests sent between them, throughput of those that ended there."""
    whole = steady.summary()
    table = steady.requests
    steady._summary, steady.warmup, steady.cooldown = None, 5.0, 10.0
    begin, end = table.arrival, table.arrival + table.e2el
    low, high = begin.min() + 5.0, begin.max() - 10.0
    cut = steady.summary()
    sent, ended = table[(begin >= low) & (begin <= high)], table[(end >= low) & (end <= high)]
    assert 0 < len(sent) < len(table)
    assert cut["duration"] == pytest.approx(high - low)
    assert cut["completed"] == len(ended)
    assert cut["request_throughput"] == pytest.approx(len(ended) / (high - low))
    assert cut["mean_ttft_ms"] == pytest.approx(1000 * sent.ttft.mean(), abs=1e-3)
    assert cut["mean_itl_ms"] != whole["mean_itl_ms"]
    assert (cut["headway"]["warmup_s"], cut["headway"]["cooldown_s"]) == (5.0, 10.0)
    assert whole["headway"]["steps"] == cut["headway"]["steps"]


def test_nothing_left_is_an_error(steady):
    """A warm-up longer than the run leaves nothing to measure."""
    steady.warmup = 1e6
    with pytest.raises(HeadwayError, match="none is left to measure"):
        steady.summary()


def test_waiting_clients_are_no_backlog(write):
    """In a closed loop the requests behind max_concurrency wait by intent."""
    text = LOADED.replace("request_rate: 20", "max_concurrency: 4")
    assert run(load_scenario(write(text))).summary()["headway"]["stationary"] is True
    assert replace(make_workload(load_scenario(write(text)))).request_rate == inf
