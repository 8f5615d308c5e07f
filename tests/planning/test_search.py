"""Searches: the largest rate and the fewest replicas, by functions in place of runs."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.planning.search import (
    PlannedRun,
    Search,
    SearchResult,
    as_configured,
    capacity_ends,
    fewest,
    largest_rate,
    not_monotone,
)
from headway.planning.verdict import LEVELS, WARMING_UP, Criteria, Trial, interval, judge
from simulator.results.service_levels import parse_slo

SLO = parse_slo("p99_ttft_ms<=100")


def play(search: Search, measure) -> SearchResult:
    """Answer a search's wishes by a function of the run that it wants."""
    wishes = next(search)
    while True:
        try:
            wishes = search.send([measure(wanted) for wanted in wishes])
        except StopIteration as end:
            return end.value


def below(limit: float):
    return lambda wanted: {"p99_ttft_ms": 50.0 if wanted.at <= limit else 200.0}


@given(st.floats(0.02, 300.0), st.floats(0.5, 5.0))
def test_the_largest_rate_is_found_within_the_tolerance(limit: float, start: float):
    found = play(largest_rate(start, Criteria([SLO])), below(limit))
    assert found.best is not None
    assert limit / 1.05 <= found.best.at <= limit
    assert min(t.at for t in found.trials if not t.ok) <= 1.051 * found.best.at


@given(st.integers(1, 64), st.integers(1, 64))
def test_the_fewest_is_exact_and_the_place_below_was_seen_to_fail(least: int, start: int):
    found = play(
        fewest(1, 64, Criteria([SLO]), start=start),
        lambda wanted: {"p99_ttft_ms": 50.0 if wanted.at >= least else 200.0},
    )
    assert found.best is not None
    assert found.best.at == least
    assert least == 1 or any(t.at == least - 1 and not t.ok for t in found.trials)
    assert len(found.trials) <= 13  # steps and bisection, not one by one


def test_a_search_without_an_end_gives_up():
    always = play(largest_rate(1.0, Criteria([SLO])), below(1e300))
    assert always.best is not None
    assert len(always.trials) == 9
    assert always.best.at > 1e3
    never = play(largest_rate(1.0, Criteria([SLO])), below(0.0))
    assert never.best is None
    assert min(trial.at for trial in never.trials) < 1e-3
    assert play(fewest(1, 5, Criteria([SLO])), lambda _: {"p99_ttft_ms": 200.0}).best is None


def test_replications_are_added_until_the_interval_tells():
    """Of whole numbers; of rates the interval is told, and one more run would not decide."""
    noise = random.Random(1)

    def noisy(wanted: PlannedRun) -> dict[str, float]:
        return {"p99_ttft_ms": 900.0 / wanted.at + noise.gauss(0, 8)}

    criteria = Criteria([SLO], replications=3, most_replications=12)
    found = play(fewest(1, 32, criteria), noisy)
    assert found.best is not None
    assert found.best.at in (9, 10)
    counts = {t.at: len(t.runs) for t in found.trials}
    assert counts[1] == 3  # far from the bound three are enough
    assert max(counts.values()) == 12  # near to it they are not


def share(value: float, seconds: float | None, rate: float = 20.0, **more) -> dict[str, object]:
    """A run whose share of requests above the bound is the same in every batch."""
    count = int((seconds or 600.0) * rate)
    return {
        "p99_ttft_ms": 0.0,
        "p99_e2el_ms": 1000.0,
        "num_prompts": count,
        "measured": count,
        "batches": {SLO.text: [value] * 10},
        **more,
    }


STEADY = Criteria([SLO], min_seconds=600.0, max_seconds=2400.0)


def test_the_answer_and_its_neighbour_are_looked_at_for_twice_as_long():
    """A single run of 5 minutes for each place on the way; 10 minutes for the two that matter.

    That it holds takes three runs.
    """
    found = play(
        fewest(1, 64, STEADY, start=20),
        lambda wanted: share(0.0 if wanted.at >= 17 else 0.5, wanted.seconds),
    )
    assert found.best is not None
    assert (found.best.at, found.best.seconds, len(found.best.runs)) == (17, 600.0, 3)
    seconds = {t.at: t.seconds for t in found.trials if not t.superseded}
    assert seconds[16] == 600.0
    assert {length for at, length in seconds.items() if at not in (16, 17)} == {300.0}


def test_what_holds_for_five_minutes_and_not_for_ten_does_not_hold():
    """Three fill up after 400 s: the next places are looked at for as long as that took."""

    def slow(wanted: PlannedRun) -> dict[str, object]:
        holds = wanted.at >= 4 or (wanted.at == 3 and wanted.seconds < 400)
        return share(0.0 if holds else 0.5, wanted.seconds)

    found = play(fewest(1, 8, STEADY, start=3), slow)
    assert found.best is not None
    assert (found.best.at, found.best.seconds) == (4, 600.0)


