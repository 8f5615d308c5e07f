"""The scenario: defaults, overrides, and everything that can be wrong with one."""

import inspect
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import yaml

from simulator import traces
from simulator.errors import HeadwayError
from simulator.load import ABSENT, load_scenario
from simulator.scenario import READING, EngineBlock, Scenario, TraceBlock, resolve
from simulator.scenario_page import page

ROOT = Path(__file__).parent.parent
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:0{k}.0000000,{100 + k},{10 + k}\n" for k in range(5)
)


@pytest.fixture
def write(tmp_path):
    """Write a scenario and return its path."""

    def writer(text: str, name: str = "s.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return path

    return writer


def errors(path: Path, *args, **options) -> list[str]:
    """Load a bad scenario; return its errors without the folder."""
    with pytest.raises(HeadwayError) as caught:
        load_scenario(path, *args, **options)
    return [message.replace(f"{path.parent}/", "") for message in caught.value.messages]


def test_defaults_are_those_documented(write):
    """A scenario that says nothing is Llama-3-8B on an A100 under vLLM's defaults."""
    scenario = load_scenario(write("model: llama-3-8b\n", "nothing.much.yaml"))
    assert scenario.name == "nothing"
    assert scenario.engine == EngineBlock()
    assert scenario.engine.model_dump() == {
        "scheduling_policy": "fcfs",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
        "gpu_memory_utilization": 0.92,
        "num_gpu_blocks_override": None,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "max_model_len": None,
        "dtype": "auto",
        "quantization": None,
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "long_prefill_token_threshold": 0,
        "scheduler_reserve_full_isl": True,
        "watermark": 0.0,
        "allocation": "paged",
    }
    assert (scenario.gpu.name, scenario.gpu.count, scenario.seed) == ("A100-80GB", 1, 0)
    assert len(scenario.make_workload()) == 1000


def test_blocks_without_keys_have_their_defaults(write):
    """`engine:` with every key commented out is no mistake."""
    scenario = load_scenario(write("name: x\nengine:\ngpu:\nworkload:\ngoodput:\ncost:\n"))
    assert scenario.engine == EngineBlock()
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
    a, b = first.make_workload(), second.make_workload()
    assert a.arrival.tolist() == b.arrival.tolist()
    assert a.prompt_tokens.tolist() == b.prompt_tokens.tolist()
    assert a.max_concurrency == b.max_concurrency


def test_overrides_set_any_key(write):
    """Values are YAML; blocks that are not there are made; the last one counts."""
    path = write("engine: {max_num_seqs: 8}\nworkload: {request_rate: 1}\n")
    sets = [
        "engine.max_num_seqs=4",
        "engine.scheduling_policy={policy: static, batch_size: 2}",
        "goodput.ttft=1e3",
        "workload.request_rate=inf",
        "workload.num_prompts=2e1",
        "engine.max_num_seqs=16",
    ]
    scenario = load_scenario(path, sets, 7)
    assert scenario.engine.max_num_seqs == 16
    assert scenario.engine.scheduling_policy == {"policy": "static", "batch_size": 2}
    assert (scenario.goodput.ttft, scenario.seed) == (1000, 7)
    assert len(scenario.make_workload()) == 20


def test_an_override_can_mend_a_bad_file(write):
    """What is overridden is not looked at; but the file must be YAML with no key given twice."""
    path = write("engine:\n  max_num_seqs: none\n  foo: 1\n")
    assert load_scenario(path, ["engine={max_num_seqs: 4}"]).engine.max_num_seqs == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.max_num_seqs", "--set engine.max_num_seqs: must be dotted.key=value"),
        ("=4", "--set =4: must be dotted.key=value"),
        ("engine..x=4", "--set engine..x=4: must be dotted.key=value"),
        (
            "name.x.y=4",
            "--set name.x.y=4: name is 'n' and has no keys",
        ),
        (
            "seed=[1",
            "--set seed=[1: not YAML: while parsing a flow sequence, expected ',' or ']', but got "
            "'<stream end>'",
        ),
        ("seed=x", "--set seed=x: seed: must be a whole number, not 'x'"),
        (
            "engine.max_num_seq=4",
            "--set engine.max_num_seq=4: engine.max_num_seq: unknown key; did you mean "
            "max_num_seqs?",
        ),
        (
            "engine={block_size: 0}",
            "--set engine={block_size: 0}: engine.block_size: must be at least 1, not 0",
        ),
    ],
)
def test_bad_overrides_are_named(write, override, message):
    """An error says which --set it comes from."""
    assert errors(write("name: n\n"), [override]) == [message]


