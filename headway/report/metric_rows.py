"""What tables of runs have rows of: metrics by key, with their labels, and a run's values."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from simulator.results.fairness import parts_of
from simulator.results.token_times import lacks_gaps
from simulator.util.errors import printable

Summary = Mapping[str, Any]


class Metric(NamedTuple):
    """A row of the tables."""

    key: str
    label: str
    better: int = 0  # 1: more is better, -1: less is, 0: neither
    scale: float = 1


GAUGES = (
    Metric("gpu_busy_fraction", "GPU busy (%)", 0, 100.0),
    Metric("host_share", "Host share of the steps (%)", -1, 100.0),
    Metric("gpu_busy_without_host", "GPU busy without host time (%)", 0, 100.0),
    Metric("mean_running", "Mean batch while busy (requests)"),
    Metric("batch_occupancy", "Batch occupancy, live (% of seats)", 0, 100.0),
    Metric("decode_seat_utilization", "Decode seat utilization (%)", 1, 100.0),
    Metric("mean_waiting", "Mean queue depth (requests)", -1),
    Metric("max_waiting", "Peak queue depth (requests)", -1),
    Metric("kv_cache_usage_mean", "Mean KV cache usage (%)", 0, 100.0),
    Metric("kv_cache_usage_max", "Peak KV cache usage (%)", 0, 100.0),
    Metric("memory_efficiency", "KV memory efficiency (%)", 1, 100.0),
    Metric("wasted_share", "Wasted token slots (%)", -1, 100.0),
    Metric("wasted_seat_share", "Wasted seat-steps (%)", -1, 100.0),
    Metric("preemptions", "Preemptions", -1),
    Metric("prefix_cache_hit_rate", "Prefix cache hit rate (% of tokens)", 1, 100.0),
    Metric("jain_index", "Fairness: Jain's index of clients", 1),
    Metric("service_difference_max", "Peak service difference of clients (tokens)", -1),
    Metric("mfu", "Model FLOPs utilization (%)", 1, 100.0),
    Metric("bandwidth_utilization", "Memory bandwidth utilization (%)", 0, 100.0),
    Metric("power_w", "Power of all GPUs (W, within 25%)", -1),
    Metric("joules_per_output_token", "Energy of an output token (J)", -1),
    Metric("wh_per_million_output_tokens", "Energy of 1M output tokens (Wh)", -1),
    Metric("kg_co2_per_million_output_tokens", "CO2e of 1M output tokens (g)", -1, 1000.0),
)
COPIES = (
    Metric("swapped_out_blocks", "KV blocks swapped out"),
    Metric("swapped_in_blocks", "KV blocks swapped in"),
    Metric("swapped_bytes", "KV bytes swapped, both ways (GB)", -1, 1e-9),
    Metric("swap_time", "Time of these copies (s)", -1),
    Metric("external_prefix_cache_hit_rate", "External hit rate (% of other tokens)", 1, 100.0),
    Metric("offloaded_blocks", "KV blocks stored in the host tier"),
    Metric("loaded_blocks", "KV blocks loaded from the host tier"),
    Metric("offloading_bytes", "KV bytes to and from the host tier (GB)", 0, 1e-9),
)
"""What goes between GPU and host; where nothing did, nothing is said."""
DOLLARS = Metric("dollars_per_million_output_tokens", "Cost of 1M output tokens ($)", -1)
PRICE = (Metric("dollars_per_hour", "Price ($/h)", -1), DOLLARS)
"""Of a server by its GPUs' list prices; of a cluster they are among its own figures."""
CLUSTER = (
    Metric("gpus", "GPUs"),
    PRICE[0],
    Metric("replica_hours", "Replica-hours", -1),
    Metric("dollars", "Cost of the run ($)", -1),
    DOLLARS,
    Metric("requests_imbalance", "Most requests of a replica / mean", -1),
    Metric("busy_time_imbalance", "Most busy time of a replica / mean", -1),
)
"""Figures of a cluster."""
PAID_LABELS = {
    "gpu_busy_fraction": "GPU busy (% of replica-hours paid)",
    "gpu_busy_without_host": "GPU busy without host (% while paid)",
    "mean_waiting": "Mean queue of a replica, on or off",
    "mfu": "Model FLOPs utilization (% while paid)",
    "bandwidth_utilization": "Memory bandwidth (% while paid)",
    "gpus": "GPUs, at most",
    "dollars_per_hour": "Price, at most ($/h)",
}
"""Labels where replicas come and go: what is divided by, and what is of all at once."""
INCIDENTS = (
    Metric("shed", "Requests shed", -1),
    Metric("timed_out", "Requests timed out", -1),
    Metric("retries", "Retries", -1),
    Metric("failures", "Replicas failed"),
    Metric("tries_lost_in_failures", "Requests sent again after a failure", -1),
    Metric("scalings", "Scaling decisions"),
    Metric("switches", "Switches from model to model", -1),
)
"""Counts of a cluster; where they are 0, nothing is said."""
COUNTS = (
    Metric("rejected", "Requests rejected (could never fit)"),
    Metric("unfinished", "Requests unfinished when stopped"),
    Metric("never_sent", "Requests not sent when stopped"),
)
METRICS = (
    Metric("completed", "Successful requests", 1),
    Metric("failed", "Failed requests", -1),
    Metric("duration", "Duration (s)", -1),
    Metric("request_throughput", "Request throughput (req/s)", 1),
    Metric("request_goodput", "Request goodput (req/s)", 1),
    Metric("slo_attainment", "SLO attainment (%)", 1, 100.0),
    Metric("slo_attainment_ttft", "SLO attainment, TTFT (%)", 1, 100.0),
    Metric("slo_attainment_tpot", "SLO attainment, TPOT (%)", 1, 100.0),
    Metric("slo_attainment_e2el", "SLO attainment, E2EL (%)", 1, 100.0),
    Metric("output_throughput", "Output throughput (tok/s)", 1),
    Metric("spec_decode_acceptance_length", "Acceptance length (tok/step)", 1),
    Metric("mean_ttft_ms", "Mean TTFT (ms)", -1),
    Metric("p99_ttft_ms", "P99 TTFT (ms)", -1),
    Metric("mean_tpot_ms", "Mean TPOT (ms)", -1),
    Metric("p99_tpot_ms", "P99 TPOT (ms)", -1),
    Metric("p99_itl_ms", "P99 ITL (ms)", -1),
    Metric("mean_e2el_ms", "Mean E2EL (ms)", -1),
    Metric("p99_e2el_ms", "P99 E2EL (ms)", -1),
    Metric("mean_queue_time_ms", "Mean queue time (ms)", -1),
    Metric("mean_retry_time_ms", "Mean time of earlier tries (ms)", -1),
    Metric("mean_encoder_time_ms", "Mean time at the encoders (ms)", -1),
    Metric("mean_ec_transfer_time_ms", "Mean transfer of encoder outputs (ms)", -1),
    Metric("mean_transfer_time_ms", "Mean KV transfer (ms)", -1),
    Metric("p99_transfer_time_ms", "P99 KV transfer (ms)", -1),
    Metric("mean_decode_queue_time_ms", "Mean decode queue time (ms)", -1),
)
"""What a comparison shows of vLLM's keys; the gauges follow."""
BY_KEY = {metric.key: metric for metric in METRICS}
PARTS = {"per_client": "", "per_priority": "priority "}
"""Blocks of the summary that tell of single clients and priorities, and what their names follow."""
PART_KEYS = (
    *("mean_ttft_ms", "p99_ttft_ms", "mean_e2el_ms", "output_throughput", "slo_attainment"),
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
