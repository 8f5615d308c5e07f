"""Who sits where in the batch: a strip for each run, a row for each seat."""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simulator.figures.data import Floats, Run
from simulator.figures.style import PALE, color, sheet
from simulator.results.request_table import RETRY
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SECONDS = 60.0  # shown unless told: long enough for a static batch, short enough to see requests
SAME = 1e-6  # s: files round times to nanoseconds
SHADES = (0, 1, 2, 3, 4, 5)  # colours of neighbours in the queue


def draw_occupancy(
    runs: Sequence[Run], *, start: float | None = None, seconds: float = SECONDS
) -> "Figure":
    """Draw for each run which request holds which seat, and seats whose request is done.

    Shows `seconds` from `start`, by default from the middle of the shortest run. A request takes
    the lowest free seat. Where the scheduler is static, a seat stays taken, in grey, until the
    last of the batch is done; what was preempted is shown in its first batch only.
    """
    end = min(run.end for run in runs)
    begin = max(0.0, (end - seconds) / 2) if start is None else start
    spans = [_seats(run, begin, begin + seconds) for run in runs]
    if not any(len(seats) for seats, *_ in spans):
        raise HeadwayError(f"no request runs between {begin:g} and {begin + seconds:g} s")
    rows = max(int(seats.max(initial=0)) for seats, *_ in spans) + 1
    with sheet(len(runs), 1, 0.7 + 1.75 * len(runs), sharex=True, squeeze=False) as figure:
        for axes, run, span in zip(figure.axes, runs, spans, strict=True):
            _strip(axes, run, span)
            axes.set_ylim(-0.5, rows - 0.5)
            axes.set_xlim(begin, begin + seconds)
            axes.set_ylabel("seat")
        figure.axes[-1].set_xlabel("time (s)")
        _legend(figure, runs)
    return figure


Span = tuple[Floats, Floats, Floats, Floats, Floats]
"""Seat, first and last moment of work, moment the seat is free again, id: one of each request."""


def _seats(run: Run, begin: float, end: float) -> Span:
    """Seat the requests that are in the batch between two moments."""
    requests = run.requests
    sent = requests.arrival + requests.client_queue_time.fillna(0.0)
    boards = (sent + requests.get(RETRY, 0.0) + requests.queue_time).to_numpy()
    done = (sent + requests.e2el).to_numpy()
    leaves = done.copy()
    if is_static(run):
        preempted = requests.preemptions.to_numpy() > 0
        for batch, end_of_batch in _batches(boards, done, preempted):
            leaves[batch] = end_of_batch
        done = np.fmin(done, leaves)
    order = np.flatnonzero(~np.isnan(boards) & ~np.isnan(leaves))
    order = order[np.lexsort((order, boards[order]))]
    seats = _lowest_free(boards[order], leaves[order])
    shown = (boards[order] < end) & (leaves[order] > begin)
    order, seats = order[shown], seats[shown]
    ids = requests.id.to_numpy()[order]
    return seats, boards[order], done[order], leaves[order], ids.astype(float)


def is_static(run: Run) -> bool:
    """Tell whether members of a batch keep their seats until the last is done."""
    policy = run.scenario["engine"]["scheduling_policy"]
    name: str = policy["policy"] if isinstance(policy, dict) else policy
    return name == "static"


def _batches(
    boards: Floats, done: Floats, preempted: npt.NDArray[np.bool_]
) -> Iterator[tuple[list[int], float]]:
    """Tell static batches apart: members, and when all are done.

    A batch boards over several steps, and nobody boards once all that did are done. When a
    preempted member is done says nothing: it comes back in a later batch.
    """
    batch: list[int] = []
    last = -np.inf
    for k in np.lexsort((np.arange(len(boards)), boards))[: int((~np.isnan(boards)).sum())]:
        if batch and boards[k] >= last - SAME:
            yield batch, last
            batch = []
        batch.append(int(k))
        if not preempted[k] and done[k] > last:
            last = float(done[k])
    if batch:
        yield batch, max(last, float(np.nanmax(boards)))


def _lowest_free(boards: Floats, leaves: Floats) -> Floats:
    """Give each, in the order of boarding, the lowest seat that nobody has."""
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    seats = np.empty(len(boards))
    for k, (moment, until) in enumerate(zip(boards, leaves, strict=True)):
        while taken and taken[0][0] <= moment + SAME:
            heappush(free, heappop(taken)[1])
        seat = heappop(free) if free else len(taken)
        heappush(taken, (until, seat))
        seats[k] = seat
    return seats


def _strip(axes: "Axes", run: Run, span: Span) -> None:
    seats, boards, done, leaves, ids = span
    shades = [color(SHADES[int(i) % len(SHADES)]) for i in ids]
    axes.barh(seats, leaves - done, left=done, height=1.0, color=PALE, linewidth=0)
    axes.barh(seats, done - boards, left=boards, height=0.86, color=shades, linewidth=0)
    share = run.summary["headway"]["wasted_share"]
    speed = run.summary["output_throughput"]
    axes.set_title(f"{run.label}: {speed:,.0f} tokens/s, {share:.0%} of slots wasted", loc="left")


def _legend(figure: "Figure", runs: Sequence[Run]) -> None:
    from matplotlib.patches import Patch

    if any(is_static(run) for run in runs):
        patches = [Patch(color=color(1)), Patch(color=PALE)]
        names = ["a request (colours only tell neighbours apart)", "already done, keeps its seat"]
        figure.legend(patches, names, loc="outside lower center", ncols=2, frameon=False)
