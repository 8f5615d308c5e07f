"""Pictures of what was predicted against what was measured: steps, runs, whole metrics."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from calibration.errors import Floats
from headway.figures.style import (
    COLORS,
    color,
    encode,
    grid,
    legend_below,
    log_scale,
    marker,
    sheet,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARGIN = 1.15  # times the largest value to which an axis goes, and as far below the least
LEAST_SPAN = 8.0  # of a logarithmic axis: highest / lowest
MOST_LETTERS = 26  # under an axis
LEAST_ERROR = 50.0  # % to which an axis of errors goes on either side, at least

Pair = tuple[Floats, Floats]
"""Predicted and measured values."""
Groups = Mapping[str, Pair]
Series = tuple[Pair, Pair]
"""Times and values, predicted and measured."""


def plot_steps(title: str, groups: Groups, file: BinaryIO) -> None:
    """Draw steps (s) by what they are called: predicted over measured, and their errors."""
    with sheet(1, 2, 4.2) as figure:
        _scatter_steps(figure.axes[0], groups)
        _step_errors(figure.axes[1], groups)
        figure.suptitle(title, fontsize=12)
    encode(figure, file)


def plot_live(
    title: str,
    groups: Groups,
    metrics: Sequence[tuple[str, float, tuple[float, float] | None]],
    file: BinaryIO,
) -> None:
    """Draw a live run's steps (s), and its metrics: label, relative error, band of its reruns."""
    with sheet(1, 3, 4.2, width=12.0) as figure:
        steps, errors, whole = figure.axes
        _scatter_steps(steps, groups)
        _step_errors(errors, groups)
        places = np.arange(len(metrics))[::-1]
        for place, (_, _, band) in zip(places, metrics, strict=True):
            if band is not None:
                low, high = (100.0 * bound for bound in band)
                whole.barh(place, high - low, left=low, height=0.7, color="0.8")
        whole.plot([100.0 * error for _, error, _ in metrics], places, "o", color="#0072B2")
        whole.axvline(0.0, color="black", lw=1)
        whole.set_yticks(places, [label for label, _, _ in metrics])
        whole.set_xlabel("simulated / live - 1 (%)\ngrey: live vs live")
        grid(whole, "x")
        figure.suptitle(title, fontsize=12)
    encode(figure, file)


def plot_run(
    title: str,
    latencies: Groups,
    gauges: Mapping[str, Series],
    file: BinaryIO,
    kind: str = "png",
) -> None:
    """Draw the distributions of requests' latencies (ms) and, by axis label, gauges over time."""
    panels = 3 + len(gauges)
    with sheet(1, panels, 3.6, width=3.2 * panels) as figure:
        axes = figure.axes
        for ax, (name, (predicted, measured)) in zip(axes, latencies.items(), strict=False):
            _cumulate(ax, measured, color="black", label="measured")
            _cumulate(ax, predicted, color=COLORS[0], label="predicted")
            if len(measured) and measured.min() > 0:
                log_scale(ax, "x")
            ax.set_xlabel(f"{name.upper()} (ms)")
        axes[0].set_ylabel("requests (%)")
        for ax, (label, (simulated, recorded)) in zip(axes[3:], gauges.items(), strict=True):
            ax.step(*recorded, where="post", color="black", label="measured", lw=0.8)
            ax.step(*simulated, where="post", color=COLORS[0], label="predicted", lw=0.8)
            ax.set_xlabel("time (s)")
            ax.set_ylabel(label)
        for ax in axes:
            grid(ax)
        legend_below(figure, axes[0])
        figure.suptitle(title, fontsize=11)
    encode(figure, file, kind)


def plot_metrics(metrics: Mapping[str, Groups], file: BinaryIO) -> None:
    """Draw means of many runs (ms) by metric and source, predicted over measured."""
    with sheet(1, len(metrics), 3.8) as figure:
        for ax, (name, groups) in zip(figure.axes, metrics.items(), strict=True):
            for k, (source, (predicted, measured)) in enumerate(groups.items()):
                look: dict[str, Any] = {"color": color(k), "marker": marker(k), "markersize": 4}
                ax.plot(measured, predicted, linestyle="none", label=source, **look)
            ax.set_title(f"mean {name.upper()}")
            ax.set_xlabel("measured (ms)")
            values = [value for pair in groups.values() for side in pair for value in side]
            if values:
                _same_scales(ax, values)
            else:
                ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center")
                ax.set(xticks=[], yticks=[])
        figure.axes[0].set_ylabel("predicted (ms); line: as measured")
        legend_below(figure, figure.axes[0])
    encode(figure, file)


def _scatter_steps(axes: "Axes", groups: Groups) -> None:
    """Draw predicted over measured milliseconds, both logarithmic."""
    values: list[float] = []
    for shade, (name, (predicted, measured)) in zip(COLORS, groups.items(), strict=False):
        axes.plot(measured * 1e3, predicted * 1e3, ".", ms=3, color=shade, label=name)
        values += [*measured * 1e3, *predicted * 1e3]
    _same_scales(axes, values)
    axes.set_xlabel("measured (ms)")
    axes.set_ylabel("predicted (ms); line: as measured")
    axes.legend(markerscale=3, fontsize=9)


def _same_scales(axes: "Axes", values: Sequence[float]) -> None:
    """Set both axes to the logarithmic scale of all values, and draw where they are the same."""
    positive = [value for value in values if value > 0]
    low, high = min(positive, default=1.0) / MARGIN, max(positive, default=1.0) * MARGIN
    widen = max(1.0, LEAST_SPAN * low / high) ** 0.5
    low, high = low / widen, high * widen
    axes.set(xlim=(low, high), ylim=(low, high))
    log_scale(axes, "x")
    log_scale(axes, "y")
    ticks = _few_ticks(low, high)
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    axes.plot([low, high], [low, high], color="black", lw=1)
    grid(axes)


def _few_ticks(low: float, high: float) -> list[float]:
    """Choose as many round numbers of a logarithmic axis as there is room for."""
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks: list[float] = []
    for subs, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
        ticks = [sub * 10.0**power for power in decades[::every] for sub in subs]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if sum(len(f"{tick:,.10g}") + 2 for tick in ticks) <= MOST_LETTERS:
            break
    return ticks


def _step_errors(axes: "Axes", groups: Groups) -> None:
    """Draw the distribution of relative errors, less the hundredth at either end of far ones."""
    ends = [-LEAST_ERROR, LEAST_ERROR]
    for shade, (name, (predicted, measured)) in zip(COLORS, groups.items(), strict=False):
        errors = (predicted / measured - 1.0) * 100.0
        _cumulate(axes, errors, color=shade, label=name)
        if len(errors):
            ends += [1.05 * end for end in np.percentile(errors, [1, 99])]
    axes.axvline(0.0, color="black", lw=1)
    axes.set_xlim(min(ends), max(ends))
    axes.set_xlabel("predicted / measured - 1 (%)")
    axes.set_ylabel("steps (%)")
    grid(axes)


def _cumulate(axes: "Axes", values: Floats, *, color: str, label: str) -> None:
    """Draw the share of values, in percent, that are no larger."""
    axes.plot(np.sort(values), np.linspace(0.0, 100.0, len(values)), color=color, label=label)
