"""Replications: noise of the cost model, common random numbers, the commands' files."""

import json
from functools import partial
from io import BytesIO
from math import exp

import numpy as np
import pandas as pd
import pytest

from headway.cli.main import main
from headway.planning.design import expand
from headway.planning.intervals import estimate
from headway.planning.replications import (
    LOOKS,
    compare_intervals,
    differences,
    draw_intervals,
    encode_differences,
    estimates,
    replicate,
    replicate_until_decided,
    run_intervals,
    seeds,
    winner_lines,
)
from simulator.costs.linear import LinearCost
from simulator.costs.noise import Noise, ScaledCost, with_drawn_noise
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from tests.support.scenarios import SMALL

NOISY = SMALL.replace(
    "per_context: 0}", "per_context: 1e-6, residuals: {decode: 0.1, prompts: 0.2}}"
)


MET = ("best", "near")


def test_where_there_are_bounds_attainment_is_drawn_in_per_cent():
    rows = [{"output_throughput": 10.0 + k, "slo_attainment": 0.9 + 0.02 * k} for k in range(3)]
    first, second = draw_intervals(["a"], [rows]).axes[:2]
    assert second.get_title() == "SLO attainment (%)"
    assert second.lines[-1].get_xdata()[0] >= 90.0
    assert first.get_title() == "Output throughput (tok/s)"


