"""Latent attention and sliding windows: sizes and times by hand."""

from math import isclose

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.log import REASONS
from simulator.core.request import Chunk, Request, Step
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.roofline import roofline
from simulator.kv_cache.slot_counter import SlotCounter
from simulator.models.gpus import find_gpu
from simulator.models.kv_budget import kv_budget, memory_table
from simulator.models.load import load_model
from simulator.models.sliding_window import Groups, layer_groups, window_pairs
from simulator.models.spec import LatentAttention
from simulator.scenario.load import load_scenario
from simulator.schedulers.vllm.speculative import Speculative
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from tests.support.engines import play, workload
from tests.support.scenarios import errors

H100 = find_gpu("H100-80GB")
A100 = find_gpu("A100-80GB")
MISTRAL, LITE, OSS = map(load_model, ("mistral-7b-v0.1", "deepseek-v2-lite", "gpt-oss-20b"))


# ---------------------------------------------------------------- latents


def test_a_latent_is_one_vector_per_token_and_layer_whatever_the_heads() -> None:
    """27 layers of 512 + 64 numbers; each of 4 GPUs holds all of it. Llama-3-8B: 131,072 bytes."""
    assert LITE.kv_bytes_per_token() == 27 * 576 * 2 == 31_104
    assert LITE.kv_bytes_per_token("fp8") == 15_552
    assert LITE.kv_share(4) == 1.0
    one, four = (kv_budget(LITE, H100, tensor_parallel_size=n) for n in (1, 4))
    assert one.kv_bytes_per_token == four.kv_bytes_per_token == 31_104
    assert one.num_gpu_blocks == one.kv_cache // (16 * 31_104)


def test_deepseek_v2_lite_to_the_last_weight() -> None:
    """The published checkpoint has 15,706,484,224 weights; attention by hand."""
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    assert LITE.attention_parameters == attention == 13_762_560
    assert LITE.parameters == 15_706_484_224


def test_queries_may_have_a_rank_too() -> None:
    """DeepSeek-V3: 1,536 between 7,168 and 128 heads of 192."""
    latent = LatentAttention(512, 128, 64, 128, q_lora_rank=1536)
    query = 7168 * 1536 + 1536 * 128 * 192
    rest = 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert latent.parameters(7168, 128) == query + rest


def test_a_decode_reads_latents_or_computes_whichever_is_longer() -> None:
    """16 heads do 2 * (576 + 512) FLOPs over 1,152 bytes: on an H100 the bytes take longer."""
    cost = roofline(LITE, H100)
    plain = roofline(load_model("llama-3-8b"), H100)
    assert isclose(cost.decode_per_context / plain.decode_per_context, 31_104 / 131_072)
    assert cost.mixed_per_context == cost.decode_per_context
    pair = 27 * 16 * 2 * (128 + 64 + 128)
    assert LITE.attention_flops_per_pair == pair
    assert isclose(cost.prefill_per_pair / plain.prefill_per_pair, pair / (4 * 32 * 32 * 128))


# ---------------------------------------------------------------- windows


def test_groups_of_layers_are_of_one_size() -> None:
    """gpt-oss-20b has 12 and 12; Gemma-3 27B 10 full and 52 windowed; 8 and 9 differ by little."""
    assert layer_groups(24, 12) == (1, 1, 12)
    assert layer_groups(62, 52) == (1, 6, 10)
    assert layer_groups(17, 9) == (1, 1, 9)
    assert layer_groups(32, 32) == (0, 1, 32)
    assert layer_groups(32, 0) == (1, 0, 32)


def test_mistral_keeps_4096_tokens_of_a_request() -> None:
    """58.8 GiB hold 30,115 blocks of 2 MiB; 8,192 tokens take 512, or 256 with the window."""
    budget = kv_budget(MISTRAL, H100)
    assert budget.num_gpu_blocks == 30_115
    assert budget.concurrent(8192) == 30_114 // 512 == 58
    assert budget.concurrent_windowed(8192) == 30_114 // 256 == 117
    assert budget.concurrent_windowed(2048) == budget.concurrent(2048) == 30_114 // 128
    assert "windowed" in memory_table(budget)
    assert "windowed" not in memory_table(kv_budget(LITE, H100))


def test_every_second_layer_of_gpt_oss_keeps_128_tokens() -> None:
    """A block of 12 layers is 16 * 12 * 2,048 bytes; 4,096 tokens take 256 in full layers and 8."""
    budget = kv_budget(OSS, H100)
    assert budget.kv_bytes_per_token == 24 * 2 * 8 * 64 * 2
    blocks = budget.kv_cache // (16 * 12 * 2048)
    assert budget.concurrent_windowed(4096) == (blocks - 1) // (256 + 8)
    assert budget.concurrent(4096) == (budget.num_gpu_blocks - 1) // 256


