"""Steps as a cost model predicts them, beside what they took."""

from typing import TYPE_CHECKING

import numpy as np

from simulator.figures.data import need, need_numbers
from simulator.figures.style import GREY, color, grid, log_scale, sheet
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def draw_steps(steps: "pd.DataFrame") -> "Figure":
    """Draw predicted over measured seconds of each step, and how the error is distributed.

    `steps` has the columns of a live run's steps_measured.csv: `seconds`, `predicted_s`, `chunks`.
    """
    need(steps, ["chunks"], "steps_measured.csv")
    need_numbers(steps, ["seconds", "predicted_s"], "steps_measured.csv")
    steps = steps[(steps.seconds > 0) & (steps.predicted_s > 0)]
    if not len(steps):
        raise HeadwayError("steps_measured.csv: has no step with both times")
    prompts = steps.chunks.notna() & (steps.chunks.astype(str) != "")
    error = 100.0 * (steps.predicted_s / steps.seconds - 1.0)
    with sheet(1, 2, 4.2) as figure:
        times, spread = figure.axes
        kinds = (("decodes only", ~prompts, 1), ("with prompts", prompts, 0))
        low, high = np.percentile(error, [0.5, 99.5])
        bins = np.linspace(low, high, 60).tolist()
        for name, part, number in kinds:
            if not part.any():
                continue
            label = f"{name} ({int(part.sum()):,})"
            took, said = 1e3 * steps.seconds[part], 1e3 * steps.predicted_s[part]
            times.plot(took, said, ".", color=color(number), ms=3, alpha=0.4, label=label)
            spread.hist(error[part], bins, color=color(number), alpha=0.6)
        low, high = 1e3 * steps.seconds.min(), 1e3 * steps.seconds.max()
        for factor in (0.9, 1.0, 1.1):
            ends = [low * factor, high * factor]
            times.plot([low, high], ends, "-" if factor == 1 else ":", color=GREY, linewidth=1)
        log_scale(times, "x")
        log_scale(times, "y")
        times.set_title("Time of a step (dotted: 10 % off)")
        times.set_xlabel("measured (ms)")
        times.set_ylabel("predicted (ms)")
        times.legend(loc="upper left", markerscale=4, frameon=False)
        spread.set_title(f"Error of a step: median {np.median(abs(error)):.1f} %")
        spread.axvline(0, color=GREY, linewidth=1)
        spread.set_xlabel("predicted / measured - 1 (%)")
        spread.set_ylabel("steps")
        for axes in figure.axes:
            grid(axes)
    return figure
