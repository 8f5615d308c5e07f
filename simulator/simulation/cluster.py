"""From the block `cluster` of a scenario to a fleet, and from its run to a result."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random

import numpy as np

from simulator.build.assemble_fleet import make_fleet
from simulator.build.assemble_scheduler import make_scheduler
from simulator.build.engine_spec import EngineSpec
from simulator.cluster.data_parallel import Balancer
from simulator.cluster.disaggregation import DisaggregatedFleet
from simulator.cluster.encoders import EncoderFleet
from simulator.cluster.fleet import Fleet, Sessions
from simulator.cluster.gateway import Gateway
from simulator.cluster.lifecycle import Autoscaler, Failures, GpuBudget, Lifecycle
from simulator.cluster.routers import Target
from simulator.core.alarm import FastEnvironment
from simulator.core.log import PAUSE, RUN
from simulator.core.request import Request
from simulator.engine.client import Client
from simulator.kv_cache.tiers import SecondaryTier
from simulator.results.kv_transfers import Encodings, Transfers
from simulator.results.record import ClusterRecord
from simulator.results.request_table import Attempts
from simulator.scenario.resolve import fleet_spec
from simulator.scenario.scenario import Scenario
from simulator.schedulers.interface import SchedulerInterface
from simulator.simulation.result import Result
from simulator.simulation.setup import AnyClient, MakeClient, Setup

REWRITING = {"failures", "client"}
"""Keys of a cluster by which rows of a log may be taken out again."""


def set_up_cluster(
    scenario: Scenario,
    specs: Mapping[str, EngineSpec],
    shares: bool,
    make: MakeClient[AnyClient],
    sessions: Sessions | None,
    *,
    leap: bool,
) -> Setup[AnyClient]:
    """Put a client before the replicas of a cluster; see `set_up`."""
    fleet = make_fleet(FastEnvironment(), fleet_spec(scenario), specs, sessions)
    record, life = add_replicas(fleet, scenario, specs, shares, leap=leap)
    client = connect_client(fleet, scenario, record, life, partial(make, fleet.env))
    cluster = scenario.servers
    apart = isinstance(fleet, DisaggregatedFleet | EncoderFleet)
    rewrites = apart or bool(cluster.scalers or cluster.model_fields_set & REWRITING)
    return Setup(
        client,
        specs,
        fleet.cores,
        fleet.abandon,
        fleet=fleet,
        record=record,
        missed=life.missed,
        apart=apart,
        rewrites=rewrites,
    )


def add_record(result: Result, setup: Setup[Client]) -> None:
    """Put into a result what became of a fleet that has run."""
    fleet, record = setup.fleet, setup.record
    assert fleet is not None
    assert record is not None
    result.cluster = record
    drop_lost_rows(fleet)
    if isinstance(fleet, DisaggregatedFleet):
        record.transfers = _transfers(fleet, result.specs)
        result.logs = record.transfers.seen()
    if isinstance(fleet, EncoderFleet):
        fleet.forget_jobs()
        links = fleet.links.items()
        outputs = {number: (link.transfers, link.blocks, link.busy) for number, link in links}
        record.encodings = Encodings.of(bytes(fleet.encodings), outputs)
        record.tries = record.tries._replace(encoded=record.encodings.rows)


def _transfers(fleet: DisaggregatedFleet, specs: Mapping[str, EngineSpec]) -> Transfers:
    """Return what went over the links of a fleet that has run."""
    producers = {}
    for number, link in fleet.links.items():
        spec = specs[fleet.targets[number].group]
        size = spec.block_bytes * spec.engine.tensor_parallel_size
        producers[number] = link.transfers, link.blocks * size, link.busy
    return Transfers.of(bytes(fleet.transfers), fleet.logs, producers, fleet.sent_again)


def add_replicas(
    fleet: Fleet,
    scenario: Scenario,
    specs: Mapping[str, EngineSpec],
    shares: bool,
    *,
    leap: bool,
    startup_delay: float = 0.0,
) -> tuple[ClusterRecord, Lifecycle]:
    """Add all replicas that there may ever be, and start those that there are at first.

    `shares` says that prompts have contents. The first replicas are up after `startup_delay`, s.
    """
    stores: dict[str, SecondaryTier] = {}
    makers: list[Callable[[], Sequence[SchedulerInterface]]] = []
    first: list[Target] = []
    for name, group in scenario.servers.replica_groups.items():
        spec = specs[name]
        ranks = spec.engine.data_parallel_size
        make = partial(_make_schedulers, spec, shares, stores)
        for number in range(scenario.servers.max_replicas(name)):
            if ranks == 1:
                target = fleet.add(name, make()[0], spec.cost, leap=leap)
            else:
                balancer = _balancer(spec, len(fleet.targets))
                rank, joint = spec.cost.rank_cost, spec.cost.joint
                target = fleet.add_server(name, make(), rank, balancer, leap=leap, joint=joint)
            if spec.engine.enable_lora:
                target.max_loras = ranks * spec.engine.max_loras
            makers.append(make)
            if number < group.replicas:
                first.append(target)
    life = Lifecycle(fleet, makers, lambda: False)
    for target in first:
        life.order(target, startup_delay)
    owners = fleet.owners
    record = ClusterRecord(
        [one.group for one in owners],
        [one.index for one in owners],
        paid=life.paid,
        counters=fleet.counters,
        tries=Attempts(fleet.sent_again),
        changes=life.changes,
    )
    return record, life


def _make_schedulers(
    spec: EngineSpec, shares: bool, stores: dict[str, SecondaryTier]
) -> Sequence[SchedulerInterface]:
    """Make the scheduler of each rank of a replica; what all replicas share is in `stores`."""
    made = [make_scheduler(spec, shares) for _ in range(spec.engine.data_parallel_size)]
    for scheduler in made:
        scheduler.door = made[0].door  # one server's, before all ranks
        if (tier := scheduler.blocks.tier) is not None:
            tier.secondary = [
                stores.setdefault(one.name, one) if one.shared else one for one in tier.secondary
            ]
    return made


def _balancer(spec: EngineSpec, number: int) -> Balancer:
    """Make the load balancer of a data-parallel server."""
    engine = spec.engine
    front_ends = engine.api_server_count or engine.data_parallel_size
    random = Random(f"front ends {spec.seed} {number}")
    return Balancer(engine.data_parallel_size, front_ends, random)


def connect_client(
    fleet: Fleet,
    scenario: Scenario,
    record: ClusterRecord,
    life: Lifecycle,
    make: Callable[[Callable[[Request], None], Callable[[Request], None]], AnyClient],
) -> AnyClient:
    """Put a client before the fleet, and what happens to replicas beside it.

    `make(submit, cancel)` gives the client that sends through `submit` and hangs up by `cancel`.
    """
    cluster, env = scenario.servers, fleet.env
    entry: Fleet | Gateway = fleet
    if cluster.admission is not None or cluster.client is not None:
        entry = Gateway(env, fleet, cluster.admission, cluster.client, scenario.seed)
        record.tries = Attempts(fleet.sent_again, entry.log)
    client = make(entry.submit, entry.hang_up)
    life.done = lambda: client.done == client.total
    life.ended = lambda: client.done
    entry.on_finish = client.finished
    if cluster.failures is not None:
        Failures(life, cluster.failures, scenario.seed)
    if cluster.scalers:
        budget = None
        if cluster.max_gpu_budget is not None:
            sizes = {name: own.engine.gpus for name, own in scenario.groups.items()}
            gpus = [sizes[target.group] for target in fleet.targets]
            budget = GpuBudget(life, cluster.max_gpu_budget, gpus, cluster.switch_delay)
        scalers = [
            Autoscaler(
                life,
                block,
                [target for target in fleet.targets if target.group == name],
                sent=client.sent_at,
                bounds=lambda one: scenario.goodput.of(one.client, one.priority, one.model),
                budget=budget,
            )
            for name, block in cluster.scalers.items()
        ]

        def ended(request: Request) -> None:
            for scaler in scalers:
                scaler.observe(request)
            client.finished(request)

        entry.on_finish = ended
    return client


def drop_lost_rows(fleet: Fleet) -> None:
    """Take out of the logs what tries had said that were lost: nobody has received it."""
    last = fleet.sent_again
    if not last:
        return
    ids = np.fromiter(last, np.int64, len(last))
    order = np.argsort(ids)
    ids, since = ids[order], np.fromiter(last.values(), np.float64, len(last))[order]
    for log in fleet.logs:
        for rows, kind in ((log.run_rows, RUN), (log.pause_rows, PAUSE)):
            found = np.frombuffer(bytes(rows), kind)
            at = np.minimum(np.searchsorted(ids, found["id"]), len(ids) - 1)
            stale = (ids[at] == found["id"]) & (found["start"] < since[at])
            if stale.any():
                rows[:] = found[~stale].tobytes()
