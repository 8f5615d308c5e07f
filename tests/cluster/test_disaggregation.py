"""Prefill and decode on different replicas: the laws, and hand-worked runs."""

from collections.abc import Callable

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cluster.config import (
    AdmissionConfig,
    ClientConfig,
    FailuresConfig,
    OutageConfig,
)
from simulator.cluster.disaggregation import DisaggregatedFleet
from simulator.cluster.gateway import Gateway
from simulator.cluster.lifecycle import Autoscaler, Failures, Lifecycle
from simulator.cluster.routers import ROUTERS, Least
from simulator.core.alarm import Alarm
from simulator.core.log import REASONS, TRANSFER
from simulator.engine.client import Client, Turns
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.policies.fair import DRR, Fair
from simulator.policies.orders import SJF, Priority
from simulator.policies.predictor import Noisy
from simulator.schedulers.vllm.kv_roles import AsyncConsumer, AsyncProducer, Consumer, Producer
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.simulation.cluster import drop_lost_rows
from simulator.workload.workload import Workload
from tests.cluster.test_resilience import impatient
from tests.engine.test_laws import _unroll, clocks, workloads
from tests.support.engines import Clock, made, workload
from tests.support.failures import failing, scaling

OVERLAPPING = {Producer: AsyncProducer, Consumer: AsyncConsumer}
Make = Callable[[type[Scheduler]], Scheduler]


class World:
    """Producers and consumers with all that may befall them, run to its end.

    `blocks["turned"]` puts the consumers first; the last group scales. `blocks["layers"]` sends
    layer by layer, `blocks["local"]` has the consumers compute so short prompts: they come first.
    """

    def __init__(
        self,
        load: Workload,
        make: Make,
        clock: Clock,
        counts: tuple[int, int],
        blocks: dict,
        *,
        link: tuple[float, float] = (0.0, 0.0),
        routers: tuple[str, str] = ("least_outstanding", "least_outstanding"),
        leap: bool = True,
    ) -> None:
        env, turns = simpy.Environment(), Turns(load)
        first, second = (ROUTERS[name]() for name in routers)
        self.fleet = fleet = DisaggregatedFleet(
            env,
            first,
            turns,
            to_consumers=second,
            block_seconds={"prefill": link[0]},
            latency=link[1],
            layers={"prefill": blocks["layers"]} if blocks.get("layers") else None,
            max_local=blocks.get("local", 0),
        )
        makers = []
        routers = [("prefill", Producer, counts[0]), ("decode", Consumer, counts[1])]
        for group, kind, count in reversed(routers) if blocks.get("turned") else routers:
            for _ in range(count):
                makers.append(lambda kind=kind: [make(kind)])
                fleet.add(group, makers[-1]()[0], clock, leap=leap)
        self.life = Lifecycle(fleet, makers, lambda: self.client.done == len(load))
        spare = blocks.get("spare", 0)
        for target in fleet.targets[: len(fleet.targets) - spare]:
            self.life.order(target)
        self.gateway = Gateway(env, fleet, blocks.get("admission"), blocks.get("client"), 0)
        lengths = Noisy(0.0).predictor(load, np.random.default_rng(0))
        self.client = Client(env, load, self.gateway.submit, lengths, turns=turns)
        self.gateway.on_finish = self.client.finished
        if blocks.get("failures"):
            Failures(self.life, blocks["failures"], 0)
        if blocks.get("scaling"):
            same = [target for target in fleet.targets if target.group == group]
            Autoscaler(self.life, blocks["scaling"], same)
        env.run()
        drop_lost_rows(fleet)


@st.composite
def engines(draw: st.DrawFn) -> Make:
    """Engines that both routers can be, from little memory to plenty."""
    seats = draw(st.integers(1, 6))
    limits = {
        "max_num_seqs": seats,
        "max_num_batched_tokens": draw(st.integers(max(seats, 3), 48)),
        "max_model_len": 64,
        "watermark": draw(st.sampled_from([0.0, 0.1])),
        "prefill_schedule_interval": draw(st.sampled_from([1, 1, 3])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 5])),
        "reserve_output_tokens": draw(st.sampled_from([None, None, None, "max_tokens", 3])),
    }
    size = draw(st.sampled_from([1, 2, 4, 16]))
    count = draw(st.integers(30, 130)) // size + 2
    caching = draw(st.sampled_from([None, False, True, True]))
    policy = draw(st.sampled_from([None, None, SJF, Priority, Fair, DRR]))
    overlaps = draw(st.booleans())

    def make(kind: type[Scheduler]) -> Scheduler:
        blocks = (
            BlockCounter(count, size) if caching is None else BlockManager(count, size, caching)
        )
        kind = OVERLAPPING[kind] if overlaps else kind
        return made(kind, blocks, policy=policy and policy(), **limits)

    return make


