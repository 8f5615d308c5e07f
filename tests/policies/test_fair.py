"""Fair policies: schedules worked out by hand (a step takes 1 s), and what clients are charged."""

import pytest
from hypothesis import given, settings

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.fair import DRR, WFQ, ClientQueues, Fair
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload
from tests.engine.test_laws import clocks, workloads
from tests.support.engines import made, play, workload
from tests.support.scenarios import errors

Rows = list[tuple[str, float, int, int]]


def clients(*rows: tuple[str, float, int, int]) -> Workload:
    """A workload of (client, arrival, prompt tokens, output tokens)."""
    return workload(*(row[1:] for row in rows), client=[row[0] for row in rows])


def boards(load: Workload, policy: object, seats: int = 1, **options: object) -> str:
    """Run; list the clients in the order in which their requests board, with the times."""
    scheduler = made(Scheduler, BlockCounter(1000, 4), policy=policy, max_num_seqs=seats, **options)
    log, _ = play(load, scheduler)
    rows = sorted(log.requests.tolist(), key=lambda row: (row[0], row[3]))
    return " ".join(f"{load.client[row[3]]}{row[0]:g}" for row in rows)


def test_the_client_with_the_smallest_counter_goes_first() -> None:
    """A request of A costs 4 + 2 x 3 = 10, of B 4 + 2 = 6. Counters when a seat is free, A and B:
    0, 0 at 0 s; 10, 0 at 3 s; 10, 6 at 4 s; 10, 12 at 5 s; 20, 12 at 8 s."""
    load = clients(*[("A", 0, 4, 3)] * 3, *[("B", 0, 4, 1)] * 3)
    assert boards(load, Fair()) == "A0 B3 B4 A5 B8 A9"
    assert boards(load, None) == "A0 A3 A6 B9 B10 B11"


def test_who_comes_to_wait_has_saved_up_nothing() -> None:
    """B comes at 3.5 s, seen at 4 s when A has 10 + 4 + 2 = 16: B begins with 16, not with 0.

    At 6 s A has 20 and B 16; at 9 s 20 and 26; at 12 s 30 and 26; at 15 s 30 and 36.
    """
    load = clients(*[("A", 0, 4, 3)] * 4, *[("B", 3.5, 4, 3)] * 3)
    assert boards(load, Fair()) == "A0 A3 B6 A9 B12 A15 B18"


def test_who_finds_an_empty_queue_begins_where_the_last_ended() -> None:
    """A, alone, has received 28 at 12 s. B and C come then: B begins there, C at B's counter."""
    policy = Fair()
    load = clients(("A", 0, 4, 12), ("B", 12, 4, 1), ("C", 12, 4, 1), ("A", 12, 4, 1))
    assert boards(load, policy) == "A0 B12 C13 A14"
    assert [policy.counter(policy.accounts[name]) for name in "ABC"] == [34, 34, 34]


def test_weights_of_clients_and_of_tokens() -> None:
    """B counts half: at 3 s 10 and 0, at 6 s 10 and 5, at 9 s 10 and 10 (A came first), ..."""
    load = clients(*[("A", 0, 4, 3)] * 3, *[("B", 0, 4, 3)] * 4)
    assert boards(load, Fair(weights={"B": 2})) == "A0 B3 B6 A9 B12 B15 A18"
    policy = Fair(input_weight=3, output_weight=0)
    boards(load, policy)
    assert policy.counter(policy.accounts["B"]) == 4 * 3 * 4


def test_finish_times_order_wfq() -> None:
    """A finishes at 10 and 20, B at 4, 8, 12, 16 and 20 (A came first)."""
    load = clients(*[("A", 0, 10, 1)] * 2, *[("B", 0, 4, 1)] * 5)
    assert boards(load, WFQ(output_weight=0)) == "B0 B1 A2 B3 B4 A5 B6"
    assert boards(load, WFQ(output_weight=0, weights={"A": 2})) == "B0 A1 B2 A3 B4 B5 B6"


