"""From how few replicas to how many a purchase is searched."""

from dataclasses import make_dataclass
from types import SimpleNamespace

from headway.planning.buy import _changes, _search
from headway.planning.market import Offer
from headway.planning.search import SearchResult
from headway.planning.verdict import Trial
from simulator import load_scenario


def test_how_far_is_searched_where_theory_says_at_least_4(monkeypatch) -> None:
    """Up to 8 x (4 + 1); as far as is asked where theory knows nothing."""
    monkeypatch.setattr("headway.planning.buy.search_all", lambda *_: None)
    offer = Offer({}, gpu="A", price=1.0, fewest=4)
    within = []
    for unbounded in (0, 9):
        _search(None, [offer], None, unbounded)  # type: ignore[arg-type]
        within.append(offer.within)
    assert within == [(4, 40), (4, 9)]


def test_under_a_change_the_search_begins_at_what_was_enough(monkeypatch) -> None:
    """At half of 7, where steps are faster; up to 2 x 7 + 2."""
    asked: list[tuple[bool, tuple[float, float]]] = []
    phases: list[str] = []
    scenario = load_scenario({"name": "shop", "model": "llama-3-8b"}, ["gpu.name=H100"])
    best = Offer({}, scenario=scenario, result=SearchResult(Trial(7.0), []), gpu="A", price=1.0)

    def search(_problem, offers, _runs) -> None:
        asked.append(("faster" in phases[-1], offers[0].within))

    problem = make_dataclass("Problem", ["change"])(None)
    monkeypatch.setattr("headway.planning.buy.search_all", search)
    monkeypatch.setattr("headway.planning.buy._confirm", lambda *_: [])
    monkeypatch.setattr("headway.planning.buy._no_shorter", lambda *_: problem)
    market = SimpleNamespace(quick=lambda _=None: None)
    runs = SimpleNamespace(enter=phases.append)
    told = [*_changes(problem, market, [best], runs)]  # type: ignore[arg-type]
    slower = (False, (7, 16))
    assert asked == [slower, slower, (True, (3, 16)), slower]
    assert len(told) == 4
