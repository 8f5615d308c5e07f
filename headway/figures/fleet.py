"""A fleet over time: its replicas, the load on them, and how evenly it falls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.figures.data import SERVING, Run, share_of_bins
from headway.figures.style import (
    BAD,
    FAINT,
    GREY,
    STATE_COLORS,
    color,
    grid,
    sheet,
    whole_ticks,
)
from simulator.results.request_table import Floats
from simulator.results.time_series import mean_in_bins
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FINE = 10  # times as many bins for the states of replicas, which change at once
BINS = 150  # of each chart: wide enough for rates of requests
MOST_CELLS = 6_000_000  # bins x replicas
NOTHING = 1e-6  # requests, replicas: less is rounding
MOST_RUNS = 3  # side by side
MOST_LINES = 5  # replicas with a line each; of more, a band
MOST_SHADED = 30  # outages that are shaded; more are marked alone
STATES = {"up": "serving", "draining": "draining", "starting": "starting", "down": "failed"}
"""The states in which a replica is shown, in words."""
GIVEN_UP = ("shed", "timeout")


@dataclass(slots=True)
class FleetLevels:
    """What a fleet is in each bin of time, a replica being one engine core.

    `queue` (requests), `kv` (% of a replica's blocks) and `present` (requests, waiting or running)
    have a row for each replica that ever serves, and NaN where it does not. So what is said of a
    bin is said of those that serve then.
    """

    sent: Floats  # requests/s
    ended: Floats  # requests/s, completed
    given_up: Floats  # requests/s, refused or timed out for good, at the time they were sent
    queue: Floats
    kv: Floats
    present: Floats
    imbalance: Floats  # of `present`: the most of a replica over its group's mean; NaN: none
    scalings: list[tuple[float, int]]  # s, and replicas that were ordered (< 0: taken away)
    outages: list[tuple[float, float]]  # s, of replicas, from failure to repair


def fleet_levels(run: Run, edges: Floats) -> FleetLevels:
    """Average what a cluster's tables say over bins of time, whose `edges` are in s."""
    cores, periods = run.cores, run.state_periods()
    serving = np.array(run.serving(edges))
    queue, kv, running = (np.zeros_like(serving) for _ in range(3))
    for number, steps, joined in run.queues():
        start, time = (steps[name].to_numpy(float) for name in ("start", "duration"))
        decided, waiting = start, steps["waiting"].to_numpy(float)
        served = [period for state in SERVING for period in periods[number].get(state, ())]
        # with its queue, if it fails
        gone = np.sort([end for _, end in served if end < edges[-1]])
        at = np.searchsorted(decided, gone)
        decided, waiting = np.insert(decided, at, gone), np.insert(waiting, at, 0.0)
        came = _while_served(joined, served)
        queue[number] = run.queue_depth(number, (decided, waiting), came, edges)
        blocks = (steps["kv_blocks_used"] + steps["kv_blocks_free"]).to_numpy(float)
        for levels, values in (
            (kv, 100.0 * run.blocks_used(steps) / np.maximum(blocks, 1.0)),
            (running, steps["running"].to_numpy(float)),
        ):
            levels[number] = mean_in_bins(start, start + time, values, edges)
    ever = serving.any(axis=1)
    serving = np.where(serving > 0, serving, np.nan)[ever]
    queue, kv, running = (np.maximum(one[ever], 0.0) / serving for one in (queue, kv, running))
    names = np.array([name for name, _ in cores])[ever]
    return FleetLevels(
        *_rates(run, edges),
        queue=queue,
        kv=kv,
        present=queue + running,
        imbalance=_imbalance(queue + running, serving, names),
        scalings=_scalings(run, [weight for _, weight in cores]),
        outages=sorted({period for known in periods for period in known.get("down", ())}),
    )


def _while_served(joined: Floats, served: Sequence[tuple[float, float]]) -> Floats:
    """Get when requests joined a replica's queue, ascending: what came while none served did then.

    The gateway keeps such requests until a replica serves; `served` are the periods of this one.
    """
    begins, ends = np.array(sorted(served), float).reshape(-1, 2).T
    if not len(begins):
        return joined
    period = np.searchsorted(ends, joined, side="left")  # that they join, or the last
    return np.sort(np.maximum(joined, begins[np.minimum(period, len(begins) - 1)]))


def replica_states(run: Run, edges: Floats) -> dict[str, Floats]:
    """Return the mean number of replicas in each of STATES over bins of time; edges in s."""
    found = {state: np.zeros(len(edges) - 1) for state in STATES}
    for (_, weight), known in zip(run.cores, run.state_periods(), strict=True):
        for state in STATES:
            found[state] += weight * share_of_bins(known.get(state, ()), edges)
    return found


def _rates(run: Run, edges: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the requests/s that were sent, completed, and given up."""
    gone = run.requests["finish_reason"].astype(object).isin(GIVEN_UP)
    times = (run.sent, run.sent + run.requests["e2el"], run.sent[gone])
    sent, ended, given_up = (
        run.each * np.histogram(one.dropna().to_numpy(float), edges)[0] / np.diff(edges)
        for one in times
    )
    for rates in (sent, ended, given_up):
        rates[edges[:-1] >= run.end] = np.nan  # beside another that lasts longer
    return sent, ended, given_up


def _imbalance(present: Floats, serving: Floats, names: Any) -> Floats:
    """Divide the most that a replica has by the mean of those of its group that serve.

    Of several groups the least even one counts; one of which one replica serves at a time does not.
    """
    found = np.full(present.shape[1], np.nan)
    for name in dict.fromkeys(names.tolist()):
        level, share = present[names == name], serving[names == name]
        there = np.nansum(share, axis=0)
        mean = np.nansum(level * share, axis=0) / np.where(there > 0, there, np.nan)
        several = (there > 1.0 + NOTHING) & (mean > NOTHING)
        most = np.nanmax(np.where(np.isnan(level), -inf, level), axis=0)
        found = np.fmax(found, np.where(several, most / np.where(several, mean, 1.0), np.nan))
    return found


def _scalings(run: Run, weights: Sequence[float]) -> list[tuple[float, int]]:
    """Return the times (s) at which an autoscaler decided, and how many replicas more it wanted."""
    found: dict[float, float] = {}
    if run.changes is not None and run.summary["headway"]["cluster"].get("scalings"):
        for number, rows in run.changes.groupby("replica"):
            before = "off"
            for time, state in zip(rows["time"], rows["state"], strict=True):
                change = SCALED.get((before, state), 0) if time > 0 else 0
                found[time] = found.get(time, 0.0) + change * weights[int(number)]
                before = state
    return [(time, round(change)) for time, change in sorted(found.items()) if round(change)]


SCALED: Mapping[tuple[str, str], int] = {
    ("off", "starting"): 1,
    ("off", "up"): 1,
    ("draining", "up"): 1,
    ("up", "draining"): -1,
    ("starting", "off"): -1,
}
"""Changes of state that an autoscaler orders, and how many replicas each adds."""


def band(levels: Floats) -> Floats:
    """Return three rows: the least, the median and the most of the replicas in each bin.

    They are NaN where there is no replica.
    """
    there = np.isfinite(levels).any(axis=0)
    found = np.full((3, levels.shape[1]), np.nan)
    found[:, there] = np.nanpercentile(levels[:, there], [0, 50, 100], axis=0)
    return found


def fleet_edges(runs: Sequence[Run], bins: int = BINS) -> Floats:
    """Get the edges (s) of bins that all runs share; fewer where there are very many replicas."""
    most = max(len(run.cores) for run in runs)
    end = max(run.end for run in runs) or 1.0
    return np.linspace(0.0, end, max(min(bins, MOST_CELLS // most), 10) + 1)


def has_fleet(run: Run) -> bool:
    """Say whether a run has several replicas, or one that comes and goes."""
    return bool(run.groups) and (run.changes is not None or len(run.cores) > 1)


def has_imbalance(run: Run) -> bool:
    """Say whether several replicas of a group may serve, so that one may have more than others."""
    names = [name for name, _ in run.cores]
    return len({*names}) < len(names)


def draw_fleet(runs: Sequence[Run]) -> "Figure":
    """Draw a column for each of up to three clusters: replicas, load, queues, KV, imbalance.

    Where no group ever has two replicas that serve, there is no imbalance and no panel for it.
    Raises HeadwayError for more runs, or one without a cluster.
    """
    if alone := [run.label for run in runs if not run.groups]:
        raise HeadwayError(f"{', '.join(alone)}: has no cluster: give runs of several replicas")
    if len(runs) > MOST_RUNS:
        raise HeadwayError(f"{len(runs)} runs are too many: up to {MOST_RUNS} are drawn")
    edges = fleet_edges(runs)
    options: dict[str, Any] = {"sharex": True, "sharey": "row", "squeeze": False}
    found = [fleet_levels(run, edges) for run in runs]
    titles, units = [*TITLES], [*UNITS]
    if not any(np.isfinite(levels.imbalance).any() for levels in found):
        titles, units = titles[:-1], units[:-1]
    with sheet(len(titles), len(runs), 1.9 * len(titles), **options) as figure:
        columns = len(runs)
        for k, (run, levels) in enumerate(zip(runs, found, strict=True)):
            panels = figure.axes[k::columns]
            fine = np.linspace(0.0, edges[-1], FINE * (len(edges) - 1) + 1)
            _draw_replicas(panels[0], levels, replica_states(run, fine), fine)
            _draw_load(panels[1], levels, edges, color(k))
            _draw_each(panels[2], levels.queue, edges, color(k))
            _draw_each(panels[3], levels.kv, edges, color(k))
            if len(panels) == len(TITLES):
                middle = (edges[1:] + edges[:-1]) / 2
                panels[-1].plot(middle, levels.imbalance, color=color(k))
            panels[-1].set(xlim=(0, edges[-1]), xlabel="time (s)")
            for axes in panels:
                grid(axes)
            for axes in panels[1:]:
                for begin, end in levels.outages[:MOST_SHADED]:
                    axes.axvspan(begin, end, color=BAD, alpha=0.12, linewidth=0)
            heads = titles if columns == 1 else (run.label, *([""] * len(titles[1:])))
            for axes, title in zip(panels, heads, strict=True):
                axes.set_title(title, loc="left")
        first = figure.axes[::columns]
        for axes, unit in zip(first, units, strict=True):
            axes.set_ylim(bottom=1 if unit == UNITS[-1] else 0)
            axes.set_ylabel(unit)
        whole_ticks(first[0])
        _name_all(figure, columns)
    return figure


def _name_all(figure: "Figure", columns: int) -> None:
    """Name lines and areas beside the titles of one run, below the picture of several."""
    named: dict[str, Any] = {}
    for axes in figure.axes[: 4 * columns]:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
        if columns == 1 and handles and axes is not figure.axes[3]:
            place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 0.98)}
            space: dict[str, Any] = {"borderpad": 0, "columnspacing": 1.0, "handlelength": 1.2}
            axes.legend(handles, labels, **place, **space, ncols=6, frameon=False, fontsize=9)
    if columns > 1:
        below: dict[str, Any] = {"loc": "outside lower center", "ncols": 5, "frameon": False}
        figure.legend(named.values(), named.keys(), **below)


TITLES = (
    "Replicas",
    "Load",
    "Waiting at each replica",
    "KV cache of each replica",
    "Requests at the fullest replica over the mean of its group",
)
UNITS = ("replicas", "requests/s", "requests waiting", "% of KV blocks", "imbalance")


def _draw_replicas(
    axes: "Axes", levels: FleetLevels, states: Mapping[str, Floats], edges: Floats
) -> None:
    """Draw how many replicas are in each state, and what was decided and what broke when."""
    there = {state: number for state, number in states.items() if number.any() or state == "up"}
    axes.stackplot(
        edges[:-1],
        [*there.values()],
        colors=[STATE_COLORS[state] for state in there],
        labels=[STATES[state] for state in there],
        alpha=0.75,
        linewidth=0,
        step="post",
    )
    top = 1.04 * max(float(np.sum([*states.values()], axis=0).max()), 1.0)
    style: dict[str, Any] = {"color": GREY, "linestyle": "none", "clip_on": False, "markersize": 5}
    for mark, sign, label in (("^", 1, "scaled up"), ("v", -1, "scaled down")):
        times = [time for time, change in levels.scalings if change * sign > 0]
        if times:
            axes.plot(times, [top] * len(times), mark, label=label, **style)
    if levels.outages:
        times = [begin for begin, _ in levels.outages]
        style |= {"color": BAD, "label": "outage"}
        axes.plot(times, [top] * len(times), "x", **style)


def _draw_load(axes: "Axes", levels: FleetLevels, edges: Floats, hue: str) -> None:
    """Draw what was sent, what was served, and what was given up."""
    middle = (edges[1:] + edges[:-1]) / 2
    axes.plot(middle, levels.sent, color=FAINT, linewidth=1.4, label="offered")
    axes.plot(middle, levels.ended, color=hue, linewidth=1.4, label="served")
    if np.nansum(levels.given_up):
        axes.plot(middle, levels.given_up, color=BAD, linewidth=1.4, label="given up")


def _draw_each(axes: "Axes", levels: Floats, edges: Floats, hue: str) -> None:
    """Draw a line for each replica, of many a band from the least to the most and the median."""
    middle = (edges[1:] + edges[:-1]) / 2
    style: dict[str, Any]
    if len(levels) <= MOST_LINES:
        for number, level in enumerate(levels):
            style = {"color": color(number), "linewidth": 1.2, "label": f"replica {number}"}
            axes.plot(middle, level, clip_on=False, zorder=3, **style)  # at 0 it is on the axis
        return
    low, median, high = band(levels)
    style = {"color": hue, "alpha": 0.25, "linewidth": 0}
    axes.fill_between(middle, low, high, label="least to most", **style)
    axes.plot(middle, median, color=hue, label="median")
