"""Which order to buy comes first."""

from types import SimpleNamespace
from typing import cast

import pytest

from headway.planning.buy import _confirm, orders
from headway.planning.buy_report import _dropped
from headway.planning.market import Market, Offer, by_headroom
from headway.planning.search import SearchResult
from headway.planning.verdict import Trial
from simulator.results.service_levels import parse_slo

SLO = parse_slo("p99_ttft_ms<=100")


def test_within_two_percent_of_the_price_headroom_decides() -> None:
    """The order of each is judged by its first; those of one order stay as they were."""

    def order(name: str, cost: float, nearness: float) -> Offer:
        return cast("Offer", SimpleNamespace(order=name, cost=cost, nearness=nearness))

    offers = [order("2 x A100", 6.86, 0.98), order("2 x A100", 6.86, 0.1)]
    offers += [order("1 x H100", 6.88, 0.4), order("L4", 7.0, 0.01)]
    assert [by_headroom(offers).index(one) for one in offers] == [1, 2, 0, 3]


def test_what_was_dropped_is_what_no_run_was_made_of() -> None:
    """An order that ran short and is dearer than what holds is another line's: it was run."""
    dear = "costs $9.00/h at least; 3 that cost less are enough"
    ran = SearchResult(None, [Trial(1.0)])
    offers = [
        Offer({}, gpu="A", not_tried=dear, result=ran),
        Offer({}, gpu="B", not_tried=dear),
        Offer({}, gpu="C"),
        Offer({}, gpu="D", never="takes 40 GB of weights; its log would say so"),
    ]
    assert [*_dropped(offers)] == [
        f"  not run: {offers[1].label}: {dear}",
        f"  not run: {offers[3].label}: takes 40 GB of weights",
    ]


@pytest.mark.parametrize("held", [True, False])
def test_of_variants_the_best_that_holds_is_listed_beside_the_order(
    monkeypatch, held: bool
) -> None:
    """Two settings of a router hold with 3 replicas in place of 4: the one with more room."""

    def variant(strain: float) -> Offer:
        trial = Trial(3.0, runs=[{"p99_ttft_ms": 100.0 * strain}])
        found = SearchResult(trial if held else None, [trial])
        return Offer({"router": f"{strain}"}, result=found, gpu="A", price=1.0, slos=[SLO])

    best = Offer({"best": "x"}, result=SearchResult(Trial(4.0), []), gpu="A", price=1.0)
    variants = [variant(0.9), variant(0.5)]
    monkeypatch.setattr("headway.planning.market.search_all", lambda *_: None)
    market = SimpleNamespace(
        cache_off="",
        quick=lambda: None,
        _by_prefix=lambda _: ("", variants),
        _apart=lambda _: ("one replica is enough", []),
    )
    ranked, told = Market.with_variants(market, [best], None)  # type: ignore[arg-type]
    assert ranked == ([variants[1], best] if held else [best])
    assert "prefill and decode apart: not tried: one replica is enough" in told
    assert any("fewer replicas than 4 are not enough" in line for line in told) == (not held)


def test_what_longer_runs_have_judged_stands_before_its_equal(monkeypatch) -> None:
    """Of two settings of one order the answer is the one that longer runs judged."""

    def offer(gpu: str, label: str, strain: float, price: float) -> Offer:
        found = SearchResult(Trial(2.0, strain=(strain,) * 3), [])
        return Offer({"label": label}, result=found, gpu=gpu, price=price)

    takes = {"A": 2.0, "B": 2.0}  # replicas, by longer runs

    def longer(_problem, offers, _runs) -> None:
        (one,) = offers
        one.result = SearchResult(Trial(takes[one.gpu], seconds=600.0, strain=(-0.1,) * 3), [])

    monkeypatch.setattr("headway.planning.buy.search_all", longer)
    ranked = [
        offer("A", "first", -0.5, 1.0),
        offer("A", "alike", -0.4, 1.0),
        offer("B", "", 0.0, 2.0),
    ]
    judged = _confirm(None, ranked, None)  # type: ignore[arg-type]
    assert [one.best.seconds for one in judged] == [600.0, None, 600.0]
    assert [one.gpu for one in orders(judged)] == ["A", "B"]
    assert judged[0].varied["label"] == "first"
    takes["A"] = 5.0  # it costs more than the other then, and is not lost
    judged = _confirm(None, ranked, None)  # type: ignore[arg-type]
    assert [(one.gpu, one.cost) for one in judged] == [("B", 4.0), ("A", 5.0), ("A", 5.0)]
    assert all(one.best.seconds for one in judged)
