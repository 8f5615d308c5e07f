"""Clusters in trouble: refusals, timeouts, failures, scaling; nothing lost, nothing twice."""

from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.report.timeline import phases
from simulator.cluster.config import (
    AdmissionConfig,
    AutoscalingConfig,
    ClientConfig,
    FailuresConfig,
    OutageConfig,
)
from simulator.cluster.data_parallel import Balancer
from simulator.cluster.fleet import Fleet
from simulator.cluster.gateway import Gateway, TokenBucket
from simulator.cluster.lifecycle import Autoscaler, Failures, Lifecycle
from simulator.cluster.routers import Least
from simulator.core.log import REASONS, Log, pack_run
from simulator.core.request import Request
from simulator.costs.cost_model import JointStep
from simulator.engine.client import Client, Turns
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.predictor import Noisy
from simulator.results.record import ClusterRecord
from simulator.results.request_table import Attempts, gather_requests
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.simulation.cluster import drop_lost_rows
from simulator.workload.workload import Workload
from tests.engine.test_laws import _unroll, clocks, engines, workloads
from tests.support.engines import Clock, fcfs, made, workload
from tests.support.failures import failing, scaling


class World:
    """A fleet with all that may befall it, run to its end."""

    def __init__(
        self, load: Workload, make, clock: Clock, count: int, blocks: dict, *, leap: bool = True
    ) -> None:
        env, turns = simpy.Environment(), Turns(load)
        self.fleet = fleet = Fleet(env, Least(), turns)
        ranks = blocks.get("ranks", 1)

        def again() -> list[Scheduler]:
            return [make() for _ in range(ranks)]

        for _ in range(count):
            if ranks == 1:
                fleet.add("all", make(), clock, leap=leap)
            else:
                balancer = Balancer(ranks, blocks["front_ends"], Random(0))
                shared = blocks["shared"]
                fleet.add_server("all", again(), clock, balancer, leap=leap, joint=shared)
        self.life = Lifecycle(fleet, [again] * count, lambda: self.client.done == len(load))
        for target in fleet.targets[: blocks.get("first", count)]:
            self.life.order(target)
        self.gateway = Gateway(env, fleet, blocks.get("admission"), blocks.get("client"), 0)
        lengths = Noisy(0.0).predictor(load, np.random.default_rng(0))
        self.client = Client(env, load, self.gateway.submit, lengths, turns=turns)
        self.gateway.on_finish = self.client.finished
        if blocks.get("failures"):
            Failures(self.life, blocks["failures"], 0)
        if blocks.get("scaling"):
            self.scaler = Autoscaler(self.life, blocks["scaling"], fleet.targets)
        env.run()
        drop_lost_rows(fleet)
        tries = Attempts(fleet.sent_again, self.gateway.log)
        self.table = gather_requests(load, np.asarray(self.client.sent), fleet.logs, tries)

    def reasons(self) -> list[str]:
        return [REASONS[code] for code in self.table.reason]


troubles = st.fixed_dictionaries(
    {
        "admission": st.sampled_from(
            [None, AdmissionConfig(max_outstanding=2), AdmissionConfig(rate=0.5, burst=2.0)]
        ),
        "failures": st.none() | failing(st.just(0), [None, 8.0, 20.0]),
        "scaling": st.none() | scaling,
    }
)
impatient = st.none() | st.builds(
    ClientConfig,
    timeout=st.sampled_from([None, 1.0, 2.5, 8.0]),
    ttft_timeout=st.sampled_from([None, 0.5, 2.0]),
    max_retries=st.integers(0, 2),
    backoff=st.sampled_from([0.0, 0.5, 1.0]),
    jitter=st.sampled_from([0.0, 0.5]),
)


ranks = st.integers(1, 3)
JOINTS = [
    None,
    JointStep(),
    JointStep(lambda tokens: 0.013 * max(tokens) + 0.007 * sum(tokens)),
    JointStep(lambda tokens: 0.031 * sum(tokens), Clock(0.05, 0.002, 0.0009)),
]
shares = st.sampled_from(JOINTS)
"""What the ranks of a server compute together; None: each goes its own way."""


