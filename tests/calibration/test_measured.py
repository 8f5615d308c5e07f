"""Validation against measured runs: reading, replaying, comparing, and what is wrong told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.measured.engine import gpus_per_replica
from calibration.measured.predict import predict, validate_measured
from calibration.measured.report import report, write_json, write_plots
from calibration.measured.requests import read_requests
from calibration.measured.runs import read_runs
from calibration.measured.workload import generate, replay
from headway.cli.main import main
from simulator.simulation.result import Result
from simulator.simulation.run import play
from tests.support.measured_runs import CLOSED, FILED, HEAD, REQUESTS, STRANGE, run_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs.csv").write_text(HEAD + FILED + CLOSED + STRANGE)
    (tmp_path / "one__requests.csv").write_text(REQUESTS)
    return tmp_path


def test_runs_are_read_as_they_stand(folder):
    one, two, _ = read_runs(folder)
    assert one.word("gpu") == "NVIDIA H100 80GB HBM3"
    assert one.count("kv_capacity_tokens") == 160_000
    assert one.number("concurrency") is None
    assert one.measured == {}
    assert two.measured == {"mean_ttft_ms": 100.0, "mean_tpot_ms": 12.0}
    assert one.flag("prefix_caching") is True
    assert two.flag("prefix_caching") is None


def test_columns_of_the_requests_as_told(folder, capsys):
    """`--columns`, where a run's file of requests has names of its own."""
    names, rows = REQUESTS.split("\n", 1)
    told = ",".join(f"{field}={name}9" for field, name in (
        ("arrival", "arrival_s"), ("prompt", "input_tokens"), ("output", "output_tokens"),
        ("ttft", "ttft_s"), ("e2el", "e2e_s"),
    ) if name in names)  # fmt: skip
    (folder / "one__requests.csv").write_text(names.replace(",", "9,") + "9\n" + rows)
    before = validate_measured(folder, ["one"])[0]
    assert "lacks a column" in before.reason or "try --columns" in before.reason
    found = validate_measured(folder, ["one"], columns=told)[0]
    assert not found.reason, found.reason
    assert main(["validate", "--measured", str(folder), "--columns", "prompt"]) == 2
    assert "--columns prompt: 'prompt' must be FIELD=COLUMN" in capsys.readouterr().err


@pytest.mark.medium
def test_every_run_is_predicted_or_listed_with_its_reason(folder, tmp_path):
    outcomes = validate_measured(folder)
    assert [outcome.run.run_id for outcome in outcomes] == ["one", "two", "bad"]
    one, two, bad = outcomes
    assert "Secret-9B" in bad.reason
    assert not one.reason
    rows = {row.metric: row for row in one.rows}
    # Without the first request, which met a cold engine.
    assert rows["mean_ttft_ms"].measured == pytest.approx(50.0)
    assert rows["mean_tpot_ms"].measured == pytest.approx(10.0)
    assert rows["mean_e2el_ms"].measured == pytest.approx(350.0 / 3)
    assert rows["mean_itl_ms"].measured == pytest.approx(10.0)
    assert rows["request_throughput"].measured == pytest.approx(3 / 1.25)
    assert 5.0 < rows["mean_tpot_ms"].predicted < 15.0
    assert {row.metric for row in two.rows} == {"mean_ttft_ms", "mean_tpot_ms"}
    text = report(outcomes)
    assert "cannot be predicted: model: no shipped model has the shape of 'acme/Secret-9B'" in text
    assert "not predicted" in text
    write_json(tmp_path / "all.json", outcomes)
    written = json.loads((tmp_path / "all.json").read_text())
    assert written[0] == {
        "run_id": "one",
        "metric": one.rows[0].metric,
        "predicted": one.rows[0].predicted,
        "measured": one.rows[0].measured,
        "error": one.rows[0].predicted / one.rows[0].measured - 1,
    }
    assert [row["reason"] for row in written if row["run_id"] == "bad"] == [bad.reason]
    files = write_plots(tmp_path / "plots", outcomes)
    assert sorted(file.name for file in files) == ["errors.png", "one.png"]


