"""Tables that commands wrote: of a sweep or plan, latency over load with its knee, the Pareto
front, the size of chunks; of a live run, steps as predicted beside what they took."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.common.pareto import pareto_front
from headway.figures.style import (
    COLORS,
    FAINT,
    GREY,
    color,
    draw_levels,
    from_zero,
    grid,
    label_ends,
    legend_below,
    log_scale,
    marker,
    sheet,
)
from headway.runs.read import check_columns, need_columns
from simulator.results.request_table import Floats
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RATES = ("workload.request_rate", "workload.max_concurrency", "workload.trace.rate_scale")
CHUNK = "engine.max_num_batched_tokens"
MAX_LABELS = 40  # points that are named, each beside itself; of more those on the front
MAX_KEYS = 8  # keys that a message lists
METRICS = (
    "output_throughput",
    "request_throughput",
    "mean_tpot_ms",
    "mean_e2el_ms",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_itl_ms",
    "p99_itl_ms",
)


def draw_latency(rows: "pd.DataFrame") -> "Figure":
    """Draw TTFT (P99) and TPOT (mean; P99 if bounded) over requests/s, with the knee marked.

    The requests/s are those served: beyond saturation they grow no more, and the curve stands up.

    `rows` is the table of a sweep that varies the load. Other varied keys make one curve each.
    """
    rows = completed_points(rows)
    rate = next((key for key in RATES if key in rows), None)
    if rate is None:
        raise HeadwayError(f"the sweep varies none of {', '.join(RATES)}")
    need_columns(rows, ["request_throughput"], "the sweep's table")
    with sheet(1, 2, 3.9) as figure:
        usual = ("p99_ttft_ms", "mean_tpot_ms")
        panels = [own if (own := bounded_metric(rows, one)) in rows else one for one in usual]
        for axes, metric in zip(figure.axes, panels, strict=True):
            word, latency, _ = metric.split("_")
            word = word if word == "mean" else word.upper()
            name = f"{word} {latency.upper()} (ms)"
            for number, (label, curve) in enumerate(curves(rows, rate)):
                _draw_curve(axes, curve.sort_values(rate), metric, number, label)
            axes.set_title(f"{name.split(' (', maxsplit=1)[0]} as the load grows")
            axes.set(xlabel="requests/s served", ylabel=name)
            axes.set_xlim(left=0)
            grid(axes)
        log_scale(figure.axes[0], "y")
        figure.axes[1].set_ylim(bottom=0)
        for axes, metric in zip(figure.axes, panels, strict=True):
            draw_levels(axes, bounds_of(rows, metric))
        figure.axes[0].plot([], [], "o", mfc="none", mec=GREY, ms=12, label="knee")
        legend_below(figure, figure.axes[0], legend_title(rows, rate))
    return figure


def _draw_curve(axes: "Axes", curve: "pd.DataFrame", metric: str, number: int, label: str) -> None:
    speed, latency = (curve[key].to_numpy(float) for key in ("request_throughput", metric))
    axes.plot(speed, latency, color=color(number), marker=marker(number), label=label)
    place = knee(speed, curve["mean_e2el_ms"].to_numpy(float))
    if place is not None:
        axes.plot(
            speed[place], latency[place], "o", mfc="none", mec=GREY, ms=12, mew=1.5, label="_knee"
        )


def knee(load: Floats, latency: Floats) -> int | None:
    """Get the point after which latency rises faster than load: the one farthest below the chord.

    Both axes are scaled to 0..1 first, and the chord joins the first and the last point (Satopaa
    et al., *Finding a "Kneedle" in a Haystack*, 2011). None with fewer than three points, or where
    no point is below it.
    """
    if len(load) < 3 or np.ptp(load) == 0 or np.ptp(latency) == 0:
        return None
    x, y = ((values - values.min()) / np.ptp(values) for values in (load, latency))
    chord = y[0] + (y[-1] - y[0]) * (x - x[0]) / ((x[-1] - x[0]) or 1.0)
    below: Floats = chord - y
    place = int(np.argmax(below))
    return place if below[place] > 1e-9 else None


def draw_pareto(rows: "pd.DataFrame") -> "Figure":
    """Draw what a user gets against what the hardware gives, and the front that nothing beats.

    `rows` is the table of a sweep, or of a plan. A plan whose prices are known counts per dollar.
    What knows its GPUs counts per GPU: other plans, and a sweep of clusters by the hours paid for.
    """
    unit = "output tokens/s per GPU"
    if "tokens_per_s_per_gpu" in rows:
        check_columns(rows, ["tokens_per_s_per_gpu", "tokens_per_s_per_user"], "the plan's table")
        rows = rows[rows.tokens_per_s_per_gpu.notna()]
        if "holds" in rows:
            rows = rows[rows["holds"].astype(str) == "True"]
        user, speed = rows.tokens_per_s_per_user, rows.tokens_per_s_per_gpu
        price = "dollars_per_million_output_tokens"
        if price in rows and (rows[price] > 0).all():
            unit, speed = "million output tokens per $", 1.0 / rows[price]
    else:
        rows = completed_points(rows)
        user, speed = 1e3 / rows.mean_tpot_ms, rows.output_throughput
        if "gpu_hours" in rows and bool((rows.gpu_hours > 0).all()):
            speed = rows.total_output_tokens / (3600.0 * rows.gpu_hours)
        else:
            unit = "output tokens/s of the server"
    if not len(rows):
        raise HeadwayError("the table has no point to draw")
    with sheet(1, 1, 4.4) as figure:
        axes = figure.axes[0]
        key = next((k for k in (*RATES, "at") if k in rows), "")
        points = list(zip(user, speed, strict=True))
        best = pareto_front(points)
        # A plan's points are named by what one pays for.
        for label, part, style in _marks(rows, key, [*rows.index[best]]):
            alone = "gpus" in rows and len(part) == 1 and label.strip("_") not in ("", "others")
            name = point_label(part.iloc[0], varied_keys(rows, key)) if alone else label
            axes.plot(user[part.index], speed[part.index], label=name, **style)
        if "holds" in rows:  # of a plan, whose best comes first
            axes.plot(user.iloc[:1], speed.iloc[:1], "ko", ms=13, mfc="none", label="the best")
        # Colours that tell all parts of the points apart spare the labels of their keys.
        told = bool(key) and len(list(split_by_keys(rows, key))) <= len(COLORS)
        keys = [k for k in varied_keys(rows, "") if not told or k == key]
        named = range(len(points)) if len(points) <= MAX_LABELS else best
        names = [point_label(rows.iloc[k], keys) for k in named]
        title = f"Speed for a user against {'cost' if '$' in unit else 'throughput'}"
        if keys == [key] and "gpus" not in rows:
            names = [short_value(rows[key].iloc[k]) for k in named]
            title += f" (numbers: {short_key(key)})"
        if len(best) > 1:
            ends = zip(*(points[k] for k in best), strict=True)
            axes.step(*ends, where="pre", color=GREY, linewidth=1.2, zorder=1, label="front")
        axes.set_title(title)
        axes.set_xlabel("tokens/s per user (1 / mean TPOT)")
        axes.set_ylabel(unit)
        from_zero(axes)
        grid(axes)
        legend_below(figure, axes, "" if "gpus" in rows else legend_title(rows, key))
        _name_points(figure, [points[k] for k in named], names)
    return figure


def _name_points(
    figure: "Figure", points: Sequence[tuple[float, float]], labels: Sequence[str]
) -> None:
    """Write each point's label beside it, where it covers neither points nor other labels.

    A thin line leads to a label that had to go further; one for which there is no room is left
    out. Points that fall together share a label of several lines. All else must be drawn before.
    """
    from matplotlib.transforms import Bbox

    wide, high = (max(values) or 1.0 for values in zip(*points, strict=True))
    clusters: list[tuple[float, float, list[str]]] = []
    for k in sorted(range(len(points)), key=lambda k: points[k]):
        x, y = points[k]
        for left, low, names in clusters:
            if abs(x - left) < 0.01 * wide and abs(y - low) < 0.01 * high:
                names.append(labels[k])
                break
        else:
            clusters.append((x, y, [labels[k]]))
    figure.draw_without_rendering()  # so everything has its place
    axes, pixel = figure.axes[0], 72.0 / figure.dpi  # in points
    room = axes.get_window_extent()
    places = axes.transData.transform(points)
    taken = [Bbox.from_bounds(x - GAP / 2, y - GAP / 2, GAP, GAP) for x, y in places]
    for x, y, names in clusters:
        size = LETTER * max(map(len, names)), LINE * len(names)
        at = axes.transData.transform((x, y))
        found = next(
            (
                box
                for left, low in _beside(at[0], at[1], *size, last=x > 0.6 * wide)
                if room.containsx(left) and room.containsx(left + size[0])
                if room.containsy(low) and room.containsy(low + size[1])
                if not (box := Bbox.from_bounds(left, low, *size)).count_overlaps(taken)
            ),
            None,
        )
        if found is None:
            continue
        taken.append(found)
        right = found.x1 < at[0]
        shift = found.y0 + size[1] / 2 - at[1]
        line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3}
        line["relpos"] = (1.0 if right else 0.0, 0.5)
        axes.annotate(
            "\n".join(names),
            (x, y),
            xytext=(((found.x1 if right else found.x0) - at[0]) * pixel, shift * pixel),
            textcoords="offset points",
            ha="right" if right else "left",
            va="center",
            fontsize=8,
            color=GREY,
            arrowprops=line if abs(shift) > LINE else None,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        ).set_in_layout(False)


GAP, LINE, LETTER = 8.0, 13.5, 6.6  # pixels: beside a point; of a line and letter of its label


def _beside(
    x: float, y: float, wide: float, high: float, *, last: bool
) -> Iterator[tuple[float, float]]:
    """Yield lower left corners of a label's places, the nearest first; `last`: left ones first."""
    sides = [x + GAP, x - GAP - wide]
    for step in range(40):
        for shift in {step * LINE / 2, -step * LINE / 2}:
            for left in reversed(sides) if last else sides:
                yield left, y - high / 2 + shift


