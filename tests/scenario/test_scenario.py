"""The scenario: defaults, overrides, workloads, files."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import yaml

from headway.report.vllm_serve import serve_command
from simulator.core.engine_config import EngineConfig
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import engine_specs
from simulator.scenario.scenario import Scenario
from simulator.scenario.workload_config import READ_OPTIONS, TraceConfig
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from simulator.workload import traces
from simulator.workload.select import Selection
from tests.support.scenarios import AZURE
from tools.reference_page import page

ROOT = Path(__file__).parents[2]


def test_defaults_are_those_documented(write):
    """A scenario that says nothing is Llama-3-8B on an A100 under vLLM's defaults."""
    scenario = load_scenario(write("model: llama-3-8b\n", "nothing.much.yaml"))
    assert scenario.name == "nothing"
    assert scenario.engine == EngineConfig()
    documented = {
        "name": "vllm",
        "version": None,
        "scheduling_policy": "fcfs",
        "scheduler": "headway",
        "scheduler_cls": None,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_num_active_seqs": None,
        "max_num_scheduled_tokens": None,
        "max_num_queued_reqs": None,
        "max_num_queued_tokens": None,
        "block_size": 16,
        "gpu_memory_utilization": 0.92,
        "num_gpu_blocks_override": None,
        "enable_prefix_caching": True,
        "prefix_cache": "hash",
        "kv_offloading_size": None,
        "kv_offloading_bandwidth": None,
        "kv_offloading_latency": 0.0,
        "hicache_write_policy": "write_back",
        "store_threshold": 0,
        "secondary_tiers": [],
        "enable_chunked_prefill": True,
        "max_model_len": None,
        "dtype": "auto",
        "quantization": None,
        "kv_cache_dtype": "auto",
        "enforce_eager": False,
        "generation_config": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "pipeline_parallel_bandwidth": None,
        "enable_expert_parallel": False,
        "expert_routing": "auto",
        "data_parallel_size": 1,
        "api_server_count": None,
        "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False,
        "prefill_schedule_interval": 1,
        "async_scheduling": True,
        "disable_hybrid_kv_cache_manager": True,
        "prefix_cache_retention_interval": 0,
        "prefix_match_unit": None,
        "mamba_cache_mode": "none",
        "mamba_ssm_cache_dtype": "auto",
        "hf_overrides": None,
        "speculative_config": None,
        "scheduler_reserve_full_isl": True,
        "watermark": 0.0,
        "min_decode_blocks": 0,
        "min_decode_blocks_scope": "running",
        "reserve_output_tokens": None,
        "preemption_mode": "recompute",
        "swap_space": 4.0,
        "swap_bandwidth": None,
        "swap_overlap": False,
        "enable_lora": False,
        "max_loras": 1,
        "max_cpu_loras": None,
        "max_lora_rank": 16,
        "lora_load_bandwidth": 2.1,
        "multimodal_config": None,
        "allocation": "paged",
    }
    found = scenario.engine.model_dump()
    assert {key: found[key] for key in documented} == documented
    assert (scenario.gpu.name, scenario.gpu.count, scenario.seed) == ("A100-80GB", 1, 0)
    assert len(make_workload(scenario)) == 1000


def test_blocks_without_keys_have_their_defaults(write):
    """`engine:` with every key commented out is no mistake."""
    scenario = load_scenario(write("name: x\nengine:\ngpu:\nworkload:\ngoodput:\ncost:\n"))
    assert scenario.engine == EngineConfig()
    assert scenario.cost is None


@pytest.mark.parametrize("name", ["azure-conv-llama3-8b-a100.yaml", "demo.yaml"])
def test_shipped_scenarios_load(name, data):
    """What the README tells people to run can be run."""
    load_scenario(ROOT / "scenarios" / name)


