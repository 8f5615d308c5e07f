"""A run's summary as text: the block that `vllm bench serve` prints, then what the engine did."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simulator.diagnosis.rules import diagnosis_lines
from simulator.results.steady_state import trend_warning

if TYPE_CHECKING:
    from simulator.simulation.result import Result

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
    ("retry_time", "Retry Time", "Tries before the Last"),
    ("transfer_time", "KV Transfer", "KV Cache Transfer"),
    ("decode_queue_time", "Decode Queue Time", "Queueing to Decode"),
)
"""Key, name and title; all but the last four as vLLM has them."""
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
CLUSTER = (
    Gauge("gpus", "GPUs"),
    Gauge("dollars_per_hour", "Price ($/h)", -1),
    Gauge("replica_hours", "Replica-hours", -1),
    Gauge("dollars", "Cost of the run ($)", -1),
    Gauge("dollars_per_million_output_tokens", "Cost of 1M output tokens ($)", -1),
    Gauge("requests_imbalance", "Most requests of a replica / mean", -1),
    Gauge("busy_time_imbalance", "Most busy time of a replica / mean", -1),
)
"""Figures of a cluster."""
TROUBLES = (
    Gauge("shed", "Requests shed", -1),
    Gauge("timed_out", "Requests timed out", -1),
    Gauge("retries", "Retries", -1),
    Gauge("failures", "Replicas failed"),
    Gauge("tries_lost_in_failures", "Requests sent again after a failure", -1),
    Gauge("scalings", "Scaling decisions"),
)
"""Counts of a cluster; where they are 0, nothing is said."""
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
    Gauge("mean_retry_time_ms", "Mean time of earlier tries (ms)", -1),
    Gauge("mean_transfer_time_ms", "Mean KV transfer (ms)", -1),
    Gauge("p99_transfer_time_ms", "P99 KV transfer (ms)", -1),
    Gauge("mean_decode_queue_time_ms", "Mean decode queue time (ms)", -1),
)
"""What a comparison shows of vLLM's keys; the gauges follow."""


def known(summary: Summary) -> Summary:
    """Give a run's figures by name: our own, a cluster's and, before both, vLLM's."""
    own = summary["headway"]
    return {**own.get("cluster", {}), **own, **summary}


def run_table(run: "Result | Summary") -> str:
    """Give the report of one run: vLLM bench's labels and number formats, then the gauges.

    Warnings follow, such as of steps outside the fitted range, and whether it was no steady state.
    """
    summary = run if isinstance(run, Mapping) else run.summary()
    warned = run["headway"].get("warnings", ()) if isinstance(run, Mapping) else run.warnings
    notes = [f"Warning: {text}" for text in warned]
    if line := trend_warning(summary["headway"]):
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
    lines = [f"Cost: {profiles_of(gauges)}"] if gauges.get("profile") else []
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


def profiles_of(gauges: Summary) -> str:
    """Name the cost profiles, of which the groups of a cluster may have several."""
    cluster = gauges.get("cluster")
    groups = cluster.get("groups") if isinstance(cluster, Mapping) else None
    found = groups.values() if isinstance(groups, Mapping) else [gauges]
    names = [str(one.get("profile")) for one in found if isinstance(one, Mapping)]
    return ", ".join(dict.fromkeys(names))


def _cluster(cluster: Summary) -> list[str]:
    """Give the figures of a cluster, then a line for each group where there are several."""
    lines = [f"{'Cluster':-^{WIDTH}}", f"Router: {cluster['router']}"]
    there = [gauge for gauge in CLUSTER if cluster.get(gauge.key) is not None]
    lines += [_line(gauge.label, cluster[gauge.key]) for gauge in there]
    lines += [_line(one.label, cluster[one.key]) for one in TROUBLES if cluster.get(one.key)]
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
