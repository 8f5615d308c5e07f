"""Runs of any length in bounded memory: requests come and go, and only sums of them stay."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import simpy

from simulator.engine.core import EngineCore
from simulator.engine.replica import Replica
from simulator.engine.stream_client import Chunk, StreamClient
from simulator.results.metrics import RunMetrics, run_info
from simulator.results.request_table import Attempts
from simulator.results.run_part import PartialRecord, next_decision, split_log
from simulator.scenario import assemble, make_scheduler
from simulator.scenario.assemble import EngineParts
from simulator.scenario.policy_inputs import missing_inputs
from simulator.scenario.scenario import Scenario
from simulator.simulation.chunks import chunks
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.quantile_sketch import RELATIVE_ERROR

if TYPE_CHECKING:
    from simulator.cluster.fleet import Fleet
    from simulator.results.record import ClusterRecord

CHUNK = 65536  # requests that are measured together
PER_REPLICA = 64  # of them, at least, for each replica

Progress = Callable[[float, int, int], None]


@dataclass
class Stream:
    """A run that is going on: the engines, who sends to them, and what is known so far."""

    env: simpy.Environment
    client: StreamClient
    engines: Sequence[EngineCore]
    parts: Sequence[EngineParts]  # of each engine
    metrics: RunMetrics
    missing: Sequence[str] = ()  # what the policy lacks, in words
    fleet: "Fleet | None" = None
    story: "ClusterRecord | None" = None

    def __post_init__(self) -> None:
        self.warned: dict[str, str] = {}
        self.logs = [engine.log for engine in self.engines]

    def harvest(self, *, last: bool = False) -> None:
        """Measure the chunks whose requests have all ended, and forget them."""
        for chunk in self.client.ended():
            self._measure(chunk)
        if last:
            self._measure(self.client.nothing(), last=True)

    def _measure(self, chunk: Chunk, *, last: bool = False) -> None:
        ids = range(chunk.first, chunk.first + len(chunk.work))
        lost = {} if self.fleet is None else self.fleet.sent_again
        before = self.client.unsettled()
        logs = [split_log(log, ids, before, lost, last=last) for log in self.logs]
        given_up = None if self.story is None else self.story.tries.given_up
        refused = None if given_up is None else split_log(given_up, ids, before, {}, last=last)
        again = {id - ids.start: lost.pop(id) for id in [id for id in lost if id in ids]}
        sent = np.array(chunk.sent)
        until = None if last else [next_decision(log) for log in self.logs]
        self.metrics.add(PartialRecord(chunk.work, sent, logs, Attempts(again, refused), until))
        for log, parts in zip(logs, self.parts, strict=True):
            if len(log.steps):
                for text in parts.cost.outside(log.steps):
                    self.warned.setdefault(text.partition(" of ")[0], f"in part of the run, {text}")


def run_streamed(
    scenario: Scenario, *, stepwise: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Simulate a scenario of any number of requests; return its summary.

    Names, means, counts and rates are those of `Result.summary()`; percentiles are off by ERROR of
    themselves at most, and `diagnosis` and `suggested_warmup_s`, which need every request, are
    null. An interrupt ends the run without a result. Raises HeadwayError for what needs to keep
    all requests.
    """
    from simulator.engine.drive import drive
    from simulator.simulation.cluster import NONE_COMES_BACK

    _refuse(scenario)
    stream = _set_up(scenario, leap=not stepwise)

    def look(now: float, done: int, total: int) -> None:
        stream.harvest()
        if progress is not None:
            progress(now, done, total)

    try:
        interrupted = drive(stream.env, stream.client, look)
    except RuntimeError:
        if stream.fleet is None or not stream.fleet.stranded:
            raise
        raise HeadwayError(NONE_COMES_BACK) from None
    if interrupted:
        raise KeyboardInterrupt("a run without tables tells nothing before its end")
    for engine in stream.engines:
        if (tier := engine.scheduler.blocks.tier) is not None:
            engine.log.offloaded = tier.stored
    stream.harvest(last=True)
    return _summary(scenario, stream)


def _summary(scenario: Scenario, stream: Stream) -> dict[str, Any]:
    """Put together what is known at the end, and warn of what cannot be trusted."""
    metrics, told = stream.metrics, [*stream.missing, *stream.warned.values()]
    if metrics.engines.requests.rejected == metrics.total:
        told.append(
            f"all {metrics.total:,} requests were rejected: no replica could ever hold them"
        )
    for message in told:
        warnings.warn(message, HeadwayWarning, stacklevel=3)
    info = run_info(scenario, stream.parts[0], told) | {"percentile_error": RELATIVE_ERROR}
    summary: dict[str, Any] = metrics.summary(info)
    summary["headway"]["diagnosis"] = None
    return summary


def _refuse(scenario: Scenario) -> None:
    """Refuse what a run cannot have that forgets its requests."""
    load = scenario.workload.generator
    several = load.clients is not None and load.clients != 1
    if wrong := [
        f"--no-tables: {why}"
        for why, holds in {
            "workload.sessions: a turn waits for the end of another request": load.sessions,
            "workload.clients: how evenly clients are served needs all requests": several,
            "predictor: its errors are drawn for all requests together": scenario.predictor,
            "cluster.groups: with kv_role a request is at two replicas": (
                scenario.cluster is not None
                and any(group.kv_role for group in scenario.cluster.replica_groups.values())
            ),
            "engine.data_parallel_size: must be 1": any(
                own.engine.data_parallel_size > 1
                for own in (
                    [scenario]
                    if scenario.cluster is None
                    else [scenario.of_group(name) for name in scenario.cluster.replica_groups]
                )
            ),
        }.items()
        if holds
    ]:
        raise HeadwayError(wrong)


def _set_up(scenario: Scenario, *, leap: bool) -> Stream:
    """Build engines and client."""
    cluster = scenario.cluster
    replicas = (
        1 if cluster is None else sum(cluster.max_replicas(name) for name in cluster.replica_groups)
    )
    size = max(CHUNK, PER_REPLICA * replicas)
    total, parts = chunks(scenario, size)
    first = next(parts, None)
    if first is None:
        raise HeadwayError("--no-tables: there is not one request")
    if first.after is not None or len(set(first.client or ())) > 1:
        raise HeadwayError("--no-tables: workload: requests of sessions or of several clients")

    missing = missing_inputs(scenario, first)  # of a generator each part is like the first
    parts = chain([first], parts)
    env = simpy.Environment()
    shares = first.segments is not None
    if cluster is None:
        made = assemble(scenario)
        replica = Replica(env, make_scheduler(scenario, made, shares), made.cost, leap=leap)
        client = StreamClient(env, total, size, parts, replica.submit)
        replica.on_finish = client.finished
        metrics = RunMetrics(scenario, first, [made], total=total)
        return Stream(env, client, [replica], [made], metrics, missing)
    from simulator.scenario.assemble_fleet import make_fleet
    from simulator.simulation.cluster import connect, fill

    fleet = make_fleet(env, scenario, None)
    story, life = fill(fleet, scenario, shares, leap=leap)
    client = connect(
        *(fleet, scenario, story, life),
        lambda submit: StreamClient(env, total, size, parts, submit),
    )
    metrics = RunMetrics(scenario, first, story.parts, cluster=story, total=total)
    return Stream(env, client, fleet.cores, story.parts, metrics, missing, fleet, story)
