"""Calibrate from a server's own log of requests."""

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from calibration.server_logs.from_requests import fit_log
from calibration.server_logs.request_log import RequestLog, read_log, terms_of
from headway.cli.main import main
from simulator.costs.profile import read_profile
from simulator.costs.split import SplitCost
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError

TRUE = (1.5e-3, 2e-5, 8e-3)  # s: per step, per sequence, from the clock to the scheduler
KERNELS = """name: server
description: one of known overheads
engine: {name: textbook,
  max_num_seqs: 64, enable_prefix_caching: false, max_num_batched_tokens: 512}
cost: {kind: piecewise, dense: [[1, 5e-3], [64, 6e-3], [512, 2e-2]], overhead: OVER,
       host_per_sequence: HOST, decode_per_context: 1e-7, prefill_per_pair: 2e-9}
workload: {num_prompts: 240, request_rate: 8, burstiness: 0.2,
           input_len: {kind: uniform, low: 50, high: 800},
           output_len: {kind: uniform, low: 5, high: 120}, client_latency: LATE}
seed: SEED
"""


def scenario(write, step=2e-4, per_sequence=0.0, client=0.0, seed=1):
    """Write a server's scenario with these overheads."""
    text = KERNELS.replace("OVER", str(step)).replace("HOST", str(per_sequence))
    return write(
        text.replace("LATE", str(client)).replace("SEED", str(seed)), f"server-{step}.yaml"
    )


def make_log(path: Path, write, seed: int, noise: float = 0.03) -> Path:
    """Simulate a server with the true overheads, and log its requests as measured with noise."""
    table = run(load_scenario(scenario(write, *TRUE, seed))).requests
    draw = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s"])
        for row in table.itertuples():
            ttft, tpot = (x * np.exp(draw.normal(0, noise)) for x in (row.ttft, row.tpot))
            cells = [row.arrival, row.prompt_tokens, row.output_tokens, ttft, tpot]
            writer.writerow(cells)
    return path


@pytest.mark.medium
def test_known_overheads_are_found(write, tmp_path):
    """Of logs with known overheads and 3 % noise: what fits best is near, intervals hold it."""
    held = 0
    for seed in (1, 3):
        log = read_log(make_log(tmp_path / "log.csv", write, seed), load_scenario(scenario(write)))
        fit = fit_log(log)
        for term, true in zip(fit.terms, TRUE, strict=True):
            assert term.interval is not None
            held += term.interval[0] <= true <= term.interval[1]
        assert fit.terms[0].value == pytest.approx(TRUE[0], rel=0.1)
        assert fit.terms[2].value == pytest.approx(TRUE[2], rel=0.1)
        before, after = fit.errors["tpot"]
        assert after < 0.03 < before
        assert abs(fit.means["ttft"][1]) < 0.02 < abs(fit.means["ttft"][0])
    assert held >= 5  # of six


class Slope(RequestLog):
    """A log whose loss is known: the less per sequence the better, on a straight line.

    From 200 us per sequence on, each of 10 us more is half a millisecond of a step.
    """

    def losses(self, terms):
        step, sequences, client = terms / (1e-3, 1e-5, 1e-3)
        seen = step + 0.5 * max(0.0, sequences - 20) - 10
        return np.full(20, seen**2 + sequences + (client - 3) ** 2)


def test_what_a_log_does_not_tell_stays_and_the_others_are_found_beside_it(write, tmp_path):
    """Without the wait of 300 us per sequence a step waits for 10 ms, with it for 5 ms."""
    path = scenario(write, step=2e-4, per_sequence=3e-4)
    log = read_log(make_log(tmp_path / "log.csv", write, 1), load_scenario(path))
    step, sequences, client = fit_log(Slope(**vars(log))).terms
    assert sequences.interval is None
    assert sequences.value == 3e-4
    assert step.value == pytest.approx(5e-3, rel=1e-3)
    assert client.value == pytest.approx(3e-3, rel=1e-3)