def _marks(
    rows: "pd.DataFrame", key: str, best: Sequence[Any]
) -> "Iterator[tuple[str, pd.DataFrame, dict[str, Any]]]":
    """Split the points by what was varied; give label and look of each part.

    `best` are the rows on the front. Parts without a colour come first, below the others.
    """
    parts = list(split_by_keys(rows, key))
    named = _colored_parts([part for _, part in parts], best)
    faint = {"linestyle": "none", "marker": "o", "markersize": 5, "color": FAINT}
    for number, place in enumerate(sorted({*range(len(parts))} - {*named})):
        yield "_" if number else "others", parts[place][1], faint
    for number, place in enumerate(named):
        look = {"linestyle": "none", "marker": marker(number), "markersize": 7}
        yield *parts[place], look | {"color": color(number)}


def _colored_parts(parts: "Sequence[pd.DataFrame]", best: Sequence[Any]) -> Sequence[int]:
    """Number the parts that get a colour: all; of more than there are, those on the front.

    Of these, if they are too many, some from one end to the other.
    """
    if len(parts) <= len(COLORS):
        return range(len(parts))
    owner = {row: number for number, part in enumerate(parts) for row in part.index}
    found = list(dict.fromkeys(owner[row] for row in best))
    if len(found) <= len(COLORS):
        return found
    return [
        found[place] for place in np.linspace(0, len(found) - 1, len(COLORS)).round().astype(int)
    ]


