"""How far a step is sure to repeat itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.alarm import FastEnvironment
from simulator.core.request import Request, Step
from simulator.engine.replica import make_replica
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.kv_cache.radix_cache import RadixCache
from simulator.kv_cache.unshared_prefix_cache import UnsharedPrefixCache
from simulator.schedulers.interface import LONGEST_LEAP
from simulator.schedulers.sglang.overlap import OverlappedSgLang
from simulator.schedulers.sglang.scheduler import SgLang
from simulator.schedulers.trtllm import POLICIES, TrtLlm
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload
from tests.engine.test_laws import assert_same_steps
from tests.support.engines import Clock, fcfs, made, play, workload
from tests.support.single_steps import expand_steps


def started(scheduler: Scheduler, *requests: tuple[int, int]) -> Step:
    """Compute prompts of (prompt, output) in one step and schedule the next."""
    for id, (prompt, output) in enumerate(requests):
        scheduler.add(Request(id, 0.0, prompt, output))
    step = scheduler.schedule(0.0)
    assert scheduler.horizon(step) == 1
    scheduler.commit(step, [1.0])
    return scheduler.schedule(1.0)


def test_a_leap_ends_with_the_first_who_ends() -> None:
    """9, 5 and 7 tokens: after the first one each, 4 steps are sure."""
    scheduler = fcfs()
    step = started(scheduler, (4, 9), (4, 5), (4, 7))
    assert scheduler.horizon(step) == 4
    over = scheduler.commit(step, [2.0, 3.0, 4.0, 5.0])
    assert [(request.id, request.finish) for request in over] == [(1, 5.0)]
    assert scheduler.horizon(scheduler.schedule(5.0)) == 2


def test_a_leap_has_a_longest() -> None:
    """An arrival that cuts it should not throw away more than that."""
    scheduler = fcfs()
    assert scheduler.horizon(started(scheduler, (4, 9999))) == LONGEST_LEAP == 256


def test_a_leap_ends_before_blocks_are_short() -> None:
    """7 blocks of 4, prompts of 4 and 3: they take blocks at ticks 0, 1, 4, 5, 8; 9 is too much."""
    scheduler = fcfs(num_blocks=8)
    step = started(scheduler, (4, 99), (3, 99))
    assert scheduler.blocks.free == 4
    assert scheduler.horizon(step) == 9
    assert scheduler.commit(step, [2.0 + i for i in range(9)]) == []
    assert scheduler.blocks.free == 0
    scheduler.schedule(11.0)
    assert scheduler.preempted == 1


def test_nothing_is_leapt_while_a_prompt_is_computed() -> None:
    """Neither in the step of a chunk nor in one where part of a prompt is left over."""
    scheduler = fcfs(max_num_batched_tokens=4, max_num_seqs=4)
    step = started(scheduler, (3, 9), (20, 9))
    assert step.decodes == 1
    assert len(step.prefills) == 1
    assert scheduler.horizon(step) == 1


def test_nothing_is_leapt_in_a_step_with_a_preemption() -> None:
    """The next step may admit again."""
    scheduler = fcfs(num_blocks=3, max_num_seqs=2)
    step = started(scheduler, (4, 5), (4, 5))
    assert (scheduler.preempted, step.decodes) == (1, 1)
    assert scheduler.horizon(step) == 1
    scheduler.commit(step, [2.0])
    step = scheduler.schedule(2.0)
    assert (scheduler.preempted, len(scheduler.waiting)) == (0, 1)
    assert scheduler.horizon(step) == 3


def test_a_queue_stops_the_leap_only_where_blocks_are_shared() -> None:
    """Counted blocks only get fewer; named ones may be registered and let the head fit."""
    counted = fcfs(num_blocks=4, max_num_seqs=2)
    assert counted.horizon(started(counted, (4, 9), (12, 9))) == 8
    named = made(Scheduler, BlockManager(4, 4, prefix_caching=True), max_num_seqs=2)
    assert named.horizon(started(named, (4, 9), (12, 9))) == 1
    own = made(Scheduler, UnsharedPrefixCache(4, 4), max_num_seqs=2)
    assert own.horizon(started(own, (4, 9), (12, 9))) == 8


@pytest.mark.parametrize(("order", "steps"), [("lpm", 8), ("hrrn", 1)])
def test_sglang_leaps_unless_its_order_counts_the_steps(order: str, steps: int) -> None:
    scheduler = made(SgLang, RadixCache(90, 4), order=order, max_model_len=60)
    assert scheduler.horizon(started(scheduler, (4, 9), (4, 9))) == steps


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_cache_of_own_blocks_does_not_stop_the_leap(policy: str) -> None:
    """Of 7 blocks of 4 one request takes 2, which become 4; the other needs 6 for its prompt."""
    scheduler = made(
        TrtLlm,
        UnsharedPrefixCache(8, 4),
        capacity_scheduler_policy=policy,
        max_new_tokens="exact",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
    )
    step = started(scheduler, (8, 9), (21, 5))
    assert (step.decodes, len(scheduler.waiting)) == (1, 1)
    assert scheduler.horizon(step) == 8


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
@pytest.mark.parametrize("whole", [True, False])
def test_who_waits_for_room_with_blocks_of_its_own_in_the_cache(kind, whole: bool) -> None:
    """6 blocks of 2 and two requests of 4 tokens: one goes for the other's fourth block.

    It could find the three blocks that it leaves again, but the other takes them one by one. Until
    that has ended nothing but decodes happens.
    """
    load, logs = workload((0, 4, 9), (0, 4, 9)), []
    for leap in (True, False):
        options = {"max_num_seqs": 2, "scheduler_reserve_full_isl": whole}
        logs.append(play(load, made(kind, UnsharedPrefixCache(7, 2), **options), leap=leap)[0])
    leapt, stepped = logs
    assert leapt.requests.tolist() == stepped.requests.tolist()
    assert_same_steps(leapt, stepped)
    waits = leapt.steps[leapt.steps["waiting"] > 0]
    assert waits["steps"].max() > 1


def test_a_leap_ends_where_the_head_of_the_queue_may_lose_what_it_finds_in_a_tree() -> None:
    """10 blocks of 1. From 4 s on the head, of 7 known tokens, finds 4 of them in the tree, which
    may go as a whole when who runs takes a block: each step is taken by itself.
    """
    load = workload((0, 1, 7), (0, 5, 3), (0, 1, 2))
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 5, "max_model_len": 64}
    leapt, stepped = (
        play(
            load,
            made(Scheduler, RadixCache(11, 1), scheduler_reserve_full_isl=False, **limits),
            leap=leap,
        )[0]
        for leap in (True, False)
    )
    assert leapt.requests.tolist() == stepped.requests.tolist()
    assert_same_steps(leapt, stepped)
    waits = leapt.steps[(leapt.steps["start"] >= 4) & (leapt.steps["waiting"] > 0)]
    assert set(waits["steps"]) == {1}


def test_a_tree_does_not_stop_the_leap_where_whole_prompts_must_fit() -> None:
    """What is not locked is free, found or not: the head lacks no less when it has gone."""
    whole = made(Scheduler, RadixCache(4, 4), max_num_seqs=2)
    assert whole.horizon(started(whole, (4, 9), (12, 9))) == 8
    chunks = made(
        Scheduler,
        RadixCache(4, 4),
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=64,
        scheduler_reserve_full_isl=False,
    )
    assert chunks.horizon(started(chunks, (4, 9), (12, 9))) == 1


def test_an_answer_in_progress_may_let_the_head_of_the_queue_fit() -> None:
    """The waiting prompt of 6 blocks goes on with what the running request says.

    It fits in the one step in which all blocks of the running request are full, and hit.
    """
    rows = []
    for leap in (True, False):
        load = workload((0, 4, 20), (1, 24, 1))
        load.segments = [(("a", 4),), (("a", 4), (("out", 0), 20))]
        scheduler = made(Scheduler, BlockManager(7, 4, prefix_caching=True), max_num_seqs=2)
        log, _ = play(load, scheduler, leap=leap)
        rows.append(log.requests.tolist())
    assert rows[0] == rows[1]
    assert rows[0][0] == (4, 5, 5, 1, 0, 8, 1, 0)


@st.composite
def quoting(draw: st.DrawFn) -> Workload:
    """Up to 4 requests, each of which may go on with what an earlier one says."""
    rows, segments = [], []
    for i in range(draw(st.integers(2, 4))):
        parts = [(("in", i), draw(st.integers(1, 6)))]
        if i and draw(st.sampled_from([True, True, False])):
            earlier = draw(st.integers(0, i - 1))
            said = (("out", earlier), draw(st.integers(1, 16)))
            parts = [*segments[earlier], said, *parts[: draw(st.integers(0, 1))]]
        segments.append(tuple(parts))
        rows.append(
            (i / 2, sum(n for _, n in parts), draw(st.sampled_from([1, 1, 1, 6])) if i else 20)
        )
    return workload(*rows, segments=segments)


@given(quoting(), st.sampled_from([0, 0, 1]), st.sampled_from([1, 2, 4]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_those_who_quote_board_in_leaps_as_stepwise(load, spare, size, reserve) -> None:
    """Hardly more memory than the largest needs; prompts hit what is being generated."""
    tokens = int((load.prompt_tokens + load.output_tokens - 1).max())
    logs = []
    for leap in (True, False):
        blocks = BlockManager(-(-tokens // size) + spare + 1, size, prefix_caching=True)
        scheduler = made(Scheduler, blocks, max_num_seqs=3, scheduler_reserve_full_isl=reserve)
        logs.append(play(load, scheduler, leap=leap)[0])
    assert logs[0].requests.tolist() == logs[1].requests.tolist()
    assert logs[0].tick_ends == logs[1].tick_ends


@pytest.mark.parametrize("kind", [AsyncScheduler, OverlappedSgLang])
def test_a_leap_that_a_failure_breaks_off_tells_the_blocks_of_its_steps(kind: type) -> None:
    """A prompt of 4 and blocks of 4: a token in the third from step 6 on, as without leaps."""
    used = []
    for leap in (True, False):
        env = FastEnvironment()
        replica = make_replica(env, kind(BlockCounter(99, 4)), Clock(), leap=leap)
        replica.submit(Request(0, 0.0, 4, 40))
        env.run(until=7.5)
        replica.crash(kind(BlockCounter(99, 4)))
        used.append(expand_steps(replica.log)["kv_blocks_used"].tolist())
    assert used[0] == used[1] == [1, 2, 2, 2, 2, 3, 3]
