"""Which request is where in the batch: a strip for each run, a row for each seat."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headway.figures.data import Run
from headway.figures.style import (
    PALE,
    PHASES,
    color,
    ink,
    rate,
    sheet,
    tones,
    whole_ticks,
    window,
)
from simulator.results.request_table import DELIVERY, Floats
from simulator.results.time_series import count_in_bins
from simulator.util.errors import HeadwayError, MappingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SECONDS = 60.0  # shown of many requests: long enough for a static batch, short enough to see them
FEW = 100  # requests, of which the whole run is shown
NUMBERED = 30  # requests, whose bars have their numbers on them
LABEL_WIDTH = 0.03  # of the picture, that a number takes at most
ROUNDING = 1e-6  # s: files round times to nanoseconds
FINISHED_LABEL = "already done, keeps its seat"
MANY = 50  # seats, above which rows are too thin to be told apart: then they are counted
BINS = 400  # of time, in which they are


def draw_occupancy(
    runs: Sequence[Run], *, start: float | None = None, seconds: float | None = None
) -> "Figure":
    """Draw for each run which request holds which seat, and seats whose request is done.

    Of more than MANY seats it draws how many are in prefill, in decode and done.

    Shows `seconds` from `start`: by default, of at most FEW requests the whole runs, of more
    SECONDS from the middle of the shortest. A request takes the lowest free seat. Where seats are
    kept beyond the end, they stay taken, in grey, until the last of the batch is done; what was
    preempted is shown in its first batch only.
    """
    from matplotlib.patches import Patch

    shortest, longest = min(run.end for run in runs), max(run.end for run in runs)
    if long := [run.label for run in runs if run.each > 1]:
        raise HeadwayError(f"{', '.join(long)}: has too many requests to show each seat")
    few = max(len(run.requests) for run in runs) <= FEW
    if seconds is None:
        seconds = (few and max(longest - (start or 0.0), 0.0)) or SECONDS
    begin = max(0.0, (shortest - seconds) / 2) if start is None else start
    end = begin + seconds
    spans = [_slots(run, begin, end) for run in runs]
    if not any(len(slots) for slots, *_ in spans):
        name = "seconds" if start is None else "start"
        what = f"no request runs between {begin:g} and {end:g} s; the run ends at {longest:.3g} s"
        raise MappingError(name, what)
    rows = max(int(slots.max(initial=0)) for slots, *_ in spans) + 1
    keeps = any(_keeps_seats(run) for run in runs)
    edges = np.linspace(begin, end, BINS + 1)
    with sheet(len(runs), 1, 0.7 + 1.75 * len(runs), sharex=True, squeeze=False) as figure:
        for number, (axes, run, span) in enumerate(zip(figure.axes, runs, spans, strict=True)):
            axes.set(ylim=(-0.5, rows - 0.5), xlim=(begin, end), ylabel="seat")
            if rows > MANY:
                axes.set(ylim=(0, rows), ylabel="seats")
                hues = [PHASES["prefill"], PHASES["decode"], PALE]
                middle, counts = (edges[1:] + edges[:-1]) / 2, seats_by_phase(run, edges)
                axes.stackplot(middle, [*counts.values()], colors=hues, linewidth=0)
            else:
                _draw_strip(axes, run, span, number)
            speed = rate(run.summary["output_throughput"])
            used = 100 * run.summary["headway"]["decode_seat_utilization"]
            title = f"{run.label}: {speed} tokens/s, {used:.3g}% of decode seats used"
            axes.set_title(title, loc="left")
            whole_ticks(axes)
        figure.axes[-1].set_xlabel(f"time (s): {window(begin, end, longest)}")
        patches = {"a request (tones tell neighbours apart)": Patch(color=tones("#888888")[1])}
        if rows > MANY:
            patches = {name: Patch(color=PHASES[name]) for name in ("prefill", "decode")}
        if keeps:
            patches[FINISHED_LABEL] = Patch(color=PALE)
        if rows > MANY:
            patches["idle"] = Patch(facecolor="none", edgecolor="0.6", linewidth=0.8)
        if len(patches) > 1:
            place: Any = "outside lower center"
            figure.legend([*patches.values()], [*patches], loc=place, ncols=4, frameon=False)
    return figure


Span = tuple[Floats, Floats, Floats, Floats, Floats]
"""Slot, first and last moment of work, moment the slot is free again, id: one of each request."""


def _slots(run: Run, begin: float, end: float) -> Span:
    """Return slots to the requests that are in the batch between two moments."""
    admitted, done, freed = _seat_times(run)
    order = np.flatnonzero(~np.isnan(admitted) & ~np.isnan(freed))
    order = order[np.lexsort((order, admitted[order]))]
    slots = np.array([*lowest_slots(admitted[order], freed[order], ROUNDING)], float)
    shown = (admitted[order] < end) & (freed[order] > begin)
    order, slots = order[shown], slots[shown]
    ids = run.requests.id.to_numpy()[order]
    return slots, admitted[order], done[order], freed[order], ids.astype(float)


def _seat_times(run: Run) -> tuple[Floats, Floats, Floats]:
    """Return when each request is admitted, when it is done, and when its seat is free, in s."""
    admitted = run.admitted.to_numpy(float)
    done = (run.sent + run.requests.e2el - run.requests.get(DELIVERY, 0.0)).to_numpy(float)
    freed = done.copy()
    if _keeps_seats(run):
        preempted = run.requests.preemptions.to_numpy() > 0
        for batch, end_of_batch in _batches(admitted, done, preempted):
            freed[batch] = end_of_batch
        done = np.fmin(done, freed)
    return admitted, done, freed


def seats_by_phase(run: Run, edges: Floats) -> dict[str, Floats]:
    """Count the seats in each bin (mean) that are in `prefill`, in `decode`, and `done`.

    `done` are those that a static batch keeps for requests that have ended.
    """
    admitted, done, freed = _seat_times(run)
    known = ~np.isnan(admitted) & ~np.isnan(freed)
    admitted, done, freed = admitted[known], done[known], freed[known]
    prefill = run.requests["prefill_time"].to_numpy(float)[known]
    first = np.minimum(admitted + np.nan_to_num(prefill), done)
    spans = {"prefill": (admitted, first), "decode": (first, done), "done": (done, freed)}
    return {name: run.each * count_in_bins(*span, edges) for name, span in spans.items()}


def _keeps_seats(run: Run) -> bool:
    """Say whether requests keep their seats beyond their end."""
    return "seat_idle_time" in run.requests


def _batches(
    admitted: Floats, done: Floats, preempted: npt.NDArray[np.bool_]
) -> Iterator[tuple[list[int], float]]:
    """Tell static batches apart: members, and when all are done.

    A batch is admitted over several steps, and nobody is once all of it are done. When a preempted
    member is done says nothing: it comes back in a later batch.
    """
    batch: list[int] = []
    last = -np.inf
    for k in np.lexsort((np.arange(len(admitted)), admitted))[: int((~np.isnan(admitted)).sum())]:
        if batch and admitted[k] >= last - ROUNDING:
            yield batch, last
            batch = []
        batch.append(int(k))
        if not preempted[k] and done[k] > last:
            last = float(done[k])
    if batch:
        yield batch, max(last, float(np.nanmax(admitted)))


def lowest_slots(starts: Iterable[float], ends: Iterable[float], rounded: float) -> Iterator[int]:
    """Yield for each, in order of start, the lowest number that nobody has from start to end.

    Times may be wrong by `rounded` s, as those of files are.
    """
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    for start, end in zip(starts, ends, strict=True):
        while taken and taken[0][0] <= start + rounded:
            heappush(free, heappop(taken)[1])
        slot = heappop(free) if free else len(taken)
        heappush(taken, (end, slot))
        yield slot


def _draw_strip(axes: "Axes", run: Run, span: Span, number: int) -> None:
    slots, admitted, done, freed, ids = span
    palette = tones(color(number))
    shades = [palette[int(i) % len(palette)] for i in ids]
    axes.barh(slots, freed - done, left=done, height=1.0, color=PALE, linewidth=0)
    axes.barh(slots, done - admitted, left=admitted, height=0.86, color=shades, linewidth=0)
    if len(run.requests) <= NUMBERED:
        low, high = axes.get_xlim()
        begins, ends = np.maximum(admitted, low), np.minimum(done, high)
        for slot, left, right, name, hue in zip(slots, begins, ends, ids, shades, strict=True):
            if right - left > LABEL_WIDTH * (high - low):
                place = (left + right) / 2, slot
                axes.text(*place, f"{name:.0f}", color=ink(hue), ha="center", va="center")
