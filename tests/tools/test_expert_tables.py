"""Experts, latent and linear attention out of small tables made by hand."""

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from simulator.costs.piecewise import PiecewiseCost
from simulator.models.dtypes import bytes_of
from simulator.models.load import load_model
from tools.profiles.aiconfigurator import Experts
from tools.profiles.attention import has_latent, read_latent, read_linear
from tools.profiles.compose import Target, compose_kernels
from tools.profiles.fit_target import compose_steps, fit_target, with_window
from tools.profiles.tables import NotTimedError, find_gpu_tables

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'headway[parquet]'")

H100, B200 = find_gpu_tables("H100-80GB"), find_gpu_tables("B200")
MIXTRAL, SCOUT = load_model("mixtral-8x7b"), load_model("llama-4-scout")
TOKENS = (1, 2, 4, 8, 16, 64, 1024)


def write(folder: Path, path: str, rows: list[dict[str, object]]) -> None:
    place = folder / path
    place.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(place)


def expert_rows(
    shape: tuple[int, int, int, int], dtype: str = "bfloat16", factor: float = 1.0
) -> list[dict[str, object]]:
    """Make times of a millisecond an expert met: as many as can be, half of them under a law."""
    hidden, inner, chosen, experts = shape
    rows = []
    for tokens, (tp, ep), law in product(
        TOKENS, ((1, 1), (2, 1), (1, 2)), ("balanced", "power_law_1.01", "power_law_1.2")
    ):
        met = min(tokens * chosen, experts) * (1.0 if law == "balanced" else 0.5)
        rows.append(
            {
                "moe_dtype": dtype,
                "num_tokens": tokens,
                "hidden_size": hidden,
                "inter_size": inner,
                "topk": chosen,
                "num_experts": experts,
                "moe_tp_size": tp,
                "moe_ep_size": ep,
                "distribution": law,
                "latency": factor * met / tp / ep * (1.1 if ep > 1 else 1.0),
            }
        )
    return rows


def moe(folder: Path, *rows: list[dict[str, object]], gpu: str = "h100_sxm") -> Path:
    every = [row for some in rows for row in some]
    write(folder, f"{gpu}/moe/vllm/0.24.0/moe_perf.parquet", every)
    return folder


def test_even_choices_meet_fewer_experts_than_a_balanced_step_can(tmp_path: Path) -> None:
    """Mixtral: two tokens meet 8 (1 - (3/4)^2) = 3.5 of 8 experts, at best 4; 64 meet them all."""
    data = moe(tmp_path, expert_rows((4096, 14336, 2, 8)))
    table = Experts(data, H100, MIXTRAL, "bfloat16")
    assert table.measured
    assert table.note == ""
    times = table.seconds(1)
    assert times is not None
    assert list(times) == ["uniform", "power_law_1.01", "power_law_1.2"]
    tokens, seconds = times["uniform"]
    assert tokens.tolist() == list(TOKENS)
    assert seconds[:3] * 1e3 == pytest.approx([2, 3.5, 8 * (1 - 0.75**4)], rel=1e-6)
    assert seconds[-1] * 1e3 == pytest.approx(8)
    assert times["power_law_1.2"][1][:3] * 1e3 == pytest.approx([1, 2, 4])


