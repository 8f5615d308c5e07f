"""Measured runs one by one as they get done; those that cannot be; how far they may be off."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from calibration.measured.predict import (
    closed_loop_rate,
    peak_flops,
    validate_measured,
    why_impossible,
)
from calibration.measured.report import outcome_line, report, write_json
from headway.cli.main import main
from simulator.core.engine_config import EngineConfig
from simulator.models.gpus import find_gpu
from simulator.models.load import load_model
from tests.support.measured_runs import CLOSED, FILED, HEAD, REQUESTS, STRANGE, run_of

MODEL, GPU = load_model("llama-3-8b"), find_gpu("H100-80GB")
ENGINE = EngineConfig(tensor_parallel_size=2)
SHAPE = {"servers": 1, "computed": 1000.0, "output": 1.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs.csv").write_text(HEAD + FILED + CLOSED + STRANGE)
    (tmp_path / "one__requests.csv").write_text(REQUESTS)
    return tmp_path


def why(measured: dict[str, float], **shape: float) -> str:
    return why_impossible(measured, MODEL, GPU, ENGINE, **{**SHAPE, **shape})


def test_prompts_need_flops() -> None:
    """1,000 tokens of 7.0 billion layer weights and a token of the head, on two GPUs."""
    head = 2 * MODEL.head_parameters
    each = 1000 * (MODEL.flops_per_token - head) + head
    most = 2 * GPU.bf16_flops / each
    assert why({"request_throughput": 0.999 * most}) == ""
    told = why({"request_throughput": 1.001 * most})
    assert "requests/s of 1,000 prompt tokens need" in told
    assert "2 x H100-80GB have 1.98e+15 at most" in told
    assert why({"request_throughput": 1.001 * most}, servers=2) == ""
    assert why({"request_throughput": 1.001 * most}, computed=900.0) == ""


def test_a_first_token_takes_its_prompts_flops() -> None:
    """Of 1,000 tokens on two GPUs at their peak: what is faster found them in the prefix cache."""
    head = 2 * MODEL.head_parameters
    each = 1000 * (MODEL.flops_per_token - head) + head
    least = 1e3 * each / (2 * GPU.bf16_flops)
    assert why({"mean_ttft_ms": 1.001 * least}) == ""
    assert "1,000 prompt tokens, if none is cached, take 2 x H100-80GB" in why(
        {"mean_ttft_ms": 0.999 * least}
    )
    assert why({"mean_ttft_ms": 0.999 * least}, servers=2) != ""  # each is served by one
    assert why({"mean_ttft_ms": 0.999 * least}, computed=990.0) == ""


def test_a_decode_reads_the_weights() -> None:
    """16-bit matrices, half on each GPU."""
    least = 1e3 * MODEL.matrix_bytes(0) / 2 / GPU.bandwidth
    assert why({"mean_tpot_ms": 1.001 * least}) == ""
    assert "TPOT is" in why({"mean_tpot_ms": 0.999 * least})
    assert why({}) == ""


def test_no_token_time_beats_the_weights_whatever_it_is_called() -> None:
    """Gaps between tokens, percentiles, and the tokens/s of 8 clients that wait for an answer."""
    least = 1e3 * MODEL.matrix_bytes(0) / 2 / GPU.bandwidth
    for metric in ("mean_itl_ms", "p50_tpot_ms", "p99_tpot_ms"):
        assert why({metric: 1.001 * least}) == ""
        assert f"{metric.split('_')[1].upper()} is" in why({metric: 0.999 * least})
    assert why({"p50_itl_ms": 0.001}) == ""  # of chunks that arrive together
    most = 8e3 / least
    assert why({"output_throughput": 0.999 * most}, clients=8, output=50.0) == ""
    assert "TPOT is" in why({"output_throughput": 1.001 * most}, clients=8, output=50.0)
    assert why({"output_throughput": 1.001 * most}, output=50.0) == ""


def test_any_request_takes_a_step() -> None:
    """Also the fastest, of which nothing but the weights' reading is known."""
    least = 1e3 * MODEL.matrix_bytes(0) / 2 / GPU.bandwidth
    for metric in ("p50_ttft_ms", "p50_e2el_ms", "p99_e2el_ms"):
        assert why({metric: 1.001 * least}, output=50.0) == ""
        assert " is " in why({metric: 0.999 * least}, output=50.0)