def test_wfq_charges_answers_as_they_come() -> None:
    """A's first is finished at 4; its 3 tokens bring its next to 4 + 6 + 4 = 14, B's are at 6, 14
    (6 + 2 + 6; A came first) and 22."""
    load = clients(*[("A", 0, 4, 3)] * 2, *[("B", 0, 6, 1)] * 3)
    assert boards(load, WFQ()) == "A0 B3 A4 B7 B8"


def test_a_boost_lets_nobody_starve() -> None:
    """C's finish is 4 / 0.01 = 400; A's next at t is 4 (t + 1), and 40 t for coming t s later."""
    load = clients(("C", 0, 4, 1), *[("A", t, 4, 1) for t in range(120)])
    options = {"weights": {"C": 0.01}, "output_weight": 0}
    assert "C99 " in boards(load, WFQ(**options))
    assert "A8 C9 A10 " in boards(load, WFQ(**options, boost=40))


def test_a_round_grants_each_a_quantum() -> None:
    """A's deficit is 10, 20, 30 and pays for 25 and 5 in the third round; B's is 10, 12, 14."""
    load = clients(("A", 0, 25, 1), ("A", 0, 5, 1), *[("B", 0, 8, 1)] * 3)
    assert boards(load, DRR(quantum=10, output_weight=0)) == "B0 B1 A2 A3 B4"
    assert boards(load, DRR(quantum=10, output_weight=0, weights={"A": 3})) == "A0 A1 B2 B3 B4"


def test_an_answer_may_leave_a_debt() -> None:
    """A: 10 - 5 - 6 = -1 at 6 s, so B; B: 10 - 5 - 1 = 4 at 7 s lacks 1; round two grants A 10."""
    load = clients(*[("A", 0, 5, 6)] * 2, *[("B", 0, 5, 1)] * 3)
    assert boards(load, DRR(quantum=10, output_weight=1)) == "A0 B6 A7 B13 B14"


def test_who_comes_back_after_a_preemption_pays_nothing() -> None:
    """4 rounds of a token pay for the prompt, once."""
    policy = DRR(quantum=1, output_weight=0)
    queue = policy.queue(Scheduler(BlockCounter(9, 4)))
    request = Request(0, 0.0, 4, 9, client="A")
    queue.add(request)
    assert (queue.take(), policy.round) == (request, 4)
    request.preemptions = 1
    queue.put_back(request)
    assert (queue.take(), policy.round) == (request, 4)


def test_debts_make_nobody_idle_and_pass_with_the_rounds() -> None:
    """A alone owes 100 after its first: rounds pass until it can pay."""
    policy = DRR(quantum=3, output_weight=1)
    assert boards(clients(*[("A", 0, 5, 100)] * 2), policy) == "A0 A100"
    # Granted 6 for a prompt of 5, then -99, 35 rounds to be able to pay 5 more.
    assert policy.round == 2 + 35


def test_rounds_pass_though_a_quantum_is_lost_in_the_rounding_of_a_debt() -> None:
    """Debts of 1e11 beside a quantum of 1e-6 tokens and prompts of 1e-5: nobody waits for ever."""
    load = clients(*[("AB"[k % 2], 0, 7 + k, 3000 + k) for k in range(20)])
    weights = {"A": 1e-6, "B": 1e-6}
    policy = DRR(quantum=1, input_weight=1e-6, output_weight=1e6, weights=weights)
    order = boards(load, policy, seats=2)
    assert (order.count("A"), order.count("B")) == (10, 10)


@pytest.mark.parametrize("make", [Fair, WFQ, DRR])
def test_a_client_alone_is_served_first_come_first_served(make) -> None:
    """Also where requests are preempted: blocks for 6 x 4 tokens, and three that need 3 each."""
    rows = [(t, 5, 9) for t in (0, 0, 1, 2.5, 30)]
    logs = [
        play(workload(*rows), Scheduler(BlockCounter(7, 4), policy=policy))[0]
        for policy in (None, make())
    ]
    assert logs[0].steps["preempted"].any()
    assert logs[0].requests.tolist() == logs[1].requests.tolist()


