"""By how much a key is to be raised or lowered, worked out by hand."""

from math import ceil, inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simulator import load_scenario, run
from simulator.diagnosis.advice import Advisor
from simulator.diagnosis.evidence import known_share
from simulator.diagnosis.finding import turn, words
from simulator.diagnosis.prefixes import forgotten_prefixes, prefix_reuse
from simulator.workload.workload import Workload

# One request at a time, a second each. 11 come every half second: 5 s of arrivals, 11 s of work.
ELEVEN = """name: eleven
engine: {name: textbook, max_num_seqs: 1, max_num_batched_tokens: 64, max_model_len: 64,
         enable_prefix_caching: false}
cost: {kind: linear, base: 1}
workload: {num_prompts: 11, request_rate: 2, burstiness: inf, input_len: 8, output_len: 1}
"""
CALM = """name: calm
engine: {name: textbook, max_num_seqs: 2, max_num_batched_tokens: 512, enable_prefix_caching: false,
         max_model_len: 256}
cost: {kind: linear, base: 1e-2, per_token: 1e-5}
workload: {num_prompts: 60, request_rate: 8, input_len: 64, output_len: 50}
"""
THIRTEEN_B = """name: thirteen
model: llama-2-13b
gpu: {name: A100-40GB}
engine: {name: textbook,
  max_num_batched_tokens: 2048, max_model_len: 4096, enable_prefix_caching: false}
workload: {num_prompts: 60, request_rate: inf, input_len: 1000, output_len: 200}
"""


@pytest.fixture
def advice(write):
    """Run a scenario with keys set; give what its first finding of a rule advises, by key."""

    def advised(text: str, *sets: str, rule: str = "waiting") -> dict[str, dict[str, Any]]:
        findings = run(load_scenario(write(text), sets)).summary()["headway"]["diagnosis"]
        (found,) = (finding for finding in findings if finding["rule"] == rule)
        return {one["key"]: one for one in found["advice"]}

    return advised


def test_replicas_keep_up_with_the_arrivals(advice) -> None:
    """1.2 x 11 s / 5 s = 2.64; all at once: twice as many."""
    assert advice(ELEVEN)["cluster.replicas"] == {
        "direction": "raise",
        "key": "cluster.replicas",
        "from": 1,
        "to": 3,
    }
    assert advice(ELEVEN, "workload.request_rate=inf")["cluster.replicas"]["to"] == 2


def test_seats_go_as_far_as_requests_memory_and_a_factor_of_four(advice) -> None:
    """Four times 1; 3 who are there at once; 24 blocks for those who have 6 on average.

    64 tokens are 4 blocks, and each of 50 answers' tokens adds one: 4, 16 x 5, 16 x 6, 16 x 7, 8.
    """
    assert advice(ELEVEN)["engine.max_num_seqs"]["to"] == 4
    three = ("workload.num_prompts=3", "workload.request_rate=inf", "engine.max_num_seqs=2")
    assert advice(ELEVEN, *three)["engine.max_num_seqs"]["to"] == 4  # 3, as a power of two
    assert advice(CALM)["engine.max_num_seqs"]["to"] == 8
    assert advice(CALM, "engine.num_gpu_blocks_override=25")["engine.max_num_seqs"]["to"] == 4


def test_more_seats_need_as_many_tokens_a_step(advice) -> None:
    """max_num_batched_tokens may not be less than max_num_seqs."""
    found = advice(CALM, "engine.max_num_batched_tokens=4")["engine.max_num_seqs"]
    assert found["also"] == {"engine.max_num_batched_tokens": found["to"]}


def test_what_stays_as_fast_needs_replicas_first(advice) -> None:
    """Where a decode takes 10 ms however many there are beside it, seats bring nothing more."""
    assert next(iter(advice(CALM))) == "engine.max_num_seqs"
    alone = ("cost.base=1e-6", "cost.per_token=1e-2", "workload.request_rate=4")
    assert next(iter(advice(CALM, *alone))) == "cluster.replicas"


@pytest.mark.parametrize(
    ("base", "first"), [(10, "engine.max_num_batched_tokens"), (9.9, "cluster.replicas")]
)
def test_a_larger_budget_comes_before_replicas_from_half_as_fast_again_on(
    advice, base: float, first: str
) -> None:
    """Beside a decode 63 tokens take 27 s, and 511 of 512 take 146 s: 7/3 and 7/2 a second."""
    sets = ["engine.max_num_seqs=16", "engine.max_model_len=128", "workload.input_len=64"]
    sets += [f"cost.base={base}", "cost.per_token=0.265625", "workload.request_rate=inf"]
    assert next(iter(advice(ELEVEN, *sets))) == first


def test_keys_of_the_group_that_waits(advice) -> None:
    """One group has an engine of its own, and too few seats."""
    groups = "cluster={groups: {slow: {engine: {max_num_seqs: 1}}, fast: {}}}"
    found = advice(CALM.replace("max_num_seqs: 2", "max_num_seqs: 64"), groups)
    seats = found["cluster.groups.slow.engine.max_num_seqs"]
    assert (seats["from"], seats["to"]) == (1, 4)
    assert "cluster.groups.slow.replicas" in found