def test_tokens_that_choose_by_a_law_miss_experts_that_its_rounded_loads_meet(
    tmp_path: Path,
) -> None:
    """64 tokens of gpt-oss draw 256 loads from 1 to 51; what reading the missed takes is left out.

    With AIConfigurator's sampler 88 of 128 experts have a load, and 80 are met by draws.
    """
    oss = load_model("gpt-oss-120b")
    data = moe(tmp_path, expert_rows((2880, 2880, 4, 128), "w4a16_mxfp4"))
    times = Experts(data, H100, oss, "mxfp4").seconds(2)
    assert times is not None
    tokens, seconds = times["power_law_1.2"]
    left_out = 0.5 * np.minimum(4 * tokens, 128) / 2 - 1e3 * seconds
    lost = dict(zip(tokens.tolist(), left_out.tolist(), strict=True))
    each = 3 * 2880 * 2880 * bytes_of("mxfp4") / 2 / H100.gpu.bandwidth
    missed = lost.pop(64) / 1e3 / each
    assert set(np.round(list(lost.values()), 9)) == {0.0}  # of other steps nothing

    generator = np.random.default_rng(0)
    share = np.linspace(1 / 256, 1 - 1 / 256, 128)
    loads = (1 + share * (51.2**-0.2 - 1)) ** (1 / -0.2)
    loads *= 256 / loads.sum()
    draws = np.log(loads) + generator.gumbel(size=(200, 64, 128))
    chosen = np.argpartition(-draws, 4)[..., :4].reshape(200, -1)
    met = np.mean([len(np.unique(step)) for step in chosen])
    assert missed == pytest.approx((loads >= 0.5).sum() - met, abs=1.5)


def test_large_steps_leave_tiles_half_empty(tmp_path: Path) -> None:
    """1,024 tokens are two tiles of 128 for each of 8 experts if all are alike, and never are."""
    rows = expert_rows((4096, 14336, 2, 8))
    slower = {"power_law_1.01": 10.0, "power_law_1.2": 12.0}
    for row in rows:
        if row["num_tokens"] >= 64 and row["distribution"] in slower:
            row["latency"] = slower[str(row["distribution"])]
    table = Experts(moe(tmp_path, rows), H100, MIXTRAL, "bfloat16")
    for whole, gpus, expected in ((False, 1, [8, 10]), (False, 2, [4, 10]), (True, 2, [4.4, 4.4])):
        times = table.seconds(gpus, whole=whole)
        assert times is not None
        assert times["uniform"][1][-2:] * 1e3 == pytest.approx(expected, rel=1e-6)


def test_slices_and_whole_experts_have_times_of_their_own(tmp_path: Path) -> None:
    data = moe(tmp_path, expert_rows((4096, 14336, 2, 8)))
    table = Experts(data, H100, MIXTRAL, "bfloat16")
    sliced, whole = table.seconds(2), table.seconds(2, whole=True)
    assert sliced is not None
    assert whole is not None
    assert whole["uniform"][1] == pytest.approx(1.1 * sliced["uniform"][1])
    assert table.seconds(8) is None


def test_the_likest_shape_stands_in_by_its_work(tmp_path: Path) -> None:
    """Experts twice as wide take twice as long; the note says whose times they are."""
    data = moe(tmp_path, expert_rows((4096, 7168, 2, 8)), expert_rows((512, 512, 2, 8)))
    table = Experts(data, H100, MIXTRAL, "bfloat16")
    assert "of 8 of 4096 x 7168, 2 a token, for want of these" in table.note
    times = table.seconds(1)
    assert times is not None
    assert times["uniform"][1][0] * 1e3 == pytest.approx(2 * 2)


def test_hopper_takes_block_scaled_times_for_fp8(tmp_path: Path) -> None:
    """Those with one scale a tensor are not what servers run there; on a B200 they are."""
    shape = (5120, 8192, 1, 16)
    rows = expert_rows(shape, "fp8", 5.0), expert_rows(shape, "fp8_block")
    moe(tmp_path, *rows)
    moe(tmp_path, *rows, gpu="b200_sxm")
    for tables, factor in ((H100, 1.0), (B200, 5.0)):
        times = Experts(tmp_path, tables, SCOUT, "fp8").seconds(1)
        assert times is not None
        assert times["uniform"][1][0] * 1e3 == pytest.approx(factor)


