"""Fleets of independent replicas: each is simulated by itself, here or on workers.

Under a router that looks at no replica, requests that wait for no other's end, and with nothing
else that ties replicas together, it is known beforehand which requests each gets. So the run can be
cut by replica, for the same bytes; and in one process each replica goes on for many requests at a
stretch, which finds its data in the processor's caches.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from operator import itemgetter
from typing import TypeVar

import numpy as np
import simpy

from simulator.build.assemble_scheduler import make_scheduler
from simulator.build.engine_spec import EngineSpec
from simulator.cluster.fleet import COUNTERS, Fleet
from simulator.cluster.routers import STATELESS_ROUTERS, Router, StatelessRouter, Target
from simulator.core.alarm import Alarm, FastEnvironment
from simulator.core.executor import Executor
from simulator.core.log import Log
from simulator.engine.client import RequestReader
from simulator.engine.core import EngineCore
from simulator.engine.drive import no_garbage_collection
from simulator.engine.replica import Replica, make_replica
from simulator.policies.predictor import FixedPredictions, make_predictor
from simulator.results.record import ClusterRecord
from simulator.results.request_table import Attempts
from simulator.scenario.resolve import engine_specs, fleet_spec
from simulator.scenario.scenario import Scenario
from simulator.schedulers.interface import SchedulerInterface
from simulator.simulation.result import Result
from simulator.simulation.setup import Progress
from simulator.util.errors import HeadwayError
from simulator.util.user_code import failure_lines
from simulator.util.workers import WorkerDied, parallel_map, worker_count
from simulator.workload.workload import Floats, Ints, Workload

SPLIT_KEYS = {"router", "replicas", "groups", "pods", "pod_router"}
"""Keys of a cluster that tie no replicas together, or only those of a pod.

