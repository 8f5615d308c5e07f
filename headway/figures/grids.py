"""A sweep or plan over its keys: a curve over one, a heat map over two."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.figures.style import color, draw_levels, grid, sheet
from headway.figures.tables import bounds_of, point_label, short_value, varied_keys
from headway.runs.read import check_columns
from simulator.results.service_levels import parse_slo
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COST = "dollars_per_million_output_tokens"
MEASURES = {
    "capacity": ("Capacity: largest load within the bounds", 1.0, 1),
    COST: ("$ per M output tokens", 1.0, -1),
    "slo_attainment": ("SLO attainment, %", 100.0, 1),
    "attainment": ("SLO attainment, %", 100.0, 1),
    "p99_ttft_ms": ("P99 TTFT, ms", 1.0, -1),
    "output_throughput": ("output tokens/s", 1.0, 1),
}
"""Column: label, factor, and whether more of it is better (1) or less (-1)."""
PANELS = 2
MAX_BARS = 12
LETTERS = 30  # below a heat map, written side by side
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
                draw_levels(axes, bounds_of(known, name, "the table"))
    return figure


def draw_costs(rows: "pd.DataFrame") -> "Figure":
    """Draw what the candidates of a plan cost, the cheapest above, those that do not hold in grey.

    At each bar stands what breaks next. Raises HeadwayError where there are no two costs.
    """
    held, cost = _by_cost(rows, all_known=True)
    if held[cost].nunique() < 2:
        raise HeadwayError("the candidates cost the same")
    panels = {cost: ({"dollars_per_hour": "$/h", "gpus": "GPUs"}[cost], 1.0)}
    figure = _draw_bars(held, panels)
    (axes,) = figure.axes
    told = ["" if isinstance(why, float) else f"{why}" for why in held["reason"]]
    axes.bar_label(axes.containers[0], told, padding=3, fontsize=8)  # type: ignore[arg-type]
    axes.set_xlim(right=1.6 * float(held[cost].max()))
    for bar, holds in zip(axes.containers[0], held["holds"].astype(str), strict=True):
        bar.set_color(color(0) if holds == "True" else "0.6")
    axes.set_title(
        "What it costs, and what breaks next" + _of(rows, held), loc="right", fontweight="bold"
    )
    return figure


def draw_room(rows: "pd.DataFrame") -> "Figure":
    """Draw the headroom of the candidates of a plan that hold, and latencies beside their bounds.

    `rows.attrs["slo"]` are the service levels. Raises HeadwayError where all bars are equal.
    """
    held, _ = _by_cost(rows, all_known=False)
    panels = {"headroom": ("headroom, %", 100.0)}
    bounds = {slo.metric: slo.bound for slo in map(parse_slo, rows.attrs["slo"])}
    panels |= {key: (key, 1.0) for key in bounds if key.endswith("_ms")}
    panels = {key: what for key, what in panels.items() if key in held and held[key].nunique() > 1}
    if not panels:
        raise HeadwayError("the candidates have the same room")
    figure = _draw_bars(held, panels)
    for axes, key in zip(figure.axes, panels, strict=True):
        if key in bounds:
            axes.axvline(bounds[key], color="0.3", linestyle="--", linewidth=1)
    title = "How much room is left" + (" (dashed: the bound)" if bounds else "") + _of(rows, held)
    figure.axes[-1].set_title(title, loc="right", fontweight="bold")
    return figure


def _of(rows: "pd.DataFrame", held: "pd.DataFrame") -> str:
    """Say that these are the cheapest, where there are more."""
    more = int((rows["holds"].astype(str) == "True").sum()) > len(held)
    return f", the {len(held)} cheapest" if more else ""


def _by_cost(rows: "pd.DataFrame", *, all_known: bool) -> tuple["pd.DataFrame", str]:
    """Return the candidates that hold, the cheapest last, and the column of what they cost.

    `all_known`: those that do not hold, too, if it is known what they cost.
    """
    held = rows[(rows["holds"].astype(str) == "True") | (all_known & rows["gpus"].notna())]
    cost = "dollars_per_hour" if held["dollars_per_hour"].notna().all() else "gpus"
    return held.sort_values(cost, kind="stable").head(MAX_BARS)[::-1], cost


def _draw_bars(held: "pd.DataFrame", panels: Mapping[str, tuple[str, float]]) -> "Figure":
    """Draw columns, each by its label and factor, as bars; a row for each candidate."""
    keys = [key for key in held if "." in key and held[key].nunique(dropna=False) > 1]
    keys = [key for key in keys if not key.endswith(".dollars_per_hour")]
    names = [point_label(row, keys) for _, row in held.iterrows()]
    with sheet(1, len(panels), 1.6 + 0.3 * len(held)) as figure:
        for axes, (column, (label, factor)) in zip(figure.axes, panels.items(), strict=True):
            axes.barh(range(len(held)), factor * held[column], color=color(0), height=0.6)
            axes.set_yticks(range(len(held)), names if axes is figure.axes[0] else [])
            axes.set_xlabel(label)
            grid(axes, "x")
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
    names = [short_value(value) for value in wide.columns]
    crowded = sum(map(len, names)) > LETTERS
    axes.set_xticks(range(len(names)), names, rotation=30 if crowded else 0)
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
