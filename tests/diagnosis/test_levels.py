"""Service levels that are broken: each has a finding, and what it advises is tried."""

import random
import re
from typing import Any

import numpy as np
import pytest

from headway.planning.diagnose import diagnose, table
from simulator import load_scenario, run
from simulator.diagnosis.levels import BROKEN
from simulator.diagnosis.rules import NOTHING, diagnosis_lines, told_findings

SLOW = [
    *("cost=null", "goodput={tpot: 12}", "workload.request_rate=2"),
    "workload.num_prompts=200",
]


def broken(*sets: str) -> dict[str, Any]:
    """Run the demo with keys set; return the finding of its levels."""
    found = run(load_scenario("demo", sets)).summary()["headway"]["diagnosis"]
    return next(one for one in found if one["rule"] == "levels")


def test_a_gpu_that_is_too_slow_is_a_finding_without_any_queue() -> None:
    """What would do is narrower weights, tensor parallelism, another GPU, and last replicas."""
    found = broken(*SLOW)
    assert "goodput>=0.99 is broken: 1 % of requests keep it, 98 points" in found["text"]
    assert "P99 TPOT is 1." in found["text"]
    keys = [one["key"] for one in found["advice"]]
    assert keys[:2] == ["engine.quantization", "engine.tensor_parallel_size"]
    assert keys[2:] == ["gpu.name", "cluster.replicas"]


def test_seats_that_do_not_carry_the_load_are_no_advice() -> None:
    """Two seats have steps that are short enough, and a queue that grows: five are in use."""
    keys = {one["key"] for one in broken(*SLOW, "goodput={tpot: 14}")["advice"]}
    assert "engine.max_num_seqs" not in keys
    assert run(load_scenario("demo", SLOW)).summary()["headway"]["mean_running"] > 5


SESSIONS = """model: llama-3.1-8b
gpu: {name: A100-80GB}
engine: {enable_prefix_caching: false}
workload: {num_prompts: 3000, request_rate: 0.8, input_len: 700, output_len: 200, range_ratio: 0.5,
  sessions: {turns: 6, think_time: {kind: exponential, mean: 15}}}
cluster: {replicas: 2}
slo: [p95_ttft_ms<=1000, p95_tpot_ms<=40]
"""


def test_what_costs_no_level_comes_before_smaller_steps(write) -> None:
    """Prompts repeat: the cache is named first, and a smaller step last, with what it costs."""
    found = run(load_scenario(write(SESSIONS))).summary()["headway"]["diagnosis"]
    assert [one["rule"] for one in found] == ["prefix_reuse", "levels", "prefill_stalls"]
    assert found[0]["advice"][0]["key"] == "engine.enable_prefix_caching"
    last = found[-1]["advice"][-1]
    assert (last["key"], last["to"]) == ("engine.max_num_batched_tokens", 1024)
    assert "TTFT grows" in found[-1]["text"]


CLASSES = """model: llama-3.1-8b
gpu: {name: A100-80GB}
engine: {max_num_seqs: 128}
workload: {num_prompts: 1500, request_rate: 9, input_len: 1000, output_len: 250, range_ratio: 0.8,
  clients: {paid: 1, free: 4}, priorities: [0, 1]}
slo: ["client paid: p95_ttft_ms<=1000", "client paid: p95_tpot_ms<=60"]
"""


def test_more_seats_only_where_they_give_more_tokens(write) -> None:
    """Beyond 64 seats prompts take what decodes win; from 16 on twice as many give half as much."""

    def advised(*sets: str) -> tuple[set[str], float]:
        summary = run(load_scenario(write(CLASSES), sets)).summary()
        found = {one["rule"]: one["advice"] for one in summary["headway"]["diagnosis"]}
        return {one["key"] for one in found["waiting"]}, summary["output_throughput"]

    keys, most = advised()
    assert "engine.max_num_seqs" not in keys
    keys, _ = advised("slo=[]")
    assert "engine.max_num_seqs" not in keys
    assert advised("slo=[]", "engine.max_num_seqs=256")[1] < 1.02 * most
    keys, few = advised("slo=[]", "engine.max_num_seqs=16")
    assert "engine.max_num_seqs" in keys
    assert advised("slo=[]", "engine.max_num_seqs=32")[1] > 1.3 * few


