"""Pools of prefill and decode: transfer by layer, prompts that stay, GPUs that change role."""

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from simulator import load_scenario, run
from simulator.cluster.config import FailuresConfig, KvTransferConfig, OutageConfig
from simulator.cluster.kv_links import Link
from simulator.cluster.lifecycle import GpuBudget
from simulator.core.alarm import FastEnvironment
from simulator.schedulers.vllm.kv_roles import Producer
from simulator.util.errors import HeadwayError
from tests.cluster.test_disaggregation import ended, half, moved, world
from tests.support.engines import workload

SCENARIO = """
model: llama-3-8b
gpu: {name: H100-80GB}
engine: {name: textbook, max_num_batched_tokens: 8192}
cluster:
  replicas: 8
  router: least_outstanding
  kv_transfer: {ratio: 1P3D}
  groups: {p: {kv_role: kv_producer}, d: {kv_role: kv_consumer}}
workload: {num_prompts: 300, request_rate: 20, input_len: 1000, output_len: 50}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the scenario above."""
    found = tmp_path / "pools.yaml"
    found.write_text(SCENARIO)
    return found


@pytest.mark.parametrize("layers", [2, 4, 32])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8])
def test_a_transfer_by_layer_takes_what_a_pipeline_of_two_takes(layers: int, blocks: int) -> None:
    """T = 1 s of prefill, X = 0.5 s a block: there after max(T + X / L, T / L + X), and 0.25 s."""
    seen = world(workload((0.0, 4 * blocks, 3)), layers=layers)
    copies = 0.5 * blocks
    there = max(1.0 + copies / layers, 1.0 / layers + copies) + 0.25
    (ready, asked, _, end, scheduled, count, _found) = moved(seen)[0]
    assert (ready, asked, count) == (pytest.approx(1.0), pytest.approx(1.0), blocks)
    assert end == scheduled == pytest.approx(there)
    assert ended(seen) == [(pytest.approx(there + 1.0), pytest.approx(there + 3.0))]


def test_a_short_prompt_is_there_as_soon_as_a_long_one_would_be() -> None:
    """Computed from 0 to 0.5 s, 2 blocks of 0.1 s in two layers: the last leaves by 0.6 s."""
    env, seen = FastEnvironment(), []
    link = Link(env, 0.1, 0.25, seen.append, layers=2)
    job = SimpleNamespace(first_scheduled=0.0)
    handoff = SimpleNamespace(blocks=2, ready=0.5, job=job)
    env.run(0.5)
    link.put(handoff)  # type: ignore[arg-type]
    assert handoff.end == pytest.approx(0.6 + 0.25)


@pytest.mark.parametrize("blocks", [1, 4])
def test_prompts_that_are_computed_together_share_the_link_layer_by_layer(blocks: int) -> None:
    """All are there as one of their sizes together would be; the first as if it were alone."""
    seen = world(workload(*[(0.0, 4 * blocks, 1)] * 3), layers=4)
    alone, all_three = 0.5 * blocks, 1.5 * blocks
    ends = [row[3] for row in moved(seen)]
    assert ends[0] == pytest.approx(max(1 + alone / 4, 1 / 4 + alone) + 0.25)
    assert ends[-1] == pytest.approx(max(1 + all_three / 4, 1 / 4 + all_three) + 0.25)


def test_a_consumer_without_blocks_holds_the_prefill_back() -> None:
    """3 blocks for two prompts of two: the second is computed when the first has left."""
    seen = world(
        workload((0.0, 8, 2), (0.0, 8, 1)),
        make=lambda kind: half(kind, 99 if issubclass(kind, Producer) else 4),
        layers=2,
    )
    assert seen.fleet.logs[0].steps["start"].tolist() == pytest.approx([0.0, ended(seen)[0][1]])


def test_short_prompts_are_computed_where_they_are_decoded() -> None:
    """Of 8 and 6 tokens the second stays: it has no part in the link, and its steps are there."""
    seen = world(workload((0.0, 8, 2), (0.0, 6, 2)), local=6)
    assert len(moved(seen)) == 1
    assert ended(seen)[1] == (1.0, 2.0)
    assert seen.fleet.logs[1].steps["prefill_tokens"].sum() == 6
    assert seen.fleet.logs[0].steps["prefill_tokens"].sum() == 8


def test_what_counts_is_what_the_prefix_cache_lacks() -> None:
    """The second turn begins with the 8 tokens of the first, two blocks."""
    load = workload((0.0, 8, 2), (9.0, 12, 2))
    load.segments = [(("a", 8),), (("a", 8), ("b", 4))]
    cached = partial(half, caching=True)
    assert len(moved(world(load, make=cached, local=3))) == 2
    assert len(moved(world(load, make=cached, local=4))) == 1


