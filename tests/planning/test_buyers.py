"""Answers of a plan that a buyer acts on: a cache that is off, bounds, GPUs and a day cut short."""

import re

import pytest

from headway.planning.plan import Runs
from tests.planning.test_buy import SHOP, found, market


@pytest.mark.medium
def test_a_cache_that_is_off_is_tried_on_with_the_router(write, monkeypatch) -> None:
    """A router that keeps prefixes together is of no use without one; where it is on, or prompts
    share little, nothing is said."""
    shared = "prefix_groups: {num_prefixes: 8, prefix_len: 800}, input_len: 200"
    off = "engine: {enable_prefix_caching: false}\n"
    alike = SHOP.replace("input_len: 1000", shared)
    shop = market(write(alike + off))
    best = found(shop.offers()[0], 4)
    why, (routed,) = shop._by_prefix(best)
    assert not why
    assert routed.scenario is not None
    assert routed.scenario.engine.enable_prefix_caching
    assert routed.settings.endswith("enable_prefix_caching true, router prefix_aware")
    assert shop.routed([best])[0].varied["engine.enable_prefix_caching"] == "true"
    monkeypatch.setattr("headway.planning.market.search_all", lambda *_: None)
    monkeypatch.setattr(
        "headway.planning.market.ranked_offers",
        lambda offers: [one for one in offers if one.result.best is not None],
    )
    _, (first, second, *_) = shop.with_variants([best], Runs())
    assert re.fullmatch(
        r"enable_prefix_caching is off; (7|8)\d % of the prompt tokens repeat the beginning of an "
        "earlier prompt",
        first,
    )
    assert second.startswith("a prefix-aware router with the prefix cache on: fewer replicas")
    assert not market(write(alike, "on.yaml")).cache_off
    assert not market(write(SHOP + off, "other.yaml")).cache_off
