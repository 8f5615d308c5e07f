"""Composed steps of small hand-made tables: shapes, shares, all-reduce, fallbacks, bad input."""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from calibration.profile_commands import list_, show
from simulator.core.request import Chunk, Request, Step
from simulator.costs.profile import read_profile
from simulator.costs.roofline import roofline
from simulator.models.load import load_model
from simulator.util.errors import HeadwayError
from tools.profiles.aiconfigurator import AllReduce, Products, read_cached
from tools.profiles.attention import read_attention
from tools.profiles.build import build, main
from tools.profiles.compose import Target, compose_kernels
from tools.profiles.fit_target import longest_context
from tools.profiles.llmservingsim import LayerTables
from tools.profiles.tables import find_gpu_tables

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'headway[parquet]'")

H100, PRO = find_gpu_tables("H100-80GB"), find_gpu_tables("RTX-PRO-6000")
LLAMA = load_model("llama-3-8b")
TOKENS = [1, 4, 8, 64, 512, 8192]
SIZES = [32, 1024, 65536]


def gemm_ms(m: int, n: int, k: int) -> float:
    """Return the time of a product whose logarithm is straight in those of n and k."""
    return 1e-7 * (n * k) ** 0.5 * (m + 64)


def write(folder: Path, path: str, rows: Sequence[dict[str, object]]) -> None:
    """Write a table into AIConfigurator's tree."""
    place = folder / path
    place.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(place)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Make the tables of an H100 that times everything by simple rules."""
    read_cached.cache_clear()
    grid = product(("bfloat16", "fp8"), TOKENS, SIZES, SIZES)
    write(
        tmp_path,
        "h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet",
        [
            {"gemm_dtype": d, "m": m, "n": n, "k": k, "latency": gemm_ms(m, n, k) / (1 + (d > "c"))}
            for d, m, n, k in grid
        ],
    )
    for kind, lengths in (("context", (16, 256, 2048)), ("generation", (1,))):
        rows = [
            {
                "batch_size": batch,
                "isl": length,
                "step": step,
                "num_heads": heads,
                "num_key_value_heads": kv,
                "head_dim": 128,
                "kv_cache_dtype": "bfloat16",
                "latency": 1e-3 + 1e-9 * batch * heads * length * (length + 2 * step),
            }
            for batch in (1, 4, 16)
            for length in lengths
            for step in ((0,) if kind == "context" else (15, 1023, 8191))
            for heads, kv in ((32, 8), (8, 8), (16, 4))
        ]
        write(tmp_path, f"h100_sxm/attention/vllm/0.24.0/{kind}_attention_perf.parquet", rows)
    write(
        tmp_path,
        "h100_sxm/comm/vllm/0.24.0/custom_allreduce_perf.parquet",
        [
            {"num_gpus": 2, "message_size": size, "backend": backend, "latency": ms + size / 1e8}
            for backend, ms in (("vllm_graph", 0.005), ("vllm_eager", 0.02))
            for size in (1, 1 << 30)
        ],
    )
    write(
        tmp_path,
        "h100_sxm/comm/nccl/2.29.2/nccl_perf.parquet",
        [
            {
                "op_name": "all_reduce",
                "nccl_dtype": "half",
                "num_gpus": 2,
                "message_size": size,
                "latency": 0.1 + size / 2e8,
            }
            for size in (1, 1 << 30)
        ],
    )
    return tmp_path


def test_products_of_a_layer_are_those_of_its_shapes(tables: Path) -> None:
    """Decodes of one token: query, key and value; output; gate and up; down, in 32 layers."""
    kernels = compose_kernels(tables, Target(LLAMA, H100))
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    products = 32e-3 * sum(gemm_ms(1, n, k) for n, k in shapes)
    small = 32 * 10e-6
    assert kernels.dense[0] == pytest.approx(products + small, rel=0.02)
    assert kernels.notes == []
    halves = compose_kernels(tables, Target(LLAMA, H100, dtype="fp8"))
    assert halves.dense[0] == pytest.approx(products / 2 + small, rel=0.02)


def test_two_gpus_share_the_products_and_add_up_twice_a_layer(tables: Path) -> None:
    """Each has half the outputs or inputs; 64 all-reduces of 4,096 elements come on top."""
    kernels = compose_kernels(tables, Target(LLAMA, H100, 2))
    shapes = [(3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168)]
    products = 32e-3 * sum(gemm_ms(1, n, k) for n, k in shapes)
    reduce = 64e-3 * (0.005 + 4096 / 1e8)
    assert kernels.dense[0] == pytest.approx(products + reduce + 32 * 10e-6, rel=0.02)


def test_sizes_of_messages_are_counts_of_two_bytes(tables: Path) -> None:
    """8 KiB are 4,096 elements; what vLLM dispatches to is timed in a graph."""
    table = AllReduce(tables, H100, 2)
    size = np.array([8192.0, 1 << 20, 1 << 26])
    np.testing.assert_allclose(1e3 * table.seconds(size), 0.005 + size / 2e8, rtol=1e-6)
    assert not AllReduce(tables, H100, 4).measured


def test_nccl_adds_up_where_vllm_was_not_timed(tables: Path) -> None:
    table = AllReduce(tables, replace(H100, custom=""), 2)
    size = np.array([8192.0, 1 << 26])
    np.testing.assert_allclose(1e3 * table.seconds(size), 0.1 + size / 4e8, rtol=1e-6)


def test_more_bytes_never_take_less_time_and_fused_sums_save_the_norms_launch(
    tables: Path,
) -> None:
    """vLLM's table: 5, 9 and 7 us; TensorRT-LLM's: 3 us, up to 64 MiB between two GPUs."""
    for framework, latencies in (("vllm", (5, 9, 7)), ("trtllm", (3, 3, 3))):
        rows = [
            {"num_gpus": 2, "message_size": size, "backend": "vllm_graph", "latency": us / 1e3}
            for size, us in zip((64, 128, 1 << 30), latencies, strict=True)
        ]
        write(tables, f"h100_sxm/comm/{framework}/1.0/custom_allreduce_perf.parquet", rows)
    table = AllReduce(tables, replace(H100, custom="1.0", fused="1.0"), 2)
    size = np.array([128.0, 256, 1 << 20, 1 << 31])
    np.testing.assert_allclose(1e6 * table.seconds(size), [5, 9, 9, 9])
    np.testing.assert_allclose(1e6 * table.seconds(size, norm=True), [1, 1, 1, 9])


def disturb(tables: Path, tokens: Sequence[int], factor: int) -> None:
    """Let products of so many tokens have taken so many times as long."""
    path = tables / "h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet"
    table = pd.read_parquet(path)
    table.loc[table["m"].isin(tokens), "latency"] *= factor
    table.to_parquet(path)
    read_cached.cache_clear()


def test_few_tokens_take_no_longer_than_more_do(tables: Path) -> None:
    """Products of 4 tokens, disturbed when they were timed, take what those of 8 take."""
    disturb(tables, (4, 512), 3)
    products = Products(tables, H100, "bfloat16")
    found = dict(zip(products.tokens, products.seconds(4096, 4096) * 1e3, strict=True))
    assert found[4] == pytest.approx(gemm_ms(8, 4096, 4096))
    assert found[512] == pytest.approx(3 * gemm_ms(512, 4096, 4096))


def test_fp8_products_on_hopper_may_take_longer_than_of_more_tokens(tables: Path) -> None:
    """Behind 16 tokens, where the kernel's tiles change; what was disturbed before is not."""
    disturb(tables, (4, 64), 9)
    found = {}
    for dtype in ("bfloat16", "fp8"):
        products = Products(tables, H100, dtype)
        times = products.seconds(4096, 4096) * 1e3
        found[dtype] = dict(zip(products.tokens, times, strict=True))
    assert found["bfloat16"][64] == pytest.approx(gemm_ms(512, 4096, 4096))
    assert found["fp8"][64] == pytest.approx(9 / 2 * gemm_ms(64, 4096, 4096))
    assert found["fp8"][4] == pytest.approx(gemm_ms(8, 4096, 4096) / 2)


