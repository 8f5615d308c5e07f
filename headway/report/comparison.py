"""Several runs side by side, as text."""

from collections.abc import Sequence
from textwrap import wrap

from headway.report.metric_rows import COLUMNS, Metric, Summary, metric_rows, metric_value
from headway.report.text import TEXT_WIDTH, align, amount, cost_gauges, cost_lines, three_digits
from simulator.util.errors import printable

LABEL, VALUE, RATIO = 32, 8, 7  # widths in a comparison
RUNS_PER_BLOCK = 2  # runs that a block of a comparison shows beside the first: 80 columns
ALIKE = 0.01  # relative: what is no further apart is not worth a row
MANY_RUNS = 9  # runs from which a comparison has a row for each, with the metrics that matter most


def compare_table(
    labels: Sequence[str], summaries: Sequence[Summary], *, everything: bool = False
) -> str:
    """Put runs side by side, each value with its ratio to the first run's.

    `+` marks a value that is better than the first run's, `-` one that is worse, `n/a` what a run
    does not have. Rows of which no value is ALIKE from the first's are left out, unless
    `everything` is asked for; a client with another row has its tokens/s. Of a single run all are
    shown. Several blocks of runs come with the first in each, 80 columns wide; of MANY_RUNS runs
    or more each is one row.
    """
    if len(labels) >= MANY_RUNS:
        return row_per_run(labels, summaries, "All metrics of all runs are in comparison.csv.")
    metrics = metric_rows(summaries)
    told = metrics
    if len(labels) > 1 and not everything:
        moved = {m.key for m, v in metrics if differ(v)}
        for part in {key.partition("[")[2] for key in moved if "[" in key}:
            moved.add(f"output_throughput[{part}")  # what a client pays for another's latencies
        told = [(metric, values) for metric, values in metrics if metric.key in moved]
    blocks = []
    for at in range(1, max(len(labels), 2), RUNS_PER_BLOCK):
        shown = [0, *range(at, min(at + RUNS_PER_BLOCK, len(labels)))]
        rows = []
        for metric, values in told:
            cells = [
                f"{_amount(metric, values[run])} {_ratio(metric, values, run)}" for run in shown
            ]
            rows.append((metric.label, _amount(metric, values[0]), *cells[1:]))
        blocks.append(_block([labels[run] for run in shown], rows))
    if len(labels) > 1:
        note = f"Ratios are to {labels[0]}; + better, - worse, in one run of each."
        if alike := len(metrics) - len(told):
            rows_ = "row that differs" if alike == 1 else "rows that differ"
            note += f"\n{alike} {rows_} by less than {ALIKE:.0%} left out: --all shows them."
        if any(m.key == "jain_index" and None in values for m, values in told):
            note += (
                "\nJain's index n/a: in no window did two clients have requests waiting all along."
            )
        blocks.append(note)
    costs = cost_lines(labels, [*map(cost_gauges, summaries)])
    return "\n\n".join([*blocks, *(["\n".join(costs)] if costs else [])])


def differ(values: Sequence[float | None]) -> bool:
    """Say whether any value is further than ALIKE from the first, or missing where that is not."""
    first, *others = values
    return any(_apart(value, first) for value in others)


def _apart(value: float | None, first: float | None) -> bool:
    if value is None or first is None:
        return value is not first
    return abs(value - first) > ALIKE * max(abs(value), abs(first))


def _block(labels: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align rows under the runs' labels, which take several lines where they are long."""
    names = [wrap(name, LABEL, subsequent_indent="  ") for name, *_ in rows]
    width = max([len(line) for lines in names for line in lines], default=0)
    cell = VALUE + 1 + RATIO + 1
    room = TEXT_WIDTH - width - (2 + cell) * (len(labels) - 1) - 2
    widths = [max(VALUE, min(len(labels[0]), room)), *[cell] * (len(labels) - 1)]
    heads = [wrap(printable(label), size) for label, size in zip(labels, widths, strict=True)]
    height = max(map(len, heads))
    lines = [
        ("", *line) for line in zip(*([""] * (height - len(h)) + h for h in heads), strict=True)
    ]
    for (_, *cells), (name, *more) in zip(rows, names, strict=True):
        lines += [(name, *cells), *((line, *[""] * len(cells)) for line in more)]
    return align(lines, heads=height)


def row_per_run(labels: Sequence[str], summaries: Sequence[Summary], note: str) -> str:
    """Return a row for each run; `*` marks the best of a column, `n/a` what a run does not have.

    A run that lost requests is the best of nothing, unless all have.
    """
    lost = [s.get("failed", 0) for s in summaries]
    columns = [("", "", *labels)]
    for column in COLUMNS:
        values = [metric_value(s, column.key) for s in summaries]
        known = [value for value in values if value is not None]
        if not any(known) or (column.better == 0 and len(set(known)) < 2):
            continue
        fair = [None if n and not all(lost) else v for v, n in zip(values, lost, strict=True)]
        best = max(
            (v for v in fair if v is not None), key=lambda v: v * column.better, default=None
        )
        marks = [" *"[bool(column.better) and v is not None and v == best] for v in fair]
        cells = [
            "n/a" if value is None else three_digits(value * column.scale) + mark
            for value, mark in zip(values, marks, strict=True)
        ]
        columns.append((*(word + " " for word in column.label.rsplit("/", 1)), *cells))
    text = align([*zip(*columns, strict=True)], heads=2)
    costs = cost_lines(labels, [*map(cost_gauges, summaries)])
    return "\n".join([f"{text}\n\n* best of its column. {note}", *costs])


def _amount(metric: Metric, value: float | None) -> str:
    return "n/a" if value is None else amount(value * metric.scale)


def _ratio(metric: Metric, values: Sequence[float | None], run: int) -> str:
    """Return a run's ratio to the first and its mark, always of the same width."""
    value, first = values[run], values[0]
    if value is None or first is None:
        return " " * (RATIO + 1)
    sign = metric.better * ((value > first) - (value < first)) * _apart(value, first)
    mark = {1: "+", 0: " ", -1: "-"}[sign]
    text = ""
    if first or value == first:
        ratio = value / first if first else 1.0
        digits = ".2g" if ratio < 0.1 else ".2f" if ratio < 100 else ".0f"
        text = f"{ratio:{digits}}x" if ratio < 1e6 else f"{ratio:.0e}x"
        text = "<0.001x" if 0 < ratio < 0.001 else text
    return f"{text:>{RATIO}}{mark}"
