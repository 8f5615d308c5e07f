"""What a user's own vLLM tells: its steps, written down by a scheduler plug-in, and traces of
torch's profiler. Where vLLM is installed, its own classes stand behind both."""

import csv
import gzip
import json
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from calibration.server_logs.from_steps import (
    kernel_kind,
    parse_step,
    read_profile_steps,
    read_steps,
)
from headway.cli.main import main
from simulator.scenario.load import check_scenario
from simulator.simulation.run import run
from simulator.util.yaml_lines import SourceMap

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
SCENARIO = {
    "name": "s",
    "model": "llama-3-8b",
    "gpu": {"name": "H100-80GB"},
    "cost": {"kind": "linear", "base": 0.01, "per_token": 1e-4, "per_context": 0.0},
    "engine": {"num_gpu_blocks_override": 60, "max_num_seqs": 8, "max_num_batched_tokens": 64},
    "workload": {"num_prompts": 30, "request_rate": 20, "input_len": 40, "output_len": 60},
}


@needs_vllm
@pytest.mark.parametrize("ahead", [False, True])
def test_the_recorder_sees_vllms_own_steps(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are the steps of the run, and `--from-steps` reads them."""
    monkeypatch.setenv("HEADWAY_STEPS", str(tmp_path / "steps.jsonl"))
    engine = {**SCENARIO["engine"], "scheduler": "vllm"}
    engine |= {"scheduler_cls": "headway.vllm.RecordedScheduler", "async_scheduling": ahead}
    steps = run(check_scenario(SCENARIO | {"engine": engine}, SourceMap("s", {}))).logs[0].steps
    rows = read_steps(tmp_path / "steps.jsonl")
    assert len(rows) > 200
    assert [row.decodes for row in rows] == steps["decodes"].tolist()
    assert [row.context for row in rows] == steps["context"].tolist()
    new = [sum(size for _, size in row.chunks) for row in rows]
    assert new == steps["prefill_tokens"].tolist()


@needs_vllm
def test_steps_have_the_names_that_vllm_gives_them() -> None:
    """Both of its forms, from its own worker."""
    from vllm.v1.worker.gpu_worker import Worker

    from headway.vllm.installed import start_vllm
    from simulator.kv_cache.block_manager import BlockCounter

    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512}
    vllm, make = start_vllm(options, BlockCounter(60, 16), False)
    vllm.add_request(make("0", list(range(40)), 9, 0.0, 0))
    said = []

    def annotate(output: object, detailed: bool) -> None:
        profiler = SimpleNamespace(
            step=lambda: None, should_annotate=True, annotate_context_manager=said.append
        )
        config = SimpleNamespace(
            profiler_config=SimpleNamespace(detailed_trace_annotation=detailed)
        )
        Worker.annotate_profile(SimpleNamespace(profiler=profiler, vllm_config=config), output)

    output = vllm.schedule()
    for detailed in (False, True):
        annotate(output, detailed)
    plain, full = (parse_step(name) for name in said)
    assert plain is not None
    assert full is not None
    assert (plain.decodes, plain.context, plain.chunks) == (0, 0, [(0, 40)])
    assert (full.decodes, full.context, full.chunks) == (0, 0, [(0, 40)])


def test_names_of_steps() -> None:
    """vLLM's two forms; other ranges are none."""
    plain = parse_step("execute_context_2(700)_generation_3(3)")
    assert plain is not None
    assert (plain.decodes, plain.context, plain.chunks) == (3, None, [(0, 350), (0, 350)])
    full = parse_step(
        "execute_515_context_1(sq512sk1536sqsq262144sqsk786432)"
        "_generation_3(sq3sk3000sqsq3sqsk3000)"
    )
    assert full is not None
    assert (full.decodes, full.context, full.chunks) == (3, 3000, [(1024, 512)])
    assert parse_step("execute_model") is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x64_64x9_1x2_h_bz_coopA_TNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_cublas", "gemm"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttn<...>>>", "attention"),
        ("void flash::flash_fwd_splitkv_combine_kernel<...>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, ...>", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all_reduce"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "all_reduce"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, ...>", "other"),
        ("triton_red_fused_add_rms_norm_0", "other"),
    ],
)  # fmt: skip
def test_kernels_by_name(name: str, kind: str) -> None:
    assert kernel_kind(name) == kind


