"""Arrival processes: the gaps of `vllm bench serve`, ramps, and a load that swings."""

from math import inf

import numpy as np
import pytest

from simulator.workload import arrivals
from simulator.workload.arrivals import Diurnal
from tests.support.workloads import generate
from tests.support.workloads import generator_errors as errors


def gaps(**spec) -> np.ndarray:
    """The gaps between arrivals, the one before the first request included."""
    return np.diff(generate({"num_prompts": 100_000, **spec}).arrival, prepend=0.0)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_rescaled(seed, burstiness):
    """The last of n requests comes at n / rate, whatever was drawn, and the first not at 0."""
    spec = {"num_prompts": 50, "request_rate": 4, "burstiness": burstiness}
    w = generate(spec, seed)
    assert w.arrival[-1] == pytest.approx(12.5, rel=1e-12)
    assert w.arrival[0] > 0


def test_not_rescaled():
    """Without `rescale` the same draws are left as they fell."""
    spec = {"num_prompts": 50, "request_rate": 4}
    drawn, stretched = generate(spec | {"rescale": False}), generate(spec)
    assert drawn.arrival[-1] != pytest.approx(12.5, rel=1e-3)
    assert drawn.arrival * (12.5 / drawn.arrival[-1]) == pytest.approx(stretched.arrival)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness(burstiness):
    """Gaps have the mean 1 / rate and the coefficient of variation 1 / sqrt(burstiness)."""
    g = gaps(request_rate=20.0, burstiness=burstiness, rescale=False)
    assert g.mean() == pytest.approx(0.05, rel=0.02)
    assert g.std() / g.mean() == pytest.approx(burstiness**-0.5, rel=0.02)


def test_gaps_are_gamma():
    """The gaps follow Gamma(shape=burstiness, scale=1 / (rate * burstiness)), not just its CV."""
    from scipy.stats import gamma, kstest

    g = gaps(request_rate=20.0, burstiness=0.5, rescale=False)
    assert kstest(g, gamma(0.5, scale=0.1).cdf).pvalue > 0.01


def test_even_gaps():
    """An infinite burstiness makes all gaps 1 / rate."""
    assert gaps(request_rate=4.0, burstiness=inf, num_prompts=8).tolist() == [0.25] * 8


def test_linear_ramp():
    """Request i of n comes after a gap of 1 / rate_i; the last has the end's rate; no rescaling."""
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 3}
    g = gaps(num_prompts=5, burstiness=inf, **ramp)
    assert g == pytest.approx([1, 1 / 1.5, 1 / 2, 1 / 2.5, 1 / 3])


def test_exponential_ramp():
    """The exponential ramp multiplies the rate by the same factor from request to request."""
    ramp = {"ramp_up_strategy": "exponential", "ramp_up_start_rps": 1, "ramp_up_end_rps": 16}
    assert gaps(num_prompts=5, burstiness=inf, **ramp) == pytest.approx(
        [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
    )


@pytest.mark.medium
def test_random_ramp():
    """A ramp scales random gaps: at twice the rate they are half as long."""
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 10, "ramp_up_end_rps": 30}
    g = gaps(**ramp)
    assert g[:1000].mean() / g[-1000:].mean() == pytest.approx(3, rel=0.2)
    plain = gaps(request_rate=10.0, rescale=False)
    rate = np.linspace(10, 30, 100_000)
    assert g == pytest.approx(plain * 10 / rate)


def test_one_request():
    """A single request comes at 1 / rate, also on a ramp."""
    assert generate({"num_prompts": 1, "request_rate": 2}).arrival.tolist() == [0.5]
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 4, "ramp_up_end_rps": 8}
    w = generate({"num_prompts": 1, "burstiness": inf} | ramp)
    assert w.arrival.tolist() == [0.25]


