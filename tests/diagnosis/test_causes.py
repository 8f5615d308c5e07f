"""Findings that name the cause: answers reserved whole, urgent requests, the host, few requests."""

import re
import warnings
from typing import Any

import numpy as np
import pytest

from headway.planning.knee import find_knee
from headway.report.text import run_table
from simulator import load_scenario, run
from simulator.diagnosis.feasibility import obstacles, warn_of_obstacles
from simulator.scenario.draw import make_workload
from simulator.util.errors import HeadwayWarning

CHAT = {
    "name": "chat",
    "model": "llama-3-8b",
    "gpu": {"name": "A100-80GB"},
    "workload": {"num_prompts": 150, "request_rate": 12, "input_len": 1000, "output_len": 100},
}


def found_in(*keys: str, **more: Any) -> dict[str, dict[str, Any]]:
    """Run the chat with keys set; return the findings by rule."""
    result = run(load_scenario(CHAT | more, keys))
    findings = result.summary()["headway"]["diagnosis"]
    return {finding["rule"]: finding for finding in findings}


def test_max_tokens_where_an_engine_reserves_whole_answers() -> None:
    """TensorRT-LLM keeps room for 8,192 tokens a request, and none has more than 1,100."""
    trt = {"engine": {"name": "tensorrt-llm"}}
    found = found_in("workload.request_rate=20", **trt)["memory"]
    assert "the longest has 100 tokens" in found["text"]
    first = found["advice"][0]
    assert (first["key"], first["from"], first["to"]) == ("workload.max_tokens", None, 100)
    slow, fast = (
        run(load_scenario(CHAT | trt, ["workload.request_rate=20", *keys])).summary()
        for keys in ([], ["workload.max_tokens=100"])
    )
    assert fast["p99_ttft_ms"] < 0.7 * slow["p99_ttft_ms"]
    assert "memory" not in found_in("workload.request_rate=20", "workload.max_tokens=100", **trt)


def test_preemptive_where_priority_displaces_nobody() -> None:
    """Eight seats are taken by batch jobs; the urgent ones wait for one of them to end."""
    keys = [
        *("engine.max_num_seqs=8", "workload.clients=[1,4]", "workload.priorities=[0,1]"),
        *("workload.request_rate=2.5", "workload.output_len=400"),
    ]
    found = found_in(*keys, "engine.scheduling_policy=priority")["urgent"]
    assert "policy priority displaces none of them" in found["text"]
    advice = found["advice"][0]
    assert (advice["to"], advice["also"]) == ("preemptive", {"engine.async_scheduling": False})
    calm = found_in(*keys, "engine.scheduling_policy=preemptive", "engine.async_scheduling=false")
    assert "urgent" not in calm


def test_no_urgent_request_has_ended() -> None:
    """All prompts of the first priority are too long, and the others wait for seats."""
    keys = ["engine.max_num_seqs=8", "workload.clients=[1,4]", "workload.priorities=[0,1]"]
    scenario = load_scenario(CHAT, [*keys, "engine.scheduling_policy=priority"])
    work = make_workload(scenario)
    assert work.priority is not None
    work.prompt_tokens[work.priority == 0] = 10_000
    findings = run(scenario, workload=work).summary()["headway"]["diagnosis"]
    found = {finding["rule"] for finding in findings}
    assert {"waiting", "rejected"} <= found
    assert "urgent" not in found


def test_async_scheduling_where_the_host_takes_most() -> None:
    host = {"host": {"per_step": 0.01}}
    late = ["engine.async_scheduling=false", "workload.request_rate=3", "engine.version=0.12.0"]
    found = found_in(*late, **host)["host"]
    assert int(re.search(r"in (\d+)% of the steps", found["text"])[1]) > 25
    assert found["advice"][0]["key"] == "engine.async_scheduling"
    assert "host" not in found_in("engine.async_scheduling=true", *late[1:], **host)


def test_a_front_end_of_each_rank_where_one_streams_for_all() -> None:
    """One API server streams for eight ranks: each step waits until it is done."""
    ranks = {"engine": {"data_parallel_size": 8, "api_server_count": 1}, "goodput": {"tpot": 8}}
    ranks["gpu"] = {"name": "H100-80GB", "count": 8}
    load = ["workload.request_rate=400", "workload.input_len=50", "workload.num_prompts=600"]
    slow = found_in(*load, "workload.output_len=100", **ranks)
    for rule in ("host", "levels"):
        advice = slow[rule]["advice"][0]
        assert (advice["key"], advice["from"], advice["to"]) == ("engine.api_server_count", 1, 8)
    more = ["engine.api_server_count=8", "workload.output_len=100"]
    assert not {"host", "levels"} & found_in(*load, *more, **ranks).keys()


def test_long_prompts_leave_seats_unused() -> None:
    keys = ["workload.input_len=6000", "workload.request_rate=2", "workload.num_prompts=60"]
    found = found_in(*keys, "engine.max_num_batched_tokens=512")["waiting"]
    assert re.search(r" while on average \d\.\d of 256 seats are taken", found["text"])


def test_prompts_that_the_model_cannot_read_need_another_model() -> None:
    lengths = "workload.input_len={kind: cycle, values: [9000, 100]}"
    with pytest.warns(HeadwayWarning, match="were rejected"):
        found = found_in(lengths, "workload.num_prompts=1")["rejected"]
    assert found["text"].endswith("no key and no GPU lets it read longer prompts.")
    assert not found["advice"]


def test_a_busy_gpu_below_saturation_is_explained() -> None:
    result = run(load_scenario(CHAT, ["workload.request_rate=4"]))
    summary = result.summary()
    summary["headway"]["load"] = find_knee(result).as_summary()
    said = run_table(summary).splitlines()[-1]
    assert re.fullmatch(
        r"Load: [3-7]\d% of the saturation throughput on average, the GPU (9\d|100)% busy: "
        "fuller steps serve more, bursts may exceed it.",
        said,
    )


def test_three_requests_are_no_endless_stream() -> None:
    """Nor do they have a share of a saturation throughput."""
    scenario = load_scenario(CHAT, ["workload.num_prompts=3", "workload.request_rate=1000"])
    load = make_workload(scenario)
    assert obstacles(scenario, load)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadwayWarning)
        warn_of_obstacles(scenario, load)
    assert find_knee(run(scenario)) is None
    many = make_workload(scenario).rows(np.zeros(100, int))
    with pytest.warns(HeadwayWarning, match="a queue grows as long as requests come"):
        warn_of_obstacles(scenario, many)


def test_static_batching_has_not_the_saturation_of_continuous() -> None:
    keys = ["engine.scheduling_policy=static", "workload.request_rate=1", "engine.name=textbook"]
    assert find_knee(run(load_scenario(CHAT, keys))) is None