@given(
    workloads(),
    engines(pipelines=False),
    clocks,
    st.integers(1, 3),
    troubles,
    impatient,
    ranks,
    ranks,
    shares,
)
@settings(max_examples=60, deadline=None)
def test_laws_hold_in_trouble(
    load, engine, clock, count, blocks, client, size, front_ends, shared
) -> None:
    """Stepwise is leaping to the last bit; each request ends once; nothing is left behind."""
    blocks |= {"ranks": size, "front_ends": front_ends, "shared": shared}
    blocks |= {"client": client, "first": 1 if blocks["scaling"] else count}
    count = max(count, 3) if blocks["scaling"] else count
    leapt, stepped = (
        World(load, engine, clock, count, blocks, leap=leap) for leap in (True, False)
    )
    for one, other in zip(leapt.fleet.logs, stepped.fleet.logs, strict=True):
        assert one.request_rows == other.request_rows
        assert one.run_rows == other.run_rows
        assert one.tick_ends == other.tick_ends
        assert _unroll(one) == _unroll(other)
    assert leapt.gateway.log.request_rows == stepped.gateway.log.request_rows
    assert leapt.life.paid == stepped.life.paid
    ids = np.concatenate([log.requests["id"] for log in (*leapt.fleet.logs, leapt.gateway.log)])
    assert sorted(ids.tolist()) == list(range(len(load)))
    for member, target in zip(leapt.fleet.cores, leapt.fleet.owners, strict=True):
        blocks_left = member.scheduler.blocks
        assert blocks_left.free == blocks_left.usable
        assert not member.scheduler.running
        assert not member.scheduler.waiting
        assert target.outstanding == target.tokens == 0
    _check_tokens(leapt)


def _check_tokens(world: World) -> None:
    """The tokens of those that completed are those of their last try, and no others."""
    table = world.table
    for number, log in enumerate(world.fleet.logs):
        runs = log.runs
        for id in np.flatnonzero(table.completed):
            tokens = int((runs["ticks"][runs["id"] == id] + 1).sum())
            assert tokens == (table.generated[id] if table.replica[id] == number else 0)


# ---------------------------------------------------------------- by hand


def world(load: Workload, count: int = 1, make=fcfs, **blocks: object) -> World:
    return World(load, make, Clock(), count, blocks)


def seat() -> Scheduler:
    return fcfs(max_num_seqs=1, max_num_batched_tokens=8)


def test_a_request_that_takes_too_long_leaves_at_the_end_of_a_step() -> None:
    """Steps of a second; it has 3.5 s and wants 9 tokens: the seat is free at 4.0."""
    load = workload((0.0, 4, 9), (3.0, 4, 2))
    seen = world(load, make=seat, client=ClientConfig(timeout=3.5))
    assert seen.reasons() == ["timeout", "stop"]
    assert seen.table.first_scheduled[1] == 4.0
    assert seen.fleet.counters["timed_out_tries"] == 1


def overlapping(**options: object) -> Scheduler:
    """An engine that decides a step when the one before begins."""
    return made(AsyncScheduler, BlockCounter(1000, 4), **options)


def test_a_batch_in_flight_goes_on_without_the_request_that_leaves() -> None:
    """Given up at 3.5: the step of 4.0 was decided at 3.0, so the seat computes from 5.0 on."""
    load = workload((0.0, 4, 9), (3.75, 4, 2))
    alone = {"max_num_seqs": 1, "max_num_batched_tokens": 8}
    seen = world(load, make=lambda: overlapping(**alone), client=ClientConfig(timeout=3.5))
    assert seen.reasons() == ["timeout", "stop"]
    assert seen.table.first_scheduled[1] == 4.0
    assert (seen.table.ttft[1], seen.table.finish[1]) == (2.25, 7.0)
    steps = seen.fleet.logs[0].steps
    decodes = steps["decodes"] * steps["steps"]
    assert decodes.sum() == 4 + 1  # of 1.0 to 5.0, the last of them in vain; of 6.0


def test_a_failure_loses_both_batches_in_flight() -> None:
    """At 2.0 the step of 1.0 has not ended; the other replica can begin with it at 3.0."""
    load = workload((0.0, 4, 5), (0.0, 4, 5))
    outage = OutageConfig(replica=0, start=2.0, duration=10.0)
    seen = world(load, 2, make=overlapping, failures=FailuresConfig(outages=[outage]))
    assert seen.table.replica.tolist() == [1, 1]
    assert seen.table.finish.tolist() == [8.0, 5.0]
    assert seen.table.ttft[0] == 4.0
    assert len(seen.fleet.logs[0].steps) == 1