def test_further_runs_leave_out_what_earlier_ones_found():
    """What a run finds in itself depends on where its own worst minutes are."""
    wishes: list[PlannedRun] = []

    def found(wanted: PlannedRun) -> dict[str, object]:
        wishes.append(wanted)
        warmup = {300.0: 90.0}.get(wanted.seconds, 30.0 * wanted.replication)
        return share(0.0, wanted.seconds, found_warmup_s=warmup)

    play(as_configured(STEADY), found)
    assert [(w.seconds, w.replication, w.warmup) for w in wishes] == [
        (300.0, 0, None),
        (600.0, 0, 90.0),  # of the short look
        (600.0, 1, 0.0),  # of the run before
        (600.0, 2, 0.0),
    ]


def test_a_quick_look_that_did_not_get_warm_follows_its_mean():
    """Else it would lead the search away from rates that longer runs hold."""

    def measured(wanted: PlannedRun) -> dict[str, object]:
        cold = wanted.seconds < 600.0
        value = 0.0 if wanted.at <= 2.0 else 0.5
        return share(value, wanted.seconds, growing=WARMING_UP if cold else "")

    found = play(largest_rate(1.0, STEADY), measured)
    assert found.best is not None
    assert 2.0 / 1.05 <= found.best.at <= 2.0
    never = play(largest_rate(1.0, STEADY), lambda w: share(0.0, w.seconds, growing=WARMING_UP))
    assert never.best is None  # what no run gets warm at does not hold


def test_the_largest_rate_is_one_that_long_runs_surely_hold():
    """At 1 request/s they are 2 % below the bound on average, with 95 % at most 5 % above it."""

    def measured(wanted: PlannedRun) -> dict[str, object]:
        assert wanted.seconds is not None
        noise = (0.0, 4.0, -4.0)[wanted.replication % 3] if wanted.seconds > 600.0 else 0.0
        value = 98.0 * wanted.at + noise
        return {"p99_ttft_ms": value, "p99_e2el_ms": 1.0, "num_prompts": 10_000}

    found = play(largest_rate(1.0, STEADY), measured).best
    assert found is not None
    assert found.seconds == 2400.0
    # Of three runs that are 4 apart the 95 % reach 6.7 to one side.
    assert found.at < (100.0 - 6.7) / 98.0


def test_what_grows_is_looked_at_ever_longer_and_never_holds():
    found = play(as_configured(STEADY), lambda w: share(0.0, w.seconds, growing="KV cache usage"))
    assert found.best is None
    assert [trial.seconds for trial in found.trials] == [300.0, 600.0, 1200.0, 2400.0]
    last = found.trials[-1]
    assert found.beyond is last
    assert (last.breaks, last.reason) == ("", "KV cache usage")  # no bound is broken
    assert last.cut_short  # 2,400 s are the most


def test_a_run_is_as_long_as_twenty_of_its_requests_and_its_percentile_need():
    """20 x 50 s; 20 requests beyond the P99 of 1 request/s take 2000 s."""
    found = play(as_configured(STEADY), lambda w: share(0.0, w.seconds, p99_e2el_ms=50_000.0))
    assert found.best is not None
    assert found.best.seconds == 1000.0
    found = play(as_configured(STEADY), lambda w: share(0.0, w.seconds, rate=1.0))
    assert found.best is not None
    assert found.best.seconds == pytest.approx(2000.0)


def test_none_of_few_requests_shows_little():
    """Of 120 requests without a violation up to 3 / 120 may be: no P99 is known by that."""
    few = judge([share(0.0, 600.0, rate=0.2)], STEADY)
    assert (few.kept, few.mean_kept) == (None, True)
    assert judge([share(0.0, 600.0)], STEADY).kept is True


def test_a_run_that_was_broken_off_decides_against():
    broken = {"p99_ttft_ms": 500.0, "broken": "p99_ttft_ms", "growing": ""}
    assert judge([broken], STEADY).kept is False
    for others in (1, 2):  # half of all are not the most
        assert judge([broken, *[share(0.0, 600.0)] * others], STEADY).kept is None


def test_the_capacity_is_where_the_curves_cross_the_bound():
    """Over the logarithm of the load, a quarter of the way from 1 to 4, and half from 4 to 16."""
    places = [
        Trial(1.0, strain=(-3.0, -1.0, -1.0)),
        Trial(4.0, strain=(-1.0, 1.0, 3.0)),
        Trial(16.0, strain=(1.0, 3.0, 5.0)),
    ]
    low, high = capacity_ends(places)
    assert low == pytest.approx(4.0**0.25)
    assert high == pytest.approx(8.0)
    assert capacity_ends(places[:2])[1] is None


def test_a_place_breaks_a_bound_by_its_mean() -> None:
    """Where the interval reaches beyond it alone, something that grows is the reason."""
    place = Trial(1.0, strain=(-0.2, -0.1, 0.1), why="p99_ttft_ms", growing="the queue grows")
    assert (place.breaks, place.reason) == ("", "the queue grows")
    place.strain = (-0.1, 0.1, 0.2)
    assert (place.breaks, place.reason) == ("p99_ttft_ms", "p99_ttft_ms")


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
        return judge([{"p99_ttft_ms": value} for value in values], criteria).kept

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


