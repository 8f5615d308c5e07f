"""Schedules worked out by hand: every step takes 1 s, so times are step numbers."""

from dataclasses import dataclass, field

import pytest

from simulator.core.executor import Timing
from simulator.core.log import REASONS
from simulator.core.request import Request, Step
from simulator.policies.orders import SJF, Priority
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload
from tests.support.engines import Clock, fcfs, play, workload


@dataclass
class Watch(Clock):
    """A clock that notes each step: tokens per prefilled request, and how many decode."""

    seen: list[tuple[dict[int, int], int]] = field(default_factory=list)

    def execute(self, step: Step) -> Timing:
        self.seen.append(({c.request.id: c.tokens for c in step.prefills}, step.decodes))
        return super().execute(step)


def steps(load: Workload, scheduler: Scheduler) -> list[tuple[dict[int, int], int]]:
    """Run stepwise; return the prefill tokens by request and the decodes of each step."""
    watch = Watch()
    play(load, scheduler, watch, leap=False)
    return watch.seen


def whole(max_num_batched_tokens: int) -> Scheduler:
    """An engine that computes prompts in one piece."""
    return fcfs(
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_num_batched_tokens,
        enable_chunked_prefill=False,
    )


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
    """Budget 8: a prompt of 7 does not fit beside 2 decodes, and the one of 2 behind it waits."""
    load = workload((0, 4, 3), (0, 4, 3), (0.5, 7, 1), (0.5, 2, 1))
    scheduler = whole(max_num_batched_tokens=8)
    assert steps(load, scheduler) == [
        ({0: 4, 1: 4}, 0),
        ({}, 2),
        ({}, 2),
        ({2: 7}, 0),
        ({3: 2}, 0),
    ]


def test_without_chunked_prefill_a_prompt_that_fills_the_rest_boards() -> None:
    """7 beside one decode is just the budget of 8."""
    load = workload((0, 4, 3), (0.5, 7, 1))
    scheduler = whole(max_num_batched_tokens=8)
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
    assert fcfs(num_blocks=10, watermark=0.1).admission.watermark_blocks == 1
    assert fcfs(num_blocks=10, watermark=0.19).admission.watermark_blocks == 1
    assert fcfs(num_blocks=10, watermark=0.2).admission.watermark_blocks == 2


def test_an_empty_engine_knows_no_watermark_nor_do_the_running() -> None:
    """A prompt of all but one block boards alone, and grows into the watermark."""
    load = workload((0, 72, 5))
    assert len(steps(load, fcfs(num_blocks=20, watermark=0.5))) == 5


def test_shortest_job_first_boards_by_prompt() -> None:
    """One seat: 2, 5 and 9, whatever came first; equals in order of arrival."""
    load = workload((0, 9, 1), (0, 5, 1), (0, 2, 1), (0, 5, 1))
    order = steps(load, fcfs(policy=SJF(), max_num_seqs=1))
    assert [list(prefills) for prefills, _ in order] == [[2], [1], [3], [0]]


def test_equally_short_jobs_board_by_arrival() -> None:
    """Also one that comes back after a preemption: it arrived first."""
    scheduler = fcfs(policy=SJF(), max_num_seqs=2)
    scheduler.add(Request(0, 5.0, 4, 9))
    assert scheduler.add(Request(1, 1.0, 4, 9))
    scheduler.waiting.put_back(Request(2, 0.5, 4, 9))
    assert [scheduler.waiting.take().id for _ in range(3)] == [2, 1, 0]


def test_by_priority_the_smaller_number_boards_first_and_then_the_earlier() -> None:
    """Ties of both by id."""
    scheduler = fcfs(policy=Priority())
    for id, arrival, priority in ((0, 3.0, 1), (1, 2.0, 1), (4, 2.0, 1), (3, 2.0, 1), (2, 9.0, 0)):
        scheduler.add(Request(id, arrival, 4, 9, priority=priority))
    assert [scheduler.waiting.take().id for _ in range(5)] == [2, 1, 3, 4, 0]


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


def test_a_prompt_held_back_takes_its_turn_before_the_decodes_behind_it() -> None:
    """Prefill in every second step: in step 3 request 2 is held and 3, of one token, boards.

    In step 4 the prompt takes the whole budget, and the decode behind it goes without.
    """
    load = workload((0, 1, 4), (0, 17, 1), (0, 8, 1), (3, 1, 2), (3, 1, 1))
    scheduler = fcfs(max_num_seqs=3, max_num_batched_tokens=7, prefill_schedule_interval=2)
    assert steps(load, scheduler) == [
        ({0: 1, 1: 6}, 0),
        ({1: 6}, 1),
        ({1: 5, 2: 1}, 1),
        ({3: 1}, 1),
        ({2: 7}, 0),
        ({4: 1}, 1),
    ]


def test_where_prefill_is_held_a_queue_may_change_the_next_step() -> None:
    """Requests left waiting let prefill go on, also where there is no seat."""
    scheduler = fcfs(max_num_seqs=1, prefill_schedule_interval=2)
    scheduler.add(Request(0, 0.0, 5, 9))
    scheduler.schedule(0.0)
    assert scheduler.add(Request(1, 0.0, 5, 9))


def test_those_who_end_in_one_step_end_in_the_order_of_admission() -> None:
    """The prompt in front ends with its first token, in the step in which the one behind ends."""
    load = workload((0, 8, 1), (0, 2, 2))
    log, _ = play(load, fcfs(long_prefill_token_threshold=4, max_num_seqs=4))
    assert log.requests[["id", "finish"]].tolist() == [(0, 2.0), (1, 2.0)]


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


def test_without_chunked_prefill_the_budget_must_hold_any_prompt() -> None:
    """As vLLM asks: else a request could never board, or not board again."""
    with pytest.raises(ValueError, match=r"max_model_len \(9\) without chunked prefill"):
        fcfs(
            max_num_seqs=4, max_num_batched_tokens=8, max_model_len=9, enable_chunked_prefill=False
        )
    fcfs(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=9)
    whole(max_num_batched_tokens=8)


def test_a_rejected_request_is_written_down_and_nothing_else_happens() -> None:
    """Its times are -1."""
    log, client = play(workload((0.5, 99, 1)), fcfs(max_model_len=10))
    assert log.requests.tolist() == [(-1.0, -1.0, -1.0, 0, 0, 0, 0, REASONS.index("rejected"))]
    assert (len(log.steps), client.done) == (0, 1)


@pytest.mark.parametrize(("seats", "budget"), [(0, 5), (6, 5)])
def test_a_budget_below_the_seats_is_refused(seats: int, budget: int) -> None:
    """As vLLM does; as many tokens as seats will do."""
    with pytest.raises(ValueError, match="must be >= max_num_seqs"):
        fcfs(max_num_seqs=seats, max_num_batched_tokens=budget)
    fcfs(max_num_seqs=5, max_num_batched_tokens=5)
