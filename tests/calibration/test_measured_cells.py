"""The cells and files of measured runs, as people and harnesses write them."""

import gzip
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from calibration.measured.engine import (
    assumptions,
    check_supported,
    engine_block,
    version,
)
from calibration.measured.predict import assemble_run, predict, validate_measured
from calibration.measured.requests import read_requests
from calibration.measured.runs import read_runs
from calibration.measured.workload import draw_from_pool, generate
from simulator.util.errors import HeadwayError, HeadwayWarning
from tests.support.measured_runs import run_of


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s,input_tokens\n0,5\n", "lacks a column of each request's output"),
        ("arrival_s,input_tokens,output_tokens,ttft_s\n0,5,5,-1\n", ":2: ttft_s: '-1' is negative"),
        (
            "arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n0,5,5,2,1\n",
            ":2: the last token comes 1 s after the arrival, the first one 2 s: impossible",
        ),
        (
            "arrival_s,input_tokens,output_tokens\n0,x,5\n",
            ":2: input_tokens: 'x' is not a whole number",
        ),
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


def test_json_layouts_agree_with_csv(put):
    """A detailed result of vLLM's benchmark, inference-perf's list, and a list with moments."""
    bench = {
        "input_lens": [7, 9],
        "output_lens": [3, 0],
        "ttfts": [0.5, 0.0],
        "itls": [[0.1, 0.1], []],
        "start_times": [100.0, 101.0],
        "errors": ["", "timeout"],
    }
    perf = [
        {
            "start_time": 5.0,
            "info": {"input_tokens": 7, "output_tokens": 3, "output_token_times": [5.5, 5.6, 5.7]},
        }
    ]
    moments = {"requests": [{"arrival_ms": 1e3, "isl": 7, "osl": 3}]}
    moments["requests"][0] |= {"first_token_time_ms": 1500, "end_time_ms": 1700}
    for raw in (bench, perf, moments):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = read_requests(put(json.dumps(raw, indent=1), "r.json"))
        assert [
            "1 request left out: failed or cancelled when recorded" in str(w.message) for w in told
        ] == [True] * ("errors" in raw)
        assert (found.prompt.tolist(), found.output.tolist()) == ([7], [3])
        np.testing.assert_allclose([found.ttft[0], found.tpot[0], found.e2el[0]], [0.5, 0.1, 0.7])
    with pytest.raises(HeadwayError, match="ttfts: 1 values for 2 requests"):
        read_requests(put(json.dumps(bench | {"ttfts": [1]}), "r.json"))
    with pytest.raises(HeadwayError, match=r"r\.json:2: line: bad JSON"):
        read_requests(put('{"isl": 1, "osl": 1, "arrival_s": 0}\n{"isl"', "r.json"))


def test_arrivals_as_dates(put):
    text = "start_time,isl,osl\n2026-01-01T00:00:01,7,3\n2026-01-01T00:00:00.5,8,3\n"
    found = read_requests(put(text, "r.csv"))
    assert (found.arrival.tolist(), found.prompt.tolist()) == ([0.0, 0.5], [8, 7])
    with pytest.raises(HeadwayError, match=":2: start_time: 'soon' is not a date and time"):
        read_requests(put(text.replace("2026-01-01T00:00:01", "soon"), "r.csv"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"engine": "lmdeploy"}, "engine: 'lmdeploy': must be vLLM or SGLang"),
        (
            {"notes": "EAGLE speculative decoding, 3 tokens"},
            "acceptance: speculative decoding",
        ),
        ({"num_speculative_tokens": "3"}, "acceptance: speculative decoding needs both"),
        (
            {"engine": "SGLang", "num_speculative_tokens": "3", "acceptance": "0.7"},
            "num_speculative_tokens: SGLang's drafts are simulated of EAGLE and MTP",
        ),
        ({"notes": "P/D disaggregated"}, "prompts and decodes on different servers"),
        ({"notes": "pipeline parallel 2"}, "pp: empty, though the notes name pipeline"),
        ({"tp": "4", "n_gpus": "2"}, "n_gpus: 2 are fewer than tp x pp x dp x replicas, 4"),
        ({"pp": "2", "n_gpus": "1"}, "n_gpus: 1 are fewer than tp x pp x dp x replicas, 2"),
    ],
)
def test_what_is_not_replayed_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        check_supported(run_of(**words))


