"""Several replicas: laws, routers against their words, queueing theory."""

from math import sqrt
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cluster import routers
from simulator.cluster.fleet import Fleet
from simulator.cluster.routers import (
    Least,
    LeastKv,
    LeastTokens,
    LoraAffinity,
    Own,
    PowerOfTwo,
    PrefixAware,
    PrefixHash,
    RoundRobin,
    Router,
    SessionAffinity,
    Target,
    Uniform,
)
from simulator.core.request import Request
from simulator.engine.client import Client, Turns
from simulator.policies.predictor import Noisy
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload
from tests.engine.test_laws import _unroll, clocks, engines, workloads
from tests.support.engines import Clock, fcfs, workload
from tests.support.engines import play as play_alone

ROUTERS = {
    **routers.ROUTERS,
    "random": lambda: Uniform(1),
    "power_of_two": lambda: PowerOfTwo(1),
    "prefix_aware": lambda: PrefixAware(chunk=4, balance_abs=2),
    "own": lambda: Own("f", lambda request, targets: request.id % len(targets)),
}


def play(
    load: Workload, schedulers: list[Scheduler], clock: Clock, router: Router, leap: bool = True
) -> tuple[Fleet, Client]:
    """Run a workload to its end on some replicas."""
    env, turns = simpy.Environment(), Turns(load)
    fleet = Fleet(env, router, turns)
    for scheduler in schedulers:
        fleet.open_target(fleet.add("all", scheduler, clock, leap=leap))
    lengths = Noisy(0.0).predictor(load, np.random.default_rng(0))
    client = Client(env, load, fleet.submit, lengths, turns=turns)
    fleet.on_finish = client.finished
    env.run()
    return fleet, client


@given(
    workloads(),
    engines(pipelines=False),
    clocks,
    st.integers(1, 4),
    st.sampled_from(sorted(ROUTERS)),
)
@settings(max_examples=60, deadline=None)
def test_leaping_and_stepwise_fleets_agree_to_the_last_bit(load, engine, clock, count, name):
    runs = [
        play(load, [engine() for _ in range(count)], clock, ROUTERS[name](), leap)[0]
        for leap in (True, False)
    ]
    for leapt, stepped in zip(runs[0].logs, runs[1].logs, strict=True):
        assert leapt.request_rows == stepped.request_rows
        assert leapt.run_rows == stepped.run_rows
        assert leapt.tick_ends == stepped.tick_ends
        assert _unroll(leapt) == _unroll(stepped)


@given(workloads(), engines(pipelines=False), clocks, st.sampled_from(sorted(ROUTERS)))
@settings(max_examples=60, deadline=None)
def test_one_replica_behind_a_router_is_an_engine_alone(load, engine, clock, name) -> None:
    fleet, _ = play(load, [engine()], clock, ROUTERS[name]())
    alone, _ = play_alone(load, engine(), clock)
    assert fleet.logs[0].step_rows == alone.step_rows
    assert np.sort(fleet.logs[0].requests, order="id").tobytes() == (
        np.sort(alone.requests, order="id").tobytes()
    )


@given(
    workloads(),
    engines(pipelines=False),
    clocks,
    st.integers(1, 5),
    st.sampled_from(sorted(ROUTERS)),
)
@settings(max_examples=60, deadline=None)
def test_no_request_is_lost_or_counted_twice(load, engine, clock, count, name) -> None:
    fleet, client = play(load, [engine() for _ in range(count)], clock, ROUTERS[name]())
    ids = np.sort(np.concatenate([log.requests["id"] for log in fleet.logs]))
    assert ids.tolist() == list(range(len(load)))
    assert client.done == len(load)
    for target in fleet.targets:
        assert target.outstanding == target.tokens == 0
        assert not target.models


def test_who_has_ended_is_struck_out_of_what_a_replica_has() -> None:
    fleet, _ = play(workload((0.0, 1, 2), (0.0, 1, 2)), [fcfs()], Clock(), Least())
    (target,) = fleet.targets
    assert (target.outstanding, target.tokens, target.models) == (0, 0, {})


