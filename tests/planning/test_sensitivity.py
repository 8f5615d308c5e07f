"""How far results move with their cost model: elasticities, intervals, cliffs."""

import json
from dataclasses import replace
from math import hypot, log, sqrt

import numpy as np
import pytest

from headway.cli.main import main
from headway.planning.sensitivity import (
    BATCH_MEANS,
    COLD,
    METRICS,
    STEPS,
    changed_costs,
    changed_runs,
    measure_sensitivity,
    other_experts,
    sensitivities,
    unexplained,
)
from simulator.core.request import Step
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.profile import EXPERT_KERNELS
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError

ALONE = """
name: alone
engine: {max_num_seqs: 4}
cost: {kind: linear, base: 0.01, residuals: {decode: 0.05, prompts: 0.1}}
workload: {num_prompts: 3, request_rate: 0.1, input_len: 10, output_len: 11}
"""
DENSE = resolve(load_scenario({"model": "llama-3-8b", "gpu": "H100-80GB"}))


def test_one_request_after_the_other_moves_as_its_steps(write):
    """A step of a prompt and ten of decodes, 10 ms each: all of it is step time."""
    scenario = load_scenario(write(ALONE))
    found = measure_sensitivity(run(scenario), changed_runs(scenario))
    e2el, ttft, *_ = found
    assert (e2el.metric, ttft.metric) == ("mean_e2el_ms", "mean_ttft_ms")
    assert e2el.elasticity == pytest.approx(1.0)
    assert ttft.elasticity == pytest.approx(1.0)
    assert not e2el.cliff
    decode, prompt = (2.718281828459045 ** (0.588 * sd) for sd in (0.05, 0.1))
    client, rest = 4, 0.03 * 110
    up = 100 * (decode - 1), 10 * (prompt - 1)
    assert e2el.interval[1] == pytest.approx(110 + hypot(*up, client, rest))
    down = 100 * (1 - 1 / decode), 10 * (1 - 1 / prompt)
    assert e2el.interval[0] == pytest.approx(110 - hypot(*down, client, rest))
    whole = sum(one**2 for one in (*up, *down)) + 2 * client**2 + 2 * rest**2
    assert e2el.shares == pytest.approx(
        {
            "profile": sum(one**2 for one in (*up, *down)) / whole,
            "rest": 2 * rest**2 / whole,
            "client": 2 * client**2 / whole,
        }
    )
    ttft_up = hypot(10 * (prompt - 1), client, 0.05 * 10)
    assert ttft.interval[1] == pytest.approx(10 + ttft_up)


def test_causes_are_added_in_squares_on_either_side():
    base = {"mean_e2el_ms": 100.0, "mean_ttft_ms": 0.0}
    changed = {
        STEPS: {"mean_e2el_ms": 108.0},
        "decode low": {"mean_e2el_ms": 97.0},
        "decode high": {"mean_e2el_ms": 103.0},
        "host low": {"mean_e2el_ms": 96.0},
        "host high": {"mean_e2el_ms": 104.0},
    }
    (one,) = sensitivities(base, changed)  # what is 0 has no elasticity
    assert one.interval == (95.0, 105.0)
    assert one.elasticity == pytest.approx(log(1.08) / log(1.01))
    assert one.cliff
    (bare,) = sensitivities(base, {STEPS: {"mean_e2el_ms": 101.0}})
    assert bare.interval is None


def test_what_moves_by_chance_is_below_resolution():
    """Batches that move by +1, -1, +1, ... of 100 have told nothing; all by +1 have told 1 %."""
    base = {"mean_e2el_ms": 100.0, BATCH_MEANS: {"mean_e2el_ms": [100.0] * 4}}
    for moved, resolved in (([101.0, 99.0, 101.0, 99.2], False), ([101.0] * 4, True)):
        changed = {"mean_e2el_ms": sum(moved) / 4, BATCH_MEANS: {"mean_e2el_ms": moved}}
        (one,) = sensitivities(base, {STEPS: changed})
        assert one.resolved is resolved
        assert one.chance is not None
        # Neighbours are 2, 2 and 1.8 apart; 3.182 is Student's t of three degrees of freedom.
        half = 0.0 if resolved else 3.18245 * sqrt((4 + 4 + 3.24) / 6 / 4)
        assert one.chance * log(1.01) * changed["mean_e2el_ms"] == pytest.approx(half, rel=1e-4)
    steep = replace(one, elasticity=6.0, chance=7.0)
    assert not steep.cliff
    assert replace(steep, chance=5.0).cliff


