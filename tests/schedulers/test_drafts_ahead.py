"""Speculative decoding with a prefix cache or a step ahead; vLLM's own decisions: `conformance`."""

import json
from math import isclose

import numpy as np
import pytest

from headway.conformance.case_model import Case
from headway.conformance.replay import Replay
from simulator.core.request import Step
from simulator.core.speculative_config import DraftConfig
from simulator.costs.linear import LinearCost
from simulator.features.drafts.cost import DraftedCost
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from tests.schedulers.test_speculative import SCENARIO
from tests.support.scenarios import errors


@pytest.mark.parametrize(
    ("method", "since", "before"),
    [
        ("", "0.33", "0.32"),
        (", method: ngram", "0.33", "0.32"),
        (", draft: {fraction: 0.1}", "0.28", "0.27"),
        (", method: eagle3, draft: {fraction: 0.1}", "0.14", "0.13"),
        (", method: mtp, draft: {fraction: 0.1}", "0.14", "0.13"),
    ],
)
def test_drafts_are_scheduled_ahead_where_vllm_does(
    write, method: str, since: str, before: str
) -> None:
    """Unless the scenario says otherwise; without drafts versions from 0.14 on do."""
    drafts = f"{{num_speculative_tokens: 3, acceptance: 0.5{method}}}"
    engine = f"{{name: vllm, version: '{since}', speculative_config: {drafts}}}"
    model = "qwen3.5-9b" if "mtp" in method else "glm-4-9b"
    path = write(f"model: {model}\nengine: {engine}\n")
    assert load_scenario(path).engine.async_scheduling
    assert not load_scenario(path, [f"engine.version={before}"]).engine.async_scheduling
    assert not load_scenario(path, ["engine.async_scheduling=false"]).engine.async_scheduling


def test_a_window_and_drafts_that_read_the_next_token_share_prompts_from_033_on(write) -> None:
    text = """model: gpt-oss-20b
engine:
  version: '0.32'
  disable_hybrid_kv_cache_manager: false
  speculative_config: {method: eagle3, num_speculative_tokens: 3, acceptance: 0.5, draft: {}}
"""
    path = write(text)
    (told,) = errors(path)
    assert told.endswith(
        "engine.enable_prefix_caching: must be false: eagle3 with a window has a prefix cache from "
        "vLLM 0.33 on"
    )
    assert load_scenario(path, ["engine.version=0.33"]).engine.enable_prefix_caching


@pytest.mark.parametrize("ahead", ["false", "true"])
def test_drafts_with_a_prefix_cache_say_as_much_and_sooner(write, ahead: str) -> None:
    """Two prefixes of 512 tokens that 300 prompts share, in step and ahead."""
    load = "output_len: 101, prefix_groups: {num_prefixes: 2, prefix_len: 512}"
    text = SCENARIO.replace("enable_prefix_caching: false", f"async_scheduling: {ahead}")
    path = write(text.replace("output_len: 101", load))
    blocks = "engine.num_gpu_blocks_override=600"
    shared = run(load_scenario(path, [blocks]))
    alone = run(load_scenario(path, [blocks, "engine.enable_prefix_caching=false"]))
    found, without = shared.summary(), alone.summary()
    assert found["total_output_tokens"] == without["total_output_tokens"] == 300 * 101
    assert found["mean_ttft_ms"] < without["mean_ttft_ms"]
    assert isclose(found["spec_decode_acceptance_length"], 2.533, rel_tol=0.02)
    table = shared.requests
    assert np.allclose(table["queue_time"] + sum(shared.time_parts().values()), table["e2el"])


def test_as_many_drafts_are_made_as_the_batch_size_says(write) -> None:
    """Alone a request has 3 drafts a step, beside others none: 2.533 tokens a step, and 1."""
    sizes = "num_speculative_tokens_per_batch_size: [[1, 1, 3], [2, 300, 0]]"
    text = SCENARIO.replace("{num_speculative_tokens: 3", f"{{num_speculative_tokens: 3, {sizes}")
    drafts = run(load_scenario(write(text))).logs[0].drafts
    assert not drafts["drafts"][drafts["decodes"] > 2].any()
    alone = run(
        load_scenario(write(text), ["workload.max_concurrency=1", "workload.num_prompts=20"])
    )
    assert isclose(alone.summary()["spec_decode_acceptance_length"], 2.533, rel_tol=0.05)


def test_drafts_that_are_not_made_take_no_time() -> None:
    step = Step([], 2, 30, drafts=6)
    cost = DraftedCost(
        LinearCost(base=1.0, per_token=0.1), 3, DraftConfig(seconds=0.01, fraction=0.1)
    )
    assert isclose(cost.execute(step).seconds, 1.8 + 0.03 + 0.1 * (1.8 + 2 * 1.2))
    step.drafting = 1
    assert isclose(cost.execute(step).seconds, 1.8 + 0.01 + 0.1 * 1.8)
    step.drafting = 0
    assert isclose(cost.execute(step).seconds, 1.8)