def draw_chunk(rows: "pd.DataFrame") -> "Figure":
    """Draw TTFT and ITL over the size of a chunk (`max_num_batched_tokens`)."""
    rows = completed_points(rows)
    if CHUNK not in rows:
        raise HeadwayError(f"the sweep does not vary {CHUNK}")
    with sheet(1, 2, 3.9) as figure:
        for axes, name in zip(figure.axes, ("ttft", "itl"), strict=True):
            ends: list[tuple[float, float, str, str]] = []
            for number, (label, curve) in enumerate(curves(rows, CHUNK)):
                line = curve.sort_values(CHUNK)
                style: dict[str, Any] = {"color": color(number), "marker": marker(number)}
                for word, dashes in (("p99", "-"), ("mean", "--")):
                    values = line[f"{word}_{name}_ms"].to_numpy(float)
                    axes.plot(line[CHUNK], values, dashes, **style)
                    text = f"{word.upper() if word == 'p99' else word} {label}".strip()
                    ends.append((line[CHUNK].iloc[-1], values[-1], text, color(number)))
            axes.set_xscale("log", base=2)
            sizes = sorted(set(rows[CHUNK]))
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
            axes.set_title(f"{name.upper()} over chunk size")
            axes.set_xlabel("max_num_batched_tokens (tokens per step)")
            axes.set_ylabel(f"{name.upper()} (ms)")
            log_scale(axes, "y")
            for word in ("p99", "mean"):
                metric = f"{word}_{'tpot' if name == 'itl' else name}_ms"
                draw_levels(axes, bounds_of(rows, metric))
            label_ends(axes, ends)
            grid(axes)
        if title := legend_title(rows, CHUNK):
            figure.suptitle(f"Labels: {title}", fontsize=10, color=GREY)
    return figure