links = st.tuples(st.sampled_from([0.0, 0.0625, 0.1, 0.5]), st.sampled_from([0.0, 0.5, 0.3]))
routers = st.tuples(
    st.sampled_from(["round_robin", "least_outstanding", "least_tokens", "prefix_aware"]),
    st.sampled_from(["round_robin", "least_outstanding", "least_kv", "session_affinity"]),
)


troubles = st.fixed_dictionaries(
    {
        "turned": st.booleans(),
        "admission": st.sampled_from([None, None, AdmissionConfig(max_outstanding=2)]),
        "failures": st.none() | failing(st.integers(0, 1), [None, None, 40.0]),
        "scaling": st.none() | scaling,
        "layers": st.sampled_from([0, 0, 2, 3]),
        "local": st.sampled_from([0, 0, 4, 9]),
    }
)


@given(
    *(workloads(), engines(), clocks, st.integers(1, 2), st.integers(1, 3)),
    *(links, routers, troubles, impatient),
)
@settings(max_examples=60, deadline=None)
def test_laws_hold(load, make, clock, first, second, link, routers, blocks, client) -> None:
    """Stepwise is leaping to the last bit; each request ends once; nothing is left behind."""
    if blocks["scaling"]:
        first, second = (3, second) if blocks["turned"] else (first, 3)
    blocks |= {"client": client, "spare": 2 if blocks["scaling"] else 0}
    leapt, stepped = (
        World(load, make, clock, (first, second), blocks, link=link, routers=routers, leap=leap)
        for leap in (True, False)
    )
    for one, other in zip(leapt.fleet.logs, stepped.fleet.logs, strict=True):
        assert one.request_rows == other.request_rows
        assert one.run_rows == other.run_rows
        assert one.tick_ends == other.tick_ends
        assert one.joined == other.joined
        assert _unroll(one) == _unroll(other)
    assert leapt.fleet.transfers == stepped.fleet.transfers
    assert leapt.gateway.log.request_rows == stepped.gateway.log.request_rows
    assert leapt.life.paid == stepped.life.paid
    _check_ends(leapt, len(load))
    for member, target in zip(leapt.fleet.cores, leapt.fleet.targets, strict=True):
        scheduler = member.scheduler
        assert scheduler.blocks.free == scheduler.blocks.usable
        assert not scheduler.running
        assert not scheduler.waiting
        assert not getattr(scheduler, "sending", None)
        assert not getattr(scheduler, "loading", None)
        assert scheduler.stored(scheduler.schedule(0.0)) == 0
        assert target.outstanding == target.tokens == 0


def _check_ends(world: World, count: int) -> None:
    """Each request has one row among those of consumers, of the refused and of the given up."""
    logs = world.fleet.logs
    ids = list(world.gateway.log.requests["id"])
    for number, log in enumerate(logs):
        rows = log.requests
        if number in world.fleet.links:
            rows = rows[rows["reason"] == 2]
        ids += list(rows["id"])
    assert sorted(ids) == list(range(count))
    assert not world.fleet._client_requests
    assert not world.fleet._handoffs
    assert not world.fleet._at


# ---------------------------------------------------------------- by hand


def half(kind: type[Scheduler], count: int = 1000, caching: bool = False, **options) -> Scheduler:
    """Blocks of 4 tokens."""
    blocks = BlockManager(count, 4, True) if caching else BlockCounter(count, 4)
    return made(kind, blocks, **options)


def world(load: Workload, counts: tuple[int, int] = (1, 1), make: Make = half, **blocks) -> World:
    """Steps of a second; a block keeps the link for 0.5 s, its last byte takes 0.25 s more."""
    return World(load, make, Clock(), counts, blocks, link=(0.5, 0.25))


def moved(seen: World) -> list[tuple]:
    """Ready, asked, begin, end, scheduled, blocks and found of each transfer."""
    rows = np.frombuffer(bytes(seen.fleet.transfers), TRANSFER)
    return [tuple(row)[3:] for row in rows.tolist()]


def ended(seen: World) -> list[tuple]:
    """First token and finish of each request, by id."""
    rows = np.concatenate(
        [log.requests for k, log in enumerate(seen.fleet.logs) if k not in seen.fleet.links]
    )
    rows = np.sort(rows, order="id")
    return list(zip(rows["first_token"].tolist(), rows["finish"].tolist(), strict=True))


def test_a_prompt_moves_and_the_first_token_comes_from_the_consumer() -> None:
    """8 tokens are 2 blocks: computed at 1.0, sent at 2.0, there at 2.25; a step to each token."""
    seen = world(workload((0.0, 8, 3)))
    assert moved(seen) == [(1.0, 1.0, 1.0, 2.25, 2.25, 2, 0)]
    assert ended(seen) == [(3.25, 5.25)]
    assert list(seen.fleet.cores[1].log.joined) == [2.25]  # it asked at once, and waits no more
    assert ended(world(workload((0.0, 8, 1)))) == [(3.25, 3.25)]


