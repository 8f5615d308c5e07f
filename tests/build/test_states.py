"""Models that keep states: whether their prefixes are cached, and in which blocks."""

from typing import Any

import pytest

from headway.report.text import run_table
from simulator.build.assemble_scheduler import make_scheduler
from simulator.build.settle import settle
from simulator.kv_cache.state_manager import StateManager
from simulator.scenario.load import check_scenario
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from simulator.util.yaml_lines import SourceMap


def check(**blocks: object) -> Scenario:
    return check_scenario(blocks, SourceMap("s.yaml", {}))


@pytest.mark.parametrize(
    ("engine", "has_one"),
    [
        ({"version": "0.29.0"}, True),
        ({"version": "0.26.0"}, True),
        ({"version": "0.25.0"}, False),
        ({"name": "sglang"}, True),
        ({"name": "tgi"}, False),
        ({"preemption_mode": "swap"}, True),
        ({"scheduling_policy": "mlfq"}, True),
    ],
)
def test_no_prefix_of_a_model_with_states_is_cached(engine: dict[str, Any], has_one: bool) -> None:
    """The report names a cache that the engine would have where none of states is simulated."""
    blocks = {"name": "vllm", **engine}
    given: dict[str, Any] = {
        "model": "qwen3-next-80b-a3b",
        "gpu": {"name": "B200"},
        "workload": {"num_prompts": 3, "prefix_len": 500},
    }
    scenario = check(engine=blocks, **given)
    assert not scenario.engine.enable_prefix_caching
    summary = run(scenario).summary()
    missing = {"enable_prefix_caching": True} if has_one else {}
    (told,) = summary["headway"]["engines"]
    assert told.get("not_simulated", {}) == missing
    line = "The engine's default, not simulated here: enable_prefix_caching on"
    assert (line in run_table(summary)) == has_one
    with pytest.raises(HeadwayError, match=r"engine.enable_prefix_caching: must be false"):
        check(engine=blocks | {"enable_prefix_caching": True}, **given)


@pytest.mark.parametrize(
    ("model", "version", "block", "exports"),
    [
        ("qwen3-next-80b-a3b", "0.33.0", 576, True),  # FlashInfer's kernels, by 64 tokens
        ("qwen3-next-80b-a3b", "0.32.0", 544, False),
        ("qwen3-next-80b-a3b", "0.30.0", 544, False),
        ("nemotron-3-nano-30b-a3b", "0.32.0", 2096, True),
    ],
)
def test_vllm_caches_states_at_the_ends_of_long_blocks(
    model: str, version: str, block: int, exports: bool
) -> None:
    """A prompt of three blocks and a half shares one and a half with the others: one is found."""
    scenario = check(
        engine={"version": version},
        model=model,
        gpu={"name": "H200", "count": 2},
        workload={"num_prompts": 4, "prefix_len": block * 3 // 2, "input_len": 2 * block},
    )
    assert scenario.engine.mamba_cache_mode == "align"
    spec = settle(scenario)
    assert spec.engine.block_size == block
    blocks = make_scheduler(spec, shares_prefixes=True).blocks
    assert isinstance(blocks, StateManager)
    assert blocks.exports(0, 3 * block, 3 * block) == exports
    found = run(scenario).logs[0].requests["cached"].tolist()
    assert found[0] == 0
    assert {*found[2:]} == {block}


def test_none_is_where_vllm_begins_to_choose() -> None:
    """As in vLLM, whose default it is: a prefix cache makes it align."""
    known: dict[str, Any] = {"model": "qwen3-next-80b-a3b", "gpu": {"name": "H200", "count": 2}}
    assert check(engine={"mamba_cache_mode": "none"}, **known).engine.mamba_cache_mode == "align"
    without = {"mamba_cache_mode": "none", "enable_prefix_caching": False}
    assert check(engine=without, **known).engine.mamba_cache_mode == "none"


DRAFTS = {"method": "mtp", "num_speculative_tokens": 2, "acceptance": "typical"}


@pytest.mark.parametrize(
    ("engine", "key"),
    [
        ({"speculative_config": DRAFTS}, "speculative_config"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"scheduling_policy": "fcfs", "preemption_mode": "swap"}, "preemption_mode"),
        ({"version": "0.28.0", "pipeline_parallel_size": 2}, ""),
        ({"enable_prefix_caching": False}, ""),
        ({"enable_prefix_caching": False, "disable_hybrid_kv_cache_manager": False}, ""),
    ],
)
def test_a_default_of_vllm_that_is_not_simulated_is_told(engine: dict[str, Any], key: str) -> None:
    """It was off without a word, beside drafts, say, as most commands of Qwen3-Next have them."""
    scenario = check(
        engine={"tensor_parallel_size": 4} | engine,
        model="qwen3-next-80b-a3b",
        gpu={"name": "H200"},
    )
    lines = [line for line in settle(scenario).notes if "a prefix cache of its states" in line]
    assert len(lines) == bool(key)
    assert all(f"none is simulated beside engine.{key}" in line for line in lines)