def test_a_level_of_the_urgent_asks_for_their_priority_first(write) -> None:
    """A policy that knows priorities keeps it; a fair one, which is no advice then, is slower."""
    found = run(load_scenario(write(CLASSES))).summary()["headway"]["diagnosis"]
    rules = [one["rule"] for one in found]
    assert rules.index("urgent") < rules.index("unfair")
    assert found[rules.index("urgent")]["advice"][0]["to"] == "priority"
    assert not found[rules.index("unfair")]["advice"]
    fair, priority = (
        run(load_scenario(write(CLASSES), [f"engine.scheduling_policy={one}"])).summary()
        for one in ("fair", "priority")
    )
    late = [
        next(one["value"] for one in each["headway"]["slo"] if "ttft" in one["bound"])
        for each in (fair, priority)
    ]
    assert late[1] < min(late[0], 1000)


def test_what_one_request_alone_breaks_no_replica_keeps() -> None:
    """A token on an L4 takes 62 ms with nobody beside it."""
    found = broken(*SLOW, "gpu.name=L4", "goodput={tpot: 30}", "workload.request_rate=0.1")
    assert "alone on a replica a request has 6" in found["text"]
    assert all("replicas" not in one["key"] for one in found["advice"])


def test_what_mends_a_queue_alone_is_no_advice_where_one_request_breaks_a_bound() -> None:
    """Requests wait for blocks, too; the GPU is the cheapest that is 4 times as fast at both."""
    load = "workload={num_prompts: 200, request_rate: 6, input_len: 1000, output_len: 200}"
    busy = ["goodput={ttft: 1000, tpot: 30}", load]
    advice = {one["key"]: one["to"] for one in broken(*SLOW, "gpu.name=L4", *busy)["advice"]}
    assert {*advice} == {"engine.quantization", "engine.tensor_parallel_size", "gpu.name"}
    assert advice["gpu.name"] == "H100-80GB"
    kept = run(load_scenario("demo", [*SLOW, *busy, "gpu.name=H100-80GB"])).summary()
    assert kept["headway"]["slo_met"]


@pytest.mark.medium
def test_an_advice_keeps_the_level() -> None:
    """`diagnose` tries each; one at least keeps all levels, and the table says so."""
    found = diagnose(load_scenario("demo", SLOW), jobs=1)
    assert found.as_it_is.missed == 1
    assert found.trials[0].missed == 0
    assert NOTHING not in table(found)


def test_seats_are_lowered_where_fewer_keep_the_bound() -> None:
    """Steps of 1 ms and 1 ms a token: 8 decodes take 9 ms."""
    cost = "cost={kind: linear, base: 1e-3, per_token: 1e-3}"
    sets = ["workload={num_prompts: 64, request_rate: inf, input_len: 1, output_len: 50}"]
    found = broken(cost, "slo=[p99_tpot_ms<=12]", "goodput=null", *sets)
    advice = {one["key"]: one["to"] for one in found["advice"]}
    assert advice["engine.max_num_seqs"] == 8
    assert advice["cluster.replicas"] == 8  # 64 requests at once, at most 9 each: 10 ms of 10.8


@pytest.mark.parametrize("seed", range(12))
def test_nothing_stands_out_never_stands_beside_a_broken_level(seed: int) -> None:
    """Of drawn scenarios each broken level is named, by the run and by all that repeat it."""
    draw = random.Random(seed)
    slo = draw.choice(
        [
            f"p{draw.choice([50, 90, 99])}_{draw.choice(['ttft', 'tpot', 'itl', 'e2el'])}_ms"
            f"<={10 ** draw.uniform(0.5, 4):.4g}",
            "goodput>=0.9",
            "completion>=1",
            f"output_throughput>={10 ** draw.uniform(2, 4):.4g}",
        ]
    )
    sets = [
        *("workload.num_prompts=60", f"seed={seed}", f"slo=['{slo}']"),
        f"workload.request_rate={10 ** draw.uniform(-1, 2):.3g}",
        f"goodput={{tpot: {10 ** draw.uniform(0.8, 2):.3g}}}",
        f"engine.max_num_seqs={draw.choice([2, 16, 256])}",
        f"engine.scheduling_policy={draw.choice(['fcfs', 'static', 'sjf'])}",
    ]
    if draw.random() < 0.3:
        sets.append("engine.max_model_len=1200")  # some are rejected
    gauges = run(load_scenario("demo", sets)).summary()["headway"]
    missed = [one["bound"] for one in gauges["slo"] if not one["met"]]
    told = " ".join(text for text, _ in told_findings(gauges))
    assert all(f"{bound} is broken" in told for bound in missed)
    assert (BROKEN in " ".join(diagnosis_lines(gauges))) == bool(missed)
    assert not missed or NOTHING not in diagnosis_lines(gauges)
    unlooked = {**gauges, "diagnosis": None}  # a run without tables
    assert all(f"{bound} is broken" in str(told_findings(unlooked)) for bound in missed)


