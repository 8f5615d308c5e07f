"""A part of a run: requests that have ended, and what the logs say since the part before.

A run that keeps its requests is one part. Of one that does not, each part is taken out of the
replicas' logs, which forget it.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from simulator.core.log import REQUEST, RUN, STEP, Log
from simulator.results.request_table import Attempts, Floats
from simulator.workload.workload import Workload

Rows = npt.NDArray[np.void]


@dataclass(slots=True)
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


def split_log(log: Log, ids: range, before: float, lost: Mapping[int, float], *, last: bool) -> Log:
    """Take out the requests `ids` and every row of steps but the newest; with `last` that, too.

    In what is returned ids begin with 0. No other request has a token before the time `before`, s.
    `lost` has the time at which a request was sent once more: what it said before is dropped.
    """
    part = Log(log.num_blocks, log.block_size, log.reserves)
    part.request_rows += _move_requests(log.request_rows, REQUEST, ids).tobytes()
    runs = _move_requests(log.run_rows, RUN, ids)
    if lost:
        since = [lost.get(id, -1.0) for id in (runs["id"] + ids.start).tolist()]
        runs = runs[runs["start"] >= np.array(since)]
    runs["first_tick"] -= log.ticks_before
    part.run_rows += runs.tobytes()
    _move_steps(log, part, last)
    part.tick_ends = array("d", log.tick_ends)
    over = int(np.searchsorted(np.array(log.tick_ends), before))
    del log.tick_ends[:over]
    log.ticks_before += over
    for name in ("swap_rows", "load_rows", "draft_rows"):
        rows: bytearray = getattr(log, name)
        setattr(part, name, bytearray(rows))
        rows.clear()
    log.pause_rows.clear()
    if last:
        part.offloaded = log.offloaded
    return part


def _move_requests(rows: bytearray, kind: np.dtype[np.void], ids: range) -> Rows:
    """Take the rows of some requests out, and number their ids from 0 on."""
    found = np.frombuffer(bytes(rows), kind)
    there = (found["id"] >= ids.start) & (found["id"] < ids.stop)
    rows[:] = found[~there].tobytes()
    moved: Rows = found[there].copy()
    moved["id"] -= ids.start
    return moved


def _move_steps(log: Log, part: Log, last: bool) -> None:
    """Take out rows of steps, and what comes before the row after them is decided."""
    count = len(log.step_rows) // STEP.itemsize
    size = count if last else max(count - 1, 0)
    part.step_rows += log.step_rows[: size * STEP.itemsize]
    part.decided = log.decided[:size]
    del log.step_rows[: size * STEP.itemsize]
    del log.decided[:size]
    for name in ("joined", "emptied"):
        times: array[float] = getattr(log, name)
        over = len(times) if last else bisect_right(times, next_decision(log))
        setattr(part, name, times[:over])
        del times[:over]


def next_decision(log: Log) -> float:
    """Give the time at which the first row that is left was decided, s; 0 if there is none."""
    if not log.step_rows:
        return 0.0
    return log.decided[0] if log.decided else float(np.frombuffer(bytes(log.step_rows[:8]))[0])