def test_a_finish_is_known_to_the_router_before_the_next_request_of_the_same_instant() -> None:
    """Closed loop of 2 on 2 replicas: both end at 2.0; each next goes where one has gone."""
    load = workload((0.0, 1, 2), (0.0, 1, 2), (0.0, 1, 2), (0.0, 1, 2), max_concurrency=2)
    fleet, _ = play(load, [fcfs(), fcfs()], Clock(), Least())
    assert [log.requests["id"].tolist() for log in fleet.logs] == [[0, 2], [1, 3]]
    assert fleet.logs[0].requests["finish"].tolist() == [2.0, 4.0]


def test_no_two_requests_come_to_the_engines_at_the_same_time() -> None:
    """Of two that agreed in priority and arrival, vLLM's scheduler would undo the work for ever."""
    fleet = Fleet(simpy.Environment(), RoundRobin())
    fleet.open_target(fleet.add("all", fcfs(), Clock()))
    for number in range(3):
        fleet.submit_again(Request(number, 0.0, 4, 1))
    first, second, third = (one.arrival for one in fleet.cores[0].scheduler.waiting)
    assert 0.0 == first < second < third < 1e-300


# ---------------------------------------------------------------- routers


def opened(router: Router, count: int = 3) -> list[Target]:
    targets = [Target(k, "all", 16, 100) for k in range(count)]
    for target in targets:
        router.open(target)
    return targets


def asked(prompt: int = 16, **more: object) -> Request:
    return Request(0, 0.0, prompt, 1, **more)  # type: ignore[arg-type]


def test_round_robin_goes_round_and_leaves_out_the_closed() -> None:
    router = RoundRobin()
    targets = opened(router)
    chosen = [router.choose(asked(), -1).index for _ in range(4)]
    router.close(targets[2])
    assert chosen + [router.choose(asked(), -1).index for _ in range(3)] == [0, 1, 2, 0, 1, 0, 1]


@pytest.mark.parametrize(("router", "field"), [(Least(), "outstanding"), (LeastTokens(), "tokens")])
def test_least_chooses_the_least_and_of_equals_who_waited_longest(router, field) -> None:
    targets = opened(router)
    for order, (target, load) in enumerate(zip(targets, (2, 1, 1), strict=True), 1):
        setattr(target, field, load)
        target.order = 4 - order
        router.changed(target)
    assert router.choose(asked(), -1) is targets[2]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 3)), max_size=300))
def test_the_heap_finds_what_a_search_would(changes) -> None:
    """Loads go up and down, targets close and open again."""
    router = Least()
    targets = opened(router, 5)
    open_ = dict.fromkeys(range(5))
    for place, load in changes:
        target = targets[place]
        if load < 0 and place in open_ and len(open_) > 1:
            router.close(target)
            del open_[place]
        elif load < 0 and place not in open_:
            router.open(target)
            open_[place] = None
        elif load >= 0:
            target.outstanding = load
            router.changed(target)
        best = min((targets[k].outstanding, targets[k].order, k) for k in open_)
        assert router.choose(asked(), -1).index == best[2]


def test_least_kv_knows_what_the_answers_said_and_what_was_sent_since() -> None:
    """Two prompts of 40 tokens hold 10 blocks each, one of 4 a single one."""
    load = workload((0.0, 40, 3), (0.0, 40, 3), (0.5, 4, 1), (1.5, 4, 1), (9.0, 4, 1))
    fleet, _ = play(load, [fcfs(), fcfs()], Clock(), LeastKv())
    rows = [sorted(log.requests["id"].tolist()) for log in fleet.logs]
    assert rows == [[0, 2, 4], [1, 3]]