@pytest.mark.medium
def test_command(write, tmp_path, capsys, monkeypatch):
    """The profile that is written, with the latency told, simulates what was logged."""
    log = make_log(tmp_path / "log.csv", write, 1, noise=0.0)
    path, out = scenario(write), tmp_path / "out"
    command = ["calibrate", "--from-requests", str(log), "--scenario", str(path), "--out", str(out)]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "held out of a fit to the others" in told
    (hint,) = [line for line in told.splitlines() if line.startswith("to use it: ")]
    words = shlex.split(hint.removeprefix("to use it: "), comments=True)
    assert words[:3] == ["headway", "run", str(path)]
    profile = read_profile(out / "server-adjusted.yaml")
    assert profile.cost.overhead == pytest.approx(TRUE[0], rel=0.2)
    assert profile.cost.residuals is not None
    assert 0 <= profile.cost.residuals["decode"] < 0.02
    about = json.loads((out / "calibration.json").read_text())
    client = {term["name"]: term["value"] for term in about["terms"]}["client"]
    keys = words[4::2]
    assert keys == [
        f"cost={{profile: {out.relative_to(path.parent)}/server-adjusted.yaml}}",
        f"workload.client_latency={client:.4g}",
    ]
    monkeypatch.chdir("/")
    again = run(load_scenario(path, keys)).summary()
    true = run(load_scenario(scenario(write, *TRUE))).summary()
    assert again["mean_ttft_ms"] == pytest.approx(true["mean_ttft_ms"], rel=0.02)
    assert again["mean_tpot_ms"] == pytest.approx(true["mean_tpot_ms"], rel=0.01)
    first = (out / "server-adjusted.yaml").read_bytes()
    assert main(command) == 0
    assert (out / "server-adjusted.yaml").read_bytes() == first


HOST = """name: host
model: qwen2.5-7b
gpu: {name: H100-80GB, count: 2}
engine: {name: vllm, version: "0.15", tensor_parallel_size: 2, max_num_seqs: 128}
workload: {num_prompts: 250, request_rate: 40, burstiness: 0.2,
           input_len: {kind: uniform, low: 50, high: 1000},
           output_len: {kind: uniform, low: 10, high: 200}}
seed: 1
"""


@pytest.mark.medium
def test_a_hidden_host_is_found(write, tmp_path, capsys):
    """Of an asynchronous engine whose host takes 6 ms and 60 us a sequence, beside 0.1 ms."""
    path, log, out = write(HOST), tmp_path / "log.csv", tmp_path / "out"
    true = ["host={per_step: 6.0e-3, per_sequence: 6.0e-5, launch_gap: 1.0e-4}"]
    table = run(load_scenario(path, [*true, "workload.client_latency=2e-3"])).requests
    names = {"arrival": "arrival_s", "ttft": "ttft_s", "tpot": "tpot_s"}
    table.rename(columns=names).to_csv(log, index=False)
    command = ["calibrate", "--from-requests", str(log), "--scenario", str(path), "--out", str(out)]
    assert main(command) == 0
    told = capsys.readouterr().out
    about = json.loads((out / "calibration.json").read_text())
    found = {term["name"]: term for term in about["terms"]}
    least, most = found["host"]["interval"]  # what a step and a sequence take is hard to tell apart
    assert least < 6.0e-3 < most
    assert found["host"]["value"] == pytest.approx(6.0e-3, rel=0.1)
    assert found["per_sequence"]["value"] == pytest.approx(6.0e-5, rel=0.1)
    before, after = about["errors"]["tpot"]
    assert after < 0.01
    assert before > 0.2
    profile = read_profile(out / "host-adjusted.yaml")
    assert profile.cost.host_interval == pytest.approx(found["host"]["interval"], rel=1e-4)
    (line,) = [line for line in told.splitlines() if line.startswith("--set ")]
    again = run(load_scenario(path, shlex.split(line, comments=True)[1::2])).summary()
    # no launch gap is negative: the line cannot take off what the fit takes off sampling
    assert again["mean_tpot_ms"] == pytest.approx(1e3 * table["tpot"].mean(), rel=0.02)
    assert again["headway"]["host"]["per_step_interval_s"] is not None


@pytest.mark.medium
def test_large_logs_are_fitted_on_all_cores_alike(write, tmp_path, monkeypatch):
    path = make_log(tmp_path / "log.csv", write, 1)
    here = fit_log(read_log(path, load_scenario(scenario(write))))
    monkeypatch.setattr("calibration.server_logs.request_log.PARALLEL_FROM", 1)
    assert fit_log(read_log(path, load_scenario(scenario(write)))).terms == here.terms


SPLIT = """name: b200
model: llama-3.1-8b
gpu: {name: B200}
engine: {name: vllm, version: "0.15", max_num_seqs: 64, kv_cache_dtype: fp8}
workload: {num_prompts: 80, request_rate: 20, input_len: 500, output_len: 40}
"""


@pytest.mark.medium
def test_the_wait_for_the_longest_is_kept_in_a_profile(write, tmp_path):
    path, log = write(SPLIT, "b200.yaml"), tmp_path / "log.csv"
    table = run(load_scenario(path)).requests
    names = {"arrival": "arrival_s", "ttft": "ttft_s", "tpot": "tpot_s"}
    table.rename(columns=names).to_csv(log, index=False)
    out = tmp_path / "out"
    command = ["calibrate", "--from-requests", str(log), "--scenario", str(path), "--out", str(out)]
    assert main(command) == 0
    cost = read_profile(out / "b200-adjusted.yaml").cost
    assert isinstance(cost, SplitCost)
    assert cost.per_key == pytest.approx(32 * 16.4e-9)
    assert (cost.kv_heads, cost.multiprocessors) == (8, 148)
    again = run(load_scenario(path, [f"cost={{profile: {out}/b200-adjusted.yaml}}"])).requests
    assert again["tpot"].mean() == pytest.approx(table["tpot"].mean(), rel=0.02)


