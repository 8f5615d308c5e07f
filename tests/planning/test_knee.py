"""How near a load is to saturation, by theory: steps whose times are known, and simulation."""

import json

import pytest

from calibration.measured.compare import MetricComparison, Outcome
from calibration.measured.report import report
from calibration.measured.runs import Run
from headway.cli.main import main
from headway.planning.knee import _known_share, find_knee
from headway.planning.sensitivity import changed_runs, measure_sensitivity
from headway.report.text import load_line
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run

BATCHED = """
name: batched
engine: {max_num_seqs: 64, max_num_batched_tokens: 8192}
cost: {kind: linear, base: 0.01, per_sequence: 0.001}
workload: {num_prompts: 1500, request_rate: RATE, input_len: 10, output_len: 101}
"""
"""A step of d decodes takes 10 + d ms, so that a request takes 1 + 0.1 d s for its 100 tokens; 64
seats serve 64 / (100 (10 + 64) ms) = 8.65 requests/s."""


@pytest.mark.parametrize("rate", [2.0, 5.0, 7.0])
def test_theory_is_that_of_a_batch_that_fills(write, rate):
    """d = rate (1 + 0.1 d), so a request moves by 1 / (1 - 0.1 rate) % for 1 % of step time.

    The prompt's own step takes 10 ms more, for each request.
    """
    knee = find_knee(run(load_scenario(write(BATCHED.replace("RATE", str(rate))))))
    assert knee.saturation_throughput == pytest.approx(64 / 7.4, rel=0.1)
    assert knee.share == pytest.approx(rate / knee.saturation_throughput)
    assert knee.e2el_elasticity == pytest.approx(1 / (1 - 0.1 * rate), rel=0.15)


def test_theory_agrees_with_what_simulations_measure(write):
    scenario = load_scenario(write(BATCHED.replace("RATE", "7")))
    result = run(scenario)
    e2el, *_ = measure_sensitivity(result, changed_runs(scenario))
    assert find_knee(result).e2el_elasticity == pytest.approx(e2el.elasticity, rel=0.25)


@pytest.mark.medium
@pytest.mark.parametrize("rate", [3.5, 4.6])
def test_so_it_does_where_requests_wait_for_seats(write, rate):
    """12 of them serve 5.4 requests/s."""
    keys = ["engine.max_num_seqs=12", "workload.num_prompts=6000"]
    scenario = load_scenario(write(BATCHED.replace("RATE", str(rate))), keys)
    result = run(scenario)
    e2el, *_ = measure_sensitivity(result, changed_runs(scenario))
    assert find_knee(result).e2el_elasticity == pytest.approx(e2el.elasticity, rel=0.1)


@pytest.mark.medium
def test_a_run_near_saturation_says_so_in_numbers(write, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["run", str(write(BATCHED.replace("RATE", "8.2"))), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    load = json.loads((out / "summary.json").read_text())["headway"]["load"]
    assert load["share"] > 0.9
    assert f"Load: sits at {load['share']:.0%} of the saturation throughput" in told
    assert f"about {load['e2el_elasticity']:.1f} % for 1 % of step time" in told
    assert main(["report", str(out), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Load (% of saturation throughput)" in page
    assert f"Load: sits at {load['share']:.0%} of the saturation throughput" in page
    assert main(["run", str(write(BATCHED.replace("RATE", "4"))), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "Load (% of saturation throughput):" in told
    assert "Load: sits" not in told


def test_beyond_saturation_nothing_bounds_it(write):
    knee = find_knee(run(load_scenario(write(BATCHED.replace("RATE", "20")))))
    assert knee.as_summary()["e2el_elasticity"] is None
    assert load_line(knee.as_summary()).endswith("mean E2EL grows with the run's length")


@pytest.mark.parametrize(
    "keys", ["workload.max_concurrency=4", "cluster.autoscaling.max_replicas=3"]
)
def test_loads_without_a_rate_and_fleets_that_change_have_none(write, keys):
    scenario = load_scenario(write(BATCHED.replace("RATE", "5")), [keys])
    assert find_knee(run(scenario)) is None


def test_two_replicas_serve_twice_as_much(write):
    path = write(BATCHED.replace("RATE", "7"))
    one, two = (
        find_knee(run(load_scenario(path, [f"cluster.replicas={count}"]))) for count in (1, 2)
    )
    assert two.saturation_throughput == pytest.approx(2 * one.saturation_throughput)


def test_of_prompts_that_begin_alike_the_share_is_known_that_the_caches_had(write):
    """48 of 64 tokens, but for the first request, which nobody came before."""
    keys = ["workload={num_prompts: 10, request_rate: 1, input_len: 16, prefix_len: 48}"]
    keys += ["workload.output_len=2", "engine.enable_prefix_caching=true"]
    result = run(load_scenario(write(BATCHED.replace("RATE", "1")), keys))
    assert _known_share(result) == pytest.approx(9 * 48 / 640)


def test_validate_counts_runs_near_saturation_apart():
    outcomes = []
    for share, predicted in ((0.5, 101.0), (0.95, 150.0)):
        outcome = Outcome(Run({"run_id": "a", "source": "lab"}, {}, {}))
        outcome.rows = [MetricComparison("mean_e2el_ms", predicted, 100.0)]
        outcome.load = {"saturation_throughput": 10.0, "share": share, "e2el_elasticity": 2.0}
        outcomes.append(outcome)
    told = report(outcomes)
    assert "sits at 95% of the saturation throughput (10 requests/s)" in told
    summary = told[told.index("source, tier") :].splitlines()
    calm, near = (line for line in summary if "e2el mean" in line)
    assert calm.startswith("lab  ")
    assert calm.endswith("1.0%      1.0%")
    assert near.startswith("lab, near saturation")
    assert near.endswith("50.0%     50.0%")


def test_the_cache_of_the_engine_bounds_the_throughput_whatever_seats_are_asked_for() -> None:
    """Fewer seats would leave more memory to the cache; this engine has 1,024."""
    given = {
        "model": "llama-3-70b",
        "gpu": {"name": "H100", "count": 2},
        "engine": {"name": "vllm", "gpu_memory_utilization": 0.933},
        "workload": {"num_prompts": 100, "request_rate": 2, "input_len": 2000, "output_len": 300},
    }
    result = run(load_scenario(given))
    knee = find_knee(result)
    assert knee is not None
    assert knee.saturation_throughput == pytest.approx(
        result.summary()["request_throughput"], rel=0.1
    )
