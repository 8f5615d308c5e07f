"""A run's summary as text: the block that `vllm bench serve` prints, then what the engine did;
and several runs side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simulator.diagnosis import diagnosis_lines
from simulator.steady import told

if TYPE_CHECKING:
    from simulator.simulation import Result

Summary = Mapping[str, Any]

WIDTH = 50  # of vLLM's block
SECTIONS = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
    ("client_queue_time", "Client Queue Time", "Client-side Queueing"),
    (
        "e2el_including_client_queue",
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
    ("queue_time", "Queue Time", "Queueing in the Engine"),
    ("transfer_time", "KV Transfer", "KV Cache Transfer"),
    ("decode_queue_time", "Decode Queue Time", "Queueing to Decode"),
)
"""Key, name and title; all but the last three as vLLM has them."""
RATIO = 10  # width of a ratio and its mark
BESIDE = 3  # runs that a block of a comparison shows beside the first: 120 columns
MANY = 9  # runs from which a comparison has a row for each, with the metrics that matter most
PRINTED = ("mean", "median", "p99")  # vLLM's default; the summary has more


@dataclass(frozen=True, slots=True)
class Gauge:
    """A row of the tables."""

    key: str
    label: str
    better: int = 0  # 1: more is better, -1: less is, 0: neither
    scale: float = 1


GAUGES = (
    Gauge("gpu_busy_fraction", "GPU busy (%)", 0, 100.0),
    Gauge("mean_running", "Mean batch while busy (requests)"),
    Gauge("batch_occupancy", "Batch occupancy (% of max_num_seqs)", 0, 100.0),
    Gauge("mean_waiting", "Mean queue depth (requests)", -1),
    Gauge("max_waiting", "Peak queue depth (requests)", -1),
    Gauge("kv_cache_usage_mean", "Mean KV cache usage (%)", 0, 100.0),
    Gauge("kv_cache_usage_max", "Peak KV cache usage (%)", 0, 100.0),
    Gauge("memory_efficiency", "KV memory efficiency (%)", 1, 100.0),
    Gauge("wasted_share", "Wasted token slots (%)", -1, 100.0),
    Gauge("preemptions", "Preemptions", -1),
    Gauge("prefix_cache_hit_rate", "Prefix cache hit rate (% of tokens)", 1, 100.0),
    Gauge("jain_index", "Fairness: Jain's index of clients", 1),
    Gauge("service_difference_max", "Peak service difference of clients (tokens)", -1),
    Gauge("mfu", "Model FLOPs utilization (%)", 1, 100.0),
    Gauge("bandwidth_utilization", "Memory bandwidth utilization (%)", 0, 100.0),
)
MOVED = (
    Gauge("swapped_out_blocks", "KV blocks swapped out"),
    Gauge("swapped_in_blocks", "KV blocks swapped in"),
    Gauge("swapped_bytes", "KV bytes swapped, both ways (GB)", -1, 1e-9),
    Gauge("swap_time", "Time of these copies (s)", -1),
    Gauge("external_prefix_cache_hit_rate", "Host tier hit rate (% of other tokens)", 1, 100.0),
    Gauge("offloaded_blocks", "KV blocks stored in the host tier"),
    Gauge("loaded_blocks", "KV blocks loaded from the host tier"),
    Gauge("offloading_bytes", "KV bytes to and from the host tier (GB)", 0, 1e-9),
)
"""What goes between GPU and host; where nothing did, nothing is said."""
COUNTS = (
    ("rejected", "Requests rejected (could never fit)"),
    ("unfinished", "Requests unfinished when stopped"),
    ("never_sent", "Requests not sent when stopped"),
)
METRICS = (
    Gauge("completed", "Successful requests", 1),
    Gauge("failed", "Failed requests", -1),
    Gauge("duration", "Duration (s)", -1),
    Gauge("request_throughput", "Request throughput (req/s)", 1),
    Gauge("request_goodput", "Request goodput (req/s)", 1),
    Gauge("output_throughput", "Output throughput (tok/s)", 1),
    Gauge("spec_decode_acceptance_length", "Acceptance length (tok/step)", 1),
    Gauge("mean_ttft_ms", "Mean TTFT (ms)", -1),
    Gauge("p99_ttft_ms", "P99 TTFT (ms)", -1),
    Gauge("mean_tpot_ms", "Mean TPOT (ms)", -1),
    Gauge("p99_tpot_ms", "P99 TPOT (ms)", -1),
    Gauge("p99_itl_ms", "P99 ITL (ms)", -1),
    Gauge("mean_e2el_ms", "Mean E2EL (ms)", -1),
    Gauge("p99_e2el_ms", "P99 E2EL (ms)", -1),
    Gauge("mean_queue_time_ms", "Mean queue time (ms)", -1),
    Gauge("mean_transfer_time_ms", "Mean KV transfer (ms)", -1),
    Gauge("p99_transfer_time_ms", "P99 KV transfer (ms)", -1),
    Gauge("mean_decode_queue_time_ms", "Mean decode queue time (ms)", -1),
)
"""What a comparison shows of vLLM's keys; the gauges follow."""


