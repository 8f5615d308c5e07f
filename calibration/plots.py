"""Pictures of what was predicted against what was measured: steps, runs, whole metrics."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from calibration.errors import Floats
from simulator.figures.style import (
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
        whole.set_xlabel("simulated / live - 1 (%); grey: live vs live")
        grid(whole, "x")
        figure.suptitle(title, fontsize=12)
    encode(figure, file)


def plot_run(title: str, latencies: Groups, gauges: Mapping[str, Series], file: BinaryIO) -> None:
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
    encode(figure, file)


def plot_metrics(metrics: Mapping[str, Groups], file: BinaryIO) -> None:
    """Draw means of many runs (ms) by metric and source, predicted over measured."""
    with sheet(1, len(metrics), 3.8) as figure:
        for ax, (name, groups) in zip(figure.axes, metrics.items(), strict=True):
            for k, (source, (predicted, measured)) in enumerate(groups.items()):
                look: dict[str, Any] = {"color": color(k), "marker": marker(k), "markersize": 4}
                ax.plot(measured, predicted, linestyle="none", label=source, **look)
            if any(len(measured) for _, measured in groups.values()):
                log_scale(ax, "x")
                log_scale(ax, "y")
                low, high = ax.get_xlim()
                ax.plot([low, high], [low, high], color="black", lw=1)
            ax.set_title(f"mean {name.upper()}")
            ax.set_xlabel("measured (ms)")
            grid(ax)
        figure.axes[0].set_ylabel("predicted (ms)")
        legend_below(figure, figure.axes[0])
    encode(figure, file)


def _scatter_steps(axes: "Axes", groups: Groups) -> None:
    """Draw predicted over measured milliseconds, both logarithmic."""
    low, high = np.inf, 0.0
    for shade, (name, (predicted, measured)) in zip(COLORS, groups.items(), strict=False):
        axes.plot(measured * 1e3, predicted * 1e3, ".", ms=3, color=shade, label=name)
        low, high = min(low, measured.min() * 1e3), max(high, measured.max() * 1e3)
    axes.plot([low, high], [low, high], color="black", lw=1)
    log_scale(axes, "x")
    log_scale(axes, "y")
    grid(axes)
    axes.set_xlabel("measured (ms)")
    axes.set_ylabel("predicted (ms)")
    axes.legend(markerscale=3, fontsize=9)


def _step_errors(axes: "Axes", groups: Groups) -> None:
    """Draw the distribution of relative errors."""
    for shade, (name, (predicted, measured)) in zip(COLORS, groups.items(), strict=False):
        _cumulate(axes, (predicted / measured - 1.0) * 100.0, color=shade, label=name)
    axes.axvline(0.0, color="black", lw=1)
    axes.set_xlim(-50, 50)
    axes.set_xlabel("predicted / measured - 1 (%)")
    axes.set_ylabel("steps (%)")
    grid(axes)


def _cumulate(axes: "Axes", values: Floats, *, color: str, label: str) -> None:
    """Draw the share of values, in percent, that are no larger."""
    axes.plot(np.sort(values), np.linspace(0.0, 100.0, len(values)), color=color, label=label)
