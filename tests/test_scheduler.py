"""Schedules worked out by hand: every step takes 1 s, so times are step numbers."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.blocks import BlockCounter, BlockManager
from simulator.log import REASONS
from simulator.policies import SJF
from simulator.request import Request, Step
from simulator.scheduler import LONGEST_LEAP, Scheduler
from simulator.workload import Workload
from tests.engines import Clock, fcfs, play, workload


@dataclass
class Watch(Clock):
    """A clock that notes each step: tokens per prefilled request, and how many decode."""

    seen: list[tuple[dict[int, int], int]] = field(default_factory=list)

    def execute(self, step: Step) -> float:
        self.seen.append(({c.request.id: c.tokens for c in step.prefills}, step.decodes))
        return super().execute(step)


def steps(load: Workload, scheduler: Scheduler) -> list[tuple[dict[int, int], int]]:
    """Run stepwise; return the prefill tokens by request and the decodes of each step."""
    watch = Watch()
    play(load, scheduler, watch, leap=False)
    return watch.seen


# ---------------------------------------------------------------- budget and chunks


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    """25 tokens at 10 a step; the last chunk brings out the first token."""
    log, _ = play(workload((0, 25, 3)), fcfs(max_num_batched_tokens=10, max_num_seqs=4))
    row = log.requests[0]
    assert (row["first_scheduled"], row["first_token"], row["finish"]) == (0, 3, 5)
    assert steps(workload((0, 25, 3)), fcfs(max_num_batched_tokens=10, max_num_seqs=4)) == [
        ({0: 10}, 0),
        ({0: 10}, 0),
        ({0: 5}, 0),
        ({}, 1),
        ({}, 1),
    ]


def test_decodes_come_first_and_prefills_share_what_they_leave() -> None:
    """Budget 8: the decode takes 1 of it, the prompt of 20 takes 7, 7 and 6."""
    load = workload((0, 4, 6), (0.5, 20, 2))
    assert steps(load, fcfs(max_num_batched_tokens=8, max_num_seqs=4)) == [
        ({0: 4}, 0),
        ({1: 7}, 1),
        ({1: 7}, 1),
        ({1: 6}, 1),
        ({}, 2),
        ({}, 1),
    ]


def test_the_rest_of_a_budget_goes_to_the_next_in_line() -> None:
    """3 and 3 of 8 leave 2 for the prompt of 5; in the next step two decodes, then its rest."""
    load = workload((0, 3, 2), (0, 3, 2), (0, 5, 2), (0, 4, 1))
    assert steps(load, fcfs(max_num_batched_tokens=8, max_num_seqs=4)) == [
        ({0: 3, 1: 3, 2: 2}, 0),
        ({2: 3, 3: 3}, 2),
        ({3: 1}, 1),
    ]


def test_decodes_leave_a_prefill_one_token_a_step() -> None:
    """Budget 3: two decodes leave one token a step for the third prompt."""
    load = workload((0, 1, 3), (0, 1, 5), (0, 4, 1))
    assert steps(load, fcfs(max_num_batched_tokens=3, max_num_seqs=3)) == [
        ({0: 1, 1: 1, 2: 1}, 0),
        ({2: 1}, 2),
        ({2: 1}, 2),
        ({2: 1}, 1),
        ({}, 1),
    ]


def test_no_more_run_than_there_are_seats() -> None:
    """Two seats; the third boards in the step after one has ended."""
    load = workload((0, 2, 2), (0, 2, 4), (0, 2, 2))
    assert steps(load, fcfs(max_num_seqs=2)) == [
        ({0: 2, 1: 2}, 0),
        ({}, 2),
        ({2: 2}, 1),
        ({}, 2),
    ]


# ---------------------------------------------------------------- who boards


def test_nobody_overtakes_a_head_that_does_not_fit() -> None:
    """6 blocks of 4, 4 of them taken: the head needs 3, so the small one behind waits too."""
    load = workload((0, 16, 3), (0, 12, 1), (0, 4, 1))
    scheduler = fcfs(num_blocks=7, max_num_batched_tokens=64, max_num_seqs=4)
    assert steps(load, scheduler) == [({0: 16}, 0), ({}, 1), ({}, 1), ({1: 12, 2: 4}, 0)]


def test_without_chunked_prefill_a_prompt_boards_whole_or_not_at_all() -> None:
    """Budget 8: a prompt of 8 does not fit beside a decode, and the one of 2 behind it waits."""
    load = workload((0, 4, 3), (0.5, 8, 1), (0.5, 2, 1))
    scheduler = fcfs(max_num_batched_tokens=8, max_num_seqs=4, enable_chunked_prefill=False)
    assert steps(load, scheduler) == [({0: 4}, 0), ({}, 1), ({}, 1), ({1: 8}, 0), ({2: 2}, 0)]


def test_without_chunked_prefill_a_prompt_that_fills_the_rest_boards() -> None:
    """7 beside one decode is just the budget of 8."""
    load = workload((0, 4, 3), (0.5, 7, 1))
    scheduler = fcfs(max_num_batched_tokens=8, max_num_seqs=4, enable_chunked_prefill=False)
    assert steps(load, scheduler) == [({0: 4}, 0), ({1: 7}, 1), ({}, 1)]


def test_a_whole_prompt_must_fit_though_only_a_chunk_is_taken() -> None:
    """scheduler_reserve_full_isl: 4 blocks free, 5 needed in the end, 2 for the first chunk."""
    load = workload((0, 16, 4), (0, 20, 1))
    options = {"num_blocks": 9, "max_num_batched_tokens": 8, "max_num_seqs": 4}
    assert steps(load, fcfs(**options)) == [
        ({0: 8}, 0),
        ({0: 8}, 0),
        ({}, 1),
        ({}, 1),
        ({}, 1),
        ({1: 8}, 0),
        ({1: 8}, 0),
        ({1: 4}, 0),
    ]


def test_without_the_reservation_a_prompt_boards_with_room_for_a_chunk() -> None:
    """In the case above: it boards at once, preempts itself at its second chunk, boards again."""
    load = workload((0, 16, 4), (0, 20, 1))
    scheduler = fcfs(
        num_blocks=9, max_num_batched_tokens=8, max_num_seqs=4, scheduler_reserve_full_isl=False
    )
    assert steps(load, scheduler) == [
        ({0: 8}, 0),
        ({0: 8}, 0),
        ({1: 7}, 1),
        ({}, 1),
        ({1: 7}, 1),
        ({1: 8}, 0),
        ({1: 5}, 0),
    ]


def test_a_reserved_prompt_is_only_a_test() -> None:
    """Nothing is set aside: two prompts of 5 blocks board in one step though 8 are there."""
    load = workload((0, 20, 1), (0, 20, 1))
    scheduler = fcfs(num_blocks=9, max_num_batched_tokens=24, max_num_seqs=4)
    assert steps(load, scheduler)[0] == ({0: 20}, 0)  # 5 of 8 are taken at once
    scheduler = fcfs(
        num_blocks=9, max_num_batched_tokens=12, long_prefill_token_threshold=4, max_num_seqs=4
    )
    assert steps(load, scheduler)[0] == ({0: 4, 1: 4}, 0)


def test_the_watermark_is_kept_free_at_admission() -> None:
    """20 blocks, 4 of them (a fifth of 20) stay free when somebody runs; 15 are there to take."""
    options = {"num_blocks": 20, "watermark": 0.2, "max_num_seqs": 4}
    load = workload((0, 16, 2), (0, 44, 1), (0, 4, 1))
    assert steps(load, fcfs(**options))[0] == ({0: 16, 1: 44}, 0)  # 4 + 11 + 4 = 19
    load = workload((0, 16, 2), (0, 45, 1), (0, 4, 1))
    assert steps(load, fcfs(**options)) == [({0: 16}, 0), ({}, 1), ({1: 45, 2: 4}, 0)]


def test_the_watermark_counts_the_null_block_and_is_rounded_down() -> None:
    """vLLM: int(watermark x num_gpu_blocks)."""
    assert fcfs(num_blocks=10, watermark=0.1).watermark_blocks == 1
    assert fcfs(num_blocks=10, watermark=0.19).watermark_blocks == 1
    assert fcfs(num_blocks=10, watermark=0.2).watermark_blocks == 2


def test_an_empty_engine_knows_no_watermark_nor_do_the_running() -> None:
    """A prompt of all but one block boards alone, and grows into the watermark."""
    load = workload((0, 72, 5))
    assert len(steps(load, fcfs(num_blocks=20, watermark=0.5))) == 5


def test_shortest_job_first_boards_by_prompt() -> None:
    """One seat: 2, 5 and 9, whatever came first; equals in order of arrival."""
    load = workload((0, 9, 1), (0, 5, 1), (0, 2, 1), (0, 5, 1))
    order = steps(load, fcfs(policy=SJF(), max_num_seqs=1))
    assert [list(prefills) for prefills, _ in order] == [[2], [1], [3], [0]]


def test_a_shorter_newcomer_becomes_the_head() -> None:
    """It is asked whether the next step may differ: only for a new head and a free seat."""
    scheduler = fcfs(policy=SJF(), max_num_seqs=2)
    assert scheduler.add(Request(0, 0.0, 5, 9))
    assert not scheduler.add(Request(1, 1.0, 6, 9))
    assert scheduler.add(Request(2, 2.0, 4, 9))
    step = scheduler.schedule(0.0)
    assert [chunk.request.id for chunk in step.prefills] == [2, 0]
    assert not scheduler.add(Request(3, 3.0, 1, 9))  # no seat
    assert scheduler.waiting.head().id == 3


def test_first_come_first_served_only_the_head_may_change_the_next_step() -> None:
    """Whoever joins a queue behind others changes nothing."""
    scheduler = fcfs(max_num_seqs=2)
    assert scheduler.add(Request(0, 0.0, 5, 9))
    assert not scheduler.add(Request(1, 0.0, 5, 9))


# ---------------------------------------------------------------- the cap on long prefills


def test_long_prefills_are_capped_while_others_are_there() -> None:
    """Cap 4: both prompts advance side by side; the last one left is alone and has no cap."""
    load = workload((0, 18, 1), (0, 6, 1))
    scheduler = fcfs(long_prefill_token_threshold=4, max_num_batched_tokens=20, max_num_seqs=4)
    assert steps(load, scheduler) == [({0: 4, 1: 4}, 0), ({0: 4, 1: 2}, 0), ({0: 10}, 0)]


def test_a_request_that_waits_also_lifts_nobodys_cap() -> None:
    """One runs, one waits for the seat: two in the engine, the cap holds."""
    load = workload((0, 9, 1), (0, 6, 1))
    scheduler = fcfs(long_prefill_token_threshold=4, max_num_seqs=1)
    assert steps(load, scheduler) == [({0: 4}, 0), ({0: 4}, 0), ({0: 1}, 0), ({1: 6}, 0)]


def test_the_cap_comes_back_when_a_second_request_arrives() -> None:
    """Alone it gets the budget of 8, then 3."""
    load = workload((0, 20, 1), (0.5, 2, 1))
    scheduler = fcfs(long_prefill_token_threshold=3, max_num_batched_tokens=8, max_num_seqs=4)
    assert steps(load, scheduler) == [({0: 8}, 0), ({0: 3, 1: 2}, 0), ({0: 8}, 0), ({0: 1}, 0)]


def test_decodes_behind_a_capped_prefill_go_on() -> None:
    """The short ones board behind the long one and end before it."""
    load = workload((0, 20, 1), (0, 2, 3), (0, 1, 2))
    scheduler = fcfs(long_prefill_token_threshold=4, max_num_batched_tokens=7, max_num_seqs=4)
    assert steps(load, scheduler) == [
        ({0: 4, 1: 2, 2: 1}, 0),
        ({0: 4}, 2),
        ({0: 4}, 1),
        ({0: 7}, 0),
        ({0: 1}, 0),
    ]


# ---------------------------------------------------------------- preemption


@pytest.mark.parametrize("blocks", [BlockCounter, lambda n, s: BlockManager(n, s, False)])
def test_the_last_admitted_is_preempted_and_computed_again(blocks) -> None:
    """5 blocks of 4, both prompts take two; at the second decode both need a third.

    The second goes back with 2 tokens out and computes 8 + 2 anew once the first has ended; in
    the step of the preemption nobody boards though 2 blocks are free.
    """
    load = workload((0, 7, 6), (0, 7, 5), (0, 1, 1))
    scheduler = Scheduler(blocks(6, 4), max_num_seqs=2)
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
    log, _ = play(load, Scheduler(blocks(6, 4), max_num_seqs=2), leap=False)
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
    log, _ = play(load, Scheduler(blocks, max_num_seqs=2), leap=leap)
    assert log.steps["prefill_tokens"].tolist()[-1] == 5
    assert log.requests.tolist() == [(0, 1, 6, 0, 0, 0, 6, 0), (0, 1, 7, 1, 1, 0, 6, 0)]


def test_two_victims_that_return_at_once_end_once_each() -> None:
    """Where blocks have names the set is dissolved; a tick later both are back, on new seats."""
    load = workload(
        (0, 20, 11), (0, 20, 1), (1, 5, 11), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1), (9, 1, 9)
    )
    for usable in range(30, 60):
        scheduler = Scheduler(
            BlockManager(usable + 1, 1, prefix_caching=False),
            policy=SJF(),
            max_num_seqs=3,
            max_num_batched_tokens=10,
            scheduler_reserve_full_isl=False,
        )
        log, _ = play(load, scheduler, leap=False)
        assert sorted(log.requests["id"].tolist()) == list(range(8))
        assert log.requests["generated"].sum() == load.output_tokens.sum()


# ---------------------------------------------------------------- limits of a request


def test_a_request_is_cut_at_max_model_len() -> None:
    """Prompt 6 of 10: four tokens come out; the reason is the length."""
    load = workload((0, 6, 100), (0, 6, 4), (0, 6, 3))
    log, _ = play(load, fcfs(max_model_len=10))
    rows = sorted(log.requests.tolist(), key=lambda row: row[3])
    assert [(row[6], REASONS[row[7]]) for row in rows] == [(4, "length"), (4, "stop"), (3, "stop")]


def test_a_prompt_that_leaves_no_room_to_answer_is_rejected() -> None:
    """vLLM refuses prompt >= max_model_len."""
    scheduler = fcfs(max_model_len=10)
    assert [scheduler.fits(Request(0, 0.0, tokens, 5)) for tokens in (9, 10, 11)] == [
        True,
        False,
        False,
    ]


def test_a_request_that_outgrows_the_cache_is_rejected() -> None:
    """2 blocks of 4: 8 tokens are computed at most, one more comes out."""
    scheduler = fcfs(num_blocks=3)
    assert [scheduler.fits(Request(0, 0.0, 4, output)) for output in (4, 5, 6)] == [
        True,
        True,
        False,
    ]
    cut = fcfs(num_blocks=3, max_model_len=9)
    assert cut.fits(Request(0, 0.0, 4, 1000))
    assert not fcfs(num_blocks=3, max_model_len=10).fits(Request(0, 0.0, 4, 1000))


def test_without_chunked_prefill_a_prompt_over_the_budget_is_rejected() -> None:
    """With it, it boards in chunks."""
    options = {"max_num_batched_tokens": 8, "max_num_seqs": 4}
    whole = fcfs(enable_chunked_prefill=False, **options)
    assert [whole.fits(Request(0, 0.0, tokens, 1)) for tokens in (8, 9)] == [True, False]
    assert fcfs(**options).fits(Request(0, 0.0, 9, 1))


def test_a_rejected_request_is_written_down_and_nothing_else_happens() -> None:
    """Its times are -1."""
    log, client = play(workload((0.5, 99, 1)), fcfs(max_model_len=10))
    assert log.requests.tolist() == [(-1.0, -1.0, -1.0, 0, 0, 0, 0, REASONS.index("rejected"))]
    assert (len(log.steps), client.done) == (0, 1)


def test_without_chunked_prefill_a_resumed_request_over_the_budget_does_not_hang() -> None:
    """Preempted with 9 known tokens under a budget of 6: it must still end, as all others do."""
    scheduler = fcfs(
        num_blocks=8,
        block_size=2,
        max_num_seqs=4,
        max_num_batched_tokens=6,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=7,
    )
    load = workload((0, 3, 9), (0, 3, 9), (0.5, 1, 1), (0.5, 1, 9))
    log, _ = play(load, scheduler)
    assert log.requests["generated"].sum() == load.output_tokens.sum()


@pytest.mark.parametrize(("seats", "budget"), [(0, 5), (6, 5)])
def test_a_budget_below_the_seats_is_refused(seats: int, budget: int) -> None:
    """As vLLM does; as many tokens as seats will do."""
    with pytest.raises(ValueError, match="must be >= max_num_seqs"):
        fcfs(max_num_seqs=seats, max_num_batched_tokens=budget)
    fcfs(max_num_seqs=5, max_num_batched_tokens=5)


# ---------------------------------------------------------------- the leap


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
    named = Scheduler(BlockManager(4, 4, prefix_caching=True), max_num_seqs=2)
    assert named.horizon(started(named, (4, 9), (12, 9))) == 1


def test_an_answer_in_progress_may_let_the_head_of_the_queue_fit() -> None:
    """The waiting prompt of 6 blocks goes on with what the running request says.

    It fits in the one step in which all blocks of the running request are full, and hit.
    """
    rows = []
    for leap in (True, False):
        load = workload((0, 4, 20), (1, 24, 1))
        load.segments = [(("a", 4),), (("a", 4), (("out", 0), 20))]
        scheduler = Scheduler(BlockManager(7, 4, prefix_caching=True), max_num_seqs=2)
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
        scheduler = Scheduler(blocks, max_num_seqs=3, scheduler_reserve_full_isl=reserve)
        logs.append(play(load, scheduler, leap=leap)[0])
    assert logs[0].requests.tolist() == logs[1].requests.tolist()
    assert logs[0].tick_ends == logs[1].tick_ends
