"""Preemption by recompute, worked out by hand: every step takes 1 s, so times are step numbers."""

import numpy as np
import pytest

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.policies.orders import SJF, Priority
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.schedulers.test_scheduler import steps
from tests.support.engines import Clock, fcfs, made, play, workload


@pytest.mark.parametrize("blocks", [BlockCounter, lambda n, s: BlockManager(n, s, False)])
def test_the_last_admitted_is_preempted_and_computed_again(blocks) -> None:
    """5 blocks of 4, both prompts take two; at the second decode both need a third.

    The second goes back with 2 tokens out and computes 8 + 2 anew once the first has ended; in
    the step of the preemption nobody boards though 2 blocks are free.
    """
    load = workload((0, 7, 6), (0, 7, 5), (0, 1, 1))
    scheduler = made(Scheduler, blocks(6, 4), max_num_seqs=2)
    assert steps(load, scheduler) == [
        ({0: 7, 1: 7}, 0),
        ({}, 2),
        ({}, 1),
        ({}, 1),
        ({}, 1),
        ({}, 1),
        ({1: 9, 2: 1}, 0),
        ({}, 1),
        ({}, 1),
    ]
    log, _ = play(load, made(Scheduler, blocks(6, 4), max_num_seqs=2), leap=False)
    assert log.steps["preempted"].tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert log.steps["waiting"].tolist() == [1, 1, 2, 2, 2, 2, 0, 0, 0]
    assert log.steps["blocks_used"].tolist() == [4, 4, 3, 3, 3, 3, 4, 3, 3]
    assert log.requests["id"].tolist() == [0, 2, 1]
    assert log.requests["preemptions"].tolist() == [0, 0, 1]
    assert log.requests["first_scheduled"].tolist() == [0, 6, 0]


def test_the_runs_of_a_preempted_request_tell_when_its_tokens_came() -> None:
    """Two tokens before it goes, at 1 and 2 s; three after it is back, from 7 s on."""
    log, _ = play(workload((0, 7, 6), (0, 7, 5), (0, 1, 1)), fcfs(num_blocks=6, max_num_seqs=2))
    assert log.tick_ends.tolist() == [2, 3, 4, 5, 6, 8, 9]
    assert log.runs.tolist() == [(1, 1, 0, 1), (1, 0, 0, 5), (7, 2, 5, 0), (7, 1, 5, 2)]


def test_the_first_token_stays_the_first() -> None:
    """As above, with steps of a tenth of a second."""
    load, engine = workload((0, 7, 6), (0, 7, 5)), fcfs(num_blocks=6, max_num_seqs=2)
    log, _ = play(load, engine, Clock(0.1))
    assert log.requests["preemptions"].tolist() == [0, 1]
    assert log.requests["first_token"].tolist() == [0.1, 0.1]


def test_a_preempted_request_is_resumed_before_those_who_wait() -> None:
    """It goes to the front of the queue."""
    load = workload((0, 4, 12), (0, 4, 3), (0, 4, 3), (0, 4, 1))
    assert steps(load, fcfs(num_blocks=5, max_num_seqs=3))[:6] == [
        ({0: 4, 1: 4, 2: 4}, 0),
        ({}, 2),  # of 4 blocks one is free and each needs a second: request 2 leaves
        ({}, 2),
        ({2: 5}, 1),
        ({}, 2),
        ({3: 4}, 1),
    ]


def test_several_victims_of_one_step_keep_their_order() -> None:
    """Three leave in one step; they come back before the newcomer, first admitted first."""
    scheduler = fcfs(num_blocks=5, block_size=2, max_num_seqs=8, max_num_batched_tokens=8)
    for id, tokens in enumerate((2, 2, 2, 2)):
        scheduler.add(Request(id, 0.0, tokens, 5))
    step = scheduler.schedule(0.0)
    assert len(step.prefills) == 4
    scheduler.commit(step, [1.0])
    scheduler.add(Request(4, 1.0, 2, 5))
    step = scheduler.schedule(1.0)
    assert (step.decodes, scheduler.preempted, scheduler.blocks.free) == (2, 2, 0)
    assert [request.id for request in scheduler.running] == [0, 1]
    order = []
    while scheduler.waiting:
        order.append(scheduler.waiting.take().id)
    assert order == [2, 3, 4]


