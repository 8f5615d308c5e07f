"""Levels over time: the length of the queue and the KV blocks in use, and their means over bins."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.core.log import Log
from simulator.results.request_table import Floats, Ints, Rows

SLICE = 1 << 16  # rows looked at together: bounds the temporaries
LEAPS = 4096  # rows whose steps are looked at together: bounds the temporaries


def arrivals(log: Log) -> Floats:
    """Return the times at which requests joined this replica's queue, ascending."""
    return np.sort(log.column("joined"))


def decisions(log: Log) -> Floats:
    """Return the time at which each row's first step was decided: `waiting` is as of then."""
    decided: Floats = log.column("decided") if log.decided else log.steps["start"]
    return decided


def queue_levels(log: Log) -> tuple[Floats, Ints]:
    """Return the times at which the length of the queue is known, and the length then."""
    times, waiting = decisions(log), log.steps["waiting"]
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
    joined = np.bincount(after[wait > 0.0], minlength=len(starts))
    area, most = float(wait.sum()), int(joined[0])
    for at in range(0, len(waiting), SLICE):
        some = waiting[at : at + SLICE]
        area += float((some * np.diff(starts[at : at + SLICE + 1])).sum())
        most = max(most, int((some + joined[at + 1 : at + SLICE + 1]).max()))
    return area, most


class LaterSteps(NamedTuple):
    """The steps of some leapt rows, without the first of each."""

    counts: Ints  # of each row
    first: Ints  # of each row, among these steps
    begins: Floats  # s
    blocks: Ints  # KV blocks that each adds to those in use


class LeapSums(NamedTuple):
    """Of each leapt row, what its later steps add to sums over its steps."""

    rows: Rows
    token_time: Floats  # s, of tokens of which each step adds one
    block_time: Floats  # s, of the KV blocks that the steps add
    blocks: Ints  # how many these are


class Leaps:
    """The leapt rows of a log, and what is known of each of their steps."""

    def __init__(self, log: Log) -> None:
        self.rows = log.steps
        steps = self.rows["steps"]
        self.leapt = np.flatnonzero(steps > 1)
        later = steps[self.leapt] - 1
        self._blocks, self._ticks = log.column("leap_blocks"), log.column("tick_ends")
        self._first = np.cumsum(later) - later  # of each leapt row, among the later steps of all

    @property
    def added_blocks(self) -> Ints:
        """How many KV blocks the later steps of each leapt row add."""
        first = self._first
        return np.add.reduceat(self._blocks, first, dtype=np.int64) if len(first) else first

    def later_steps(self, numbers: Ints) -> LaterSteps:
        """Return the steps of leapt rows, by the numbers of these."""
        rows = self.rows[numbers]
        counts = rows["steps"] - 1
        first = np.cumsum(counts) - counts
        place = np.arange(int(counts.sum()))
        begins = self._first[np.searchsorted(self.leapt, numbers)]
        blocks = self._blocks[place + np.repeat(begins - first, counts)]
        # A step ends with a tick, at which the next one begins.
        begins = np.searchsorted(self._ticks, rows["end"], side="right") - 1 - counts
        begins = self._ticks[place + np.repeat(begins - first, counts)]
        return LaterSteps(counts, first, begins, blocks.astype(np.int64))

    def sums(self) -> Iterator[LeapSums]:
        """Yield leapt rows, some at a time, and what their later steps add."""
        for at in range(0, len(self.leapt), LEAPS):
            rows = self.rows[self.leapt[at : at + LEAPS]]
            steps = self.later_steps(self.leapt[at : at + LEAPS])
            left = np.repeat(rows["end"], steps.counts) - steps.begins  # it stays to the row's end
            token_time, block_time, blocks = (
                np.add.reduceat(values, steps.first)
                for values in (left, left * steps.blocks, steps.blocks)
            )
            yield LeapSums(rows, token_time, block_time, blocks)


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


def count_in_bins(starts: Floats, ends: Floats, edges: Floats) -> Floats:
    """Average over each bin how many of some stretches of time, which may overlap, are under way.

    A stretch that ends before it starts counts as none; no time may be NaN.
    """
    begun, over = np.sort(starts), np.sort(np.maximum(starts, ends))
    area = _area_after(begun, edges) - _area_after(over, edges)
    counts: Floats = np.maximum(np.diff(area) / np.diff(edges), 0.0)
    return counts


def _area_after(times: Floats, edges: Floats) -> Floats:
    """Integrate, up to each edge, the number of `times` (ascending) that are over."""
    over = np.searchsorted(times, edges, side="right")
    area: Floats = over * edges - np.append(0.0, np.cumsum(times))[over]
    return area
