"""The what-if scenarios at small size: each still shows what its comment says."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from simulator.scenario.load import load_scenario
from simulator.simulation.run import run

FOLDER = Path(__file__).parents[2] / "scenarios" / "what-if"


def summary(name: str, *overrides: str) -> dict[str, Any]:
    return run(load_scenario(FOLDER / f"{name}.yaml", overrides)).summary()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_one_says_what_to_look_at(path: Path) -> None:
    text = path.read_text()
    assert "Look at" in text
    verbs = "|".join(("compare", "plan", "run"))
    assert re.search(rf"headway ({verbs}) scenarios/what-if/{path.name}", text)
    load_scenario(path)


def test_twice_the_traffic_is_a_queue_once_it_is_too_much() -> None:
    one, two = (
        summary("traffic", f"workload.request_rate={rate}", "workload.num_prompts=1200")
        for rate in (16, 32)
    )
    assert two["p99_ttft_ms"] > 10 * one["p99_ttft_ms"]
    assert two["request_goodput"] < 0.2 * one["request_goodput"]
    assert two["output_throughput"] > one["output_throughput"]


def test_faster_gpus_are_faster_and_not_cheaper_at_a_load_that_slower_ones_hold() -> None:
    runs = [
        summary("gpus", f"gpu.name={gpu}", "workload.num_prompts=500")
        for gpu in ("A100-80GB", "H100-80GB", "H200")
    ]
    for slow, fast in pairwise(runs):
        assert fast["mean_tpot_ms"] < slow["mean_tpot_ms"]
        usage = [run["headway"]["kv_cache_usage_mean"] for run in (slow, fast)]
        assert usage[1] < usage[0]
        price = [
            run["headway"]["cluster"]["dollars_per_million_output_tokens"] for run in (slow, fast)
        ]
        assert price[1] > price[0]


def test_a_cache_in_8_bits_holds_twice_as_many() -> None:
    """What it saves is waiting: preemptions all but end, and so does the queue."""
    auto, fp8 = (
        summary("kv-fp8", f"engine.kv_cache_dtype={dtype}", "workload.num_prompts=700")
        for dtype in ("auto", "fp8")
    )
    assert fp8["headway"]["preemptions"] < 0.3 * auto["headway"]["preemptions"]
    assert fp8["p99_ttft_ms"] < 0.1 * auto["p99_ttft_ms"]
    assert fp8["request_throughput"] > 1.2 * auto["request_throughput"]


def test_contexts_four_times_as_long_wait_much_more_than_four_times() -> None:
    short, long = (
        summary("long-context", f"workload.input_len={tokens}", "workload.num_prompts=250")
        for tokens in (1500, 6000)
    )
    assert long["mean_ttft_ms"] > 8 * short["mean_ttft_ms"]
    assert long["p99_itl_ms"] > 1.3 * short["p99_itl_ms"]
    assert long["headway"]["kv_cache_usage_mean"] > 4 * short["headway"]["kv_cache_usage_mean"]


def test_four_gpus_are_shared_out_by_load_and_by_memory() -> None:
    """At little load tensor parallelism is fastest; at much, two ranks of two GPUs hold it best."""
    shares = ((4, 1), (2, 2), (1, 4))
    low, high = (
        [
            summary(
                "data-parallel",
                f"engine.tensor_parallel_size={tensor}",
                f"engine.data_parallel_size={data}",
                f"workload.request_rate={rate}",
                f"workload.num_prompts={prompts}",
            )
            for tensor, data in shares
        ]
        for rate, prompts in ((2, 100), (20, 1000))
    )
    for wide, narrow in pairwise(low):
        assert narrow["mean_tpot_ms"] > 1.3 * wide["mean_tpot_ms"]
    assert high[1]["p99_ttft_ms"] < 0.3 * min(high[0]["p99_ttft_ms"], high[2]["p99_ttft_ms"])
    assert high[2]["headway"]["preemptions"] > 0 == high[0]["headway"]["preemptions"]
    assert high[2]["headway"]["kv_cache_usage_max"] > 0.99


def test_a_lost_replica_hurts_unless_the_others_hold_the_peak() -> None:
    lost = [
        summary("replica-lost", f"cluster.replicas={count}", "workload.num_prompts=2500")
        for count in (3, 4)
    ]
    for one in lost:
        assert one["completed"] == 2500
        assert one["headway"]["cluster"]["failures"] == 1
        assert one["headway"]["cluster"]["tries_lost_in_failures"] > 0
    assert lost[0]["p99_ttft_ms"] > 5 * lost[1]["p99_ttft_ms"]
    assert lost[1]["request_goodput"] > 0.97 * lost[1]["request_throughput"]


def test_chat_does_not_wait_for_a_batch_tenant_of_a_fair_or_ranked_queue() -> None:
    ttft, throughput = [], []
    for policy in ("fcfs", "fair", "priority"):
        options = [f"engine.scheduling_policy={policy}", "workload.num_prompts=900"]
        result = run(load_scenario(FOLDER / "batch-tenant.yaml", options))
        rows = result.requests
        ttft.append(float(rows["ttft"][rows["client"] == "client-0"].quantile(0.9)))
        throughput.append(result.summary()["output_throughput"])
    assert max(ttft[1:]) < 0.2 * ttft[0]
    assert min(throughput) > 0.9 * max(throughput)


def tenants(name: str, policy: str, *overrides: str) -> tuple[float, float, dict[str, Any]]:
    """Mean TTFT of client-0 and of client-1, in s, and the summary."""
    options = [f"engine.scheduling_policy={policy}", *overrides]
    result = run(load_scenario(FOLDER / f"{name}-tenants.yaml", options))
    ttft = result.requests.groupby("client", observed=True)["ttft"].mean()
    return ttft["client-0"], ttft["client-1"], result.summary()


def real(name: str) -> list[str]:
    """The override by which a what-if's comment replays the trace."""
    found = re.search("--set '(workload=.*)'", (FOLDER / f"{name}-tenants.yaml").read_text())
    assert found is not None
    return [found[1]]


