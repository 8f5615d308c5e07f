"""Weighted fair queueing with each request by itself: schedules by hand, and the boost's bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.testing import check_policy
from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.virtual_finish_time import STALE, VirtualFinishTime
from simulator.schedulers.vllm.dynamic import DynamicScheduler
from simulator.workload.workload import Workload
from tests.support.engines import fcfs, made, play, workload
from tests.support.with_fields import with_fields


def starts(load: Workload, blocks: int = 1000, seats: int = 1, **arguments: object) -> list[float]:
    """When each request was first scheduled; steps of 1 s, lengths known."""
    policy = VirtualFinishTime(**arguments)
    log, _ = play(
        load, made(DynamicScheduler, BlockCounter(blocks, 4), policy=policy, max_num_seqs=seats)
    )
    return np.sort(log.requests, order="id")["first_scheduled"].tolist()


@pytest.mark.parametrize(("boost", "late"), [(0.3, (12, 16)), (0.0, (14, 12))])
def test_one_seat(boost: float, late: tuple[float, float]) -> None:
    """Tokens: 8, 24, 8, 8, 6. Each takes as many seconds as its answer has tokens.

    At 0 request 0 runs; virtual time is 8. At 4 the finishes are 8 + 24 and 8 + 8: request 2, and
    virtual time 16. At 8 request 1 has waited 7.5 s, request 3 for 3 s, 0.4 of that:
    8 + 0.7 * 24 = 24.8 and 16 + 0.88 * 8 = 23.04; request 3, virtual time 24. At 12 it is 24.8
    against 24 + 6 * (1 - 0.3 * 3 / 11.5) = 29.5; without the boost 32 against 30.
    """
    load = workload((0, 4, 4), (0.5, 20, 4), (0.5, 4, 4), (5, 4, 4), (9, 4, 2))
    assert starts(load, starvation_boost=boost) == [0, late[0], 4, 8, late[1]]


def test_shares_are_taken_at_the_same_steps_of_a_run_that_leaps() -> None:
    """The last comes in a leap; the step after it takes shares, which the next 0.05 are off from.

    Found by draws: the leap went on, and another request was the head when blocks were free.
    """
    load = workload((4.5, 2, 17), (5.0, 16, 28), (7.0, 18, 12), (9.0, 2, 20))
    leapt, stepped = (
        play(
            load,
            made(
                DynamicScheduler,
                BlockCounter(12, 4),
                policy=VirtualFinishTime(),
                max_num_seqs=8,
                max_model_len=48,
            ),
            leap=leap,
        )[0]
        for leap in (True, False)
    )
    assert leapt.request_rows == stepped.request_rows


@pytest.mark.parametrize("boost", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("gap", "passed"), [(0.8, 190), (1.25, 0)])
def test_a_long_request_waits_until_an_overload_is_over(gap: float, passed: int, boost) -> None:
    """Steps of 1 s, a request each, and one of 99 s: at 1.25 times saturation it is the last.

    It came as the eleventh of 201. Below saturation it goes as soon as nobody else waits.
    """
    rows = [(k * gap, 1, 1) for k in range(201)]
    rows[10] = (10 * gap, 4, 99)
    found = starts(workload(*rows), starvation_boost=boost)
    assert sum(one < found[10] for one in found[11:]) == (passed if boost < 1 else 0)


def test_weights_are_those_of_clients() -> None:
    """8 tokens come before 12, 12 / 2 before 8."""
    load = workload((0, 6, 2), (0, 8, 4), client=["a", "b"])
    assert starts(load) == [0, 2]
    assert starts(load, weights={"b": 2}) == [4, 0]


def test_who_has_the_most_left_is_preempted() -> None:
    """6 blocks of 4. Request 0 has 4 + 12 tokens, request 1 has 16 + 3, so 0 is admitted first.

    At 1 each needs a block and 1 is free: 11 tokens of 0 are left, 2 of 1. So 0 goes, though 1 was
    admitted later, and is back at 3, when 1 has ended: its 2nd token comes at 4, its 12th at 14.
    """
    load = workload((0, 4, 12), (0, 16, 3))
    scheduler = DynamicScheduler(BlockCounter(7, 4), policy=VirtualFinishTime())
    log, _ = play(load, scheduler)
    rows = np.sort(log.requests, order="id")
    assert rows["preemptions"].tolist() == [1, 0]
    assert rows["finish"].tolist() == [14, 3]
    log, _ = play(load, fcfs(7, 4))
    assert np.sort(log.requests, order="id")["preemptions"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ({}, 8),
        ({"max_tokens": 6}, 14),
        ({"max_tokens": 6, "hint": 3}, 11),
        ({"hint": 3, "computed": 5, "generated": 0}, 6),
        ({"hint": 3, "computed": 9, "generated": 2}, 1),
        ({"hint": 3, "computed": 12, "generated": 5}, 0),
        ({"hint": 3, "client": "a"}, 5.5),
    ],
)
def test_remaining_tokens_are_those_that_are_known_of(more: dict, size: float) -> None:
    """Of a prompt of 8; the answer of 99 tokens is nobody's business."""
    request = with_fields(Request(0, 0.0, 8, 99), **more)
    assert VirtualFinishTime(weights={"a": 2}).size(request) == size