def test_the_command_prints_and_writes(folder, tmp_path, capsys):
    target = tmp_path / "two.json"
    code = main(["validate", "--measured", str(folder), "--run", "two", "--json", str(target)])
    assert code == 0
    out = capsys.readouterr().out
    assert out.startswith("two\n")
    assert "them, calib" in out
    written = json.loads(target.read_text())
    assert {row["run_id"] for row in written} == {"two"}
    assert main(["validate", "--measured", str(folder), "--run", "two", "--json=-"]) == 0
    assert json.loads(capsys.readouterr().out) == written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("run_id,", "name,"), "runs.csv:1: lacks the column run_id"),
        (
            lambda text: HEAD + FILED.replace(",256,", ",many,"),
            "runs.csv:2: max_num_seqs: must be a number",
        ),
        (lambda text: HEAD, "runs.csv: has no rows"),
    ],
)
def test_a_wrong_table_is_told(folder, capsys, change, message):
    (folder / "runs.csv").write_text(change(HEAD + FILED + CLOSED + STRANGE))
    assert main(["validate", "--measured", str(folder)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_its_table_is_named_with_the_option(tmp_path, capsys):
    assert main(["validate", "--measured", str(tmp_path)]) == 2
    told = f"--measured {tmp_path}: no runs.csv to be read in it (No such file or directory)"
    assert f"{told}; docs/accuracy.md has its columns\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(",256,", ",many,"), ":2: max_num_seqs: must be a number, 0 or"),
        (lambda text: text.replace(",256,", ",0,"), ":2: max_num_seqs: must be 1 or more, not '0'"),
        (lambda text: text.replace(",True,", ",maybe,"), ":2: prefix_caching: must be true or fa"),
        (lambda text: text.replace("NVIDIA H100 80GB HBM3", ""), ":2: gpu: is empty"),
        (lambda text: text.replace("\ntwo", "\none"), ":3: run_id: 'one' is there twice"),
        (lambda text: text.replace(",4,,,1024,", ",4,0,,1024,"), ":3: rate_rps: must be more than"),
        (lambda text: text.replace(",4,,,1024,", ",4,,,0,"), ":3: mean_input_tokens: must be more"),
    ],
)
def test_a_wrong_row_is_listed_and_the_others_are_done(folder, change, message):
    text = HEAD + FILED + CLOSED + STRANGE
    (folder / "runs.csv").write_text(change(text))
    outcomes = validate_measured(folder)
    assert len(outcomes) == 3
    assert sum(message in outcome.reason for outcome in outcomes) == 1
    assert sum(bool(outcome.rows) for outcome in outcomes) == 1


def test_an_unknown_run_is_told_with_those_there_are(folder, capsys):
    assert main(["validate", "--measured", str(folder), "--run", "onne"]) == 2
    error = capsys.readouterr().err
    assert "--run onne: no such run" in error
    assert "did you mean one" in error


def test_where_nothing_can_be_written_nothing_is_simulated(folder, capsys, monkeypatch):
    monkeypatch.setattr("calibration.measured.predict.validate_measured", None)
    measured = ["validate", "--measured", str(folder)]
    table = str(folder / "runs.csv")
    for command, message in (
        ([*measured, "--json", str(folder)], "is a folder"),
        ([*measured, "--json", f"{folder}/no/a.json"], "cannot write: no folder"),
        ([*measured, "--out", table], "is not a folder"),
        (["validate", "--measured", table], "must be a folder, the one with runs.csv"),
    ):
        assert main(command) == 2
        assert message in capsys.readouterr().err