def test_tokens_a_second_need_flops() -> None:
    """Each answer of 50 tokens takes a prompt's."""
    rate = {"request_throughput": 1000.0}
    assert why({"output_throughput": 50_000.0}, output=50.0) == why(rate, output=50.0) != ""


def test_a_request_takes_its_prompt_and_its_tokens() -> None:
    head = 2 * MODEL.head_parameters
    each = 1000 * (MODEL.flops_per_token - head) + head
    prompt = 1e3 * each / (2 * GPU.bf16_flops)
    least = prompt + 49 * 1e3 * MODEL.matrix_bytes(0) / 2 / GPU.bandwidth
    assert why({"mean_e2el_ms": 1.001 * least}, output=50.0) == ""
    told = why({"mean_e2el_ms": 0.999 * least}, output=50.0)
    assert "E2EL is" in told
    assert "1,000 prompt tokens and 50 of the answer take 2 x H100-80GB" in told


def test_a_step_that_reads_the_weights_may_accept_all_drafts() -> None:
    """Three drafts: four tokens a step."""
    least = 1e3 * MODEL.matrix_bytes(0) / 2 / GPU.bandwidth / 4
    config = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": 0.6}
    engine = EngineConfig(tensor_parallel_size=2, speculative_config=config)
    wrong = [
        why_impossible({"mean_tpot_ms": share * least}, MODEL, GPU, engine, **SHAPE)
        for share in (1.001, 0.999)
    ]
    assert wrong[0] == ""
    assert "bytes of weights (of 4 a step) take 2 x H100-80GB" in wrong[1]


def test_fewer_bits_are_faster() -> None:
    a100 = find_gpu("A100-80GB")
    assert peak_flops(GPU, "fp8") == GPU.fp8_flops
    assert peak_flops(a100, "int8") == 2 * a100.bf16_flops
    assert peak_flops(GPU, "nvfp4") == 3 * (GPU.fp8_flops or 0)


def test_what_cannot_be_is_no_part_of_the_means(folder, tmp_path):
    """Qwen3-32B in fp8 on two H200: a token in 1.2 ms, where reading the weights takes 3."""
    row = CLOSED.replace("two,", "quick,").replace(",12,", ",1.2,")
    (folder / "runs.csv").write_text(HEAD + CLOSED + row)
    two, quick = validate_measured(folder)
    assert two.impossible == ""
    assert "TPOT is 1.2 ms; " in quick.impossible
    text = report([two, quick])
    assert "  impossible, no part of the means: TPOT is 1.2 ms" in text
    (line,) = [line for line in text.splitlines() if "tpot mean (ms)  " in line and "%" in line][
        -1:
    ]
    assert f"{abs({r.metric: r.error for r in two.rows}['mean_tpot_ms']):.1%}" in line
    assert "quick: impossible: TPOT is" in outcome_line(quick)
    write_json(tmp_path / "all.json", [two, quick])
    assert (tmp_path / "all.json").read_text().count('"impossible": "TPOT is') == 2


def test_a_closed_loop_tells_its_rate():
    """Ten clients, a hundred requests of 100 + 9 x 10 ms: 19 ms each, and 0.38 s of empty seats."""
    times = {"mean_ttft_ms": 100.0, "mean_tpot_ms": 10.0}
    run = run_of(concurrency="10", n_requests="100")
    assert closed_loop_rate(run, times, 10.0) == pytest.approx(100 / (1.9 + 0.38))
    assert closed_loop_rate(run_of(concurrency="10"), times, 10.0) == pytest.approx(100 / 2.28)
    assert closed_loop_rate(run, {"mean_e2el_ms": 190.0}, 10.0) == pytest.approx(100 / 2.28)
    assert closed_loop_rate(run, {"mean_ttft_ms": 190.0}, 1.0) == pytest.approx(100 / 2.28)
    assert closed_loop_rate(run, {"mean_ttft_ms": 190.0}, 10.0) == 0.0
    assert closed_loop_rate(run_of(concurrency="10", rate_rps="5"), times, 10.0) == 0.0
    assert closed_loop_rate(run_of(rate_rps="5"), times, 10.0) == 0.0