def test_prefix_aware_follows_the_prefix_until_it_is_too_busy() -> None:
    router = PrefixAware(chunk=16, balance_abs=1, balance_rel=1.0)
    targets = opened(router)
    same = {"segments": ((("a",), 32),)}
    first = router.choose(asked(32, **same), -1)
    first.order, first.outstanding = 1, 1
    router.changed(first)
    assert router.choose(asked(32, **same), -1) is first
    assert router.choose(asked(32, segments=((("b",), 32),)), -1) is not first
    first.outstanding = 2
    router.changed(first)
    assert router.choose(asked(32, **same), -1) is not first  # 2 more than the least
    router.close(first)
    assert router.choose(asked(32, **same), -1) in targets[1:]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chunk": 0}, "chunk: must be at least 1, not 0"),
        ({"threshold": 1.5}, "threshold: must be from 0 to 1, not 1.5"),
        ({"balance_abs": -1, "capacity": 0}, "balance_abs: must be .*\ncapacity: must be at"),
        ({"balance_rel": 0.5}, "balance_rel: must be at least 1, not 0.5"),
    ],
)
def test_prefix_aware_refuses_what_makes_no_sense(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        PrefixAware(**wrong)


@pytest.mark.parametrize("session", [0, 7])
def test_a_session_stays_and_moves_when_its_replica_is_gone(session: int) -> None:
    router = SessionAffinity()
    opened(router)
    home = router.choose(asked(), session)
    home.outstanding = 50
    router.changed(home)
    assert router.choose(asked(), session) is home
    assert router.choose(asked(client="x"), -1) is not home
    router.close(home)
    assert router.choose(asked(), session) is not home


def test_what_a_prompt_begins_with_decides_not_how_long_that_is() -> None:
    """Of 8 targets: the same beginning goes to one, fifty others of one length to several."""
    router = PrefixHash()
    for target in (Target(k, "all", 16, 1000) for k in range(8)):
        router.open(target)

    def place(name: int, tokens: int) -> int:
        return router.choose(asked(segments=(((name,), tokens),)), -1).index

    assert len({place(3, tokens) for tokens in range(1, 50)}) == 1
    assert len({place(name, 64) for name in range(50)}) > 4


def test_the_session_that_came_longest_ago_is_forgotten() -> None:
    router = SessionAffinity(capacity=2)
    opened(router)
    home = router.choose(asked(), 7)
    home.outstanding = 50
    router.changed(home)
    for session in (8, 7, 9):  # 8 is the oldest when 9 comes
        router.choose(asked(), session)
    assert router.choose(asked(), 7) is home
    router.choose(asked(), 8)
    router.choose(asked(), 9)
    assert router.choose(asked(), 7) is not home


# ---------------------------------------------------------------- queueing theory

SERVICE = 1.0  # s: prompts of one token, answers of one token, a step of a second, one seat
N = 12_000


def served(router: Router, count: int, load: float, seed: int = 3) -> np.ndarray:
    """Mean wait of Poisson arrivals on replicas that serve one request a second each."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / (load * count), N))
    ones = np.ones(N, dtype=np.int64)
    work = Workload(arrival, ones, ones)
    engines = [fcfs(max_num_seqs=1, max_num_batched_tokens=1) for _ in range(count)]
    fleet, client = play(work, engines, Clock(), router)
    rows = np.concatenate([log.requests for log in fleet.logs])
    wait = rows["first_scheduled"] - np.asarray(client.sent)[rows["id"]]
    return wait[np.argsort(rows["id"])]


def interval(wait: np.ndarray, batches: int = 20) -> tuple[float, float]:
    """Mean and half width of its 99.9 % interval, by batch means without the first batch."""
    means = np.array([part.mean() for part in np.array_split(wait, batches)[1:]])
    return float(means.mean()), 3.9 * float(means.std(ddof=1)) / sqrt(len(means))


def erlang_c(servers: int, load: float) -> float:
    """Probability that M/M/k waits."""
    offered = servers * load
    term = total = 1.0
    for k in range(1, servers):
        term *= offered / k
        total += term
    last = term * offered / servers / (1 - load)
    return last / (total + last)


def test_random_routing_makes_independent_m_d_1_queues() -> None:
    """Pollaczek and Khinchine: W = rho D / (2 (1 - rho))."""
    mean, half = interval(served(Uniform(5), 4, 0.7))
    assert mean == pytest.approx(0.7 / (2 * 0.3), abs=half)
    assert half < 0.2


def common_queue(servers: int, load: float, seed: int = 3) -> np.ndarray:
    """Wait in the one queue of M/D/k: who comes starts when the k-th before it has ended."""
    arrival = np.cumsum(np.random.default_rng(seed).exponential(1 / (load * servers), N))
    start = arrival.copy()
    for i in range(servers, N):
        start[i] = max(arrival[i], start[i - servers] + SERVICE)
    return start - arrival


def test_round_robin_of_equal_jobs_is_one_queue() -> None:
    """The k-th job before has the server that is free next: M/D/k, whose mean Cosmetatos (1975)
    gives from M/M/k's to some percent."""
    k, rho = 4, 0.8
    wait = served(RoundRobin(), k, rho)
    assert wait == pytest.approx(common_queue(k, rho), abs=1e-6)
    mean, half = interval(wait)
    common = erlang_c(k, rho) / (k * (1 - rho)) / 2
    cosmetatos = common * (1 + (1 - rho) * (k - 1) * (sqrt(4 + 5 * k) - 2) / (16 * rho * k))
    assert mean == pytest.approx(cosmetatos, abs=half + 0.03 * cosmetatos)


@pytest.mark.medium
def test_least_outstanding_lies_between_one_queue_and_random_draws() -> None:
    """No better than the one queue, better than the better of two, better than one by chance."""
    k, rho = 4, 0.8
    least, two, one = (
        float(served(router, k, rho).mean()) for router in (Least(), PowerOfTwo(1), Uniform(1))
    )
    assert common_queue(k, rho).mean() <= least < two < one
    assert least < 2 * common_queue(k, rho).mean()
    assert two < 0.6 * one


def test_of_two_that_are_as_busy_the_first_drawn_is_chosen() -> None:
    router, twin = PowerOfTwo(1), Random(1)
    router.targets = [Target(k, "all", 16, 1000) for k in range(3)]
    for k in range(50):
        first, _ = int(twin.random() * 3), twin.random()
        assert router.choose(Request(k, 0.0, 1, 1), 0).index == first


def test_power_of_two_compares_two_that_differ() -> None:
    """Of two replicas the idle one is always chosen; of three never the fullest."""
    for loads, never in (([9, 0], 9), ([0, 9], 9), ([5, 9, 0], 9)):
        router = PowerOfTwo(1)
        router.targets = [SimpleNamespace(outstanding=one) for one in loads]
        chosen = [router.choose(Request(k, 0.0, 1, 1), 0).outstanding for k in range(200)]
        assert never not in chosen
        assert {*chosen} == {*loads} - {never}


def test_a_users_router_sees_the_open_replicas_by_number() -> None:
    """Whatever the order in which they open."""
    router = Own("last", lambda _request, targets: np.int64(len(targets) - 1))
    targets = [Target(k, "all", 16, 1000) for k in range(3)]
    for k in (2, 0, 1):
        router.open(targets[k])
    assert router.choose(Request(0, 0.0, 1, 1), -1) is targets[2]


def test_an_adapter_goes_where_it_is_or_has_room() -> None:
    """Two slots each. a stays where it is though the other is idle; c goes where it has room."""
    router = LoraAffinity()
    targets = [Target(k, "all", 16, 1000, max_loras=2) for k in range(2)]
    for target in targets:
        router.open(target)

    def send(model: str) -> int:
        target = router.choose(Request(0, 0.0, 16, 1, model=model), -1)
        target.outstanding += 1
        target.models[model] += 1
        target.order = max(one.order for one in targets) + 1
        return target.index

    assert [send(model) for model in ("a", "b", "b", "c", "d", "")] == [0, 1, 1, 0, 1, 0]
    assert LoraAffinity._affinity("c", Target(0, "all", 16, 1000, max_loras=2)) == 0.8
    assert LoraAffinity._affinity("e", targets[0]) == 0.0  # a and c have both slots
    assert LoraAffinity._affinity("e", targets[1]) == 0.0  # and b and d, beside no base model
    del targets[0].models["c"]
    assert LoraAffinity._affinity("e", targets[0]) == 0.8  # the base model takes no slot
    targets[0].outstanding += 50  # so busy that the way to the other is worth a load
    assert send("a") == 1
