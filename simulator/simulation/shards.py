"""Fleets whose replicas know nothing of each other: each simulated by itself, here or on workers.

Under a router that looks at no replica, requests that wait for no other's end, and with nothing
else that ties replicas together, it is known beforehand which requests each gets. So the run can be
cut by replica, for the same bytes; and in one process each replica goes on for many requests at a
stretch, which finds its data in the processor's caches.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from simulator.cluster.routers import Router, Target
from simulator.core.log import Log
from simulator.core.request import Request
from simulator.costs.cost_model import CostModel
from simulator.costs.data_parallel import replace_rank_cost
from simulator.engine.drive import no_garbage_collection
from simulator.policies.predictor import Known, make_predictor
from simulator.scenario import assemble, make_scheduler
from simulator.scenario.assemble import EngineParts
from simulator.scenario.scenario import Scenario
from simulator.simulation.lane import Lane, Mail, reach
from simulator.util.errors import HeadwayError
from simulator.util.workers import WorkerDied, parallel_map, worker_count
from simulator.workload.workload import Floats, Ints, Workload

BLIND = ("round_robin", "random")
"""Routers that look at no replica."""
OF_ONE = {"replicas", "gpu", "engine", "cost", "dollars_per_hour"}
"""Keys of a group that say what each replica is by itself."""
STRETCH = 64  # requests that each replica gets before the next goes on
PARTS_PER_JOB = 4  # so that workers end at about the same time

Progress = Callable[[float, int, int], None]


def tie(scenario: Scenario, workload: Workload) -> str | None:
    """Say what ties the replicas of a cluster together, as `field: why`; None: nothing does."""
    cluster = scenario.cluster
    if cluster is None:
        return "cluster: there is none"
    name = cluster.router if isinstance(cluster.router, str) else cluster.router["router"]
    ties = {
        f"cluster.router: {name} looks at the replicas; {' and '.join(BLIND)} do not": name
        not in BLIND,
        **{
            f"cluster.{key}: acts on several replicas together": getattr(cluster, key) is not None
            for key in sorted(cluster.model_fields_set - {"router", "replicas", "groups"})
        },
        **{
            f"cluster.groups.{kind}.{key}: acts on several replicas together": getattr(group, key)
            is not None
            for kind, group in cluster.replica_groups.items()
            for key in sorted(group.model_fields_set - OF_ONE)
        },
        "engine.data_parallel_size: the ranks of a server share its load balancer": any(
            scenario.of_group(kind).engine.data_parallel_size > 1 for kind in cluster.replica_groups
        ),
        "workload: a session's turn waits for the one before, maybe at another replica": (
            workload.after is not None
        ),
        "workload.max_concurrency: a request waits for the end of others at any replica": (
            workload.max_concurrency is not None
        ),
        "predictor: learns from the answers of all replicas": (
            (scenario.predictor or {}).get("kind") == "percentile"
        ),
    }
    return next((why for why, holds in ties.items() if holds), None)


@dataclass(slots=True)
class Shard:
    """Some replicas of a cluster."""

    scenario: Scenario
    groups: list[str]  # of each
    mail: list[Mail]  # likewise
    shares: bool  # the workload's prompts have contents
    leap: bool
    cost: CostModel | None  # in place of the scenario's

    def lanes(self) -> list[Lane]:
        """Build the replicas."""
        kinds: dict[str, tuple[Scenario, EngineParts]] = {}
        lanes = []
        for name, mail in zip(self.groups, self.mail, strict=True):
            if name not in kinds:
                own = self.scenario.of_group(name)
                kinds[name] = own, with_cost(assemble(own), self.cost)
            own, parts = kinds[name]
            scheduler = make_scheduler(own, parts, self.shares)
            lanes.append(Lane(scheduler, parts.cost, mail, leap=self.leap))
        return lanes


@dataclass(slots=True)
class Outcome:
    """The run of a cluster whose replicas were simulated each by itself."""

    groups: list[str]  # of each replica
    logs: list[Log]  # likewise
    parts: list[EngineParts]  # likewise
    sent: Floats
    hints: Ints | None
    interrupted: bool


def run_apart(
    scenario: Scenario,
    workload: Workload,
    router: Router,
    *,
    leap: bool,
    cost: CostModel | None = None,
    progress: Progress | None = None,
    spread: bool = False,
    jobs: int | None = None,
) -> Outcome:
    """Simulate a cluster that nothing ties together, replica by replica.

    `cost` takes the place of the scenario's. `spread` does it on joblib's active backend, on `jobs`
    workers; else it is done in this process.
    """
    groups, parts = _replicas(scenario, workload, cost)
    hints = None
    predictor = make_predictor(scenario.predictor, workload, scenario.seed)
    if isinstance(predictor, Known):
        hints = predictor.hints.astype(np.int64)
    mail = _sort(workload, router, groups, hints)
    shard = Shard(scenario, groups, mail, workload.segments is not None, leap, cost)
    sent, interrupted = workload.arrival.copy(), False
    if spread:
        logs = _spread(shard, jobs, progress, len(workload))
    else:
        lanes = _silently(shard.lanes)
        until = _go(lanes, mail, progress, len(workload))
        if interrupted := until is not None:
            sent[sent >= until] = np.nan
            for lane in lanes:
                lane.replica.abandon()
            if hints is not None:
                hints[np.isnan(sent)] = 0
        logs = [_ended(lane) for lane in lanes]
    return Outcome(groups, logs, parts, sent, hints, interrupted)


def _replicas(
    scenario: Scenario, workload: Workload, cost: CostModel | None
) -> tuple[list[str], list[EngineParts]]:
    """Give group and parts of each replica, with the warnings of those who build them."""
    assert scenario.cluster is not None
    groups: list[str] = []
    every: list[EngineParts] = []
    for name, group in scenario.cluster.replica_groups.items():
        own = scenario.of_group(name)
        parts = with_cost(assemble(own), cost)
        if group.replicas:
            make_scheduler(own, parts, workload.segments is not None)
        groups += [name] * group.replicas
        every += [parts] * group.replicas
    return groups, every


def with_cost(parts: EngineParts, cost: CostModel | None) -> EngineParts:
    """Put a given cost, if there is one, in place of the scenario's."""
    return parts if cost is None else replace(parts, cost=replace_rank_cost(parts.cost, cost))