def test_client_latency_delays_first_tokens(write):
    """The scenario's key adds itself to TTFT and leaves TPOT as it is."""
    near = run(load_scenario(scenario(write))).summary()
    far = run(load_scenario(scenario(write, client=0.25))).summary()
    assert far["mean_ttft_ms"] - near["mean_ttft_ms"] == pytest.approx(250, abs=1e-6)
    assert far["mean_tpot_ms"] == pytest.approx(near["mean_tpot_ms"])


HEAD = "arrival_s,prompt_tokens,output_tokens,ttft_s,e2e_s\n"
ROWS = "".join(f"{k},10,5,0.1,0.5\n" for k in range(70))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (HEAD + ROWS + "70,10,5,0.5,0.1\n", "log.csv:72: the last token comes 0.1 s after"),
        (HEAD + "0,10,5,-0.1,0.5\n" + ROWS, "log.csv:2: ttft_s: '-0.1' is negative"),
        (HEAD + "0,10,5,0.1,-2\n" + ROWS, "log.csv:2: e2e_s: '-2' is negative"),
        (HEAD + "0,10,5,0.1,x\n" + ROWS, "log.csv:2: e2e_s: 'x' is not a number"),
        (HEAD + ",10,5,0.1,1\n" + ROWS, "log.csv:2: arrival_s: missing"),
        (HEAD + "0,10,5,0.1,0.5\n" * 3, "log.csv: 3 requests are too few to fit: it takes 60"),
        (HEAD, "log.csv: has no requests"),
        ("arrival_s,ttft_s\n1,2\n", "log.csv:1: lacks a column of each request's prompt, output"),
        (
            "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{k},9,9\n" for k in range(70)),
            "log.csv:1: lacks a column of latencies: ttft_s, tpot_s or e2e_s",
        ),
        (
            HEAD.replace("e2e_s", "e2ee_s") + ROWS,
            "log.csv:1: e2ee_s: unknown column; did you mean e2e_s?",
        ),
    ],
)
def test_bad_logs(write, tmp_path, capsys, text, what):
    """One line that names the place, exit code 2, nothing written."""
    (tmp_path / "log.csv").write_text(text)
    out = tmp_path / "out"
    command = ["calibrate", "--from-requests", str(tmp_path / "log.csv"), "--scenario"]
    assert main([*command, str(scenario(write)), "--out", str(out)]) == 2
    *told, line = capsys.readouterr().err.splitlines()
    assert what in line
    assert all("not understood, and without effect: e2ee_s" in one for one in told)
    assert not out.exists()