def test_transfers_of_one_producer_queue_those_of_two_do_not() -> None:
    load = workload((0.0, 8, 2), (0.0, 8, 2))
    one, two = world(load), world(load, (2, 1))
    assert [row[2:4] for row in moved(one)] == [(1.0, 2.25), (2.0, 3.25)]
    assert [row[2:4] for row in moved(two)] == [(1.0, 2.25)] * 2
    assert ended(one) == [(3.25, 4.25), (4.25, 5.25)]
    assert ended(two) == [(3.25, 4.25)] * 2


def test_who_waits_for_its_kv_takes_no_seat_and_then_comes_first() -> None:
    """One seat: both ask at 1.0, and the second, there at 3.25, waits for the first until 5.25."""

    def one_seat(kind):
        return half(kind, max_num_seqs=1 if kind is Consumer else 9, max_num_batched_tokens=32)

    load = workload((0.0, 8, 3), (0.0, 8, 2), (0.5, 8, 1))
    seen = world(load, make=one_seat)
    assert moved(seen)[1] == (1.0, 1.0, 2.0, 3.25, 5.25, 2, 0)
    # The third is ready at 2.0, before the first has the seat: it asks, and comes third.
    assert moved(seen)[2] == (2.0, 2.0, 3.0, 4.25, 7.25, 2, 0)
    assert seen.fleet.cores[1].scheduler.max_num_seqs == 1


def test_a_full_batch_asks_for_nothing() -> None:
    """Ready at 4.0, while the seat is taken from 2.25 to 8.25: it is pulled from then on."""

    def one_seat(kind):
        return half(kind, max_num_seqs=1, max_num_batched_tokens=32)

    seen = world(workload((0.0, 8, 6), (3.0, 8, 1)), make=one_seat)
    assert moved(seen)[1] == (4.0, 8.25, 8.25, 9.5, 9.5, 2, 0)
    assert list(seen.fleet.cores[1].log.joined) == [2.25, 4.0, 9.5]


def test_a_consumer_that_fails_frees_what_the_producer_kept_for_who_waited_there() -> None:
    """As above, but it fails at 5.0 for 2 s: both are computed again, one after the other."""

    def one_seat(kind):
        return half(kind, max_num_seqs=1, max_num_batched_tokens=32)

    outage = OutageConfig(replica=1, start=5.0, duration=2.0)
    load = workload((0.0, 8, 6), (3.0, 8, 1))
    seen = world(load, make=one_seat, failures=FailuresConfig(outages=[outage]))
    assert seen.fleet.counters["tries_lost_in_failures"] == len(ended(seen)) == 2
    for member in seen.fleet.cores:
        assert member.scheduler.blocks.free == member.scheduler.blocks.usable


def test_blocks_that_the_consumer_has_need_not_move() -> None:
    """The last token is always computed again: of 2 full blocks the cache serves but one."""
    load = workload((0.0, 8, 2), (9.0, 8, 2))
    load.segments = [(("a", 8),), (("a", 8),)]
    seen = world(load, make=lambda kind: half(kind, caching=True))
    assert [row[-2:] for row in moved(seen)] == [(2, 0), (1, 1)]
    assert seen.fleet.logs[0].requests["cached"].tolist() == [0, 4]  # the producer's cache, too


def test_a_producer_keeps_its_blocks_until_they_are_moved() -> None:
    """It has 2 blocks: the second prompt begins as the first has been copied, at 2.25."""
    seen = world(
        workload((0.0, 8, 1), (0.0, 8, 1)),
        make=lambda kind: half(kind, 3 if kind is Producer else 99),
    )
    assert seen.fleet.logs[0].steps["start"].tolist() == [0.0, 2.25]
    assert moved(seen)[1][0] == 3.25


def test_who_is_preempted_computes_its_prompt_where_it_decodes() -> None:
    """5 usable blocks, two requests that need 3 each at last: nothing moves twice."""
    seen = world(
        workload((0.0, 4, 8), (0.0, 4, 8)),
        make=lambda kind: half(kind, 6 if kind is Consumer else 99),
    )
    rows = seen.fleet.logs[1].requests
    assert sorted(rows["preemptions"].tolist()) == [0, 1]
    assert len(moved(seen)) == 2
    assert seen.fleet.logs[1].steps["prefill_tokens"].sum() == 4 + 5  # prompt and 5 tokens
    assert len(seen.fleet.logs[0].steps) == 1


def overlapping(kind: type[Scheduler], **options) -> Scheduler:
    """The producer has 2 blocks, the consumer plenty; a prompt computes 4 tokens a step."""
    many = 3 if kind is Producer else 99
    return half(OVERLAPPING[kind], many, long_prefill_token_threshold=4, **options)


