"""What a run leaves behind: the record, from which all tables and metrics are derived.

A run that keeps its requests has one `Record`. Of one that does not, a `PartialRecord` after the
other is taken out of the replicas' logs, which forget it.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simulator.build.engine_spec import EngineSpec
from simulator.core.log import LOAD, PAUSE, REQUEST, RUN, SEAT, STEP, Log
from simulator.costs.cost_model import CostModel
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec
from simulator.results.breakdown import break_down
from simulator.results.request_table import (
    RETRY,
    Attempts,
    Floats,
    Ints,
    RequestTable,
    Rows,
    gather_requests,
)
from simulator.scenario.scenario import Scenario
from simulator.workload.workload import Workload

if TYPE_CHECKING:
    from simulator.results.kv_transfers import Encodings, Transfers

COME_AND_GO = ("failures", "scalings")
"""Counts of a cluster: where all are 0 its replicas are up all the time."""


@dataclass(slots=True, eq=False)
class ClusterRecord:
    """What became of the replicas of a cluster, beside their logs."""

    groups: list[str]  # of each engine core
    servers: list[int]  # likewise: the number of its server
    paid: list[list[float]]
    """Of each server, s: when it was ordered, when it was gone, when it was ordered again, ..."""
    counters: dict[str, int]  # of what came to nothing, under the names that the summary has
    tries: Attempts  # what clients sent again, and what they gave up
    changes: Sequence[tuple[float, int, str]] = ()
    """When (s) a server, by its number, came to a state; none where all are always up."""
    transfers: "Transfers | None" = None  # where prefill and decode are apart
    encodings: "Encodings | None" = None  # where encoders are

    def engine_logs(self, record: "Record") -> list[Log]:
        """Return what each engine wrote down; as clients see it, the record has it."""
        return record.logs if self.transfers is None else self.transfers.engines

    @property
    def comes_and_goes(self) -> bool:
        """Say whether replicas fail or are scaled: else all are up all the time."""
        return any(self.counters.get(name) for name in COME_AND_GO)

    def paid_seconds(self, server: int, start: float, end: float) -> float:
        """Add up the seconds from `start` to `end` for which a server is paid."""
        times = [*self.paid[server], *([inf] if len(self.paid[server]) % 2 else [])]
        total = 0.0
        for begin, over in zip(times[::2], times[1::2], strict=True):
            total += max(min(over, end) - max(begin, start), 0.0)
        return total


@dataclass(slots=True, eq=False)
class Record:
    """What happened in a run: the facts. Everything else is derived from them."""

    scenario: Scenario
    workload: Workload
    sent: npt.NDArray[np.float64]  # s, when each request went to the engine; NaN: it never did
    logs: list[Log]  # one per replica
    specs: Mapping[str, EngineSpec]  # by group; "" where there are none
    interrupted: bool = False
    warnings: list[str] = field(default_factory=list)
    warmup: float = 0.0  # s from the first request sent that the metrics leave out
    cooldown: float = 0.0  # s before the last one sent
    hints: npt.NDArray[np.int64] | None = None  # predicted output tokens; 0: never sent
    cluster: ClusterRecord | None = None
    given: Sequence[str] = ()  # what a caller of `run` gave in place of the scenario's
    _time_parts: dict[str, npt.NDArray[np.float64]] | None = None

    @property
    def cores(self) -> list[EngineSpec]:
        """What each engine core is."""
        groups = [""] * len(self.logs) if self.cluster is None else self.cluster.groups
        return [self.specs[group] for group in groups]

    @property
    def spec(self) -> EngineSpec:
        """What the first engine core is; one that encodes for others is none."""
        return next(spec for spec in self.cores if spec.role != "ec_producer")

    @property
    def model(self) -> ModelSpec:
        """The model that was served."""
        return self.spec.model

    @property
    def gpu(self) -> Gpu:
        """What it was served on."""
        return self.spec.gpu

    @property
    def costs(self) -> list[CostModel]:
        """The cost model of each engine core."""
        return [spec.cost for spec in self.cores]

    @property
    def tries(self) -> Attempts | None:
        """What a cluster's clients sent again, and what they gave up."""
        return None if self.cluster is None else self.cluster.tries

    @property
    def transfers(self) -> "Transfers | None":
        """What became of KV caches, where a cluster prefills and decodes apart."""
        return None if self.cluster is None else self.cluster.transfers

    def request_table(self) -> RequestTable:
        """Collect what the logs say of each request, by id."""
        return gather_requests(self.workload, self.sent, self.logs, self.tries)

    def time_parts(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return the parts of each completed request's e2el in seconds, by id."""
        if self._time_parts is None:
            columns = (self.workload, self.sent)
            if self.transfers is not None:
                parts = self.transfers.time_parts(*columns, self.costs)
            else:
                parts = break_down(gather_requests(*columns, self.logs), self.logs, self.costs)
            if self.cluster is not None and self.cluster.encodings is not None:
                parts = self.cluster.encodings.time_parts(parts["prefill_time"]) | parts
            cluster = self.scenario.cluster
            if cluster is not None and cluster.may_retry:
                parts = {RETRY: self.request_table().retry_time} | parts
            self._time_parts = parts
        return self._time_parts


def replicas_in(groups: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of the engine cores of each group."""
    found: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        found.setdefault(group, []).append(number)
    return found


@dataclass(slots=True, eq=False)
class PartialRecord:
    """Requests that have ended, ids from 0 on, and the logs of all replicas."""

    workload: Workload
    sent: Floats  # s, when each went to the engine; NaN: it never did
    logs: Sequence[Log]  # one per replica, as clients see it
    tries: Attempts | None = None
    until: Sequence[float] | None = None
    """To when (s) each log tells who waits; None: to the end of the run, of which this is all."""
    engine_logs: Sequence[Log] | None = None  # as the engines wrote them, where that is another
    latencies: Mapping[str, Floats] = field(default_factory=dict)
    """Further parts of the requests' e2el, s, by id; NaN: not known."""


def split_log(
    log: Log,
    ids: range,
    before: float,
    lost: Mapping[int, float],
    *,
    last: bool,
    some: Ints | None = None,
) -> Log:
    """Take out the requests `ids` and every row of steps but the newest; with `last` that, too.

    In what is returned ids begin with 0; where `some` of `ids` alone (ascending, from 0) are here,
    these are counted. No other request has a token before the time `before`, s.
    `lost` has the time at which a request was sent once more: what it said before is dropped.
    """
    part = Log(log.num_blocks, log.block_size, log.num_seats)
    part.delivers_together = log.delivers_together
    part.host_waits, log.host_waits = log.host_waits, 0.0
    part.request_rows += _move_requests(log.request_rows, REQUEST, ids, some).tobytes()
    runs, pauses = (
        _since(_move_requests(rows, kind, ids, some), ids, lost)
        for rows, kind in ((log.run_rows, RUN), (log.pause_rows, PAUSE))
    )
    part.pause_rows += pauses.tobytes()
    if log.seat_rows is not None:
        part.seat_rows = bytearray(_move_requests(log.seat_rows, SEAT, ids, some).tobytes())
    runs["first_tick"] -= log.ticks_before
    part.run_rows += runs.tobytes()
    _move_steps(log, part, last)
    part.tick_ends = array("d", log.tick_ends)
    if log.step_rows:  # the ticks of its row are still needed
        before = min(before, float(log.steps["start"][0]))
    over = int(np.searchsorted(np.array(log.tick_ends), before))
    del log.tick_ends[:over]
    log.ticks_before += over
    part.load_rows += _move_requests(log.load_rows, LOAD, ids, some).tobytes()
    for name in ("swap_rows", "draft_rows"):
        rows: bytearray = getattr(log, name)
        setattr(part, name, bytearray(rows))
        rows.clear()
    part.amounts, log.amounts = log.amounts, part.amounts
    if last:
        part.offloaded = log.offloaded
    return part


def _since(rows: Rows, ids: range, lost: Mapping[int, float]) -> Rows:
    """Leave out what requests that were sent once more had said before."""
    if not lost:
        return rows
    since = [lost.get(id, -1.0) for id in (rows["id"] + ids.start).tolist()]
    return rows[rows["start"] >= np.array(since)]


def _move_requests(
    rows: bytearray, kind: np.dtype[np.void], ids: range, numbers: Ints | None
) -> Rows:
    """Take the rows of some requests out, and number their ids from 0 on."""
    found = np.frombuffer(bytes(rows), kind)
    there = (found["id"] >= ids.start) & (found["id"] < ids.stop)
    rows[:] = found[~there].tobytes()
    moved: Rows = found[there].copy()
    moved["id"] -= ids.start
    if numbers is not None:
        moved["id"] = np.searchsorted(numbers, moved["id"])
    return moved


def _move_steps(log: Log, part: Log, last: bool) -> None:
    """Take out rows of steps, and what comes before the row after them is decided."""
    count = len(log.step_rows) // STEP.itemsize
    size = count if last else max(count - 1, 0)
    part.step_rows += log.step_rows[: size * STEP.itemsize]
    part.decided = log.decided[:size]
    later = int(part.steps["steps"].sum()) - size
    part.leap_blocks = log.leap_blocks[:later]
    del log.leap_blocks[:later]
    del log.step_rows[: size * STEP.itemsize]
    del log.decided[:size]
    for name in ("joined", "emptied"):
        times: array[float] = getattr(log, name)
        over = len(times) if last else bisect_right(times, next_decision(log))
        setattr(part, name, times[:over])
        del times[:over]


def next_decision(log: Log) -> float:
    """Return the time at which the first row that is left was decided, s; 0 if there is none."""
    if not log.step_rows:
        return 0.0
    return log.decided[0] if log.decided else float(np.frombuffer(bytes(log.step_rows[:8]))[0])
