"""Advice that a run prints can be followed: its scenario takes the keys, whatever its kind."""

import warnings
from random import Random
from typing import Any

import pytest

from simulator import load_scenario, run
from simulator.diagnosis.finding import follow
from simulator.scenario.load import check_scenario
from simulator.util.errors import HeadwayError
from simulator.util.yaml_lines import SourceMap
from tests.conftest import SHARE
from tests.support.fleets import draw_fleet
from tests.support.random_scenarios import draw_scenario

GROUPS = {
    "model": "llama-3-8b",
    "gpu": {"name": "H100-80GB", "dollars_per_hour": 3.0},
    "goodput": {"tpot": 5},
    "workload": {"num_prompts": 20, "request_rate": 2, "input_len": 200, "output_len": 20},
    "cluster": {"groups": {"a": {"replicas": 1}, "b": {"replicas": 1}}},
}
PODS = {
    "model": "llama-3-8b",
    "engine": {"max_num_seqs": 2},
    "workload": {"num_prompts": 60, "request_rate": 20, "input_len": 200, "output_len": 60},
    "cluster": {"replicas": 4, "pods": 2, "router": "round_robin"},
}


def advised(scenario: Any, **more: Any) -> list[dict[str, Any]]:
    """Return all advice of a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(scenario, **more).summary()["headway"]["diagnosis"] or []
    return [advice for finding in found for advice in finding["advice"]]


def test_drawn_scenarios_take_all_that_is_advised() -> None:
    """Fleets with pods, roles, encoders apart and several models, and engines of all kinds."""
    tried = 0
    for seed in range(320 // SHARE):
        values, load = draw_fleet(Random(seed))
        for drawn, more in ((values, {"workload": load}), (draw_scenario(seed), {})):
            try:
                scenario = check_scenario(drawn, SourceMap(str(seed), {}))
            except HeadwayError:  # the draw contradicts itself
                continue
            for one in advised(scenario, **more):
                follow(scenario, one)  # raises where it cannot be
                tried += 1
    assert tried > 100


def test_a_group_gets_gpus_of_its_own_for_tensor_parallelism() -> None:
    """Those of the others stay, and so do kind and price of its own."""
    scenario = load_scenario(GROUPS)
    (wider,) = (one for one in advised(scenario) if one["key"].endswith("tensor_parallel_size"))
    name = wider["key"].split(".")[2]
    assert wider["also"] == {f"cluster.groups.{name}.gpu.count": 2}
    wide = follow(scenario, wider)
    gpu, other = (wide.of_group(one).gpu for one in sorted("ab", key=name.__ne__))
    assert (gpu.name, gpu.count, gpu.dollars_per_hour) == ("H100-80GB", 2, 3.0)
    assert other == scenario.gpu


def test_replicas_stay_a_multiple_of_the_pods() -> None:
    more = [one["to"] for one in advised(load_scenario(PODS)) if one["key"] == "cluster.replicas"]
    assert more
    assert not any(count % 2 for count in more)


@pytest.mark.parametrize("block", [{"count": 2}, {"dollars_per_hour": 1.0, "count": 2}])
def test_a_group_that_names_no_gpu_has_the_scenarios(block: dict[str, Any]) -> None:
    groups = {"a": {"gpu": block}, "b": {}}
    scenario = load_scenario(GROUPS | {"cluster": {"groups": groups}})
    assert scenario.of_group("a").gpu.name == "H100-80GB"
    assert scenario.of_group("a").gpu.dollars_per_hour == block.get("dollars_per_hour", 3.0)
    assert scenario.of_group("b").gpu == scenario.gpu


def test_the_same_advice_of_several_findings_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "simulator.diagnosis.advice.follow", lambda _, advice: tried.append(advice) or True
    )
    given = advised(load_scenario("demo", ["workload.request_rate=30", "goodput.tpot=12"]))
    assert len(given) > len(tried)
    assert all(tried.count(one) == 1 for one in tried)