def test_a_last_token_that_was_scheduled_is_lost_with_its_step() -> None:
    """The last step, from 4.0 to 5.0, was told of as part of a leap when the replica fails."""
    outage = OutageConfig(replica=0, start=4.5, duration=10.0)
    failures = FailuresConfig(outages=[outage])
    seen = world(workload((0.0, 4, 5)), 2, make=overlapping, failures=failures)
    assert seen.fleet.counters["tries_lost_in_failures"] == 1
    assert seen.table.finish.tolist() == [9.5]
    assert seen.fleet.logs[0].tick_ends.tolist() == [2.0, 3.0, 4.0]


def test_runs_of_tokens_that_never_come_are_struck_out() -> None:
    """Two steps have ended; a run that was written down ahead says that it has a third."""
    log = Log(8, 4)
    log.tick_ends.extend([1.0, 2.0])
    log.run_rows += pack_run(0.5, 7, 0, 2) + pack_run(0.5, 8, 1, 2)
    log.drop_runs_ahead()
    assert log.runs["id"].tolist() == [7]


def test_rows_are_dropped_of_lost_tries_alone() -> None:
    """Of requests 3 and 7, sent once more at 5 s, what began before; others keep all."""
    log = Log(8, 4)
    for id in (2, 3, 5, 7, 9):
        log.run_rows += pack_run(1.0, id, 0, 1) + pack_run(6.0, id, 0, 1)
    drop_lost_rows(cast("Fleet", SimpleNamespace(sent_again={7: 5.0, 3: 5.0}, logs=[log])))
    late, early = ([int(row["id"]) for row in log.runs if row["start"] == at] for at in (6.0, 1.0))
    assert late == [2, 3, 5, 7, 9]
    assert early == [2, 5, 9]


def test_the_first_token_may_be_in_time_and_the_others_take_their_time() -> None:
    load = workload((0.0, 4, 9), (1.0, 4, 2))
    seen = world(load, make=seat, client=ClientConfig(ttft_timeout=3.5))
    assert seen.reasons() == ["stop", "timeout"]


def test_a_first_token_counts_though_the_engine_has_leapt_past_it() -> None:
    """It is out at 1.0; at 1.5, when the client looks, the engine is in a leap of decodes."""
    client = ClientConfig(ttft_timeout=1.5)
    seen = world(workload((0.0, 4, 9)), make=overlapping, client=client)
    assert seen.reasons() == ["stop"]


def test_a_retry_comes_after_its_back_off_and_begins_anew() -> None:
    """Tries at 0, 2 + 1 and 5 + 2: the third finds the seat free from 9 on."""
    load = workload((0.0, 4, 8), (0.5, 4, 2))
    patience = ClientConfig(timeout=100, ttft_timeout=2.0, max_retries=3, backoff=1.0)
    seen = world(load, make=seat, client=patience)
    assert seen.reasons() == ["stop", "stop"]
    # Given up at 2.5, tried at 3.5; at 5.5, tried at 7.5: admitted at 8 as the first one ends.
    assert seen.table.first_scheduled[1] == 8.0
    assert seen.table.ttft[1] == 8.5
    assert seen.table.retry_time.tolist() == [0.0, 7.0]
    assert seen.table.queue_time.tolist() == [0.0, 0.5]
    first, second, *_ = phases(seen.table, 1, [], 10.0)
    assert (first, second) == (("earlier tries", 0.5, 7.5), ("queued", 7.5, 8.0))
    assert seen.fleet.counters["retries"] == 2


def test_a_full_cluster_refuses_and_the_less_important_first() -> None:
    load = workload(*[(0.0, 4, 4)] * 4)
    load.priority = np.array([0, 1, 0, 0])
    seen = world(load, admission=AdmissionConfig(max_outstanding=2, shed_from=0.5))
    assert seen.reasons() == ["stop", "shed", "stop", "shed"]
    assert seen.fleet.counters["refused_tries"] == 2


def test_a_token_bucket_for_each_client() -> None:
    load = workload(*[(0.0, 4, 1)] * 3, (0.9, 4, 1), (1.1, 4, 1))
    load.client = ["a", "a", "b", "a", "a"]
    seen = world(load, admission=AdmissionConfig(rate=1.0, burst=1.0))
    assert seen.reasons() == ["stop", "shed", "stop", "shed", "stop"]
    bucket = TokenBucket(2.0, 3.0, 0.0)
    assert [bucket.take(when) for when in (0, 0, 0, 0, 0.5, 0.5, 9, 9, 9, 9)] == (
        [True] * 3 + [False, True, False] + [True] * 3 + [False]
    )