def test_an_interrupt_ends_it_and_half_a_run_is_no_prediction(folder, capsys, monkeypatch):
    def broken_off(*arguments: Any) -> Result:
        result = play(*arguments)
        result.interrupted = True
        return result

    monkeypatch.setattr("calibration.measured.predict.play", broken_off)
    run = ["validate", "--measured", str(folder), "--run", "one"]
    assert main([*run, "--json", "found.json"]) == 130
    assert capsys.readouterr().err.endswith("headway: interrupted; no file was written\n")
    assert not Path("found.json").exists()


def test_damaged_polls_are_a_note(folder):
    (folder / "one__server.csv.gz").write_bytes(b"\x1f\x8bnothing")
    one = validate_measured(folder)[0]
    assert one.rows
    assert one.gauges is None
    assert "one__server.csv.gz: left out:" in " ".join(one.notes)


def test_live_and_measured_exclude_each_other(folder, capsys):
    assert main(["validate"]) == 2
    told = "give a folder of `headway live`, as out/demo-live, or --measured"
    assert told in capsys.readouterr().err
    assert main(["validate", str(folder), "--json", "x.json"]) == 2
    assert "--json FILE: needs --measured" in capsys.readouterr().err


def test_requests_sent_one_by_one_stay_so(put):
    """Whoever sent upon the last answer waits for it in simulation too; the others do not."""
    chained = read_requests(put(REQUESTS.replace("1,1000", "0.45,1000", 1), "r.csv"))
    work = replay(run_of(), chained, {})
    work.check()
    assert work.after is not None
    assert work.delay is not None
    assert work.after.tolist() == [-1, 0, 1, 1]  # what follows keeps its distance
    assert work.delay.tolist() == pytest.approx([0.0, 0.05, 1.4, 1.6])
    overlapping = REQUESTS.replace("1,1000", "0.45,1000", 1).replace("2,1000", "0.5,1000", 1)
    work = replay(run_of(), read_requests(put(overlapping, "r.csv")), {})
    work.check()
    assert work.after is not None
    assert work.after.tolist() == [-1, 0, -1, -1]
    assert work.arrival[2:].tolist() == [0.5, 2.2]


def test_a_conversation_shares_its_history(put):
    text = "start_s,client_id,conversation,input_num_tokens,output_num_tokens,ttft_ms,latency_ms\n"
    text += "0,a,x,10,4,100,500\n0.51,a,x,20,4,100,500\n0.2,b,y,9,2,100,200\n"
    work = replay(run_of(), read_requests(put(text, "r.csv")), {})
    assert work.segments == [
        ((("in", 0), 10),),
        ((("in", 1), 9),),
        ((("in", 0), 10), (("out", 0), 4), (("in", 2), 6)),
    ]
    assert work.after is not None
    assert work.after.tolist() == [-1, -1, 0]


@pytest.mark.parametrize(
    ("words", "config", "prefix"),
    [
        ({"notes": "512-token shared prefix"}, {}, 512),
        ({}, {"workload": {"prefix_tokens": 64}}, 64),
        ({"prefix_hit_frac": "0.25"}, {}, 250),
        ({"prefix_hit_frac": "0.25"}, {"workload": {"prefix_tokens": 0}}, 250),  # repeated prompts
        ({}, {}, 0),
    ],
)
def test_prompts_begin_alike_where_that_is_told(put, words, config, prefix):
    work = replay(run_of(**words), read_requests(put(REQUESTS, "r.csv")), config)
    if not prefix:
        assert work.segments is None
    else:
        assert work.segments is not None
        assert work.segments[1] == (("prefix", prefix), (("in", 1), 1000 - prefix))


def test_each_stage_of_a_guidellm_sweep_has_a_prefix_of_its_own(put):
    """The fourth request comes 1.05 s after the last answer before it, the fifth at once."""
    rows = REQUESTS.replace("2.2,", "3.2,") + "3.2,1000,1,0.05,,0.05\n"
    config = {"workload": {"tool": "guidellm sweep", "prefix_tokens": 64}}

    def stages(config):
        work = replay(run_of(), read_requests(put(rows, "r.csv")), config)
        return [segments[0][0] for segments in work.segments]

    assert stages(config) == [("prefix", stage) for stage in (0, 0, 0, 1, 1)]
    config["workload"]["tool"] = "vllm bench"
    assert stages(config) == ["prefix"] * 5


