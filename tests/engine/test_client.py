"""Who sends what when: arrivals, the closed loop, sessions."""

from collections.abc import Callable
from functools import partial
from math import nan, nextafter

import numpy as np
import pytest
import simpy
from hypothesis import given, settings

from simulator.core.request import Request
from simulator.engine.client import Client, StreamClient, Turns
from simulator.workload.workload import Workload
from tests.engine.test_laws import clocks, engines, workloads
from tests.support.engines import fcfs, play, workload

both = pytest.mark.parametrize("leap", [True, False])


def sessions(*requests: tuple[float | None, int, int, int, float], **more: object) -> Workload:
    """A workload of (arrival, prompt, output, predecessor, think time)."""
    load = workload(*(row[:3] for row in requests), **more)
    load.after = np.array([row[3] for row in requests])
    load.delay = np.array([row[4] for row in requests])
    load.check()
    return load


def serve(load: Workload, seconds: Callable[[Request], float]) -> tuple[Client, list[int]]:
    """Run against a server that takes `seconds` per request, as many at once as come."""
    env = simpy.Environment()
    order: list[int] = []

    def submit(request: Request) -> None:
        order.append(request.id)
        if (took := seconds(request)) > 0:
            env.timeout(took).callbacks.append(lambda _: client.finished(request))
        else:
            client.finished(request)

    client = Client(env, load, submit)
    env.run()
    return client, order


# ---------------------------------------------------------------- the open loop


def test_each_request_is_sent_at_its_time() -> None:
    """To the last bit, simultaneous ones in order, from 0 on."""
    times = (0.0, 0.1, 0.1, 0.30000000000000004, 1.7220177217066497, 6.387511524619408, 1e6 / 3)
    client, order = serve(workload(*((t, 1, 1) for t in times)), lambda _: 1.0)
    assert tuple(client.sent) == times
    assert order == list(range(7))
    assert client.done == 7


def test_a_request_carries_what_the_workload_says() -> None:
    """Lengths, client, priority, contents, and when it was sent: no two at the same time."""
    load = workload(
        (0.5, 4, 2),
        (0.5, 6, 3),
        client=["ann", "bob"],
        priority=np.array([3, -1]),
        segments=[None, (("a", 6),)],
    )
    got: list[Request] = []
    serve(load, lambda request: got.append(request) or 1.0)
    told = [
        (r.id, r.arrival, r.prompt_tokens, r.output_tokens, r.client, r.priority, r.segments)
        for r in got
    ]
    later = nextafter(0.5, 1)
    assert told == [(0, 0.5, 4, 2, "ann", 3, None), (1, later, 6, 3, "bob", -1, (("a", 6),))]


def test_a_workload_of_nobody_sends_nothing() -> None:
    """And ends at once."""
    client, order = serve(workload(), lambda _: 1.0)
    assert (client.done, order) == (0, [])


# ---------------------------------------------------------------- the closed loop


def test_no_more_are_under_way_than_allowed() -> None:
    """Two at once, 3 s each: 0, 0, 3, 3, 6."""
    client, _ = serve(workload(*[(0, 1, 1)] * 5, max_concurrency=2), lambda _: 3.0)
    assert list(client.sent) == [0, 0, 3, 3, 6]


def test_those_held_back_go_in_order_of_their_times() -> None:
    """One at a time, 2 s each; whoever comes when nobody is there goes at once."""
    load = workload((0, 1, 1), (0.5, 1, 1), (1, 1, 1), (9, 1, 1), max_concurrency=1)
    client, order = serve(load, lambda _: 2.0)
    assert list(client.sent) == [0, 2, 4, 9]
    assert order == [0, 1, 2, 3]


def test_one_who_comes_as_another_ends_does_not_overtake() -> None:
    """At 2 s the first ends and a third arrives: the second, held since 1 s, is sent."""
    load = workload((0, 1, 1), (1, 1, 1), (2, 1, 1), max_concurrency=1)
    client, order = serve(load, lambda _: 2.0)
    assert list(client.sent) == [0, 2, 4]
    assert order == [0, 1, 2]


@both
def test_the_engine_sees_a_held_request_in_the_step_after_the_end(leap: bool) -> None:
    """Ends at 3 s, next one boards at 3 s."""
    log, client = play(workload((0, 4, 3), (0, 4, 2), max_concurrency=1), fcfs(), leap=leap)
    assert log.requests["first_scheduled"].tolist() == [0, 3]
    assert list(client.sent) == [0, 3]


def test_a_rejected_request_frees_its_place_at_once() -> None:
    """One at a time: the second can never fit; the third goes in the same instant."""
    load = workload((0, 4, 3), (0, 99, 1), (0, 4, 1), max_concurrency=1)
    log, client = play(load, fcfs(max_model_len=50))
    assert list(client.sent) == [0, 3, 3]
    assert log.requests["id"].tolist() == [0, 1, 2]
    assert client.done == 3


def test_any_number_of_rejected_requests_in_a_row_is_no_trouble() -> None:
    """5,000 of them, held behind one that runs: each frees the place for the next."""
    load = workload((0, 4, 3), *[(0, 99, 1)] * 5000, max_concurrency=1)
    log, client = play(load, fcfs(max_model_len=50))
    assert client.done == len(log.requests) == 5001


# ---------------------------------------------------------------- sessions


def test_a_turn_comes_its_think_time_after_the_end_of_the_one_before() -> None:
    """3 s of service, 0.5 s and then 0 s of thought."""
    load = sessions((1, 1, 1, -1, 0), (None, 1, 1, 0, 0.5), (None, 1, 1, 1, 0))
    client, _ = serve(load, lambda _: 3.0)
    assert list(client.sent) == [1, 4.5, 7.5]