def test_ramp_refusals():
    """A ramp is refused as vLLM refuses it: with a rate, downwards, or from nothing."""
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 2, "ramp_up_end_rps": 4}
    assert errors(**ramp | {"request_rate": 5}) == [
        "request_rate: cannot be given with ramp_up_strategy"
    ]
    assert errors(**ramp | {"ramp_up_end_rps": 1}) == [
        "ramp_up_end_rps: 1 is less than ramp_up_start_rps, 2"
    ]
    assert errors(**ramp | {"ramp_up_start_rps": 0}) == [
        "ramp_up_start_rps: must be more than 0, not 0"
    ]
    assert errors(**ramp | {"ramp_up_strategy": "up"}) == [
        "ramp_up_strategy: must be 'linear' or 'exponential', not 'up'"
    ]


def test_a_diurnal_load_swings_about_its_mean():
    """Quarters of a period have 1 - A 2/pi and 1 + A 2/pi of the mean, the whole has all of it."""
    spec = {"num_prompts": 40_000, "request_rate": 10, "burstiness": inf}
    times = generate(spec | {"diurnal": {"period": 1000, "amplitude": 0.8}}).arrival
    assert (np.diff(times) >= 0).all()
    counts = np.histogram(times, [0, 250, 500, 750, 1000])[0] / 2500
    swing = 0.8 * 2 / np.pi
    assert counts == pytest.approx([1 - swing, 1 + swing, 1 + swing, 1 - swing], abs=0.002)
    assert times[-1] == pytest.approx(4000, abs=1)
    flat = generate(spec | {"diurnal": {"period": 1000, "amplitude": 0.0}}).arrival
    assert flat.tolist() == generate(spec).arrival.tolist()


def test_a_diurnal_load_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"diurnal\.amplitude: must be at most 1, not 2"):
        generate({"request_rate": 1, "diurnal": {"amplitude": 2}})


def test_a_diurnal_load_follows_its_rates():
    """Hours of 1, 3 and 0 and 4 share the mean's requests out so, day after day."""
    spec = {"num_prompts": 16_000, "request_rate": 2, "burstiness": inf}
    curve = {"period": 4000, "rates": [1, 3, 0, 4]}
    times = generate(spec | {"diurnal": curve}).arrival
    assert (np.diff(times) >= 0).all()
    counts = np.histogram(times, np.arange(9) * 1000)[0]
    assert counts == pytest.approx([1000, 3000, 0, 4000] * 2, abs=1)
    assert Diurnal(rates=[1, 3, 0, 4]).peak == 2.0
    assert Diurnal().peak == 1.5


@pytest.mark.parametrize("rates", [[], [0, 0], [1, -1], [1, inf], 5, "x", [1, None], {"a": 1}])
def test_a_diurnal_load_refuses_rates_that_cannot_be(rates):
    with pytest.raises(ValueError, match=r"diurnal\.rates(\.1)?: must "):
        generate({"request_rate": 1, "diurnal": {"rates": rates}})


def test_a_diurnal_load_has_one_curve():
    with pytest.raises(ValueError, match=r"diurnal\.rates: cannot be used with amplitude"):
        generate({"request_rate": 1, "diurnal": {"rates": [1, 2], "amplitude": 0.5}})
    both = {"rates": [1, 2], "amplitude": None}
    times = [
        generate({"request_rate": 1, "diurnal": one}).arrival for one in (both, {"rates": [1, 2]})
    ]
    assert times[0].tolist() == times[1].tolist()


def test_a_load_of_many_periods_swings_as_one_of_few(monkeypatch):
    """Beyond MOST_PERIODS the table is that of a single period."""
    times = np.sort(np.random.default_rng(3).uniform(0, 50, 200))
    diurnal = Diurnal(period=1.0, amplitude=0.9)
    whole = diurnal.warp(times, 50.0)
    monkeypatch.setattr(arrivals, "MOST_PERIODS", 10)
    assert np.allclose(diurnal.warp(times, 50.0), whole, rtol=0, atol=1e-7)
    assert np.all(np.diff(diurnal.warp(np.arange(1e5), 1e5)) > 0)
