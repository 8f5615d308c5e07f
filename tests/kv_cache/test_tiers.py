"""Tiers behind the GPU: what vLLM's own manager decided, closed forms of links, and the laws."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import load_scenario, run
from simulator.kv_cache.block_manager import BlockManager
from simulator.kv_cache.tiers import HostTier, SecondaryTier
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError
from tests.engine.test_laws import _unroll
from tests.support.engines import Clock, made, play, shared_beginnings, workload

RECORDED = Path(__file__).parent / "offloading.jsonl.gz"
"""By `record_offloading.py`, of vLLM 0.32.0."""


def test_every_decision_is_that_of_vllms_manager() -> None:
    """Which blocks are found, stored, evicted, in 40 random cases of loads, offers and ends."""
    decisions = 0
    with gzip.open(RECORDED, "rt") as file:
        for line in file:
            decisions += _replay(json.loads(line))
    assert decisions > 8000


def _replay(case: dict) -> int:
    """Play a recorded case; return how many decisions were compared."""
    tier = HostTier(case["blocks"], write_through=True, threshold=case["store_threshold"])
    prompts: dict[int, list[int]] = {}
    seen: dict[int, list[int]] = {}
    copied = 0
    for kind, number, *rest in case["calls"]:
        if kind == "load":
            keys, found = rest
            prompts[number] = keys
            assert tier.run(keys) == found
            tier.use(keys[:found])
            seen[number] = keys[:found]
        elif kind == "offer":
            first, end, stored, evicted = rest
            before = {key for keys in prompts.values() for key in keys if key in tier}
            keys = prompts[number][first:end]
            used = tier.offer(keys)
            after = {key for keys in prompts.values() for key in keys if key in tier}
            assert sorted(after - before) == sorted(stored or [])
            assert sorted(before - after) == evicted
            copied += len(stored or [])
            assert tier.stored == copied
            seen[number] += used
        else:
            tier.finished(seen.pop(number))
    return len(case["calls"])


def half_second(blocks: int = 99, *, shared: bool = False) -> SecondaryTier:
    """Half a second for a block, and a quarter until a read is there."""
    return SecondaryTier("fs", blocks, 0.5, 0.25, shared=shared)


def test_a_fetch_takes_its_blocks_and_then_the_latency() -> None:
    """Three blocks from 10.0 on: 1.5 s and 0.25 s; who comes meanwhile is behind them."""
    disk = half_second()
    disk.store(range(9), 0.0)  # until 4.5
    tier = HostTier(99, write_through=True, secondary=[disk])
    tier.now = 10.0
    assert tier.fetch([0, 1, 2, 77]) == ([3], 11.75)
    assert tier.fetch([5]) == ([1], 12.25)
    assert tier.fetch([0, 1]) == ([0], 11.25)  # on their way: there as their own block is
    assert (disk.read, disk.written) == (4, 9)


def test_reads_wait_for_writes() -> None:
    """Offered at 0.0, four blocks keep the link until 2.0; a read then takes 0.5 and 0.25 s."""
    disk, tier = half_second(), HostTier(4, write_through=True)
    tier.secondary = [disk]
    tier.offer([0, 1, 2, 3])
    tier.offer([4, 5, 6, 7])  # until 4.0
    assert tier.run([0]) == 0
    assert tier.fetch([0]) == ([1], 4.75)


def test_a_host_knows_of_no_more_fetches_than_it_has_blocks() -> None:
    """However many there were: what was fetched and evicted is forgotten."""
    disk, tier = half_second(), HostTier(4, write_through=True)
    tier.secondary = [disk]
    disk.store(range(40), 0.0)
    for first in range(0, 40, 4):
        tier.now += 100.0
        assert tier.fetch(range(first, first + 4))[0] == [4]
    assert sorted(tier._coming) == [36, 37, 38, 39]


def test_a_link_that_is_shared_serves_both_replicas_in_turn() -> None:
    """Two hosts ask at 10.0 for three blocks each: there at 11.75 and 13.25."""
    store = half_second(shared=True)
    store.store(range(6), 0.0)
    first, second = (HostTier(9, write_through=True, secondary=[store]) for _ in range(2))
    first.now = second.now = 10.0
    assert first.fetch([0, 1, 2])[1] == 11.75
    assert second.fetch([3, 4, 5])[1] == 13.25


def engine(kind: type[Scheduler] = Scheduler, blocks: int = 5, **options) -> Scheduler:
    """Blocks of 4 tokens: few on the GPU, four in host memory, many on the disk."""
    tier = HostTier(4, write_through=True, secondary=[half_second()])
    return made(kind, BlockManager(blocks, 4, True, tier), **options)


def test_a_request_waits_for_its_prefix_and_another_goes_before_it() -> None:
    """The third begins as the first, of whom only the disk has something: two blocks, 1.25 s."""
    load = workload((0.0, 9, 1), (2.0, 17, 1), (9.0, 9, 1), (9.5, 3, 1))
    load.segments = [(("a", 9),), (("b", 17),), (("a", 9),), (("c", 3),)]
    log, _ = play(load, engine(blocks=6), Clock())
    rows = {row["id"]: row for row in log.requests}
    assert rows[2]["cached"] == 8
    assert rows[3]["first_scheduled"] == 9.5  # while the third waits, until 9.0 + 2 x 0.5 + 0.25
    assert rows[2]["first_scheduled"] == 10.5  # at the step after that
    assert [tuple(row)[1:] for row in log.loads.tolist()] == [(2, 2, 1, 2, 0)]


@given(
    shared_beginnings(),
    *(st.integers(6, 14), st.sampled_from([Scheduler, AsyncScheduler]), st.integers(1, 5)),
)
@settings(max_examples=60, deadline=None)
def test_leaps_change_nothing_and_nothing_is_left(load, blocks, kind, seats) -> None:
    logs = []
    for leap in (True, False):
        one = engine(kind, blocks + 8, max_num_seqs=seats)
        log, _ = play(load, one, Clock(), leap=leap)
        logs.append(log)
        assert one.blocks.free == one.blocks.usable
        assert not one.fetches.coming
        assert not one.blocks._of_tier
    assert logs[0].request_rows == logs[1].request_rows
    assert logs[0].load_rows == logs[1].load_rows
    assert _unroll(logs[0]) == _unroll(logs[1])
    assert len(logs[0].requests) == len(load)


def test_leaps_change_nothing_where_replicas_share_a_store() -> None:
    keys = ["workload.num_prompts=400", "engine.num_gpu_blocks_override=4000"]
    scenario = load_scenario("what-if/kv-tiers", keys)
    runs = [run(scenario, stepwise=stepwise) for stepwise in (False, True)]
    leapt, stepped = (one.requests for one in runs)
    assert leapt.equals(stepped)
    told = runs[0].summary()["headway"]
    tiers = [name.removeprefix("cached_tokens_") for name in leapt if "cached_tokens_" in name]
    for tier in tiers[1:]:
        assert told[f"{tier}_prefix_cache_hits"] == leapt[f"cached_tokens_{tier}"].sum()
    hits = sum(leapt[f"cached_tokens_{tier}"].sum() for tier in tiers)
    assert told["external_prefix_cache_hits"] == hits
    assert leapt["cached_tokens_store"].sum() > 0
    assert (leapt["cached_tokens_store"] <= leapt["cached_tokens"]).all()


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("engine.kv_offloading_size=null", "needs kv_offloading_size"),
        ("engine.hicache_write_policy=write_back", "needs hicache_write_policy: write_through"),
        (
            "engine.enable_lora=true",
            "secondary_tiers: needs enable_chunked_prefill, without enable_lora",
        ),
        ("engine.scheduling_policy=fair", "secondary_tiers: needs fcfs, priority and sjf"),
        ("engine.secondary_tiers=[{size: 1, bandwidth: 0}]", "bandwidth: must be more than 0"),
        ("engine.secondary_tiers=[{type: host, size: 1, bandwidth: 1}]", "type: is the name of"),
        ("engine.secondary_tiers=[{type: a-b, size: 1, bandwidth: 1}]", "type: must match"),
        (
            "engine.secondary_tiers=[{size: 1, bandwidth: 1}, {size: 1, bandwidth: 2}]",
            "two have the type fs",
        ),
    ],
)
def test_what_does_not_go_together_is_told(setting: str, told: str) -> None:
    with pytest.raises(HeadwayError, match=told):
        load_scenario("what-if/kv-tiers", [setting])


def test_the_diagnosis_names_what_was_forgotten() -> None:
    """Without host memory old turns are gone; what is advised finds them again."""
    keys = [
        *("cluster=null", "workload.num_prompts=600", "engine.num_gpu_blocks_override=4000"),
        *("engine.kv_offloading_size=null", "engine.hicache_write_policy=write_back"),
        *("engine.secondary_tiers=[]", "workload.request_rate=0.1"),
    ]
    first = run(load_scenario("what-if/kv-tiers", keys)).summary()
    rules = {one["rule"]: one for one in first["headway"]["diagnosis"]}
    advice = rules["forgotten_prefixes"]["advice"][0]
    assert advice["key"] == "engine.kv_offloading_size"
    keys += [f"engine.kv_offloading_size={advice['to']}"]
    better = run(load_scenario("what-if/kv-tiers", keys)).summary()
    assert better["mean_ttft_ms"] < 0.7 * first["mean_ttft_ms"]
