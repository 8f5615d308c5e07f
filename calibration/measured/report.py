"""What a validation against measured runs prints and writes."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from math import isfinite
from pathlib import Path

import numpy as np

from calibration.measured.client_offset import find_offset
from calibration.measured.compare import MetricComparison, Outcome
from calibration.plots import Pair, Series, plot_metrics, plot_run
from headway.planning.sensitivity import Sensitivity
from headway.report.text import load_line, moved_by, near_saturation, shares_line
from simulator.util.files import Writer, write_atomic, write_together

SUMMARY_METRICS = (
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
    "output_throughput",
)
GAUGES = {"running": "requests running", "kv_usage": "KV cache in use (%)"}
LABELS = {"request_throughput": "requests/s", "output_throughput": "output tok/s"}


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the text: every run, those that could not be predicted, and the summary."""
    lines = [line for outcome in outcomes for line in _run_lines(outcome)]
    if not any(outcome.sensitivity for outcome in outcomes):
        lines += ["", "Each prediction's 95 % interval, and its largest cause: --sensitivity"]
    return "\n".join([*lines, "", *_summary(outcomes), *_clients(outcomes)])


def _run_lines(outcome: Outcome) -> Iterator[str]:
    yield outcome.run.run_id
    if outcome.reason:
        yield f"  cannot be predicted: {outcome.reason}"
        return
    yield f"  profile {outcome.profile}; {outcome.engine}"
    for note in outcome.notes:
        yield f"  note: {note}"
    if outcome.impossible:
        yield f"  impossible, no part of the means: {outcome.impossible}"
    if outcome.load is not None:
        yield f"  {load_line(outcome.load)}"
    for one in outcome.sensitivity:
        if one.cliff:
            yield f"  on a cliff: a small error of the profile is a large one of this {one.metric}"
    ends = {one.metric: _interval(one) for one in outcome.sensitivity}
    head = "  95 % interval, its largest cause; % more if steps are 1 % longer" * bool(ends)
    yield f"  {'':<20}{'predicted':>12}{'measured':>12}{'error':>9}{head}"
    for row in outcome.rows:
        name, beside = _label(row.metric), ""
        if isfinite(row.error):
            beside = f"{row.measured:>12.2f}{row.error:>+9.1%}"
        told = f"  {name:<20}{row.predicted:>12.2f}{beside:<21}  {ends.get(row.metric, '')}"
        yield told.rstrip()


def _interval(one: Sensitivity) -> str:
    """Write an interval with its largest cause, and how far the metric moves with its steps."""
    told = "not known"
    if one.interval is not None:
        told = "{:.2f} to {:.2f}".format(*one.interval)
        told += f", {shares_line(dict([*one.shares.items()][:1]))}"
    moved = moved_by(one.elasticity, one.elasticity_95, resolved=one.resolved)
    return f"{told}; {moved}"


def outcome_line(outcome: Outcome) -> str:
    """Return a run in a line: the errors of its means, or why there are none."""
    name = outcome.run.run_id
    if outcome.reason:
        return f"{name}: cannot be predicted: {outcome.reason}"
    if outcome.impossible:
        return f"{name}: impossible: {outcome.impossible}"
    errors = {row.metric: row.error for row in outcome.rows if isfinite(row.error)}
    told = [
        f"{word.upper()} {errors[metric]:+.1%}"
        for word in ("ttft", "tpot", "e2el")
        if (metric := f"mean_{word}_ms") in errors
    ]
    return f"{name}: {', '.join(told) or 'nothing to compare with'}"


def _label(metric: str) -> str:
    if metric in LABELS:
        return LABELS[metric]
    parts = metric.removesuffix("_ms").split("_")
    unit = " (ms)" if metric.endswith("_ms") else " (%)" if "kv" in parts else ""
    return f"{' '.join(parts[1:])} {parts[0]}{unit}"