@pytest.mark.usefixtures("few_cases")
def test_check_policy() -> None:
    check_policy("virtual-finish-time", weights={"a": 0.3})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"starvation_boost": 1.1}, "starvation_boost: must be from 0 to 1, not 1.1"),
        ({"starvation_boost": -0.1}, "starvation_boost: must be from 0 to 1, not -0.1"),
        ({"weights": {"a": 0}}, "weights.a: must be from 1e-06 to"),
        ({"weights": [1]}, r"weights: must be a mapping such as {a: 2, b: 1}, clients"),
    ],
)
def test_wrong_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VirtualFinishTime(**arguments)


class Now:
    """What the queue sees of an engine."""

    now = 0.0


def test_shares_of_the_wait_are_taken_anew_when_one_is_off_by_more_than_stale() -> None:
    """100 tokens that have waited longest count as 70.

    71 tokens, waiting for the last twentieth of that time, would count as 69.9, and do after more.
    """
    queue = VirtualFinishTime(starvation_boost=0.3).queue(Now())
    first, second = Request(0, 0.0, 100, 1), Request(1, 19.0, 71, 1)
    queue.add(first)
    queue.refresh(1.0)
    queue.add(second)
    assert STALE == 1 / 20
    for now, head in ((20.0, first), (20.1, second)):
        queue.refresh(now)
        assert queue.head() is head


@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 99), st.integers(0, 2)), max_size=30),
    st.floats(0, 1),
)
def test_the_head_is_the_smallest_finish_as_far_as_shares_are_exact(events, boost: float) -> None:
    """Requests come and, none to two at a time, go; a share may be off by STALE."""
    policy, batch, waiting = VirtualFinishTime(starvation_boost=boost), Now(), {}
    queue = policy.queue(batch)
    for number, (gap, prompt, leave) in enumerate(events):
        batch.now += gap
        request = Request(number, batch.now, prompt, 1)
        waiting[request] = queue.virtual
        queue.add(request)
        batch.now += gap / 2
        queue.refresh(batch.now)
        for _ in range(min(leave, len(waiting))):
            longest = max(batch.now - one.arrival for one in waiting) or 1.0
            least = {
                one: start + one.prompt_tokens * (1 - boost * (batch.now - one.arrival) / longest)
                for one, start in waiting.items()
            }
            head = queue.take()
            error = {one: boost * STALE * one.prompt_tokens + 1e-9 for one in waiting}
            allowed = min(finish + error[one] for one, finish in least.items())
            assert least[head] - error[head] <= allowed
            del waiting[head]
            queue.refresh(batch.now)
    assert len(queue) == len(waiting)