def bounded_metric(rows: "pd.DataFrame", usual: str) -> str:
    """Return the metric of a latency that service levels bound, be it in the table or not.

    A bound on each request (`goodput`) is one on the P99, and none on the mean.
    """
    latency = usual.split("_")[1]
    columns = (f"slo_{latency}_percentile", f"slo_{latency}_ms", f"slo_{latency}_mean_ms")
    asked, each, mean = (rows[key].dropna().tolist() if key in rows else [] for key in columns)
    if each:
        return f"p{[*asked, 99][0]:g}_{latency}_ms"
    return f"mean_{latency}_ms" if mean else usual


def bounds_of(rows: "pd.DataFrame", metric: str, where: str = "the sweep's table") -> list[float]:
    """Return what service levels allow a metric of a latency, in ms; of few points several.

    A bound on another percentile of it says nothing of the metric.
    """
    word, latency, _ = metric.split("_")
    column = f"slo_{latency}_{'mean_' if word == 'mean' else ''}ms"
    if column not in rows or metric != bounded_metric(rows, metric):
        return []
    check_columns(rows, [column], where)
    return [float(bound) for bound in rows[column].dropna().unique()]


def completed_points(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Leave out the points that failed; HeadwayError where none is left, or no sweep's table."""
    need_columns(rows, ["error", "output_throughput", "mean_tpot_ms"], "the sweep's table")
    rows = rows[rows.error.isna()]
    if not len(rows):
        raise HeadwayError("every point of the sweep failed")
    there = [name for name in (*METRICS, *RATES, CHUNK) if name in rows]
    check_columns(rows, there, "the sweep's table")
    return rows


def curves(rows: "pd.DataFrame", along: str) -> "Iterator[tuple[str, pd.DataFrame]]":
    """Split the points by the varied keys other than `along`; label them by what differs."""
    parts = list(split_by_keys(rows, along))
    if len(parts) > 12:
        keys = varied_keys(rows, along)
        more = f" and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
        text = f"{len(parts)} curves are too many to tell apart: {', '.join(keys[:MAX_KEYS])}{more}"
        raise HeadwayError(text)
    yield from parts


def split_by_keys(rows: "pd.DataFrame", along: str) -> "Iterator[tuple[str, pd.DataFrame]]":
    """Split the points likewise, however many parts there are."""
    keys = varied_keys(rows, along)
    if not keys:
        yield "", rows
        return
    for values, part in rows.groupby(keys, sort=False, dropna=False):
        yield ", ".join(str(value) for value in values if value == value), part  # noqa: PLR0124


def legend_title(rows: "pd.DataFrame", along: str) -> str:
    """Return the legend's title: the keys that tell the curves apart."""
    return ", ".join(map(short_key, varied_keys(rows, along)))


def short_key(key: str) -> str:
    """Return the last word of a dotted key; all of it where the word alone says little."""
    last = key.rpartition(".")[2]
    return key if last in ("name", "count", "kind") else last


def varied_keys(rows: "pd.DataFrame", along: str) -> Sequence[str]:
    """Return the keys, dotted, that were varied beside `along`."""
    dotted = [key for key in rows.columns if "." in key and key.split(".")[0].isalpha()]
    return [key for key in dotted if key != along and rows[key].nunique() > 1]


def point_label(row: "pd.Series[Any]", keys: Sequence[str]) -> str:
    """Name a point by its GPUs, `2 x H100-80GB`, and its other varied keys; `keys` in its order."""
    known = row.dropna()
    parts = []
    if "gpus" in known:
        count = f"{known['gpus']:.3g}"
        alone = f"{count} GPU" if count == "1" else f"{count} GPUs"
        parts.append(f"{count} x {known['gpu.name']}" if "gpu.name" in known else alone)
    told = ("gpu.name", "gpu.count", "cluster.replicas") if parts else ()
    others = [key for key in keys if key not in told and str(row[key]) not in DEFAULTS]
    parts += [
        f"{SHORT.get(short_key(key), short_key(key))} {short_value(row[key])}" for key in others
    ]
    return ", ".join(parts)


SHORT = {
    "tensor_parallel_size": "TP",
    "max_num_batched_tokens": "tokens",
    "max_num_seqs": "seats",
    "quantization": "weights",
    "kv_cache_dtype": "KV cache",
}
DEFAULTS = ("null", "auto", "nan", "None")
"""Values that leave a thing as it is."""


def short_value(value: object) -> str:
    """Write a value with four digits, or all before the point."""
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def draw_steps(steps: "pd.DataFrame") -> "Figure":
    """Draw predicted over measured seconds of each step, and how the error is distributed.

    `steps` has the columns of a live run's steps_measured.csv: `seconds`, `predicted_s`, `chunks`.
    """
    need_columns(steps, ["chunks"], "steps_measured.csv")
    check_columns(steps, ["seconds", "predicted_s"], "steps_measured.csv")
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
            measured, predicted = 1e3 * steps.seconds[part], 1e3 * steps.predicted_s[part]
            times.plot(measured, predicted, ".", color=color(number), ms=3, alpha=0.4, label=label)
            spread.hist(error[part], bins, color=color(number), alpha=0.6)
        low, high = 1e3 * steps.seconds.min(), 1e3 * steps.seconds.max()
        for factor in (0.9, 1.0, 1.1):
            ends = [low * factor, high * factor]
            times.plot([low, high], ends, "-" if factor == 1 else ":", color=GREY, linewidth=1)
        log_scale(times, "x")
        log_scale(times, "y")
        times.set_title("Time of a step (dotted: 10 % off)")
        times.set(xlabel="measured (ms)", ylabel="predicted (ms)")
        times.legend(loc="upper left", markerscale=4, frameon=False)
        spread.set_title(f"Error of a step: median {np.median(abs(error)):.1f} %")
        spread.axvline(0, color=GREY, linewidth=1)
        spread.set(xlabel="predicted / measured - 1 (%)", ylabel="steps")
        for axes in figure.axes:
            grid(axes)
    return figure