def test_assumptions_are_told():
    told = assumptions(run_of(engine_version="nightly", notes="LoRA, KV offload on", tp="16"))
    assert "engine_version: 'nightly' names no version: the latest is taken" in told
    assert "notes: LoRA adapters: not simulated" in told
    assert "notes: KV offload of unknown size: not simulated" in told
    assert "tp: 16: the network between servers is not modelled" in told
    assert "kv_dtype" in told[0]
    check_supported(run_of(notes="no speculative decoding"))
    assert "offload" not in " ".join(assumptions(run_of(notes="KV offload off")))
    block = engine_block(run_of(model="llama-3.1-8b", notes="KV offloading 100 GB"), "H100-80GB")
    assert block["kv_offloading_size"] == pytest.approx(93.13, abs=0.01)


def test_drafts_are_replayed_by_two_columns_and_a_word():
    """EAGLE-3 is asynchronous from 0.14 on, n-grams from 0.33 on; drafting itself has no time."""
    cells = {"num_speculative_tokens": "3", "acceptance": "0.7"}
    cells |= {"model": "llama-3.1-8b", "gpu": "H100"}
    run = run_of(engine_version="0.30.0", notes="EAGLE-3", **cells)
    check_supported(run)
    block = engine_block(run, "H100-80GB")
    assert block["speculative_config"] == {
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "acceptance": 0.7,
        "draft": {},
    }
    assert block["async_scheduling"]
    assert "what drafting itself takes is not recorded: nothing is taken for it" in assumptions(run)
    ngram = run_of(engine_version="0.30.0", **cells)
    assert not engine_block(ngram, "H100-80GB")["async_scheduling"]
    assert engine_block(ngram, "H100-80GB")["speculative_config"]["draft"] is None
    assert assemble_run(run)[0].engine.speculative_config is not None


def test_sglang_has_its_own_defaults():
    cells = {"model": "llama-3.1-8b", "gpu": "H100", "kv_capacity_tokens": "50000"}
    run = run_of(engine="SGLang", engine_version="0.5.23", **cells)
    check_supported(run)
    engine = assemble_run(run)[0].engine
    assert (engine.name, engine.block_size, engine.prefix_cache) == ("sglang", 1, "radix")
    assert engine.num_gpu_blocks_override == 50_000
    told = assumptions(run)
    assert told[0].startswith("not recorded, so SGLang's defaults: ")
    assert "SGLang's overheads were not measured, vLLM's are taken" in told


@pytest.mark.parametrize("version", ["0.6.3", "0.8.5 (V0)"])
def test_the_first_engine_computes_prompts_whole(version):
    run = run_of(engine_version=version, model="llama-2-7b", chunked_prefill="")
    block = engine_block(run, "A100-80GB")
    assert (block["name"], block["max_num_batched_tokens"]) == ("vllm-v0", 4096)
    assert "V0" in " ".join(assumptions(run))
    chunked = engine_block(run_of(engine_version=version, chunked_prefill="True"), "A100-80GB")
    assert chunked["name"] == "vllm"


def test_rates_with_seats_and_bursts():
    told = {"rate_rps": "4", "mean_input_tokens": "100", "mean_output_tokens": "10"}
    load = generate(run_of(**told, concurrency="2", n_requests="400"))
    assert load.max_concurrency == 2
    assert load.arrival[-1] == pytest.approx(100.0, rel=0.2)
    for words, cv in (({}, 1.0), ({"burstiness": "0.25"}, 2.0), ({"arrival": "gamma, CV 3"}, 3.0)):
        gaps = np.diff(generate(run_of(**told, n_requests="20000", **words)).arrival)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert (
        np.ptp(np.diff(generate(run_of(**told, arrival="constant", n_requests="9")).arrival)) < 1e-9
    )
    with pytest.warns(HeadwayWarning, match="n_requests: not recorded: 240 are taken"):
        assert len(generate(run_of(**told, duration_s="60"))) == 240
    warm = generate(run_of(**told, prefix_hit_frac="0.5", n_requests="9"))
    assert warm.segments is not None
    assert warm.segments[0][0] == ("prefix", 50)