Those of a group tie none, but for `kv_role`, beside which there is `kv_transfer`.
"""
One = TypeVar("One")
Part = TypeVar("Part")
REQUESTS_PER_TURN = 64  # requests that each replica gets before the next goes on
PARTS_PER_JOB = 4  # so that workers end at about the same time


def find_coupling(scenario: Scenario, workload: Workload) -> str | None:
    """Say what ties the replicas of a cluster together, as `field: why`; None: nothing does."""
    cluster = scenario.cluster
    if cluster is None:
        return "cluster: there is none"
    name = cluster.router_name
    couplings = {
        **{
            f"cluster.{key}: acts on several replicas together": getattr(cluster, key) is not None
            for key in sorted(cluster.model_fields_set - SPLIT_KEYS)
        },
        "cluster.groups: each request goes to the groups of its model": bool(scenario.models),
        "cluster.groups: an autoscaler acts on several replicas together": bool(cluster.scalers),
        "engine.secondary_tiers: a store is shared by all replicas": any(
            tier.shared for own in scenario.groups.values() for tier in own.engine.secondary_tiers
        ),
        "engine.data_parallel_size: the ranks of a server share its load balancer": any(
            own.engine.data_parallel_size > 1 for own in scenario.groups.values()
        ),
        "workload: a session's turn waits for the one before": (workload.after is not None),
        "workload: clients that hang up are followed one by one": (
            workload.cancel_after is not None
        ),
        "workload.max_concurrency: a request waits for the end of others at any replica": (
            workload.max_concurrency is not None
        ),
        "predictor: learns from the answers of all replicas": (
            scenario.predictor is not None and scenario.predictor.kind == "percentile"
        ),
        f"cluster.router: {name} looks at the replicas; {' and '.join(STATELESS_ROUTERS)} do not": (
            name not in STATELESS_ROUTERS
        ),
    }
    return next((why for why, holds in couplings.items() if holds), None)


def need_no_coupling(scenario: Scenario, workload: Workload) -> None:
    """Raise HeadwayError where replicas are tied together, and workers cannot share them out."""
    if (why := find_coupling(scenario, workload)) is not None:
        raise HeadwayError(f"--jobs: replicas cannot run each by itself: {why}")


@dataclass(slots=True)
class ReplicaRequests:
    """What one replica or pod gets: requests as columns, in the order in which they reach it."""

    rows: Workload
    ids: Ints  # of the whole workload
    times: Floats  # s, at which they reach it
    stamps: Floats  # s, likewise, never the same twice
    hints: Ints | None = None  # predicted output tokens


class IndependentReplica:
    """Simulates one replica, or a pod of them, as far as is wanted; its logs tell what happened.

    `members` are the group, scheduler and executor of each; a pod has a `router`.
    """

    def __init__(
        self,
        members: Sequence[tuple[str, SchedulerInterface, Executor]],
        router: Router | None = None,
        *,
        leap: bool = True,
    ) -> None:
        self.env = FastEnvironment()
        if router is None:
            _, scheduler, executor = members[0]
            replica = make_replica(self.env, scheduler, executor, leap=leap)
            engine: Replica | Fleet = replica
            self.cores: Sequence[EngineCore] = [replica]
        else:
            fleet = Fleet(self.env, router)
            for name, scheduler, executor in members:
                fleet.open_target(fleet.add(name, scheduler, executor, leap=leap))
            engine, self.cores = fleet, fleet.cores
        self._submit, self.engine = engine.submit, engine
        self._parts: deque[ReplicaRequests] = deque()  # to come, after the one that is read
        self._index, self._times = 0, np.empty(0).data
        self._alarm = Alarm(self.env, self._arrive)

    def feed(self, requests: ReplicaRequests) -> None:
        """Take in the next requests, none of which comes before those that are here already."""
        if len(requests.ids):
            self._parts.append(requests)
            if self._index == len(self._times):
                self._read_next()

    def _read_next(self) -> None:
        """Go on with the next part."""
        part = self._parts.popleft()
        self._read = RequestReader(part.rows, part.ids.data).read
        self._times, self._stamps = part.times.data, part.stamps.data
        self._hints = None if part.hints is None else part.hints.data
        self._index = 0
        self._alarm.set(self._times[0])

    @property
    def done(self) -> int:
        """Requests that have ended."""
        return sum(core.log.ended for core in self.cores)

    def abandon(self) -> None:
        """Write down the requests that have not ended."""
        self.engine.abandon()

    def advance(self, until: float | None = None, *, packs: bool = True) -> None:
        """Go on until that time, s, or to the end; what happens at that time is left.

        What is old in the logs is packed, where nobody takes it out.
        """
        if until is None or until > self.env.now:
            self.env.run(until)
        if packs:
            for core in self.cores:
                core.log.put_by()

    def _arrive(self, alarm: simpy.Event) -> None:
        times, stamps, submit = self._times, self._stamps, self._submit
        index, total, now = self._index, len(times), self.env.now
        while index < total and times[index] <= now:
            request = self._read(index, stamps[index])
            if self._hints is not None:
                request.hint = self._hints[index]
            submit(request)
            index += 1
        self._index = index
        if index < total:
            self._alarm.set(times[index])
        elif self._parts:
            self._read_next()


class Front:
    """Passes successive parts of a workload through the frontend and the router, to the pods.

    As `Client` has it, for requests that wait for nobody.
    """

    def __init__(self, router: StatelessRouter, pods: int) -> None:
        self._router = router
        self._free = 0.0  # s, when the frontend has passed on all before
        self._last = -1.0  # stamp of the last request, s
        self._first = 0  # id of the next
        for pod in range(pods):
            router.open(Target(pod, "", 1, 1))

    def route(
        self, workload: Workload, pods: Sequence[int], hints: Ints | None = None
    ) -> list[ReplicaRequests]:
        """Return what some pods, of successive numbers, get of the next requests."""
        times = self._pass_frontend(workload)
        order = np.argsort(times, kind="stable")
        stamps = self._stamp(times, order)
        chosen = self._router.choose_many(workload.rows(order))
        place = np.argsort(chosen, kind="stable")
        bounds = np.searchsorted(chosen[place], np.arange(pods[0], pods[-1] + 2))
        requests = []
        for first, last in pairwise(bounds.tolist()):
            rows = order[place[first:last]]
            part, hinted = workload.part(rows), None if hints is None else hints[rows]
            ids = rows + self._first
            requests.append(ReplicaRequests(part, ids, times[rows], stamps[rows], hinted))
        self._first += len(workload)
        return requests

    def _pass_frontend(self, workload: Workload) -> Floats:
        """Return when each request reaches the replicas, s."""
        front = workload.frontend
        if front is None:
            return workload.arrival
        through, prompts = np.empty(len(workload)), workload.prompt_tokens.tolist()
        for index, now in enumerate(workload.arrival.tolist()):
            delay, self._free = front.delay(now, self._free, prompts[index])
            through[index] = now + delay
        return through

    def _stamp(self, times: Floats, order: Ints) -> Floats:
        """Return the times, none of them twice."""
        if (np.diff(times[order], prepend=self._last) > 0).all():
            self._last = float(times[order[-1]]) if len(times) else self._last
            return times
        stamps, last = times.copy(), self._last
        for index in order.tolist():
            now = float(times[index])
            last = stamps[index] = now if now > last else np.nextafter(last, np.inf)
        self._last = float(last)
        return stamps


@dataclass(slots=True)
class ReplicaGroup:
    """Some pods of a cluster; without pods each replica is one."""

    scenario: Scenario
    pods: Sequence[int]
    shares: bool  # the workload's prompts have contents
    leap: bool
    requests: Sequence[ReplicaRequests] = ()  # likewise; (): they come later

    def replicas(self, specs: Mapping[str, EngineSpec] | None = None) -> list[IndependentReplica]:
        """Build the replicas; on a worker, which has no specs, after the scenario."""
        routers: Mapping[int, Router] = {}
        if self.scenario.servers.pods is not None:
            routers = fleet_spec(self.scenario).pod_routers(self.pods)
        specs, groups = specs or engine_specs(self.scenario), replica_groups(self.scenario)
        members = pod_members(self.scenario)
        replicas = []
        for pod in self.pods:
            names = [groups[number] for number in members[pod]]
            made = [(name, make_scheduler(specs[name], self.shares)) for name in names]
            own = [(name, scheduler, specs[name].cost) for name, scheduler in made]
            replicas.append(IndependentReplica(own, routers.get(pod), leap=self.leap))
        for replica, requests in zip(replicas, self.requests, strict=False):
            replica.feed(requests)
        return replicas


def run_independent(
    scenario: Scenario,
    specs: Mapping[str, EngineSpec],
    workload: Workload,
    leap: bool,
    *,
    progress: Progress | None = None,
    spread: bool = False,
    jobs: int | None = None,
    stop: Callable[[Floats, Sequence[Log]], bool] | None = None,
) -> Result:
    """Simulate a cluster that nothing ties together, replica by replica.

    `spread` does it on joblib's active backend, on `jobs` workers, for the costs of the scenario;
    else it is done in this process, and `stop` asked while requests come.
    """
    shares, hints = workload.segments is not None, None
    record, pods = standing_record(scenario), pod_members(scenario)
    predictor = make_predictor(scenario.predictor, workload, scenario.seed)
    if isinstance(predictor, FixedPredictions):
        hints = predictor.hints.astype(np.int64)
    requests = Front(fleet_spec(scenario).make_front(), len(pods)).route(
        workload, range(len(pods)), hints
    )
    group = ReplicaGroup(scenario, range(len(pods)), shares, leap, requests)
    sent, interrupted = workload.arrival.copy(), False
    if spread:
        logs = _run_on_workers(group, jobs, progress, len(workload))
    else:
        replicas = group.replicas(specs)
        cores = [core for replica in replicas for core in replica.cores]
        ends = None if stop is None else partial(stop, sent, [core.log for core in cores])
        until = _run_in_turns(replicas, requests, progress, len(workload), ends)
        if interrupted := until is not None:
            sent[sent >= until] = np.nan
            for replica in replicas:
                replica.abandon()
            if hints is not None:
                hints[np.isnan(sent)] = 0
        logs = [core.final_log() for core in cores]
    result = Result(scenario, workload, sent, by_number(pods, logs), specs)
    result.interrupted = interrupted
    result.cluster = record
    result.hints = hints
    return result


def pod_members(scenario: Scenario) -> list[list[int]]:
    """Return the numbers of the replicas of each pod; without pods each replica is one."""
    pods: dict[int, list[int]] = {}
    for number, pod in enumerate(scenario.servers.pod_numbers):
        pods.setdefault(pod, []).append(number)
    return [*pods.values()]


def by_number(members: Iterable[Sequence[int]], found: Iterable[One]) -> list[One]:
    """Put what there is of each replica, pod after pod, in the order of the replicas' numbers."""
    pairs = zip(chain.from_iterable(members), found, strict=True)
    return [one for _, one in sorted(pairs, key=itemgetter(0))]