def test_replicas_share_the_load(folder):
    """Two engines with eight clients do what one does with four."""
    row = CLOSED.replace(",4,,,1024", ",8,,80,1024").replace("h200_sxm,2,", "h200_sxm,2,2,")
    (folder / "runs.csv").write_text(HEAD.replace("gpu,tp,", "gpu,tp,dp,") + row)
    (two,) = validate_measured(folder)
    (folder / "runs.csv").write_text(HEAD + CLOSED.replace(",4,,,1024", ",4,,40,1024"))
    (one,) = validate_measured(folder)
    assert "dp: 2 engine cores behind vLLM's internal load balancer" in two.notes
    tpot = [{row.metric: row.predicted for row in o.rows}["mean_tpot_ms"] for o in (one, two)]
    assert tpot[1] == pytest.approx(tpot[0], rel=0.03)


def test_a_pipeline_is_what_a_scenario_of_it_is(folder):
    """Two stages on two GPUs hold twice the cache, and take longer than two GPUs that share."""
    row = CLOSED.replace("h200_sxm,2,", "h200_sxm,1,2,")
    (folder / "runs.csv").write_text(HEAD.replace("gpu,tp,", "gpu,tp,pp,") + row)
    (stages,) = validate_measured(folder)
    (folder / "runs.csv").write_text(HEAD + CLOSED)
    (shared,) = validate_measured(folder)
    assert stages.reason == ""
    tpot = [{row.metric: row.predicted for row in o.rows}["mean_tpot_ms"] for o in (stages, shared)]
    assert 1.3 < tpot[0] / tpot[1] < 2.5


def test_a_run_without_measurements_is_predicted(folder, tmp_path):
    (folder / "runs.csv").write_text(HEAD + CLOSED.replace(",100,12,", ",,-,"))
    (outcome,) = validate_measured(folder)
    assert "nothing measured is recorded: the prediction alone" in outcome.notes
    write_json(tmp_path / "a.json", [outcome])
    rows = {row["metric"]: row for row in json.loads((tmp_path / "a.json").read_text())}
    assert 5.0 < rows["mean_tpot_ms"]["predicted"] < 15.0
    assert rows["mean_tpot_ms"]["measured"] is None
    assert rows["mean_tpot_ms"]["error"] is None
    assert "nan" not in report([outcome])
    write_plots(tmp_path / "plots", [outcome])


def test_a_config_beside_the_table_is_a_model(folder):
    from simulator.models.load import MODELS

    text = (MODELS / "qwen3-32b" / "config.json").read_text()
    (folder / "qwen3-own").mkdir()
    (folder / "qwen3-own" / "config.json").write_text(text)
    (folder / "runs.csv").write_text(HEAD + CLOSED.replace("Qwen/Qwen3-32B", "qwen3-own") + CLOSED)
    (folder / "runs.csv").write_text((folder / "runs.csv").read_text().replace("two,", "own,", 1))
    own, shipped = validate_measured(folder)
    assert [row.predicted for row in own.rows] == [row.predicted for row in shipped.rows]


def test_a_frontend_lets_requests_pass_one_by_one(put):
    """Two requests sent at once reach the scheduler one after the other."""
    import simpy

    from simulator.engine.client import Client
    from simulator.workload.workload import Frontend, Workload

    seen = []
    work = Workload(np.zeros(2), np.array([100, 200]), np.array([1, 1]))
    work.frontend = Frontend(latency=1.0, per_request=0.5, per_token=0.01)
    env = simpy.Environment()
    Client(env, work, lambda request: seen.append((request.id, request.arrival, env.now)))
    env.run()
    assert seen == [(0, 2.5, 2.5), (1, 5.0, 5.0)]


