"""Who gets too little: by hand, against a plain loop, and never under a fair policy."""

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.diagnosis.unfairness import Underserved, batch_service, most_underserved
from simulator.policies.fair import DRR, WFQ, Fair
from simulator.results.fairness import Clients
from simulator.results.request_table import client_column, gather_requests
from simulator.workload.workload import Workload
from tests.support.engines import fcfs, play, workload
from tests.support.logs import TICK

times = st.integers(0, 400).map(lambda n: n * TICK)
rows = st.tuples(times, st.integers(1, 30), st.integers(1, 30), st.sampled_from("aaaab"))


def served(load: Workload, seats: int, policy: object = None, **weights: float) -> Clients:
    """Run a workload, first come, first served unless a policy is given."""
    options = {} if policy is None else {"policy": policy}
    log, client = play(load, fcfs(max_num_seqs=seats, **options))
    table = gather_requests(load, np.frombuffer(client.sent), [log])
    words = client_column(load)
    shares = np.array([weights.get(name, 1.0) for name in words.names])
    return Clients(table, [log], words, shares)


def underserved(clients: Clients) -> Underserved | None:
    return most_underserved(clients)


def queue(first: int, second: int) -> Workload:
    """Requests of 13 (5 and twice 4), all at once, those of a before those of b."""
    return workload(*[(0, 5, 4)] * (first + second), client=["a"] * first + ["b"] * second)


def test_a_batch_of_nobody_is_no_service() -> None:
    assert batch_service(served(workload(), seats=1).table) == 0


def test_b_waits_behind_all_of_a() -> None:
    """One seat, 4 s each: b gets nothing until 48 s, while a boards 12 times, at 44 s the last.

    A batch takes 5 + 2 x 4 = 13, so 52 is allowed. b waits until its tenth boards, at 84 s.
    """
    clients = served(queue(12, 10), seats=1)
    assert batch_service(clients.table) == 13
    assert underserved(clients) == Underserved(1, 0, 44, 44 / 84, 0, 156)
    assert underserved(served(queue(4, 10), seats=1)) is None  # 52
    assert underserved(served(queue(5, 10), seats=1)) == Underserved(1, 0, 16, 16 / 56, 0, 65)
    assert underserved(served(queue(12, 9), seats=1)) is None  # too few requests to tell


@pytest.mark.parametrize(("share", "got"), [(4, 39), (6, None), (0.5, 312)])
def test_what_a_gets_counts_by_its_weight(share: float, got: float | None) -> None:
    """156 / 4 = 39 is more than 2 x 13 (1 + 1/4) = 32.5; 156 / 6 = 26 is not, than 30.33."""
    found = underserved(served(queue(12, 10), seats=1, a=share))
    assert (found and found.best_service) == got


def test_half_is_not_clearly_less() -> None:
    """a boards twice as often as b: each time that b does the walk is where it was."""
    order = ["a", "a", "b"] * 20
    load = workload(*[(0, 5, 4)] * 60, client=order)
    assert underserved(served(load, seats=1)) is None
    load = workload(*[(0, 5, 4)] * 80, client=["a", "a", "a", "b"] * 20)
    found = underserved(served(load, seats=1))
    assert found is not None
    assert (found.worst, found.service, found.best_service) == (1, 19 * 13, 60 * 13)


def rises(clients: Clients, worst: int, best: int, bound: float) -> tuple[float, ...]:
    """Walk through each time that a client waits; give the time, its service, the other's."""
    table, codes = clients.table, clients.codes
    admitted = np.argsort(table.first_scheduled, kind="stable")
    own = np.flatnonzero(codes == worst)
    stretches: list[list[float]] = []
    for begin, stop in sorted(zip(table.entered[own], table.first_scheduled[own], strict=True)):
        if stretches and begin <= stretches[-1][1]:
            stretches[-1][1] = max(stretches[-1][1], stop)
        else:
            stretches.append([begin, stop])
    total = np.zeros(3)
    for begin, stop in stretches:
        walk = low = 0.0
        peak, since, paid = -inf, begin, 0.0
        best_of = np.zeros(3)
        for number in admitted:
            time = table.first_scheduled[number]
            if not begin <= time <= stop or codes[number] not in (worst, best):
                continue
            tokens = table.workload.prompt_tokens[number] + 2 * table.generated[number]
            amount = tokens / clients.weights[codes[number]]
            walk += amount if codes[number] == best else -2 * amount
            paid += amount if codes[number] == worst else 0.0
            if walk <= low:
                total += best_of if peak > bound else 0.0
                low, peak, since, paid, best_of = walk, -inf, time, 0.0, np.zeros(3)
            elif walk - low > peak:
                peak = walk - low
                best_of = np.array([time - since, paid, peak + 2 * paid])
        total += best_of if peak > bound else 0.0
    return tuple(total)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=20, max_size=60), st.integers(1, 3))
def test_the_walk_is_that_of_a_loop(requests, seats) -> None:
    columns = [row[:3] for row in requests]
    load = workload(*sorted(columns), client=[row[3] for row in requests])
    clients = served(load, seats, a=2, b=0.5)
    table, size = clients.table, len(clients.weights)
    under_way = [
        2 * table.generated[(table.first_scheduled <= time) & (time < table.finish)].sum()
        for time in table.first_scheduled
    ]
    batch = table.workload.prompt_tokens.max() + max(under_way)
    assert batch_service(table) == batch
    expected = []
    for worst, best in product(range(size), repeat=2):
        if worst != best and np.count_nonzero(clients.codes == worst) >= 10:
            bound = 2 * batch * (1 / clients.weights[worst] + 1 / clients.weights[best])
            expected.append(rises(clients, worst, best, bound))
    found = underserved(clients)
    time = max((figures[0] for figures in expected), default=0.0)
    assert (found.time if found else 0.0) == pytest.approx(time)
    if found is not None:
        assert any(
            figures == pytest.approx((found.time, found.service, found.best_service))
            for figures in expected
        )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(rows, min_size=20, max_size=80),
    st.integers(1, 3),
    st.sampled_from([(Fair, {}), (WFQ, {}), (DRR, {"quantum": 16})]),
    st.sampled_from([{}, {"a": 4.0}, {"b": 2.0}]),
)
def test_no_fair_policy_is_called_unfair(requests, seats, policy, weights) -> None:
    """However much more one client asks for than the other, and with weights, too."""
    load = workload(*sorted(r[:3] for r in requests), client=[row[3] for row in requests])
    clients = served(load, seats, policy[0](weights=weights, **policy[1]), **weights)
    assert underserved(clients) is None


def test_nobody_waits() -> None:
    assert underserved(served(workload(client=[]), seats=1)) is None
    assert underserved(served(workload((0, 5, 4), client=["a"]), seats=1)) is None