def replica_groups(scenario: Scenario) -> list[str]:
    """Return the group of each replica."""
    kinds = scenario.servers.replica_groups.items()
    return [name for name, kind in kinds for _ in range(kind.replicas)]


def standing_record(scenario: Scenario, numbers: Sequence[int] | None = None) -> ClusterRecord:
    """Return the record of replicas that are always up: of all, or of those of some numbers."""
    groups = replica_groups(scenario)
    if numbers is not None:
        groups = [groups[number] for number in numbers]
    return ClusterRecord(
        groups,
        [*range(len(groups))],
        paid=[[0.0] for _ in groups],
        counters=dict.fromkeys(COUNTERS, 0),
        tries=Attempts({}),
    )


def _run_in_turns(
    replicas: Sequence[IndependentReplica],
    requests: Sequence[ReplicaRequests],
    progress: Progress | None,
    total: int,
    stop: Callable[[], bool] | None = None,
) -> float | None:
    """Run all to the end in turn; return the time, s, at which it was broken off, or None."""
    times = np.sort(np.concatenate([one.times for one in requests]))
    with no_garbage_collection():
        for until in np.unique(times[:: REQUESTS_PER_TURN * len(replicas)])[1:].tolist():
            interrupted = False
            for replica in replicas:
                try:
                    replica.advance(until)
                except KeyboardInterrupt:  # the others go on, to where this one should be
                    interrupted = True
            if interrupted:
                return float(until)
            if progress is not None:
                progress(until, sum(replica.done for replica in replicas), total)
            if stop is not None and stop():
                return float(until)
        for number, replica in enumerate(replicas):
            try:
                replica.advance()
            except KeyboardInterrupt:
                for other in replicas[number + 1 :]:  # to where all can be compared
                    other.advance(float(times[-1]))
                return float(np.nextafter(times[-1], np.inf))
    check_done(sum(replica.done for replica in replicas), total)
    return None


