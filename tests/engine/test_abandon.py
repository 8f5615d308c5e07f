"""Runs that are stopped before their end: what happened until then is all there."""

import numpy as np
import pytest
import simpy

from simulator.core.log import REASONS
from simulator.engine.client import Client
from simulator.engine.drive import EVENTS_PER_LOOK, EVENTS_PER_QUESTION, drive
from simulator.engine.replica import Replica
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.schedulers.static import Static
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.support.engines import Clock, fcfs, made, workload

both = pytest.mark.parametrize("leap", [True, False])


def stopped(leap: bool, at: float, scheduler: Scheduler, **more: object) -> tuple[Replica, Client]:
    """Run four requests until `at`, and write down what is there."""
    env = simpy.Environment()
    load = workload((0, 4, 100), (0, 4, 3), (0.5, 9, 100), (20, 4, 1), **more)
    replica = Replica(env, scheduler, Clock(), leap=leap)
    client = Client(env, load, replica.submit)
    replica.on_finish = client.finished
    env.run(until=at)
    replica.abandon()
    return replica, client


@both
@pytest.mark.parametrize("seats", [1, 2, 3])
def test_a_run_stopped_early_writes_every_request_once(leap: bool, seats: int) -> None:
    """Those who run and those who wait are unfinished; one was never sent."""
    replica, client = stopped(leap, 10.5, fcfs(max_num_seqs=seats))
    rows = sorted(replica.log.requests.tolist(), key=lambda row: row[3])
    assert [row[3] for row in rows] == [0, 1, 2]
    reasons = [REASONS[row[7]] for row in rows]
    assert reasons == ["unfinished", "stop" if seats > 1 else "unfinished", "unfinished"]
    assert np.isnan(client.sent[3])


@both
def test_stopping_sends_nothing(leap: bool) -> None:
    """Two held back at the client stay there: they were never sent and have no row."""
    replica, client = stopped(leap, 10.5, fcfs(), max_concurrency=1)
    assert replica.log.requests["id"].tolist() == [0]
    assert np.isnan(client.sent[1:]).all()
    assert client.done == 0


def test_a_run_stopped_early_is_the_same_in_leaps() -> None:
    """Steps that had ended by then have happened, also those of a leap under way."""
    for at in (7.0, 10.5, 60.0):
        leapt, _ = stopped(True, at, fcfs())
        stepped, _ = stopped(False, at, fcfs())
        assert leapt.log.request_rows == stepped.log.request_rows
        assert leapt.log.tick_ends == stepped.log.tick_ends
        assert leapt.log.steps["end"][-1] == stepped.log.steps["end"][-1]


def check_runs(replica: Replica, client: Client) -> None:
    """Each request sent has one row, and its runs hold the tokens that it says."""
    rows = replica.log.requests
    sent = np.flatnonzero(~np.isnan(np.frombuffer(client.sent)))
    assert sorted(rows["id"].tolist()) == sent.tolist()
    tokens = dict.fromkeys(range(4), 0)
    for run in replica.log.runs:
        tokens[int(run["id"])] += 1 + int(run["ticks"])
    assert [tokens[id] for id in rows["id"].tolist()] == rows["generated"].tolist()


@both
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("at", [1.5, 3.5, 40.5, 60.5, 90.5])
def test_the_runs_of_an_abandoned_request_hold_its_tokens(leap, named, at) -> None:
    """As for those who ended; a preempted one included, 33 blocks being too few for all."""
    blocks = BlockManager(33, 4, prefix_caching=True) if named else BlockCounter(33, 4)
    scheduler = made(Scheduler, blocks, max_num_seqs=3, max_num_batched_tokens=8)
    check_runs(*stopped(leap, at, scheduler))


@both
@pytest.mark.parametrize("at", np.arange(0.25, 12.0, 0.5).tolist())
def test_static_batches_can_be_abandoned_at_any_moment(leap: bool, at: float) -> None:
    """While prompts are computed, while some wait for the others' prompts, among ghosts."""
    scheduler = made(
        Static,
        BlockCounter(100, 4),
        batch_size=3,
        timeout=1.0,
        max_num_seqs=3,
        max_num_batched_tokens=9,
    )
    check_runs(*stopped(leap, at, scheduler))


def overlapped() -> Scheduler:
    """An asynchronous engine with too few blocks for all."""
    return made(AsyncScheduler, BlockCounter(33, 4), max_num_seqs=3, max_num_batched_tokens=8)


@both
@pytest.mark.parametrize("at", [0.5, 1.5, 3.5, 40.5, 60.5, 90.5, 500.0])
def test_batches_in_flight_come_to_their_end(leap, at) -> None:
    """So that the tokens that were counted when they were scheduled do come out."""
    check_runs(*stopped(leap, at, overlapped()))


@pytest.mark.parametrize("at", [0.5, 2.0, 7.0, 10.5, 60.0, 61.5])
def test_an_asynchronous_run_stopped_early_is_the_same_in_leaps(at) -> None:
    """Of a leap under way those steps have happened that were scheduled by then."""
    leapt, _ = stopped(True, at, overlapped())
    stepped, _ = stopped(False, at, overlapped())
    assert leapt.log.request_rows == stepped.log.request_rows
    assert leapt.log.run_rows == stepped.log.run_rows
    assert leapt.log.tick_ends == stepped.log.tick_ends


def test_progress_is_shown_seldom_but_who_may_stop_a_run_is_asked_often() -> None:
    """Of 1,000 events; a plan breaks off runs that cannot hold any more."""
    shown: list[float] = []
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 10

    for question in (None, stop):
        env = simpy.Environment()
        for number in range(1000):
            env.timeout(number)
        client = Client(env, workload(), lambda _: None)
        interrupted = drive(env, client, lambda now, *_: shown.append(now), question)
        assert interrupted is (question is stop)
    events = [EVENTS_PER_LOOK, *(EVENTS_PER_QUESTION * k for k in range(1, 11))]
    assert shown == [n - 2.0 for n in events]  # the client's is one of them