def test_prompts_of_a_closed_loop_that_cannot_have_been_computed(folder):
    """Qwen3-32B in fp8 on two H200s: 64 clients with prompts of 8,192 tokens and 40 ms of TTFT."""
    row = CLOSED.replace("two,", "found,").replace(",4,,,1024,64,100,", ",64,,,8192,16,40,")
    (folder / "runs.csv").write_text(HEAD + CLOSED + row)
    two, found = validate_measured(folder)
    assert two.impossible == ""
    assert "requests/s of 8,1" in found.impossible
    assert "2 x H200 have" in found.impossible


def test_runs_are_told_as_they_get_done(folder, capsys):
    assert main(["validate", "--measured", str(folder)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split("/")[0] for line in lines) == ["1", "2", "3"]
    assert all("/3 " in line for line in lines)
    (bad,) = [line for line in lines if " bad: " in line]
    assert "cannot be predicted: model: no shipped model" in bad
    (one,) = [line for line in lines if " one: TTFT " in line]
    assert "E2EL " in one
    assert main(["validate", "--measured", str(folder), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_every_latency_has_an_interval_and_who_has_none_learns_how(folder) -> None:
    (bare,) = validate_measured(folder, ["one"])
    assert "interval, and its largest cause: --sensitivity" in report([bare])
    (outcome,) = validate_measured(folder, ["one"], sensitivity=True)
    latencies = [row for row in outcome.rows if row.metric.endswith("_ms")]
    assert {row.metric[:4] for row in latencies} == {"mean", "p50_", "p90_", "p99_"}
    for row in latencies:
        low, high = outcome.interval(row.metric)
        assert low < row.predicted < high
    assert not any("none was judged" in note for note in outcome.notes)


def test_a_run_whose_kind_nobody_judged_says_so(folder) -> None:
    head = HEAD.replace("\n", ",engine,num_speculative_tokens,acceptance\n")
    row = CLOSED.replace("\n", "EAGLE-3,sglang,3,0.6\n").replace("h200_sxm", "L40S")
    row = row.replace("Qwen/Qwen3-32B,fp8,0.12.0", "meta-llama/Llama-3.1-8B,bf16,0.5.1")
    (folder / "runs.csv").write_text(head + row)
    (outcome,) = validate_measured(folder, sensitivity=True)
    (told,) = (note for note in outcome.notes if "none was judged" in note)
    assert told.endswith("none was judged with L40S; SGLang, drafts; SGLang 0.5")


def test_how_far_a_run_moves_with_its_profile(folder, capsys):
    (outcome,) = validate_measured(folder, ["two"], sensitivity=True)
    (e2el,) = (one for one in outcome.sensitivity if one.metric == "mean_e2el_ms")
    assert 0.5 < e2el.elasticity < 2.0
    assert e2el.interval is not None
    assert e2el.interval[0] < e2el.value < e2el.interval[1]
    text = report([outcome])
    assert "95 % interval, its largest cause; % more if steps are 1 % longer" in text
    assert "on a cliff" not in text
    assert re.search(r" of 1, ±\d+% \(median\)$", text, re.MULTILINE)
    ends = "{:.2f} to {:.2f}, ".format(*outcome.interval("mean_tpot_ms"))
    line = next(line for line in text.splitlines() if line.startswith("  tpot mean (ms)  "))
    assert re.search(re.escape(ends) + r"\w+ \d+%; \+[01]\.\d\d ±", line)
    assert "--sensitivity" not in text
    write_json(folder / "errors.json", [outcome])
    rows = {row["metric"]: row for row in json.loads((folder / "errors.json").read_text())}
    tpot = next(one for one in outcome.sensitivity if one.metric == "mean_tpot_ms")
    assert rows["mean_tpot_ms"]["interval_95"] == [*tpot.interval]
    assert sum(rows["mean_tpot_ms"]["shares"].values()) == pytest.approx(1)
    steep = replace(e2el, elasticity=5.1, chance=0.1)
    outcome.sensitivity = [steep]
    assert "on a cliff: a small error of the profile is a large one of" in report([outcome])
    assert main(["validate", str(folder), "--sensitivity"]) == 2
    assert "--sensitivity: needs --measured" in capsys.readouterr().err
