"""The host tier of the prefix cache: what goes there, what comes back, and what it costs."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import load_scenario, run
from simulator.core.request import Copies, Load, Request, Step
from simulator.costs.linear import LinearCost
from simulator.kv_cache.block_manager import BlockManager
from simulator.kv_cache.tiers import HostTier
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError
from tests.support.engines import Clock, made, play, workload


def ask(id: int, *segments: tuple[object, int]) -> Request:
    return Request(id, 0.0, sum(n for _, n in segments), 9, segments=tuple(segments))


def serve(blocks: BlockManager, request: Request) -> tuple[int, int]:
    """Board a request, free it, and say how many blocks were found on the GPU and the host."""
    hits = blocks.match(request)
    loads = blocks.loadable(request, hits)
    blocks.load(request, hits, loads)
    blocks.admit(request, hits, request.known)
    blocks.release(request)
    return len(hits), loads


def test_what_the_gpu_evicts_is_found_on_the_host() -> None:
    """4 blocks of 4 tokens: b takes a's last blocks, which go to the host, and come back."""
    tier = HostTier(10)
    blocks = BlockManager(5, 4, True, tier)
    assert serve(blocks, ask(0, ("a", 13))) == (0, 0)
    assert serve(blocks, ask(1, ("b", 9))) == (0, 0)
    assert (tier.stored, len(tier)) == (2, 2)
    assert serve(blocks, ask(2, ("a", 13))) == (1, 2)


def test_the_least_recently_used_block_leaves_the_host_first() -> None:
    """Room for two: 3 comes, 1 goes; 2 is used, so 4 pushes out 3."""
    tier = HostTier(2)
    for key in (1, 2, 3):
        tier.store(key)
    assert [tier.run([key]) for key in (1, 2, 3)] == [0, 1, 1]
    tier.use([2])
    tier.store(4)
    assert [tier.run([key]) for key in (2, 3, 4)] == [1, 0, 1]
    tier.store(2)
    assert tier.stored == 4
    assert tier.run([2, 4, 3, 2]) == 2
    tier.store(5)  # 2 was offered again, and so 4 is the oldest
    assert [tier.run([key]) for key in (2, 4, 5)] == [1, 0, 1]
    none = HostTier(0)
    none.store(1)
    assert (len(none), none.stored) == (0, 0)


def test_the_last_token_of_a_prompt_is_computed_though_the_host_has_it() -> None:
    """8 tokens are two full blocks, of which only the first may be loaded."""
    blocks = BlockManager(3, 4, True, HostTier(9))
    serve(blocks, ask(0, ("a", 8)))
    serve(blocks, ask(1, ("b", 8)))
    assert serve(blocks, ask(2, ("a", 8))) == (0, 1)


def test_a_loaded_prefix_is_logged_and_counts_as_cached() -> None:
    """Of a's 13 tokens, 4 are on the GPU and 8 on the host when it comes again."""
    load = workload((0, 13, 1), (2, 9, 1), (4, 13, 1))
    load.segments = [(("a", 13),), (("b", 9),), (("a", 13),)]
    scheduler = Scheduler(BlockManager(5, 4, True, HostTier(9)))
    log, _ = play(load, scheduler)
    assert log.requests["cached"].tolist() == [0, 0, 12]
    assert log.loads.tolist() == [(4.0, 2, 2, 1, 0, 0)]
    assert log.steps["prefill_tokens"].tolist() == [13, 9, 1]


def test_a_load_takes_its_latency_and_its_bytes() -> None:
    """0.5 s and 0.1 s a block for each request, added to the step or beside it."""
    nobody = Request(0, 0.0, 1, 1)
    step = Step([], 1, 1, copies=Copies(loads=[Load(nobody, 3, True), Load(nobody, 4, False)]))
    terms = {"load": 0.5, "load_per_block": 0.1}
    assert LinearCost(1.0, **terms).execute(step).seconds == pytest.approx(1 + 1.7)
    assert LinearCost(1.0, swap_overlap=True, **terms).execute(step).seconds == pytest.approx(1.7)
    assert LinearCost(2.0, swap_overlap=True, **terms).execute(step).seconds == pytest.approx(2)


prompts = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=3),
    min_size=1,
    max_size=15,
)


