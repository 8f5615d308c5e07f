"""From a scenario to a result: what a run tells besides its numbers."""

import pytest

from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayWarning
from tests.support.scenarios import SMALL


@pytest.mark.parametrize(
    ("low", "high", "blocks", "reasons"),
    [
        (8190, 8190, 100, "40 with prompts of max_model_len (8,190) tokens or more"),
        (64, 64, 3, "40 too large for the 2 KV blocks of 16 tokens"),
        (8189, 8190, 100, None),
    ],
)
def test_a_run_in_which_nobody_is_served_says_why(tmp_path, low, high, blocks, reasons) -> None:
    """How many for which of the two reasons; the warning is kept with the result."""
    path = tmp_path / "s.yaml"
    path.write_text(SMALL)
    sets = [
        f"workload.input_len={{kind: uniform, low: {low}, high: {high}}}",
        f"engine.num_gpu_blocks_override={blocks}",
        "engine.max_model_len=8190",
    ]
    with pytest.warns(HeadwayWarning, match="^all 40 requests were rejected: ") as caught:
        result = run(load_scenario(path, sets))
    if reasons is None:
        long = int((result.workload.prompt_tokens == 8190).sum())
        assert 0 < long < 40
        reasons = (
            f"{long} with prompts of max_model_len (8,190) tokens or more, {40 - long} too large "
            "for the 99 KV blocks of 16 tokens"
        )
    assert str(caught[0].message) == f"all 40 requests were rejected: {reasons}"
    assert result.warnings == [str(caught[0].message)]


def test_a_run_in_which_somebody_is_served_says_nothing(tmp_path, recwarn) -> None:
    """One request that fits is enough."""
    path = tmp_path / "s.yaml"
    path.write_text(SMALL)
    sets = ["workload.input_len={kind: uniform, low: 8150, high: 8230}"]
    result = run(load_scenario(path, sets))
    reasons = result.logs[0].requests["reason"].tolist()
    assert 0 < reasons.count(2) < 40
    assert not recwarn.list


def test_an_autoscaler_sees_who_misses_the_bounds(tmp_path) -> None:
    """Nobody has a first token in a millisecond: another replica is ordered."""
    path = tmp_path / "s.yaml"
    path.write_text(SMALL)
    scaling = "{metric: slo_attainment, target: 0.5, interval: 0.2, max_replicas: 2}"
    sets = [f"cluster={{autoscaling: {scaling}}}", "goodput.ttft=1"]
    result = run(load_scenario(path, sets))
    assert result.cluster is not None
    assert [len(times) > 0 for times in result.cluster.paid] == [True] * 2
