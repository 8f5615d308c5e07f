"""Runs of one workload in a picture, as `headway compare` draws it.

Up to eight runs: what came out, what users felt, and why. More: a row for each, and a panel for
each question.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.figures.occupancy import FEW, FINISHED_LABEL
from headway.figures.runs import ROW_OF_PARTS, draw_parts, draw_rows, part_names
from headway.figures.style import (
    COLORS,
    bars_with_ratios,
    draw_bounds,
    grid,
    log_scale,
    name_below,
    sheet,
    symlog_scale,
    tell_apart,
    whole_ticks,
    window,
)
from simulator.results.engine_metrics import ended_requests
from simulator.results.request_table import Floats, gather_requests
from simulator.results.time_series import arrivals, depth_in_bins, mean_in_bins, queue_levels
from simulator.simulation.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_HEIGHT = 0.28  # inches of a run among many
BINS = 400  # points of a line over time: what 600 pixels can show
WINDOW = 120.0  # s, of many requests over time: short enough to tell static batches apart
QUANTILES = 400  # points of a distribution
SQUEEZED = 20  # times as high: a line that is so squeezes another on a linear axis
SHORT = 16  # letters of a label that stands at its bar


def draw_compare(labels: Sequence[str], results: Sequence[Result], by: str = "") -> "Figure":
    """Draw up to eight runs of one workload; as a PNG, 1350 x 900 pixels. `by`: what labels say.

    Throughput; distributions of TTFT and E2EL; over time, seats taken, with those shaded that
    belong to requests already done, of many requests for the same two minutes from the middle; the
    queue over the whole run. Where there are several clients or priorities, mean
    and P99 of TTFT and E2EL of each below. Raises ValueError for more runs.
    """
    if not 1 <= len(results) <= len(COLORS) or len(labels) != len(results):
        raise ValueError(f"one label per run and 1 to {len(COLORS)} runs, not {len(results)}")
    summaries = [result.summary() for result in results]
    parts = len(part_names(summaries))
    below = 1.2 + ROW_OF_PARTS * parts if parts else 0.0  # inches
    heights = (3.0, 3.0, below) if parts else (3.0, 3.0)
    with sheet(len(heights), 2, 6.0 + below, height_ratios=heights) as figure:
        throughput, latency, seats, queue, *of_parts = figure.axes
        figure.suptitle(_title(results[0], by), fontsize=12)
        speeds = [float(summary["output_throughput"]) for summary in summaries]
        bars_with_ratios(
            throughput, labels, speeds, gap="  ", offset=5, room=1.55, fontweight="bold"
        )
        _draw_latency(latency, results)
        _draw_seats(seats, results)
        _draw_queue(queue, results)
        if parts:
            draw_parts(of_parts, labels, summaries)
        if len(results) > 1:
            name_below(figure, throughput.patches, labels)
            if max(map(len, labels)) > SHORT:  # the legend names them
                throughput.set_yticks([])
        grid(throughput, "x")
        for axes in (latency, seats, queue):
            grid(axes)
            tell_apart(axes)
    return figure


def draw_many(labels: Sequence[str], results: Sequence[Result], by: str = "") -> "Figure":
    """Draw any number of runs of one workload; as a PNG, 1350 pixels wide.

    Output throughput as bars; mean and P99 of TTFT, TPOT and E2EL as points on logarithmic axes,
    where they span more than a factor of ten.
    """
    with sheet(1, 4, 1.9 + ROW_HEIGHT * len(labels), sharey=True) as figure:
        figure.suptitle(_title(results[0], by), fontsize=12)
        draw_rows(
            figure,
            labels,
            [result.summary() for result in results],
            {"mean": ("mean", "o", 5), "P99": ("p99", "D", 5)},
            hues=[COLORS[0]] * len(labels),  # more than there are colours: rows tell them apart
            height=0.65,
            text={},
            room=1.6,
        )
    return figure


def _title(result: Result, by: str) -> str:
    gpus = [result.gpu.name]
    if result.cluster is not None:
        gpus = [spec.gpu.name for spec in result.cores]
    return (
        f"{result.scenario.name}: {len(result.workload):,} requests, "
        f"{result.model.name} on {', '.join(dict.fromkeys(gpus))}{by and f', by {by}'}"
    )


def _draw_latency(axes: "Axes", results: Sequence[Result]) -> None:
    """Cumulative distributions over completed requests."""
    from matplotlib.lines import Line2D

    share = np.linspace(0.0, 100.0, QUANTILES)
    lowest = np.inf
    for result, color in zip(results, COLORS, strict=False):
        table = gather_requests(result.workload, result.sent, result.logs)
        for values, dashes in ((table.ttft, "-"), (table.e2el, "--")):
            known = values[table.completed]
            if len(known):
                seconds = np.percentile(known, share, method="inverted_cdf")
                lowest = min(lowest, float(seconds[0]))
                axes.plot(seconds, share, dashes, color=color)
    if 0.0 < lowest < np.inf:
        log_scale(axes, "x")
    draw_bounds(
        axes, [result.summary() for result in results], {"ttft": "-", "e2el": "--"}, 1e-3, 0.82
    )
    axes.set_ylim(-1, 122)
    axes.set_yticks(range(0, 101, 20))
    axes.set(title="Latency of requests", xlabel="time since sent (s)", ylabel="% of requests")
    styles = [Line2D([], [], color="0.3", linestyle=dashes) for dashes in ("-", "--")]
    names = ["first token (TTFT)", "last (E2EL)"]
    axes.legend(styles, names, loc="upper center", ncols=2, frameon=False)


def _draw_seats(axes: "Axes", results: Sequence[Result]) -> None:
    """Seats taken in the batch, and of these the ones of requests that are done."""
    from matplotlib.patches import Patch

    edges, shown = _edges(results)
    wasted = False
    for result, color in zip(results, COLORS, strict=False):
        taken, idle = np.zeros(BINS), np.zeros(BINS)
        for log in result.logs:
            rows = log.steps
            taken += mean_in_bins(rows["start"], rows["end"], rows["running"], edges)
            idle += mean_in_bins(rows["start"], rows["end"], ended_requests(log, rows), edges)
        middle = (edges[1:] + edges[:-1]) / 2
        axes.plot(middle, taken, color=color, linewidth=1.5)
        if idle.any():
            wasted = True
            axes.fill_between(middle, taken - idle, taken, color=color, alpha=0.3, linewidth=0)
    _set_limits(axes, edges, headroom=1.25)
    axes.set(title="Requests in the batch", xlabel=f"time (s): {shown}", ylabel="requests running")
    if wasted:
        patch = Patch(color="0.5", alpha=0.4, linewidth=0)
        look: dict[str, Any] = {"handlelength": 1.2, "borderpad": 0.0, "frameon": False}
        axes.legend([patch], [FINISHED_LABEL], loc="upper right", **look)


def _draw_queue(axes: "Axes", results: Sequence[Result]) -> None:
    """Requests that wait in the engine, over the whole run: a peak may lie anywhere."""
    edges, shown = _edges(results, few=len(results[0].workload))
    for result, color in zip(results, COLORS, strict=False):
        logs = result.logs
        depth = sum(depth_in_bins(*queue_levels(log), arrivals(log), edges) for log in logs)
        axes.plot((edges[1:] + edges[:-1]) / 2, depth, color=color, linewidth=1.5)
    title = "Queue"
    peaks = [float(np.max(line.get_ydata())) for line in axes.lines]
    _set_limits(axes, edges, headroom=1.05)
    if max(peaks) > SQUEEZED * max(min(peaks), 1.0):
        symlog_scale(axes)
        title = "Queue (logarithmic above 1)"
    axes.set(title=title, xlabel=f"time (s): {shown}", ylabel="requests waiting")


def _set_limits(axes: "Axes", edges: Floats, headroom: float) -> None:
    """Begin just below 0, so that a line at 0 shows, and leave room above the highest."""
    top = max([float(np.max(line.get_ydata())) for line in axes.lines] + [1.0]) * headroom
    axes.set(ylim=(-0.015 * top, top), xlim=(edges[0], edges[-1]))
    whole_ticks(axes)


def _edges(results: Sequence[Result], few: int = FEW) -> tuple[Floats, str]:
    """Cut the time that is shown of all runs into bins, and say which it is.

    That is all of it with so `few` requests.
    """
    ends = [
        max((float(log.steps["end"][-1]) for log in result.logs if log.step_rows), default=1.0)
        for result in results
    ]
    begin, end = 0.0, max(ends)
    if max(len(result.workload) for result in results) > few:
        begin = max(0.0, (min(ends) - WINDOW) / 2)
        end = min(begin + WINDOW, end)
    return np.linspace(begin, end, BINS + 1), window(begin, end, max(ends))