@given(prompts, st.integers(7, 20))
@settings(max_examples=150, deadline=None)
def test_with_a_boundless_host_nothing_is_ever_lost(contents, usable) -> None:
    """GPU and host together find all full blocks that any earlier prompt began with."""
    blocks = BlockManager(usable + 1, 4, True, HostTier(10**6))
    seen = set()
    for id, segments in enumerate(contents):
        request = ask(id, *segments)
        tokens = [(name, k) for name, n in segments for k in range(n)]
        whole = [tuple(tokens[:end]) for end in range(4, len(tokens) + 1, 4)]
        known = 0
        while known < (len(tokens) - 1) // 4 and whole[known] in seen:
            known += 1
        assert sum(serve(blocks, request)) == known
        seen.update(whole)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(9, 16)), min_size=8, max_size=30),
    st.integers(5, 8),
    st.integers(3, 8),
)
@settings(max_examples=50, deadline=None)
def test_the_scheduler_finds_what_its_calls_find(contents, usable: int, room: int) -> None:
    """Prompts one after the other; what is loaded is used, and stays on a small host for longer."""
    requests = [ask(id, segment) for id, segment in enumerate(contents)]
    load = workload(*((id, request.prompt_tokens, 1) for id, request in enumerate(requests)))
    load.segments = [request.segments for request in requests]
    blocks, other = (BlockManager(usable + 1, 4, True, HostTier(room)) for _ in range(2))
    log, _ = play(load, made(Scheduler, blocks, max_model_len=64), Clock(0.5))
    found = [4 * sum(serve(other, request)) for request in requests]
    assert np.sort(log.requests, order="id")["cached"].tolist() == found
    assert list(blocks.tier._keys) == list(other.tier._keys)


SCENARIO = """
model: llama-3-8b
gpu: {name: H200}
engine: {num_gpu_blocks_override: 200, kv_offloading_size: 2, max_model_len: 1000}
workload:
  num_prompts: 60
  request_rate: 20
  input_len: 20
  output_len: 20
  prefix_groups: {num_prefixes: 12, prefix_len: 500}
"""


def scenario(tmp_path: Path, *settings: str):
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    return load_scenario(path, list(settings))


def test_who_ends_while_it_waits_again_has_ended_for_the_host_as_well() -> None:
    """A preempted request, whose last token was on its way."""
    told: list[Request] = []

    class Listening(BlockManager):
        def finished(self, request: Request) -> None:
            told.append(request)

    one, request = AsyncScheduler(Listening(5, 4, True, HostTier(10))), ask(0, ("a", 9))
    one.add(request)
    one.finish(request, 1.0)
    assert (told, len(one.waiting)) == ([request], 0)


def test_a_run_tells_the_hit_rates_of_both_tiers(tmp_path: Path) -> None:
    """2 GiB are 1,024 blocks of 2 MiB, enough for all prefixes; the GPU has room for 6 of 12."""
    done = run(scenario(tmp_path))
    gauges = done.summary()["headway"]
    alone = run(scenario(tmp_path, "engine.kv_offloading_size=null")).summary()["headway"]
    assert alone["external_prefix_cache_hits"] == 0
    assert gauges["external_prefix_cache_hits"] > 0
    both = gauges["external_prefix_cache_hits"] + gauges["prefix_cache_hits"]
    assert both == done.requests.cached_tokens.sum() > alone["prefix_cache_hits"]
    moved = gauges["offloaded_blocks"] + gauges["loaded_blocks"]
    assert gauges["offloading_bytes"] == moved * 2**21
    missed = gauges["prefix_cache_queries"] - gauges["prefix_cache_hits"]
    assert gauges["external_prefix_cache_hit_rate"] == pytest.approx(
        gauges["external_prefix_cache_hits"] / missed
    )


def test_a_slow_bus_costs_time(tmp_path: Path) -> None:
    """The same tokens are found, but the first ones come later."""
    fast, slow, late = (
        run(scenario(tmp_path, *more)).summary()["mean_ttft_ms"]
        for more in (
            ["engine.kv_offloading_bandwidth=50"],
            ["engine.kv_offloading_bandwidth=5"],
            ["engine.kv_offloading_bandwidth=50", "engine.kv_offloading_latency=20"],
        )
    )
    assert fast < slow
    assert fast < late


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_evictions_in_leaps_are_those_of_single_steps(tmp_path: Path, asynchronous) -> None:
    told = scenario(tmp_path, f"engine.async_scheduling={asynchronous}")
    leapt, stepped = run(told), run(told, stepwise=True)
    assert leapt.requests.equals(stepped.requests)
    assert leapt.logs[0].load_rows == stepped.logs[0].load_rows
    assert leapt.logs[0].offloaded == stepped.logs[0].offloaded > 0


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("enable_prefix_caching=false", "needs enable_prefix_caching: true"),
        ("prefix_cache=radix", "needs prefix_cache: hash"),
        ("allocation=contiguous", "needs allocation: paged"),
        ("scheduling_policy=static", "there is no prefix cache"),
        ("kv_offloading_size=0", "kv_offloading_size"),
    ],
)
def test_a_tier_that_means_nothing_is_refused(tmp_path: Path, line: str, what: str) -> None:
    with pytest.raises(HeadwayError, match=what):
        scenario(tmp_path, f"engine.{line}")


def test_bandwidth_and_latency_need_a_tier(tmp_path: Path) -> None:
    for key in ("bandwidth", "latency"):
        with pytest.raises(HeadwayError, match="needs kv_offloading_size"):
            scenario(tmp_path, "engine.kv_offloading_size=null", f"engine.kv_offloading_{key}=5")