def test_a_cluster_that_scales(advice) -> None:
    """What bounds it is raised, not what it begins with."""
    scaling = "cluster={replicas: 1, autoscaling: {min_replicas: 1, max_replicas: 1}}"
    found = advice(ELEVEN, scaling)["cluster.autoscaling.max_replicas"]
    assert (found["from"], found["to"]) == (1, 3)


def test_memory_for_a_large_model(advice) -> None:
    """Narrower numbers first, by the blocks that they give; a second GPU beside the first last."""
    found = advice(THIRTEEN_B, rule="memory")
    assert [*found][-2:] == ["engine.tensor_parallel_size", "cluster.replicas"]
    assert found["engine.tensor_parallel_size"]["also"] == {"gpu.count": 2}
    assert found["engine.kv_cache_dtype"]["to"] == "fp8"
    assert found["engine.quantization"]["to"] == "int8"  # an A100 computes no fp8
    fewer = advice(THIRTEEN_B, "engine.reserve_output_tokens=max_model_len", rule="memory")
    assert fewer["engine.max_model_len"]["to"] == 1200
    assert fewer["engine.reserve_output_tokens"]["to"] is None


def test_blocks_that_admission_keeps_free(advice, write) -> None:
    """45 for each of two leave 9 of 99: too few for two prompts of 7; 1 for each is no cause.

    A watermark of 0.9 keeps 90.
    """
    text = CALM.replace("max_num_seqs: 2", "max_num_seqs: 32, num_gpu_blocks_override: 100")
    text = text.replace("input_len: 64", "input_len: 112")
    kept = "engine.min_decode_blocks=45"
    told = {"direction": "lower", "key": "engine.min_decode_blocks", "from": 45, "to": 0}
    found = advice(text, kept, rule="memory")
    assert next(iter(found.values())) == told
    low = advice(text, "engine.watermark=0.9", rule="memory")
    assert next(iter(low)) == "engine.watermark"
    some = [kept, "engine.min_decode_blocks=1", "workload.request_rate=40"]
    assert "engine.min_decode_blocks" not in advice(text, *some, rule="memory")
    (memory,) = (
        one
        for one in run(load_scenario(write(text), [kept])).summary()["headway"]["diagnosis"]
        if one["rule"] == "memory"
    )
    assert memory["text"].endswith("Admission keeps blocks free: min_decode_blocks (45).")


@pytest.mark.parametrize(("seats", "blocks", "to"), [(2, 5, 1), (4, 10, 3)])
def test_fewer_seats_where_nobody_waits_for_blocks(write, seats: int, blocks: int, to: int) -> None:
    """As many of 7 + 4 tokens in blocks of 4: each needs 3 at its end, so few at a time."""
    text = f"""name: pair
engine: {{name: textbook,
  max_num_seqs: {seats}, block_size: 4, num_gpu_blocks_override: {blocks + 1},
  enable_prefix_caching: false, max_model_len: 16, max_num_batched_tokens: 64}}
cost: {{kind: linear, base: 1}}
workload: {{num_prompts: {seats}, request_rate: inf, input_len: 7, output_len: 4}}
"""
    from simulator.diagnosis.advice import AdvisedEvidence

    result = run(load_scenario(write(text)))
    (advice,) = AdvisedEvidence(result, result.summary()).advisor.fewer_seats()
    assert words(advice.as_dict()) == f"lower engine.max_num_seqs from {seats} to {to}"


def test_words() -> None:
    """Numbers go up or down; all else is set, as YAML writes it."""
    assert words(turn("a.b", 2, 3).as_dict()) == "raise a.b from 2 to 3"
    assert words(turn("a.b", 0.95, 0.9).as_dict()) == "lower a.b from 0.95 to 0.9"
    assert words(turn("a.b", False, True).as_dict()) == "set a.b to true (now false)"
    assert words(turn("a.b", None, "fp8").as_dict()) == "set a.b to fp8 (now null)"
    assert words(turn("a.b", 1, 2, {"c": 4}).as_dict()) == "raise a.b from 1 to 2 and set c to 4"


def test_prompt_tokens_that_a_prefix_cache_would_know() -> None:
    """Of 32 + 32 + 20 tokens: the second's first 20, of which one block of 16; the third's 16."""
    parts = [(("a", 20), ("b", 12)), (("a", 20), ("c", 12)), (("a", 20),)]
    counts = np.array([32, 32, 20])
    work = Workload(np.zeros(3), counts, np.ones(3, np.int64), segments=parts)
    assert known_share(work, 16) == 32 / 84
    assert known_share(work, 1) == (20 + 19) / 84  # the last token of a prompt is computed
    assert known_share(Workload(np.zeros(3), counts, counts), 16) == 0.0


def two_of_a_tenth() -> Workload:
    """Two prompts of 80 tokens, which begin with the same 16."""
    lengths = np.full(2, 80)
    work = Workload(np.zeros(2), lengths, lengths)
    work.segments = [(("s", 16), (name, 64)) for name in "ab"]
    return work


