"""Several runs' summaries as text, side by side."""

from collections.abc import Iterator, Sequence
from typing import Any

from simulator.views.report import Metric, Summary, metric_rows, metric_value

RATIO = 10  # width of a ratio and its mark
RUNS_PER_BLOCK = 3  # runs that a block of a comparison shows beside the first: 120 columns
MANY_RUNS = 9  # runs from which a comparison has a row for each, with the metrics that matter most

COLUMNS = (
    Metric("output_throughput", "output/tok per s", 1),
    Metric("request_goodput", "goodput/req per s", 1),
    Metric("mean_ttft_ms", "TTFT/mean, s", -1, 0.001),
    Metric("p99_ttft_ms", "TTFT/P99, s", -1, 0.001),
    Metric("mean_tpot_ms", "TPOT/mean, ms", -1),
    Metric("p99_itl_ms", "ITL/P99, ms", -1),
    Metric("mean_e2el_ms", "E2EL/mean, s", -1, 0.001),
    Metric("p99_e2el_ms", "E2EL/P99, s", -1, 0.001),
    Metric("mean_running", "batch/mean", 0),
    Metric("kv_cache_usage_mean", "KV used/%", 0, 100.0),
    Metric("preemptions", "pre-/empted", -1),
    Metric("jain_index", "Jain's/index", 1),
    Metric("dollars_per_million_output_tokens", "$ per/M tokens", -1),
)
"""What many runs are compared by: their labels fill two lines of a head."""


def compare_table(labels: Sequence[str], summaries: Sequence[Summary]) -> str:
    """Put runs side by side, each value with its ratio to the first run's.

    `+` marks a value that is better than the first run's, `-` one that is worse, `.` what a run
    does not have; a metric that none of them has is left out. Several blocks of runs come with the
    first in each; of MANY_RUNS runs or more each is one row.
    """
    if len(labels) >= MANY_RUNS:
        return _row_per_run(labels, summaries)
    metrics = metric_rows(summaries, _value)
    blocks = []
    for at in range(1, max(len(labels), 2), RUNS_PER_BLOCK):
        shown = [0, *range(at, min(at + RUNS_PER_BLOCK, len(labels)))]
        rows = [("", *(labels[run] for run in shown))]
        rows += [(metric.label, *_cells(metric, values, shown)) for metric, values in metrics]
        blocks.append(align(rows))
    if len(labels) > 1:
        blocks.append(f"Ratios are to {labels[0]}; + better, - worse.")
    return "\n\n".join(blocks)


def _row_per_run(labels: Sequence[str], summaries: Sequence[Summary]) -> str:
    """Give a row for each run; `*` marks the best of a column, `.` what a run does not have."""
    columns = [("", "", *labels)]
    for column in COLUMNS:
        values = [_value(s, column.key) for s in summaries]
        known = [value for value in values if value is not None]
        if not any(known) or (column.better == 0 and len(set(known)) < 2):
            continue
        best = max(known, key=lambda value: value * column.better) if column.better else None
        cells = [
            "." if value is None else _short(value * column.scale) + " *"[value == best]
            for value in values
        ]
        columns.append((*(word + " " for word in column.label.rsplit("/", 1)), *cells))
    text = align([*zip(*columns, strict=True)], heads=2)
    return f"{text}\n\n* best of its column. All metrics of all runs are in comparison.csv."


def _short(value: float) -> str:
    """Write a number with about three digits that tell."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 1 else f"{value:.4g}"


def _cells(metric: Metric, values: Sequence[float | None], shown: Sequence[int]) -> Iterator[str]:
    """Yield the first run's value, then those of others with their ratios."""
    first = values[0]
    for run in shown:
        value = values[run]
        scaled = None if value is None else value * metric.scale
        text = "." if scaled is None else f"{scaled:.2f}" if type(scaled) is float else str(scaled)
        ratio = " " * RATIO
        if value is not None and first is not None:
            ratio = _ratio(value, first, metric.better)
        yield f"{text}  {ratio}" if run else text


def align(rows: Sequence[Sequence[str]], heads: int = 1) -> str:
    """Put cells under each other, a line below the first row, or as many as there are heads."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    lines.insert(heads, "-" * (sum(widths) + 2 * len(widths) - 2))
    return "\n".join(lines)


def _value(summary: Summary, key: str) -> Any:
    """Give a run's value of a metric; None where it has none.

    Who has completed nobody has no latencies, though vLLM's summary calls them 0.
    """
    return None if key.endswith("_ms") and not summary["completed"] else metric_value(summary, key)


def _ratio(value: float, first: float, better: int) -> str:
    """Give the ratio and its mark, always of the same width."""
    sign = better * ((value > first) - (value < first))
    mark = {1: "+", 0: " ", -1: "-"}[sign]
    text = ""
    if first or value == first:
        ratio = value / first if first else 1.0
        digits = ".2g" if ratio < 0.1 else ".2f" if ratio < 100 else ".0f"
        text = f"{ratio:{digits}}x"
    return f"{text:>{RATIO - 2}} {mark}"
