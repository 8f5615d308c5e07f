"""From the block `cluster` of a scenario to a fleet, and from its run to a result."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import TypeVar

import numpy as np

from simulator.cluster.config import SleepModeConfig
from simulator.cluster.data_parallel import Balancer
from simulator.cluster.disaggregation import DisaggregatedFleet
from simulator.cluster.encoders import EncoderFleet
from simulator.cluster.fleet import Fleet
from simulator.cluster.gateway import Gateway
from simulator.cluster.lifecycle import Autoscaler, Failures, GpuBudget, Lifecycle
from simulator.cluster.routers import Target
from simulator.cluster.sleep_mode import SleepMode, SleepTimes, awake_first
from simulator.core.alarm import FastEnvironment
from simulator.core.log import PAUSE, REJECTED, RUN, Log
from simulator.core.request import Request
from simulator.costs.cost_model import CostModel
from simulator.costs.noise import Errors
from simulator.engine.client import Client, StreamClient
from simulator.engine.drive import drive
from simulator.kv_cache.tiers import SecondaryTier
from simulator.policies.predictor import make_predictor
from simulator.results.encodings import Encodings
from simulator.results.kv_transfers import Transfers
from simulator.results.record import ClusterRecord, replicas_in
from simulator.results.request_table import Attempts
from simulator.results.service_levels import need_parts, service_levels
from simulator.scenario.assemble_fleet import make_fleet
from simulator.scenario.assemble_scheduler import make_scheduler
from simulator.scenario.engine_spec import EngineSpec
from simulator.scenario.kv_room import memory_budget
from simulator.scenario.policy_table import missing_inputs
from simulator.scenario.resolve import resolve_groups
from simulator.scenario.scenario import Scenario
from simulator.schedulers.interface import SchedulerInterface
from simulator.simulation.independent import find_coupling, run_independent
from simulator.simulation.result import Result
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.workload import Floats, Workload

REWRITING = {"failures", "client"}
"""Keys of a cluster by which rows of a log may be taken out again."""
NONE_COMES_BACK = "cluster.failures: requests wait for a replica, and none comes back"

AnyClient = TypeVar("AnyClient", Client, StreamClient)


def sessions_of(workload: Workload) -> list[int] | None:
    """Name each request's conversation by its first request; -1 where nothing follows."""
    if workload.after is None:
        return None
    first = list(range(len(workload)))
    goes_on = [False] * len(workload)
    for turn, before in enumerate(workload.after.tolist()):
        if before >= 0:
            first[turn] = first[before]
            goes_on[turn] = goes_on[first[before]] = True
    return [root if on else -1 for root, on in zip(first, goes_on, strict=True)]


def run_cluster(
    scenario: Scenario,
    *,
    stepwise: bool = False,
    progress: Callable[[float, int, int], None] | None = None,
    workload: Workload | None = None,
    cost: CostModel | None = None,
    noise: Errors | None = None,
    stop: Callable[[Floats, Sequence[Log]], bool] | None = None,
) -> Result:
    """Simulate a scenario with a cluster; see `simulation.run`. `cost` is that of all replicas.

    Where prefill and decode are apart nothing asks `stop`.
    """
    if workload is None:
        workload = scenario.make_workload()
    specs = {name: spec.with_cost(cost, noise) for name, spec in resolve_groups(scenario).items()}
    if find_coupling(scenario, workload) is None:
        result = run_independent(
            *(scenario, specs, workload, not stepwise),
            progress=progress,
            stop=stop,
        )
        _warn(result)
        return result
    env = FastEnvironment()
    fleet = make_fleet(env, scenario.fleet, specs, sessions_of(workload))
    shares = workload.segments is not None
    record, life = add_replicas(fleet, scenario, specs, shares, leap=not stepwise)
    predictor = make_predictor(scenario.predictor, workload, scenario.seed)
    client = connect_client(
        *(fleet, scenario, record, life),
        lambda submit, cancel: Client(env, workload, submit, predictor, cancel),
    )
    ends, apart = None, isinstance(fleet, DisaggregatedFleet | EncoderFleet)
    assert scenario.cluster is not None
    rewritten = apart or bool(scenario.cluster.scalers or scenario.cluster.sleepers)
    rewritten = rewritten or bool(scenario.cluster.model_fields_set & REWRITING)
    if stop is not None and not apart:
        ends = partial(stop, np.frombuffer(client.sent), fleet.logs)
    try:
        interrupted = drive(env, client, progress, ends, [] if rewritten else fleet.logs)
    except RuntimeError:
        if not fleet.has_no_replica:
            raise
        raise HeadwayError(NONE_COMES_BACK) from None
    if interrupted:
        fleet.abandon()
    drop_lost_rows(fleet)
    fleet.logs[0].record_hung_up(client.hung_up)
    sent = np.frombuffer(client.sent)
    logs = [core.final_log() for core in fleet.cores]
    if isinstance(fleet, DisaggregatedFleet):
        record.transfers = _transfers(fleet, specs)
        logs = record.transfers.seen()
    if isinstance(fleet, EncoderFleet):
        fleet.forget_jobs()
        links = fleet.links.items()
        outputs = {number: (link.transfers, link.blocks, link.busy) for number, link in links}
        record.encodings = Encodings.of(bytes(fleet.encodings), outputs)
        record.tries = record.tries._replace(encoded=record.encodings.rows)
    result = Result(scenario, workload, sent, logs, specs, interrupted)
    result.cluster = record
    if client.hints is not None:
        result.hints = np.frombuffer(client.hints, np.int64)
    _warn(result, life.missed)
    return result


