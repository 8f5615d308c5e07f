"""Pictures of a fit and of a validation: what was predicted against what was measured."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from simulator.figures.style import COLORS, encode, grid, log_scale, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from calibration.engine_steps.fit import StepFit

Floats = npt.NDArray[np.float64]
Groups = Mapping[str, tuple[Floats, Floats]]
"""Predicted and measured seconds, by what they are called."""


def plot_fit(fit: "StepFit", file: BinaryIO) -> None:
    """Draw every sample's prediction, by kind; held-out runs apart."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for sample in fit.samples:
        held = sample.row.point < 0 and sample.held_out
        name = "held-out runs" if held else sample.row.kind
        pair = (fit.cost.execute(sample.row.step), sample.seconds)
        groups.setdefault(name, []).append(pair)
    arrays = {name: _columns(pairs) for name, pairs in sorted(groups.items())}
    with sheet(1, 2, 4.2) as figure:
        left, right = figure.axes
        scatter(left, arrays)
        spread(right, arrays)
        figure.suptitle(f"Steps of {fit.cost.name}, predicted and measured", fontsize=12)
    encode(figure, file)


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    predicted, measured = np.array(pairs).T
    return predicted, measured


def scatter(axes: "Axes", groups: Groups) -> None:
    """Draw predicted over measured milliseconds, both logarithmic."""
    low, high = np.inf, 0.0
    for color, (name, (predicted, measured)) in zip(COLORS, groups.items(), strict=False):
        axes.plot(measured * 1e3, predicted * 1e3, ".", ms=3, color=color, label=name)
        low, high = min(low, measured.min() * 1e3), max(high, measured.max() * 1e3)
    axes.plot([low, high], [low, high], color="black", lw=1)
    log_scale(axes, "x")
    log_scale(axes, "y")
    grid(axes)
    axes.set_xlabel("measured (ms)")
    axes.set_ylabel("predicted (ms)")
    axes.legend(markerscale=3, fontsize=9)


def spread(axes: "Axes", groups: Groups) -> None:
    """Draw the distribution of relative errors."""
    for color, (name, (predicted, measured)) in zip(COLORS, groups.items(), strict=False):
        errors = np.sort(predicted / measured - 1.0) * 100.0
        axes.plot(errors, np.linspace(0.0, 100.0, len(errors)), color=color, label=name)
    axes.axvline(0.0, color="black", lw=1)
    axes.set_xlim(-50, 50)
    axes.set_xlabel("predicted / measured - 1 (%)")
    axes.set_ylabel("steps (%)")
    grid(axes)