def test_runs_are_drawn_from_the_top_in_the_order_that_they_are_named_in():
    rows = [{"output_throughput": 10.0 + k} for k in range(3)]
    axes = draw_intervals(["first", "second"], [rows, rows]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
    first, second = axes.transData.transform([(10.0, 0), (10.0, 1)])[:, 1]
    assert first > second


def test_factors_by_hand(write):
    """One standard deviation up for decodes, two down for prompts."""
    scenario = load_scenario(write(NOISY))
    plain, off = run(scenario), run(scenario, noise=Noise(1.0, -2.0).apply)
    cost = off.spec.cost
    assert isinstance(cost, ScaledCost)
    assert (cost.decode, cost.prompts) == (exp(0.1), exp(-0.4))
    steps = plain.steps.iloc[0]
    assert steps.prefill_tokens == 64
    first = off.steps.duration.iloc[0] / plain.steps.duration.iloc[0]
    assert first == pytest.approx(exp(-0.4), rel=1e-4)


def test_without_residuals_nothing_changes(write):
    """A cost model without residuals is left as it is, to the object."""
    scenario = load_scenario(write(SMALL))
    result = run(scenario, noise=Noise(3.0, 3.0).apply)
    assert not isinstance(result.spec.cost, ScaledCost)
    assert result.summary() == run(scenario).summary()


@pytest.mark.parametrize("policy", ["fcfs", "static", "sjf"])
def test_leaps_stay_exact_under_noise(write, policy):
    """With noise too the leaping run is the stepwise run to the last bit."""
    text = NOISY.replace("max_num_seqs: 8", f"max_num_seqs: 8, scheduling_policy: {policy}")
    scenario = load_scenario(write(text))
    noise = Noise(0.7, -1.3).apply
    leaping, stepwise = run(scenario, noise=noise), run(scenario, stepwise=True, noise=noise)
    pd.testing.assert_frame_equal(leaping.requests, stepwise.requests, check_exact=True)


def test_noise_has_the_spread_it_says():
    """Over many seeds the logarithms of factors have the standard deviation of the residuals."""
    cost = LinearCost(1e-2)
    drawn = [Noise.draw(seed, cost) for seed in seeds(0, 2000)]
    both = np.array([(noise.decode, noise.prompts) for noise in drawn])
    assert np.abs(both.mean(axis=0)).max() < 0.08
    assert np.abs(both.std(axis=0) - 1).max() < 0.06
    assert abs(np.corrcoef(both.T)[0, 1]) < 0.08


def test_cost_models_err_each_by_itself():
    """In one replication: the same factors for one cost model, others for another."""
    one, same, other = (
        run(load_scenario("demo", [f"gpu.name={gpu}", *more]), noise=partial(with_drawn_noise, 7))
        for gpu, more in (("A100-80GB", []), ("A100-80GB", ["engine.max_num_seqs=8"]), ("L40S", []))
    )
    factors = [(run.spec.cost.decode, run.spec.cost.prompts) for run in (one, same, other)]
    assert factors[0] == factors[1]
    assert factors[0] != factors[2]


@pytest.mark.parametrize("router", ["round_robin", "least_outstanding"])
def test_replicas_of_a_cluster_err_alike(write, router):
    """Replicas apart, and replicas that a router looks at: all are slower by the same factor."""
    text = f"{NOISY}cluster: {{replicas: 2, router: {router}}}\n"
    scenario = load_scenario(write(text))
    plain, off = run(scenario), run(scenario, noise=Noise(1.0, 1.0).apply)
    for one, other in zip(plain.logs, off.logs, strict=True):
        ratio = (other.steps["end"][0] - other.steps["start"][0]) / (
            one.steps["end"][0] - one.steps["start"][0]
        )
        assert ratio == pytest.approx(exp(0.2), rel=1e-4)


def test_seeds_do_not_depend_on_their_number():
    """More replications add to those that were there."""
    assert seeds(5, 9)[:3] == seeds(5, 3)
    assert len(set(seeds(5, 100) + seeds(6, 100))) == 200


def test_common_random_numbers_narrow_the_difference(write):
    """Two runs that differ by little: their pairs tell it, runs apart would not."""
    path = write(NOISY.replace("num_prompts: 40", "num_prompts: 60"))
    points = expand(path, ["engine.max_num_batched_tokens=2048,96"])
    first, other = replicate([point.scenario for point in points], 10)
    ttft = [np.array([row["mean_ttft_ms"] for row in same]) for same in (first, other)]
    pairs = estimate((ttft[1] - ttft[0]).tolist())
    apart = np.sqrt(
        estimate(ttft[0].tolist()).half_width ** 2 + estimate(ttft[1].tolist()).half_width ** 2
    )
    assert 0 < pairs.half_width < apart / 2
    prompts = [[row["total_input_tokens"] for row in same] for same in (first, other)]
    assert prompts[0] == prompts[1]


def test_run_command(write, tmp_path, capsys):
    """Files, same bytes for the same seed, and the interval that the runs give."""
    path = write(NOISY)
    for name in ("a", "b"):
        command = ["run", str(path), "--replications", "4", "--out", str(tmp_path / name)]
        assert main(command) == 0
    files = ("replications.csv", "intervals.json", "scenario.yaml")
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == sorted(files)
    rows = pd.read_csv(tmp_path / "a" / "replications.csv")
    told = json.loads((tmp_path / "a" / "intervals.json").read_text())
    found = estimate(rows.mean_ttft_ms.tolist())
    metric = told["metrics"]["mean_ttft_ms"]
    assert metric["mean"] == pytest.approx(found.mean)
    assert metric["mean_interval"] == pytest.approx([*found.interval])
    assert metric["one_run_interval"] == pytest.approx([*found.prediction_interval])
    assert "small, 4 replications" in capsys.readouterr().out


@pytest.mark.medium
def test_compare_command(write, tmp_path, capsys):
    """A much smaller batch is surely slower; an empty change makes no difference at all."""
    path = write(NOISY.replace("num_prompts: 40", "num_prompts: 100"))
    command = ["compare", str(path), "--vary", "engine.max_num_seqs=8,1,7", "--warmup", "0.5"]
    assert main([*command, "--replications", "5", "--out", str(tmp_path / "c")]) == 0
    rows = pd.read_csv(tmp_path / "c" / "comparison.csv").set_index(["run", "metric"])
    worse = rows.loc[(1, "mean_ttft_ms")]
    assert worse.difference > 0
    assert worse.verdict == "worse"
    assert worse.p_value < worse.p_holm < 0.05
    assert worse.difference_low < worse.difference < worse.difference_high
    assert np.isnan(rows.loc[(8, "mean_ttft_ms")].difference)
    assert (tmp_path / "c" / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert len(pd.read_csv(tmp_path / "c" / "replications.csv")) == 15
    assert "5 pairs" in capsys.readouterr().out


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--replications", "1"], "--replications 1: must be 2 to 10,000"),
        (["--replications", "-3"], "--replications -3: must be 2 to 10,000 ("),
        (["--warmup", "-1"], "--warmup -1: must be 0 or more ("),
        (["--cooldown", "nan"], "--cooldown nan: must be 0 or more ("),
        (["--warmup", "1e9"], "none is left to measure"),
        (["--warmup", "1e9", "--replications", "2"], "none is left to measure"),
    ],
)
def test_bad_options(write, tmp_path, capsys, arguments, what):
    """One line, exit code 2, nothing written."""
    out = tmp_path / "none"
    assert main(["run", str(write(SMALL)), "--out", str(out), *arguments]) == 2
    line = capsys.readouterr().err
    assert what in line
    assert line.count("\n") == 1
    assert not out.exists()


