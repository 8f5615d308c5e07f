"""What a validation against measured runs prints and writes."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import BinaryIO

import numpy as np

from calibration.measured.predict import Compared, Outcome
from simulator.files import write_atomic, write_together
from simulator.plots import COLORS

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
    from matplotlib.figure import Figure

    gauges = outcome.gauges
    shown = [] if gauges is None else [n for n in gauges[1].columns if n != "waiting"]
    figure = Figure(figsize=(4.2 * (3 + len(shown)), 4), dpi=100, layout="constrained")
    axes = figure.subplots(1, 3 + len(shown))
    for ax, (name, (predicted, measured)) in zip(axes, outcome.samples.items(), strict=False):
        for values, label, color in (
            (measured, "measured", "black"),
            (predicted, "predicted", COLORS[0]),
        ):
            ax.plot(np.sort(values), np.linspace(0, 100, len(values)), color=color, label=label)
        if len(measured) and measured.min() > 0:
            ax.set_xscale("log")
            _plain_ticks(ax.xaxis)
        ax.set_xlabel(f"{name.upper()} (ms)")
    axes[0].set_ylabel("requests (%)")
    axes[0].legend()
    for ax, name in zip(axes[3:], shown, strict=True):
        assert gauges is not None
        for one, label, color in zip(
            gauges[::-1], ("measured", "predicted"), ("black", COLORS[0]), strict=True
        ):
            ax.step(one.time, one.columns[name], where="post", color=color, label=label, lw=0.8)
        ax.set_xlabel("time (s)")
        ax.set_ylabel("KV cache in use (%)" if name == "kv_usage" else "requests running")
    figure.suptitle(outcome.run.run_id, fontsize=10)
    figure.savefig(file, format="png")


def _plot_errors(outcomes: Sequence[Outcome], file: BinaryIO) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), dpi=100, layout="constrained")
    sources = list(dict.fromkeys(outcome.run.source for outcome in outcomes))
    axes = figure.subplots(1, 3)
    for ax, metric in zip(axes, ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"), strict=True):
        points = 0
        for k, source in enumerate(sources):
            rows = [
                row
                for one in outcomes
                if one.run.source == source
                for row in one.rows
                if row.metric == metric and row.measured > 0
            ]
            points += len(rows)
            _scatter(ax, rows, source, COLORS[k % len(COLORS)])
        if points:
            ax.set_xscale("log")
            ax.set_yscale("log")
            low, high = ax.get_xlim()
            ax.plot([low, high], [low, high], color="black", lw=1)
            _plain_ticks(ax.xaxis)
            _plain_ticks(ax.yaxis)
        ax.set_xlabel(f"measured {_label(metric)}")
        ax.set_ylabel("predicted")
    axes[1].legend(fontsize=7)
    figure.savefig(file, format="png")


def _plain_ticks(axis) -> None:  # type: ignore[no-untyped-def]
    """Write 20 and 5,000 on a log axis, as many as there is room for."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    wide = high / low
    subs = (1.0,) if wide > 100 else (1.0, 2.0, 5.0) if wide > 5 else (1.0, 1.5, 2.0, 3.0, 4.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _scatter(ax, rows: Sequence[Compared], source: str, color: str) -> None:  # type: ignore[no-untyped-def]
    measured = [row.measured for row in rows]
    ax.plot(measured, [row.predicted for row in rows], "o", ms=3, color=color, label=source)
