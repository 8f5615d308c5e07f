"""Orders of the queue, worked out by hand: every step takes 1 s, so times are step numbers."""

from pathlib import Path

import numpy as np
import pytest

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.orders import HRRN, SJF, Boost
from simulator.policies.preemptive import MLFQ, SRPT, Deadline, Preemptive
from simulator.schedulers.vllm.dynamic import DynamicScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError
from simulator.workload.workload import Workload
from tests.schedulers.test_scheduler import steps
from tests.support.engines import play, workload

DYNAMIC = ("rank", "displaces")


def engine(policy: object, seats: int = 1, num_blocks: int = 1000) -> Scheduler:
    """Few seats, blocks of 4 tokens."""
    kind = DynamicScheduler if any(hasattr(policy, name) for name in DYNAMIC) else Scheduler
    return kind(BlockCounter(num_blocks, 4), policy=policy, max_num_seqs=seats)


def spans(load: Workload, policy: object, **options: int) -> dict[int, tuple[float, float, float]]:
    """First scheduled, first token and end of each request; the same with and without leaps."""
    logs = [play(load, engine(policy, **options), leap=leap)[0] for leap in (False, True)]
    assert logs[0].request_rows == logs[1].request_rows
    return {
        int(row["id"]): (row["first_scheduled"], row["first_token"], row["finish"])
        for row in logs[0].requests
    }


def order(load: Workload, policy: object) -> list[int]:
    """Ids in the order in which they board the only seat."""
    seen = spans(load, policy)
    return sorted(seen, key=lambda id: seen[id][0])


# ---------------------------------------------------------------- without preemption


def test_sjf_ranks_by_what_it_is_told() -> None:
    """While request 0 runs there come prompts of 9 and 5 tokens, answers of 2 and 8."""
    load = workload((0, 4, 5), (1, 9, 2), (1, 5, 8))
    assert order(load, SJF()) == [0, 2, 1]
    assert order(load, SJF(by="hint")) == [0, 1, 2]
    assert order(load, SJF(by="total")) == [0, 1, 2]  # 11 and 13


def test_ageing_lets_a_long_job_pass_a_short_one_that_came_later() -> None:
    """10 tokens at 0 s against 2 tokens at 4.5 s: 10 against 6.5 or 11 with 1 or 2 tokens/s."""
    load = workload((0, 4, 5), (0, 10, 1), (4.5, 2, 1))
    assert order(load, SJF(ageing=1)) == [0, 2, 1]
    assert order(load, SJF(ageing=2)) == [0, 1, 2]


@pytest.mark.parametrize(("arrival", "first"), [(3, 2), (4.5, 1)])
def test_hrrn_boards_the_highest_response_ratio(arrival: float, first: int) -> None:
    """At 5 s request 1 has waited 5 s for 10 tokens, request 2 either 2 s or 0.5 s for 2."""
    load = workload((0, 4, 5), (0, 10, 1), (arrival, 2, 1))
    assert order(load, HRRN())[1] == first
    assert order(load, SJF())[1] == 2


def test_hrrn_by_predicted_length() -> None:
    """At 5 s: 5 s for 8 predicted tokens, 4 s for 2; prompts alone would say the contrary."""
    load = workload((0, 4, 5), (0, 2, 8), (1, 9, 2))
    assert order(load, HRRN(by="hint")) == [0, 2, 1]
    assert order(load, HRRN(by="prompt")) == [0, 1, 2]
    assert order(load, HRRN(by="total")) == [0, 1, 2]  # 5 / 10 and 4 / 11


def test_hrrn_ranks_anew_when_a_seat_is_free() -> None:
    """The ratio of 2 tokens overtakes that of 10 at 4.25 s: boards at 4 s differ from 5 s."""
    late = [(0, 10, 1), (3.4, 2, 1)]  # at 4 s: 0.4 and 0.3; at 5 s: 0.5 and 0.8
    assert order(workload((0, 4, 4), *late), HRRN()) == [0, 1, 2]
    assert order(workload((0, 4, 5), *late), HRRN()) == [0, 2, 1]


