"""Decisions of vLLM, recorded and by hand, step for step."""

import json
from pathlib import Path

import pytest

from headway.conformance.compare import conform, report
from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockManager
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.support.conformance import make, play, recorded, steps_of
from tests.support.engines import made


@pytest.mark.many
@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
@recorded("oracle/cases/*")
def test_recorded_cases_agree_in_every_step(path: Path, leap: bool) -> None:
    """vLLM 0.33.0's decisions, all fields, through the replica that every simulation uses."""
    outcomes = conform(path, leap=leap)
    assert outcomes
    assert not any(outcome.difference for outcome in outcomes), report(outcomes)


@pytest.mark.parametrize("leap", [False, True])
def test_two_requests_by_hand(tmp_path: Path, leap: bool) -> None:
    """A prompt of 6 and one of 5 under a budget of 8: the second is cut to the 2 that are left.

    dur = 100 + 10 * tokens + context; blocks of 4 tokens, 99 of them usable.
    """
    rows = play(make(tmp_path, [(0, 6, 3), (0, 5, 2)]), leap)
    assert steps_of(rows, "t", "dur", "sched", "new", "finished", "free", "free_end") == [
        (0, 188, [[0, 6, 0], [1, 2, 0]], [[0, 0], [1, 0]], [], 96, 96),
        (188, 152, [[0, 1, 6], [1, 3, 2]], [], [], 95, 95),
        (340, 134, [[0, 1, 7], [1, 1, 5]], [], [0, 1], 95, 99),
    ]
    assert rows[-3:] == [
        {
            "type": "request",
            "id": 0,
            "arrival": 0,
            "first_scheduled": 0,
            "first_token": 188,
            "finish": 474,
            "output_tokens": 3,
            "cached": 0,
            "preemptions": 0,
        },
        {
            "type": "request",
            "id": 1,
            "arrival": 0,
            "first_scheduled": 0,
            "first_token": 340,
            "finish": 474,
            "output_tokens": 2,
            "cached": 0,
            "preemptions": 0,
        },
        {"type": "end", "steps": 3, "complete": True},
    ]


@pytest.mark.parametrize("leap", [False, True])
def test_async_scheduling_by_hand(tmp_path: Path, leap: bool) -> None:
    """A step is decided as the one before it begins; blocks are held for one step longer.

    One request: 2 steps at time 0, the third when the first has ended. The request that arrives
    at 105, while the first step runs, is seen at 134 and gets its first token two steps later.
    """
    path = make(tmp_path, [(0, 4, 3), (105, 3, 1)], async_scheduling=True)
    rows = play(path, leap)
    assert steps_of(rows, "t", "start", "dur", "sched", "new", "finished", "free", "free_end") == [
        (0, 0, 144, [[0, 4, 0]], [[0, 0]], [], 98, 97),
        (0, 144, 115, [[0, 1, 4]], [], [], 97, 96),
        (144, 259, 149, [[0, 1, 5], [1, 3, 0]], [[1, 0]], [0, 1], 96, 99),
    ]


@pytest.mark.parametrize("leap", [False, True])
def test_async_engine_naps_after_a_step_that_schedules_nothing(tmp_path: Path, leap: bool) -> None:
    """One seat: while the last token of a request is on its way, there is nothing to schedule."""
    path = make(tmp_path, [(0, 4, 1), (0, 4, 1)], async_scheduling=True, max_num_seqs=1)
    assert steps_of(play(path, leap), "t", "start", "sched") == [
        (0, 0, [[0, 4, 0]]),
        (194, 194, [[1, 4, 0]]),
    ]


@pytest.mark.parametrize("leap", [False, True])
@pytest.mark.parametrize(
    ("arrival", "decided"), [(145, 309), (258, 309), (259, 309), (300, 309), (309, 309), (310, 310)]
)
def test_async_engine_naps_when_all_have_ended(
    tmp_path: Path, leap: bool, arrival: int, decided: int
) -> None:
    """Those who ended count as requests until a step tells of it: the engine sleeps 50 ns.

    The last token is computed until 259; from 144 on nothing could be scheduled.
    """
    path = make(tmp_path, [(0, 4, 2), (arrival, 4, 1)], async_scheduling=True)
    seen = steps_of(play(path, leap), "t", "start", "sched")
    assert seen[-1] == (decided, decided, [[1, 4, 0]])


def test_priority_takes_tokens_back_from_the_least_urgent(tmp_path: Path) -> None:
    """Six blocks of four. Both run; when request 0, urgent, lacks a block, request 1 goes,

    though it was admitted first and has its token of this step already: the budget gets it back.
    """
    path = make(tmp_path, [(0, 11, 9), (1, 7, 9)], policy="priority", num_gpu_blocks=7)
    case = json.loads(path.read_text())
    case["requests"][0]["priority"] = 5
    path.write_text(json.dumps(case))
    rows = play(path)
    (gone,) = [row for row in rows if row.get("preempted")]
    assert gone["preempted"] == [0]
    assert [entry[0] for entry in gone["sched"]] == [1]
    assert gone["tokens"] == 1