def test_a_closed_loop_is_made_of_its_numbers():
    told = {
        "n_requests": "40",
        "concurrency": "4",
        "mean_input_tokens": "921.6",
        "mean_output_tokens": "100",
    }
    work = generate(run_of(**told, notes="nominal isl/osl 1024/100"))
    assert (len(work), work.max_concurrency) == (40, 4)
    assert work.prompt_tokens.min() >= 819
    assert work.prompt_tokens.max() <= 1024
    assert 90 <= work.output_tokens.min() <= work.output_tokens.max() <= 110
    with pytest.raises(ValueError, match="neither per-request file nor"):
        generate(run_of(mean_input_tokens="5"))


def test_a_load_generator_that_was_told_no_spread_sends_one_length():
    """Then requests of a closed loop march in step, and what the engine takes at once decides."""
    told = {"concurrency": "8", "mean_input_tokens": "1024", "mean_output_tokens": "128"}
    work = generate(run_of(**told, n_requests="80", notes="nominal isl/osl 1024/128"))
    assert {*work.prompt_tokens.tolist()} == {1024}
    assert {*work.output_tokens.tolist()} == {128}
    run = run_of(**told, source="AIConfigurator's points", max_num_seqs="64")
    block = engine_block(run, "H100-80GB")
    assert (block["max_num_seqs"], block["max_num_batched_tokens"]) == (64, 8 + 1024 + 1500)
    notes = assumptions(run)
    assert "not recorded, so by AIConfigurator's rules: max_num_batched_tokens" in notes
    assert not any("defaults" in note and "max_num_batched_tokens" in note for note in notes)
    assert engine_block(run_of(**told), "H100-80GB")["max_num_batched_tokens"] != 2532


def test_versions_decide_what_is_not_recorded():
    assert version("latest@2025-05-01 (~0.8.5)") == (0, 8, 5)
    assert version("v0.19.0") == (0, 19, 0)
    assert version("nightly") > (1000, 0, 0)
    old = engine_block(run_of(engine_version="0.11.0"), "H100-80GB")
    new = engine_block(run_of(engine_version="0.19.0", gpu_mem_util="0.95"), "A100-80GB")
    assert (old["async_scheduling"], new["async_scheduling"]) == (False, True)
    assert (old["gpu_memory_utilization"], new["gpu_memory_utilization"]) == (0.9, 0.95)
    assert (old["max_num_batched_tokens"], new["max_num_batched_tokens"]) == (8192, 2048)
    told = engine_block(run_of(engine_version="0.10.2", notes="async scheduling"), "B200")
    assert told["async_scheduling"] is True
    assert told["max_num_batched_tokens"] == 8192
    assert [old["version"], new["version"]] == ["0.11.0", "0.19.0"]
    assert not old["scheduler_reserve_full_isl"]
    assert "scheduler_reserve_full_isl" not in new
    newer = engine_block(run_of(engine_version="0.40"), "B200")  # is taken for the newest known
    assert "version" not in newer
    assert newer["max_num_batched_tokens"] == 16384
    chunked = engine_block(run_of(engine_version="0.6.3", chunked_prefill="True"), "A100-80GB")
    assert (chunked["name"], chunked["version"]) == ("vllm", "0.8.0")


def test_prompts_of_a_pool_come_round_and_the_first_are_cold():
    """Of 40 prompts of 100 tokens, 96 of them in full blocks: 3 prompts computed, 37 found."""
    told = {"rate_rps": "5", "mean_input_tokens": "100", "mean_output_tokens": "9"}
    hits = str((40 - 3) * 96 / (40 * 100))
    run = run_of(**told, n_requests="40", prompt_pool="10", prefix_hit_frac=hits, notes="")
    load = generate(run)
    load.prompt_tokens[:] = 100
    drawn, before = draw_from_pool(run, load)
    assert before == 7
    names = [segments[0][0][1] for segments in drawn.segments]
    assert names == [*range(3, 10), *(k % 10 for k in range(40))]
    assert drawn.output_tokens[:7].tolist() == [1] * 7
    assert drawn.arrival[7] == pytest.approx(load.arrival[0] + 3.5)
    cold = run_of(**told, n_requests="40", prompt_pool="10")
    assert draw_from_pool(cold, generate(cold))[1] == 0


