"""What each key of a scenario says by itself, and the one line that says what is wrong with it."""

import pytest

from simulator.core.engine_config import EngineConfig
from simulator.scenario.scenario import Scenario
from simulator.scenario.validate import block_class, known_keys
from simulator.workload.traces import FORMATS
from tests.support.scenarios import AZURE, errors

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


BAD = [
    ("", "s.yaml: is empty; `model: llama-3-8b` alone would do"),
    ("# nothing\n", "s.yaml: is empty; `model: llama-3-8b` alone would do"),
    ("- a\n- b\n", "s.yaml:1: must be a mapping of keys, not ['a', 'b']"),
    ("just words\n", "s.yaml:1: must be a mapping of keys, not 'just words'"),
    ("seed: 1\nseed: 2\n", "s.yaml:2: seed: given before, on line 1"),
    ("modle: x\n", "s.yaml:1: modle: unknown key; did you mean model?"),
    (
        "zzz: x\n",
        "s.yaml:1: zzz: unknown key; there is name, description, model, gpu, engine, "
        "host, cost, cluster, predictor, workload, goodput, slo, sweep, plan, rollouts, seed",
    ),
    (
        "engine: {zzz: 1}\n",
        "s.yaml:1: engine.zzz: unknown key; there is name, version, generation_config, "
        "scheduling_policy, scheduler, scheduler_cls, max_num_seqs, max_num_batched_tokens, "
        "max_num_active_seqs, max_num_scheduled_tokens, max_num_queued_reqs, "
        "max_num_queued_tokens, block_size, gpu_memory_utilization, num_gpu_blocks_override, "
        "enable_prefix_caching, prefix_cache, kv_offloading_size, kv_offloading_bandwidth, "
        f"kv_offloading_latency, ... (all {len(EngineConfig.model_fields)}: headway schema)",
    ),
    (
        "seed: 0\nmax_num_seqs: 4\n",
        "s.yaml:2: max_num_seqs: unknown key here; did you mean engine.max_num_seqs?",
    ),
    (
        "workload:\n  path: t.csv\n",
        "s.yaml:2: workload.path: unknown key here; did you mean workload.trace.path?",
    ),
    (
        "engine: 12\n",
        "s.yaml:1: engine: must be a mapping of keys, as {name: vllm, generation_config: auto}, "
        "not 12",
    ),
    (
        "engine:\n  max_num_seqs: ten\n",
        "s.yaml:2: engine.max_num_seqs: must be a whole number such as 64, not 'ten' (most...",
    ),
    (
        "engine:\n  max_num_seqs: 1.5\n",
        "s.yaml:2: engine.max_num_seqs: must be a whole number such as 64, not 1.5 (most...",
    ),
    (
        "engine:\n  max_num_seqs: true\n",
        "s.yaml:2: engine.max_num_seqs: must be a whole number such as 64, not true (most...",
    ),
    (
        "engine:\n  block_size:\n",
        "s.yaml:2: engine.block_size: must be a whole number such as 64, not null (tokens in a ...",
    ),
    (
        "engine:\n  max_num_seqs: 0\n",
        "s.yaml:2: engine.max_num_seqs: must be at least 1, not 0 (m...",
    ),
    (
        "engine:\n  enable_prefix_caching: 1\n",
        "s.yaml:2: engine.enable_prefix_caching: must be true or false, not 1",
    ),
    (
        "engine:\n  gpu_memory_utilization: 1.1\n",
        "s.yaml:2: engine.gpu_memory_utilization: must be at most 1, not 1.1 (share of its GPU's "
        "memory that an engine uses)",
    ),
    (
        "engine:\n  gpu_memory_utilization: .nan\n",
        "s.yaml:2: engine.gpu_memory_utilization: must be a number, not nan (share of ...",
    ),
    (
        "engine:\n  num_gpu_blocks_override: 1\n",
        "s.yaml:2: engine.num_gpu_blocks_override: must be at least 2, not 1 (KV blocks, ...",
    ),
    (
        "engine:\n  quantization: fp9\n",
        "s.yaml:2: engine.quantization: must be 'fp8', 'int8', 'int4', 'nvfp4', 'mxfp4' or "
        "'bitsandbytes', not 'fp9'; did you mean fp8?",
    ),
    ("name: a/b\n", "s.yaml:1: name: must begin with a letter or digit and have only these, ..."),
    ("name: .\n", "s.yaml:1: name: must begin with a letter or digit ..."),
    ("name: 12\n", "s.yaml:1: name: must be text, not 12"),
    ("seed: -1\n", "s.yaml:1: seed: must be at least 0, not -1 (seed of all ..."),
    (
        "goodput:\n  ttft: 1s\n",
        "s.yaml:2: goodput.ttft: must be a number, without a unit, not '1s' (...",
    ),
    ("goodput:\n  ttft: 0\n", "s.yaml:2: goodput.ttft: must be more than 0, not 0 (longest ..."),
    (
        "engine:\n  scheduling_policy: {name: fcfs}\n",
        "s.yaml:2: engine.scheduling_policy: must be a name or a mapping with a key `policy` (a "
        "name or module:Class), not {name: 'fcfs'}",
    ),
    (
        "engine:\n  scheduling_policy: 3\n",
        "s.yaml:2: engine.scheduling_policy: must be a name or a mapping with a key `policy` (a "
        "name or module:Class), not 3",
    ),
    (
        "workload: {num_prompts: 99999999999}\n",
        "s.yaml:1: workload.num_prompts: must be at most 1000000000, not 99999999999 (re...",
    ),
    (
        "workload: {clients: 10000001}\n",
        "s.yaml:1: workload.clients: must be at most 10000000, not 10000001 (their ...",
    ),
    (
        "workload: {clients: true}\n",
        "s.yaml:1: workload.clients: must be a whole number such as 64, a list or a mapping of "
        "keys, not true (their ...",
    ),
    (
        "workload:\n  prefix_groups: {num_prefixes: 10000001}\n",
        "s.yaml:2: workload.prefix_groups.num_prefixes: must be at most 10000000, not 10000001 ...",
    ),
    (
        "workload: {prefix_len: 2147483648}\n",
        "s.yaml:1: workload.prefix_len: must be less than 2147483648, not 2147483648 (tokens ...",
    ),
    (
        f"workload: {{request_rate: {10**400}}}\n",
        "s.yaml:1: workload.request_rate: must be at most 1e+09 requests/s, or inf for all at ...",
    ),
    (
        "workload:\n  trace: {path: t.csv, repeat: 10000001}\n",
        "s.yaml:2: workload.trace.repeat: must be at most 10000000, not 10000001 (how often ...",
    ),
    (
        "engine: {swap_space: 1e300}\n",
        "s.yaml:1: engine.swap_space: must be at most 1e+06, not 1e+300 (GiB of host ...",
    ),
    (
        "workload:\n  random_input_len: 4\n",
        "s.yaml:2: workload.random_input_len: unknown key; did you mean input_len?",
    ),
    (
        "workload:\n  num_prompts: 0\n",
        "s.yaml:2: workload.num_prompts: must be at least 1, not 0 (requests or ...",
    ),
    (
        "workload:\n  input_len:\n    kind: uniform\n    low: 9\n    high: 3\n",
        "s.yaml:4: workload.input_len.low: 9 is more than high, 3 (tokens of a prompt; null: 1024)",
    ),
    (
        "workload:\n  max_concurrency: 0\n",
        "s.yaml:2: workload.max_concurrency: must be at least 1, not 0 (requests ...",
    ),
    ("workload: {trace: {}}\n", "s.yaml:1: workload.trace.path: is missing (the file, ..."),
    (
        "workload:\n  request_rate: 3\n  trace: {path: t.csv}\n",
        "s.yaml:2: workload.request_rate: a trace has requests of its own; keys beside trace are "
        "columns, max_concurrency, client_latency, frontend, clients, priorities, "
        "max_tokens, adapters, models, multimodal",
    ),
    (
        "workload:\n  request_rate: 3\n  burstiness: 1\n  trace: {path: t.csv}\n",
        "s.yaml:4: workload.trace: has requests of its own, without request_rate, burstiness; a "
        "command replaces these by --set 'workload={trace: {path: t.csv}}'",
    ),
    (
        "workload:\n  trace:\n    path: t.csv\n    format: azur\n",
        f"s.yaml:4: workload.trace.format: must be {', '.join(map(repr, [*FORMATS][:-1]))} "
        "or 'custom', not 'azur'; did you mean azure?",
    ),
    (
        "workload:\n  trace:\n    path: t.csv\n    start_s: 5\n    end_s: 5\n",
        "s.yaml:5: workload.trace.end_s: must be more than start_s (5.0)",
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
    ("name", "what"),
    [
        ("scheduler_delay_factor", "has no effect: never read by the V1 scheduler"),
        ("num_scheduler_steps", "is not simulated: each step is scheduled by itself"),
        ("lora_modules", "has no effect: any name but the model's that requests ask for is an "),
        ("kv_transfer_config", "is not simulated: give cluster.kv_transfer, and each group a kv_"),
        ("cpu_offload_gb", "is not simulated: weights in host memory"),
        ("context_length", "SGLang's name of max_model_len"),
        ("hicache_size", "SGLang's name of kv_offloading_size: in GiB of all GPUs together"),
        ("kv_cache_memory_bytes", "vLLM's name of num_gpu_blocks_override: as many as these"),
    ],
)
def test_keys_of_engines_that_are_not_here_are_refused_by_name(write, name, what):
    """Nothing that an engine knows is ignored silently."""
    (told,) = errors(write(f"engine:\n  {name}: 1\n"))
    assert told.startswith(f"s.yaml:2: engine.{name}: {what}")


@pytest.mark.parametrize(
    ("key", "block"),
    [
        ("engine", "EngineConfig"),
        ("engine.speculative_config.draft", "DraftConfig"),
        ("workload.frontend", "FrontendConfig"),
        ("cluster.groups.mine", "GroupConfig"),
        ("cluster.groups.mine.engine", "EngineConfig"),
        ("cluster.failures.outages.0", "OutageConfig"),
        ("sweep.random.keys.engine.max_num_seqs", None),
        ("sweep.grid", None),
        ("nothing", None),
    ],
)
def test_a_section_is_found_by_its_key(key, block):
    """Also below a name of the user's own."""
    found = block_class(tuple(key.split(".")))
    assert (found and found.__name__) == block


def test_the_keys_of_a_section():
    """Those of the workload are a generator's, too."""
    assert block_class(()) is Scenario
    assert known_keys(("engine",)) == [*EngineConfig.model_fields]
    assert {"trace", "frontend", "num_prompts"} <= {*known_keys(("workload",))}


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (
            "engine.speculative_config={lookahead: 1, num_speculative_tokens: 1, acceptance: 1}",
            "there is method, model, num_speculative_tokens, "
            "num_speculative_tokens_per_batch_size, speculative_eagle_topk, "
            "speculative_num_draft_tokens, disable_eagle_block_drop, "
            "disable_lookahead_block_hashes, acceptance, draft",
        ),
        ("workload.frontend={x: 1}", "there is latency, per_request, per_token"),
        ("cluster.failures.outages=[{replica: 0, start: 1, starts: 2}]", "did you mean start?"),
    ],
)
def test_an_unknown_key_of_an_inner_section(write, setting, told):
    """What is known there is listed."""
    (message,) = errors(write("name: n\n"), [setting])
    assert message.endswith(f": unknown key; {told}")


def test_a_group_that_is_no_mapping_is_refused(write):
    """Whether or not the scenario has an engine that the group would take over."""
    text = "engine: vllm\ncluster:\n  groups:\n    a: 3\n    b: []\n"
    assert errors(write(text)) == [
        "s.yaml:4: cluster.groups.a: must be a mapping of keys, as {replicas: 1}, "
        "not 3 (different servers, by name, in place of replicas)",
        "s.yaml:5: cluster.groups.b: must be a mapping of keys, as {replicas: 1}, "
        "not [] (different servers, by name, in place of replicas)",
    ]
