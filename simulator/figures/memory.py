"""The KV cache: how full it is over time, and how much of what is taken holds tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from simulator.figures.data import BINS, Run
from simulator.figures.style import PALE, color, grid, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_kv(runs: Sequence[Run]) -> "Figure":
    """Draw the share of KV blocks in use over time with preemptions marked, and what they hold."""
    with sheet(1, 2, 2.9 + 0.22 * len(runs), width_ratios=(1.3, 1)) as figure:
        usage, kept = figure.axes
        edges = np.linspace(0.0, max(run.end for run in runs) or 1.0, BINS + 1)
        for number, run in enumerate(runs):
            _draw_usage(usage, run, edges, color(number))
        usage.set_title("KV cache in use (x: preemption)" if _any_preempted(runs) else "KV cache")
        usage.set_xlabel("time (s)")
        usage.set_ylabel("% of KV blocks")
        usage.set_ylim(0, 104)
        usage.set_xlim(0, edges[-1])
        grid(usage)
        _draw_kept(kept, runs)
    return figure


def _any_preempted(runs: Sequence[Run]) -> bool:
    return any(run.steps.preempted.any() for run in runs)


def _draw_usage(axes: "Axes", run: Run, edges: "np.typing.NDArray[np.float64]", hue: str) -> None:
    steps = run.steps
    many = steps.replica.nunique() if "replica" in steps else 1
    share = 100.0 * steps.kv_blocks_used / (steps.kv_blocks_used + steps.kv_blocks_free) / many
    level = run.over_time(share, edges)
    shown = edges[:-1] < run.end
    axes.plot(edges[:-1][shown], level[shown], color=hue, label=run.label)
    lost = steps.start[steps.preempted > 0]
    axes.plot(lost, np.full(len(lost), 101.5), "x", color=hue, markersize=4)


def _draw_kept(axes: "Axes", runs: Sequence[Run]) -> None:
    """Split the mean use into tokens and room that nobody uses."""
    places = np.arange(len(runs))
    used = np.array([100.0 * run.summary["headway"]["kv_cache_usage_mean"] for run in runs])
    full = np.array([float(run.summary["headway"]["memory_efficiency"]) for run in runs])
    hues = [color(k) for k in range(len(runs))]
    axes.barh(places, used * full, color=hues, height=0.6)
    lost = used * (1 - full)
    axes.barh(places, lost, left=used * full, color=PALE, height=0.6, hatch="///", ec="0.6")
    for place, value, share in zip(places, used, full, strict=True):
        text = f" {1 - share:.1%} lost"
        axes.annotate(text, (value, place), (3, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [run.label for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, max(used.max(), 1e-9) * 1.6)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 100])
    axes.set_title("Mean use, fragmentation")
    axes.set_xlabel("% of KV blocks (hatched: empty)")
    grid(axes, "x")
