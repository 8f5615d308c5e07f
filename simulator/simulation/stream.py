"""Runs of any length in bounded memory: requests come and go, and only sums of them stay."""

import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from functools import cache
from itertools import chain, repeat
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simulator.build.engine_spec import EngineSpec
from simulator.build.policy_table import missing_inputs
from simulator.cluster.fleet import Fleet
from simulator.core.request import Request
from simulator.engine.client import Chunk, ChunkSender, RequestReader, StreamClient, Turns
from simulator.engine.core import EngineCore
from simulator.engine.drive import no_garbage_collection
from simulator.results.metrics import RunMetrics
from simulator.results.record import ClusterRecord, PartialRecord, next_decision, split_log
from simulator.results.request_table import Attempts
from simulator.results.run_info import run_info
from simulator.results.service_levels import service_levels
from simulator.results.table_parts import TableParts
from simulator.scenario.draw import finish_parts, make_workload, trace_pieces, trace_reader
from simulator.scenario.resolve import fleet_spec, resolve_groups
from simulator.scenario.scenario import Scenario
from simulator.simulation.independent import (
    REQUESTS_PER_TURN,
    Front,
    ReplicaGroup,
    ReplicaRequests,
    by_number,
    check_done,
    find_coupling,
    pod_members,
    standing_record,
)
from simulator.simulation.run import set_up
from simulator.simulation.setup import Progress
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.quantile_sketch import RELATIVE_ERROR
from simulator.workload.generate import generate_parts
from simulator.workload.select import rechunk
from simulator.workload.traces.read import SessionsError
from simulator.workload.unused import warn_of_limits
from simulator.workload.workload import Workload


