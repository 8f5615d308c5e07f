"""Policies that displace running requests, worked out by hand: every step takes 1 s."""

import numpy as np
import pytest

from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.preemptive import MLFQ, SRPT, Deadline, Preemptive
from simulator.schedulers.vllm.dynamic import DynamicScheduler
from tests.schedulers.test_scheduler import steps
from tests.support.engines import made, play, workload
from tests.support.policies import engine, order, request_of, spans


def test_srpt_displaces_whoever_has_more_to_go() -> None:
    """At 3 s request 0 has said 3 of 20, and 3 are less than 17; it computes 4 + 3 anew at 6 s."""
    load = workload((0, 4, 20), (2.5, 4, 3))
    assert spans(load, SRPT()) == {1: (3, 4, 6), 0: (0, 1, 23)}
    assert steps(load, engine(SRPT()))[:7] == [
        ({0: 4}, 0),
        ({}, 1),
        ({}, 1),
        ({1: 4}, 0),
        ({}, 1),
        ({}, 1),
        ({0: 7}, 0),
    ]


@pytest.mark.parametrize(
    ("policy", "stays"),
    [
        (SRPT(margin=13), False),
        (SRPT(margin=14), True),
        (SRPT(limit=0.15), False),
        (SRPT(limit=0.1), True),
    ],
)
def test_srpt_leaves_alone_who_is_near_or_far_enough(policy: SRPT, stays: bool) -> None:
    """17 to go against 3: a margin of 14 is not exceeded; 3 of 20 said are more than a tenth."""
    load = workload((0, 4, 20), (2.5, 4, 3))
    assert spans(load, policy)[0][2] == (20 if stays else 23)


def test_srpt_goes_by_the_prediction_alone() -> None:
    """Equal answers predicted: nobody is displaced; the oracle's length does not matter."""
    load = workload((0, 4, 8), (2.5, 4, 8))
    assert spans(load, SRPT())[0] == (0, 1, 8)


def test_somebody_is_displaced_for_blocks_too() -> None:
    """3 blocks: at 6 s request 0 has 9 tokens in all of them, and request 1 needs two."""
    load = workload((0, 4, 9), (5.5, 6, 1))
    seen = spans(load, SRPT(), seats=2, num_blocks=4)
    assert seen[1] == (6, 7, 7)
    assert seen[0] == (0, 1, 10)


def test_nobody_goes_where_that_would_not_be_enough() -> None:
    """4 blocks, all in use at 2 s: the head needs all, request 0 would leave it two.

    Request 1 has less to go than the head; it ends at 3 s, and then request 0 makes way.
    """
    load = workload((0, 4, 7), (0, 4, 3), (1.5, 13, 3))
    assert spans(load, SRPT(), seats=2, num_blocks=5) == {
        1: (0, 1, 3),
        2: (3, 4, 6),
        0: (0, 1, 10),
    }


def test_mlfq_by_hand() -> None:
    """Quanta of 2, 4, 8 steps; a prompt of 4 is one.

    Request 0 is at level 1 after its first token, request 1 displaces it. That stays until it has
    said 5 (2 + 4 steps) and is at level 2; then 0 is back until it has said 5 as well: equals.
    """
    load = workload((0, 4, 10), (0.5, 4, 10))
    policy = MLFQ(quantum=2, levels=3, prefill_rate=4, starvation=99)
    seen = steps(load, engine(policy))
    boards = [(at, *prefills.items()) for at, (prefills, _) in enumerate(seen) if prefills]
    assert boards == [(0, (0, 4)), (1, (1, 4)), (6, (0, 5)), (15, (1, 9))]
    assert {id: span[2] for id, span in spans(load, policy).items()} == {0: 15, 1: 20}


def test_mlfq_long_prompts_skip_levels() -> None:
    """Quanta of 2, 4, 8: a prompt of 3 steps joins level 1, one of 100 steps the last."""
    policy = MLFQ(quantum=2, levels=3, prefill_rate=4)
    load = workload((0, 8, 1), (0, 9, 1), (0, 12, 1), (0, 400, 1))
    levels = [policy.level(request_of(load, i), 0) for i in range(4)]
    # 8 tokens use up level 0 at once
    assert levels == [1, 1, 1, 2]
    assert policy.level(request_of(load, 2), 1) == 2  # 3 + 1 of 4 steps
    least = MLFQ(quantum=2, levels=3, prefill_rate=1, starvation=0.5)
    assert least.level(request_of(load, 0), 0) == 2  # a step for each token


