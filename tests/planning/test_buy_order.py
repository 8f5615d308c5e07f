"""Which order to buy comes first."""

from types import SimpleNamespace
from typing import cast

from headway.planning.buy import _confirm, orders
from headway.planning.market import Offer, by_headroom
from headway.planning.search import SearchResult
from headway.planning.verdict import Trial


def test_within_two_percent_of_the_price_headroom_decides() -> None:
    """The order of each is judged by its first; those of one order stay as they were."""

    def order(name: str, cost: float, nearness: float) -> Offer:
        return cast("Offer", SimpleNamespace(order=name, cost=cost, nearness=nearness))

    offers = [order("2 x A100", 6.86, 0.98), order("2 x A100", 6.86, 0.1)]
    offers += [order("1 x H100", 6.88, 0.4), order("L4", 7.0, 0.01)]
    assert [by_headroom(offers).index(one) for one in offers] == [1, 2, 0, 3]


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