def test_larger_steps_are_no_advice_where_a_queue_grows_and_they_break_tpot() -> None:
    """Eight times the budget doubles TPOT, whose bound is missed; without one its cost is said."""
    heavy = ["workload.request_rate=8", "workload.num_prompts=800"]
    for more, advised in (([], False), (["goodput=null"], True)):
        summary = run(load_scenario("demo", [*heavy, *more])).summary()
        waiting = next(x for x in summary["headway"]["diagnosis"] if x["rule"] == "waiting")
        keys = [one["key"] for one in waiting["advice"]]
        assert keys[0] == "cluster.replicas"
        assert ("engine.max_num_batched_tokens" in keys) is advised
        told = r" takes (\S+) times as long: ITL and TPOT are up to \1 times as long\."
        assert bool(re.search(told, waiting["text"])) is advised
    larger = "engine.max_num_batched_tokens=4096"
    slower = run(load_scenario("demo", [*heavy, larger])).summary()
    assert slower["mean_tpot_ms"] > 2 * summary["mean_tpot_ms"]
    assert slower["p99_itl_ms"] > 4 * summary["p99_itl_ms"]


def test_a_goodput_that_too_few_keep_names_a_latency() -> None:
    """Of 134 two miss 1 s, and P99 lies between them and the rest; or each misses another bound."""
    long = "workload={num_prompts: 134, request_rate: 5.71, input_len: 4288, output_len: 269}"
    keys = ["cost=null", "gpu.name=H100-80GB", "engine={max_num_batched_tokens: 1024}", long]
    keys += ["engine.enable_prefix_caching=false", "seed=360"]
    found = broken(*keys, "engine.max_num_seqs=64", "engine.max_model_len=8192")
    assert "P99 TTFT is 1.0" in found["text"]
    assert found["advice"]
    table_ = run(load_scenario("demo", [*SLOW, "goodput=null"])).request_table()
    bounds = {
        name: 1e3 * float(np.sort(getattr(table_, name))[-3]) for name in ("ttft", "tpot")
    }  # each is missed by two of 200: 1 %, and together by up to 2 %
    assert (table_.ttft > bounds["ttft"] / 1e3)[table_.tpot > bounds["tpot"] / 1e3].sum() < 2
    both = ", ".join(f"{name}: {bound!r}" for name, bound in bounds.items())
    found = broken(*SLOW, f"goodput={{{both}}}")
    assert re.search(r"P99\.667 T(TFT|POT) is 1\.", found["text"])
    assert found["advice"]


def test_a_prompt_in_several_steps_is_alone_as_slow_as_it_is() -> None:
    """Each step reads what those before it stored: no replica makes a lone request faster."""
    work = "workload={num_prompts: 1, input_len: 6000, output_len: 2}"
    sets = ["cost=null", work, "engine={max_num_batched_tokens: 512, max_model_len: 8192}"]
    (ttft,) = run(load_scenario("demo", [*sets, "goodput=null"])).request_table().ttft
    found = broken(*sets, f"goodput={{ttft: {999 * ttft}}}")
    assert f"alone on a replica a request has {1e3 * ttft:.1f} ms" in found["text"]
    assert "cluster.replicas" not in {one["key"] for one in found["advice"]}


def test_answers_of_one_token_have_a_first_token_and_no_time_between_two() -> None:
    found = broken(*SLOW, "workload={num_prompts: 20, output_len: 1}", "goodput={ttft: 1, tpot: 1}")
    assert "TTFT is" in found["text"]
    assert "TPOT is" not in found["text"]


def test_a_level_of_one_class_is_ranked_by_it_and_parts_the_classes(write) -> None:
    """A client's wait is what the advice is to improve; a policy that parts clients is tried."""
    level = "client client-0: p95_ttft_ms<=500"
    path = write(CLASSES.replace("paid: 1, free: 4", "client-0: 1, client-1: 6"))
    one = [f"slo=['{level}']", "workload.num_prompts=500", "workload.priorities=null"]
    found = diagnose(load_scenario(path, [*one, "engine.max_num_seqs=16"]), jobs=1)
    levels = next(x for x in found.findings if x["rule"] == "levels")
    assert levels["metric"] == "client client-0:p95_ttft_ms"
    assert "fair" in [advice["to"] for advice in levels["advice"]]
    fair = next(x for x in found.trials if x.advice["to"] == "fair")
    assert not fair.missed < found.as_it_is.missed or fair.gain > 0
    queue = "priority 1: mean_queue_time_ms<=1"
    summary = run(load_scenario(write(CLASSES), [f"slo=['{queue}']"])).summary()
    (late,) = (x for x in summary["headway"]["diagnosis"] if x["rule"] == "levels")
    assert "cluster.replicas" in [advice["key"] for advice in late["advice"]]