BAD = [
    ("", "s.yaml: is empty; `model: llama-3-8b` alone would do"),
    ("# nothing\n", "s.yaml: is empty; `model: llama-3-8b` alone would do"),
    ("- a\n- b\n", "s.yaml:1: must be a mapping of keys, not ['a', 'b']"),
    ("just words\n", "s.yaml:1: must be a mapping of keys, not 'just words'"),
    ("seed: 1\nseed: 2\n", "s.yaml:2: seed: given before, on line 1"),
    ("modle: x\n", "s.yaml:1: modle: unknown key; did you mean model?"),
    (
        "zzz: x\n",
        "s.yaml:1: zzz: unknown key; there is name, description, model, gpu, engine, cost, "
        "workload, goodput, seed",
    ),
    (
        "seed: 0\nmax_num_seqs: 4\n",
        "s.yaml:2: max_num_seqs: unknown key here; did you mean engine.max_num_seqs?",
    ),
    (
        "workload:\n  path: t.csv\n",
        "s.yaml:2: workload.path: unknown key here; did you mean workload.trace.path?",
    ),
    ("engine: 12\n", "s.yaml:1: engine: must be a mapping of keys, not 12"),
    (
        "engine:\n  max_num_seqs: ten\n",
        "s.yaml:2: engine.max_num_seqs: must be a whole number, not 'ten'",
    ),
    (
        "engine:\n  max_num_seqs: 1.5\n",
        "s.yaml:2: engine.max_num_seqs: must be a whole number, not 1.5",
    ),
    (
        "engine:\n  max_num_seqs: true\n",
        "s.yaml:2: engine.max_num_seqs: must be a whole number, not true",
    ),
    (
        "engine:\n  max_num_seqs:\n",
        "s.yaml:2: engine.max_num_seqs: must be a whole number, not null",
    ),
    ("engine:\n  max_num_seqs: 0\n", "s.yaml:2: engine.max_num_seqs: must be at least 1, not 0"),
    (
        "engine:\n  enable_prefix_caching: 1\n",
        "s.yaml:2: engine.enable_prefix_caching: must be true or false, not 1",
    ),
    (
        "engine:\n  gpu_memory_utilization: 1.1\n",
        "s.yaml:2: engine.gpu_memory_utilization: must be at most 1, not 1.1",
    ),
    (
        "engine:\n  gpu_memory_utilization: .nan\n",
        "s.yaml:2: engine.gpu_memory_utilization: must be finite, not nan",
    ),
    (
        "engine:\n  num_gpu_blocks_override: 1\n",
        "s.yaml:2: engine.num_gpu_blocks_override: must be at least 2, not 1",
    ),
    (
        "engine:\n  quantization: fp9\n",
        "s.yaml:2: engine.quantization: must be 'fp8', 'int8' or 'int4', not 'fp9'",
    ),
    ("name: a/b\n", "s.yaml:1: name: must begin with a letter or digit and have only these, ..."),
    ("name: .\n", "s.yaml:1: name: must begin with a letter or digit ..."),
    ("name: 12\n", "s.yaml:1: name: must be text, not 12"),
    ("seed: -1\n", "s.yaml:1: seed: must be at least 0, not -1"),
    ("goodput:\n  ttft: 0\n", "s.yaml:2: goodput.ttft: must be more than 0, not 0"),
    (
        "engine:\n  scheduling_policy: {name: fcfs}\n",
        "s.yaml:2: engine.scheduling_policy: the mapping needs a key `policy`: a name or "
        "module:Class",
    ),
    (
        "engine:\n  scheduling_policy: 3\n",
        "s.yaml:2: engine.scheduling_policy: must be a name or a mapping with a key `policy`, "
        "not 3",
    ),
    (
        "engine:\n  scheduling_policy: lifo\n",
        "s.yaml:2: engine.scheduling_policy: no policy 'lifo'; there are fcfs, sjf, static, or "
        "package.module:Class",
    ),
    (
        "engine:\n  scheduling_policy: nowhere:Policy\n",
        "s.yaml:2: engine.scheduling_policy: cannot load nowhere:Policy: No module named 'nowhere'",
    ),
    (
        "engine:\n  scheduling_policy: math:pi\n",
        "s.yaml:2: engine.scheduling_policy: math:pi is no Scheduler and has no method "
        "`key(request)`",
    ),
    (
        "engine:\n  scheduling_policy: {policy: static, batch: 4}\n",
        "s.yaml:2: engine.scheduling_policy.batch: Static takes no such argument",
    ),
    (
        "engine:\n  scheduling_policy: {policy: static, batch_size: 400}\n",
        "s.yaml:2: engine.scheduling_policy.batch_size: must be from 1 to max_num_seqs (256)",
    ),
    (
        "engine:\n  max_num_batched_tokens: 128\n",
        "s.yaml:2: engine.max_num_batched_tokens: must be at least max_num_seqs (256), not 128: "
        "every running request wants a token of each step",
    ),
    (
        "engine:\n  enable_chunked_prefill: false\n",
        "s.yaml:1: engine.max_num_batched_tokens: without chunked prefill must be at least "
        "max_model_len (8192), not 2048: the longest prompt must fit into one step",
    ),
    (
        "gpu: {count: 2}\n",
        "s.yaml:1: gpu.count: must equal engine.tensor_parallel_size (1), not 2: one engine is "
        "simulated, which uses just these GPUs",
    ),
    (
        "gpu: {count: 3}\nengine: {tensor_parallel_size: 3}\ncost: {kind: roofline}\n",
        "s.yaml:2: engine.tensor_parallel_size: 3 does not divide the 32 attention heads of "
        "llama-3-8b",
    ),
    (
        "gpu: {name: A100-40GB}\nmodel: llama-3-70b\ncost: {kind: roofline}\n",
        "s.yaml:1: gpu: llama-3-70b in bfloat16 does not fit the A100-40GB: 131.42 GiB of weights "
        "and 1.47 GiB of activations exceed 0.92 of 39.40 GiB by 96.65 GiB; take a larger GPU, a "
        "greater tensor_parallel_size, quantization, or smaller max_num_batched_tokens and "
        "max_num_seqs",
    ),
    (
        "engine: {allocation: contiguous, num_gpu_blocks_override: 100}\n",
        "s.yaml:1: engine.allocation: 1584 tokens of KV cache hold no request of max_model_len "
        "8192",
    ),
    (
        "gpu: {name: H300}\n",
        "s.yaml:1: gpu.name: no GPU 'H300' in the table; there are H200, ...",
    ),
    (
        "cost:\n  kind: linear\n  base: x\n  per_token: 0\n  per_context: 0\n",
        "s.yaml:3: cost.base: 'x' is not a number",
    ),
    ("cost: {profile: nowhere}\n", "s.yaml:1: cost.profile: ..."),
    ("cost: roofline\n", "s.yaml:1: cost: must be a mapping of keys, not 'roofline'"),
    (
        "workload:\n  request_rat: 4\n",
        "s.yaml:2: workload.request_rat: unknown key; did you mean request_rate?",
    ),
    (
        "workload:\n  random_input_len: 4\n",
        "s.yaml:2: workload.random_input_len: unknown key; did you mean input_len?",
    ),
    (
        "workload:\n  num_prompts: 0\n",
        "s.yaml:2: workload.num_prompts: 0 is less than 1",
    ),
    (
        "workload:\n  input_len:\n    kind: uniform\n    low: 9\n    high: 3\n",
        "s.yaml:4: workload.input_len.low: 9 is more than high, 3",
    ),
    (
        "workload:\n  max_concurrency: 0\n",
        "s.yaml:2: workload.max_concurrency: must be at least 1, not 0",
    ),
    ("workload: {trace: {}}\n", "s.yaml:1: workload.trace.path: is missing"),
    (
        "workload:\n  request_rate: 3\n  trace: {path: t.csv}\n",
        "s.yaml:2: workload.request_rate: goes with a generator; beside trace there is "
        "max_concurrency",
    ),
    (
        "workload:\n  trace:\n    path: t.csv\n    format: azur\n",
        "s.yaml:4: workload.trace.format: must be 'azure', 'burstgpt', 'lengths', 'mooncake', "
        "'timed_trace', 'custom' or 'llmservingsim', not 'azur'",
    ),
    (
        "workload:\n  trace:\n    path: t.csv\n    start_s: 5\n    end_s: 5\n",
        "s.yaml:5: workload.trace.end_s: must be more than start_s (5.0)",
    ),
    (
        "workload:\n  trace:\n    path: t.csv\n    format: azure\n    time_unit: ms\n",
        "s.yaml:5: workload.trace.time_unit: goes with format mooncake or timed_trace, not with "
        "azure",
    ),
    (
        "workload:\n  trace: {path: none.csv}\n",
        "s.yaml:2: workload.trace.path: none.csv: no such file",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_told_once_with_its_line(write, monkeypatch, text, message):
    """One mistake, one message: file, line, key, what is wrong."""
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    write(AZURE, "t.csv")
    told = errors(write(text))
    assert len(told) == 1
    if message.endswith("..."):
        assert told[0].startswith(message[:-3])
    else:
        assert told == [message]


def test_all_errors_are_told_at_once_by_line(write):
    """Of every kind; what depends on a wrong key is not guessed at."""
    text = """name: x
model: llama-9
gpu: {name: A100-80GB, count: two}
engine:
  max_num_seqs: 4096
  max_num_batched_tokens: lots
  swap_space: 4
  scheduling_policy: lifo
workload:
  request_rate: 0
  input_len: {kind: uniform, low: 5, high: 3}
cost: {kind: cubic}
"""
    told = errors(write(text), ["engine.block_size=0"])
    assert [message.split(": ")[:2] for message in told] == [
        ["s.yaml:2", "model"],
        ["s.yaml:3", "gpu.count"],
        ["s.yaml:6", "engine.max_num_batched_tokens"],
        ["s.yaml:7", "engine.swap_space"],
        ["s.yaml:8", "engine.scheduling_policy"],
        ["s.yaml:10", "workload.request_rate"],
        ["s.yaml:11", "workload.input_len.low"],
        ["--set engine.block_size=0", "engine.block_size"],
    ]


@pytest.mark.parametrize("name", ABSENT)
def test_keys_of_vllm_that_are_not_here_are_refused_by_name(write, name):
    """Nothing that vLLM knows is ignored silently."""
    told = errors(write(f"engine:\n  {name}: 1\n"))
    assert told == [f"s.yaml:2: engine.{name}: {ABSENT[name]}"]


def test_a_missing_trace_of_a_known_source_says_whose_it_is(write, monkeypatch):
    """And its licence, and how to get it."""
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    path = write("workload:\n  trace: {path: traces/azure_llm_2023_conv.csv.gz, format: azure}\n")
    (told,) = errors(path)
    assert told.startswith(
        "s.yaml:2: workload.trace.path: traces/azure_llm_2023_conv.csv.gz: no such file. It is "
        "the Azure LLM inference trace 2023"
    )
    assert "CC-BY-4.0" in told
    assert "Azure/AzurePublicDataset" in told


def test_files_are_looked_up_beside_the_scenario_then_in_headway_data(tmp_path, monkeypatch):
    """Beside the scenario wins; where there is neither, the message names that place."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "both.csv").touch()
    (there / "only.csv").touch()
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    assert resolve("only.csv", here) == here / "only.csv"
    monkeypatch.setenv("HEADWAY_DATA", str(there))
    assert resolve("only.csv", here) == there / "only.csv"
    assert resolve("both.csv", here) == here / "both.csv"
    assert resolve("none.csv", here) == here / "none.csv"
    assert resolve(there / "only.csv", here) == there / "only.csv"


def test_a_trace_is_read_and_its_part_taken(write):
    """The options reach the reader and the selection, max_concurrency the workload."""
    write(AZURE, "t.csv")
    trace = "{path: t.csv, skip: 1, limit: 3, rate_scale: 2, max_input_len: 102}"
    path = write(f"workload:\n  trace: {trace}\n  max_concurrency: 2\n")
    with pytest.warns(match="max_input_len"):
        workload = load_scenario(path).make_workload()
    assert workload.prompt_tokens.tolist() == [101, 102]
    assert workload.arrival.tolist() == [0.0, 0.5]
    assert workload.max_concurrency == 2


def test_a_malformed_line_of_a_trace_is_named(write):
    """The trace's own file and line, not the scenario's."""
    write(AZURE + "2023-11-16 18:00:09.0000000,x,3\n", "t.csv")
    scenario = load_scenario(write("workload: {trace: {path: t.csv}}\n"))
    with pytest.raises(HeadwayError, match=r"t.csv:7: ContextTokens: "):
        scenario.make_workload()


def test_lengths_are_drawn_from_a_trace_beside_the_scenario(write):
    """And a missing one is told as such."""
    write(AZURE, "t.csv")
    path = write("workload: {lengths: {path: t.csv}, num_prompts: 50}\n")
    workload = load_scenario(path).make_workload()
    assert set(workload.prompt_tokens.tolist()) <= {100, 101, 102, 103, 104}
    assert np.all(workload.output_tokens == workload.prompt_tokens - 90)
    scenario = load_scenario(path, ["workload.lengths.path=none.csv"])
    with pytest.raises(HeadwayError, match=r"none.csv: no such file"):
        scenario.make_workload()


def test_what_only_the_generator_notices_has_its_line_too(write):
    """A lognormal so wide that lengths become absurd is found while drawing."""
    path = write("workload:\n  input_len:\n    kind: lognormal\n    sigma: 60\n    median: 100\n")
    with pytest.raises(HeadwayError) as caught:
        load_scenario(path).make_workload()
    assert str(caught.value).startswith(f"{path}:2: workload.input_len.high: without it a length")


def test_a_policy_beside_the_scenario_is_found(write):
    """module:Class, with keyword arguments from the mapping; its complaints have a line."""
    write(
        "class Mine:\n"
        "    def __init__(self, weight=1):\n"
        "        if weight < 0:\n"
        "            raise ValueError('weight: must not be negative')\n"
        "    def key(self, request):\n"
        "        return request.prompt_tokens\n",
        "policy_beside.py",
    )
    text = "engine:\n  scheduling_policy: {policy: 'policy_beside:Mine', weight: %d}\n"
    assert load_scenario(write(text % 2)).engine.scheduling_policy["weight"] == 2
    assert errors(write(text % -2)) == [
        "s.yaml:2: engine.scheduling_policy.weight: must not be negative"
    ]


def test_the_scenario_knows_the_formats_and_options_of_the_readers():
    """The two lists are kept apart so that loading a scenario needs no reader."""
    (formats, _) = get_args(TraceBlock.model_fields["format"].annotation)
    assert set(get_args(formats)) == set(traces.FORMATS)
    assert set(traces.OPTIONS) == READING
    part = set(TraceBlock.model_fields) - READING - {"path", "format"}
    assert part == set(inspect.signature(traces.select).parameters) - {"workload"}
    for name in part:
        default = inspect.signature(traces.select).parameters[name].default
        assert TraceBlock.model_fields[name].default == default


def test_a_scenario_made_in_python_is_checked_alike():
    """pydantic's error is a ValueError, as everywhere in the library."""
    with pytest.raises(ValueError, match="max_num_seqs"):
        Scenario(engine={"max_num_seqs": 0})
    assert Scenario(workload={"num_prompts": 3}).workload.generator.num_prompts == 3


def test_the_reference_page_is_up_to_date():
    """Made again by `python -m simulator.scenario_page > docs/scenario.md`."""
    assert (ROOT / "docs" / "scenario.md").read_text("utf-8") == page()