def test_a_prefill_in_progress_is_preempted_like_any_other() -> None:
    """The decode needs a block; the prompt behind it, half computed, loses what it has."""
    load = workload((0, 4, 9), (0, 12, 1))
    scheduler = fcfs(
        num_blocks=4, max_num_batched_tokens=8, max_num_seqs=2, scheduler_reserve_full_isl=False
    )
    # Of 3 blocks the decode soon has two: one is left, and a chunk of 7 takes two.
    assert steps(load, scheduler) == [
        ({0: 4, 1: 4}, 0),
        *[({}, 1)] * 8,
        ({1: 8}, 0),
        ({1: 4}, 0),
    ]


def test_a_victim_that_asks_for_too_much_preempts_itself() -> None:
    """The last of the list needs a block and there is none: it leaves, the others go on."""
    load = workload((0, 3, 4), (0, 4, 4))
    scheduler = fcfs(num_blocks=3, max_num_seqs=2)
    assert steps(load, scheduler) == [
        ({0: 3, 1: 4}, 0),
        ({}, 1),  # request 1 is at the end of its block
        ({}, 1),
        ({}, 1),
        ({1: 5}, 0),
        ({}, 1),
        ({}, 1),
    ]


@pytest.mark.parametrize("leap", [True, False])
def test_a_preempted_request_finds_its_blocks_in_the_prefix_cache(leap: bool) -> None:
    """6 blocks of 4, two prompts of 8: at 13 tokens both need a fourth block.

    Request 0 takes the last of the three that its victim has left, so 8 of the 13 are found.
    """
    blocks = BlockManager(7, 4, prefix_caching=True)
    load = workload((0, 8, 6), (0, 8, 6))
    log, _ = play(load, made(Scheduler, blocks, max_num_seqs=2), leap=leap)
    assert log.steps["prefill_tokens"].tolist()[-1] == 5
    assert log.requests.tolist() == [(0, 1, 6, 0, 0, 0, 6, 0), (0, 1, 7, 1, 1, 0, 6, 0)]


def test_blocks_are_taken_before_the_victim_behind_leaves_its_own() -> None:
    """4 blocks, one of them idle and cached: the decode takes it and so evicts it.

    Only then the prompt behind finds no blocks and leaves; its half-full block would else have
    been taken first.
    """
    scheduler = made(
        Scheduler,
        BlockManager(5, 4, prefix_caching=True),
        max_num_seqs=3,
        max_num_batched_tokens=14,
        scheduler_reserve_full_isl=False,
    )
    cached = (("x", 4),)
    scheduler.add(Request(0, 0.0, 4, 1, segments=cached))
    scheduler.add(Request(1, 0.0, 4, 9))
    scheduler.add(Request(2, 0.0, 14, 1))
    over = scheduler.commit(scheduler.schedule(0.0), [1.0])
    assert [request.id for request in over] == [0]
    assert (scheduler.blocks.free, scheduler.blocks.hashed) == (1, 3)
    step = scheduler.schedule(1.0)
    assert (step.decodes, scheduler.preempted, scheduler.blocks.free) == (1, 1, 2)
    assert scheduler.blocks.hashed == 2
    assert not scheduler.blocks.match(Request(3, 1.0, 5, 1, segments=(*cached, ("y", 1))))


def test_the_tokens_of_a_victim_go_back_to_the_budget() -> None:
    """By priority request 0 leaves, though it stands in front and has its token of this step.

    12 blocks of one token, a budget of 6, chunks of 4 at most: request 1 takes 4 for want of
    which 0 goes, and 2 of 6 are left for request 2.
    """
    load = workload((0, 2, 9), (0.5, 12, 1), (0.5, 10, 1), priority=np.array([2, 0, 1]))
    scheduler = fcfs(
        num_blocks=13,
        block_size=1,
        policy=Priority(),
        max_num_seqs=3,
        max_num_batched_tokens=6,
        long_prefill_token_threshold=4,
        scheduler_reserve_full_isl=False,
    )
    assert steps(load, scheduler)[:3] == [
        ({0: 2}, 0),
        ({1: 4, 2: 1}, 1),
        ({1: 4, 2: 2}, 0),
    ]


def test_two_victims_that_return_at_once_end_once_each() -> None:
    """Where blocks have names the set is dissolved; a tick later both are back, on new seats."""
    load = workload(
        (0, 20, 11), (0, 20, 1), (1, 5, 11), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1), (9, 1, 9)
    )
    scheduler = made(
        Scheduler,
        BlockManager(37, 1, prefix_caching=False),
        policy=SJF(),
        max_num_seqs=3,
        max_num_batched_tokens=10,
        scheduler_reserve_full_isl=False,
    )
    log, _ = play(load, scheduler, leap=False)
    assert (log.requests["preemptions"] > 0).sum() == 2
    assert sorted(log.requests["id"].tolist()) == list(range(8))
    assert log.requests["generated"].sum() == load.output_tokens.sum()