def test_blocks_leave_the_window_one_by_one() -> None:
    """A window of 8 in blocks of 4: two blocks, and a third while it lies across."""
    groups = Groups(full=0, windowed=1, window=8)
    held = [groups.held(-(-n // 4), groups.gone(n - 1, 4)) for n in range(1, 18)]
    assert held == [1] * 4 + [2] * 4 + [3, 3, 3, 2] * 2 + [3]


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 200))
def test_pairs_within_a_window_are_those_of_each_query(
    start: int, tokens: int, window: int
) -> None:
    expected = sum(min(query, window) for query in range(start + 1, start + tokens + 1))
    assert window_pairs(start, tokens, window) == expected


def test_reads_end_with_the_window() -> None:
    """2 sequences of 10 and 11 tokens, a window of 8: 21 at 0.1 and 16 at 0.5, then on."""
    cost = PiecewiseCost(
        dense=[[1, 1.0]],
        decode_per_context=0.1,
        mixed_per_context=0.2,
        prefill_per_pair=0.001,
        window=8,
        decode_per_window=0.5,
        mixed_per_window=1.0,
        prefill_per_window_pair=0.01,
    )
    step = Step([], 2, 21)
    assert isclose(cost.execute(step), 1 + 2.1 + 8)
    assert cost.leap(step, 3) == [cost.execute(Step([], 2, s)) for s in (21, 23, 25)]
    assert isclose(cost.execute(Step([], 2, 10)), 1 + 1.0 + 5)
    both = cost.decode_seconds(np.array([2, 2]), np.array([21, 10]))
    assert both.tolist() == [cost.execute(step), cost.execute(Step([], 2, 10))]
    chunk = Chunk(Request(0, 0.0, 20, 1), 4, 10)  # queries 5 to 14: 5, 6, 7 and seven of 8
    pairs, seen = 95, 5 + 6 + 7 + 7 * 8
    mixed = 1 + 0.2 * 21 + 16 + 0.001 * pairs + 0.01 * seen
    assert isclose(cost.execute(Step([chunk], 2, 21)), mixed)
    assert isclose(cost.execute(Step([], 2, 21, drafts=4)), 1 + 0.2 * 21 + 16)


def test_a_roofline_reads_the_window_alone() -> None:
    """Mistral v0.1 at 8,192 tokens takes what it takes at 4,096; v0.3 goes on."""
    old, new = roofline(MISTRAL, A100), roofline(load_model("mistral-7b-v0.3"), A100)
    short, long = Step([], 4, 4 * 4096), Step([], 4, 4 * 8192)
    assert old.execute(long) == old.execute(short)
    assert isclose(new.execute(long) - new.execute(short), 4 * 4096 * new.decode_per_context)
    assert isclose(old.decode_per_window, new.decode_per_context)
    half = roofline(OSS, H100)
    assert half.decode_per_context == half.decode_per_window > 0


def test_a_run_beyond_the_window_reads_less(write) -> None:
    """And leaps as it steps; its bandwidth counts what is read."""
    text = (
        "model: MODEL\nengine: {enable_prefix_caching: false}\ncost: {kind: roofline}\n"
        "workload: {num_prompts: 20, request_rate: 4, input_len: 6000, output_len: 100}\n"
    )
    results = {}
    for name in ("mistral-7b-v0.1", "mistral-7b-v0.3"):
        scenario = load_scenario(write(text.replace("MODEL", name)))
        results[name] = run(scenario).summary()
        assert results[name]["headway"]["bandwidth_utilization"] < 1
        ends = run(scenario, stepwise=True).logs[0].tick_ends
        assert list(run(scenario).logs[0].tick_ends) == list(ends)
    old, new = results.values()
    assert old["mean_tpot_ms"] < new["mean_tpot_ms"]
    flops = [summary["headway"]["mfu"] * summary["duration"] for summary in (old, new)]
    pairs = 20 * 32 * 32 * 128 * 4 * sum(max(0, query - 4096) for query in range(6100))
    assert isclose(flops[1] - flops[0], (pairs + 20 * 100 * 2 * 768 * 4096) / 312e12, rel_tol=1e-3)


def test_a_request_holds_the_blocks_of_its_window_while_it_runs() -> None:
    """Prompt and window of 8, blocks of 4: a third is taken, and the first given back at 12."""
    blocks = SlotCounter(50, 4, lookahead=0, max_model_len=64, groups=Groups(0, 1, 8, 64))
    log, _ = play(workload((0, 8, 10)), Speculative(blocks))
    assert log.steps["blocks_used"].tolist() == [2, 3, 3, 3, 2, 3, 3, 3, 2, 3]
    assert log.steps["kv_tokens"].tolist() == [8] * 10
    assert log.requests["finish"].tolist() == [10]
    assert blocks.free == 49
    assert not log.draft_rows


def test_groups_hold_what_each_of_them_needs() -> None:
    """The same with two full groups beside: 2 * 2, 3 or 4 more; too little memory is told."""
    blocks = SlotCounter(50, 4, lookahead=0, max_model_len=64, groups=Groups(2, 1, 8, 64))
    log, _ = play(workload((0, 8, 10)), Speculative(blocks))
    assert log.steps["blocks_used"].tolist() == [6, 9, 9, 9, 8, 11, 11, 11, 10, 13]
    small = SlotCounter(15, 4, lookahead=0, max_model_len=64, groups=Groups(2, 1, 8, 64))
    log, _ = play(workload((0, 8, 10)), Speculative(small))
    assert log.requests["reason"].tolist() == [REASONS.index("rejected")]  # it wants up to 3 * 5


WINDOWED = """model: mistral-7b-v0.1
gpu: {name: L40S}
engine: {enable_prefix_caching: false, disable_hybrid_kv_cache_manager: false}
cost: {kind: roofline}
workload: {num_prompts: 30, request_rate: inf, input_len: 12000, output_len: 400}
"""


def test_a_scenario_may_keep_windows_alone(write) -> None:
    """Twice as many requests run at once; every answer is whole."""
    found = {}
    for disabled in ("false", "true"):
        key = f"engine.disable_hybrid_kv_cache_manager={disabled}"
        summary = run(load_scenario(write(WINDOWED), [key])).summary()
        assert summary["total_output_tokens"] == 12_000
        assert summary["headway"]["kv_cache_usage_max"] <= 1
        assert 0.9 < summary["headway"]["memory_efficiency"] <= 1
        found[disabled] = summary["headway"]["max_running"]
    assert found["false"] > 1.5 * found["true"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("async_scheduling=true", "false goes with async_scheduling: false"),
        ("preemption_mode=swap", "false goes with preemption_mode: recompute"),
        ("reserve_output_tokens=5", "false goes with reserve_output_tokens: null"),
        (
            "scheduling_policy=static",
            "must be true: static keeps all tokens; fcfs need not, nor policies that only order "
            "the queue: priority, sjf, boost",
        ),
    ],
)
def test_what_windows_do_not_go_with_is_refused(write, change: str, told: str) -> None:
    lines = errors(write(WINDOWED), [f"engine.{change}"])
    assert lines == [f"s.yaml:3: engine.disable_hybrid_kv_cache_manager: {told}"]


