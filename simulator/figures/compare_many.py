"""Many runs of one scenario in a picture: a row for each, a panel for each question."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simulator.figures.style import grid, log_scale, save, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from simulator.simulation.result import Result

PANELS = (
    ("TTFT", "ttft", 0.001, "s"),
    ("TPOT", "tpot", 1.0, "ms"),
    ("E2EL", "e2el", 0.001, "s"),
)
BAR, MEAN, P99 = "#0072B2", "#009E73", "#D55E00"
ROW = 0.28  # inches of a run


def plot_many(labels: Sequence[str], results: Sequence["Result"], path: Path) -> Path:
    """Draw any number of runs of one workload as a PNG, 1350 pixels wide.

    Output throughput as bars; mean and P99 of TTFT, TPOT and E2EL as points on logarithmic axes,
    where they span more than a factor of ten.
    """
    return save(draw_many(labels, results), path)


def draw_many(labels: Sequence[str], results: Sequence["Result"]) -> "Figure":
    """Draw the picture of `plot_many` without writing it."""
    with sheet(1, 1 + len(PANELS), 1.9 + ROW * len(labels), sharey=True) as figure:
        panels = figure.axes
        first = results[0]
        figure.suptitle(
            f"{first.scenario.name}: {len(first.workload):,} requests, {first.model.name} on "
            f"{first.gpu.name}",
            fontsize=12,
        )
        summaries = [result.summary() for result in results]
        places = np.arange(len(labels))
        _draw_bars(panels[0], places, [float(s["output_throughput"]) for s in summaries])
        for axes, (title, key, scale, unit) in zip(panels[1:], PANELS, strict=True):
            for word, color, marker in (("mean", MEAN, "o"), ("p99", P99, "D")):
                values = np.array([float(s[f"{word}_{key}_ms"]) * scale for s in summaries])
                axes.plot(values, places, marker, color=color, markersize=5)
            _spread(axes, title, unit)
        panels[0].set_yticks(places, labels)
        panels[0].invert_yaxis()
        points = panels[1].lines
        figure.legend(points, ["mean", "P99"], loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_bars(axes: "Axes", places: "np.typing.NDArray[np.int64]", values: list[float]) -> None:
    bars = axes.barh(places, values, color=BAR, height=0.65)
    axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3)
    axes.set_xlim(0, max([*values, 1e-9]) * 1.6)
    axes.set_title("Output")
    axes.set_xlabel("tokens/s")


def _spread(axes: "Axes", title: str, unit: str) -> None:
    """Frame a panel of points."""
    values = np.concatenate([np.asarray(line.get_xdata(), float) for line in axes.lines])
    known = values[values > 0]
    if len(known) and known.max() > 10 * known.min():
        log_scale(axes, "x")
    else:
        axes.set_xlim(0, max([*known, 1e-9]) * 1.1)
    axes.set_title(title)
    axes.set_xlabel(unit)
    grid(axes)