def test_mlfq_promotes_who_starves() -> None:
    """Request 0 waits since 1 s, is promoted at 5 s and displaces request 1, with 2 new steps.

    At 7 s it is back at level 1, as is request 1, which has waited since 5 s: promoted at 9 s.
    """
    load = workload((0, 4, 10), (0.5, 4, 10))

    def policy() -> MLFQ:
        return MLFQ(quantum=2, levels=3, prefill_rate=4, starvation=4)

    seen = steps(load, engine(policy()))
    boards = [(at, *prefills.items()) for at, (prefills, _) in enumerate(seen) if prefills]
    assert boards[:4] == [(0, (0, 4)), (1, (1, 4)), (5, (0, 5)), (9, (1, 8))]
    logs = [play(load, engine(policy()), leap=leap)[0] for leap in (False, True)]
    assert logs[0].request_rows == logs[1].request_rows


def test_preemptive_displaces_the_least_urgent() -> None:
    """Two seats with priorities 2 and 1; at 2 s comes a 0: the 2 leaves, though first admitted."""
    load = workload((0, 4, 9), (0, 4, 9), (1.5, 4, 3), priority=np.array([2, 1, 0]))
    assert spans(load, Preemptive(), seats=2) == {2: (2, 3, 5), 1: (0, 1, 9), 0: (0, 1, 12)}


@pytest.mark.parametrize(
    ("policy", "end"),
    [
        (Preemptive(), 5),
        (Preemptive(threshold=1), 5),
        (Preemptive(threshold=2), 12),
        (Preemptive(ageing=1), 5),
        (Preemptive(ageing=2), 12),
    ],
)
def test_preemptive_with_a_threshold_or_ageing(policy: Preemptive, end: float) -> None:
    """Priorities 2 at 0 s and 0 at 1.5 s: 2 apart; with ageing 1 or 2 it is 0.5 or -1."""
    load = workload((0, 4, 9), (1.5, 4, 3), priority=np.array([2, 0]))
    assert spans(load, policy)[1][2] == end


def test_equals_do_not_displace_each_other() -> None:
    """Nor one that came before."""
    load = workload((0, 4, 9), (1.5, 4, 3), priority=np.array([1, 1]))
    assert spans(load, Preemptive())[1] == (9, 10, 12)


def test_deadline_takes_from_those_who_are_ahead() -> None:
    """Token n of request 0 is due at 3 + n / 2 s, the first of request 1 at 3.5 s.

    At 1 s the next of request 0 is due at 3.5 s as well, at 2 s only at 4 s: it leaves. It is back
    when request 1, then at n = 3 (due at 5), is ahead of its own 4 s.
    """
    load = workload((0, 4, 9), (0.5, 4, 9))
    policy = Deadline(ttft=3000, tpot=500, slack=0)
    seen = steps(load, engine(policy))
    boards = [(at, *prefills.items()) for at, (prefills, _) in enumerate(seen) if prefills]
    assert boards[:3] == [(0, (0, 4)), (2, (1, 4)), (4, (0, 6))]
    assert spans(load, Deadline(ttft=3000, tpot=500, slack=3000))[1][0] == 8


def test_deadlines_differ_by_client() -> None:
    """Clients wait for the only seat: b is due 0.2 s after it came."""
    load = workload((0, 4, 5), (0, 4, 1), (1, 4, 1), client=["a", "a", "b"])
    assert order(load, Deadline(ttft=9000, slack=99000)) == [0, 1, 2]
    clients = {"b": {"ttft": 200}}
    assert order(load, Deadline(ttft=9000, slack=99000, clients=clients)) == [0, 2, 1]


def test_who_is_displaced_may_be_swapped() -> None:
    """With host memory its 2 blocks go out and come back, and one token is computed, not 7."""
    scheduler = made(
        DynamicScheduler, BlockCounter(100, 4), policy=SRPT(), max_num_seqs=1, swap_blocks=50
    )
    load = workload((0, 4, 20), (2.5, 4, 3))
    seen = steps(load, scheduler)
    assert [row for row in seen if row[0]] == [({0: 4}, 0), ({1: 4}, 0)]
    assert len(seen) == 23
