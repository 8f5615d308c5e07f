"""The numbers behind the report's charts: over time in bins, as distributions, seat by seat."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.figures.data import Run, shown_until
from headway.figures.fleet import (
    MOST_LINES,
    STATES,
    band,
    fleet_edges,
    fleet_levels,
    has_fleet,
    has_imbalance,
    replica_states,
)
from headway.figures.occupancy import lowest_slots, seats_by_phase
from headway.runs.read_parts import LONGEST
from simulator.results.request_table import Floats
from simulator.results.time_series import mean_in_bins

MAX_POINTS = 16_000  # of each chart over time, all runs together: bounds the file
MAX_BINS = 4_000  # of one run at most
QUANTILES = 500  # points of a distribution
MAX_BARS = 2_500  # requests in the picture of the seats, of each run
ROUNDING = 5e-9  # s, that sums of a table's times, each to a nanosecond, may be wrong
INITIAL_BARS = 400  # of these in view at first

FLEET_BINS = 200  # of a fleet's charts
DENSITY_BINS = 800  # of the picture of the seats, where they are many
MANY_SEATS = 100  # above which rows are too thin to be told apart: then they are counted

Numbers = list[float | None]


def charts(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what the charts draw, as JSON can hold it; times in seconds, latencies in ms."""
    whole = max(run.end for run in runs) or 1.0
    edges = np.linspace(0.0, whole, min(MAX_BINS, MAX_POINTS // len(runs)) + 1)
    begin, end = _window(runs, MAX_BARS)
    until, cut = shown_until(runs)
    seated = [seats(run, begin, end) for run in runs]
    return {
        "labels": [run.label for run in runs],
        "time": _short((edges[1:] + edges[:-1]) / 2, 6),
        "overtime": [over_time(run, edges) for run in runs],
        "bounds": [_bounds(run) for run in runs],
        "fleets": [_fleet(run, runs, f"--run-{k}") for k, run in enumerate(runs)],
        "latency": {name: distributions(runs, name) for name in ("ttft", "tpot", "e2el")},
        "until": until,
        "cut": cut,
        "density": _density(runs, seated, whole),
        "seats": seated,
        "window": [begin, end],
        "first": _window(runs, INITIAL_BARS),
    }


def _bounds(run: Run) -> dict[str, float]:
    """Return the bounds that service levels put on each request (ms) and on output tokens/s."""
    own = run.summary["headway"]
    found = {name: own.get(f"slo_{name}_ms") for name in ("ttft", "tpot", "e2el")}
    for one in own.get("slo") or ():
        name, _, bound = str(one.get("bound")).partition(">=")
        if name == "output_throughput":
            found["tokens"] = bound
    return {name: float(value) for name, value in found.items() if value is not None}


def _density(
    runs: Sequence[Run], seated: Sequence[dict[str, list[Any]]], whole: float
) -> dict[str, Any] | None:
    """Count the seats of each run by phase over time, if they are too many for a row each."""
    few = max(max(found["seat"], default=0) for found in seated) < MANY_SEATS
    if few and all(run.each == 1 for run in runs):
        return None
    edges = np.linspace(0.0, whole, DENSITY_BINS + 1)
    counts = [seats_by_phase(run, edges) for run in runs]
    return {
        "time": _short((edges[1:] + edges[:-1]) / 2, 6),
        "seats": max(float(np.sum([*found.values()], axis=0).max()) for found in counts),
        "runs": [{name: _short(values) for name, values in found.items()} for found in counts],
    }


def _fleet(run: Run, runs: Sequence[Run], hue: str) -> dict[str, Any] | None:
    """Return a cluster's charts over time, each as lines of name, colour and numbers; else None."""
    if not has_fleet(run):
        return None
    edges = fleet_edges(runs, FLEET_BINS)
    levels, states = fleet_levels(run, edges), replica_states(run, edges)
    top_first = [state for state in reversed(states) if states[state].any()]
    load = [("offered", "--faint", levels.sent), ("served", hue, levels.ended)]
    if np.nansum(levels.given_up):
        load.append(("given up", "--bad", levels.given_up))
    found = {
        "replicas": [(STATES[state], f"--{state}", states[state]) for state in top_first],
        "load": load,
        "queue": _each(levels.queue, hue),
        "kv": _each(levels.kv, hue),
    }
    if has_imbalance(run):
        found["imbalance"] = [("most / mean", hue, levels.imbalance)]
    return {
        "time": _short((edges[1:] + edges[:-1]) / 2, 6),
        "scalings": levels.scalings,
        "outages": levels.outages,
        "charts": {
            key: [[name, hue, _short(values)] for name, hue, values in lines]
            for key, lines in found.items()
        },
    }


def _each(levels: Floats, hue: str) -> list[tuple[str, str, Floats]]:
    """Return a line for each replica, or of many the most, the median and the least."""
    if len(levels) <= MOST_LINES:
        return [(f"replica {k}", f"--run-{k}", level) for k, level in enumerate(levels)]
    low, median, high = band(levels)
    return [("most", "", high), ("median", hue, median), ("least", "", low)]


def _short(values: Floats, digits: int = 4) -> Numbers:
    """Round to so many digits, since a chart shows no more; NaN becomes null."""
    texts = np.char.mod(f"%.{digits}g", values).tolist()
    return [None if text == "nan" else _number(text) for text in texts]


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def over_time(run: Run, edges: Floats) -> dict[str, Numbers]:
    """Average over each bin what a run's engine did; None: nothing decoded there."""
    size = len(edges) - 1
    running, waiting, used, tokens, seats, preempted = (np.zeros(size) for _ in range(6))
    longest, blocks = np.full(size, np.nan), dict[int, float]()
    for number, steps, queue in run.queues():
        starts, time = steps["start"].to_numpy(float), steps["duration"].to_numpy(float)
        ends, count = starts + time, steps["steps"].to_numpy(float)
        decodes = steps["decode_tokens"].to_numpy(float)
        running += mean_in_bins(starts, ends, steps["running"].to_numpy(), edges)
        waiting += run.queue_depth(number, (starts, steps["waiting"].to_numpy()), queue, edges)
        used += mean_in_bins(starts, ends, run.blocks_used(steps), edges)
        blocks[number] = float((steps["kv_blocks_used"] + steps["kv_blocks_free"]).max())
        rate = np.divide(decodes * count, time, out=np.zeros(len(time)), where=time > 0)
        tokens += mean_in_bins(starts, ends, rate, edges)
        seats += mean_in_bins(starts, ends, decodes, edges)
        at = np.clip(np.searchsorted(edges, starts, "right") - 1, 0, size - 1)
        each = steps[LONGEST].to_numpy() if LONGEST in steps else time / count
        np.fmax.at(longest, at[decodes > 0], each[decodes > 0])
        preempted += np.bincount(at, steps["preempted"], size)
    itl = np.divide(seats, tokens, out=np.full(size, np.nan), where=tokens > 0)
    first = (run.sent + run.requests["ttft"]).dropna().to_numpy(float)
    tokens += run.each * np.histogram(first, edges)[0] / np.diff(edges)
    place = np.clip(np.searchsorted(edges, run.sent, "right") - 1, 0, size - 1)
    slowest = np.full(size, np.nan)
    np.fmax.at(slowest, place, run.requests["ttft"].to_numpy(float))
    known = sum(blocks.values()) / max(len(blocks), 1)  # of a replica that made no step
    there = [blocks.get(k, known) * share for k, share in enumerate(run.serving(edges))]
    room = np.maximum(sum(there), 1.0)
    return {
        "running": _short(running),
        "waiting": _short(waiting),
        "kv": _short(100 * used / room),
        "tokens": _short(tokens),
        "itl": _short(1e3 * itl),
        "ttft": _short(1e3 * slowest),
        "longest": _short(1e3 * np.fmax(longest, itl)),
        "preempted": _short(np.where(preempted > 0, preempted, np.nan)),
    }


def distributions(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """Return the percentage of each run's requests up to each of some ms, evenly on a log scale."""
    known = [1e3 * run.requests[name].dropna().to_numpy(float) for run in runs]
    every = np.concatenate(known)
    if not len(every):
        return {"ms": [], "percent": [[] for _ in runs]}
    low, high = max(float(every.min()), 1e-3), max(float(every.max()), 2e-3)
    grid = np.geomspace(low * 0.98, high * 1.02, QUANTILES)
    grid = np.unique(np.array(_short(grid, 5), float))
    shares = [np.searchsorted(np.sort(v), grid, "right") / max(len(v), 1) for v in known]
    return {"ms": _short(grid, 5), "percent": [_short(100 * share, 5) for share in shares]}


def _window(runs: Sequence[Run], most: int) -> tuple[float, float]:
    """Choose a time in the middle in which each run has about `most` requests, or all of it."""
    begin, end = 0.0, max(run.end for run in runs) or 1.0
    middle = min(run.end for run in runs) / 2
    for run in runs:
        if run.count > most:
            half = run.end * most / run.count / 2
            begin, end = max(begin, middle - half), min(end, middle + half)
    return begin, end


def seats(run: Run, begin: float, end: float) -> dict[str, list[Any]]:
    """Assign each request a seat from its admission to its end; those between two times as columns.

    A request takes the free seat of its replica with the lowest number. One that is preempted
    keeps its seat here: the tables do not say when it was out.
    """
    times = {"start": run.admitted, "first": run.sent + run.requests["ttft"]}
    frame = run.requests.assign(**times, end=run.sent + run.requests["e2el"])
    frame = frame[frame["e2el"].notna()].sort_values(["replica", "start"], kind="stable")
    slots: list[int] = []
    for _, part in frame.groupby("replica"):
        below = max(slots, default=-1) + 1
        free = lowest_slots(part["start"].tolist(), part["end"].tolist(), ROUNDING)
        slots += [below + k for k in free]
    frame = frame.assign(seat=slots)
    frame = frame[(frame["end"] >= begin) & (frame["start"] <= end)]
    start = frame["start"].to_numpy(float)
    return {
        "start": _short(start, 7),
        "prefill": _short(frame["first"].to_numpy(float) - start),
        "length": _short(frame["end"].to_numpy(float) - start, 6),
    } | {
        name: frame[name].astype(int).tolist()
        for name in ("id", "seat", "prompt_tokens", "output_tokens", "preemptions")
    }