@pytest.mark.parametrize(
    "text",
    [
        "name: a\nworkload: {num_prompts: 20, request_rate: 3}",
        "name: a\nworkload: {trace: {path: t.csv, limit: 3}, max_concurrency: 2}",
        "name: a\nengine: {scheduling_policy: {policy: static, timeout: 0.5}}",
        "name: a\nworkload: {num_prompts: 3}\n"
        "cost: {kind: linear, base: 1e-3, per_token: 1e-6, per_context: 0}",
    ],
)
def test_a_resolved_scenario_is_the_same_scenario(write, text):
    """What a run writes has every default filled in, and means the same when it is loaded."""
    write(AZURE, "t.csv")
    first = load_scenario(write(text))
    resolved = first.resolved()
    second = load_scenario(write(yaml.safe_dump(resolved)))
    assert second.resolved() == resolved
    assert second.engine == first.engine
    a, b = make_workload(first), make_workload(second)
    assert a.arrival.tolist() == b.arrival.tolist()
    assert a.prompt_tokens.tolist() == b.prompt_tokens.tolist()
    assert a.max_concurrency == b.max_concurrency


def test_so_is_that_of_a_cluster_with_roles(write):
    """What is null in it may be given as null: here the router to the consumers."""
    groups = "{p: {kv_role: kv_producer}, d: {kv_role: kv_consumer}}"
    first = load_scenario(write(f"cluster: {{kv_transfer: {{}}, groups: {groups}}}\n"))
    second = load_scenario(write(yaml.safe_dump(first.resolved(), sort_keys=False)))
    assert second.cluster.kv_transfer == first.cluster.kv_transfer
    assert [second.of_group(name).engine for name in "pd"] == [first.engine] * 2


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("float", "float32"),
    ],
)
def test_short_names_of_dtypes_are_written_in_full(write, short, name):
    """Of weights and of the KV cache."""
    engine = load_scenario(write(f"engine: {{dtype: {short}, kv_cache_dtype: {short}}}\n")).engine
    assert (engine.dtype, engine.kv_cache_dtype) == (name, name)
    assert EngineConfig(dtype=short).dtype == name


def test_a_trace_is_read_and_its_part_taken(write):
    """The options reach the reader and the selection, max_concurrency the workload."""
    write(AZURE, "t.csv")
    trace = "{path: t.csv, skip: 1, limit: 3, rate_scale: 2, max_input_len: 102}"
    path = write(f"workload:\n  trace: {trace}\n  max_concurrency: 2\n")
    with pytest.warns(match="max_input_len"):
        workload = make_workload(load_scenario(path))
    assert workload.prompt_tokens.tolist() == [101, 102]
    assert workload.arrival.tolist() == [0.0, 0.5]
    assert workload.max_concurrency == 2


def test_a_malformed_line_of_a_trace_is_named(write):
    """The trace's own file and line, not the scenario's."""
    write(AZURE + "2023-11-16 18:00:09.0000000,x,3\n", "t.csv")
    scenario = load_scenario(write("workload: {trace: {path: t.csv}}\n"))
    with pytest.raises(HeadwayError, match=r"t.csv:7: ContextTokens: "):
        make_workload(scenario)


def test_lengths_are_drawn_from_a_trace_beside_the_scenario(write):
    """And a missing one is told as such."""
    write(AZURE, "t.csv")
    path = write("workload: {lengths: {path: t.csv}, num_prompts: 50}\n")
    workload = make_workload(load_scenario(path))
    assert set(workload.prompt_tokens.tolist()) <= {100, 101, 102, 103, 104}
    assert np.all(workload.output_tokens == workload.prompt_tokens - 90)
    scenario = load_scenario(path, ["workload.lengths.path=none.csv"])
    with pytest.raises(HeadwayError, match=r"none.csv: no such file"):
        make_workload(scenario)


def test_what_only_the_generator_notices_has_its_line_too(write):
    """A lognormal so wide that lengths become absurd is found while drawing."""
    path = write("workload:\n  input_len:\n    kind: lognormal\n    sigma: 60\n    median: 100\n")
    with pytest.raises(HeadwayError) as caught:
        make_workload(load_scenario(path))
    assert str(caught.value).startswith(f"{path}:2: workload.input_len.high: without it a length")