def test_exact_ties_make_the_first_in_running_order_the_victim(tmp_path: Path) -> None:
    """Equal priority and arrival: request 0 lacks a block, preempts itself; request 1 goes on."""
    path = make(tmp_path, [(0, 4, 6), (0, 4, 6)], policy="priority", num_gpu_blocks=4)
    rows = play(path)
    gone = next(row for row in rows if row.get("preempted"))
    assert gone["preempted"] == [0]
    assert [entry[0] for entry in gone["sched"]] == [1]


def test_prefill_is_held_for_an_interval_while_decodes_run(tmp_path: Path) -> None:
    """With an interval of 3 the second request, there from 150 on, waits for two decode steps."""
    path = make(tmp_path, [(0, 4, 9), (150, 4, 2)], prefill_schedule_interval=3)
    sched = [[entry[:2] for entry in row[0]] for row in steps_of(play(path), "sched")]
    assert sched[:5] == [[[0, 4]], [[0, 1]], [[0, 1]], [[0, 1], [1, 4]], [[0, 1], [1, 1]]]


def test_an_adaptive_cap_is_the_fair_share_of_the_budget(tmp_path: Path) -> None:
    """A cap of 1 rises to 8 // 2 tokens for two requests."""
    options = {"long_prefill_token_threshold": 1, "long_prefill_token_threshold_adaptive": True}
    path = make(tmp_path, [(0, 12, 1), (0, 12, 1)], **options)
    assert steps_of(play(path), "sched")[0] == ([[0, 4, 0], [1, 4, 0]],)


@pytest.mark.parametrize("leap", [False, True])
def test_an_arrival_behind_the_head_may_let_the_head_fit(tmp_path: Path, leap: bool) -> None:
    """Four requests share the budget of 16: the head's first chunk shrinks to the block left.

    Request 0 holds six of the seven blocks. Alone with it, request 1 would take 8 tokens, two
    blocks; a leap that missed the arrivals of 2 and 3 would keep it waiting.
    """
    path = make(
        tmp_path,
        [(0, 21, 8), (450, 12, 1), (580, 1, 1), (581, 1, 1)],
        max_num_batched_tokens=16,
        num_gpu_blocks=8,
        long_prefill_token_threshold=1,
        long_prefill_token_threshold_adaptive=True,
        reserve_full_isl=False,
    )
    assert steps_of(play(path, leap), "t", "sched")[2:5] == [
        (447, [[0, 1, 21]]),
        (579, [[0, 1, 22]]),
        (712, [[0, 1, 23], [1, 4, 0]]),
    ]


def test_blocks_are_handed_out_in_the_order_of_the_running_list() -> None:
    """Also where a prompt under a cap stands before a decode: which block is whose decides later
    who finds what in the prefix cache."""
    scheduler = made(
        Scheduler,
        BlockManager(20, 4, prefix_caching=True),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=4,
    )
    long, short = Request(0, 0.0, 40, 1), Request(1, 0.0, 4, 5)
    scheduler.add(long)
    scheduler.add(short)
    scheduler.commit(scheduler.schedule(0.0), [1.0])
    scheduler.schedule(1.0)
    assert (long.blocks, short.blocks) == ([1, 3], [2, 4])


def test_max_steps_cuts_a_case(tmp_path: Path) -> None:
    """Who has not ended has no finish; asynchronous, the step in flight is counted, not told."""
    for asynchronous, told in ((False, 3), (True, 2)):
        path = make(tmp_path, [(0, 4, 9)], async_scheduling=asynchronous)
        case = json.loads(path.read_text()) | {"max_steps": 3}
        path.write_text(json.dumps(case))
        for leap in (False, True):
            rows = play(path, leap)
            assert rows[-1] == {"type": "end", "steps": 3, "complete": False}
            assert len(steps_of(rows, "t")) == told
            assert (rows[-2]["finish"], rows[-2]["output_tokens"]) == (None, told)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_that_never_fits_blocks_the_queue_as_in_vllm(
    tmp_path: Path, asynchronous: bool
) -> None:
    """Headway's own runs reject it; a case plays what vLLM's scheduler does."""
    path = make(tmp_path, [(0, 30, 2), (5, 4, 2)], num_gpu_blocks=5, async_scheduling=asynchronous)
    rows = play(path)
    assert steps_of(rows, "t") == []
    assert rows[-1] == {"type": "end", "steps": 0, "complete": False}
