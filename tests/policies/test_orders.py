"""Orders of the queue, worked out by hand: every step takes 1 s, so times are step numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.orders import HRRN, SJF, Boost
from simulator.policies.preemptive import MLFQ, SRPT, Deadline, Preemptive
from simulator.policies.waiting_queues import RankQueue
from simulator.schedulers.vllm.dynamic import DynamicScheduler
from tests.support.engines import made, play, workload
from tests.support.policies import engine, order


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


class Ranked:
    """HRRN by its rank alone, of all who wait."""

    def __init__(self, by: str) -> None:
        self.rank = HRRN(by).rank


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=40
    ),
    st.sampled_from(["prompt", "hint", "total"]),
    st.integers(1, 3),
    st.integers(6, 30),
)
def test_hrrns_queue_has_the_order_of_its_rank(requests, by: str, seats: int, blocks: int) -> None:
    """Also of equal ratios, and where requests come back after a preemption."""
    load = workload(*sorted(requests))
    seen = []
    for policy in (HRRN(by), Ranked(by)):
        scheduler = engine(policy, seats, blocks)
        seen.append(play(load, scheduler, sigma=0.5)[0].request_rows)
    assert seen[0] == seen[1]


def test_of_equal_ranks_the_smaller_id_goes_first() -> None:
    """Wherever in the table it stands: the last comes to the place of the one that is taken."""
    queue = RankQueue(Ranked("prompt"))
    for number in (0, 1, 2):
        queue.add(Request(number, 0.0, 4, 1))
    assert [queue.take().id for _ in range(3)] == [0, 1, 2]


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
    log, _ = play(
        load, made(DynamicScheduler, BlockCounter(99, 4), policy=HRRN(), **options), leap=leap
    )
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SJF(by="length"), "by: must be one of prompt, hint, total, not 'length'"),
        (lambda: SJF(ageing=-1.0), "ageing: must be 0 or more, not -1.0"),
        (lambda: Boost(gamma=0.0), "gamma: must be more than 0 per second, not 0.0"),
        (lambda: SRPT(margin=-1), "margin: must be 0 tokens or more, not -1"),
        (lambda: MLFQ(quantum=0), "quantum: must be 1 step or more, not 0"),
        (lambda: Deadline(tpot=0.0), "tpot: must be more than 0 ms, not 0.0"),
        (lambda: Deadline(clients={"a": {"e2el": 1}}), "clients.a.e2el: unknown key"),
        (lambda: Deadline(clients={"a": {"ttft": 0}}), "clients.a.ttft: must be more than 0 ms"),
        (lambda: Deadline(clients={"a": 3}), "clients.a: must be a mapping of keys, not 3"),
        (lambda: Preemptive(threshold=-2.0), "threshold: must be 0 or more, not -2.0"),
    ],
)
def test_wrong_arguments_are_named(make, message: str) -> None:
    """Each with what it must be."""
    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.")):
        make()
