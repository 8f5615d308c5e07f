"""The summary against the definitions of `vllm bench serve`, worked out token by token."""

import json
from dataclasses import replace
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.log import Log
from simulator.kv_cache.block_manager import BlockCounter
from simulator.results.engine_metrics import queue_depth
from simulator.results.request_table import gather_requests
from simulator.results.sample import percentiles
from simulator.schedulers.static import Static
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Frontend, Workload
from tests.support.engines import fcfs, made, play
from tests.support.logs import (
    CLOCK,
    TICK,
    LoggedRun,
    ObservedRequest,
    add_request,
    add_run,
    add_step,
    loads,
    logged_runs,
    make_workload,
    summarize,
)

PERCENTS = (90.0, 99.0, 99.9)


def described(name: str, values: list[float]) -> dict[str, float]:
    """Return the statistics of a list in seconds as vLLM's result file has them."""
    array = np.array(values or [0.0])
    out = {"mean": array.mean(), "median": np.median(array), "std": array.std()}
    out |= {f"p{p:g}": np.percentile(array, p) for p in PERCENTS}
    return {f"{word}_{name}_ms": value * 1000 for word, value in out.items()}


def by_hand(story: LoggedRun, goodput: dict[str, float]) -> dict[str, float]:
    """Work out vLLM's metrics as its serve.py does: loops over requests and tokens."""
    done = [r for r in story.requests if r.completed]
    ends = [r.finish for r in done] + [steps[-1]["end"] for steps in story.steps if steps]
    first = min((r.sent for r in story.requests), default=0.0)
    duration = max([first, *ends]) - first if story.requests else 0.0
    ttft = [r.tokens[0] - r.sent for r in done]
    e2el = [r.finish - r.sent for r in done]
    tpot = [(r.finish - r.tokens[0]) / max(len(r.tokens) - 1, 1) for r in done]
    outputs = sum(len(r.tokens) for r in done)
    inputs = sum(r.prompt for r in done)
    measured = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
    good = sum(
        all(measured[k][i] <= ms / 1000 for k, ms in goodput.items()) for i in range(len(done))
    )
    per_second = duration or inf
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(story.requests) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / per_second,
        "request_goodput": good / per_second,
        "output_throughput": outputs / per_second,
        "total_token_throughput": (inputs + outputs) / per_second,
        "max_output_tokens_per_s": busiest_second(done),
        "max_concurrent_requests": most_at_once(done),
        **described("ttft", ttft),
        **described("tpot", [t for t, r in zip(tpot, done, strict=True) if len(r.tokens) > 1]),
        **described("itl", [g for r in done for g in np.diff(r.tokens).tolist()]),
        **described("e2el", e2el),
        **described("queue_time", [r.scheduled - r.sent for r in done]),
    }


def busiest_second(done: list[ObservedRequest]) -> float:
    if not done:
        return 0.0
    start = min(r.sent for r in done)
    buckets = [0] * (ceil(max(r.finish for r in done) - start) + 1)
    for token in (t for r in done for t in r.tokens):
        buckets[int(token - start)] += 1
    return float(max(buckets))


def most_at_once(done: list[ObservedRequest]) -> int:
    """Sweep over the half-open intervals, departures first, as vLLM does."""
    events = sorted([(r.sent, 1) for r in done] + [(r.finish, -1) for r in done])
    now = most = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


bounds = st.dictionaries(
    st.sampled_from(["ttft", "tpot", "e2el"]), st.integers(1, 8000), min_size=1
)


@given(logged_runs(), bounds)
def test_vllm_keys(story: LoggedRun, goodput: dict[str, float]) -> None:
    """Every number that vLLM reports is what its own loops give."""
    summary = summarize(
        story.workload, story.sent, story.logs, goodput=goodput, percentiles=PERCENTS
    )
    for key, value in by_hand(story, goodput).items():
        if key.endswith("_ms") and not summary["completed"]:  # where vLLM has a mean of none, 0
            assert summary[key] is None
        else:
            assert summary[key] == pytest.approx(value, rel=1e-9, abs=1e-9), key
    json.dumps(summary, allow_nan=False)


