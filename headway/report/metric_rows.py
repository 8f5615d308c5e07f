"""What tables of runs have rows of: metrics by key, with their labels, and a run's values."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from simulator.results.fairness import parts_of
from simulator.results.token_times import lacks_gaps
from simulator.util.errors import printable
from simulator.util.files import read_table

Summary = Mapping[str, Any]


class Metric(NamedTuple):
    """A row of the tables."""

    key: str
    label: str
    better: int = 0  # 1: more is better, -1: less is, 0: neither
    scale: float = 1


def _read(table: str) -> tuple[Metric, ...]:
    """Read the rows of a table of `metrics.csv`; a count without a scale stays whole."""
    return tuple(
        Metric(row["key"], row["label"], int(row["better"]), *map(float, row["scale"].split()))
        for row in read_table(__file__, "metrics.csv")
        if row["table"] == table
    )


HEAD = _read("head")
"""What a report begins with, in vLLM's order; a float has two digits there, as 12.00."""
METRICS = _read("metrics")
"""What a comparison shows of vLLM's keys; the gauges follow."""
GAUGES = _read("gauges")
COPIES = _read("copies")
"""What goes between GPU and host; where nothing did, nothing is said."""
CLUSTER = _read("cluster")
"""Figures of a cluster."""
INCIDENTS = _read("incidents")
"""Counts of a cluster; where they are 0, nothing is said."""
COUNTS = _read("counts")
COLUMNS = _read("columns")
"""What many runs are compared by: their labels fill two lines of a head."""
DOLLARS = next(metric for metric in CLUSTER if metric.key.endswith("output_tokens"))
PRICE = (next(metric for metric in CLUSTER if metric.key == "dollars_per_hour"), DOLLARS)
"""Of a server by its GPUs' list prices; of a cluster they are among its own figures."""
PAID_LABELS = {metric.key: metric.label for metric in _read("paid")}
"""Labels where replicas come and go: what is divided by, and what is of all at once."""
SESSION_LABELS = {metric.key: metric.label for metric in _read("sessions")}
BY_KEY = {metric.key: metric for metric in METRICS}
PARTS = {"per_client": "", "per_priority": "priority "}
"""Blocks of the summary that tell of single clients and priorities, and what their names follow."""
PART_KEYS = (
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_e2el_ms",
    "output_throughput",
    "slo_attainment",
)
"""What tables of several runs tell of each."""
PARTS_SHOWN = 8  # clients, and priorities, in a comparison


def part_values(summary: Summary) -> dict[str, Any]:
    """Get the figures of a run's clients and priorities, by names such as mean_ttft_ms[client-0].

    They are those of the clients that have the most requests.
    """
    return {
        f"{key}[{prefix}{name}]": told[key]
        for block, parts in parts_of(summary).items()
        for prefix in [PARTS[block]]
        for name, figures in [*parts.items()][:PARTS_SHOWN]
        for told in [{**figures, "output_throughput": part_throughput(figures, summary)}]
        for key in PART_KEYS
        if told.get(key) is not None
    }


def part_throughput(figures: Summary, summary: Summary) -> float | None:
    """Return the output tokens/s of a client, or of a priority; None: no time passed."""
    duration = summary["duration"]
    return figures["output_tokens"] / duration if duration else None


def find_metric(key: str) -> Metric:
    """Return the row of a key of BY_KEY, of the cost of a token, or of what `part_values` gives."""
    base, bracket, part = key.partition("[")
    metric = DOLLARS if base == DOLLARS.key else BY_KEY[base]
    if not bracket:
        return metric
    return metric._replace(key=key, label=f"{printable(part[:-1])}: {metric.label}")


def metric_rows(summaries: Sequence[Summary]) -> list[tuple[Metric, list[Any]]]:
    """Return the metrics that any run has with the runs' values; None: it has none.

    Copies and incidents are left out where all are 0. Clients and priorities come last.
    """
    rows = []
    for metric in (*METRICS, *GAUGES, *COPIES, *CLUSTER, *INCIDENTS):
        values = [metric_value(summary, metric.key) for summary in summaries]
        known = [each for each in values if each is not None]
        if any(known) if metric in (*COPIES, *INCIDENTS) else known:
            rows.append((metric, values))
    parts = [part_values(summary) for summary in summaries]
    keys = dict.fromkeys(key for values in parts for key in values)
    return rows + [(find_metric(key), [values.get(key) for values in parts]) for key in keys]


def metric_value(summary: Summary, key: str) -> Any:
    """Return a figure of a run by name: of vLLM's, our own or a cluster's the first that has it.

    Who has completed nobody has no latencies, and who gives answers as a whole none of single
    tokens, though vLLM's summary calls them 0.
    """
    if (key.endswith("_ms") and not summary["completed"]) or lacks_gaps(summary, key):
        return None
    own = summary["headway"]
    return {**own.get("cluster", {}), **own, **summary}.get(key)