RUN = """
model: llama-3.1-8b
gpu: {name: H100-80GB}
engine: {name: vllm, version: "0.11.0", max_num_seqs: 256, max_num_batched_tokens: 2048,
  num_gpu_blocks_override: 10000}
workload:
  trace: {path: trace.csv, format: azure}
  frontend: server
"""


def test_headway_run_predicts_what_validate_does(folder):
    """The same engine, requests and frontend, as a scenario: the same prediction."""
    from simulator import load_scenario, run

    rows = "".join(
        f"2026-01-01 00:00:{float(at):010.7f},{prompt},{answer}\n"
        for at, prompt, answer, *_ in (row.split(",") for row in REQUESTS.splitlines()[1:])
    )
    (folder / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    (folder / "s.yaml").write_text(RUN)
    one = read_runs(folder)[0]
    (outcome,) = [predict(one, folder)]
    predicted = {row.metric: row.predicted for row in outcome.rows}
    table = run(load_scenario(folder / "s.yaml")).requests
    for name in ("ttft", "e2el"):  # without the first, which met a cold engine
        assert predicted[f"mean_{name}_ms"] == pytest.approx(table[name][1:].mean() * 1e3)


BANDS = {"llmservingsim": 0.05, "isim": 0.06, "llmd": 0.06}
"""Loose bounds of the mean TPOT's and E2EL's errors; docs/accuracy.md has the figures."""


def test_published_runs_are_met(data):
    runs = [run for run in read_runs(data / "e2e") if run.run_id.split("__")[0] in BANDS]
    assert len(runs) >= 4
    for run in runs:
        outcome = predict(run, data / "e2e")
        assert not outcome.reason
        errors = {row.metric: abs(row.error) for row in outcome.rows}
        band = BANDS[run.run_id.split("__")[0]]
        assert errors["mean_tpot_ms"] < band
        assert errors["mean_e2el_ms"] < band


def test_cells_as_people_write_them(folder):
    """About, with a remark, all at once; the parallelism of GPUs and replicas."""
    text = (folder / "runs.csv").read_text()
    changed = text.replace(",160000,", ",~160000 (log),").replace("h200_sxm,2,", "h200_sxm,,")
    changed = changed.replace(",4,,,1024", ",,inf,8,1024")
    (folder / "runs.csv").write_text(changed)
    one, two, _ = read_runs(folder)
    assert one.count("kv_capacity_tokens") == 160_000
    assert generate(two).arrival.tolist() == [0.0] * 8
    assert gpus_per_replica(two) == 1
    assert gpus_per_replica(run_of(n_gpus="8", dp="2")) == 4
    assert gpus_per_replica(run_of(n_gpus="8", dp="2", tp="1")) == 1


def test_scenarios_take_hugging_face_names(tmp_path):
    from simulator.models.load import load_model

    assert load_model("Qwen/Qwen3-30B-A3B-Instruct-2507").name == "qwen3-30b-a3b"
    with pytest.raises(ValueError, match="no shipped model 'acme/Secret-9B'"):
        load_model("acme/Secret-9B", tmp_path)


def test_ranks_that_share_experts_are_predicted_together(folder):
    row = CLOSED.replace("Qwen/Qwen3-32B,fp8", "Qwen/Qwen3-30B-A3B,bf16").replace("0.12.0", "0.19")
    row = row.replace(",4,,,1024", ",8,,40,1024").replace("h200_sxm,2,", "h200_sxm,1,2,")
    (folder / "runs.csv").write_text(HEAD.replace("gpu,tp,", "gpu,tp,dp,") + row)
    (outcome,) = validate_measured(folder)
    told = " ".join(outcome.notes)
    assert "experts of qwen3-30b-a3b over 2 GPUs: by roofline" in told
    assert "one rank alone" not in told
    assert {row.metric for row in outcome.rows} == {"mean_ttft_ms", "mean_tpot_ms"}