@pytest.mark.parametrize("make", [Fair, WFQ, DRR])
@pytest.mark.parametrize("mechanism", [Scheduler, AsyncScheduler])
@settings(max_examples=30, deadline=None)
@given(load=workloads(), clock=clocks)
def test_clients_are_charged_for_what_they_get(make, mechanism, load, clock) -> None:
    """Each prompt once, and every token of an answer, whatever is preempted in between."""
    load.client = ["abc"[i % 3] for i in range(len(load))]
    policy: ClientQueues = make()
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    log, _ = play(load, made(mechanism, BlockCounter(12, 4), policy=policy, **limits), clock)
    for number, name in enumerate("abc"):
        account = policy.account(name)
        rows = log.requests[log.requests["id"] % 3 == number]
        served = rows[rows["generated"] > 0]
        assert account.prompt == load.prompt_tokens[served["id"]].sum()
        assert (account.members, account.output) == (0, served["generated"].sum())
        assert not account.waiting


def test_two_policies_of_one_object_begin_anew() -> None:
    """The books are those of one engine."""
    policy = Fair()
    load = clients(*[("A", 0, 4, 3)] * 3, *[("B", 0, 4, 1)] * 3)
    assert boards(load, policy) == boards(load, policy)


def test_a_client_whose_only_request_goes_is_forgotten() -> None:
    """Also before the step that would have seen it."""
    policy = Fair()
    queue = policy.queue(Scheduler(BlockCounter(9, 4)))
    one, two = (Request(k, 0.0, 4, 1, client=name) for k, name in enumerate("AB"))
    assert queue.add(one)
    assert queue.add(two)
    queue.remove(one)
    assert (queue.head(), len(queue)) == (two, 1)
    queue.remove(two)
    assert not queue
    assert not queue.active


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("policy: fair, weights: {a: 0}", "weights.a: must be from 1e-06 to 1e+06, not 0"),
        (
            "policy: fair, weights: [1]",
            "weights: must be a mapping such as {a: 2, b: 1}, clients and weights, not [1]",
        ),
        ("policy: wfq, weights: {a: x}", "weights.a: must be a number, not 'x'"),
        ("policy: fair, input_weight: -1", "input_weight: must be from 0 to 1e+06, not -1"),
        (
            "policy: fair, input_weight: 0, output_weight: 0",
            "output_weight: both weights are 0",
        ),
        ("policy: wfq, boost: -1", "boost: must be from 0 to 1e+06, not -1"),
        ("policy: drr, quantum: 0", "quantum: must be from 1 to 1e+06, not 0"),
        (
            "policy: drr, quantum: 0.5",
            "quantum: must be a whole number such as 64, not 0.5 (tokens)",
        ),
    ],
)
def test_wrong_arguments_are_told_with_their_line(write, arguments: str, message: str) -> None:
    """As every argument of a policy."""
    path = write(f"name: a\nengine:\n  scheduling_policy: {{{arguments}}}\n")
    assert errors(path) == [f"s.yaml:3: engine.scheduling_policy.{message}"]


def test_an_idle_client_has_no_credit_under_wfq() -> None:
    """A request costs 4, then 10 in all. A's finishes are 4, 14, 24, 34, ...; the one served last
    is 24 when B comes at 6.5 s: B's are 28, 38, 48, not 4, 14, 24."""
    load = clients(*[("A", 0, 4, 3)] * 5, *[("B", 6.5, 4, 3)] * 3)
    assert boards(load, WFQ()) == "A0 A3 A6 B9 A12 B15 A18 B21"


def test_who_goes_after_the_head_was_looked_at_is_not_taken() -> None:
    queue = Fair().queue(Scheduler(BlockCounter(9, 4)))
    one, two = (Request(k, 0.0, 4, 1, client=name) for k, name in enumerate("AB"))
    queue.add(one)
    queue.add(two)
    assert queue.head() == one
    queue.remove(one)
    assert queue.take() == two