def test_marlins_times_are_scaled_by_the_weights_at_as_many_tokens_an_expert(
    tmp_path: Path,
) -> None:
    """Kimi's 384 experts, 8 a token, take a ms each. 1.5 times the tokens meet as many of gpt-oss'
    128, 4 a token; these are padded to 3,072 x 2,944, and 30 us are launches."""
    kimi = expert_rows((7168, 2048, 8, 384), "int4_wo")
    own = expert_rows((2880, 2880, 4, 128), "w4a16_mxfp4", 5.0)
    for rows, kernel in ((kimi, "vllm_marlin_experts"), (own, "vllm_triton_experts")):
        for row in rows:
            row["kernel_source"] = kernel
    data = moe(tmp_path, kimi, own)
    oss = load_model("gpt-oss-120b")
    times = Experts(data, H100, oss, "mxfp4").marlin(1)
    assert times is not None
    tokens, seconds = times["power_law_1.2"]
    met = dict(zip(tokens.tolist(), seconds.tolist(), strict=True))
    share = (128 * 3072 * 2944) / (384 * 7168 * 2048)
    for count in (2, 8):
        alike = 0.5 * 8 * 1.5 * count  # ms of Kimi's
        assert 1e3 * met[count] == pytest.approx(0.03 + share * (alike - 0.03))
    assert met[1024] == pytest.approx(30e-6 + share * (1.5 * 192e-3 - 30e-6))
    assert Experts(data, H100, MIXTRAL, "bfloat16").marlin(1) is None
    for row in kimi:
        row["kernel_source"] = "other"
    assert Experts(moe(tmp_path / "none", kimi, own), H100, oss, "mxfp4").marlin(1) is None


def test_what_was_not_timed(tmp_path: Path) -> None:
    data = moe(tmp_path, expert_rows((4096, 14336, 2, 8)))
    assert not Experts(data, H100, MIXTRAL, "nvfp4").measured
    assert not Experts(tmp_path / "nowhere", H100, MIXTRAL, "bfloat16").measured


def test_more_tokens_never_take_shorter(tmp_path: Path) -> None:
    """A bump in a table is smoothed out, not carried on."""
    rows = expert_rows((4096, 14336, 2, 8))
    bump = next(
        row
        for row in rows
        if (row["num_tokens"], row["distribution"], row["moe_tp_size"], row["moe_ep_size"])
        == (16, "power_law_1.2", 1, 1)
    )
    bump["latency"] = 9.0
    times = Experts(moe(tmp_path, rows), H100, MIXTRAL, "bfloat16").seconds(1)
    assert times is not None
    _, seconds = times["power_law_1.2"]
    assert np.all(np.diff(seconds) >= 0)
    assert seconds[-1] * 1e3 == pytest.approx((9.0 * 4 * 4) ** (1 / 3))  # mean of the logarithms


def latent_rows(kind: str, base: float) -> list[dict[str, object]]:
    """Make times of base + 1 us a token + 0.1 us a cached token, or pair."""
    sizes = product((1, 8, 64), (4, 1024) if kind == "generation" else (16, 64, 512))
    return [
        {
            "kv_cache_dtype": "bfloat16",
            "gemm_type": "fp8_block",
            "num_heads": 16,
            "batch_size": batch,
            "isl": 1 if kind == "generation" else size,
            "step": size if kind == "generation" else 0,
            "latency": base
            + 1e-3 * batch * (1 if kind == "generation" else size)
            + 1e-4 * batch * size * (1 if kind == "generation" else size / 2),
        }
        for batch, size in sizes
    ]