def trace(path: Path, steps: list[tuple[str, dict[str, float]]], idle: float = 10.0) -> Path:
    """A trace of steps whose kernels take so many us; a replayed graph shares one correlation."""
    numbers, events, now, host = count(1), [], 1000.0, 0.0
    for name, kernels in steps:
        events.append({"ph": "X", "cat": "user_annotation", "name": name, "ts": host, "dur": 5.0})
        for number, (kernel, us) in zip(numbers, kernels.items(), strict=False):
            args = {"correlation": number}
            launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": host + 7}
            events.append(launch | {"dur": 1.0, "args": args})
            event = {"ph": "X", "cat": "kernel", "name": kernel, "ts": now, "dur": us}
            events.append(event | {"args": args})
            now += us
        now, host = now + idle, host + 100.0
    events.append({"ph": "i", "name": "something else", "ts": 0.0})
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_a_trace_gives_steps_and_where_their_time_went(tmp_path: Path) -> None:
    """Kernels by their launches, not by when they run; a step lasts to the next one's beginning."""
    kernels = {"nvjet": 100.0, "flash_fwd": 30.0, "ncclDevKernel": 20.0, "argmax": 5.0}
    path = trace(
        tmp_path / "t.pt.trace.json.gz",
        [("execute_context_0(0)_generation_3(3)", kernels)] * 2,
    )
    one, two = read_profile_steps(path)
    assert one.seconds == pytest.approx(
        {"gemm": 1e-4, "attention": 3e-5, "all_reduce": 2e-5, "other": 5e-6}
    )
    assert one.duration == pytest.approx(165e-6)
    assert two.duration == pytest.approx(155e-6)


def test_a_profile_is_fitted_to_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what the decodes read in it; its steps are written beside."""
    scenario = tmp_path / "s.yaml"
    scenario.write_text(json.dumps(SCENARIO | {"cost": None}))
    steps = []
    for k in range(200):
        rows, context = 1 + k % 8, 500 + 37 * k
        name = f"execute_{rows}_context_0(sq0sk0sqsq0sqsk0)_generation_{rows}"
        name += f"(sq{rows}sk{context}sqsq{rows}sqsk{context})"
        steps.append((name, {"nvjet": 5000.0 + 20 * rows, "flash_fwd": 0.1 * context}))
    path = trace(tmp_path / "t.json.gz", steps)
    out = tmp_path / "out"
    words = ["calibrate", "--from-torch-profile", str(path), "--out", str(out)]
    assert main([*words, "--scenario", str(scenario)]) == 0
    said = capsys.readouterr().out
    assert "decode            200" in said
    assert "held out: 40 steps, median 0." in said
    assert len(list(csv.DictReader((out / "steps.csv").open()))) == 200
    assert (out / "s-steps.yaml").exists()


def test_what_a_trace_lacks_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No contexts: no profile; no steps, no trace: one line each, and nothing is written."""
    plain = trace(
        tmp_path / "t.json.gz", [("execute_context_0(0)_generation_3(3)", {"nvjet": 9.0})] * 3
    )
    out = tmp_path / "out"
    assert main(["calibrate", "--from-torch-profile", str(plain), "--out", str(out)]) == 0
    assert "detailed_trace_annotation" in capsys.readouterr().out
    scenario = tmp_path / "s.yaml"
    scenario.write_text("name: s\n")
    words = ["calibrate", "--from-torch-profile", str(plain), "--out", str(out)]
    assert main([*words, "--scenario", str(scenario)]) == 1  # a profile was asked for
    for content, said in [
        ('{"traceEvents": []}', "has no steps of vLLM's"),
        ("{}", "is no trace of torch's profiler"),
        ("{", "damaged"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": '
            '"execute_context_0(0)_generation_3(3)"}]}',
            "damaged: an event lacks 'ts'",
        ),
    ]:
        bad = tmp_path / "bad.json"
        bad.write_text(content)
        words = ["calibrate", "--from-torch-profile", str(bad), "--out", str(tmp_path / "no")]
        assert main(words) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