def check_done(done: int, total: int) -> None:
    if done < total:
        raise RuntimeError(f"{total - done} requests never ended")


def _run_on_workers(
    group: ReplicaGroup, jobs: int | None, progress: Progress | None, total: int
) -> list[Log]:
    """Run the replicas on workers."""
    pods = cut(len(group.pods), jobs)
    parts = [
        replace(group, pods=some, requests=group.requests[some.start : some.stop]) for some in pods
    ]
    found: dict[int, list[Log]] = {}
    done, now = 0, 0.0
    for index, outcome in parallel_map(partial(attempt, run_group), parts, jobs):
        if isinstance(outcome, WorkerDied):
            raise part_failed(group.scenario, pods[index], outcome.reason)
        found[index] = outcome
        done += sum(len(log.requests) for log in outcome)
        now = max([now, *(float(log.steps["end"][-1]) for log in outcome if log.step_rows)])
        if progress is not None:
            progress(now, done, total)
    check_done(done, total)
    return [log for index in range(len(parts)) for log in found[index]]


def cut(pods: int, jobs: int | None) -> list[range]:
    """Share so many pods out in parts, some for each worker."""
    pieces = min(PARTS_PER_JOB * worker_count(jobs), pods)
    bounds: list[int] = np.linspace(0, pods, pieces + 1).astype(int).tolist()
    return [range(first, over) for first, over in pairwise(bounds)]


def part_failed(scenario: Scenario, pods: range, why: str) -> HeadwayError:
    """Say which pods could not be simulated, and why."""
    what = "replicas" if scenario.servers.pods is None else "pods"
    return HeadwayError(f"{what} {pods[0]} to {pods[-1]}: {why}")


def run_group(group: ReplicaGroup) -> list[Log]:
    """Run some replicas in a worker, one after the other; return their logs."""
    replicas = group.replicas()
    with no_garbage_collection():
        for replica in replicas:
            replica.advance()
    return [core.final_log() for replica in replicas for core in replica.cores]


def attempt(run: Callable[[Part], One], part: Part) -> One | WorkerDied:
    """Run a part in a worker; whatever it raises counts as the worker's death, with that reason."""
    try:
        return run(part)
    except (Exception, SystemExit) as error:
        return WorkerDied("; ".join(failure_lines(error)))
