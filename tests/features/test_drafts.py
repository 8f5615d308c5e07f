"""Drafts as a feature: their own scheduler, and their place among the costs of a step."""

from dataclasses import replace

import pytest

from simulator.build.assemble_scheduler import make_scheduler
from simulator.build.choose_scheduler import with_scheduler
from simulator.features.drafts.cost import DraftedCost
from simulator.features.drafts.eagle import OverlappedSpeculativeSgLang, SpeculativeSgLang
from simulator.features.drafts.roles import KINDS
from simulator.features.drafts.walk import (
    AsyncDraftWalk,
    AsyncHostDrafts,
    DraftWalk,
    HostDrafts,
    PipelineDrafts,
)
from simulator.features.lora.cost import LoraCost
from simulator.features.lora.lora import Lora
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
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


def test_on_pipeline_stages_drafts_are_verified_ahead_alone() -> None:
    """In step vLLM 0.33 schedules k tokens for k drafts, and its model runner's assertion fails."""
    engine = {"speculative_config": DRAFTS, "pipeline_parallel_size": 2}
    scenario = {"engine": engine, "gpu": {"count": 2}}
    assert type(make_scheduler(resolve(load_scenario(scenario)), True)) is PipelineDrafts
    engine["async_scheduling"] = False
    with pytest.raises(
        HeadwayError, match="beside drafts needs async_scheduling: true; vLLM stops"
    ):
        resolve(load_scenario(scenario))
    del engine["async_scheduling"]
    engine["version"] = "0.32.0"
    with pytest.raises(HeadwayError, match=r"beside drafts needs the rules of vLLM 0\.33 or later"):
        resolve(load_scenario(scenario))


@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_beside_roles(overlaps: bool) -> None:
    groups = {"p": {"kv_role": "kv_producer"}, "d": {"kv_role": "kv_consumer"}}
    engine = {"speculative_config": DRAFTS, "async_scheduling": overlaps}
    cluster = {"kv_transfer": {"bandwidth": 50}, "groups": groups}
    spec = resolve(load_scenario({"engine": engine, "cluster": cluster}))
    for role, kinds in KINDS.items():
        made = make_scheduler(with_scheduler(replace(spec, role=role)), True)
        assert type(made) is kinds[overlaps]
    engine["version"] = "0.32.0"
    with pytest.raises(HeadwayError, match=r"kv_role: beside drafts needs the rules of vLLM 0\.33"):
        load_scenario({"engine": engine, "cluster": cluster})
    engine |= {"version": "0.33.0", "async_scheduling": False, "enable_prefix_caching": False}
    with pytest.raises(HeadwayError, match="needs async_scheduling or enable_prefix_caching"):
        load_scenario({"engine": engine, "cluster": cluster})


def test_a_window_in_stages_needs_one_table_for_all_layers() -> None:
    engine = {"pipeline_parallel_size": 2, "disable_hybrid_kv_cache_manager": False}
    what = "engine.pipeline_parallel_size: needs disable_hybrid_kv_cache_manager: true"
    with pytest.raises(HeadwayError, match=what):
        load_scenario({"model": "gemma-3-12b", "gpu": {"count": 2}, "engine": engine})