def test_a_queue_that_grows_is_no_chance():
    means = np.linspace(0.0, 100.0, 20)
    base = {"mean_e2el_ms": 1.0, BATCH_MEANS: {"mean_e2el_ms": [1.0] * 20}}
    longer = {"mean_e2el_ms": 51.0, BATCH_MEANS: {"mean_e2el_ms": (1.0 + means).tolist()}}
    (one,) = sensitivities(base, {STEPS: longer})
    assert one.resolved
    assert one.chance is not None
    assert one.chance < 0.1 * one.elasticity


PIPED = """
name: piped
model: llama-3-8b
gpu: {name: H100-80GB}
engine: {pipeline_parallel_size: 2}
workload: {num_prompts: 40, request_rate: 1, input_len: 400, output_len: 30}
"""


@pytest.mark.medium
def test_pipelines_move_with_their_stages_and_their_host(write):
    scenario = load_scenario(write(PIPED))
    changes = changed_runs(scenario)
    costs = {name: cost for name, (_, cost) in changes.items()}
    assert {"host low", "host high", "decode low", "prompts high"} < {*costs}
    step = Step([], 16, 16_000)
    plain = resolve(scenario).cost.execute(step).seconds
    assert costs[STEPS].execute(step).seconds == pytest.approx(1.01 * plain)
    low, high = scenario_hosts(costs)
    slow, fast = (costs[f"host {end}"].execute(step).seconds for end in ("high", "low"))
    assert slow - fast == pytest.approx(high - low)
    e2el, *_ = measure_sensitivity(run(scenario), changes)
    assert 0.8 < e2el.elasticity < 1.5
    assert e2el.interval[0] < e2el.value < e2el.interval[1]


TOLD = """
name: told
model: llama-3-8b
gpu: {name: H100-80GB}
engine: {version: "0.15", max_num_seqs: 32}
workload: {num_prompts: 60, request_rate: 4, input_len: 200, output_len: 60}
"""


EXPERTS = """
name: experts
model: gpt-oss-120b
gpu: {name: H200}
workload: {num_prompts: 20, request_rate: 1, input_len: 2000, output_len: 20}
"""


def test_experts_are_as_unsure_as_their_tables_differ(write):
    """Prompts take longest with Marlin's kernel: the interval reaches it until a kernel is told."""
    path = write(EXPERTS)
    scenario = load_scenario(path)
    costs = other_experts(scenario)
    assert {*costs} == {f"experts {word}" for word in ("uniform", "power_law_1.2", *EXPERT_KERNELS)}
    changes = changed_runs(scenario)
    _, ttft, *_ = measure_sensitivity(run(scenario), changes)
    slow = run(scenario, cost=costs["experts marlin"]).summary()["mean_ttft_ms"]
    assert ttft.value * 1.4 < slow < ttft.interval[1]
    assert max(ttft.shares, key=ttft.shares.get) == "experts"
    profile = "cost.profile=gpt-oss-120b.h200.mxfp4"
    assert other_experts(load_scenario(path, [profile, "cost.experts=marlin"])) == {}
    assert other_experts(load_scenario(path, ["engine.expert_routing=uniform"])) == {}


def test_what_a_prediction_does_not_know_has_a_name_and_a_share(write):
    """Sampling and the KV cache are causes until the scenario tells them."""
    path = write(TOLD)
    assert {"sampling low", "KV low", "requests drawn"} < {*changed_runs(load_scenario(path))}
    told = ["engine.generation_config=vllm", "engine.num_gpu_blocks_override=9000"]
    assert not {"sampling low", "KV low"} & {*changed_runs(load_scenario(path, told))}
    scenario = load_scenario(path)
    found = measure_sensitivity(run(scenario), changed_runs(scenario))
    assert [one.metric for one in found] == [*METRICS]
    for one in found:
        assert sum(one.shares.values()) == pytest.approx(1.0)
        assert one.interval[0] < one.value < one.interval[1]
    e2el, ttft, tpot, _ = found
    assert ttft.shares["client"] > e2el.shares["client"]
    assert "client" not in tpot.shares
    assert not found[-1].resolved  # P99 has no batches that tell chance
    assert not found[-1].cliff
    sampling = (e2el.value - e2el.interval[0]) / e2el.value
    assert 0.05 < sampling < 0.3  # a step of 7 ms, of which the sampler takes 0.5 to 1


