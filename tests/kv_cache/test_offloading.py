"""Blocks that come from the host while others compute: by hand, and the laws.

That vLLM decides the same is held by `tests/conformance/test_drawn_cases.py`.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import load_scenario, run
from simulator.core.request import Request
from simulator.core.speculative_config import SpeculativeConfig
from simulator.features.drafts.blocks import DraftBlocks
from simulator.features.drafts.walk import AsyncHostDrafts, HostDrafts
from simulator.kv_cache.block_hashes import known_hashes
from simulator.kv_cache.block_manager import BlockManager
from simulator.kv_cache.tiers import HostTier
from simulator.schedulers.vllm.offloading import AsyncOffloading, Offloading
from tests.engine.test_laws import _unroll
from tests.support.engines import Clock, made, play, shared_beginnings, workload


def engine(kind: type[Offloading] = Offloading, blocks: int = 8, **options) -> Offloading:
    """Blocks of 4 tokens: few on the GPU; the host gives one in 2 s and takes one in 0.25 s."""
    tier = HostTier(20, write_through=True)
    manager = BlockManager(blocks, 4, True, tier)
    return made(
        kind, manager, load_time=lambda n: 2.0 * n, store_time=lambda n: 0.25 * n, **options
    )


def test_others_compute_while_blocks_come() -> None:
    """The third begins as the first, whose two blocks the second has driven out of the GPU.

    It comes at 20.0 and has them at 24.0; meanwhile the fourth is computed, which came after it.
    Without it the engine looks every millisecond, and sees them with the outcome of a step.
    """
    load = workload((0.0, 9, 1), (9.0, 25, 1), (20.0, 9, 1), (20.0, 3, 9))
    load.segments = [(("a", 9),), (("b", 25),), (("a", 9),), (("c", 3),)]
    log, _ = play(load, engine(), Clock())
    rows = {row["id"]: row for row in log.requests}
    assert rows[2]["cached"] == 8
    assert rows[3]["first_scheduled"] == 20.0
    assert rows[2]["first_scheduled"] >= 24.0
    assert [tuple(row)[1:] for row in log.loads.tolist()] == [(2, 2, 1, 0, 0)]


def test_who_leaves_while_blocks_come_frees_them_as_they_are_there() -> None:
    """Two blocks each, at 4.0 and at 8.0, whoever is the first to leave."""
    one = engine(blocks=12)
    requests = [Request(k, 0.0, 9, 1, segments=((k, 9),)) for k in range(2)]
    for request in requests:
        one.tier.take(known_hashes(request, 2, 4))
        one.add(request)
    one.schedule(0.0)
    for request in reversed(requests):
        one.cancel(request)
    held = []
    for now in (3.0, 4.5, 8.5):
        for when in (now, now + 0.001):  # it is heard of with the outcome of a step
            one.schedule(when)
        held.append(one.blocks.usable - one.blocks.free)
    assert held == [4, 2, 0]


@pytest.mark.parametrize(("blocks", "loading"), [(9, 0), (10, 2)])
def test_who_loads_leaves_room_for_prompts_under_way_and_the_watermark(blocks, loading) -> None:
    """A prompt of 5 blocks has 2 of them: 3 to come, 3 of the watermark and 2 to load are 8."""
    options = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "scheduler_reserve_full_isl": False}
    options |= {"long_prefill_token_threshold": 4, "watermark": 0.3}
    one = engine(blocks=blocks + 1, **options)
    known = Request(1, 0.0, 9, 1, segments=(("b", 9),))
    one.tier.take(known_hashes(known, 2, 4))
    one.add(Request(0, 0.0, 20, 1, segments=(("a", 20),)))
    one.commit(one.schedule(0.0), [1.0])
    one.add(known)
    one.schedule(1.0)
    assert len(one.tier.reading) == loading


@given(
    shared_beginnings(),
    *(st.integers(6, 14), st.sampled_from([Offloading, AsyncOffloading]), st.integers(1, 5)),
)
@settings(max_examples=60, deadline=None)
def test_leaps_change_nothing_and_nothing_is_left(load, blocks, kind, seats) -> None:
    logs = []
    for leap in (True, False):
        one = engine(kind, blocks + 8, max_num_seqs=seats)
        log, _ = play(load, one, Clock(), leap=leap)
        logs.append(log)
        assert one.blocks.free == one.blocks.usable
        assert one.kept_tokens == 0
        assert not one.waiting.holding
        assert not one.tier.reading
    assert logs[0].request_rows == logs[1].request_rows
    assert logs[0].load_rows == logs[1].load_rows
    assert _unroll(logs[0]) == _unroll(logs[1])
    assert len(logs[0].requests) == len(load)


def drafting(kind: type[HostDrafts], method: str, blocks: int, seats: int) -> HostDrafts:
    """Blocks of 4 tokens, and three drafts for each decode, of which half are accepted."""
    drafts = SpeculativeConfig(method=method, num_speculative_tokens=3, acceptance=0.5)
    manager = DraftBlocks(blocks, 4, True, HostTier(20, write_through=True))
    options = {"max_num_seqs": seats, "max_num_batched_tokens": 32, "max_model_len": 64}
    times = {"load_time": lambda n: 2.0 * n, "store_time": lambda n: 0.25 * n}
    return made(kind, manager, speculation=drafts, **options, **times)


@pytest.mark.parametrize("kind", [HostDrafts, AsyncHostDrafts])
@pytest.mark.parametrize("method", ["ngram", "eagle", "draft_model"])
def test_drafts_leave_nothing_behind(kind: type[HostDrafts], method: str) -> None:
    """Six prompts share beginnings, and one client leaves while its blocks come."""
    one = drafting(kind, method, blocks=24, seats=2)
    requests = [Request(k, 0.0, 21, 9, segments=((k % 3, 21),)) for k in range(6)]
    one.tier.take(known_hashes(requests[5], 5, 4))
    for request in reversed(requests):
        one.add(request)
    one.commit(one.schedule(0.0), [1.0])
    assert one.waiting.holding == {requests[5]: 10.0}
    one.cancel(requests[5])
    for now in range(1, 100):
        step = one.schedule(float(now))
        if step.decodes or step.prefills:
            one.commit(step, [now + 1.0])
    assert [request.generated for request in requests] == [9, 9, 9, 9, 9, 0]
    assert one.blocks.free == one.blocks.usable
    assert (one.kept_tokens, len(one.waiting), len(one.waiting.holding)) == (0, 0, 0)


@pytest.mark.parametrize("kind", [HostDrafts, AsyncHostDrafts])
def test_who_loads_again_and_leaves_is_forgotten(kind: type[HostDrafts]) -> None:
    """The second has 5 tokens when it is preempted; its client leaves as its blocks come back."""
    one = drafting(kind, "ngram", blocks=16, seats=3)
    requests = [Request(k, 0.0, 21, 20, segments=((k, 21),)) for k in range(4)]
    for request in requests:
        one.add(request)
    for now in range(200):
        step = one.schedule(float(now))
        if requests[1] in one.waiting.holding:
            one.cancel(requests[1])
        if step.decodes or step.prefills:
            one.commit(step, [now + 1.0])
    assert [request.generated for request in requests] == [20, 5, 20, 20]
    assert requests[1].preemptions == 1
    assert (one._drafted, one._streams, one.blocks.free) == ({}, {}, one.blocks.usable)


DRAFTS = "engine.speculative_config={num_speculative_tokens: 3, acceptance: 0.7, method: "


@pytest.mark.parametrize(
    "keys",
    [
        [DRAFTS + "ngram}"],
        [DRAFTS + "eagle}", "engine.version=0.32", "engine.async_scheduling=false"],
        [DRAFTS + "draft_model, draft: {fraction: 0.1}}", "engine.scheduling_policy=sjf"],
    ],
    ids=["ngram", "eagle", "draft_model"],
)
def test_a_run_verifies_drafts_beside_loads(keys: list[str]) -> None:
    """Drafts make answers faster, find no more blocks, and loads lengthen no step."""
    usual = [
        *("cluster=null", "workload.num_prompts=150", "engine.num_gpu_blocks_override=2500"),
        "engine.secondary_tiers=[]",
    ]
    scenario = load_scenario("what-if/kv-tiers", [*usual, *keys])
    leapt, stepped = (run(scenario, stepwise=stepwise) for stepwise in (False, True))
    assert leapt.requests.equals(stepped.requests)
    requests, told = leapt.requests, leapt.summary()
    plain = run(load_scenario("what-if/kv-tiers", usual)).summary()
    assert told["completed"] == 150
    assert told["headway"]["external_prefix_cache_hits"] > 0
    assert told["headway"]["loaded_blocks"] == requests["cached_tokens_host"].sum() // 64
    assert (requests["cached_tokens_host"] <= requests["cached_tokens"]).all()
    assert told["mean_tpot_ms"] < plain["mean_tpot_ms"]
    # The first draft is right with 0.7, the second with 0.49, the third with 0.343.
    assert told["spec_decode_acceptance_length"] == pytest.approx(2.533, abs=0.05)


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_a_run_loads_beside_its_steps(policy: str) -> None:
    """Loads make no step longer; what came from the host is no more than what was found."""
    keys = [
        *("cluster=null", "workload.num_prompts=300", "engine.num_gpu_blocks_override=4000"),
        *("engine.secondary_tiers=[]", f"engine.scheduling_policy={policy}"),
    ]
    scenario = load_scenario("what-if/kv-tiers", keys)
    leapt, stepped = (run(scenario, stepwise=stepwise) for stepwise in (False, True))
    assert leapt.requests.equals(stepped.requests)
    told = leapt.summary()["headway"]
    assert told["external_prefix_cache_hits"] > 0
    requests = leapt.requests
    assert (requests["cached_tokens_host"] <= requests["cached_tokens"]).all()