@pytest.mark.parametrize("sizes", ["[[2, 9, 1]]", "[[1, 9, 1], [9, 12, 0]]", "[[1, 4]]", "[3]"])
def test_ranges_of_batch_sizes_are_in_order_from_1_on(write, sizes: str) -> None:
    drafts = f"acceptance: 0.5, num_speculative_tokens_per_batch_size: {sizes}"
    text = f"engine: {{speculative_config: {{num_speculative_tokens: 3, {drafts}}}}}\n"
    (told,) = errors(write(text))
    assert "num_speculative_tokens_per_batch_size" in told


@pytest.mark.parametrize(
    ("method", "more", "found"),
    [
        ("ngram", {}, [64, 64]),
        ("eagle", {}, [48, 64]),
        ("eagle", {"disable_lookahead_block_hashes": True}, [48, 48]),
        ("eagle", {"disable_eagle_block_drop": True}, [64, 64]),
    ],
)
def test_what_a_prompt_finds_of_blocks_that_drafts_read_beyond(method, more, found) -> None:
    """Two prompts begin as the first does, with 64 and with 65 tokens, in blocks of 16."""
    drafts = {"method": method, "num_speculative_tokens": 2, "acceptance": 0.5, **more}
    begin = [(0, [["a", 90]]), (10**9, [["a", 64], ["b", 26]]), (2 * 10**9, [["a", 65], ["c", 25]])]
    requests = [
        {"id": n, "arrival_ns": at, "prompt_len": 90, "output_len": 3, "segments": segments}
        for n, (at, segments) in enumerate(begin)
    ]
    case = {
        "schema": 1,
        "name": "c",
        "requests": requests,
        "config": {"speculative_config": drafts},
    }
    rows = [json.loads(row) for row in Replay(Case.model_validate(case)).rows()]
    assert [row["cached"] for row in rows if row["type"] == "request"] == [0, *found]


def test_windows_give_blocks_back_beside_drafts_where_vllm_caches_both(write) -> None:
    text = """model: gpt-oss-20b
engine:
  name: vllm
  speculative_config: {method: eagle3, num_speculative_tokens: 3, acceptance: 0.5, draft: {}}
"""
    path = write(text)
    assert not load_scenario(path).engine.disable_hybrid_kv_cache_manager
    assert load_scenario(path, ["engine.version=0.32"]).engine.disable_hybrid_kv_cache_manager
    ngram = ["engine.version=0.32", "engine.speculative_config.method=ngram"]
    assert not load_scenario(path, ngram).engine.disable_hybrid_kv_cache_manager


def test_on_pipeline_stages_patience_and_failures_leave_nothing_behind(write) -> None:
    """Few blocks: requests are preempted, given up and lost amid drafts, and end once each."""
    text = SCENARIO.replace("enable_prefix_caching: false", "pipeline_parallel_size: 2")
    path = write(text + "gpu: {name: H100-SXM, count: 2}\n")
    few = ["engine.num_gpu_blocks_override=64", "engine.max_model_len=400"]
    calm = run(load_scenario(path, few))
    assert calm.summary()["total_output_tokens"] == 300 * 101
    assert calm.requests["preemptions"].sum() > 0
    trouble = "cluster={replicas: 2, failures: {mtbf: 6, mttr: 1}, client: {timeout: 1}}"
    made = run(load_scenario(path, [*few, trouble]))
    reasons = made.requests["finish_reason"]
    assert len(reasons) == 300
    assert {*reasons} == {"stop", "timeout"}
    assert (made.requests["output_tokens"][reasons == "stop"] == 101).all()


def test_a_consumer_verifies_drafts_from_its_second_step_on(write) -> None:
    """Few blocks, impatient clients and failures: each request ends once, with all its tokens."""
    groups = "{p: {kv_role: kv_producer}, d: {kv_role: kv_consumer, replicas: 2}}"
    text = SCENARIO.replace("enable_prefix_caching: false", "enable_prefix_caching: true")
    path = write(text + f"cluster: {{kv_transfer: {{bandwidth: 50}}, groups: {groups}}}\n")
    few = ["engine.num_gpu_blocks_override=64", "engine.max_model_len=400"]
    calm = run(load_scenario(path, few))
    assert calm.summary()["total_output_tokens"] == 300 * 101
    assert calm.requests["preemptions"].sum() > 0
    producer, *consumers = calm.logs
    assert not len(producer.drafts)
    drafts = np.concatenate([log.drafts for log in consumers])
    assert drafts["accepted"].sum() > 300 * 40
    trouble = ["cluster.failures={mtbf: 6, mttr: 1}", "cluster.client={timeout: 1}"]
    reasons = run(load_scenario(path, few + trouble)).requests["finish_reason"]
    assert len(reasons) == 300
    assert {*reasons} == {"stop", "timeout"}
