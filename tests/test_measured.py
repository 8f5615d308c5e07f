"""Validation against measured runs: reading, replaying, comparing, and what is wrong told."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from calibration.measured import names
from calibration.measured.engine import engine_block, gpus_per_replica, version
from calibration.measured.predict import predict
from calibration.measured.report import report, write_json, write_plots
from calibration.measured.requests import read_requests
from calibration.measured.runs import Run, read_runs
from calibration.measured.validate import validate_measured
from calibration.measured.workload import make, replay
from simulator.cli import main
from simulator.errors import HeadwayError
from simulator.overhead import NEWEST

HEAD = "run_id,source,tier,gpu,tp,model,weight_dtype,engine_version,max_num_seqs,"
HEAD += "max_num_batched_tokens,kv_capacity_tokens,prefix_caching,concurrency,rate_rps,"
HEAD += "n_requests,mean_input_tokens,mean_output_tokens,ttft_mean_ms,tpot_mean_ms,"
HEAD += "per_request_file,notes\n"
FILED = "one,us,calib,NVIDIA H100 80GB HBM3,1,meta-llama/Llama-3.1-8B-Instruct,bf16,v0.11.0,256,"
FILED += "2048,160000,True,,,,,,,,e2e/one__requests.csv,\n"
CLOSED = "two,them,calib,h200_sxm,2,Qwen/Qwen3-32B,fp8,0.12.0,,,,,4,,,1024,64,100,12,,\n"
STRANGE = "bad,them,calib,h200_sxm,1,acme/Secret-9B,,,,,,,4,,,1024,64,100,12,,\n"
REQUESTS = """arrival_s,input_tokens,output_tokens,ttft_s,tpot_s,e2e_s
0,1000,11,0.30,0.010,0.40
1,1000,11,0.05,0.010,0.15
2,1000,11,0.05,0.010,0.15
2.2,1000,1,0.05,,0.05
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs.csv").write_text(HEAD + FILED + CLOSED + STRANGE)
    (tmp_path / "one__requests.csv").write_text(REQUESTS)
    return tmp_path


def run_of(**words: str) -> Run:
    numbers = {k: float(v) for k, v in words.items() if v.replace(".", "", 1).isdigit()}
    return Run({"run_id": "r", **words}, numbers, {})


def test_runs_are_read_as_they_stand(folder):
    one, two, _ = read_runs(folder)
    assert one.word("gpu") == "NVIDIA H100 80GB HBM3"
    assert one.count("kv_capacity_tokens") == 160_000
    assert one.number("concurrency") is None
    assert one.measured == {}
    assert two.measured == {"mean_ttft_ms": 100.0, "mean_tpot_ms": 12.0}
    assert one.flag("prefix_caching") is True
    assert two.flag("prefix_caching") is None


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
    assert {row["run_id"] for row in json.loads(target.read_text())} == {"two"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("run_id,", "name,"), "runs.csv:1: lacks the column run_id"),
        (
            lambda text: text.replace(",256,", ",many,"),
            "runs.csv:2: max_num_seqs: must be a number",
        ),
        (lambda text: text + FILED, "runs.csv:5: run_id: 'one' is there twice"),
        (lambda text: HEAD, "runs.csv: has no rows"),
    ],
)
def test_a_wrong_table_is_told(folder, capsys, change, message):
    (folder / "runs.csv").write_text(change(HEAD + FILED + CLOSED + STRANGE))
    assert main(["validate", "--measured", str(folder)]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_run_is_told_with_those_there_are(folder, capsys):
    assert main(["validate", "--measured", str(folder), "--run", "onne"]) == 2
    error = capsys.readouterr().err
    assert "--run onne: no such run" in error
    assert "did you mean one" in error


def test_live_and_measured_exclude_each_other(folder, capsys):
    assert main(["validate"]) == 2
    assert "give LIVE_DIR or --measured DIR" in capsys.readouterr().err
    assert main(["validate", str(folder), "--json", "x.json"]) == 2
    assert "--json: goes with --measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s,input_tokens\n0,5\n", "lacks a column of each request's output"),
        ("arrival_s,input_tokens,output_tokens,ttft_s\n0,5,5,-1\n", ":2: ttft_s: -1 is negative"),
        (
            "arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n0,5,5,2,1\n",
            ":2: the last token comes 1 s after the arrival, the first one 2 s: impossible",
        ),
        ("arrival_s,input_tokens,output_tokens\n0,x,5\n", ":2: input_tokens: 'x' is no number"),
    ],
)
def test_an_impossible_request_file_is_told(put, text, message):
    with pytest.raises(HeadwayError, match=message):
        read_requests(put(text, "r.csv"))


def test_layouts_agree(put):
    """The same two requests as four harnesses write them, packed or not."""
    spans = "arrival_s,input_tokens,output_tokens,ttft_s,tpot_s,e2e_s\n0,7,3,0.5,0.1,0.7\n"
    bench = "arrival_s,prompt_tokens,generation_tokens,ttft,generation_time\n5,7,3,0.5,0.2\n"
    client = "start_s,input_num_tokens,output_num_tokens,ttft_ms,tpot_ms,latency_ms\n"
    client += "9,7,3,500,100,700\n"
    lines = '{"arrival_s": 1, "input_tokens": 7, "output_tokens": 3, "ttft_ms": 500, '
    lines += '"e2e_ms": 700}\n'
    for text in (spans, bench, client, lines):
        found = read_requests(put(gzip.compress(text.encode()), "r.gz"))
        assert found.arrival.tolist() == [0.0]
        assert (found.prompt.tolist(), found.output.tolist()) == ([7], [3])
        np.testing.assert_allclose([found.ttft[0], found.tpot[0], found.e2el[0]], [0.5, 0.1, 0.7])


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