@both
def test_a_turn_without_think_time_is_seen_by_the_next_step(leap: bool) -> None:
    """The engine ends the first turn at 3 s and begins the second at 3 s."""
    load = sessions((0, 4, 3, -1, 0), (None, 8, 2, 0, 0))
    log, client = play(load, fcfs(), leap=leap)
    assert list(client.sent) == [0, 3]
    assert log.requests["finish"].tolist() == [3, 5]


def test_several_turns_may_follow_one() -> None:
    """A tree: two after the first, in order of their think times, then of the workload."""
    load = sessions((0, 1, 1, -1, 0), (None, 1, 1, 0, 2), (None, 1, 1, 0, 1), (None, 1, 1, 0, 1))
    client, order = serve(load, lambda _: 3.0)
    assert list(client.sent) == [0, 5, 4, 4]
    assert order == [0, 2, 3, 1]


def test_a_turn_after_a_rejected_one_is_sent() -> None:
    """Think time counts from the rejection."""
    load = sessions((1, 99, 1, -1, 0), (None, 4, 2, 0, 0.5))
    log, client = play(load, fcfs(max_model_len=50))
    assert list(client.sent) == [1, 1.5]
    assert log.requests["id"].tolist() == [0, 1]


def test_arrivals_go_on_between_turns() -> None:
    """Requests with a time of their own stand among later turns in the workload."""
    load = sessions(
        (0, 1, 1, -1, 0), (None, 1, 1, 0, 1), (2, 1, 1, -1, 0), (None, 1, 1, 1, 1), (9, 1, 1, -1, 0)
    )
    client, _ = serve(load, lambda _: 3.0)
    assert list(client.sent) == [0, 4, 2, 8, 9]


def test_turns_wait_for_a_place_too() -> None:
    """One at a time: the turn is ready at 2.5 s, but since 2 s the other session is served."""
    load = sessions((0, 1, 1, -1, 0), (0, 1, 1, -1, 0), (None, 1, 1, 0, 0.5), max_concurrency=1)
    client, _ = serve(load, lambda _: 2.0)
    assert list(client.sent) == [0, 2, 4]


def test_a_turn_does_not_overtake_those_held_before_it() -> None:
    """First come, first served at the client: the turn is ready when the first one ends, at 2 s,
    but another request has waited since 0.5 s."""
    load = sessions((0, 1, 1, -1, 0), (0.5, 1, 1, -1, 0), (None, 1, 1, 0, 0), max_concurrency=1)
    client, order = serve(load, lambda _: 2.0)
    assert order == [0, 1, 2]
    assert list(client.sent) == [0, 2, 4]


@pytest.mark.parametrize("steps", [1, 2])  # of one the end is known before the alarm is set
@pytest.mark.parametrize("in_chunks", [False, True])
def test_one_who_comes_as_a_turn_is_due_goes_first(in_chunks: bool, steps: int) -> None:
    """Both at 2 s, as the last step ends, and the first request with it."""
    load = sessions((0, 1, 1, -1, 0), (2, 1, 1, -1, 0), (None, 1, 1, 0, 0), max_concurrency=1)
    env, order = simpy.Environment(), []

    def submit(request: Request) -> None:
        order.append(request.id)
        step(request, steps)

    def step(request: Request, left: int) -> None:
        on = partial(step, request, left - 1) if left > 1 else partial(client.finished, request)
        env.timeout(2 / steps).callbacks.append(lambda _: on())

    if in_chunks:
        client = StreamClient(env, 3, 3, iter([load]), submit, turns=Turns(load))
    else:
        client = Client(env, load, submit)
    env.run()
    assert order == [0, 1, 2]


def test_a_long_session_of_rejected_turns_is_no_trouble() -> None:
    """2,000 turns without think time, each rejected at once."""
    turns = [(0.0, 99, 1, -1, 0.0), *((None, 99, 1, i, 0.0) for i in range(1999))]
    _, client = play(sessions(*turns), fcfs(max_model_len=50))
    assert client.done == 2000


# ---------------------------------------------------------------- laws


@given(workloads(), engines(), clocks)
@settings(max_examples=100, deadline=None)
def test_requests_are_sent_at_the_same_times_in_leaps(load, engine, clock) -> None:
    """To the last bit, in open and closed loop and in sessions; nobody too early."""
    _, leapt = play(load, engine(), clock)
    _, stepped = play(load, engine(), clock, leap=False)
    assert leapt.sent == stepped.sent
    sent = np.array(leapt.sent)
    timed = ~np.isnan(load.arrival)
    assert (sent[timed] >= load.arrival[timed]).all()
    if load.max_concurrency is None:
        assert (sent[timed] == load.arrival[timed]).all()


@given(workloads(), engines(), clocks)
@settings(max_examples=100, deadline=None)
def test_the_closed_loop_holds_its_limit(load, engine, clock) -> None:
    """At no time more are sent and unfinished than allowed; whoever is held goes at an end."""
    log, client = play(load, engine(), clock)
    if load.max_concurrency is None:
        return
    ends = np.full(len(load), nan)
    rows = log.requests
    ends[rows["id"]] = rows["finish"]
    sent = np.array(client.sent)
    ends = np.where(ends < 0, sent, ends)  # rejected
    for now in sent:
        assert ((sent <= now) & (ends > now)).sum() <= load.max_concurrency
