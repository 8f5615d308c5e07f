"""Levels over time: the length of the queue and the KV blocks in use, and their means over bins."""

import numpy as np
import numpy.typing as npt

from simulator.core.log import Log
from simulator.results.request_table import Floats, Ints, Rows


def arrivals(log: Log) -> Floats:
    """Give the times at which requests joined this replica's queue, ascending."""
    return np.sort(log.joined)


def decisions(log: Log) -> Floats:
    """Give the time at which each row's first step was decided: `waiting` is as of then."""
    decided: Floats = np.asarray(log.decided) if log.decided else log.steps["start"]
    return decided


def queue_levels(log: Log) -> tuple[Floats, Ints]:
    """Give the times at which the length of the queue is known, and the length then."""
    times, waiting = decisions(log), log.steps["waiting"].astype(np.int64)
    if not log.emptied:
        return times, waiting
    at = np.searchsorted(times, log.emptied, side="left")
    return np.insert(times, at, log.emptied), np.insert(waiting, at, 0)


def queue_depth(log: Log, end: float) -> tuple[float, int]:
    """Integrate the waiting requests over time up to `end`; give that (in s) and the maximum.

    A row tells how many waited as it was decided; each request that comes before the next row is
    decided adds to it. Only levels that last count for the maximum.
    """
    if not (log.step_rows or log.joined):  # of a large fleet perhaps most
        return 0.0, 0
    starts, waiting = queue_levels(log)
    starts = np.append(starts, end)
    queue = arrivals(log)
    queue = queue[queue <= end]
    after = np.searchsorted(starts, queue, side="left")  # the row that begins next
    wait = starts[after] - queue
    area = float((waiting * np.diff(starts)).sum()) + float(wait.sum())
    joined = np.bincount(after[wait > 0.0], minlength=len(starts))
    most = max(int(joined[0]), int((waiting + joined[1:]).max(initial=0)))
    return area, most


def block_growth(log: Log, rows: Rows) -> Floats:
    """Estimate the blocks that each step of a leapt row takes after the first, with paging.

    Every sequence grows by a token per step, so together they take one block per `block_size`
    tokens: right on average, where the row tells not at which step.
    """
    if log.reserves:
        return np.zeros(len(rows))
    grown = (rows["decodes"] + rows["wasted"]) / log.block_size
    return np.where(rows["steps"] > 1, grown, 0.0)


def mean_in_bins(
    starts: Floats, ends: Floats, levels: npt.NDArray[np.number], edges: Floats
) -> Floats:
    """Average over each bin a level that holds from start to end and is 0 elsewhere."""
    if not len(starts):
        return np.zeros(len(edges) - 1)
    area = np.cumsum(levels * (ends - starts))
    times = np.stack((starts, ends), axis=1).ravel()
    upto = np.stack((np.append(0.0, area[:-1]), area), axis=1).ravel()
    means: Floats = np.diff(np.interp(edges, times, upto)) / np.diff(edges)
    return means


def depth_in_bins(
    starts: Floats, waiting: npt.NDArray[np.number], queue: Floats, edges: Floats
) -> Floats:
    """Average the queue depth over each bin: `waiting` as a row starts, and who came since.

    `queue` are the times (ascending) at which requests joined.
    """
    nexts = np.append(starts, edges[-1])
    known = mean_in_bins(nexts[:-1], nexts[1:], waiting, edges)
    queue = queue[queue <= nexts[-1]]
    joins = np.sort(nexts[np.searchsorted(nexts, queue, side="left")])
    since = _area_after(queue, edges) - _area_after(joins, edges)
    depth: Floats = known + np.diff(since) / np.diff(edges)
    return depth


def _area_after(times: Floats, edges: Floats) -> Floats:
    """Integrate, up to each edge, the number of `times` (ascending) that are over."""
    over = np.searchsorted(times, edges, side="right")
    area: Floats = over * edges - np.append(0.0, np.cumsum(times))[over]
    return area