def test_a_closed_loop_is_made_of_its_numbers():
    told = {"concurrency": "4", "mean_input_tokens": "921.6", "mean_output_tokens": "100"}
    work = make(run_of(**told, notes="nominal isl/osl 1024/100"))
    assert (len(work), work.max_concurrency) == (40, 4)
    assert work.prompt_tokens.min() >= 819
    assert work.prompt_tokens.max() <= 1024
    assert 90 <= work.output_tokens.min() <= work.output_tokens.max() <= 110
    with pytest.raises(ValueError, match="neither per-request file nor"):
        make(run_of(mean_input_tokens="5"))


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("H100-80GB-HBM3 (SXM)", "H100-80GB"),
        ("RTX PRO 6000 Blackwell SE 96GB", "RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("b200_sxm", "B200"),
        ("B200 (inferred: 178 GiB usable)", "B200"),
        ("A100-SXM4-80GB", "A100-80GB"),
        ("a100_sxm", "A100-80GB"),
        ("L40S", "L40S"),
        ("NVIDIA L4", "L4"),
    ],
)
def test_gpu_names(given, known):
    assert names.gpu_name(given) == known


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct-FP8", "llama-3.1-70b"),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "llama-3.3-70b"),
        ("codellama/CodeLlama-34b-Instruct-hf", "codellama-34b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("RedHatAI/Qwen3-32B-FP8-dynamic", "qwen3-32b"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b"),
        ("01-ai/Yi-34B", "yi-34b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-v0.3"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama-3.1-8b"),
        ("Llama-3_1-8B", "llama-3.1-8b"),
        ("llama2-70b", "llama-2-70b"),
        ("lmsys/vicuna-13b-v1.5", "llama-2-13b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-3.3-70b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/QwQ-32B-AWQ", "qwen2.5-32b"),
        ("NousResearch/Nous-Hermes-2-Mixtral-8x7B-DPO", "mixtral-8x7b"),
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "llama-3.1-405b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("QWEN3_32B", "qwen3-32b"),
        ("codellama/CodeLlama-7b-hf", "codellama-7b"),
    ],
)
def test_model_names(given, known):
    assert names.model_name(given) == known


def test_versions_decide_what_is_not_recorded():
    assert version("latest@2025-05-01 (~0.8.5)") == (0, 8)
    assert version("v0.19.0") == (0, 19)
    assert version("nightly") == NEWEST
    old = engine_block(run_of(engine_version="0.11.0"), "H100-80GB")
    new = engine_block(run_of(engine_version="0.19.0", gpu_mem_util="0.95"), "A100-80GB")
    assert (old["async_scheduling"], new["async_scheduling"]) == (False, True)
    assert (old["gpu_memory_utilization"], new["gpu_memory_utilization"]) == (0.9, 0.95)
    assert (old["max_num_batched_tokens"], new["max_num_batched_tokens"]) == (8192, 2048)
    told = engine_block(run_of(engine_version="0.10.2", notes="async scheduling"), "B200")
    assert told["async_scheduling"] is True


def test_a_frontend_lets_requests_pass_one_by_one(put):
    """Two requests sent at once reach the scheduler one after the other."""
    import simpy

    from simulator.client import Client
    from simulator.workload import Frontend, Workload

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
engine: {name: vllm, version: "0.11", max_num_seqs: 256, max_num_batched_tokens: 2048,
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


BANDS = {"llmservingsim": 0.10, "isim": 0.15, "llmd": 0.15}
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
    assert make(two).arrival.tolist() == [0.0] * 8
    assert gpus_per_replica(two) == 1
    assert gpus_per_replica(run_of(n_gpus="8", dp="2")) == 4
    assert gpus_per_replica(run_of(n_gpus="8", dp="2", tp="1")) == 1


@pytest.mark.parametrize(
    "name",
    ["microsoft/Phi-4-mini-instruct", "Qwen/Qwen2-57B-A14B", "Qwen/Qwen3-VL-8B", "acme/Secret-9B"],
)
def test_another_model_of_a_similar_name_is_none(name):
    with pytest.raises(ValueError, match="no shipped model has the shape of"):
        names.model_name(name)


def test_scenarios_take_hugging_face_names(tmp_path):
    from simulator.model import load_model

    assert load_model("Qwen/Qwen3-30B-A3B-Instruct-2507").name == "qwen3-30b-a3b"
    with pytest.raises(ValueError, match="no shipped model 'acme/Secret-9B'"):
        load_model("acme/Secret-9B", tmp_path)


def test_a_source_left_out_is_predicted_with_the_terms_of_the_others(folder):
    """Two sources whose measurements are those of 1.0 ms + 10 us, and of 0.5 ms + 0 us."""
    from calibration.measured.left_out import METRIC, leave_out

    row = CLOSED.replace("0.12.0", "0.19.0").replace(",4,,,1024", ",4,,8,1024")
    (folder / "runs.csv").write_text(HEAD + row)
    (run,) = read_runs(folder)
    rows = []
    for name, terms in (("a", (1.0e-3, 10e-6)), ("b", (0.5e-3, 0.0))):
        found = {r.metric: r.predicted for r in predict(run, folder, terms).rows}
        rows.append(row.replace("two,them", f"{name},{name}").replace(",12,", f",{found[METRIC]},"))
    (folder / "runs.csv").write_text(HEAD + "".join(rows))
    (a, b) = leave_out(folder)
    assert (a[0], a[1], a[3]) == ("asynchronous, from 0.14", "a", (0.5e-3, 0.0))
    assert (b[1], b[3]) == ("b", (1.0e-3, 10e-6))
    assert 0.0 < b[4] < 0.2