def test_a_varied_seed_is_refused(write, tmp_path, capsys):
    """Pairs need the same random numbers."""
    command = ["compare", str(write(SMALL)), "--vary", "seed=1,2", "--replications", "3"]
    assert main([*command, "--out", str(tmp_path / "x")]) == 2
    assert "--vary seed: replications draw their seeds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("residuals", "what"),
    [
        ("{decodes: 0.1}", "cost.residuals.decodes: unknown; there are decode, prompts"),
        ("{decode: 2}", "cost.residuals.decode: must be a standard deviation of 0 to 1, not 2"),
        ("0.1", "cost.residuals: must be a mapping of decode and prompts"),
    ],
)
def test_bad_residuals(write, residuals, what):
    """The field is named."""
    text = NOISY.replace("{decode: 0.1, prompts: 0.2}", residuals)
    with pytest.raises((HeadwayError, ValueError), match=what.replace(".", r"\.")):
        run(load_scenario(write(text)))


def test_residuals_of_a_profile(write, tmp_path):
    """A profile carries them; a scenario may give others in their place."""
    profile = tmp_path / "p.yaml"
    profile.write_text(
        "cost: {kind: linear, base: 0.01}\nresiduals: {decode: 0.03, prompts: 0.05}\n"
    )
    text = SMALL.replace("{kind: linear, base: 1e-2, per_token: 1e-5, per_context: 0}", "{COST}")
    own = run(load_scenario(write(text.replace("COST", "profile: p.yaml"), "own.yaml")))
    assert own.spec.cost.residuals == {"decode": 0.03, "prompts": 0.05}
    other = text.replace("COST", "profile: p.yaml, residuals: {decode: 0.2}")
    assert run(load_scenario(write(other, "o.yaml"))).spec.cost.residuals == {"decode": 0.2}


def test_replays_of_a_trace_do_not_differ(write, put, tmp_path, capsys):
    """Nothing is random then, and that is said."""
    put("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,10,3\n", "t.csv")
    text = SMALL.replace(
        "{num_prompts: 40, request_rate: 20, input_len: 64, output_len: 8}",
        "{trace: {path: t.csv, format: azure}}",
    )
    command = ["run", str(write(text)), "--replications", "2", "--out", str(tmp_path / "o")]
    assert main(command) == 0
    assert "no replication differs from another" in capsys.readouterr().err


@pytest.mark.parametrize(("other", "told"), [(4.0, True), (2.0, False)])
def test_where_prices_differ_the_cost_of_a_token_is_compared(other, told):
    """Twice the price at nearly the same load; at equal prices the table is silent on cost."""
    key, speeds = "dollars_per_million_output_tokens", (100.0, 101.0, 99.0)
    runs = [
        [{"output_throughput": speed, key: 100 * price / speed} for speed in speeds]
        for price in (2.0, other)
    ]
    found = differences(runs)
    table = compare_intervals(["a", "b"], found, everything=True)
    assert ("Cost of 1M output tokens ($)" in table) is told
    assert (
        any(line.startswith("Winner by price: a") for line in winner_lines(["a", "b"], runs))
        is told
    )
    rows = pd.read_csv(BytesIO(encode_differences([{"run": "a"}, {"run": "b"}], runs, found)))
    (_, row) = rows[rows.metric == key].itertuples()
    assert row.mean == pytest.approx(other, rel=1e-3)
    if told:
        assert (row.difference > 0, row.verdict) == (True, "worse")


