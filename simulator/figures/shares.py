"""Who gets how much: fairness over time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from simulator.figures.data import Run
from simulator.figures.style import color, grid, legend_below, marker, sheet
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_fairness(runs: Sequence[Run]) -> "Figure":
    """Draw Jain's index and the service difference of clients that compete, window by window.

    Raises HeadwayError where a run has one client only.
    """
    if alone := [run.label for run in runs if run.fairness is None]:
        raise HeadwayError(f"{', '.join(alone)}: has no fairness.csv: its workload has one client")
    with sheet(1, 2, 3.6) as figure:
        jain, difference = figure.axes
        for number, run in enumerate(runs):
            assert run.fairness is not None
            rows = run.fairness.dropna()
            style: dict[str, Any] = {
                "color": color(number),
                "marker": marker(number),
                "label": run.label if len(rows) else f"{run.label} (nobody competes)",
            }
            middle = (rows.start + rows.end) / 2
            jain.plot(middle, rows.jain_index, **style)
            difference.plot(rows.end, rows.service_difference, **style)
        jain.set_title("Jain's index per window")
        jain.set_ylabel("index (1: all alike)")
        jain.set_ylim(min(0.9, jain.dataLim.y0 - 0.02), 1.01)
        difference.set_title("Most less least served")
        difference.set_ylabel("service (tokens in + 2 x out)")
        difference.set_ylim(0, max(difference.dataLim.y1 * 1.08, 1.0))
        for axes in (jain, difference):
            axes.set_xlabel("time (s)")
            axes.set_xlim(0, max(run.end for run in runs) or 1.0)
            axes.yaxis.set_major_formatter("{x:,g}")
            grid(axes)
        legend_below(figure, jain)
    return figure