def test_a_gpu_that_nobody_measured_is_a_cause_of_its_own(write):
    scenario = load_scenario(write(TOLD), ["gpu.name=A100-80GB-PCIe"])
    e2el, *_ = measure_sensitivity(run(scenario), changed_runs(scenario))
    assert next(iter(e2el.shares)) == "GPU"
    assert e2el.shares["GPU"] > 0.5
    assert "profile" not in e2el.shares


def test_a_closed_loop_whose_requests_are_drawn_knows_less_of_ttft(write):
    """Prompts of a closed loop meet in waves; which, nobody recorded."""
    path = write(TOLD)
    found = []
    for keys in ([], ["workload.request_rate=inf", "workload.max_concurrency=8"]):
        scenario = load_scenario(path, keys)
        _, ttft, *_ = measure_sensitivity(run(scenario), changed_runs(scenario))
        found.append(ttft)
    drawn, closed = found
    assert drawn.shares.get("requests", 0.0) < 0.1
    assert closed.shares["requests"] > 0.5
    assert closed.interval[1] > 1.155 * closed.value


def test_tails_are_less_sure_than_means() -> None:
    """A P90 of TTFT as its P99, other percentiles as means, unless runs judged them otherwise."""
    base = dict.fromkeys(("mean_e2el_ms", "p90_e2el_ms", "p99_e2el_ms", "p90_ttft_ms"), 100.0)
    rest = unexplained(base, DENSE, [*base], drawn=False)["rest"]
    assert rest["p90_e2el_ms"] == rest["mean_e2el_ms"] == pytest.approx((3.0, 3.0))
    assert rest["p99_e2el_ms"] == pytest.approx((5.0, 12.0))
    assert rest["p90_ttft_ms"] == pytest.approx((5.0, 33.0))
    late = unexplained(base, DENSE, [*base], drawn=False, first=0.05)["cold engine"]
    assert late["mean_e2el_ms"] == (0.0, 0.05 * COLD[1])
    assert (late["p90_e2el_ms"], late["p99_e2el_ms"]) == ((0.0, 0.0), (0.0, COLD[1]))


def test_flags_that_nobody_told_make_ttft_less_sure():
    base = {"mean_ttft_ms": 100.0, "mean_tpot_ms": 10.0}
    told, untold = (unexplained(base, DENSE, drawn=True, told=one) for one in (True, False))
    assert {*untold} - {*told} == {"flags"}
    assert untold["flags"] == {"mean_ttft_ms": (31.0, 31.0)}
    assert told["requests"] == {"mean_ttft_ms": (11.0, 15.5), "mean_tpot_ms": (0.3, 0.3)}
    cold = unexplained(base, DENSE, drawn=True, first=0.1)["cold engine"]
    assert cold == {"mean_ttft_ms": (0.0, pytest.approx(24.0))}
    tail = {"p99_ttft_ms": 100.0}
    few, many = (unexplained(tail, DENSE, drawn=False, first=one) for one in (0.009, 0.01))
    assert (few["cold engine"], many["cold engine"]) == (
        {"p99_ttft_ms": (0.0, 0.0)},
        {"p99_ttft_ms": (0.0, COLD[1])},
    )
    two = replace(DENSE, engine=DENSE.engine.model_copy(update={"tensor_parallel_size": 2}))
    assert unexplained(tail, two, drawn=False, first=0.5)["cold engine"] == {
        "p99_ttft_ms": (0.0, COLD[2])
    }
    found = unexplained(base, DENSE, drawn=False, told=False)
    assert {name for name, moved in found.items() if moved} == {"client", "rest"}


def test_experts_are_a_cause_of_their_own():
    base = {"mean_e2el_ms": 1000.0, "p99_ttft_ms": 100.0}
    models = (replace(DENSE.model, num_experts=one, num_experts_per_tok=1) for one in (31, 32))
    specs = [replace(DENSE, model=model) for model in models]
    few, many = (unexplained(base, spec, drawn=False)["experts"] for spec in specs)
    assert few == {"mean_e2el_ms": (60.0, 60.0), "p99_ttft_ms": (6.0, 70.0)}
    assert many == {"mean_e2el_ms": (210.0, 470.0), "p99_ttft_ms": (6.0, 70.0)}
    assert "experts" not in unexplained(base, DENSE, drawn=False)