def test_a_policy_beside_the_scenario_is_found(write):
    """module:Class, with keyword arguments from the mapping; its complaints have a line.

    It is made when a run begins, and not before: what makes it may be a stranger's.
    """
    write(
        "class Mine:\n"
        "    def __init__(self, weight=1):\n"
        "        if weight < 0:\n"
        "            raise ValueError('weight must not be negative')\n"
        "    def key(self, request):\n"
        "        return request.prompt_tokens\n",
        "policy_beside.py",
    )
    text = "engine:\n  scheduling_policy: {policy: 'policy_beside:Mine', weight: %d}\n"
    assert load_scenario(write(text % 2)).engine.scheduling_policy.arguments["weight"] == 2
    path = write(text % -2)
    scenario = load_scenario(path)
    with pytest.raises(HeadwayError) as caught:
        run(scenario)
    where = f"{path}:2: engine.scheduling_policy"
    assert caught.value.messages == [f"{where}: weight must not be negative"]


def test_the_scenario_knows_the_formats_and_options_of_the_readers():
    """Loading a scenario needs no reader: the names are read without what they name."""
    (formats, _) = get_args(TraceConfig.model_fields["format"].annotation)
    assert get_args(formats) == (*traces.FORMATS,)
    # Any file may need an encoding; columns stand beside the trace.
    assert {*traces.OPTIONS, "encoding"} == READ_OPTIONS | {"columns"}
    assert TraceConfig.model_fields.keys() - READ_OPTIONS - {"path", "format"} == {
        *Selection.model_fields
    }


def test_a_scenario_made_in_python_is_checked_alike():
    """pydantic's error is a ValueError, as everywhere in the library."""
    with pytest.raises(ValueError, match="max_num_seqs"):
        Scenario(engine={"max_num_seqs": 0})
    assert Scenario(workload={"num_prompts": 3}).workload.generator.num_prompts == 3


def test_the_reference_page_is_up_to_date():
    """Made again by `python -m tools.reference_page > docs/scenario.md`."""
    assert (ROOT / "docs" / "scenario.md").read_text("utf-8") == page()


def test_a_fine_tune_is_simulated_as_what_it_is_like(tmp_path: Path) -> None:
    """It has its own name in commands, and is read back from what a run writes down."""
    mine = {"like": "meta-llama/Meta-Llama-3-8B-Instruct", "name": "acme/my-tune"}
    scenario = load_scenario({"model": mine})
    assert engine_specs(scenario)[""].model.name == "llama-3-8b"
    assert "vllm serve acme/my-tune" in serve_command(scenario)
    assert load_scenario(scenario.resolved()).model == scenario.model
    assert scenario.engine == load_scenario({"model": "llama-3-8b"}).engine
    for wrong in ({"like": "llama-3-8b"}, {**mine, "name": ""}, {**mine, "rank": 8}, 3, None):
        with pytest.raises(HeadwayError, match=r"model: must be a model's name or path, or of"):
            load_scenario({"model": wrong})
    with pytest.raises(HeadwayError, match=r"did you mean llama-3-8b or .*\?; a fine-tune"):
        load_scenario({"model": {"like": "llama-3-8b-foo", "name": "mine"}})


@pytest.mark.parametrize("text", ["a\0b", "\x1b[1m", "\x7f", "a\ud800"])
def test_control_characters_are_refused_in_values_and_keys(text: str) -> None:
    """No shell, YAML file or CSV takes them; line breaks and tabs are text."""
    for raw in (
        {"description": text},
        {"slo": [text]},
        {"cluster": {"groups": {text: {"replicas": 1}}}},
        {"engine": {"scheduling_policy": {"policy": "fair", "weights": {text: 1.0}}}},
    ):
        with pytest.raises(HeadwayError, match="has the control character '") as caught:
            load_scenario(raw)
        assert len(str(caught.value).splitlines()) == 1
    assert load_scenario({"description": "a\tb\r\nc\x85 \u2028"}).description
