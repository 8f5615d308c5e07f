"""Runs of models with a sliding window."""

import warnings
from math import isclose

import pytest

from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
from simulator.simulation.run import run
from simulator.util.errors import HeadwayWarning
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


WINDOWED = """model: mistral-7b-v0.1
gpu: {name: L40S}
engine: {disable_hybrid_kv_cache_manager: false}
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


SHARED = """model: gpt-oss-20b
gpu: {name: L40S}
engine: {num_gpu_blocks_override: 700}
cost: {kind: roofline}
workload: {num_prompts: 60, request_rate: 30, prefix_len: 400, input_len: 100, output_len: 300}
"""


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_windows_go_with_the_prefix_cache_and_leap_as_they_step(write, asynchronous: str) -> None:
    """As vLLM's defaults: most of the common prefix is found, though blocks run out."""
    scenario = load_scenario(write(SHARED), [f"engine.async_scheduling={asynchronous}"])
    assert not scenario.engine.disable_hybrid_kv_cache_manager
    result = run(scenario)
    found = result.summary()["headway"]
    assert found["prefix_cache_hit_rate"] > 0.3
    assert found["preemptions"] > 0
    assert found["memory_efficiency"] <= 1
    stepped = run(scenario, stepwise=True)
    assert list(result.logs[0].tick_ends) == list(stepped.logs[0].tick_ends)
    assert result.summary() == stepped.summary()


def test_what_no_window_costs_is_told(write) -> None:
    """In requests of full length; where the blocks are given, nobody knows the memory."""
    keys = "disable_hybrid_kv_cache_manager: true"
    path = write(f"model: gpt-oss-20b\ngpu: {{name: H100-80GB}}\nengine: {{{keys}}}\n")
    with pytest.warns(HeadwayWarning, match="tokens: 9 requests of 131,072 tokens fit, not 16"):
        resolve(load_scenario(path))
    with pytest.warns(HeadwayWarning, match=r"keep all tokens\. engine\.disable_hybrid"):
        resolve(load_scenario(path, ["engine.num_gpu_blocks_override=900"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadwayWarning)
        resolve(load_scenario(path, ["engine.disable_hybrid_kv_cache_manager=false"]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("kv_offloading_size=4", "false needs kv_offloading_size: null"),
        ("preemption_mode=swap", "false needs preemption_mode: recompute"),
        ("reserve_output_tokens=5", "false needs reserve_output_tokens: null"),
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


def test_what_of_a_window_is_cached_is_that_of_the_release(write) -> None:
    """From 0.29 on the ends of prompts alone: of documents asked about again less is found."""
    text = SHARED.replace("num_gpu_blocks_override: 700", "num_gpu_blocks_override: 7000")
    rates = {}
    for version, key in (("0.28", []), ("0.33", []), ("0.33", ["null"]), ("0.33", ["160"])):
        keys = [f"engine.prefix_cache_retention_interval={value}" for value in key]
        result = run(load_scenario(write(text), [f"engine.version='{version}'", *keys]))
        rates[version, *key] = result.summary()["headway"]["prefix_cache_hit_rate"]
    assert rates["0.28",] == rates["0.33", "null"] > rates["0.33",]
    assert rates["0.33", "160"] > rates["0.33",]


@pytest.mark.parametrize(
    ("model", "tokens", "told"),
    [
        ("gpt-oss-20b", 24, "must be a multiple of engine.block_size (16)"),
        ("llama-3-8b", 16, "must be 0, as in vLLM: no layer of llama-3-8b keeps a window"),
    ],
)
def test_a_retention_that_vllm_refuses_is_refused(
    write, model: str, tokens: int, told: str
) -> None:
    text = f"model: {model}\nengine:\n  prefix_cache_retention_interval: {tokens}\n"
    (line,) = errors(write(text))
    assert line.startswith(f"s.yaml:3: engine.prefix_cache_retention_interval: {told}")