def test_what_no_table_has_is_reckoned_and_said(tables: Path) -> None:
    """No all-reduce of four GPUs, no fp8 cache, no int4 weights: three notes."""
    target = Target(LLAMA, H100, 1, "int4", "fp8")
    notes = compose_kernels(tables, target).notes
    assert len(notes) == 3
    assert notes[0].startswith("matrix products: none were timed with int4 weights")
    assert notes[1].startswith("generation attention: a fp8 cache was not timed")
    full = compose_kernels(tables, Target(LLAMA, H100))
    half = compose_kernels(tables, target)
    np.testing.assert_allclose(half.attention.context, 2 * full.attention.context)


def test_decodes_of_many_kv_heads_are_those_of_eight(tables: Path) -> None:
    """32 KV heads of a sequence read what 8 of four sequences do."""
    found, _ = read_attention(tables, H100, "generation", (32, 32, 128), "bfloat16")
    assert sorted(set(found["N"])) == [1.0, 4.0]  # batches of 4 and 16
    assert found["S"].max() == 4 * 8192
    assert set(found["num_heads"]) == {8}


def test_the_nearest_heads_stand_in(tables: Path) -> None:
    """40 heads on 8 KV heads were not timed: prompts take 40/32 of what 32 do."""
    found, notes = read_attention(tables, H100, "context", (40, 8, 128), "bfloat16")
    there, none = read_attention(tables, H100, "context", (32, 8, 128), "bfloat16")
    np.testing.assert_allclose(found["seconds"], 1.25 * there["seconds"])
    assert notes == ["context attention: of 32 heads, for want of 40"]
    assert none == []
    found, notes = read_attention(tables, H100, "context", (32, 6, 128), "bfloat16")
    assert found["seconds"].tolist() == there["seconds"].tolist()
    assert notes == ["context attention: of 8 KV heads, for want of 6"]
    found, _ = read_attention(tables, H100, "generation", (32, 6, 128), "bfloat16")
    assert found["N"].max() == pytest.approx(16 * 8 / 6)  # as many bytes of cache
    with pytest.raises(HeadwayError, match="no rows of heads of size 64"):
        read_attention(tables, H100, "context", (32, 8, 64), "bfloat16")