def test_a_failure_loses_work_but_no_request() -> None:
    """The step that would end at 2.0 has not ended when the replica fails at 2.0."""
    load = workload((0.0, 4, 5), (0.0, 4, 5))
    outage = OutageConfig(replica=0, start=2.0, duration=10.0)
    seen = world(load, 2, failures=FailuresConfig(outages=[outage]))
    assert seen.table.replica.tolist() == [1, 1]
    assert seen.table.finish.tolist() == [7.0, 5.0]
    assert seen.table.ttft[0] == 3.0  # asked anew: the token of 1.0 is worth nothing
    assert seen.fleet.counters["failures"] == seen.fleet.counters["tries_lost_in_failures"] == 1
    assert len(seen.fleet.logs[0].steps) == 1
    assert seen.fleet.logs[0].runs.size == 0


def test_who_finds_no_replica_waits_for_one() -> None:
    outage = OutageConfig(replica=0, start=0.0, duration=10.0)
    seen = world(workload((1.0, 4, 2)), failures=FailuresConfig(outages=[outage]))
    assert seen.table.first_scheduled[0] == 10.0


def test_scaling_grows_with_the_queue_pays_from_the_order_and_drains() -> None:
    """A job of 4 s each second, one seat: 3 wait at 5 s (1.5 x 2), 7 at 10 s (3.5 x 2)."""
    load = workload(*[(k + 0.5, 4, 4) for k in range(20)], (200.0, 4, 4))
    scaling = AutoscalingConfig(
        target=2.0, max_replicas=3, interval=5.0, cooldown=20.0, startup_delay=7.0
    )
    seen = world(load, 3, make=seat, first=1, scaling=scaling)
    paid = seen.life.paid
    assert paid[0][0] == 0.0
    assert [paid[1][0], paid[2][0]] == [5.0, 10.0]
    assert [log.steps["start"][0] for log in seen.fleet.logs[1:]] == [12.5, 17.5]
    assert seen.table.reason.tolist() == [0] * 21
    gone = [times for times in paid if len(times) == 2]  # long before the last request
    assert len(gone) == 2
    assert all(30.0 <= end < 100.0 for _, end in gone)
    record = ClusterRecord([], [], paid, {}, Attempts({}))
    assert record.paid_seconds(paid.index(gone[0]), gone[0][1] - 3.0, 999.0) == 3.0


@pytest.mark.parametrize(("waiting", "ordered"), [(6, [10.0]), (4, [])])
def test_a_replica_that_drains_is_taken_back_before_another_is_ordered(
    waiting: int, ordered: list[float]
) -> None:
    """At 5 s nobody waits, and 1 drains; six who wait for 0 at 10 s call for three, four for two.

    Where the one that drains is enough none is ordered.
    """
    load = workload((0.0, 4, 60), (0.0, 4, 60), *[(7.0, 4, 4)] * waiting)
    scaling = AutoscalingConfig(
        target=2.0, max_replicas=3, interval=5.0, cooldown=0.0, startup_delay=7.0
    )
    seen = world(load, 3, make=seat, first=2, scaling=scaling)
    changes = [(when, state) for when, index, state in seen.life.changes if index == 1]
    assert changes[:3] == [(0.0, "up"), (5.0, "draining"), (10.0, "up")]
    assert seen.life.paid[2][:1] == ordered


def test_failures_come_by_chance_again_and_again() -> None:
    """Each after a time of its own: up 10 s in the mean, away 1 s."""
    load = workload(*[(float(k), 4, 1) for k in range(100)])
    seen = world(load, failures=FailuresConfig(mtbf=10.0, mttr=1.0))
    random, when, told = Random("failures 0 0"), 0.0, []
    while len(told) < 6:
        for mean, state in ((10.0, "down"), (1.0, "up")):
            when += random.expovariate(1.0 / mean)
            told.append((when, 0, state))
    assert seen.life.changes[1:7] == told


def test_the_first_look_at_an_slo_counts_who_has_ended_and_no_others() -> None:
    """One has ended, too late: all miss a bound that half may miss."""
    env = simpy.Environment()
    fleet = Fleet(env, Least(), None)
    fleet.add("all", fcfs(), Clock())
    life = Lifecycle(fleet, [list], lambda: False)
    life.order(fleet.targets[0])
    scaling = AutoscalingConfig(metric="slo_attainment", target=0.5, max_replicas=1, interval=5.0)
    scaler = Autoscaler(
        life, scaling, fleet.targets, sent=lambda _: 0.0, bounds=lambda _: {"ttft": 1000.0}
    )
    late = Request(0, 0.0, 4, 1)
    late.first_token = late.finish = 2.0
    scaler.observe(late)
    env.run(until=6.0)
    assert scaler.quotient == 2.0
