"""Energy: power worked out by hand, at rest and at work, of one engine and of a fleet."""

from math import exp
from pathlib import Path

import numpy as np
import pytest

from simulator import load_scenario, run
from simulator.core.log import Log
from simulator.models.gpus import CPU, GPUS
from simulator.models.power import gpu_power
from simulator.util.errors import HeadwayError
from tests.support.logs import ObservedRequest, add_request, add_step, make_workload, summarize


def test_power_lies_between_idle_and_the_most() -> None:
    """17 % of the data sheet at rest, all of it at full use; readings of the user's override."""
    power = gpu_power(None, None, 400.0)
    assert power is not None
    assert power.busy(0.0, 0.0) == power.idle == pytest.approx(68.0)
    assert power.busy(0.25, 0.5) == pytest.approx(68 + 332 * (1 - exp(-1.4 - 0.8)))
    assert power.busy(1.0, 1.0) == pytest.approx(400.0, rel=0.001)
    own = gpu_power(50.0, 300.0, 400.0)
    assert own is not None
    assert (own.idle, own.most) == (50.0, 300.0)
    assert gpu_power(50.0, None, None) is None
    with pytest.raises(ValueError, match=r"idle: must be at most the maximum \(400 W\), not 500"):
        gpu_power(500.0, None, 400.0)


def test_one_measured_run_of_each_gpu_is_within_the_interval() -> None:
    """H100: Llama 3.1 8B, 64 at once, 610 W; B200: 70B on two, 128 at once, 956 W.

    A100: Llama 2 70B on two, one at a time, 0.74 of 400 W (the shares of the peaks by the model's
    shape, the batch and the measured time of a step).
    """
    for gpu, flops, bandwidth, measured in (
        ("H100-80GB", 0.12, 0.50, 610.0),
        ("B200", 0.19, 0.38, 956.0),
        ("A100-80GB", 0.02, 0.62, 294.0),
    ):
        power = gpu_power(None, None, GPUS[gpu].max_power)
        assert power is not None
        assert 0.8 < measured / power.busy(flops, bandwidth) < 1.25


def test_a_second_at_work_and_three_at_rest() -> None:
    """Two engines of two GPUs, one of them idle: 16 GPU-seconds, of which 2 at work."""
    log, other = Log(10, 4), Log(10, 4)
    add_step(log, 0.0, 1.0, prefill_tokens=4)
    add_request(log, 0, ObservedRequest(0.0, 0.0, [1.0, 4.0], prompt=4))
    load = make_workload([ObservedRequest(0.0, tokens=[0.0] * 2, prompt=4)])
    options = {"tensor_parallel_size": 2, "power": {"idle": 100.0, "max": 400.0}}
    found = summarize(load, np.zeros(1), [log, other], **options)["headway"]
    flops, read = (found[name] * 8 for name in ("mfu", "bandwidth_utilization"))
    assert 0 < flops < read
    joules = 2 * (100 + 300 * (1 - exp(-5.6 * flops - 1.6 * read))) + 14 * 100
    assert found["power_w"] == pytest.approx(joules / 4)
    assert found["joules_per_output_token"] == pytest.approx(joules / 2)
    assert found["joules_per_output_token_low"] == pytest.approx(0.8 * joules / 2)
    assert found["joules_per_output_token_high"] == pytest.approx(1.25 * joules / 2)
    assert found["wh_per_million_output_tokens"] == pytest.approx(joules / 2 / 3600 * 1e6)
    assert found["kg_co2_per_million_output_tokens"] == pytest.approx(joules / 2 / 3.6 * 0.473)


def test_nobody_knows_what_a_cpu_draws() -> None:
    """Without a figure in the table and without readings there is none; every GPU sold has one."""
    assert gpu_power(None, None, CPU.max_power) is None
    assert [name for name, gpu in GPUS.items() if gpu.max_power is None] == ["GH200"]


FLEET = """
model: llama-3-8b
gpu: {carbon_intensity: 100}
cost: {kind: linear, base: 0.01}
cluster:
  router: round_robin
  groups:
    old: {replicas: 1, gpu: {name: A100-80GB, power: {idle: 50, max: 50}, carbon_intensity: 100}}
    new: {replicas: 2, gpu: {name: H100-80GB, power: {idle: 200, max: 200}, carbon_intensity: 400}}
workload: {num_prompts: 30, request_rate: 10, input_len: 20, output_len: 10}
"""


def test_a_fleet_takes_what_its_groups_take(tmp_path: Path) -> None:
    """50 W and twice 200 W whatever they do; each group has a grid of its own."""
    path = tmp_path / "s.yaml"
    path.write_text(FLEET)
    summary = run(load_scenario(path)).summary()
    found, tokens = summary["headway"], 300
    assert found["power_w"] == pytest.approx(450.0)
    assert found["joules_per_output_token"] == pytest.approx(450 * summary["duration"] / tokens)
    grams = (50 * 100 + 400 * 400) / 3.6e6 * summary["duration"] / tokens
    assert found["kg_co2_per_million_output_tokens"] == pytest.approx(1000 * grams)


def test_idle_above_the_most_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("model: llama-3-8b\ngpu:\n  name: L4\n  power:\n    idle: 100\n")
    with pytest.raises(HeadwayError, match=r"s.yaml:5: gpu.power.idle: .*\(72 W\), not 100"):
        load_scenario(path)