COLUMNS = (
    Gauge("output_throughput", "output/tok per s", 1),
    Gauge("request_goodput", "goodput/req per s", 1),
    Gauge("mean_ttft_ms", "TTFT/mean, s", -1, 0.001),
    Gauge("p99_ttft_ms", "TTFT/P99, s", -1, 0.001),
    Gauge("mean_tpot_ms", "TPOT/mean, ms", -1),
    Gauge("p99_itl_ms", "ITL/P99, ms", -1),
    Gauge("mean_e2el_ms", "E2EL/mean, s", -1, 0.001),
    Gauge("p99_e2el_ms", "E2EL/P99, s", -1, 0.001),
    Gauge("mean_running", "batch/mean", 0),
    Gauge("kv_cache_usage_mean", "KV used/%", 0, 100.0),
    Gauge("preemptions", "pre-/empted", -1),
    Gauge("jain_index", "Jain's/index", 1),
)
"""What many runs are compared by: their labels fill two lines of a head."""


def run_table(run: "Result | Summary") -> str:
    """Give the report of one run: vLLM bench's labels and number formats, then the gauges.

    Warnings follow, such as of steps outside the fitted range, and whether it was no steady state.
    """
    summary = run if isinstance(run, Mapping) else run.summary()
    warned = run["headway"].get("warnings", ()) if isinstance(run, Mapping) else run.warnings
    notes = [f"Warning: {text}" for text in warned]
    if line := told(summary["headway"]):
        notes.append(line)
    if summary["headway"].get("interrupted"):
        notes.insert(0, "Interrupted: the figures are those up to then.")
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_head(summary)]
    for key, name, title in SECTIONS:
        if f"mean_{key}_ms" in summary:
            lines += [f"{title:-^{WIDTH}}", *_latency(summary, key, name)]
    lines += [f"{'Engine':-^{WIDTH}}", *_engine(summary["headway"])]
    if summary["headway"].get("diagnosis") is not None:
        lines += [f"{'Diagnosis':-^{WIDTH}}", *diagnosis_lines(summary["headway"]["diagnosis"])]
    lines.append("=" * WIDTH)
    return "\n".join(lines + notes)


def _line(label: str, value: object) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<40} {text:<10}".rstrip()


CLUSTER = (
    ("gpus", "GPUs"),
    ("dollars_per_hour", "Price ($/h)"),
    ("replica_hours", "Replica-hours"),
    ("dollars", "Cost of the run ($)"),
    ("dollars_per_million_output_tokens", "Cost of 1M output tokens ($)"),
    ("requests_imbalance", "Most requests of a replica / mean"),
    ("busy_time_imbalance", "Most busy time of a replica / mean"),
)
"""Figures of a cluster that are printed."""
TROUBLES = (
    ("shed", "Requests shed"),
    ("timed_out", "Requests timed out"),
    ("retries", "Retries"),
    ("failures", "Replicas failed"),
    ("tries_lost_in_failures", "Requests sent again after a failure"),
    ("scalings", "Scaling decisions"),
)
"""Counts of a cluster that are printed where they are not 0."""


def _head(summary: Summary) -> list[str]:
    """Say what vLLM says first, in its order."""
    values: dict[str, object] = {
        "Successful requests": summary["completed"],
        "Failed requests": summary["failed"],
        "Maximum request concurrency": summary["max_concurrency"],
        "Request rate configured (RPS)": summary["request_rate"],
        "Benchmark duration (s)": summary["duration"],
        "Total input tokens": summary["total_input_tokens"],
        "Total generated tokens": summary["total_output_tokens"],
        "Request throughput (req/s)": summary["request_throughput"],
        "Request goodput (req/s)": summary["request_goodput"],
        "Output token throughput (tok/s)": summary["output_throughput"],
        "Peak output token throughput (tok/s)": summary["max_output_tokens_per_s"],
        "Peak concurrent requests": float(summary["max_concurrent_requests"]),  # as vLLM: 12.00
        "Total token throughput (tok/s)": summary["total_token_throughput"],
        "Acceptance rate (%)": summary.get("spec_decode_acceptance_rate"),
        "Acceptance length": summary.get("spec_decode_acceptance_length"),
    }
    return [_line(label, value) for label, value in values.items() if value not in (None, "inf")]


def _latency(summary: Summary, key: str, name: str) -> list[str]:
    return [
        _line(f"{word.capitalize()} {name} (ms)", summary[f"{word}_{key}_ms"]) for word in PRINTED
    ]


def _engine(gauges: Summary) -> list[str]:
    """Give our own block; what is unknown (null) is left out."""
    lines = [f"Cost: {gauges['profile']}"] if gauges.get("profile") else []
    lines.append(_line("Steps", gauges["steps"]))
    for gauge in GAUGES:
        value = gauges.get(gauge.key)
        if value is not None:
            lines.append(_line(gauge.label, gauge.scale * value))
    lines += [
        _line(gauge.label, gauge.scale * gauges[gauge.key])
        for gauge in MOVED
        if gauges.get(gauge.key)
    ]
    for key, label in COUNTS:
        if gauges[key]:
            lines.append(_line(label, gauges[key]))
    if "cluster" in gauges:
        lines += _cluster(gauges["cluster"])
    return lines