def test_a_pool_makes_the_first_prompts_slow_and_the_others_fast(tmp_path):
    """P99 is that of the four cold ones of 200, P50 that of the warm."""
    told = {"rate_rps": "1", "mean_input_tokens": "4000", "mean_output_tokens": "2"}
    row = {"run_id": "a", "gpu": "H100", "model": "llama-3-8b", "n_requests": "200", **told}
    row |= {"prompt_pool": "4", "ttft_p50_ms": "10", "ttft_p99_ms": "100"}
    (tmp_path / "runs.csv").write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    (outcome,) = validate_measured(tmp_path)
    found = {row.metric: row.predicted for row in outcome.rows}
    assert found["p99_ttft_ms"] > 5 * found["p50_ttft_ms"]


UNTIMED = """arrival_s,input_tokens,output_tokens,client_id,conversation
0,1000,11,a,x
1,1000,11,b,y
2,1020,11,a,x
"""


@pytest.mark.parametrize("columns", [5, 3])
def test_a_row_has_the_means_of_requests_that_nobody_timed(tmp_path, columns):
    """The file has arrivals and lengths alone; the means are of all of its requests."""
    lines = [",".join(line.split(",")[:columns]) for line in UNTIMED.splitlines()]
    (tmp_path / "requests.csv").write_text("\n".join(lines) + "\n")
    row = {"run_id": "a", "gpu": "H100", "model": "llama-3-8b", "ttft_mean_ms": "50"}
    row |= {"tpot_mean_ms": "7", "req_per_s": "1.4", "per_request_file": "requests.csv"}
    (tmp_path / "runs.csv").write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    (outcome,) = validate_measured(tmp_path)
    found = {row.metric: row for row in outcome.rows}
    assert {*found} == {"mean_ttft_ms", "mean_tpot_ms", "request_throughput"}
    assert found["mean_ttft_ms"].measured == 50
    assert found["request_throughput"].predicted == pytest.approx(3 / 2.1, rel=0.05)
    assert not any("nothing measured" in note for note in outcome.notes)
    assert not outcome.samples
    timed = [lines[0] + ",ttft_s", *(f"{line},0.06" for line in lines[1:])]
    (tmp_path / "requests.csv").write_text("\n".join(timed) + "\n")
    (outcome,) = validate_measured(tmp_path)
    found = {row.metric: row for row in outcome.rows}
    assert found["mean_ttft_ms"].measured == pytest.approx(60)  # the file's own come first
    assert found["mean_tpot_ms"].measured == 7


def test_replicas_share_the_load_and_clients_give_up(tmp_path):
    """Forty prompts at once: two servers take half of one's time, and nobody waits for 0.3 s."""
    told = {"rate_rps": "inf", "mean_input_tokens": "4000", "mean_output_tokens": "1"}
    row = {"gpu": "H100", "model": "llama-3-8b", "n_requests": "40", **told}
    row |= {"tp": "1", "engine_version": "0.11"}
    more = ({}, {"replicas": "2", "router": "random"}, {"timeout_s": "0.3"}, {"router": "x"})
    keys = ["run_id", *row, "replicas", "router", "timeout_s"]
    rows = [{"run_id": str(k), **row, **extra} for k, extra in enumerate(more)]
    rows[3]["replicas"] = "2"
    lines = [",".join(keys), *(",".join(r.get(key, "") for key in keys) for r in rows)]
    (tmp_path / "runs.csv").write_text("\n".join(lines) + "\n")
    one, two, hasty, wrong = validate_measured(tmp_path)
    e2el = [next(r for r in o.rows if r.metric == "mean_e2el_ms").predicted for o in (one, two)]
    assert 0.4 < e2el[1] / e2el[0] < 0.75
    assert max(row.predicted for row in hasty.rows if "e2el" in row.metric) <= 300
    assert any("given up" in note for note in hasty.notes)
    assert "router" in wrong.reason