def _sort(
    workload: Workload, router: Router, groups: Sequence[str], hints: Ints | None
) -> list[Mail]:
    """Let the router choose for every request; give what each replica gets."""
    times, stamps, order = reach(workload)
    for number, name in enumerate(groups):
        router.open(Target(number, name, 1, 1))
    any_request = Request(0, 0.0, 1, 1)
    chosen = (router.choose(any_request, -1).index for _ in range(len(order)))
    replica = np.fromiter(chosen, np.int64, len(order))
    place = np.argsort(replica, kind="stable")
    bounds = np.searchsorted(replica[place], np.arange(len(groups) + 1))
    mail = []
    for first, last in pairwise(bounds.tolist()):
        ids = order[place[first:last]]
        told = None if hints is None else hints[ids]
        mail.append(Mail(workload.part(ids), ids, times[ids], stamps[ids], told))
    return mail


def _go(
    lanes: Sequence[Lane], mail: Sequence[Mail], progress: Progress | None, total: int
) -> float | None:
    """Run all to the end in turn; return the time, s, at which the user broke it off, or None."""
    times = np.sort(np.concatenate([one.times for one in mail]))
    with no_garbage_collection():
        for until in np.unique(times[:: STRETCH * len(lanes)])[1:].tolist():
            interrupted = False
            for lane in lanes:
                try:
                    lane.advance(until)
                except KeyboardInterrupt:  # the others go on, to where this one should be
                    interrupted = True
            if interrupted:
                return float(until)
            if progress is not None:
                progress(until, sum(lane.done for lane in lanes), total)
        for number, lane in enumerate(lanes):
            try:
                lane.advance()
            except KeyboardInterrupt:
                return _stop(lanes[number + 1 :], float(times[-1]))
    _check_done(sum(lane.done for lane in lanes), total)
    return None


def _stop(lanes: Sequence[Lane], last: float) -> float:
    """Let the rest come to the last arrival, where all can be compared; return a time after it."""
    for lane in lanes:
        lane.advance(last)
    return float(np.nextafter(last, np.inf))


def _check_done(done: int, total: int) -> None:
    if done < total:
        raise RuntimeError(f"{total - done} requests never ended")


def _ended(lane: Lane) -> Log:
    lane.end()
    return lane.log


def _silently(make: Callable[[], list[Lane]]) -> list[Lane]:
    """Build replicas; what there is to warn of has been said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def _spread(shard: Shard, jobs: int | None, progress: Progress | None, total: int) -> list[Log]:
    """Run the replicas on workers."""
    count = len(shard.groups)
    cuts = (
        np.linspace(0, count, min(PARTS_PER_JOB * worker_count(jobs), count) + 1)
        .astype(int)
        .tolist()
    )
    shards = [
        replace(shard, groups=shard.groups[a:b], mail=shard.mail[a:b]) for a, b in pairwise(cuts)
    ]
    found: dict[int, list[Log]] = {}
    done, now = 0, 0.0
    for index, outcome in parallel_map(run_shard, shards, jobs):
        if isinstance(outcome, WorkerDied | str):
            why = outcome.reason if isinstance(outcome, WorkerDied) else outcome
            raise HeadwayError(f"replicas {cuts[index]} to {cuts[index + 1] - 1}: {why}")
        found[index] = outcome
        done += sum(len(log.requests) for log in outcome)
        now = max([now, *(float(log.steps["end"][-1]) for log in outcome if log.step_rows)])
        if progress is not None:
            progress(now, done, total)
    _check_done(done, total)
    return [log for index in range(len(shards)) for log in found[index]]


def run_shard(shard: Shard) -> list[Log] | str:
    """Run some replicas in a worker, one after the other; return their logs, or what went wrong."""
    try:
        lanes = _silently(shard.lanes)
        with no_garbage_collection():
            for lane in lanes:
                lane.advance()
    except HeadwayError as error:
        return "; ".join(error.messages)
    except Exception as error:  # a worker that raises counts as dead
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return [_ended(lane) for lane in lanes]
