"""What engines are is settled where a scenario is loaded, kept, and settled anew for a copy."""

import pickle

import pytest

from simulator import load_scenario
from simulator.build import assemble_fleet
from simulator.scenario.resolve import engine_specs, fleet_spec, resolve, resolve_groups
from simulator.scenario.scenario import Scenario
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.util.config import Named
from simulator.util.errors import HeadwayWarning

GROUPS = {
    "big": {"replicas": 1, "gpu": "H100-80GB"},
    "small": {"replicas": 2},
}


@pytest.fixture
def nothing_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where an engine is settled from now on."""

    def settled(*_: object) -> None:
        raise AssertionError("settled once more")

    monkeypatch.setattr("simulator.build.settle.load_model", settled)
    monkeypatch.setattr(assemble_fleet, "_settle", settled)


def loaded(**keys: object) -> Scenario:
    return load_scenario({"engine": {"max_num_seqs": 8}, **keys})


def test_each_spec_is_made_where_the_scenario_is_loaded(
    request: pytest.FixtureRequest,
) -> None:
    alone, fleet = loaded(), loaded(cluster={"groups": GROUPS})
    request.getfixturevalue("nothing_is_settled")
    assert resolve(alone) is engine_specs(alone)[""]
    assert [spec.gpu.name for spec in resolve_groups(fleet).values()] == ["H100-80GB", "A100-80GB"]


def test_where_requests_go_is_settled_with_the_engines(request: pytest.FixtureRequest) -> None:
    scenario = loaded(cluster={"replicas": 4, "pods": 2, "router": "random"})
    request.getfixturevalue("nothing_is_settled")
    fleet = fleet_spec(scenario)
    assert fleet.pods == [0, 1, 0, 1]
    assert fleet.make_front() is not fleet.make_front()  # each has a state of its own
    assert pickle.loads(pickle.dumps(scenario))._fleet is None
    with pytest.raises(AssertionError, match="settled once more"):
        _ = fleet_spec(scenario.model_copy(update={"seed": 1}))


def test_a_changed_copy_is_settled_by_its_own_values() -> None:
    scenario = loaded(cluster={"replicas": 2, "client": {"timeout": 1.0, "max_retries": 1}})
    changed = scenario.model_copy(
        update={"engine": scenario.engine.model_copy(update={"max_model_len": 100}), "seed": 5}
    )
    spec = engine_specs(changed)["all"]
    assert (spec.max_model_len, spec.seed, spec.retries) == (100, 5, True)
    assert engine_specs(scenario)["all"].max_model_len == 8192


def test_the_scheduler_is_chosen_with_the_rest_of_an_engine() -> None:
    scenario = loaded()
    assert engine_specs(scenario)[""].scheduler is AsyncScheduler
    engine = scenario.engine.model_copy(update={"scheduling_policy": Named("static")})
    with pytest.raises(ValueError, match="async_scheduling: static schedules a step when"):
        resolve(scenario.model_copy(update={"engine": engine}))


def test_a_worker_settles_a_scenario_by_itself() -> None:
    scenario = loaded(cluster={"groups": GROUPS})
    there = pickle.loads(pickle.dumps(scenario))
    assert there._specs is None
    assert engine_specs(there)["big"].num_gpu_blocks == engine_specs(scenario)["big"].num_gpu_blocks


def test_what_differs_is_told_each_time_the_engine_is_asked_for() -> None:
    scenario = loaded(model="mistral-7b-v0.1", cost={"profile": "llama-3-8b.a100.bf16"})
    for _ in range(2):
        with pytest.warns(HeadwayWarning, match="was fitted to llama-3-8b, not mistral-7b-v0.1"):
            resolve(scenario)