HEAD = "run_id,gpu,model,max_num_seqs,tp,ttft_p90_ms"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("run_id,gpu,model,max_num_seq", ":1: max_num_seq: unknown column; did you mean max_num_s"),
        ("run_id,gpu,model,TP", ":1: TP: unknown column; did you mean tp?"),
        ("run_id,gpu,model,kv-dtype", ":1: kv-dtype: unknown column; did you mean kv_dtype?"),
        ("run_id,gpu,model,request_rate", ":1: request_rate: unknown column; did you mean rate_r"),
        ("run_id,gpu,model,e2el_mean_ms", ":1: e2el_mean_ms: unknown column; did you mean e2e_m"),
    ],
)
def test_a_column_that_is_misspelt_is_refused(tmp_path, columns, message):
    (tmp_path / "runs.csv").write_text(f"{columns}\na,L4,llama-3-8b,1\n")
    with pytest.raises(HeadwayError) as caught:
        read_runs(tmp_path)
    assert len(caught.value.messages) == 1
    assert message in caught.value.messages[0]


@pytest.mark.parametrize("more", ["ttft_p95_ms,operator", "max_num_seq,rack"])
def test_other_columns_are_named(tmp_path, more):
    """P95 is no P90 misspelt, and who has the right column may have one of nearly its name."""
    (tmp_path / "runs.csv").write_text(f"{HEAD},{more}\na,L4,llama-3-8b,8,1,90,1,2\n")
    told = f"runs.csv:1: columns that are not read: {more.replace(',', ', ')}"
    with pytest.warns(HeadwayWarning, match=told):
        (run,) = read_runs(tmp_path)
    assert run.count("max_num_seqs") == 8


def test_gaps_of_an_itl_are_between_tokens_steps_or_chunks(tmp_path):
    """Of 101 tokens: 100 gaps, 50 where each step brings a draft, 34 of chunks of three."""
    text = "run_id,gpu,model,rate_rps,n_requests,mean_input_tokens,mean_output_tokens,output_cv,"
    text += "tpot_mean_ms,itl_mean_ms,num_speculative_tokens,acceptance,itl_by\n"
    expected = {"": 100, "token": 100, "step": 50, "2": 50, "3": 34, "often": 0, "0": 0}
    for by in expected:
        text += f"by {by},H100,llama-3.1-8b,2,5,200,101,0,4,9,1,1,{by}\n"
    (tmp_path / "runs.csv").write_text(text + "plain,H100,llama-3.1-8b,2,5,200,101,0,4,9,,,step\n")
    outcomes = {one.run.run_id: one for one in validate_measured(tmp_path)}
    for by, gaps in {**expected, "plain": 100}.items():
        one = outcomes["plain" if by == "plain" else f"by {by}".strip()]
        rows = {row.metric: row.predicted for row in one.rows}
        if gaps:
            assert 100 * rows["mean_tpot_ms"] == pytest.approx(gaps * rows["mean_itl_ms"])
        else:
            assert one.reason == f"itl_by: must be token, step or a number of tokens, not {by!r}"


@pytest.mark.parametrize(
    ("more", "full"),
    [({"concurrency": "20"}, True), ({}, False), ({"kv_capacity_tokens": "20000"}, False)],
)
def test_a_cache_nearly_full_by_its_computed_size_is_told(
    tmp_path: Path, more: dict[str, str], full: bool
) -> None:
    """An L4 has room for 18 of these requests; four of its clients need no more than a quarter."""
    cells = {"gpu": "L4", "model": "llama-3-8b", "engine_version": "0.12.0", "concurrency": "4"}
    cells |= {"n_requests": "40", "mean_input_tokens": "1500", "mean_output_tokens": "40"}
    notes = predict(run_of(**cells | more), tmp_path).notes
    assert any(note.startswith("the KV cache is 100% full by its comp") for note in notes) is full