def test_latent_attention_is_split_into_projections_and_attention(tmp_path: Path) -> None:
    """What the shortest sequences take is the projections'; what longer ones add is attention's."""
    for kind in ("generation", "context"):
        path = f"h100_sxm/mla/vllm/0.24.0/mla_{kind}_module_perf.parquet"
        write(tmp_path, path, latent_rows(kind, 0.05))
    deepseek = load_model("deepseek-v3")
    assert has_latent(tmp_path, H100, deepseek)
    assert has_latent(tmp_path, H100, load_model("kimi-k2"))
    assert not has_latent(tmp_path, H100, load_model("deepseek-v2-lite"))
    tokens, seconds, steps = read_latent(tmp_path, H100, 16, "fp8", "bfloat16")
    assert tokens[:3].tolist() == [1, 8, 64]
    assert seconds[0] * 1e3 == pytest.approx(0.05 + 1e-3 + 4e-4)
    long = (steps.decodes == 64) & (steps.context == 64 * 1025)
    assert steps.attention[long] * 1e3 == pytest.approx(1e-4 * 64 * (1024 - 4))
    prompts = steps.select((steps.chunks == 1) & (steps.size == 512))
    alone = np.interp(512, tokens, seconds) * 1e3
    whole = 0.05 + 0.512 + 1e-4 * 512 * 256
    assert prompts.attention * 1e3 == pytest.approx(whole - alone)


def test_linear_attention_is_two_straight_lines(tmp_path: Path) -> None:
    """Two kernels of 2 us and 1 us a sequence, of 5 us and 0.1 us a token, in 36 layers."""
    model = load_model("qwen3-next-80b-a3b")
    rows = [
        {
            "phase": phase,
            "batch_size": count if phase == "generation" else 1,
            "seq_len": 1 if phase == "generation" else count,
            "kernel_source": kernel,
            "num_k_heads": 8,
            "num_v_heads": 16,
            "head_k_dim": 128,
            "head_v_dim": 128,
            "latency": (2e-3 + 1e-3 * count if phase == "generation" else 5e-3 + 1e-4 * count) / 2,
        }
        for phase, count, kernel in product(("generation", "context"), (1, 32, 1024), ("a", "b"))
    ]
    write(tmp_path, "h100_sxm/linear_attention/vllm/0.24.0/gdn_perf.parquet", rows)
    found = read_linear(tmp_path, H100, model, 2)
    lines = (found.decode, found.per_sequence, found.prefill, found.per_token)
    assert lines == pytest.approx([36 * us * 1e-6 for us in (2, 1, 5, 0.1)], rel=1e-3)
    with pytest.raises(NotTimedError, match="4 and 8 heads on H100-80GB"):
        read_linear(tmp_path, H100, model, 4)


def test_layers_with_a_window_take_their_share_of_every_term() -> None:
    cost = PiecewiseCost(
        [[1, 1e-3]], decode_per_context=8e-9, mixed_per_context=4e-9, prefill_per_pair=2e-9
    )
    split = with_window(cost, SCOUT)
    assert split.window == 8192
    assert (split.decode_per_context, split.decode_per_window) == (2e-9, 6e-9)
    assert (split.mixed_per_context, split.mixed_per_window) == (1e-9, 3e-9)
    assert (split.prefill_per_pair, split.prefill_per_window_pair) == (5e-10, 1.5e-9)
    assert with_window(cost, MIXTRAL) is cost


def test_models_without_tables_are_priced_by_roofline(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite's latents were timed nowhere: the profile says so."""
    report = fit_target(tmp_path, Target(load_model("deepseek-v2-lite"), H100))
    assert report.errors is None
    assert report.notes[0].startswith("nothing was timed of latent attention as that of deepseek")
    with pytest.raises(NotTimedError):
        compose_kernels(tmp_path, Target(load_model("qwen3-next-80b-a3b"), H100))


def test_mixtral_on_two_h100s_takes_the_published_time(data: Path) -> None:
    """0.490 to 0.497 ms a layer in experts for 8 to 64 tokens, less what even choices leave out."""
    target = Target(MIXTRAL, H100, 2)
    times = Experts(data, H100, MIXTRAL, "bfloat16").seconds(2)
    assert times is not None
    tokens, seconds = times["uniform"]
    at = dict(zip(tokens.tolist(), (seconds * 1e3).tolist(), strict=True))
    assert 0.42 < at[8] < 0.49
    assert all(0.48 < at[count] < 0.50 for count in (16, 32, 64))
    steps = compose_steps(compose_kernels(data, target))
    assert len(steps.seconds) > 100