@given(logged_runs())
def test_gauges(story: LoggedRun) -> None:
    """Every gauge is the time average, or the sum, over single steps listed one by one."""
    gauges = summarize(story.workload, story.sent, story.logs, max_num_seqs=20)["headway"]
    kept = [log.seat_rows is not None for log in story.logs]  # seats of those that have ended
    steps = [
        step | {"live": step["running"] - keeps * step["wasted"]}
        for steps, keeps in zip(story.steps, kept, strict=True)
        for step in steps
    ]

    def average(value: str, times: float = 1.0) -> float:
        busy = sum(s["end"] - s["start"] for s in steps)
        return sum(s[value] * times * (s["end"] - s["start"]) for s in steps) / (busy or inf)

    tokens = [(s["prefill_tokens"], s["decodes"], s["wasted"]) for s in steps]
    assert gauges["steps"] == len(steps)
    assert gauges["mean_running"] == pytest.approx(average("running"))
    assert gauges["batch_occupancy"] == pytest.approx(average("live", 1 / 20))
    live, wasted = (sum(s["live"] for s in steps), sum(s["running"] - s["live"] for s in steps))
    assert gauges["decode_seat_utilization"] == pytest.approx(live / 20 / (len(steps) or inf))
    assert gauges["wasted_seat_steps"] == wasted
    assert gauges["host_share"] is gauges["gpu_busy_without_host"] is None
    assert gauges["max_running"] == max((s["running"] for s in steps), default=0)
    assert [gauges[f"{n}_tokens"] for n in ("prefill", "decode", "wasted")] == [
        sum(t[i] for t in tokens) for i in range(3)
    ]
    assert gauges["wasted_share"] == pytest.approx(
        gauges["wasted_tokens"] / (sum(map(sum, tokens)) or inf)
    )
    assert gauges["preemptions"] == sum(r.preemptions for r in story.requests)


def single_steps(*steps: tuple[float, float, int, int]) -> Log:
    """A log of (start, end, blocks used, tokens stored)."""
    log = Log(num_blocks=10, block_size=4)
    for start, end, used, stored in steps:
        add_step(log, start, end, blocks_used=used, kv_tokens=stored)
    return log


@given(
    st.lists(st.integers(-5, 5) | st.floats(-1e9, 1e9), min_size=1, max_size=60),
    st.lists(st.floats(0, 100), min_size=1, max_size=5),
)
def test_percentiles_are_numpys(values: list[float], wanted: list[float]) -> None:
    """To the last bit: the same run gives the same summary."""
    array = np.array(values, float)
    assert percentiles(array, wanted) == np.percentile(array, wanted).tolist()
    assert percentiles(np.rint(array).astype(int), wanted) == (
        np.percentile(np.rint(array).astype(int), wanted).tolist()
    )


def test_kv_gauges() -> None:
    """KV use is weighted by time; efficiency is tokens stored over tokens reserved."""
    log = single_steps((0.0, 1.0, 2, 8), (1.0, 4.0, 5, 10))
    gauges = summarize(make_workload([]), np.empty(0), [log])["headway"]
    assert gauges["kv_cache_usage_mean"] == pytest.approx((0.2 * 1 + 0.5 * 3) / 4)
    assert gauges["kv_cache_usage_max"] == 0.5
    assert gauges["memory_efficiency"] == pytest.approx((8 + 10 * 3) / (8 + 20 * 3))
    assert gauges["internal_fragmentation"] == pytest.approx(1 - 38 / 68)