def test_what_has_no_kernel_tables_is_said() -> None:
    from calibration.kernel_tables.compose import Target
    from calibration.kernel_tables.systems import SYSTEMS

    with pytest.raises(HeadwayError, match="has a sliding window"):
        Target(MISTRAL, SYSTEMS[0])


# ---------------------------------------------------------------- dtypes

WEIGHTS = 6_979_321_856  # of Llama-3-8B's matrices; 1,050,939,392 more stay at 16 bits


@pytest.mark.parametrize(
    ("engine", "weights", "token"),
    [
        ("{dtype: fp16}", 2.0, 131_072),
        ("{dtype: bf16}", 2.0, 131_072),
        ("{quantization: fp8}", 1.0, 131_072),
        ("{quantization: int4}", 0.5, 131_072),
        ("{kv_cache_dtype: fp8}", 2.0, 65_536),
        ("{quantization: fp8, kv_cache_dtype: fp8}", 1.0, 65_536),
        ("{quantization: int4, kv_cache_dtype: int4}", 0.5, 32_768),
    ],
)
def test_dtypes_change_capacity_and_time(write, engine: str, weights: float, token: int) -> None:
    """Blocks by the bytes left; a decode's time by the bytes moved, at the GPU's shares of 1."""
    from simulator.costs.roofline import efficiency_of
    from simulator.scenario.assemble import assemble

    text = f"model: llama-3-8b\ngpu: {{name: L40S}}\nengine: {engine}\ncost: {{kind: roofline}}\n"
    parts = assemble(load_scenario(write(text)))
    gpu, share = parts.gpu, efficiency_of(parts.gpu)
    held = int(weights * WEIGHTS) + 2 * 1_050_939_392
    rest = int(gpu.memory * 0.92) - held - 256 * 128_256 * 40 - 2**28
    assert parts.num_gpu_blocks == rest // (16 * token)
    one, two = (parts.cost.execute(Step([], 1, s)) for s in (1000, 2000))
    assert isclose(two - one, 1000 * token / (gpu.bandwidth * share.cache))
    plain = assemble(load_scenario(write(text.replace(engine, "{dtype: bf16}"))))
    saved = plain.cost.execute(Step([], 1, 0)) - parts.cost.execute(Step([], 1, 0))
    moved = (2.0 - weights) * WEIGHTS / (gpu.bandwidth * share.weights)
    assert isclose(saved, moved, rel_tol=1e-9, abs_tol=1e-12)
