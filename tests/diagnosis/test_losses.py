"""Requests that were lost come first in a diagnosis, and no advice loses more of them."""

from pathlib import Path
from typing import Any

import pytest

from headway.report.text import slo_lines
from simulator import load_scenario, run
from simulator.diagnosis.feasibility import obstacles
from simulator.diagnosis.rules import diagnosis_lines
from simulator.scenario.draw import make_workload

TOO_LARGE = """name: too-large
model: llama-3.3-70b
gpu: {name: H100-80GB}
engine: {tensor_parallel_size: 2, gpu_memory_utilization: 0.8811}
cluster: {replicas: 4}
workload: {num_prompts: 40, request_rate: 2, input_len: 3000, output_len: 100, range_ratio: 0.8}
slo: ["p99_ttft_ms<=100000"]
"""
"""An engine of 90 KV blocks of 16 tokens: it serves who has no more than 1,440."""


def findings(write: Any, *sets: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run it with keys set; give the summary and what was found, in order."""
    summary = run(load_scenario(write(TOO_LARGE), sets)).summary()
    return summary, summary["headway"]["diagnosis"]


def test_what_was_rejected_comes_first_and_a_key_makes_it_fit(write: Any) -> None:
    """Also: nobody is told to take fewer replicas, though those that are there idle."""
    summary, found = findings(write)
    assert 20 < summary["headway"]["rejected"] < 40
    assert found[0]["rule"] == "rejected"
    assert found[0]["text"].startswith(f"{summary['headway']['rejected']} of ")
    assert "there are 90" in found[0]["text"]
    assert "low_load" not in [one["rule"] for one in found]
    for one in found[0]["advice"]:
        keys = {one["key"]: one["to"], **one.get("also", {})}
        after, _ = findings(write, *(f"{key}={value}" for key, value in keys.items()))
        assert after["headway"]["rejected"] == 0, one


def test_blocks_that_an_override_withholds_are_advised(write: Any) -> None:
    """The GPU has room for the requests: its own number of blocks is what to set."""
    few = "engine.num_gpu_blocks_override=10"
    _, found = findings(write, few, "workload.input_len=500", "model=tiny-test")
    assert "No single key" not in found[0]["text"]
    (advice,) = found[0]["advice"]
    assert (advice["key"], advice["to"]) == ("engine.num_gpu_blocks_override", None)


def test_a_level_says_of_how_many_requests_it_is(write: Any) -> None:
    """P99 over those that were served is no verdict on the others."""
    summary, _ = findings(write)
    bound, text = slo_lines(summary)[0]
    assert bound == "p99_ttft_ms<=100000"
    assert text.endswith(f", by the {summary['completed']} of 40 served")


def test_no_level_is_kept_where_nobody_was_served(write: Any) -> None:
    """The rejection is found all the same."""
    summary, found = findings(write, "workload.input_len=9000")
    assert summary["completed"] == 0
    assert summary["headway"]["slo_met"] is False
    assert [one["rule"] for one in found] == ["rejected"]


def test_prompts_beyond_max_model_len(write: Any) -> None:
    """The model's positions are the most; a prompt beyond those fits no engine of it."""
    sets = ("engine.tensor_parallel_size=4", "gpu.count=4", "engine.max_model_len=2048")
    _, found = findings(write, *sets)
    (advice,) = found[0]["advice"]
    assert (advice["key"], advice["to"]) == ("engine.max_model_len", 5359)
    assert "max_model_len is 2,048" in found[0]["text"]


def test_prompts_beyond_a_step_that_splits_none(write: Any) -> None:
    """TensorRT-LLM's server refuses them; KV blocks were blamed, and no advice served one more."""
    sets = ["model=llama-3-8b", "cluster=null", "workload.range_ratio=0"]
    engine = "engine={name: tensorrt-llm, max_num_batched_tokens: 2048}"
    summary, found = findings(write, *sets, engine)
    assert summary["headway"]["rejected"] == 40
    assert found[0]["text"].startswith("40 of 40 requests were rejected")
    assert "prompt has 3,000 tokens, and a step of unsplit prompts 2,048." in found[0]["text"]
    advised = {one["key"]: one["to"] for one in found[0]["advice"]}
    assert advised == {"engine.max_num_batched_tokens": 3000, "engine.enable_chunked_prefill": True}
    for key, to in advised.items():
        after, _ = findings(write, *sets, engine, f"{key}={to}".lower())
        assert after["headway"]["rejected"] == 0, key


def test_where_no_single_key_helps_that_is_said(write: Any, tmp_path: Path) -> None:
    """A cost that was measured is of its tensor parallelism: none is advised."""
    cost = "cost={kind: linear, base: 1e-2, per_token: 1e-5}"
    _, found = findings(write, cost, "workload.input_len=120000", "engine.max_model_len=131072")
    assert found[0]["advice"] == []
    assert found[0]["text"].endswith("no GPU lets it read longer prompts.")
    assert diagnosis_lines({"diagnosis": found})[0] == f"- {found[0]['text']}"


@pytest.mark.parametrize("rate", [2, "inf"])
def test_what_all_could_hold_is_not_found(write: Any, rate: object) -> None:
    """Short requests are not rejected."""
    sets = ("workload.input_len=300", "workload.range_ratio=0", f"workload.request_rate={rate}")
    summary, found = findings(write, *sets)
    assert summary["headway"]["rejected"] == 0
    assert "rejected" not in [one["rule"] for one in found]


def test_clients_who_all_give_up_are_told(write: Any) -> None:
    """Nobody is served: more replicas, as many as the warning before the run asks for."""
    sets = ["workload.input_len=500", "workload.output_len=200", "workload.request_rate=20"]
    sets += ["cluster={replicas: 2, client: {timeout: 0.5}}", "workload.num_prompts=60"]
    summary, found = findings(write, *sets)
    assert summary["completed"] == 0
    assert [one["rule"] for one in found] == ["tries"]
    (advice,) = found[0]["advice"]
    assert advice["key"] == "cluster.replicas"
    assert advice["to"] > 2


def test_replicas_for_clients_who_give_up_serve_them_all(write: Any) -> None:
    """Neither prompts nor answers alone are too much for two, but both together are."""
    sets = ["gpu={name: L40S}", "model=llama-3-8b", "engine={max_num_seqs: 32}"]
    sets += ["workload={num_prompts: 300, request_rate: 5, input_len: 1500, output_len: 250}"]
    few = "cluster={replicas: 1, client: {timeout: 15}}"
    _, found = findings(write, *sets, few)
    assert found[0]["rule"] == "tries"
    assert (advice := found[0]["advice"][0])["to"] == 3
    enough = load_scenario(
        write(TOO_LARGE), [*sets, "cluster={replicas: 3, client: {timeout: 15}}"]
    )
    assert advice["key"] == "cluster.replicas"
    assert run(enough).summary()["completed"] == 300
    scenario = load_scenario(write(TOO_LARGE), [*sets, few])
    (told,) = obstacles(scenario, make_workload(scenario))
    assert "the rest is refused or given up" in str(told)