def _clients(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Say of each server what its clients add to TTFT, and what is left without it."""
    servers: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        run = outcome.run
        servers.setdefault((run.source, run.word("model"), run.word("gpu")), []).append(outcome)
    for (source, *server), members in servers.items():
        if (found := find_offset(members)) is None:
            continue
        left = ", ".join(
            f"{_label(metric)} {np.median(np.abs(errors)):.1%}"
            for metric, errors in found.errors.items()
        )
        yield (
            f"{source}, {' on '.join(server)}: clients add {found.value:+.1f} ms "
            f"(±{found.half_width:.1f}) to each TTFT, beyond what is assumed "
            f"(workload.frontend.latency). Median |e| with what the other runs say of it: {left}"
        )


def _summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the median and mean absolute error of each metric, by source and tier.

    Runs near saturation, where errors are multiplied, are counted apart.
    """
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        near = "near saturation" if near_saturation(outcome.load) else ""
        key = (outcome.run.source, outcome.run.word("tier"), near)
        groups.setdefault(key, []).append(outcome)
    held = "  in 95 % intervals, half their width" * any(one.sensitivity for one in outcomes)
    head = f"{'runs':>5}{'median |error|':>16}{'mean |error|':>14}{held}"
    yield f"{'source, tier':<44}{'metric':<18}{head}"
    for names, members in groups.items():
        title = ", ".join(filter(None, names))
        for metric in SUMMARY_METRICS:
            found = [
                (row, one.interval(metric))
                for one in members
                if not one.impossible
                for row in one.rows
                if row.metric == metric and isfinite(row.error)
            ]
            if found:
                errors = [abs(row.error) for row, _ in found]
                shown = f"{np.median(errors):>12.1%}{np.mean(errors):>10.1%}{_held(found)}"
                yield f"{title:<44.43}{_label(metric):<18}{len(errors):>5}{shown}"
                title = ""
        if wrong := sum(bool(one.impossible) for one in members):
            yield f"{title:<44.43}{'impossible':<18}{wrong:>5}"
            title = ""
        if lost := sum(bool(one.reason) for one in members):
            yield f"{title:<44.43}{'not predicted':<18}{lost:>5}"


def _held(found: Sequence[tuple[MetricComparison, tuple[float, float] | None]]) -> str:
    """Say how many measurements lie in their interval, and half its width; "": none has one."""
    known = [(row.measured, *ends) for row, ends in found if ends is not None]
    if not known:
        return ""
    within = sum(low <= measured <= high for measured, low, high in known)
    width = np.median([(high - low) / 2 / measured for measured, low, high in known])
    return f"     {within} of {len(known)}, ±{width:.0%} (median)"


def write_json(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write `[{run_id, metric, predicted, measured, error}]`, with sensitivity `interval_95` and
    `shares` of it, too; a run without prediction has its
    reason in place of metrics, one that cannot be says why as `impossible`."""
    text = json.dumps([*json_rows(outcomes)], indent=1, allow_nan=False)
    write_atomic(path, text.encode() + b"\n")


def json_rows(outcomes: Sequence[Outcome]) -> Iterator[dict[str, object]]:
    """Yield what `write_json` writes."""
    for outcome in outcomes:
        name = {"run_id": outcome.run.run_id}
        if outcome.reason:
            nothing = dict.fromkeys(("metric", "predicted", "measured", "error"))
            yield {**name, **nothing, "reason": outcome.reason}
        known = {one.metric: one for one in outcome.sensitivity}
        for row in outcome.rows:
            found = name | asdict(row) | {"error": row.error}
            found |= {key: None for key in ("measured", "error") if not isfinite(found[key])}
            if (one := known.get(row.metric)) and one.interval is not None:
                found |= {"interval_95": [*one.interval], "shares": dict(one.shares)}
            yield found | ({"impossible": outcome.impossible} if outcome.impossible else {})


def write_plots(folder: Path, outcomes: Sequence[Outcome]) -> list[Path]:
    """Draw the distributions of each run that has requests, and all errors in one picture."""
    writers: dict[str, Writer] = {}
    for outcome in outcomes:
        name = outcome.run.run_id
        if outcome.samples:
            draw = partial(plot_run, name, outcome.samples, _gauges(outcome))
            writers[f"{name.replace('/', '_')}.png"] = draw
    means = {name: _means(outcomes, f"mean_{name}_ms") for name in ("ttft", "tpot", "e2el")}
    return write_together(folder, {**writers, "errors.png": partial(plot_metrics, means)})


def _gauges(outcome: Outcome) -> dict[str, Series]:
    """Return the gauges that are drawn, by the labels of their axes."""
    if outcome.gauges is None:
        return {}
    predicted, measured = outcome.gauges
    return {
        label: ((predicted.time, predicted.columns[name]), (measured.time, measured.columns[name]))
        for name, label in GAUGES.items()
        if name in measured.columns
    }


def _means(outcomes: Sequence[Outcome], metric: str) -> dict[str, Pair]:
    """Return a metric of all runs, predicted and measured, by source."""
    found: dict[str, list[tuple[float, float]]] = {}
    for outcome in outcomes:
        pairs = found.setdefault(outcome.run.source, [])
        pairs += [
            (row.predicted, row.measured)
            for row in outcome.rows
            if row.metric == metric and row.measured > 0 and not outcome.impossible
        ]
    arrays = {source: np.array(pairs).reshape(-1, 2).T for source, pairs in found.items()}
    return {source: (predicted, measured) for source, (predicted, measured) in arrays.items()}