def test_a_producer_that_fails_while_a_consumer_waits_for_it() -> None:
    """At 0.5 it fails: the request begins anew at the other, from 0.5."""
    outage = OutageConfig(replica=0, start=0.5, duration=50.0)
    seen = world(workload((0.0, 8, 2)), (2, 1), layers=2, failures=FailuresConfig(outages=[outage]))
    assert moved(seen)[0][0] == pytest.approx(1.5)
    assert ended(seen)[0][1] == pytest.approx(1.5 + 0.5 + 0.25 + 2.0)


def test_each_transfer_of_several_ends_when_its_last_byte_arrives() -> None:
    """Three of 1, 2 and 3 blocks of 1 s, sent at once."""
    env, ends = FastEnvironment(), []
    link = Link(env, 1.0, 0.0, lambda one: ends.append((one.blocks, env.now)))
    for blocks in (1, 2, 3):
        link.put(SimpleNamespace(blocks=blocks))  # type: ignore[arg-type]
    env.run()
    assert ends == [(1, 1.0), (2, 3.0), (3, 6.0)]


def test_nobody_overtakes_a_group_that_waits_for_gpus() -> None:
    """Of four GPUs three are taken: a replica of two waits, and so does one of one behind it."""
    life = SimpleNamespace(states=["up", "off", "up", "off"], drain=lambda target: None)
    budget = GpuBudget(life, 4, [2, 2, 1, 1], delay=None)  # type: ignore[arg-type]
    ordered: list[str] = []

    def group(name: str, at: int) -> SimpleNamespace:
        one = SimpleNamespace(index=at)
        block = SimpleNamespace(startup_delay=0.0)
        order = lambda delay: ordered.append(name)  # noqa: E731
        spare = SimpleNamespace(index=2) if name == "small" else None
        return SimpleNamespace(
            targets=[one], block=block, order=order, quotient=1.0, spared=lambda: spare
        )

    large, small = group("large", 1), group("small", 3)
    budget.scalers = [large, small]  # type: ignore[list-item]
    budget.order(small)  # type: ignore[arg-type]
    assert ordered == ["small"]  # the fourth is free
    budget.order(large)  # type: ignore[arg-type]
    budget.order(small)  # type: ignore[arg-type]
    assert ordered == ["small"]
    assert budget.pending == [large]


def test_ratio_shares_replicas_out() -> None:
    """At least one each; halves go to the even number."""
    links = KvTransferConfig(ratio="1P3D")
    assert links.shared_out(8) == {"kv_producer": 2, "kv_consumer": 6}
    assert links.shared_out(2) == {"kv_producer": 1, "kv_consumer": 1}
    assert KvTransferConfig(ratio="9P1D").shared_out(4) == {"kv_producer": 3, "kv_consumer": 1}


def test_a_scenario_with_a_ratio_is_written_and_read_again(path: Path) -> None:
    scenario = load_scenario(path)
    assert [group.replicas for group in scenario.cluster.groups.values()] == [2, 6]
    assert "replicas" not in scenario.resolved()["cluster"]["groups"]["p"]
    more = load_scenario(path, ["cluster.kv_transfer.ratio=3P1D"])
    assert [group.replicas for group in more.cluster.groups.values()] == [6, 2]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("cluster.replicas=1", "kv_transfer.ratio shares them out: 2 or more"),
        ("cluster.groups.p.replicas=2", "groups.p.replicas: cannot be used with kv_transfer.ratio"),
        ("cluster.groups.p.kv_role=kv_consumer", "one group of kv_role kv_producer and one"),
        ("cluster.kv_transfer.ratio=1:3", "ratio"),
        ("cluster.max_gpu_budget=8", "needs two groups or more that have autoscaling"),
        ("cluster.switch_delay=8", "switch_delay: needs max_gpu_budget"),
        ("cluster.groups.p.autoscaling={group: p}", "autoscaling.group: it is this group"),
    ],
)
def test_what_does_not_go_together_is_told(path: Path, setting: str, told: str) -> None:
    with pytest.raises(HeadwayError, match=told):
        load_scenario(path, [setting])


