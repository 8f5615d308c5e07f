"""What a validation against measured runs prints and writes."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from calibration.measured.predict import Compared, Outcome
from simulator.figures.style import (
    COLORS,
    color,
    encode,
    grid,
    legend_below,
    log_scale,
    marker,
    sheet,
)
from simulator.util.files import write_atomic, write_together

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUMMARIZED = (
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
    "output_throughput",
)
WORDS = {"request_throughput": "requests/s", "output_throughput": "output tok/s"}


def report(outcomes: Sequence[Outcome]) -> str:
    """Give the text: every run, those that could not be predicted, and the summary."""
    lines = [line for outcome in outcomes for line in _run_lines(outcome)]
    return "\n".join([*lines, "", *_summary(outcomes)])


def _run_lines(outcome: Outcome) -> Iterator[str]:
    run = outcome.run
    yield f"{run.run_id}"
    if outcome.reason:
        yield f"  cannot be predicted: {outcome.reason}"
        return
    yield f"  profile {outcome.profile}; {outcome.engine}"
    for note in outcome.notes:
        yield f"  note: {note}"
    yield f"  {'':<20}{'predicted':>12}{'measured':>12}{'error':>9}"
    for row in outcome.rows:
        name = _label(row.metric)
        beside = f"{row.measured:>12.2f}{row.error:>+9.1%}" if isfinite(row.error) else ""
        yield f"  {name:<20}{row.predicted:>12.2f}{beside}"


def _label(metric: str) -> str:
    if metric in WORDS:
        return WORDS[metric]
    parts = metric.removesuffix("_ms").split("_")
    unit = " (ms)" if metric.endswith("_ms") else " (%)" if "kv" in parts else ""
    return f"{' '.join(parts[1:])} {parts[0]}{unit}"


def _summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Give the median and mean absolute error of each metric, by source and tier."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.run.source, outcome.run.word("tier")), []).append(outcome)
    yield f"{'source, tier':<44}{'metric':<18}{'runs':>5}{'median |e|':>12}{'mean |e|':>10}"
    for (source, tier), members in groups.items():
        title = ", ".join(filter(None, (source, tier)))
        for metric in SUMMARIZED:
            errors = [
                abs(row.error)
                for one in members
                for row in one.rows
                if row.metric == metric and isfinite(row.error)
            ]
            if errors:
                yield (
                    f"{title:<44.43}{_label(metric):<18}{len(errors):>5}"
                    f"{np.median(errors):>12.1%}{np.mean(errors):>10.1%}"
                )
                title = ""
        if lost := sum(bool(one.reason) for one in members):
            yield f"{title:<44.43}{'not predicted':<18}{lost:>5}"


def write_json(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write `[{run_id, metric, predicted, measured, error}]`; a run without prediction has its
    reason in place of metrics."""
    rows = [row for outcome in outcomes for row in _json_rows(outcome)]
    text = json.dumps(rows, indent=1, allow_nan=False)
    write_atomic(path, lambda file: file.write(text.encode() + b"\n"))


def _json_rows(outcome: Outcome) -> Iterator[dict[str, object]]:
    name = outcome.run.run_id
    if outcome.reason:
        yield {
            "run_id": name,
            "metric": None,
            "predicted": None,
            "measured": None,
            "error": None,
            "reason": outcome.reason,
        }
    for row in outcome.rows:
        yield {
            "run_id": name,
            "metric": row.metric,
            "predicted": row.predicted,
            "measured": row.measured if isfinite(row.measured) else None,
            "error": row.error if isfinite(row.error) else None,
        }


def write_plots(folder: Path, outcomes: Sequence[Outcome]) -> list[Path]:
    """Draw the distributions of each run that has requests, and all errors in one picture."""
    writers = {
        f"{outcome.run.run_id.replace('/', '_')}.png": partial(_plot_run, outcome)
        for outcome in outcomes
        if outcome.samples
    }
    return write_together(folder, {**writers, "errors.png": partial(_plot_errors, outcomes)})


def _plot_run(outcome: Outcome, file: BinaryIO) -> None:
    gauges = outcome.gauges
    shown = [] if gauges is None else [n for n in gauges[1].columns if n != "waiting"]
    panels = 3 + len(shown)
    with sheet(1, panels, 3.6, width=3.2 * panels) as figure:
        axes = figure.axes
        for ax, (name, (predicted, measured)) in zip(axes, outcome.samples.items(), strict=False):
            for values, label, color in (
                (measured, "measured", "black"),
                (predicted, "predicted", COLORS[0]),
            ):
                ax.plot(np.sort(values), np.linspace(0, 100, len(values)), color=color, label=label)
            if len(measured) and measured.min() > 0:
                log_scale(ax, "x")
            ax.set_xlabel(f"{name.upper()} (ms)")
        axes[0].set_ylabel("requests (%)")
        for ax, name in zip(axes[3:], shown, strict=True):
            assert gauges is not None
            for one, label, color in zip(
                gauges[::-1], ("measured", "predicted"), ("black", COLORS[0]), strict=True
            ):
                ax.step(one.time, one.columns[name], where="post", color=color, label=label, lw=0.8)
            ax.set_xlabel("time (s)")
            ax.set_ylabel("KV cache in use (%)" if name == "kv_usage" else "requests running")
        for ax in axes:
            grid(ax)
        legend_below(figure, axes[0])
        figure.suptitle(outcome.run.run_id, fontsize=11)
    encode(figure, file)


def _plot_errors(outcomes: Sequence[Outcome], file: BinaryIO) -> None:
    sources = list(dict.fromkeys(outcome.run.source for outcome in outcomes))
    with sheet(1, 3, 3.8) as figure:
        for ax, name in zip(figure.axes, ("ttft", "tpot", "e2el"), strict=True):
            points = 0
            for k, source in enumerate(sources):
                rows = [
                    row
                    for one in outcomes
                    if one.run.source == source
                    for row in one.rows
                    if row.metric == f"mean_{name}_ms" and row.measured > 0
                ]
                points += len(rows)
                _scatter(ax, rows, source, k)
            if points:
                log_scale(ax, "x")
                log_scale(ax, "y")
                low, high = ax.get_xlim()
                ax.plot([low, high], [low, high], color="black", lw=1)
            ax.set_title(f"mean {name.upper()}")
            ax.set_xlabel("measured (ms)")
            grid(ax)
        figure.axes[0].set_ylabel("predicted (ms)")
        legend_below(figure, figure.axes[0])
    encode(figure, file)


def _scatter(ax: "Axes", rows: Sequence[Compared], source: str, number: int) -> None:
    measured = [row.measured for row in rows]
    predicted = [row.predicted for row in rows]
    look: dict[str, Any] = {"color": color(number), "marker": marker(number), "markersize": 4}
    ax.plot(measured, predicted, linestyle="none", label=source, **look)