def _cluster(cluster: Summary) -> list[str]:
    """Give the figures of a cluster, then a line for each group where there are several."""
    lines = [f"{'Cluster':-^{WIDTH}}", f"Router: {cluster['router']}"]
    lines += [_line(label, cluster[key]) for key, label in CLUSTER if cluster.get(key) is not None]
    lines += [_line(label, cluster[key]) for key, label in TROUBLES if cluster.get(key)]
    if links := cluster.get("kv_transfer"):
        lines += [_line("KV caches moved (GB)", links["bytes"] / 1e9)]
        lines += [_line("Links of the producers busy (%)", 100 * links["link_utilization"])]
    groups = cluster["groups"]
    if len(groups) > 1:
        return lines + [_group(name, group) for name, group in groups.items()]
    ranks = next(iter(groups.values()))["data_parallel_size"]
    return [*lines, *([_line("Data-parallel ranks of a replica", ranks)] if ranks > 1 else [])]


def _group(name: str, group: Summary) -> str:
    """Give the figures of one group of a cluster in a line."""
    ranks, busy = group["data_parallel_size"], 100 * group["gpu_busy_fraction"]
    each = f" of {ranks} ranks" if ranks > 1 else ""
    what = f"requests, {group['output_throughput']:.0f} tok/s"
    if group.get("kv_role") == "kv_producer":
        what = "prompts"
    return (
        f"{name}: {group['replicas']}{each} on {group['gpus']} {group['gpu']}, busy {busy:.0f} %, "
        f"{group['completed']} {what}"
    )


def compare_table(labels: Sequence[str], summaries: Sequence[Summary]) -> str:
    """Put runs side by side, each value with its ratio to the first run's.

    `+` marks a value that is better than the first run's, `-` one that is worse, `.` what a run
    does not have; a metric that none of them has is left out. Several blocks of runs come with the
    first in each; of MANY runs or more each is one row.
    """
    if len(labels) >= MANY:
        return _many_table(labels, summaries)
    metrics = _compared(summaries)
    blocks = []
    for at in range(1, max(len(labels), 2), BESIDE):
        shown = [0, *range(at, min(at + BESIDE, len(labels)))]
        rows = [("", *(labels[run] for run in shown))]
        rows += [(metric.label, *_cells(metric, values, shown)) for metric, values in metrics]
        blocks.append(_align(rows))
    if len(labels) > 1:
        blocks.append(f"Ratios are to {labels[0]}; + better, - worse.")
    return "\n\n".join(blocks)


def _many_table(labels: Sequence[str], summaries: Sequence[Summary]) -> str:
    """Give a row for each run; `*` marks the best of a column, `.` what a run does not have."""
    columns = [("", "", *labels)]
    for column in COLUMNS:
        values = [_value(s, {**s["headway"], **s}, column) for s in summaries]
        known = [value for value in values if value is not None]
        if not any(known) or (column.better == 0 and len(set(known)) < 2):
            continue
        best = max(known, key=lambda value: value * column.better) if column.better else None
        cells = [
            "." if value is None else _short(value * column.scale) + " *"[value == best]
            for value in values
        ]
        columns.append((*(word + " " for word in column.label.rsplit("/", 1)), *cells))
    widths = [max(map(len, column)) for column in columns]
    rows = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in zip(*columns, strict=True)
    ]
    rows.insert(2, "-" * max(map(len, rows)))
    rows += ["", "* best of its column. All metrics of all runs are in comparison.csv."]
    return "\n".join(rows)


def _short(value: float) -> str:
    """Write a number with about three digits that tell."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 1 else f"{value:.4g}"


def _cells(metric: Gauge, values: Sequence[float | None], shown: Sequence[int]) -> Iterator[str]:
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


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    lines.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
    return "\n".join(lines)


def _compared(summaries: Sequence[Summary]) -> list[tuple[Gauge, list[float | None]]]:
    """Find the metrics that any run has."""
    rows: list[tuple[Gauge, list[Any]]] = []
    rows += [(metric, [_value(s, s, metric) for s in summaries]) for metric in METRICS]
    rows += [(gauge, [s["headway"].get(gauge.key) for s in summaries]) for gauge in GAUGES]
    moved = [(gauge, [s["headway"].get(gauge.key) for s in summaries]) for gauge in MOVED]
    rows += [(gauge, values) for gauge, values in moved if any(values)]
    return [(metric, values) for metric, values in rows if values.count(None) < len(values)]


def _value(summary: Summary, numbers: Summary, metric: Gauge) -> Any:
    """Give a run's value of a metric; None where it has none.

    Who has completed nobody has no latencies, though vLLM's summary calls them 0.
    """
    none = metric.key.endswith("_ms") and not summary["completed"]
    return None if none else numbers.get(metric.key)


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