@pytest.mark.parametrize("leap", [True, False])
def test_hrrn_ranks_anew_when_the_tokens_of_a_step_are_free(leap: bool) -> None:
    """10 tokens a step: request 0 takes all until 10 s. Then the ratios are 9.5 / 40 and 7.1 / 5.

    As request 2 came, at 3 s, they were 2.5 / 40 and 0.1 / 5: it would board behind request 1.
    """
    load = workload((0, 100, 5), (0.5, 40, 1), (2.9, 5, 1))
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 10}
    log, _ = play(load, DynamicScheduler(BlockCounter(99, 4), policy=HRRN(), **options), leap=leap)
    ends = dict(zip(log.requests["id"].tolist(), log.requests["finish"].tolist(), strict=True))
    # Request 0 says its tokens from 10 to 14 s; of 9 tokens a step 5 + 4, then 9, 9, 9 and 9.
    assert ends == {0: 14, 1: 15, 2: 11}


def test_boost_is_the_formula() -> None:
    """10 tokens are 1 s, boost 1.865 s; 2 tokens 0.2 s, boost 4.704 s; the difference is 2.839."""
    for later, first in ((2.83, 2), (2.85, 1)):
        load = workload((0, 4, 5), (0, 10, 1), (later, 2, 1))
        assert order(load, Boost(gamma=0.5, token_time=0.1))[1] == first
    plain = [Boost(gamma=gamma, token_time=0.1) for gamma in (1e-6, 1e6)]
    load = workload((0, 4, 5), (0, 10, 1), (4, 2, 1))
    assert [order(load, policy)[1] for policy in plain] == [2, 1]  # like sjf, like fcfs


# ---------------------------------------------------------------- with preemption


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
    levels = [policy.level(_request(load, i), 0) for i in range(4)]
    # 8 tokens use up level 0 at once
    assert levels == [1, 1, 1, 2]
    assert policy.level(_request(load, 2), 1) == 2  # 3 + 1 of 4 steps


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


# ---------------------------------------------------------------- the swap of who is displaced


def test_who_is_displaced_may_be_swapped() -> None:
    """With host memory its 2 blocks go out and come back, and one token is computed, not 7."""
    scheduler = DynamicScheduler(
        BlockCounter(100, 4), policy=SRPT(), max_num_seqs=1, swap_blocks=50
    )
    load = workload((0, 4, 20), (2.5, 4, 3))
    seen = steps(load, scheduler)
    assert [row for row in seen if row[0]] == [({0: 4}, 0), ({1: 4}, 0)]
    assert len(seen) == 23


# ---------------------------------------------------------------- policies of the user's


class Latest:
    """Whoever came last boards first; an order by columns."""

    def rank(self, waiting, now):
        return now - waiting.arrival


class Wrong(Latest):
    """Gives what is no array of numbers."""

    def __init__(self, ranks: object) -> None:
        self.ranks = ranks

    def rank(self, waiting, now):
        if isinstance(self.ranks, Exception):
            raise self.ranks
        return self.ranks


class Pushy:
    """Displaces whatever it was told to."""

    def __init__(self, chosen: object) -> None:
        self.chosen = chosen

    def key(self, request):
        return request.id

    def displaces(self, head, running):
        return self.chosen


def test_the_example_of_the_documentation() -> None:
    """At 3 s gold displaces the client that has said 3 tokens, not the one that has said 2."""
    page = Path(__file__).parents[2] / "docs" / "schedulers.md"
    example = page.read_text("utf-8").split("```python\n")[1].split("```")[0]
    names: dict[str, type] = {}
    exec(example, names)
    load = workload((0, 4, 9), (0.5, 4, 9), (2.5, 4, 2), client=["a", "b", "gold-1"])
    assert spans(load, names["Gold"](), seats=2) == {2: (3, 4, 5), 1: (1, 2, 10), 0: (0, 1, 11)}


