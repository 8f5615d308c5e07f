"""A sweep or plan over its keys: a curve over one, a heat map over two."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.figures.style import color, draw_levels, grid, sheet
from simulator.figures.tables import bounds_of, short_key, short_value, varied_keys
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
MAX_BARS = 12
MAX_CELLS = 24  # a side of a heat map whose numbers can be read


def draw_grid(rows: "pd.DataFrame") -> "Figure":
    """Draw the first two of MEASURES that are there over the keys that were varied.

    The cost only beside a capacity: there bounds are just kept, and attainment tells nothing. Over
    one key it is a curve, over more a heat map of the first two: of several points in a cell the
    best, by its own measure. Raises HeadwayError where no key or no measure varies.
    """
    keys = varied_keys(rows, "")
    there = [name for name in MEASURES if name in rows and rows[name].nunique() > 1]
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


def draw_costs(rows: "pd.DataFrame") -> "Figure":
    """Draw what the candidates of a plan that hold cost, the cheapest above, and their headroom.

    At each bar stands what breaks next. Raises HeadwayError where there are no two costs.
    """
    held = rows[rows["holds"].astype(str) == "True"]
    cost = "dollars_per_hour" if held["dollars_per_hour"].notna().all() else "gpus"
    held = held.sort_values(cost, kind="stable").head(MAX_BARS)[::-1]
    if held[cost].nunique() < 2:
        raise HeadwayError("the candidates cost the same")
    panels = [(cost, {"dollars_per_hour": "$/h", "gpus": "GPUs"}[cost], 1.0)]
    if "headroom" in held and held["headroom"].nunique() > 1:
        panels.append(("headroom", "headroom, %", 100.0))
    keys = [key for key in held if "." in key and held[key].nunique(dropna=False) > 1]
    names = [_named(row[keys]) for _, row in held.iterrows()]
    if "capacity" not in held and held["at"].max() > 1:
        names = [f"{at:g} x {name}" for at, name in zip(held["at"], names, strict=True)]
    with sheet(1, len(panels), 1.6 + 0.3 * len(held)) as figure:
        for axes, (column, label, factor) in zip(figure.axes, panels, strict=True):
            bars = axes.barh(range(len(held)), factor * held[column], color=color(0), height=0.6)
            first = axes is figure.axes[0]
            axes.set_yticks(range(len(held)), names if first else [])
            axes.set_xlabel(label)
            if first:
                told = ["" if isinstance(why, float) else f"{why}" for why in held["reason"]]
                axes.bar_label(bars, told, padding=3, fontsize=8)
                axes.set_xlim(right=1.6 * float(held[column].max()))
                axes.set_title("What it costs, and what breaks next")
            grid(axes, "x")
    return figure


SHORT = {"tensor_parallel_size": "TP", "max_num_batched_tokens": "tokens", "max_num_seqs": "seats"}


def _short(key: str) -> str:
    return SHORT.get(short_key(key), short_key(key))


def _named(keys: "pd.Series[Any]") -> str:
    """Name a candidate by its values: numbers with their keys."""
    return ", ".join(
        str(value) if isinstance(value, str) else f"{_short(str(key))} {short_value(value)}"
        for key, value in keys.dropna().items()
        if key != "gpu.count"
    )


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
