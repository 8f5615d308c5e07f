"""Levels over time, averaged over bins."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


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
