"""A sweep or plan over its keys: a curve over one, a heat map over two."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.figures.style import color, draw_levels, grid, sheet
from simulator.figures.tables import bounds_of, short_value, varied_keys
from simulator.results.read import check_columns
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COST = "dollars_per_million_output_tokens"
MEASURES = {
    "capacity": ("Capacity: largest load that holds", 1.0, 1),
    COST: ("$ per M output tokens", 1.0, -1),
    "slo_attainment": ("SLO attainment, %", 100.0, 1),
    "attainment": ("SLO attainment, %", 100.0, 1),
    "p99_ttft_ms": ("P99 TTFT, ms", 1.0, -1),
    "output_throughput": ("output tokens/s", 1.0, 1),
}
"""Column: label, factor, and whether more of it is better (1) or less (-1)."""
PANELS = 2
MAX_CELLS = 24  # a side of a heat map whose numbers can be read


def draw_grid(rows: "pd.DataFrame") -> "Figure":
    """Draw the first two of MEASURES that are there over the keys that were varied.

    The cost only beside a capacity: there bounds are just kept, and attainment tells nothing. Over
    one key it is a curve, over more a heat map of the first two: of several points in a cell the
    best, by its own measure. Raises HeadwayError where no key or no measure varies.
    """
    keys = varied_keys(rows, "")
    there = [name for name in MEASURES if name in rows and rows[name].notna().any()]
    measures = [name for name in there if name != COST or "capacity" in there][:PANELS]
    if not keys or not measures:
        raise HeadwayError("the table has nothing to draw over its keys")
    check_columns(rows, measures, "the table")
    high = 3.6 if len(keys) == 1 else 2.4 + 0.32 * min(rows[keys[1]].nunique(), MAX_CELLS)
    with sheet(1, len(measures), high) as figure:
        for axes, name in zip(figure.axes, measures, strict=True):
            known = rows[rows[name].notna()]
            draw = _draw_curve if len(keys) == 1 else _draw_heat
            draw(axes, known, keys, name)
            axes.set_title(MEASURES[name][0])
            axes.set_xlabel(keys[0])
            if len(keys) == 1 and name == "p99_ttft_ms":
                draw_levels(axes, bounds_of(known, "ttft", "the table"))
    return figure


def _draw_curve(axes: "Axes", rows: "pd.DataFrame", keys: Sequence[str], name: str) -> None:
    from pandas.api.types import is_numeric_dtype

    key = keys[0]
    if is_numeric_dtype(rows[key]):
        rows = rows.sort_values(key)
    values = rows[name] * MEASURES[name][1]
    if is_numeric_dtype(rows[key]):
        axes.plot(rows[key], values, marker="o", color=color(0))
    else:
        axes.bar(range(len(rows)), values, color=color(0), width=0.6)
        axes.set_xticks(range(len(rows)), [str(value) for value in rows[key]])
    axes.set_ylim(0, 1.08 * float(values.max()) or 1.0)
    grid(axes)


def _draw_heat(axes: "Axes", rows: "pd.DataFrame", keys: Sequence[str], name: str) -> None:
    across, along = keys[:2]
    factor, better = MEASURES[name][1:]
    wide = rows.pivot_table(name, along, across, "max" if better > 0 else "min", sort=True)
    if max(wide.shape) > MAX_CELLS:
        raise HeadwayError(f"{along} x {across}: {wide.shape[0]} x {wide.shape[1]} cells are many")
    if wide.size < 2:
        raise HeadwayError("a heat map of one cell says nothing")
    values = wide.to_numpy(float) * factor
    axes.imshow(values, cmap="viridis" if better > 0 else "viridis_r", aspect="auto")
    axes.set_xticks(range(len(wide.columns)), [short_value(value) for value in wide.columns])
    axes.set_yticks(range(len(wide.index)), [short_value(value) for value in wide.index])
    axes.set_ylabel(along)
    low, high = np.nanmin(values), np.nanmax(values)
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        share = (value - low) / ((high - low) or 1.0)
        bright = (share if better > 0 else 1 - share) > 0.6
        text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9}
        axes.text(column, row, short_value(value), color="black" if bright else "white", **text)