def test_experts_are_shared_out(tmp_path: Path) -> None:
    """Two GPUs read half of the activated experts each, for half of the tokens."""
    model = load_model("qwen3-30b-a3b")
    folder = tmp_path / "RTXPRO6000" / "Qwen" / "Qwen3-30B-A3B-Instruct-2507" / "tp1"
    folder.mkdir(parents=True)
    rows = [(t, e, 1000.0 * t + e) for t in (1, 64, 4096) for e in (8, 128)]
    columns = ["tokens", "activated_experts", "time_us"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "moe.csv", index=False)
    for gpus in (1, 2):
        (found,) = LayerTables(tmp_path, PRO, model, gpus).experts(np.array([2048.0]))
        wanted = 48 * (1000 * 2048 / gpus + model.expected_experts(2048) / gpus) / 1e6
        assert found == pytest.approx(wanted)


@pytest.mark.medium
def test_build_list_and_show(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands work on any folder with tables."""
    out = tmp_path / "made.yaml"
    assert build(model="llama-3-8b", gpu="H100-80GB", tp=2, data=tables, out=out) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"written to {out}: median error ")
    profile = read_profile(out)
    assert profile.hardware["tensor_parallel_size"] == 2
    assert show(str(out)) == 0
    assert capsys.readouterr().out == out.read_text()
    assert list_() == 0
    assert "llama-3-8b.a100.bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "3"], "--tp: 3 does not divide the 32 attention heads of llama-3-8b"),
        (["--model", "gpt-5"], "--model: no file"),
        (["--tp", "0"], "--tp: must be at least 1, not 0"),
        (["--gpu", "L4"], "--gpu: L4 has no kernel tables; take one of A100-80GB, "),
        (["--gpu", "H1000"], "--gpu: no GPU 'H1000': take a similar one, as H100"),
        (["--gpu", "H200"], "has neither h200_sxm/gemm/vllm/0.24.0/gemm_perf.parquet"),
        (["--quantization", "fp7"], "--quantization: must be one of fp8, int8, int4, nvfp4"),
        (["--dtype", "float32"], "--dtype: must be one of auto, bfloat16"),
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype: must be a 16-bit one or fp8"),
        (["--data", "/nowhere"], "--data /nowhere: no such folder"),
    ],
)
def test_bad_input_is_one_line(
    tables: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    """Exit code 2, one line that says what is allowed, no file."""
    out = tmp_path / "made.yaml"
    given = {"--model": "llama-3-8b", "--gpu": "H100-80GB", "--data": str(tables)}
    given |= dict([words]) if len(words) == 2 else {}
    line = [word for pair in given.items() for word in pair]
    assert main([*line, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_missing_columns_are_named(tables: Path) -> None:
    """One line with the file and the columns."""
    path = "h100_sxm/gemm/vllm/0.24.0/gemm_perf.parquet"
    pd.read_parquet(tables / path).drop(columns=["n", "latency"]).to_parquet(tables / path)
    with pytest.raises(HeadwayError, match=r"gemm_perf\.parquet: lacks the columns n, latency$"):
        compose_kernels(tables, Target(LLAMA, H100))
    (tables / path).write_bytes(b"no table")
    read_cached.cache_clear()
    with pytest.raises(HeadwayError, match=r"gemm_perf\.parquet: cannot be read as a table"):
        compose_kernels(tables, Target(LLAMA, H100))


def test_layers_of_a_timed_model(tmp_path: Path) -> None:
    """32 layers of every kernel, norms twice; embedding, last norm, head and sampler once.

    Ten gaps of 1.3 us in each layer. Of the skewed batches one counts: its 512 pairs are not split,
    few are long, no prompt is there; of three passes 2 us, for 200 keys.
    """
    folder = tmp_path / "RTXPRO6000" / "meta-llama" / "Llama-3.1-8B" / "tp1"
    folder.mkdir(parents=True)
    layers = ("embedding", "layernorm", "qkv_proj", "final_layernorm")
    dense = [(name, tokens, 10.0) for name in layers for tokens in (1, 2048)]
    pd.DataFrame(dense, columns=["layer", "tokens", "time_us"]).to_csv(
        folder / "dense.csv", index=False
    )
    head = [(name, count, 5.0) for name in ("lm_head", "sampler") for count in (1, 256)]
    pd.DataFrame(head, columns=["layer", "sequences", "time_us"]).to_csv(
        folder / "per_sequence.csv", index=False
    )
    attention = [(16, 64, 2, 100, 7.0), (0, 0, 4, 50, 3.0), (16, 0, 0, 0, 2.0)]
    names = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    pd.DataFrame(attention, columns=names).to_csv(folder / "attention.csv", index=False)
    skewed = [(64, 1, 0, 16.0), (32, 1, 0, 20.0), (64, 32, 0, 30.0), (64, 1, 16, 40.0)]
    skew = pd.DataFrame(skewed, columns=["n", "nb", "pc", "t_skew_us"])
    skew.assign(kv_big=300, kv_mean=100, t_mean_us=10.0).to_csv(folder / "skew.csv", index=False)
    kernels = compose_kernels(tmp_path, Target(load_model("llama-3.1-8b"), PRO))
    assert kernels.wait_per_key == pytest.approx(32 * 2e-6 / 200)
    each = (20 + 32 * (30 + 13)) * 1e-6
    assert kernels.dense.tolist() == pytest.approx([each] * len(kernels.tokens))
    assert kernels.timed == kernels.tokens[1]  # beyond, they go on as in their upper half
    assert kernels.head.tolist() == pytest.approx([1e-5] * 2)
    found = kernels.attention
    assert found.seconds.tolist() == pytest.approx([224e-6, 96e-6, 64e-6])
    assert found.context.tolist() == [200, 200, 0]
    assert found.pairs.tolist() == [16 * 64 + 136, 0, 136]
    assert found.longest.tolist() == [100, 50, 16]


def test_a_model_that_nobody_timed_there_gets_a_roofline(tmp_path: Path) -> None:
    """Scaled to the GPU's kernels, and the profile says so; no error is claimed."""
    out = tmp_path / "made.yaml"
    assert build(model="qwen3-8b", gpu="RTX-4090", data=tmp_path, out=out) == 0
    profile = read_profile(out)
    assert profile.cost.name == "made (in part scaled roofline)"
    text = out.read_text()
    assert "nothing was timed of qwen3-8b at TP 1 on RTX-4090" in text
    assert "  median_relative_error" not in text
    said = roofline(load_model("qwen3-8b"), find_gpu_tables("RTX-4090").gpu)
    for step in (Step([], 8, 8000), Step([Chunk(Request(0, 0.0, 512, 1), 0, 512)])):
        assert profile.cost.execute(step).seconds == pytest.approx(
            said.execute(step).seconds, rel=0.02
        )


def test_how_many_cached_tokens_a_profile_stands_for():
    """Llama-3-8B keeps 128 KiB a token, half of it on each of two GPUs: what 80 GB hold of that.

    At most four times what was timed, and never less than that.
    """
    one, two = (Target(load_model("llama-3-8b"), find_gpu_tables("H100-80GB"), n) for n in (1, 2))
    held = one.tables.gpu.memory // 131_072
    assert 600_000 < held < 700_000
    assert longest_context(one, 524_288) == held
    assert longest_context(two, 524_288) == one.tables.gpu.memory // 65_536
    assert longest_context(one, 1_000) == 4_000
    assert longest_context(one, 1 << 21) == 1 << 21


def test_shared_experts_run_beside_the_chosen_ones() -> None:
    """Up to 256 tokens the shorter of both is hidden, unless the memory serves both no faster."""
    data = os.environ.get("HEADWAY_DATA")
    if data is None:
        pytest.skip("HEADWAY_DATA is not set")
    tables = find_gpu_tables("H100-80GB")
    scout = load_model("llama-4-scout")
    target = Target(scout, tables, 8, "fp8")
    alone = replace(target, model=replace(scout, num_shared_experts=0))
    beside, without = (compose_kernels(Path(data), each) for each in (target, alone))
    shared = beside.dense - without.dense
    chosen = np.interp(beside.tokens, *beside.experts["uniform"])
    width = (1 + np.array([scout.expected_experts(int(count)) for count in beside.tokens])) / 8
    size = scout.num_hidden_layers * 3 * scout.hidden_size * scout.intermediate_size * width
    reading = size / tables.gpu.bandwidth
    few = beside.tokens <= 256
    assert (chosen + shared >= 0.999 * np.maximum(chosen, reading))[few].all()
    assert (shared[few] < 0.25 * chosen[few]).all()
    after = beside.tokens > 256
    assert (shared[after] > 3 * shared[few].max()).all()  # none of it hidden