@pytest.mark.parametrize(("requests", "looks"), [(12_000, 1), (2_000, 1), (1_999, 2)])
def test_what_is_lost_by_far_is_looked_at_once(requests: int, looks: int):
    """Five times the hundredth that P99 allows, of 12,000, are 600 requests: that is no chance."""

    def lose(wanted: PlannedRun):
        run = {"p99_ttft_ms": 900.0, "completion": 1.0, "p99_e2el_ms": 900.0}
        return {**run, "broken": "p99_ttft_ms", "growing": "", "num_prompts": requests}

    found = play(as_configured(Criteria([SLO], min_seconds=600, max_seconds=600)), lose)
    assert found.best is None
    assert len(found.trials) == looks


def test_one_request_that_is_lost_breaks_what_allows_none():
    """`completion>=1`: a share of 0 has no relative measure, and yet 1 % lost is not kept."""
    criteria = Criteria([parse_slo("completion>=1")])
    for lost, kept in ((0.0, True), (0.01, False)):
        run = {"batches": {"completion>=1": [0.0] * 9 + [lost]}, "measured": 1000}
        assert judge([run], criteria).kept is kept
    told = {"broken": "completion", "growing": ""}
    run = {"batches": {"completion>=1": [0.0] * 10}, "measured": 1000}
    assert judge([told, run, run, run], criteria).kept is False  # no further run takes it back


def test_what_breaks_is_told_of_the_place_next_to_the_answer():
    """Far beyond it TTFT is worst, next to it TPOT."""
    ttft, tpot = parse_slo("p99_ttft_ms<=100"), parse_slo("p99_tpot_ms<=50")

    def measured(wanted: PlannedRun) -> dict[str, float]:
        return {
            "p99_ttft_ms": 10.0 if wanted.at < 1.3 else 10_000.0,
            "p99_tpot_ms": 50.0 * wanted.at**0.5,
        }

    found = play(largest_rate(0.5, Criteria([ttft, tpot])), measured)
    assert found.beyond is not None
    assert 1.0 < found.beyond.at < 1.06
    assert found.beyond.breaks == found.beyond.reason == "p99_tpot_ms"
    assert not found.beyond.cut_short  # there is nothing to be longer


def test_what_intervals_cannot_tell_is_too_close_where_certainty_is_asked_for():
    """Of a fleet it is no broken bound, whatever the mean says; of a rate the mean decides."""

    def measured(wanted: PlannedRun) -> dict[str, float]:
        return {"p99_ttft_ms": 110.0 if wanted.replication % 3 else 90.0}

    criteria = Criteria([SLO], most_replications=6)
    fleet = play(fewest(1, 1, criteria), measured).beyond
    assert fleet is not None
    assert not fleet.sure
    assert (fleet.breaks, fleet.reason) == ("", "p99_ttft_ms too close to tell")
    rate = play(largest_rate(1.0, criteria), measured).beyond
    assert rate is not None
    assert not rate.sure
    assert rate.breaks == "p99_ttft_ms"


def test_the_nearest_bound_has_the_largest_value_over_its_limit():
    slos = [SLO, parse_slo("p99_tpot_ms<=60"), parse_slo("completion>=1")]
    trial = Trial(6.0, runs=[{"p99_ttft_ms": 30.8, "p99_tpot_ms": 34.8, "completion": 1.0}])
    assert trial.ratios(slos) == pytest.approx({"p99_ttft_ms": 0.308, "p99_tpot_ms": 0.58})


@pytest.mark.parametrize("kept", [True, False])
def test_a_percentile_of_several_runs_is_that_of_all_their_requests(kept: bool) -> None:
    """Not the mean of their percentiles; and on that side of the bound where it is judged."""
    samples = [np.linspace(0, 200, 5000), np.linspace(0, 1000, 5000)]
    exact = float(np.percentile(np.concatenate(samples), 99))
    slo = parse_slo(f"p99_ttft_ms<={exact * (1.01 if kept else 0.99):.0f}")
    runs = [
        {
            "measured": 5000,
            "batches": {slo.text: [float((values > slo.bound).mean())]},
            "quantiles": {slo.text: np.quantile(values, LEVELS).tolist()},
            "p99_ttft_ms": float(np.percentile(values, 99)),
        }
        for values in samples
    ]
    trial = Trial(1.0, runs=runs)
    assert trial.value(slo) == pytest.approx(exact, rel=0.01)
    assert slo.met(trial.value(slo)) == kept
    assert interval(runs, slo.metric).mean < 0.7 * exact
    del runs[0]["quantiles"], runs[1]["quantiles"]
    assert trial.value(slo) == interval(runs, slo.metric).mean