class PodsClient(ChunkSender):
    """Feeds a workload to some pods of a fleet, chunk by chunk, and lets each go on by itself."""

    def __init__(
        self,
        group: ReplicaGroup,
        specs: Mapping[str, EngineSpec],
        chunks: Iterator[Workload],
        total: int,
        size: int,
    ) -> None:
        super().__init__(total, size)
        self.replicas = group.replicas(specs)
        self._pods, self._chunks, self._now = group.pods, chunks, 0.0
        pods = len(pod_members(group.scenario))
        self._front = Front(fleet_spec(group.scenario).make_front(), pods)
        self._apart = len(group.pods) < pods  # the others are fed elsewhere
        for replica in self.replicas:
            replica.engine.on_finish = self._finished

    def _finished(self, request: Request) -> None:
        self.done += 1
        self.chunks[request.id // self.size].left -= 1

    def now(self) -> float:
        return self._now

    def drive(self, look: Progress) -> bool:
        """Go on to the end, telling `look` now and then; say whether it was broken off."""
        fed = 0
        try:
            with no_garbage_collection():
                for work in self._chunks:
                    fed += self._play(work, look)
                for replica in self.replicas:
                    replica.advance(packs=False)
        except KeyboardInterrupt:
            return True
        check_done(self.done, fed)
        return False

    def _play(self, work: Workload, look: Progress) -> int:
        """Let each replica go on for some requests of a chunk in turn; return how many it has."""
        self._number += 1
        parts = self._front.route(work, self._pods)
        self._take_in(work, parts)
        fed = self._chunk.left
        for replica, part in zip(self.replicas, parts, strict=True):
            replica.feed(part)
        times = np.sort(np.concatenate([part.times for part in parts]))
        turn = REQUESTS_PER_TURN * len(parts)
        for until in np.unique([*times[turn::turn], *times[-1:]]).tolist():
            for replica in self.replicas:
                replica.advance(until, packs=False)
            self._now = until
            look(until, self.done, self.total)
        return fed

    def _take_in(self, work: Workload, parts: Sequence[ReplicaRequests]) -> None:
        """Keep what is sent from here of a chunk, to be measured when it has ended."""
        first, rows = self._number * self.size, None
        if self._apart:
            rows = np.sort(np.concatenate([part.ids for part in parts])) - first
            work = work.part(rows)
        reader, sent = RequestReader(work), array("d", work.arrival)
        left, times = len(work), work.arrival
        self._chunk = Chunk(work, first, reader, sent, left=left, times=times, rows=rows)
        self.chunks[self._number] = self._chunk


CHUNK = 65536  # requests that are measured together
PER_REPLICA = 64  # of them, at least, for each replica


@dataclass
class StreamedRun:
    """A run that is going on: the engines, who sends to them, and what is known so far."""

    scenario: Scenario
    first: InitVar[Workload]  # the first chunk, as which all are
    total: InitVar[int]  # requests
    client: ChunkSender
    engines: Sequence[EngineCore]
    drive: Callable[[Progress], bool]  # runs to the end; says whether it was broken off
    specs: Mapping[str, EngineSpec]  # by group; "" where there are none
    missed: Sequence[str] = ()  # outages that met no replica, in words
    fleet: Fleet | None = None
    record: ClusterRecord | None = None
    apart: InitVar[bool] = False  # other pods run elsewhere
    tables: TableParts | None = None

    def __post_init__(self, first: Workload, total: int, apart: bool) -> None:
        groups = [""] if self.record is None else self.record.groups
        self.cores = [self.specs[group] for group in groups]  # what each engine is
        self.metrics = RunMetrics(
            self.scenario, first, self.cores, cluster=self.record, total=total, apart=apart
        )
        admission = self.scenario.servers.admission
        # What the policies lack, in words.
        self.missing = missing_inputs(self.specs.values(), first, admission)
        self.warned: dict[str, str] = {}
        self.logs = [engine.log for engine in self.engines]

    def write_tables(self, folder: Path, number: int, replicas: Sequence[int]) -> None:
        """Write requests and steps to files of that number; `replicas` are those that run here."""
        retries = self.metrics.retries
        self.tables = TableParts(folder, number, replicas, self.cores, retries=retries)

    def measure_ended(self, *, last: bool = False) -> None:
        """Measure the chunks whose requests have all ended, and forget them."""
        for chunk in self.client.pop_ended():
            self._measure(chunk)
        if last:
            self._measure(self.client.empty_chunk(), last=True)

    def _measure(self, chunk: Chunk, *, last: bool = False) -> None:
        ids = range(chunk.first, min(chunk.first + self.client.size, self.metrics.total or 0))
        lost = {} if self.fleet is None else self.fleet.sent_again
        before = self.client.earliest_sent()
        logs = [split_log(log, ids, before, lost, last=last, some=chunk.rows) for log in self.logs]
        given_up = None if self.record is None else self.record.tries.given_up
        refused = None if given_up is None else split_log(given_up, ids, before, {}, last=last)
        again = {id - ids.start: lost.pop(id) for id in [id for id in lost if id in ids]}
        sent = np.array(chunk.sent)
        until = None if last else [next_decision(log) for log in self.logs]
        work = replace(chunk.work, after=None, delay=None)  # its turns know when they were due
        part = PartialRecord(work, sent, logs, Attempts(again, refused), until)
        self.metrics.add(part, inf if last else before)
        if self.tables is not None:
            rows = np.arange(len(chunk.work)) if chunk.rows is None else chunk.rows
            self.tables.add(part, chunk.first + rows, self.logs, before)
        for log, spec in zip(logs, self.cores, strict=True):
            if len(log.steps):
                for text in spec.cost.range_warnings(log.steps):
                    self.warned.setdefault(text.partition(" of ")[0], f"in part of the run, {text}")


def run_streamed(
    scenario: Scenario,
    *,
    stepwise: bool = False,
    progress: Progress | None = None,
    tables: Path | None = None,
) -> dict[str, Any]:
    """Simulate a scenario of any number of requests; return its summary.

    Names, means, counts and rates are those of `Result.summary()`; percentiles are off by ERROR of
    themselves at most, and `diagnosis` and `suggested_warmup_s`, which need every request, are
    null. An interrupt ends the run without a result. `tables` is a folder for the requests and
    steps (`TableParts`). Raises HeadwayError for what needs to keep all requests.
    """
    refuse(scenario)
    stream = _set_up(scenario, leap=not stepwise)
    if tables is not None:
        stream.write_tables(tables, 0, range(len(stream.logs)))
    drive_stream(stream, progress)
    messages = [*stream.missing, *stream.missed, *stream.warned.values()]
    told = scenario, stream.metrics, stream.cores[0], stream.specs, messages
    return summarize(*told, limits=stream.engines[0].limits)


def drive_stream(stream: StreamedRun, progress: Progress | None = None) -> None:
    """Run to the end, measuring on the way; tables are whole then, or there are none."""
    tables = stream.tables
    try:
        _drive(stream, progress)
    except BaseException:
        if tables is not None:
            tables.drop()
        raise
    if tables is not None:
        tables.close()


def _drive(stream: StreamedRun, progress: Progress | None) -> None:
    def look(now: float, done: int, total: int) -> None:
        stream.measure_ended()
        if progress is not None:
            progress(now, done, total)

    if stream.drive(look):
        raise KeyboardInterrupt("a run without tables tells nothing before its end")
    for engine in stream.engines:
        engine.final_log()
    stream.measure_ended(last=True)


def summarize(
    scenario: Scenario,
    metrics: RunMetrics,
    spec: EngineSpec,
    specs: Mapping[str, EngineSpec],
    messages: list[str],
    *,
    limits: str,
) -> dict[str, Any]:
    """Put together what is known at the end, and warn of what cannot be trusted."""
    if metrics.engines.requests.rejected == metrics.total:
        messages.append(f"all {metrics.total:,} requests were rejected: {limits}")
    for message in messages:
        warnings.warn(message, HeadwayWarning, stacklevel=3)
    info = run_info(scenario, spec, specs, messages)
    info |= {"percentile_error": RELATIVE_ERROR}
    summary: dict[str, Any] = metrics.summary(info)
    summary["headway"]["diagnosis"] = None
    return summary


def refuse(scenario: Scenario) -> None:
    """Refuse what a run cannot have that forgets its requests."""
    load, engines = scenario.workload.generator, scenario.groups.values()
    if wrong := [
        f"--no-tables: {why}"
        for why, holds in {
            "workload.n: must be 1": load.n > 1,
            "workload.adapters, models: what each felt needs all requests": (
                bool(scenario.models) or any(own.engine.enable_lora for own in engines)
            ),
            "slo: a level of some requests, or of the last one, needs all of them": any(
                slo.counted_apart for slo in service_levels(scenario)
            ),
            "predictor: its errors are drawn for all requests together": scenario.predictor,
            "cluster.groups: with kv_role or ec_role a request is at several replicas": (
                any(one.kv_role or one.ec_role for one in scenario.servers.groups.values())
            ),
            "engine.data_parallel_size: must be 1": any(
                own.engine.data_parallel_size > 1 for own in engines
            ),
        }.items()
        if holds
    ]:
        raise HeadwayError(wrong)


class Chunks(NamedTuple):
    """Requests in chunks."""

    total: int  # requests of all chunks
    parts: Iterator[Workload]
    turns: Turns | None  # what waits in them; None: no request waits for another


def first_chunk(scenario: Scenario, size: int, total: int | None = None) -> tuple[Workload, Chunks]:
    """Return the first chunk, and all of `chunks`."""
    load = chunks(scenario, size, total)
    first = next(load.parts, None)
    if first is None:
        raise HeadwayError("--no-tables: there is not one request")
    checked = map(_check_alike, repeat(first), chain([first], load.parts))
    return first, load._replace(parts=checked)


def _check_alike(first: Workload, part: Workload) -> Workload:
    """Return a part; HeadwayError where it has what was not there to begin with."""
    if part.cancel_after is not None or (part.segments is None) != (first.segments is None):
        raise HeadwayError("--no-tables: workload: only part of it has hash_ids, or it hangs up")
    return part


def _set_up(scenario: Scenario, *, leap: bool) -> StreamedRun:
    """Build engines and client."""
    size = max(CHUNK, PER_REPLICA * scenario.servers.most_replicas)
    first, load = first_chunk(scenario, size)
    total, chunked, turns = load
    for own in scenario.groups.values() if scenario.workload.trace is None else ():
        warn_of_limits(first, own.engine, total)
    specs, shares = resolve_groups(scenario), first.segments is not None
    if turns is None and find_coupling(scenario, first) is None:
        return stream_pods(scenario, specs, first, load, size, leap=leap)
    setup = set_up(
        scenario,
        specs,
        shares,
        lambda env, submit, _: StreamClient(env, total, size, chunked, submit, turns=turns),
        turns,
        leap=leap,
    )
    return StreamedRun(
        scenario,
        first,
        total,
        client=setup.client,
        engines=setup.cores,
        drive=setup.drive,
        specs=specs,
        missed=setup.missed,
        fleet=setup.fleet,
        record=setup.record,
    )


def stream_pods(
    scenario: Scenario,
    specs: Mapping[str, EngineSpec],
    first: Workload,
    load: Chunks,
    size: int,
    *,
    leap: bool,
    pods: range | None = None,
) -> StreamedRun:
    """Build pods that nothing ties together, all or some of them, and what feeds them.

    `load` has the requests in chunks of `size`, from the `first` chunk on.
    """
    members, apart = pod_members(scenario), pods is not None
    pods = pods or range(len(members))
    here = [members[pod] for pod in pods]
    record = standing_record(scenario, sorted(chain(*here)))
    group = ReplicaGroup(scenario, pods, first.segments is not None, leap)
    client = PodsClient(group, specs, load.parts, load.total, size)
    engines = by_number(here, [core for replica in client.replicas for core in replica.cores])
    return StreamedRun(
        scenario,
        first,
        load.total,
        client=client,
        engines=engines,
        drive=client.drive,
        specs=specs,
        record=record,
        apart=apart,
    )


def chunks(scenario: Scenario, size: int, total: int | None = None) -> Chunks:
    """Return the requests in chunks of `size`, of which the last is smaller.

    The numbers are those of the whole workload. Traces that are no lines of requests, or whose
    turns wait for others, stand in memory as a whole, some 24 bytes a request and more with
    prefixes. Other traces are read twice, as their requests must be counted, unless `total` is
    known.
    """
    spec = scenario.workload.generator
    if (found := trace_pieces(scenario)) is not None:
        with suppress(SessionsError):
            total = sum(map(len, found())) if total is None else total
            return Chunks(total, finish_parts(scenario, rechunk(found(), size)), None)
    if scenario.workload.trace is not None:
        whole = make_workload(scenario)
        turns = None if whole.after is None else Turns(whole)
        return Chunks(len(whole), _cut(whole, size), turns)
    parts = generate_parts(spec, scenario.seed, cache(trace_reader(scenario)), size)
    frontend = scenario.workload.make_frontend()
    cut = (replace(part, frontend=frontend) for part in rechunk(parts, size))
    return Chunks(spec.num_prompts, cut, None if spec.sessions is None else Turns())


def _cut(whole: Workload, size: int) -> Iterator[Workload]:
    for at in range(0, len(whole), size):
        yield whole.rows(np.arange(at, min(at + size, len(whole))))