def test_sums_over_pcie_that_nobody_measured_are_a_cause_and_are_said(write, capsys, tmp_path):
    """Of two RTX 4090 a blind set's TTFT was 10 times as long as predicted, TPOT 1.3 times."""
    keys = ["gpu={name: RTX-4090, count: 2}", "engine.tensor_parallel_size=2"]
    path, words = write(TOLD), [word for key in keys for word in ("--set", key)]
    told = "Headway has no measurements of kernels of llama-3-8b in bfloat16 on RTX-4090 or of sums"
    assert main(["run", str(path), *words, "--out", str(tmp_path / "o")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{told} over PCIe (two RTX 4090 took 9 times" in text
    scenario = load_scenario(path, keys)
    _, ttft, tpot, _ = measure_sensitivity(run(scenario), changed_runs(scenario))
    assert next(iter(ttft.shares)) == next(iter(tpot.shares)) == "links"
    assert ttft.interval[1] > 10 * ttft.value
    assert tpot.interval[1] > 1.33 * tpot.value
    one = load_scenario(path, ["gpu={name: RTX-4090, count: 1}"])
    assert "PCIe" not in resolve(one).cost.unmeasured
    nvlink = load_scenario(path, ["gpu={name: A100-40GB, count: 2}", keys[1]])
    assert "PCIe" not in resolve(nvlink).cost.unmeasured


def scenario_hosts(costs):
    """The host's seconds a step at both ends of its interval."""
    return [costs[f"host {end}"].inner.host for end in ("low", "high")]


def test_a_host_is_taken_to_both_ends_of_its_interval():
    cost = PiecewiseCost([[1, 1.0]], host=0.5, host_interval=[0.25, 1.0], overlapped=True)
    costs = changed_costs(cost)
    assert [*costs] == [STEPS, "host low", "host high"]
    hosts = costs["host low"], costs["host high"]
    assert [one.host for one in hosts if isinstance(one, PiecewiseCost)] == [0.25, 1.0]


def test_a_host_without_an_interval_may_take_a_tenth_of_a_millisecond_more_or_less():
    """Of each step, however many requests it has."""
    cost = PiecewiseCost([[1, 0.5], [8, 0.5]], overhead=0.5, residuals={"decode": 0.1})
    changed = changed_costs(cost)
    for count in (1, 4):
        step = Step([], count, 10 * count)
        plain = cost.execute(step).seconds
        for end, more in (("host low", -1e-4), ("host high", 1e-4)):
            assert changed[end].execute(step).seconds - plain == pytest.approx(more)


KNEE = """
name: knee
engine: {max_num_seqs: 8, max_num_batched_tokens: 512}
cost: {kind: linear, base: 0.01}
workload: {num_prompts: 2000, request_rate: RATE, input_len: 10, output_len: 10}
"""


def test_near_saturation_a_line_says_so(write, tmp_path, capsys):
    """Eight seats of 0.1 s serve 80 requests a second."""
    out = tmp_path / "out"
    path = write(KNEE.replace("RATE", "79"))
    assert main(["run", str(path), "--sensitivity", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "Mean E2EL, 95 % (ms):" in told
    assert "not known" in told
    assert "On a cliff: 1 % of step time moves mean E2EL by" in told
    summary = json.loads((out / "summary.json").read_text())
    e2el = summary["headway"]["sensitivity"]["mean_e2el_ms"]
    assert main(["report", str(out), "--out", str(tmp_path / "page.html")]) == 0
    assert "Mean E2EL if steps are 1 % longer (%)" in (tmp_path / "page.html").read_text()
    assert e2el["elasticity"] > 5
    assert e2el["cliff"] is True
    assert e2el["interval_95"] is None
    calm = write(KNEE.replace("RATE", "20"), "calm.yaml")
    assert main(["run", str(calm), "--sensitivity", "--out", str(out)]) == 0
    assert "On a cliff" not in capsys.readouterr().out


def test_what_it_does_not_go_with(write, tmp_path, capsys):
    path = str(write(ALONE))
    for option in (["--replications", "3"], ["--no-tables"]):
        assert main(["run", path, "--sensitivity", *option, "--out", str(tmp_path / "x")]) == 2
        assert "--sensitivity" in capsys.readouterr().err
    groups = "cluster={groups: {a: {replicas: 1}, b: {replicas: 1}}}"
    with pytest.raises(HeadwayError, match="not for clusters of several groups"):
        changed_runs(load_scenario(write(ALONE), [groups]))
    cluster = load_scenario(write(ALONE), ["cluster={replicas: 2}"])
    found = measure_sensitivity(run(cluster), changed_runs(cluster))
    assert found[0].elasticity == pytest.approx(1.0)