def test_kv_gauges_grow_through_a_leap() -> None:
    """Steps of a leapt row count by their own time, each with the blocks that it has."""
    log = Log(num_blocks=10, block_size=4)
    add_step(log, 0.0, 7.0, steps=4, decodes=2, wasted=2, blocks_used=4, kv_tokens=10)
    log.tick_ends.extend([1.0, 3.0, 4.0, 7.0])
    log.leap_blocks.extend([0, 3, 1])
    gauges = summarize(make_workload([]), np.empty(0), [log])["headway"]
    used = 4 * 1 + 4 * 2 + 7 * 1 + 8 * 3
    assert gauges["kv_cache_usage_mean"] == pytest.approx(used / 70)
    assert gauges["kv_cache_usage_max"] == 0.8
    stored = 10 * 1 + 12 * 2 + 14 * 1 + 16 * 3
    assert gauges["memory_efficiency"] == pytest.approx(stored / (4 * used))


def test_queue_depth() -> None:
    """Who is sent during a row waits until the next begins; who is rejected never waits."""
    log = Log(10, 4)
    add_step(log, 1.0, 3.0, waiting=2)
    add_step(log, 5.0, 6.0, waiting=0)
    seen = [
        ObservedRequest(0.0),
        ObservedRequest(0.0),
        ObservedRequest(2.0),
        ObservedRequest(4.0),
        ObservedRequest(2.5, reason="rejected"),
    ]
    for number, request in enumerate(seen):
        if request.reason != "rejected":
            request.scheduled, request.tokens = 5.0, [6.0]
            add_run(log, number, 6.0, 0, 0)
        add_request(log, number, request)
    sent = np.array([r.sent for r in seen])
    gauges = summarize(make_workload(seen), sent, [log])["headway"]
    # 2 wait from 0 to 1, 2 from 1 to 5, another from 2 and another from 4 to 5.
    assert gauges["mean_waiting"] == pytest.approx((2 * 1 + 2 * 4 + 3 + 1) / 6)
    assert gauges["max_waiting"] == 4
    assert gauges["gpu_busy_fraction"] == pytest.approx(3 / 6)
    assert (gauges["rejected"], gauges["unfinished"]) == (1, 0)


def test_who_waits_at_an_engine_that_fails_waits_there_no_longer() -> None:
    """2 wait from 1 to 4, when it fails, and another from 3.5 on; the next step begins at 5."""
    log = Log(10, 4)
    add_step(log, 1.0, 3.0, waiting=2)
    log.emptied.append(4.0)
    add_step(log, 5.0, 6.0, waiting=0)
    log.joined.append(3.5)
    assert queue_depth(log, 6.0) == (2 * 3 + 0.5, 3)


def test_prefix_cache_rate_is_in_tokens() -> None:
    """Hits and queries count prompt tokens of the requests that were scheduled."""
    seen = [
        ObservedRequest(0.0, 1.0, [2.0], prompt=30, cached=16),
        ObservedRequest(0.0, 1.0, [2.0], prompt=10),
        ObservedRequest(0.0, prompt=99, reason="rejected"),
    ]
    log = Log(10, 4)
    for number, request in enumerate(seen):
        add_request(log, number, request)
    gauges = summarize(make_workload(seen), np.zeros(3), [log])["headway"]
    assert (gauges["prefix_cache_hits"], gauges["prefix_cache_queries"]) == (16, 40)
    assert gauges["prefix_cache_hit_rate"] == 0.4


def test_nothing_happened() -> None:
    """A run without a request is all zeros, without latencies: no NaN, no warning."""
    summary = summarize(make_workload([]), np.empty(0), [Log(10, 4)], goodput={"ttft": 1.0})
    assert summary["completed"] == summary["duration"] == 0
    assert summary["p99.9_itl_ms"] is summary["mean_ttft_ms"] is None
    assert summary["request_goodput"] == 0.0
    json.dumps(summary, allow_nan=False)


def test_interrupted_before_the_first_token() -> None:
    """Requests that were sent but never ended are failed; those never sent are neither."""
    log = Log(10, 4)
    add_request(log, 0, ObservedRequest(1.0, reason="unfinished"))
    load = make_workload([ObservedRequest(1.0), ObservedRequest(2.0)])
    summary = summarize(load, np.array([1.0, np.nan]), [log])
    assert (summary["completed"], summary["failed"], summary["num_prompts"]) == (0, 1, 2)
    assert summary["headway"]["never_sent"] == 1
    assert summary["headway"]["unfinished"] == 1


