"""Runs side by side: throughput, KV cache, latencies of policies, fairness."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.figures.data import BINS, Run, shown_until
from headway.figures.style import (
    GREY,
    PALE,
    bars_with_ratios,
    color,
    draw_bounds,
    draw_upright,
    grid,
    legend_below,
    log_scale,
    marker,
    rate,
    sheet,
    tell_apart,
)
from simulator.results.fairness import parts_of
from simulator.results.request_table import Floats
from simulator.results.token_times import lacks_gaps
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOBODY_COMPETES = """Nothing to draw: in no window do two
clients have requests waiting throughout,
so nobody is served in place of another.
A higher load makes them compete."""
LATENCIES = (("TTFT", "ttft", 1e-3, "s"), ("TPOT", "tpot", 1.0, "ms"), ("E2EL", "e2el", 1e-3, "s"))
"""Title, name in the summary, what its ms are multiplied by, and the unit then."""

ROW_OF_PARTS, MOST_PARTS = 0.45, 16  # inches of a client's row, and how many are drawn
LETTERS = 20  # of a client's name

Statistic = tuple[str, str, int]
"""Word in the summary, marker and its size."""


def draw_throughput(runs: Sequence[Run]) -> "Figure":
    """Draw output throughput of each run as a bar, and over time as a line."""
    with sheet(1, 2, 2.6 + 0.25 * len(runs), width_ratios=(1, 1.35)) as figure:
        bars, lines = figure.axes
        values = [float(run.summary["output_throughput"]) for run in runs]
        bars_with_ratios(bars, [run.label for run in runs], values)
        _draw_least(bars, runs)
        grid(bars, "x")
        edges, time = _edges(runs, BINS // 3)
        for number, run in enumerate(runs):
            tokens = run.steps.decode_tokens * run.steps.steps / run.steps.duration
            _draw_level(lines, run, tokens, edges, color(number))
        lines.set(title="Decoded tokens over time", xlabel=time, ylabel="tokens/s")
        lines.set_ylim(bottom=0)
        lines.set_xlim(0, edges[-1])
        grid(lines)
        tell_apart(lines)
    return figure


def _draw_least(axes: "Axes", runs: Sequence[Run]) -> None:
    """Draw what service levels ask of the output throughput as upright lines."""
    asked = [str(one["bound"]) for run in runs for one in run.summary["headway"].get("slo", ())]
    lead = "output_throughput>="
    bounds = [float(text.removeprefix(lead)) for text in asked if text.startswith(lead)]
    if bounds:
        axes.set_xlim(right=max(axes.get_xlim()[1], 1.1 * max(bounds)))
        draw_upright(axes, bounds)


def _edges(runs: Sequence[Run], bins: int) -> tuple[Floats, str]:
    """Cut the time that is shown into bins, and label it, with the runs of which it is not all."""
    until, cut = shown_until(runs)
    return np.linspace(0.0, until, bins + 1), f"time (s); {cut}" if cut else "time (s)"


def _draw_level(
    axes: "Axes",
    run: Run,
    levels: "pd.Series[float]",
    edges: Floats,
    hue: str,
    *,
    replicas: Floats | float = 1.0,
) -> None:
    """Draw as a line what the steps of a run hold, averaged over bins, of each of so many."""
    total, shown = run.over_time(levels, edges), edges[:-1] < run.end
    means = np.divide(total, replicas, out=np.zeros_like(total), where=np.asarray(replicas) > 0)
    axes.plot(edges[:-1][shown], means[shown], color=hue, label=run.label)


def draw_kv(runs: Sequence[Run]) -> "Figure":
    """Draw the share of KV blocks in use over time with preemptions marked, and what they hold."""
    with sheet(1, 2, 2.9 + 0.22 * len(runs), width_ratios=(1.3, 1)) as figure:
        usage, stored = figure.axes
        edges, time = _edges(runs, BINS)
        for number, run in enumerate(runs):
            steps = run.steps
            blocks = steps.kv_blocks_used + steps.kv_blocks_free
            share = 100.0 * steps.kv_blocks_used / blocks
            _draw_level(usage, run, share, edges, color(number), replicas=sum(run.serving(edges)))
            lost = steps.start[(steps.preempted > 0) & (steps.start < edges[-1])]
            usage.plot(lost, np.full(len(lost), 101.5), "x", color=color(number), markersize=4)
        preempted = any(run.steps.preempted.any() for run in runs)
        usage.set_title("KV cache in use (x: preemption)" if preempted else "KV cache")
        usage.set(xlabel=time, ylabel="% of KV blocks", ylim=(0, 104), xlim=(0, edges[-1]))
        grid(usage)
        tell_apart(usage)
        _draw_stored(stored, runs)
    return figure


def _draw_stored(axes: "Axes", runs: Sequence[Run]) -> None:
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
    axes.set(title="Mean use, fragmentation", xlabel="% of KV blocks (hatched: empty)")
    grid(axes, "x")


def draw_policies(runs: Sequence[Run]) -> "Figure":
    """Draw a row for each run: throughput, and mean, median and P99 of TTFT, TPOT and E2EL."""
    with sheet(1, 4, 1.7 + 0.3 * len(runs), sharey=True) as figure:
        draw_rows(
            figure,
            [run.label for run in runs],
            [run.summary for run in runs],
            {"mean": ("mean", "o", 6), "median": ("median", "|", 9), "P99": ("p99", "D", 6)},
            hues=[color(k) for k in range(len(runs))],
            height=0.6,
            text={"fontsize": 10},
            room=1.45,
        )
    return figure


def draw_rows(
    figure: "Figure",
    labels: Sequence[str],
    summaries: Sequence[Mapping[str, Any]],
    statistics: Mapping[str, Statistic],
    *,
    hues: Sequence[str],
    height: float,
    text: Mapping[str, Any],
    room: float,
) -> None:
    """Draw a row for each run, in its colour, over four panels: a bar, and latencies as points.

    Latencies that span more than a factor of ten stand on a logarithmic axis.
    """
    from matplotlib.lines import Line2D

    places = np.arange(len(labels))
    first, *others = figure.axes
    values = [float(summary["output_throughput"]) for summary in summaries]
    drawn = first.barh(places, values, color=hues, height=height)
    first.bar_label(drawn, [rate(value) for value in values], padding=3, **text)
    first.set_xlim(0, max([*values, 1e-9]) * room)
    first.set_yticks(places, labels)
    first.invert_yaxis()
    first.set(title="Output", xlabel="tokens/s")
    for axes, (title, key, scale, unit) in zip(others, LATENCIES, strict=True):
        points = []
        for word, shape, size in statistics.values():
            name = f"{word}_{key}_ms"
            known = [np.nan if lacks_gaps(s, name) else float(s[name]) for s in summaries]
            found = np.array(known) * scale
            for hue in dict.fromkeys(hues):
                own = np.array(hues) == hue
                look: dict[str, Any] = {"marker": shape, "markersize": size, "color": hue}
                look["mfc"] = "white" if shape == "o" else hue
                axes.plot(found[own], places[own], linestyle="none", **look)
            points.append(found[found > 0])
        shown = np.concatenate(points)
        if len(shown) and shown.max() > 10 * shown.min():
            log_scale(axes, "x")
        else:
            axes.set_xlim(0, max([*shown, 1e-9]) * 1.1)
        draw_bounds(axes, summaries, {key: "-"}, scale)
        axes.set(title=title, xlabel=unit)
        grid(axes)
    marks = [
        Line2D(
            [], [], marker=shape, ms=size, color=GREY, mfc="white" if shape == "o" else GREY, ls=""
        )
        for _, shape, size in statistics.values()
    ]
    below: Any = "outside lower center"
    figure.legend(marks, [*statistics], loc=below, ncols=len(marks), frameon=False)


def draw_fairness(runs: Sequence[Run]) -> "Figure":
    """Draw Jain's index and the service difference of clients that compete, window by window.

    Where nobody competes it says so. Raises HeadwayError where a run has one client only.
    """
    if alone := [run.label for run in runs if run.fairness is None]:
        raise HeadwayError(f"{', '.join(alone)}: has no fairness.csv: one client, or no tables")
    with sheet(1, 2, 3.6) as figure:
        jain, difference = figure.axes
        compete = False
        for number, run in enumerate(runs):
            assert run.fairness is not None
            rows = run.fairness.dropna()
            compete = compete or len(rows) > 0
            style: dict[str, Any] = {
                "color": color(number),
                "marker": marker(number),
                "label": run.label if len(rows) else f"{run.label} (nobody competes)",
            }
            jain.plot((rows.start + rows.end) / 2, rows.jain_index, **style)
            difference.plot(rows.end, rows.service_difference, **style)
        jain.set(title="Jain's index per window", ylabel="index (1: all alike)")
        jain.set_ylim(min(0.9, jain.dataLim.y0 - 0.02) if compete else 0.9, 1.01)
        difference.set(title="Service: most minus least", ylabel="service (tokens in + 2 x out)")
        difference.set_ylim(0, max(difference.dataLim.y1 * 1.08, 1.0) if compete else 1.0)
        for axes in (jain, difference):
            axes.set(xlabel="time (s)", xlim=(0, max(run.end for run in runs) or 1.0))
            axes.yaxis.set_major_formatter("{x:,g}")
            grid(axes)
            if not compete:
                place: dict[str, Any] = {"transform": axes.transAxes, "ha": "center"}
                axes.text(0.5, 0.5, NOBODY_COMPETES, va="center", color=GREY, **place)
        legend_below(figure, jain)
    return figure


def draw_clients(runs: Sequence[Run]) -> "Figure":
    """Draw mean and P99 of TTFT and E2EL of each client and priority, a row for each.

    Raises HeadwayError where a run has one client and one priority only.
    """
    summaries = [run.summary for run in runs]
    if alone := [run.label for run in runs if not part_names([run.summary])]:
        raise HeadwayError(f"{', '.join(alone)}: has one client and one priority, or no tables")
    with sheet(1, 2, 1.9 + ROW_OF_PARTS * len(part_names(summaries)), sharey=True) as figure:
        draw_parts(figure.axes, [run.label for run in runs], summaries)
        legend_below(figure, figure.axes[0])
    return figure


def shorten(name: str) -> str:
    """Cut a client's name off that would leave no room for the picture."""
    return name if len(name) <= LETTERS else name[: LETTERS - 1] + "…"


