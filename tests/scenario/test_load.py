"""What can be wrong with a scenario, and the one line that says so."""

import pytest

from simulator.scenario.load import load_scenario
from simulator.scenario.policy_table import POLICIES
from simulator.scenario.validate import ABSENT
from simulator.util.errors import HeadwayError
from tests.support.scenarios import AZURE, errors


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


SLIPS = [
    ("engine.scheduling_policy=fcsf", "package.module:Class; did you mean fcfs?"),
    ("engine.scheduling_policy={policy: statik}", "; did you mean static?"),
    ("engine.scheduling_policy=mine", "or package.module:Class"),
    ("cluster.router=rond_robin", "package.module:function; did you mean round_robin?"),
    ("engine=sglan", "or 'hf', not 'sglan'; did you mean sglang?"),
    ("engine.kv_cache_dtype=pf8", "not 'pf8'; did you mean fp8?"),
    ("workload.output_len={kind: lognorml, mean: 3}", "mixture; did you mean lognormal?"),
    ("predictor={kind: orakle}", "; did you mean oracle?"),
]


@pytest.mark.parametrize(("setting", "told"), SLIPS)
def test_a_slip_of_the_pen_is_guessed(write, setting, told):
    """What is allowed is listed, and the nearest of it named; where nothing is near, it is not."""
    (message,) = errors(write("name: n\n"), [setting])
    assert message.endswith(told)


def test_a_slip_in_a_scenarios_name_is_guessed():
    with pytest.raises(HeadwayError, match=r"; did you mean demo\?$"):
        load_scenario("demmo")


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
        "cluster, predictor, workload, goodput, sweep, plan, seed",
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
        "s.yaml:2: engine.quantization: must be 'fp8', 'int8', 'int4' or 'nvfp4', not 'fp9'; did "
        "you mean fp8?",
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
        "s.yaml:2: engine.scheduling_policy: no policy 'lifo'; there are "
        f"{', '.join(POLICIES)}, or package.module:Class",
    ),
    (
        "engine:\n  scheduling_policy: nowhere:Policy\n",
        "s.yaml:2: engine.scheduling_policy: cannot load nowhere:Policy: No module named 'nowhere'",
    ),
    (
        "engine:\n  scheduling_policy: math:pi\n",
        "s.yaml:2: engine.scheduling_policy: math:pi is no Scheduler and has no method "
        "`key(request)` or `rank(waiting, now)`",
    ),
    (
        "engine:\n  scheduling_policy: {policy: static, batch: 4}\n",
        "s.yaml:2: engine.scheduling_policy.batch: static takes no such argument",
    ),
    (
        "engine:\n  scheduling_policy: {policy: static, batch_size: 400}\n",
        "s.yaml:2: engine.scheduling_policy.batch_size: must be from 1 to max_num_seqs (256), "
        "not 400",
    ),
    (
        "engine:\n  scheduling_policy: {policy: static, batch_size: many}\n",
        "s.yaml:2: engine.scheduling_policy.batch_size: 'many' is not a whole number",
    ),
    (
        "workload: {num_prompts: 99999999999}\n",
        "s.yaml:1: workload.num_prompts: 99999999999 is more than 1,000,000,000",
    ),
    (
        "workload: {clients: 10000001}\n",
        "s.yaml:1: workload.clients: 10000001 is more than 10,000,000",
    ),
    (
        "workload: {clients: true}\n",
        "s.yaml:1: workload.clients: True is neither a number of clients nor a list of weights",
    ),
    (
        "workload:\n  prefix_groups: {num_prefixes: 10000001}\n",
        "s.yaml:2: workload.prefix_groups.num_prefixes: 10000001 is more than 10,000,000",
    ),
    (
        "workload: {prefix_len: 2147483648}\n",
        "s.yaml:1: workload.prefix_len: 2147483648 is 2,147,483,648 or more",
    ),
    (
        f"workload: {{request_rate: {10**400}}}\n",
        f"s.yaml:1: workload.request_rate: 1{'0' * 59}... is not a number",
    ),
    (
        "workload:\n  trace: {path: t.csv, repeat: 10000001}\n",
        "s.yaml:2: workload.trace.repeat: must be at most 10000000, not 10000001",
    ),
    (
        "engine: {swap_space: 1e300}\n",
        "s.yaml:1: engine.swap_space: must be at most 1e+06, not 1e+300",
    ),
    (
        "cost: {kind: linear, base: 1e300}\n",
        "s.yaml:1: cost.base: must be seconds, at least 0 and at most 1,000,000, not 1e+300",
    ),
    (
        "cost: {kind: linear, base: -1}\n",
        "s.yaml:1: cost.base: must be seconds, at least 0 and at most 1,000,000, not -1",
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
        "max_concurrency, client_latency, frontend",
    ),
    (
        "workload:\n  trace:\n    path: t.csv\n    format: azur\n",
        "s.yaml:4: workload.trace.format: must be 'azure', 'burstgpt', 'lengths', 'mooncake', "
        "'timed_trace', 'custom' or 'llmservingsim', not 'azur'; did you mean azure?",
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


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (
            "policy: static, batch_size: x, timeout: y",
            ["batch_size: 'x' is not a whole number", "timeout: 'y' is not a number"],
        ),
        (
            "policy: static, batch_size: 0, timeout: -1",
            [
                "batch_size: must be from 1 to max_num_seqs (256), not 0",
                "timeout: must be from 0 to 1,000,000 seconds, not -1",
            ],
        ),
        (
            "policy: static, batch: 1, max_num_seqs: 2",
            [
                "batch: static takes no such argument",
                "max_num_seqs: give it as engine.max_num_seqs",
            ],
        ),
        (
            "policy: 'order_of_mine:Mine', weight: 1e400, name: 3",
            [
                "weight: inf is not a whole number",
                "name: 3 is not a text",
                "client: is missing; ...",
            ],
        ),
    ],
)
def test_all_arguments_of_a_policy_are_checked_at_once(write, arguments, messages):
    """By the annotations of its constructor, where these are plain types."""
    write(
        "class Mine:\n"
        "    def __init__(self, client, weight: int | None = 1, name: 'str' = ''): ...\n"
        "    def key(self, request):\n"
        "        return 0\n",
        "order_of_mine.py",
    )
    messages = [text.replace("...", "Mine needs it") for text in messages]
    told = errors(write(f"engine: {{scheduling_policy: {{{arguments}}}}}\n"))
    assert told == [f"s.yaml:1: engine.scheduling_policy.{text}" for text in messages]


def test_what_an_override_alone_has_made_is_its_own_fault(write):
    """Not the file's, which may not even have the block; a block of the file is the file's."""
    path = write("name: x\nbar: {}\n")
    assert errors(path, ["foo.a=1", "cost.kind=linear", "bar.a=1"]) == [
        "s.yaml:2: bar: unknown key; there is name, description, model, gpu, engine, cost, "
        "cluster, predictor, workload, goodput, sweep, plan, seed",
        "--set foo.a=1: foo: unknown key; there is name, description, model, gpu, engine, cost, "
        "cluster, predictor, workload, goodput, sweep, plan, seed",
        "--set cost.kind=linear: cost.base: missing",
    ]


def test_all_errors_are_told_at_once_by_line(write):
    """Of every kind; what depends on a wrong key is not guessed at."""
    text = """name: x
model: llama-9
gpu: {name: A100-80GB, count: two}
engine:
  max_num_seqs: 4096
  max_num_batched_tokens: lots
  num_lookahead_slots: 4
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
        ["s.yaml:7", "engine.num_lookahead_slots"],
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
