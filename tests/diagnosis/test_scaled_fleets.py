"""Advice for fleets that scale: what its rows cost, and replicas that change something."""

from pathlib import Path

import pytest

from headway.planning.candidate import resources
from headway.planning.diagnose import ENOUGH, diagnose
from simulator import load_scenario, run

FLEET = """name: fleet
model: llama-3-8b
gpu: {name: A100-80GB}
workload: {num_prompts: 300, request_rate: 4, input_len: 1000, output_len: 200, range_ratio: 0.8}
slo: [p90_tpot_ms<=17]
cluster:
  router: least_outstanding
  autoscaling: {metric: queue_depth, target: 4, max_replicas: 6, interval: 10, startup_delay: 20}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


@pytest.mark.medium
def test_replicas_that_were_never_ordered_are_not_raised(fleet: Path) -> None:
    """One of six is ever up: a seventh changed nothing; more from the start on keep the level."""
    found = diagnose(load_scenario(fleet), jobs=1)
    advised = {one.advice["key"].rpartition(".")[2]: one for one in found.trials}
    assert "max_replicas" not in advised
    more = advised["min_replicas"]
    assert more.advice["to"] == 2  # as few as do; by peaks it was 4
    assert not more.missed


def test_more_at_most_is_advised_where_requests_wait_at_the_most(fleet: Path) -> None:
    """While replicas start nobody waits for a seventh: one more changed the goodput by 1 %."""
    burst = "workload={num_prompts: 600, request_rate: 10, input_len: 1000, output_len: 200}"
    for most, startup, raised in ((6, 60, False), (2, 1, True)):
        keys = [f"cluster.autoscaling.{key}" for key in ("max_replicas", "startup_delay")]
        sets = [burst, f"{keys[0]}={most}", f"{keys[1]}={startup}", "slo=[p90_ttft_ms<=1000]"]
        found = run(load_scenario(fleet, sets)).summary()["headway"]["diagnosis"]
        advised = {one["key"] for finding in found for one in finding["advice"]}
        assert advised
        assert (keys[0] in advised) == raised


def test_rows_of_fleets_that_scale_cost_what_their_runs_paid(fleet: Path) -> None:
    """They had the price of the replicas that they begin with."""
    scenario = load_scenario(fleet, ["cluster.autoscaling.min_replicas=2"])
    gpus, price = resources(scenario)
    summary = run(scenario).summary()
    values = {"duration": summary["duration"], **summary["headway"]["cluster"]}
    hours = summary["duration"] / 3600
    paid = values["gpu_hours"] / hours, values["dollars"] / hours
    assert resources(scenario, [values, values]) == pytest.approx(paid)
    assert paid[0] != pytest.approx(gpus)
    unpriced = {key: value for key, value in values.items() if key != "dollars"}
    assert resources(scenario, [unpriced])[1] is None
    assert price is not None


def test_no_answer_is_promised() -> None:
    assert "finds" not in ENOUGH