def part_names(summaries: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """List the clients, and priorities that are not these, of any run: its block, the name."""
    parts = (pair for summary in summaries for pair in parts_of(summary).items())
    names = dict.fromkeys((block, name) for block, found in parts for name in found)
    return sorted(names, key=lambda pair: pair[0])[:MOST_PARTS]


def draw_parts(
    panels: "Sequence[Axes]", labels: Sequence[str], summaries: Sequence[Mapping[str, Any]]
) -> None:
    """Draw into two panels what each client and priority felt: its mean a dot, P99 a diamond."""
    names = part_names(summaries)
    shift = 0.6 / len(summaries)  # between the runs in a row
    for axes, (title, key) in zip(panels, (("TTFT", "ttft"), ("E2EL", "e2el")), strict=True):
        known = []
        for number, (label, summary) in enumerate(zip(labels, summaries, strict=True)):
            places = np.arange(len(names)) + shift * (number - (len(summaries) - 1) / 2)
            parts = [summary["headway"].get(block, {}).get(name, {}) for block, name in names]
            means, tails = (
                np.array([part.get(f"{word}_{key}_ms") or np.nan for part in parts]) / 1000
                for word in ("mean", "p99")
            )
            look: dict[str, Any] = {"color": color(number), "linestyle": "none"}
            axes.hlines(places, means, tails, color=color(number), linewidth=1)
            axes.plot(means, places, marker="o", label=label, **look)
            axes.plot(tails, places, marker="D", markersize=5, **look)
            known += [means[means > 0], tails[tails > 0]]
        shown = np.concatenate(known)
        if len(shown) and shown.max() > 10 * shown.min():
            log_scale(axes, "x")
        words = {"per_client": "{}", "per_priority": "priority {}"}
        shown_names = [words[block].format(shorten(name)) for block, name in names]
        axes.set_yticks(range(len(names)), shown_names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set(title=f"{title} by client", xlabel="mean (dot) and P99 (diamond), s")
        grid(axes, "x")