def test_a_wrong_unit_is_no_success(write, tmp_path, capsys):
    """Milliseconds for seconds: a warning, and no line on how to use what was fitted."""
    rows = "".join(f"{k / 8},100,9,{100 + k % 5},{500 + k % 7}\n" for k in range(60))
    (tmp_path / "log.csv").write_text(HEAD + rows)
    command = ["calibrate", "--from-requests", str(tmp_path / "log.csv"), "--scenario"]
    assert main([*command, str(scenario(write)), "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert "log.csv: the fit explains too little to be used: half of the held-out" in told.err
    assert "to use it" not in told.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--from-requests x", "--from-requests: needs --scenario, which says what the server is"),
        ("--from-steps x", "--from-steps: needs --scenario"),
        (
            "--from-requests x --scenario s --model m",
            "--from-requests: cannot be used with --model",
        ),
        (
            "--from-requests x --from-steps y --scenario s",
            "--from-steps: cannot be used with --from-req",
        ),
        ("--from x --from-torch-profile y", "--from-torch-profile: cannot be used with --from\n"),
        ("--scenario s", "--scenario: needs --from-requests, --from-steps, --from-torch-pro"),
        ("--from x --scenario s", "or --server, not --from\n"),
        ("--model m --set a=1", "--set: needs --from-requests, --from-steps, --from-torch-pr"),
        ("--from-steps x --scenario s --columns a", "--columns: needs --from-requests, not"),
        ("--from-torch-profile x --set a=1", "--set: needs --scenario"),
        ("--from x --device cuda", "--device: needs --model, not --from"),
    ],
)
def test_options_go_together(capsys, options, said):
    """Each message names those that were given, no others, before any file is read."""
    assert main(["calibrate", *options.split()]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("headway: error: ") == 1


@pytest.mark.slow
def test_a_real_server(data, write):
    """LLMServingSim's log of vLLM 0.19 on an RTX PRO 6000: from a step 2 ms too long."""
    text = """name: pro
model: llama-3-8b
gpu: {name: RTX-PRO-6000}
engine: {name: vllm, max_num_seqs: 128, max_num_batched_tokens: 2048, async_scheduling: true}
cost: {profile: llama-3-8b.rtx-pro-6000.bf16, overhead: {step: 0.0025}}
"""
    log = data / "e2e" / "llmservingsim__RTXPRO6000__Llama-3_1-8B__requests.csv.gz"
    fit = fit_log(read_log(log, load_scenario(write(text))))
    before, after = fit.errors["e2el"]
    assert after < 0.02 < before
    assert abs(fit.means["tpot"][1]) < 0.01


def test_a_runs_own_file_is_not_off(tmp_path, capsys):
    """Of a closed loop: what waited at the client was sent later; nothing is fitted to nothing."""
    path = tmp_path / "closed.yaml"
    path.write_text(
        "model: llama-3-8b\ngpu: {name: A100-80GB}\nengine: {name: vllm}\nworkload: "
        "{num_prompts: 60, max_concurrency: 15, input_len: 300, output_len: 8}\n"
    )
    assert main(["run", str(path), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    log = ["calibrate", "--from-requests", str(tmp_path / "run" / "requests.csv")]
    assert main([*log, "--scenario", str(path), "--out", str(tmp_path / "fit")]) == 0
    out = capsys.readouterr().out
    for name in ("TTFT", "TPOT", "E2EL"):
        assert re.search(rf"{name}: median \|error\| 0.0% -> 0.0%, mean .0.0% -> .0.0%", out)


DRAFTS = {"num_speculative_tokens": 3, "acceptance": 0.7, "draft": {"fraction": 0.1}}
ENCODER = {"encoder_seconds": [[1, 0.004], [40, 0.02]]}


@pytest.mark.parametrize(
    ("engine", "load"),
    [
        ({"speculative_config": DRAFTS}, {}),
        ({"enable_lora": True, "max_loras": 2}, {"adapters": {"num_adapters": 4}}),
        ({"multimodal_config": ENCODER}, {"multimodal": {"image": {"tokens": 40, "distinct": 7}}}),
    ],
)
def test_what_drafts_adapters_and_encoders_add_is_simulated_beside_the_terms(
    tmp_path, engine, load
):
    """A run's own file is not off; a longer step beneath what they add is seen."""
    raw = {"model": "llama-3-8b", "gpu": {"name": "A100-80GB"}, "engine": {"name": "vllm"} | engine}
    lengths = {"input_len": 200, "output_len": 20, "request_rate": 20.0}
    raw["workload"] = {"num_prompts": 60} | lengths | load
    write_run(run(load_scenario(raw)), tmp_path)
    log = read_log(tmp_path / "requests.csv", load_scenario(raw))
    terms, measured = terms_of(log.cost), log.measured()
    assert all(
        np.allclose(found, measured[name], rtol=1e-6, atol=1e-8)
        for name, found in log.simulate(terms).items()
    )
    terms[0] += 0.01
    assert (log.simulate(terms)["tpot"] > measured["tpot"] + 0.002).all()


def test_a_pipeline_has_no_terms_to_fit(tmp_path):
    raw = {"model": "llama-3-8b", "engine": {"name": "vllm", "pipeline_parallel_size": 2}}
    raw |= {"gpu": {"name": "A100-80GB", "count": 2}, "workload": {"num_prompts": 60}}
    rows = "".join(f"{k},100,9,0.1,0.01\n" for k in range(60))
    path = tmp_path / "log.csv"
    path.write_text(f"arrival_s,prompt_tokens,output_tokens,ttft_s,tpot_s\n{rows}")
    with pytest.raises(HeadwayError, match="has no terms to fit: it is of a pipeline"):
        read_log(path, load_scenario(raw))


def test_one_cost_is_not_fitted_to_several_models(write, tmp_path):
    """Each group has a cost of its own, and a fit would put one in the place of all."""
    groups = "cluster: {groups: {a: {replicas: 1}, b: {replicas: 1, model: qwen3-8b}}}"
    text = f"model: llama-3.1-8b\ngpu: {{name: A100-80GB}}\n{groups}\n"
    load = "workload: {request_rate: 4, models: {llama-3.1-8b: 2, qwen3-8b: 1}}\n"
    with pytest.raises(HeadwayError, match=r"cluster\.groups: several models, GPUs or sizes"):
        read_log(tmp_path / "any.csv", load_scenario(write(text + load)))
