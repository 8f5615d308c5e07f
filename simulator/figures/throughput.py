"""Throughput of runs: what came out in all, and second by second."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from simulator.figures.data import BINS, Run
from simulator.figures.style import color, grid, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_throughput(runs: Sequence[Run]) -> "Figure":
    """Draw output throughput of each run as a bar, and over time as a line."""
    with sheet(1, 2, 2.6 + 0.25 * len(runs), width_ratios=(1, 1.35)) as figure:
        bars, lines = figure.axes
        _draw_bars(bars, runs)
        edges = np.linspace(0.0, max(run.end for run in runs) or 1.0, BINS // 3 + 1)
        for number, run in enumerate(runs):
            tokens = run.steps.decode_tokens * run.steps.steps / run.steps.duration
            rate = run.over_time(tokens, edges)
            shown = edges[:-1] < run.end
            lines.plot(edges[:-1][shown], rate[shown], color=color(number), label=run.label)
        lines.set_title("Decoded tokens over time")
        lines.set_xlabel("time (s)")
        lines.set_ylabel("tokens/s")
        lines.set_ylim(bottom=0)
        lines.set_xlim(0, edges[-1])
        grid(lines)
    return figure


def _draw_bars(axes: "Axes", runs: Sequence[Run]) -> None:
    values = [float(run.summary["output_throughput"]) for run in runs]
    places = np.arange(len(runs))
    axes.barh(places, values, color=[color(k) for k in range(len(runs))], height=0.65)
    for place, value in enumerate(values):
        ratio = f" ({value / values[0]:.2f}x)" if place and values[0] else ""
        text = f"{value:,.0f}{ratio}"
        axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [run.label for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, max([*values, 1e-9]) * 1.5)
    axes.set_title("Output throughput")
    axes.set_xlabel("tokens/s")
    grid(axes, "x")
