"""What keys must be to one another, to the model, to the hardware and to the disk."""

import pytest

from simulator.build.policy_table import POLICIES
from simulator.scenario.load import load_scenario
from tests.support.scenarios import AZURE, errors

BAD = [
    (
        "engine:\n  scheduling_policy: lifo\n",
        "s.yaml:2: engine.scheduling_policy: no policy 'lifo'; there are "
        f"{', '.join(POLICIES)}, or package.module:Class",
    ),
    (
        "engine:\n  scheduling_policy: nowhere:Policy\n",
        "s.yaml:2: engine.scheduling_policy: cannot load nowhere:Policy: ModuleNotFoundError: "
        "No module named 'nowhere'",
    ),
    (
        "engine:\n  scheduling_policy: math:pi\n",
        "s.yaml:2: engine.scheduling_policy: math:pi is no Scheduler and has no method "
        "`key(request)` or `rank(waiting, now)`",
    ),
    (
        "engine:\n  scheduling_policy: {policy: static, batch: 4}\n",
        "s.yaml:2: engine.scheduling_policy.batch: static takes no such argument; did you mean "
        "batch_size?",
    ),
    (
        "engine:\n  scheduling_policy: {policy: static, batch_size: 400}\n",
        "s.yaml:2: engine.scheduling_policy.batch_size: must be from 1 to max_num_seqs (256), "
        "not 400",
    ),
    (
        "engine:\n  scheduling_policy: {policy: static, batch_size: many}\n",
        "s.yaml:2: engine.scheduling_policy.batch_size: must be a whole number such as 64, not "
        "'many' (requests)",
    ),
    (
        "cost: {kind: linear, base: 1e300}\n",
        "s.yaml:1: cost.base: must be from 0 to 1,000,000, not 1e+300 (s)",
    ),
    (
        "cost: {kind: linear, base: -1}\n",
        "s.yaml:1: cost.base: must be from 0 to 1,000,000, not -1 (s)",
    ),
    (
        "engine:\n  max_num_batched_tokens: 128\n  max_num_seqs: 256\n",
        "s.yaml:2: engine.max_num_batched_tokens: must be at least max_num_seqs (256), not 128: "
        "every running request wants a token of each step",
    ),
    (
        "engine:\n  name: textbook\n  enable_chunked_prefill: false\n",
        "s.yaml:1: engine.max_num_batched_tokens: without chunked prefill must be at least "
        "max_model_len (8192), not 2048: the longest prompt must fit into one step",
    ),
    (
        "gpu: {count: 2}\nengine: {tensor_parallel_size: 1}\n",
        "s.yaml:1: gpu.count: must equal engine.tensor_parallel_size (1), not 2: these are of one "
        "engine; left out, it follows them (cluster.replicas has more)",
    ),
    (
        "gpu: {count: 3}\nengine: {tensor_parallel_size: 3}\ncost: {kind: roofline}\n",
        "s.yaml:2: engine.tensor_parallel_size: 3 does not divide the 32 attention heads of "
        "llama-3-8b (gpu.count, given alone, sets it)",
    ),
    (
        "gpu: {name: A100-40GB}\nmodel: llama-3-70b\ncost: {kind: roofline}\n",
        "s.yaml:1: gpu: llama-3-70b in bfloat16 does not fit the A100-40GB: 131.42 GiB of weights "
        "and 2.08 GiB of activations exceed 0.92 of 39.49 GiB by 97.18 GiB; "
        'its log would say "No available memory for the cache blocks. Try increasing '
        '`gpu_memory_utilization` when initializing the engine."; '
        "it fits with engine.tensor_parallel_size=8 gpu.count=8",
    ),
    (
        "engine: {allocation: contiguous, num_gpu_blocks_override: 100}\n",
        "s.yaml:1: engine.allocation: 1584 tokens of KV cache have no room for a request of "
        "max_model_len 8192",
    ),
    (
        "gpu: {name: H300}\n",
        "s.yaml:1: gpu.name: no GPU 'H300': take a similar one, as H200, ...",
    ),
    (
        "cost:\n  kind: linear\n  base: x\n  per_token: 0\n  per_context: 0\n",
        "s.yaml:3: cost.base: must be a number, not 'x' (s)",
    ),
    ("cost: {profile: nowhere}\n", "s.yaml:1: cost.profile: ..."),
    ("cost: roofline\n", "s.yaml:1: cost: must be a mapping of keys, not 'roofline' ({..."),
    (
        "workload:\n  request_rat: 4\n",
        "s.yaml:2: workload.request_rat: unknown key; did you mean request_rate?",
    ),
    ("engine: {page_size: 16}\n", "s.yaml:1: engine.page_size: SGLang's name of block_size"),
    (
        "workload:\n  trace:\n    path: t.csv\n    format: azure\n    time_unit: ms\n",
        "s.yaml:5: workload.trace.time_unit: needs format timed_trace or mooncake, not azure",
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
            [
                "batch_size: must be a whole number such as 64, not 'x' (requests)",
                "timeout: must be a number, not 'y' (s)",
            ],
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
                "batch: static takes no such argument; did you mean batch_size?",
                "max_num_seqs: give it as engine.max_num_seqs",
            ],
        ),
        (
            "policy: 'order_of_mine:Mine', weight: 1e400, name: 3",
            [
                "weight: must be a whole number such as 64, not inf",
                "name: must be text, not 3",
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


@pytest.mark.parametrize(
    ("keys", "least"),
    [
        ("input_len: 1e9", "1,000,000,000"),
        ("input_len: 8192", "8,192"),
        ("input_len: {kind: uniform, low: 9000, high: 9999}", "9,000"),
        ("input_len: 10000, range_ratio: 0.1", "9,000"),
        ("input_len: 192, prefix_len: 8000", "8,192"),
    ],
)
def test_prompts_of_which_the_model_takes_none(tmp_path, keys, least):
    """A run simulated them, rejected all and ended with 1."""
    path = tmp_path / "s.yaml"
    path.write_text(f"model: llama-3-8b\nworkload: {{{keys}}}\n")
    assert errors(path) == [
        "s.yaml:2: workload.input_len: must be less than 8,192 (tokens that llama-3-8b takes, "
        f"prompt and answer), for example 4096; the shortest prompt has {least} tokens"
    ]


@pytest.mark.parametrize("keys", ["input_len: 8191", "input_len: 10000, range_ratio: 0.5"])
def test_prompts_of_which_the_model_takes_some(tmp_path, keys):
    path = tmp_path / "s.yaml"
    path.write_text(f"model: llama-3-8b\nworkload: {{{keys}}}\n")
    load_scenario(path)
