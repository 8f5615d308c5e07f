"""Runs of models with a sliding window."""

import warnings
from math import isclose

import pytest

from simulator.core.log import REASONS
from simulator.kv_cache.slot_counter import SlotCounter
from simulator.models.sliding_window import LayerGroups
from simulator.scenario.assemble import assemble
from simulator.scenario.load import load_scenario
from simulator.schedulers.vllm.speculative import Speculative
from simulator.simulation.run import run
from simulator.util.errors import HeadwayWarning
from tests.support.engines import play, workload
from tests.support.scenarios import errors


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
    blocks = SlotCounter(50, 4, lookahead=0, max_model_len=64, groups=LayerGroups(0, 1, 8, 64))
    log, _ = play(workload((0, 8, 10)), Speculative(blocks))
    assert log.steps["blocks_used"].tolist() == [2, 3, 3, 3, 2, 3, 3, 3, 2, 3]
    assert log.steps["kv_tokens"].tolist() == [8] * 10
    assert log.requests["finish"].tolist() == [10]
    assert blocks.free == 49
    assert not log.draft_rows


def test_groups_hold_what_each_of_them_needs() -> None:
    """The same with two full groups beside: 2 * 2, 3 or 4 more; too little memory is told."""
    blocks = SlotCounter(50, 4, lookahead=0, max_model_len=64, groups=LayerGroups(2, 1, 8, 64))
    log, _ = play(workload((0, 8, 10)), Speculative(blocks))
    assert log.steps["blocks_used"].tolist() == [6, 9, 9, 9, 8, 11, 11, 11, 10, 13]
    small = SlotCounter(15, 4, lookahead=0, max_model_len=64, groups=LayerGroups(2, 1, 8, 64))
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


def test_what_no_window_costs_is_told(write) -> None:
    """In requests of full length; where the blocks are given, nobody knows the memory."""
    path = write("model: gpt-oss-20b\ngpu: {name: H100-80GB}\n")
    with pytest.warns(HeadwayWarning, match="tokens: 8 requests of 131,072 tokens fit, not 17"):
        assemble(load_scenario(path))
    with pytest.warns(HeadwayWarning, match=r"keep all tokens\. engine\.disable_hybrid"):
        assemble(load_scenario(path, ["engine.num_gpu_blocks_override=900"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadwayWarning)
        assemble(load_scenario(path, ["engine.disable_hybrid_kv_cache_manager=false"]))


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