@pytest.mark.medium
@pytest.mark.parametrize("traced", [False, True])
def test_azures_tenants(traced: bool, request: pytest.FixtureRequest) -> None:
    """Whoever goes first waits no more; to be thrown out costs the other twice the wait."""
    overrides = ["workload.num_prompts=2500"]
    if traced:
        request.getfixturevalue("data")
        overrides = real("azure")
    both = {
        policy: tenants("azure", policy, *overrides)
        for policy in ("fcfs", "priority", "preemptive", "fair", "wfq")
    }
    for policy in ("priority", "preemptive", "fair", "wfq"):
        assert both[policy][0] < 0.05 * both["fcfs"][0]
    for policy in ("priority", "fair", "wfq"):
        assert 1.1 < both[policy][1] / both["fcfs"][1] < 1.4
        assert both[policy][2]["headway"]["preemptions"] == 0
    assert both["preemptive"][0] < both["priority"][0]
    assert both["preemptive"][1] > 1.6 * both["priority"][1]
    throughput = [both[name][2]["output_throughput"] for name in ("preemptive", "priority")]
    assert throughput[0] < 0.97 * throughput[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:cost")
@pytest.mark.parametrize("traced", [False, True])
def test_mooncakes_tenants(traced: bool, request: pytest.FixtureRequest) -> None:
    """Prompts before one's own are what one waits for: seats are free."""
    overrides: list[str] = []
    if traced:
        request.getfixturevalue("data")
        overrides = [real("mooncake")[0].replace("limit: 2500", "limit: 900")]
    fcfs, priority, preemptive, fair, wfq = (
        tenants("mooncake", policy, *overrides)
        for policy in ("fcfs", "priority", "preemptive", "fair", "wfq")
    )
    assert priority[0] < wfq[0] < fair[0] < 0.7 * fcfs[0]
    assert preemptive[0] == pytest.approx(priority[0], rel=0.1)
    assert max(one[1] for one in (priority, fair, wfq)) < 1.3 * fcfs[1]


@pytest.mark.medium
def test_autoscaling_pays_for_fewer_replica_hours_at_the_same_goodput() -> None:
    small = ("workload.num_prompts=6000", "workload.diurnal.period=400")
    fixed, scaled = (
        summary("diurnal", *small, *more) for more in (["cluster.autoscaling=null"], [])
    )
    dollars = [run["headway"]["cluster"]["dollars"] for run in (fixed, scaled)]
    assert dollars[1] < 0.93 * dollars[0]
    assert scaled["headway"]["cluster"]["scalings"] > 2
    assert scaled["request_goodput"] > 0.98 * fixed["request_goodput"]


APART = "workload.num_prompts=1000"
SHARED = "cluster={replicas: 4, router: least_outstanding}"


def test_prefill_and_decode_apart_spare_decodes_the_prompts_and_cost_time_to_first_token() -> None:
    """Long prompts: more meet the SLO apart, with a fifth of the P99 ITL."""
    apart, shared = (summary("disaggregation", APART, *more) for more in ([], [SHARED]))
    assert apart["p99_itl_ms"] < 0.3 * shared["p99_itl_ms"]
    assert apart["request_goodput"] > 1.04 * shared["request_goodput"]
    assert apart["mean_ttft_ms"] > 2 * shared["mean_ttft_ms"]


def test_for_long_answers_one_replica_is_enough_to_prefill() -> None:
    load = (
        *("workload.input_len.median=300", "workload.output_len.median=400"),
        *("workload.request_rate=50", "workload.num_prompts=600"),
    )
    other = ("cluster.groups.prefill.replicas=1", "cluster.groups.decode.replicas=3")
    even, split, shared = (
        summary("disaggregation", *load, *more) for more in ([], other, [SHARED])
    )
    assert even["mean_tpot_ms"] > 1.2 * shared["mean_tpot_ms"]
    assert split["mean_tpot_ms"] < 1.05 * shared["mean_tpot_ms"]
    assert split["p99_itl_ms"] < 0.7 * shared["p99_itl_ms"]
    busy = even["headway"]["cluster"]["groups"]
    assert busy["prefill"]["gpu_busy_fraction"] < 0.3 * busy["decode"]["gpu_busy_fraction"]


def test_a_slow_network_is_felt_before_the_first_token() -> None:
    slow, fast = (
        summary(
            "disaggregation", "workload.num_prompts=400", f"cluster.kv_transfer.bandwidth={rate}"
        )
        for rate in (1, 50)
    )
    assert slow["mean_ttft_ms"] > 20 * fast["mean_ttft_ms"]
    assert slow["mean_transfer_time_ms"] > 0.9 * slow["mean_ttft_ms"]
    assert slow["headway"]["cluster"]["kv_transfer"]["link_utilization"] > 0.9
    assert slow["headway"]["diagnosis"][0]["rule"] == "kv_transfer"