def test_pools_scale_apart_and_keep_their_budget() -> None:
    """Never more than eight GPUs at once; prefill takes over what decode gave up."""
    load = ["workload.num_prompts=3000"]
    scenario = load_scenario("what-if/role-change", load)
    result = run(scenario)
    states, gpus, up = {}, [], Counter()
    for _, replica, state in result.cluster.changes:
        states[replica] = state
        gpus.append(sum(one != "off" for one in states.values()))
    for replica, state in states.items():
        up[result.cluster.groups[replica]] += state == "up"
    assert max(gpus) == 8
    assert up["prefill"] > 2
    assert up["decode"] < 6
    fixed = run(load_scenario("what-if/role-change", [*load, *FIXED]))
    changed, stayed = (one.summary()["request_goodput"] for one in (result, fixed))
    assert changed > 5 * stayed


FIXED = [
    "cluster.max_gpu_budget=null",
    "cluster.groups.prefill.autoscaling=null",
    "cluster.groups.decode.autoscaling=null",
]


def test_the_diagnosis_names_the_pool_that_is_short(path: Path) -> None:
    """A load of long prompts on one producer: the finding gives it consumers, on as many GPUs."""
    keys = ["cluster.kv_transfer.ratio=1P7D", "workload.input_len=4000", "workload.request_rate=40"]
    first = run(load_scenario(path, keys)).summary()
    finding = next(one for one in first["headway"]["diagnosis"] if one["rule"] == "pools")
    advice = finding["advice"][0]
    assert advice["key"] == "cluster.kv_transfer.ratio"
    x, y = map(int, advice["to"][:-1].split("P"))
    assert (x > 1, x + y) == (True, 8)
    better = run(load_scenario(path, [*keys, f"cluster.kv_transfer.ratio={advice['to']}"]))
    assert better.summary()["mean_ttft_ms"] < 0.5 * first["mean_ttft_ms"]


def test_the_diagnosis_moves_replicas_between_pools_that_are_counted_apart(path: Path) -> None:
    """Where each group has its own number, there is no ratio to change."""
    path.write_text(
        SCENARIO.replace("  replicas: 8\n", "")
        .replace("{ratio: 1P3D}", "{bandwidth: 50}")
        .replace("kv_producer", "kv_producer, replicas: 1")
        .replace("kv_consumer", "kv_consumer, replicas: 5")
    )
    result = run(load_scenario(path, ["workload.input_len=4000", "workload.request_rate=40"]))
    told = result.summary()["headway"]["diagnosis"]
    found = next(one for one in told if one["rule"] == "pools")
    advice = found["advice"][0]
    assert (advice["key"], advice["from"], advice["to"]) == ("cluster.groups.p.replicas", 1, 5)
    assert advice["also"] == {"cluster.groups.d.replicas": 1}
    assert "while d has 5 replicas" in found["text"]


def test_what_comes_after_a_broken_transfer_does_not_arrive_in_the_past() -> None:
    """Two prompts of 0.5 s to 2.5 s; the first breaks off at 2.75 s: the second is sent from then.

    Its layers were there before, but the link was busy with the first.
    """
    env, seen = FastEnvironment(), []
    link = Link(env, 1.0, 0.0, seen.append, layers=4)
    first, second = (
        SimpleNamespace(blocks=2, ready=2.5, job=SimpleNamespace(first_scheduled=0.5))
        for _ in range(2)
    )
    env.run(2.5)
    link.put(first)  # type: ignore[arg-type]
    link.put(second)  # type: ignore[arg-type]
    assert (first.begin, first.end, second.begin, second.end) == (1.0, 3.0, 3.0, 5.0)
    env.run(2.75)
    assert link.drop(lambda one: one is first) == [first]
    assert (second.begin, second.end) == (2.75, 4.75)
    env.run()
    assert seen == [second]
    assert env.now == 4.75


def test_a_try_that_moves_nothing_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    """The first try is given up while it decodes; the second finds its prompt in the cache."""
    (tmp_path / "pools.yaml").write_text(
        "{model: tiny-test, cost: {kind: linear, base: 0.125}, engine: {name: textbook, "
        "max_num_seqs: 7, max_num_batched_tokens: 8, max_model_len: 64}, cluster: {client: "
        "{timeout: 1.0, max_retries: 2}, kv_transfer: {max_local_prefill_length: 8}, groups: "
        "{p: {kv_role: kv_producer}, d: {kv_role: kv_consumer}}}}"
    )
    found = run(load_scenario(tmp_path / "pools.yaml"), workload=workload((0.0, 20, 5)))
    (row,) = found.requests.to_dict("records")
    assert row["retry_time"] == 2.0  # a timeout, and a second's wait
    assert (row["queue_time"], row["prefill_time"]) == (0.0, 0.125)  # 4 tokens of 20
    assert row["transfer_time"] == 0.0