def _transfers(fleet: DisaggregatedFleet, specs: Mapping[str, EngineSpec]) -> Transfers:
    """Return what went over the links of a fleet that has run."""
    producers = {}
    for number, link in fleet.links.items():
        spec = specs[fleet.targets[number].group]
        size = spec.block_bytes * spec.engine.tensor_parallel_size
        producers[number] = link.transfers, link.blocks * size, link.busy
    return Transfers.of(bytes(fleet.transfers), fleet.logs, producers, fleet.sent_again)


def spread_cluster(
    scenario: Scenario,
    *,
    stepwise: bool = False,
    progress: Callable[[float, int, int], None] | None = None,
    workload: Workload | None = None,
    jobs: int | None = None,
) -> Result:
    """Simulate a cluster by replica on joblib's active backend, with `jobs` workers.

    The result is that of `run_cluster`. Raises HeadwayError where the replicas are tied together.
    """
    workload = scenario.make_workload() if workload is None else workload
    need_parts(service_levels(scenario), scenario, workload)
    if (why := find_coupling(scenario, workload)) is not None:
        raise HeadwayError(f"--jobs: replicas cannot run each by itself: {why}")
    specs = resolve_groups(scenario)
    what = scenario, specs, workload, not stepwise
    result = run_independent(*what, progress=progress, spread=True, jobs=jobs)
    _warn(result)
    return result


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
    assert scenario.cluster is not None
    stores: dict[str, SecondaryTier] = {}
    makers: list[Callable[[], Sequence[SchedulerInterface]]] = []
    first: list[Target] = []
    for name, group in scenario.cluster.replica_groups.items():
        spec = specs[name]
        ranks = spec.engine.data_parallel_size
        make = partial(_make_schedulers, spec, shares, stores)
        for number in range(scenario.cluster.max_replicas(name)):
            if ranks == 1:
                target = fleet.add(name, make()[0], spec.cost, leap=leap)
            else:
                balancer = _balancer(spec, len(fleet.targets))
                rank, joint = spec.cost.rank_cost, spec.cost.joint
                target = fleet.add_server(name, make(), rank, balancer, leap=leap, joint=joint)
            if spec.engine.enable_lora:
                target.max_loras = ranks * spec.engine.max_loras
            makers.append(make)
            if number < group.replicas and awake_first(scenario.cluster.sleepers, name, number):
                first.append(target)
    life = Lifecycle(fleet, makers, lambda: False)
    for target in first:
        life.order(target, startup_delay)
    owners = fleet.owners
    record = ClusterRecord(
        *([one.group for one in owners], [one.index for one in owners]),
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
    cluster, env = scenario.cluster, fleet.env
    assert cluster is not None
    entry: Fleet | Gateway = fleet
    if cluster.admission is not None or cluster.client is not None:
        entry = Gateway(env, fleet, cluster.admission, cluster.client, scenario.seed)
        record.tries = Attempts(fleet.sent_again, entry.log)
    client = make(entry.submit, entry.hang_up)
    life.done = lambda: client.done == len(client.sent)
    life.ended = lambda: client.done
    entry.on_finish = client.finished
    if cluster.failures is not None:
        Failures(life, cluster.failures, scenario.seed)
    if cluster.sleep_mode is not None:
        _share_gpus(life, scenario, cluster.sleep_mode)
    if cluster.scalers:
        budget = None
        if cluster.max_gpu_budget is not None:
            sizes = {name: scenario.of_group(name).engine.gpus for name in cluster.groups}
            gpus = [sizes[target.group] for target in fleet.targets]
            budget = GpuBudget(life, cluster.max_gpu_budget, gpus, cluster.switch_delay)
        scalers = [
            Autoscaler(
                life,
                block,
                [target for target in fleet.targets if target.group == name],
                sent=client.sent,
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


def _share_gpus(life: Lifecycle, scenario: Scenario, block: SleepModeConfig) -> None:
    """Let the groups that share GPUs sleep and wake."""
    assert scenario.cluster is not None
    servers, times = {}, {}
    for name in scenario.cluster.sleepers:
        own = scenario.of_group(name)
        weights = memory_budget(own.engine, own.specs[""].model, own.specs[""].gpu).weights
        times[name] = SleepTimes.of(block, weights, own.engine.gpus)
        same = [target for target in life.fleet.targets if target.group == name]
        servers[str(own.model)] = same
    SleepMode(life, block, servers, times)


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


def _warn(result: Result, missed: Sequence[str] = ()) -> None:
    """Say, once for each kind of replica, what cannot be trusted, and which outages it `missed`."""
    record, cluster = result.cluster, result.scenario.cluster
    assert record is not None
    assert cluster is not None
    missing = missing_inputs(result.specs.values(), result.workload, cluster.admission)
    messages = dict.fromkeys([*missing, *missed])
    for name, numbers in replicas_in(record.groups).items():
        steps = [result.logs[k].steps for k in numbers]
        messages |= dict.fromkeys(result.specs[name].cost.range_warnings(*steps))
    count = sum(int((log.requests["reason"] == REJECTED).sum()) for log in result.logs)
    if count and count == len(result.workload):
        messages[f"all {count:,} requests were rejected: no replica could ever hold them"] = None
    for message in messages:
        result.warnings.append(message)
        warnings.warn(message, HeadwayWarning, stacklevel=4)