def test_single_tokens_have_no_tpot() -> None:
    """An answer of one token is left out of TPOT and keeps any bound on it."""
    log = Log(10, 4)
    add_request(log, 0, ObservedRequest(0.0, 0.0, [0.5]))
    add_run(log, 0, 0.5, 0, 0)
    summary = summarize(
        make_workload([ObservedRequest(0.0)]), np.zeros(1), [log], goodput={"tpot": 1e-9}
    )
    assert summary["mean_tpot_ms"] == summary["mean_itl_ms"] == 0.0
    assert summary["request_goodput"] == 2.0
    assert summary["mean_ttft_ms"] == summary["mean_e2el_ms"] == 500.0


def test_head() -> None:
    """The words of vLLM's result file; an infinite rate is spelled out; no date."""
    load = make_workload([], request_rate=inf)
    summary = summarize(load, np.empty(0), [Log(10, 4)])
    assert (summary["request_rate"], summary["date"], summary["backend"]) == (
        "inf",
        None,
        "headway",
    )
    assert list(summary["headway"])[:3] == ["schema", "version", "seed"]
    assert "mean_client_queue_time_ms" not in summary
    load = replace(load, request_rate=2.0, max_concurrency=4)
    summary = summarize(load, np.empty(0), [Log(10, 4)])
    assert (summary["request_rate"], summary["max_concurrency"]) == (2.0, 4)
    assert summary["mean_client_queue_time_ms"] is None
    assert summary["p99_e2el_including_client_queue_ms"] is None


def make_engine(kind: str, **options: int) -> Scheduler:
    if kind == "static":
        return made(Static, BlockCounter(1000, 4), timeout=0.3, **options)
    return (
        fcfs(**options)
        if kind == "fcfs"
        else made(AsyncScheduler, BlockCounter(1000, 4), **options)
    )


@given(loads, st.integers(1, 5), st.sampled_from(["fcfs", "async", "static"]))
def test_littles_law(load: Workload, seats: int, kind: str) -> None:
    """Without preemptions, mean queue depth times duration is the sum of the queue times.

    Static batches also wait while the engine stands still; asynchronous steps are decided before
    they begin.
    """
    options = {"max_num_seqs": seats, "max_num_batched_tokens": 32}
    engine = make_engine(kind, **options)
    log, client = play(load, engine, CLOCK)
    sent = np.array(client.sent)
    summary = summarize(load, sent, [log])
    waited = gather_requests(load, sent, [log]).queue_time.sum()
    depth = summary["headway"]["mean_waiting"] * summary["duration"]
    assert depth == pytest.approx(waited, abs=1e-9)


@given(loads, st.integers(1, 5), st.sampled_from(["fcfs", "async"]), st.booleans())
def test_leaping_and_stepwise_runs_have_the_same_summary(
    load: Workload, seats: int, kind: str, frontend: bool
) -> None:
    """All but the KV gauges are equal; a leap estimates those to a block per sequence."""
    options = {"max_num_seqs": seats, "max_num_batched_tokens": 32}
    if frontend:
        load = replace(load, frontend=Frontend(2 * TICK, TICK, TICK / 4))
    summaries = []
    for leap in (True, False):
        log, client = play(load, make_engine(kind, **options), CLOCK, leap=leap)
        summaries.append(summarize(load, np.array(client.sent), [log], max_num_seqs=seats))
    gauges = [summary.pop("headway") for summary in summaries]
    for key in ("kv_cache_usage_mean", "kv_cache_usage_max"):
        one, other = (gauge.pop(key) for gauge in gauges)
        assert one == pytest.approx(other, abs=seats / log.num_blocks), key
    for gauge in gauges:
        del gauge["memory_efficiency"], gauge["internal_fragmentation"]
    for one, other in (summaries, gauges):
        assert one.keys() == other.keys()
        for key, value in one.items():
            exact = value is None or isinstance(value, str)
            assert other[key] == (value if exact else pytest.approx(value, rel=1e-9)), key