@pytest.mark.parametrize(
    ("policy", "first"),
    [("write_through", "kv_offloading_size"), ("write_through_selective", "hicache_write_policy")],
)
def test_a_host_that_takes_few_is_first_told_to_take_all(policy: str, first: str) -> None:
    """What is copied as a second request has it is often evicted by then."""
    evidence = SimpleNamespace(
        engine=SimpleNamespace(
            enable_prefix_caching=True,
            prefix_cache="radix",
            policy_name="sglang",
            block_size=16,
            tensor_parallel_size=1,
            kv_offloading_size=64.0,
            hicache_write_policy=policy,
        ),
        record=SimpleNamespace(
            workload=two_of_a_tenth(), transfers=None, scenario=SimpleNamespace(cluster=None)
        ),
        gauges={"prefix_cache_hit_rate": 0.0, "external_prefix_cache_hit_rate": 0.0},
        share=lambda *_: 1.0,
        advisor=SimpleNamespace(
            key=lambda name: f"cluster.groups.a.engine.{name}",
            spec=SimpleNamespace(num_gpu_blocks=10, block_bytes=1),
        ),
    )
    found = forgotten_prefixes(evidence)  # type: ignore[arg-type]
    assert found is not None
    assert found.advice[0].key == f"cluster.groups.a.engine.{first}"


def test_a_tenth_that_is_known_is_worth_a_prefix_cache() -> None:
    """16 of 160 tokens."""
    evidence = SimpleNamespace(
        engine=SimpleNamespace(enable_prefix_caching=False, block_size=16),
        record=SimpleNamespace(workload=two_of_a_tenth()),
        share=lambda *_: 1.0,
        advisor=SimpleNamespace(prefix_caching=lambda: None),
    )
    found = prefix_reuse(evidence)  # type: ignore[arg-type]
    assert found is not None
    assert found.figures["share_of_prompt_tokens"] == 0.1


def test_a_prefix_cache_is_advised_beside_drafts_too() -> None:
    drafts = {"method": "eagle", "num_speculative_tokens": 3, "acceptance": 0.7}
    engine = {"name": "vllm", "enable_prefix_caching": False}
    load = {"num_prompts": 60, "request_rate": 30, "input_len": 100, "output_len": 40}
    load["prefix_groups"] = {"num_prefixes": 4, "prefix_len": 800}
    base = {"model": "llama-3-8b", "gpu": {"name": "A100-80GB"}, "workload": load}
    drafted = engine | {"speculative_config": drafts | {"draft": {"fraction": 0.1}}}
    for blocks in (engine, drafted, drafted | {"async_scheduling": False}):
        rows = run(load_scenario(base | {"engine": blocks})).summary()["headway"]["diagnosis"]
        assert sum(row["rule"] == "prefix_reuse" for row in rows) == 1


@pytest.mark.parametrize(("version", "advised"), [("0.29.0", 0), ("0.30.0", 1), ("0.33.0", 1)])
def test_no_prefix_cache_is_advised_that_is_refused(version: str, advised: int) -> None:
    """Of states before 0.30."""
    load = {"num_prompts": 20, "request_rate": 5, "input_len": 100, "output_len": 4}
    blocks = {"model": "qwen3-next-80b-a3b", "gpu": {"name": "H200", "count": 2}}
    blocks["workload"] = load | {"prefix_len": 6000}
    blocks["engine"] = {"version": version, "enable_prefix_caching": False}
    rows = run(load_scenario(blocks)).summary()["headway"]["diagnosis"]
    assert sum(row["rule"] == "prefix_reuse" for row in rows) == advised


def test_a_segment_in_the_middle_is_not_known_at_the_beginning_of_a_prompt() -> None:
    parts = [(("a", 16), ("b", 16)), (("b", 16), ("c", 16))]
    counts = np.array([32, 32])
    work = Workload(np.zeros(2), counts, np.ones(2, np.int64), segments=parts)
    assert known_share(work, 16) == 0.0


@pytest.mark.parametrize(
    ("rate", "asked", "count"),
    [(2.0, 2.0, 5), (0.1, 0.1, 2), (1000.0, 1000.0, 8), (0.0, inf, 5), (0.0, 1.0, 3)],
)
def test_replicas_within_a_bound_are_as_many_as_decode_at_once(
    rate: float, asked: float, count: int
) -> None:
    """A batch of 4 takes 40 ms a token, and each request 200 tokens: a rate of 2/s brings 16.

    At times there are 4 more. So fast come all 32; without a rate the 20 of this run are there, or
    fewer behind `max_concurrency`.
    """
    load = Workload(np.zeros(32), np.ones(32, np.int64), np.ones(32, np.int64), request_rate=asked)
    advisor: Any = SimpleNamespace(
        run=SimpleNamespace(
            record=SimpleNamespace(workload=load),
            table=SimpleNamespace(generated=np.array([200, 200])),
            done=np.array([True, True]),
        ),
        engine=SimpleNamespace(max_num_seqs=16),
        most_present=20,
        _rate=rate,
        _token_time=lambda decodes: 0.01 * decodes,
        servers=SimpleNamespace(in_pods=ceil),
    )
    assert Advisor.replicas_within(advisor, 1, 40.0) == count
