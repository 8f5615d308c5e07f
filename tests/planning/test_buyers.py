"""Answers of a plan that a buyer acts on: a cache that is off, bounds, GPUs and a day cut short."""

import re
from math import exp

import pytest

from headway.cli.main import main
from headway.planning.buy_report import GUESSED, buying_problem, wanted_gpus
from headway.planning.market import Market
from headway.planning.plan import Runs
from headway.planning.problem import PlanOptions, make_problem
from simulator.costs.noise import QUANTILE
from simulator.costs.roofline import UNMEASURED
from simulator.util.errors import HeadwayWarning
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
        r"enable_prefix_caching is off; [78]\d % of the prompt tokens repeat", first
    )
    assert second.startswith("a prefix-aware router with the prefix cache on: fewer replicas")
    assert not market(write(alike, "on.yaml")).cache_off
    assert not market(write(SHOP + off, "other.yaml")).cache_off


def test_what_a_request_alone_needs_is_no_bound_that_a_load_keeps(
    tmp_path, write, capsys, recwarn
) -> None:
    """GPUs that are only considered for it warn of nothing."""
    path = write(SHOP + "gpu: {name: L40S}\n")
    command = ["plan", str(path), "--fewest", "cluster.replicas=1..2", "--slo", "p95_tpot_ms<=1"]
    assert main([*command, "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "however many the replicas: alone it needs p95_tpot_ms<=" in told
    assert told.strip().endswith(", under load more")
    assert not recwarn


def test_how_long_a_first_look_is_and_what_an_offer_costs(write) -> None:
    """4,000 requests at 20 a second take 200 s; two GPUs cost twice one."""
    shop = market(write(SHOP.replace("request_rate: 8", "request_rate: 20")))
    assert shop.quick().criteria.max_seconds == 200.0
    prices = {one.size: one.price for one in shop.offers()}
    assert (prices[1], prices[2]) == (6.88, 2 * 6.88)


def test_an_error_names_the_gpu_that_it_is_of(write) -> None:
    """Until one is chosen the largest stands for all."""
    gpus = wanted_gpus("T4,B200", by_data_sheet=True)
    shop = Market(buying_problem(write(SHOP), PlanOptions(), ([], None), gpus), gpus, None)
    (small,) = [one for one in shop.offers() if one.gpu == "T4" and one.size == 1]
    assert "does not fit the T4" in small.error
    assert "B200" not in small.error


def test_a_day_that_is_cut_short_is_warned_of(recwarn) -> None:
    """A night's load is no day's, and dollars a day would be of it."""
    day = "scenarios/what-if/day.yaml"
    make_problem(day, PlanOptions())
    assert not recwarn
    with pytest.warns(HeadwayWarning, match="20,000 of the 103,680 requests of 24 h: no full"):
        make_problem(day, PlanOptions(), ["workload.num_prompts=20000"])


def test_the_band_of_gpus_without_kernels_is_that_of_their_steps() -> None:
    low, high = (100 * (exp(end * QUANTILE * UNMEASURED) - 1) for end in (-1, 1))
    assert f"within {low:+.0f} to {high:+.0f} %" in GUESSED