def test_an_order_by_columns() -> None:
    """A minimal one; equals go by id."""
    load = workload((0, 4, 5), (1, 4, 1), (2, 4, 1), (3, 4, 1))
    assert order(load, Latest()) == [0, 3, 2, 1]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Wrong([1.0]), "Wrong.rank(waiting, now) must give a number for each of 3 requests, not"),
        (Wrong([np.nan] * 2), "Wrong.rank(waiting, now) must give a number for each of 3"),
        (Wrong(KeyError("x")), "Wrong.rank(waiting, now) raised KeyError: 'x' (test_orders.py:"),
        (Pushy("them"), "Pushy.displaces(head, running) gave 'them', which is none of the running"),
    ],
)
def test_a_policy_that_answers_nonsense_is_named(policy: object, message: str) -> None:
    """In one line."""
    with pytest.raises(HeadwayError) as caught:
        play(workload((0, 4, 5), (0, 4, 5), (0, 4, 5)), engine(policy))
    (told,) = caught.value.messages
    assert told.startswith(f"engine.scheduling_policy: {message}")


class Headlong:
    """Whoever waits takes the place of whoever runs."""

    def key(self, request):
        return request.arrival

    def displaces(self, head, running):
        return next(iter(running), None)


class SelfSacrifice:
    """Whoever runs longest leaves."""

    def key(self, request):
        return request.arrival

    def victim(self, running):
        return next(iter(running))


def test_policies_by_which_all_throw_one_another_out_are_named() -> None:
    """Prompts of two steps never come to their second, or to that which lacks a block."""
    load = workload((0, 10, 1), (0, 10, 1))
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 8}
    headlong = DynamicScheduler(BlockCounter(9, 4), policy=Headlong(), **options)
    options = {"long_prefill_token_threshold": 2, "scheduler_reserve_full_isl": False}
    sacrifice = Scheduler(BlockCounter(4, 4), policy=SelfSacrifice(), max_num_seqs=2, **options)
    for scheduler, name in ((headlong, "Headlong"), (sacrifice, "SelfSacrifice")):
        with pytest.raises(HeadwayError) as caught:
            play(load, scheduler)
        (told,) = caught.value.messages
        assert told.startswith(f"engine.scheduling_policy: {name} goes round in circles: 10,000 st")


def test_many_preemptions_by_one_step_are_no_circle() -> None:
    """20,000 requests of a block want their second at once: half of them leave."""
    requests, options = 20_002, {"max_num_seqs": 20_002, "max_num_batched_tokens": 100_000}
    scheduler = Scheduler(BlockCounter(1 + requests, 4), **options)
    log, _ = play(workload(*[(0, 4, 2)] * requests), scheduler)
    assert log.requests["preemptions"].sum() == requests / 2
    assert log.requests["generated"].tolist() == [2] * requests


@pytest.mark.parametrize("leap", [True, False])
def test_who_says_a_token_before_it_is_displaced_gets_on(leap: bool) -> None:
    """Two answers of 6,000 tokens, one token at a time in turn."""
    load = workload((0, 1, 6000), (0, 1, 6000))
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 6000}
    log, _ = play(
        load, DynamicScheduler(BlockCounter(4000, 4), policy=Headlong(), **options), leap=leap
    )
    assert log.requests["generated"].tolist() == [6000, 6000]
    assert log.requests["preemptions"].sum() == 11_998


def _request(load: Workload, i: int) -> Request:
    return Request(i, 0.0, int(load.prompt_tokens[i]), int(load.output_tokens[i]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SJF(by="length"), "by: must be one of prompt, hint, total, not 'length'"),
        (lambda: SJF(ageing=-1.0), "ageing: must be 0 or more, not -1.0"),
        (lambda: Boost(gamma=0.0), "gamma: must be more than 0 per second, not 0.0"),
        (lambda: SRPT(margin=-1), "margin: must be 0 tokens or more, not -1"),
        (lambda: MLFQ(quantum=0), "quantum: must be 1 step or more, not 0"),
        (lambda: Deadline(tpot=0.0), "tpot: must be more than 0 ms, not 0.0"),
        (lambda: Deadline(clients={"a": {"e2el": 1}}), "clients.a.e2el: unknown key; there are"),
        (lambda: Preemptive(threshold=-2.0), "threshold: must be 0 or more, not -2.0"),
    ],
)
def test_wrong_arguments_are_named(make, message: str) -> None:
    """Each with what it must be."""
    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.")):
        make()