def test_a_prompt_whose_blocks_were_taken_with_its_token_on_the_way_is_computed_again() -> None:
    """The second step, decided at 0.0 as the first, takes the other prompt's only block.

    That one is told at 1.0 to be done, has nothing to move and is computed where it decodes.
    """
    seen = world(workload((0.0, 8, 2), (0.0, 4, 2)), make=overlapping)
    assert moved(seen) == [(1.0, 1.0, 1.0, 1.0, 1.0, 0, 0), (2.0, 2.0, 2.0, 3.25, 3.25, 2, 0)]
    assert ended(seen) == [(4.25, 5.25), (2.0, 3.0)]
    assert seen.fleet.logs[1].steps["prefill_tokens"].tolist() == [4, 0, 0, 0]


@pytest.mark.parametrize(("patience", "transfers"), [(0.5, 0), (1.5, 1), (2.5, 1), (3.5, 1)])
def test_a_client_that_gives_up_leaves_nothing(patience: float, transfers: int) -> None:
    """In prefill, on the way (the transfer goes on), in the first step there, while it decodes."""
    seen = world(workload((0.0, 8, 9), (4.0, 8, 1)), client=ClientConfig(timeout=patience))
    reasons = [REASONS[row["reason"]] for row in seen.gateway.log.requests]
    assert reasons[0] == "timeout"
    assert seen.fleet.links[0].transfers == transfers + (len(reasons) == 1 or patience > 1)
    for member in seen.fleet.cores:
        assert member.scheduler.blocks.free == member.scheduler.blocks.usable


@pytest.mark.parametrize("replica", [0, 2])
def test_a_failure_while_the_kv_moves_starts_the_request_anew(replica: int) -> None:
    """At 1.5 the producer, or the consumer, fails: prompt again 1.5 to 2.5, moved at 3.75."""
    outage = OutageConfig(replica=replica, start=1.5, duration=50.0)
    seen = world(workload((0.0, 8, 2)), (2, 2), failures=FailuresConfig(outages=[outage]))
    assert moved(seen) == [(2.5, 2.5, 2.5, 3.75, 3.75, 2, 0)]
    assert ended(seen) == [(4.75, 5.75)]
    assert seen.fleet.counters["tries_lost_in_failures"] == 1
    assert not any(target.models for target in seen.fleet.targets)


def test_a_producer_that_fails_has_no_part_in_what_has_been_moved() -> None:
    """At 4.0 the first decodes, and the second, there since 3.25, waits for its seat."""

    def one_seat(kind):
        return half(kind, max_num_seqs=1 if kind is Consumer else 9, max_num_batched_tokens=32)

    outage = OutageConfig(replica=0, start=4.0, duration=50.0)
    load = workload((0.0, 8, 3), (0.0, 8, 2))
    seen = world(load, make=one_seat, failures=FailuresConfig(outages=[outage]))
    assert ended(seen) == [(3.25, 5.25), (6.25, 7.25)]
    assert seen.fleet.counters["tries_lost_in_failures"] == 0


def test_transfers_behind_one_that_is_broken_off_move_up() -> None:
    """The first goes to consumer 1, which fails at 1.5: the link turns to the second at once."""
    outage = OutageConfig(replica=1, start=1.5, duration=50.0)
    load = workload((0.0, 8, 1), (0.0, 8, 1))
    seen = world(load, (1, 2), failures=FailuresConfig(outages=[outage]))
    assert moved(seen)[0] == (1.0, 1.0, 1.5, 2.75, 2.75, 2, 0)
    assert moved(seen)[1][:4] == (2.5, 2.5, 2.5, 3.75)


def test_without_a_consumer_prompts_wait_at_the_producer() -> None:
    outage = OutageConfig(replica=1, start=0.5, duration=4.0)
    seen = world(workload((0.0, 8, 1)), failures=FailuresConfig(outages=[outage]))
    assert moved(seen) == [(1.0, 4.5, 4.5, 5.75, 5.75, 2, 0)]


def test_a_producer_drains_when_what_it_has_computed_has_been_moved() -> None:
    env = simpy.Environment()
    fleet = DisaggregatedFleet(
        env, Least(), None, to_consumers=Least(), block_seconds={"p": 0.5}, latency=0.25
    )
    for group, kind in (("p", Producer), ("d", Consumer)):
        fleet.add(group, half(kind), Clock())
    life = Lifecycle(fleet, [list] * 2, lambda: False)
    for target in fleet.targets:
        life.order(target)
    client = Client(env, workload((0.0, 8, 2)), fleet.submit)
    fleet.on_finish = client.finished
    Alarm(env, lambda _: life.drain(fleet.targets[0])).set(1.5)
    env.run()
    assert life.paid[0] == [0.0, 2.25]
    assert client.done == 1
