"""Schedulers and policies side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from simulator.figures.data import Run
from simulator.figures.style import color, grid, log_scale, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (("TTFT", "ttft", 1e-3, "s"), ("TPOT", "tpot", 1.0, "ms"), ("E2EL", "e2el", 1e-3, "s"))
WORDS = (("mean", "mean", "o"), ("median", "median", "|"), ("P99", "p99", "D"))


def draw_policies(runs: Sequence[Run]) -> "Figure":
    """Draw a row for each run: throughput, and mean, median and P99 of TTFT, TPOT and E2EL."""
    with sheet(1, 4, 1.7 + 0.3 * len(runs), sharey=True) as figure:
        places = np.arange(len(runs))
        bars = figure.axes[0]
        values = [float(run.summary["output_throughput"]) for run in runs]
        drawn = bars.barh(places, values, color=color(5), height=0.6)
        bars.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=3, fontsize=10)
        bars.set_xlim(0, max([*values, 1e-9]) * 1.45)
        bars.set_yticks(places, [run.label for run in runs])
        bars.invert_yaxis()
        bars.set_title("Output")
        bars.set_xlabel("tokens/s")
        for axes, panel in zip(figure.axes[1:], PANELS, strict=True):
            _draw_panel(axes, runs, panel)
        handles = figure.axes[1].lines
        words = [word for word, *_ in WORDS]
        figure.legend(handles, words, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_panel(axes: "Axes", runs: Sequence[Run], panel: tuple[str, str, float, str]) -> None:
    title, key, scale, unit = panel
    places = np.arange(len(runs))
    highest, lowest = 0.0, np.inf
    for number, (_, word, shape) in enumerate(WORDS):
        found = np.array([float(run.summary[f"{word}_{key}_ms"]) * scale for run in runs])
        size = 9 if shape == "|" else 6
        axes.plot(found, places, shape, color=color((1, 6, 0)[number]), markersize=size)
        highest, lowest = max(highest, found.max()), min(lowest, found.min())
    if lowest > 0 and highest > 10 * lowest:
        log_scale(axes, "x")
    else:
        axes.set_xlim(0, max(highest, 1e-9) * 1.1)
    axes.set_title(title)
    axes.set_xlabel(unit)
    grid(axes)