def test_a_branch_of_a_prompt_has_a_state_from_the_second_request_on() -> None:
    """The first has states at its end alone, the second sees that it branches, the third finds."""
    scenario = check(
        engine={"version": "0.33.0"},
        model="qwen3-next-80b-a3b",
        gpu={"name": "H200", "count": 2},
        workload={"num_prompts": 4, "request_rate": 0.1, "prefix_len": 2304, "input_len": 2000},
    )
    assert run(scenario).logs[0].requests["cached"].tolist() == [0, 0, 2304, 2304]


def test_a_prompt_matches_inside_a_block_of_states() -> None:
    """A prompt of 4,000 tokens and one more, sent twice: 4,000 are 125 units, and 6 blocks."""
    found = {}
    for unit in (None, 32, 576):
        scenario = check(
            engine={"prefix_match_unit": unit},
            model="qwen3-next-80b-a3b",
            gpu={"name": "H200", "count": 2},
            workload={"num_prompts": 3, "request_rate": 0.1, "prefix_len": 4001, "input_len": 0},
        )
        found[unit] = run(scenario).logs[0].requests["cached"].tolist()
    assert found == {None: [0, 3456, 3456], 32: [0, 4000, 4000], 576: [0, 3456, 3456]}


@pytest.mark.parametrize(
    ("model", "unit", "more", "what"),
    [
        ("qwen3-next-80b-a3b", 50, {}, "must divide the block of 576 tokens"),
        ("qwen3-next-80b-a3b", 32, {"version": "0.32.0"}, "simulated with vLLM 0.33's rules"),
        ("qwen3-next-80b-a3b", 50, {"enable_prefix_caching": False}, ""),
        ("llama-3-8b", 16, {}, ""),
        ("llama-3-8b", 8, {}, "must be the block of 16 tokens, as in vLLM: llama-3-8b has one"),
        ("llama-3-8b", 16, {"version": "0.25.0"}, "which came with 0.26.0: leave it out"),
        ("llama-3-8b", 1, {"name": "sglang"}, "is vLLM's alone"),
        ("gpt-oss-20b", 8, {}, ""),
        ("gpt-oss-20b", 5, {}, "must divide the block of 16 tokens"),
        ("gpt-oss-20b", 8, {"disable_hybrid_kv_cache_manager": True}, "one kind of layers"),
    ],
)
def test_what_prompts_match_at_is_what_vllm_takes(
    model: str, unit: int, more: dict[str, Any], what: str
) -> None:
    """As `resolve_kv_cache_block_sizes` of 0.33 was seen to answer."""
    gpu = {"name": "H200", "count": 2 if "next" in model else 1}
    if not what:
        check(engine={"prefix_match_unit": unit, **more}, model=model, gpu=gpu)
        return
    with pytest.raises(HeadwayError) as raised:
        check(engine={"prefix_match_unit": unit, **more}, model=model, gpu=gpu)
    (line,) = raised.value.messages
    assert line.startswith("s.yaml: engine.prefix_match_unit: ")
    assert what in line


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        ({"mamba_cache_mode": "align"}, "engine.mamba_cache_mode: must be none: llama-3-8b has no"),
        ({"prefix_cache_retention_interval": 64}, "must be a multiple of the block of 576 tokens"),
        ({"enable_chunked_prefill": False, "mamba_cache_mode": "align"}, "enable_chunked_prefill"),
        ({"enable_prefix_caching": False, "mamba_cache_mode": "align"}, "align needs enable"),
        (
            {"kv_offloading_size": 4, "enable_prefix_caching": True, "mamba_cache_mode": "align"},
            "engine.mamba_cache_mode: needs kv_offloading_size: null",
        ),
    ],
)
def test_what_does_not_go_with_states_is_named(engine: dict[str, Any], what: str) -> None:
    model = "llama-3-8b" if "llama" in what else "qwen3-next-80b-a3b"
    with pytest.raises(HeadwayError, match=what):
        check(engine=engine, model=model, gpu={"name": "H200", "count": 2})


def test_states_are_cached_by_chunks_alone() -> None:
    """Else vLLM does not start: "Chunked prefill is required for Mamba prefix caching"."""
    given: dict[str, Any] = {"model": "qwen3-next-80b-a3b", "gpu": {"name": "B200"}}
    whole = {"enable_chunked_prefill": False, "tensor_parallel_size": 4}
    with pytest.raises(HeadwayError, match=r"enable_chunked_prefill: must be true: states are"):
        check(engine=whole, **given)
    assert not check(
        engine=whole | {"enable_prefix_caching": False}, **given
    ).engine.enable_prefix_caching
