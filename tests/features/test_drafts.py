"""Drafts as a feature: their own scheduler, and their place among the costs of a step."""

import pytest

from simulator.build.assemble_scheduler import make_scheduler
from simulator.features.drafts.cost import DraftedCost
from simulator.features.drafts.eagle import OverlappedSpeculativeSgLang, SpeculativeSgLang
from simulator.features.drafts.walk import AsyncDraftWalk, AsyncHostDrafts, DraftWalk, HostDrafts
from simulator.features.lora.cost import LoraCost
from simulator.features.lora.lora import Lora
from simulator.scenario.load import load_scenario, resolve
from simulator.util.errors import HeadwayError

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.5}
EAGLE = {"method": "eagle", "num_speculative_tokens": 3, "acceptance": 0.5, "draft": {}}
HOST = {"kv_offloading_size": 4, "hicache_write_policy": "write_through"}


def test_adapters_cost_beside_drafts_and_drafts_cost_no_adapters() -> None:
    engine = {"speculative_config": EAGLE, "enable_lora": True, "enable_prefix_caching": False}
    spec = resolve(load_scenario({"engine": engine}))
    assert isinstance(spec.cost, LoraCost)
    assert isinstance(spec.cost.inner, DraftedCost)
    assert [type(one) for one in make_scheduler(spec, False).features] == [Lora]


@pytest.mark.parametrize(
    ("engine", "kinds"),
    [
        ({"speculative_config": DRAFTS}, (DraftWalk, AsyncDraftWalk)),
        (
            {"speculative_config": DRAFTS} | HOST,
            (HostDrafts, AsyncHostDrafts),
        ),
        (
            {"name": "sglang", "speculative_config": EAGLE},
            (SpeculativeSgLang, OverlappedSpeculativeSgLang),
        ),
    ],
)
def test_drafts_are_verified_by_a_scheduler_of_their_own(engine: dict, kinds: tuple) -> None:
    for overlaps, kind in enumerate(kinds):
        found = load_scenario({"engine": {**engine, "async_scheduling": bool(overlaps)}})
        made = make_scheduler(resolve(found), True)
        assert type(made) is kind
        assert not made.features


def test_a_window_in_stages_needs_one_table_for_all_layers() -> None:
    engine = {"pipeline_parallel_size": 2, "disable_hybrid_kv_cache_manager": False}
    what = "engine.pipeline_parallel_size: needs disable_hybrid_kv_cache_manager: true"
    with pytest.raises(HeadwayError, match=what):
        load_scenario({"model": "gemma-3-12b", "gpu": {"count": 2}, "engine": engine})