def test_no_difference_is_more_than_the_metric_can_be():
    """0.9 on average lose no more than that: the interval went down to -0.98."""
    values = [0.9, 1.0, 0.8], [0.0, 0.2, 0.0]
    runs = [[{"slo_attainment": value} for value in same] for same in values]
    found = differences(runs)
    assert " -90.00 to " in compare_intervals(["a", "b"], found)
    rows = pd.read_csv(BytesIO(encode_differences([{"run": "a"}, {"run": "b"}], runs, found)))
    assert rows.difference_low.min() == pytest.approx(-0.9)


def test_no_latency_is_below_0_or_minus_0():
    values = [{"p99_ttft_ms": value} for value in (0.0, 1.0, 1000.0)]
    table = run_intervals("demo", estimates(values))
    assert "0.00 to " in table
    assert "-0.00" not in table


def test_lines_that_are_left_out_are_counted():
    """What is within 1 % and may be chance is left out."""
    runs = [[{"slo_attainment": share} for share in (0.8, 0.82, last)] for last in (0.8, 0.801)]
    said = compare_intervals(["a", "b"], differences(runs))
    assert said.endswith("\nLeft out: 1 of 1% at most that may be chance (--all)")


def test_a_factor_that_may_be_chance_is_shown_with_the_pairs_that_decide():
    """17.9 to 3.7 s in three pairs: the p is 0.2 or so, and a few pairs more decide."""
    runs = [
        [{"mean_ttft_ms": value} for value in same]
        for same in ([17_900.0, 30_000.0, 8_000.0], [3_700.0, 4_000.0, 3_500.0])
    ]
    (found,) = differences(runs)[0]
    assert not found.significant
    assert found.needed is not None
    assert 3 < found.needed < 20
    said = compare_intervals(["a", "b"], differences(runs))
    assert f"({found.needed} pairs) 0." in said
    assert said.splitlines()[0].split()[:4] == ["3", "pairs", "a", "b"]
    row = next(line for line in said.splitlines() if line.startswith("Mean TTFT"))
    assert row.endswith(" ?")
    assert "18,633.33" in row
    assert "-18,633.33 to " in row  # no latency is less than 0


def test_a_winner_by_service_levels_needs_no_other_difference(monkeypatch):
    """The best attains 0.99, others 0.5 and 0.6, give or take 0.2: E2EL decides nothing.

    Beside one that keeps the levels, too, with 0.8 to 1, more replications are made.
    """
    given = {"best": [0.99, 0.98], "low": [0.3, 0.7], "high": [0.8, 0.4], "near": [0.999, 0.8]}
    counts = []

    def measured(names, count, **_):
        counts.append(count)
        return [
            [
                {
                    "slo_attainment": given[name][k % 2] + 1e-4 * k,
                    "slo_met": name in MET,
                    "mean_e2el_ms": 100.0 * given[name][k % 2],
                    "completed": 9,
                }
                for k in range(count)
            ]
            for name in names
        ]

    monkeypatch.setattr("headway.planning.replications.replicate", measured)
    replicate_until_decided(["low", "best", "high"], 8)
    assert counts == [8]
    replicate_until_decided(["near", "best", "high"], 8)
    assert counts[1:] == [8, 16]


@pytest.mark.medium
def test_replications_are_added_until_a_winner_is_decided(monkeypatch):
    """The first replications stay; p values count for all looks that are taken."""
    sets = ["workload.num_prompts=60", "workload.request_rate=6", "goodput=null"]
    seats = [load_scenario("demo", [*sets, f"engine.max_num_seqs={n}"]) for n in (6, 24)]
    runs = replicate_until_decided(seats, 2)
    assert len(runs[0]) in (4, 8, 16, 32)
    assert runs[0][:2] == replicate(seats, 2)[0]
    tests = differences(runs, LOOKS)[0]
    assert next(one for one in tests if one.metric == "mean_e2el_ms").significant
    assert [one.adjusted for one in tests] == [
        min(LOOKS * one.adjusted, 1.0) for one in differences(runs)[0]
    ]
