"""Summaries as text.

Of one run the block that `vllm bench serve` prints, then what the engine did; of several runs a
table side by side.
"""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from simulator.costs.noise import REGIMES
from simulator.diagnosis.rules import diagnosis_lines
from simulator.results.service_levels import Judged
from simulator.results.steady_state import trend_warning
from simulator.results.token_times import lacks_gaps
from simulator.util.errors import printable

Summary = Mapping[str, Any]

WIDTH = 50  # of vLLM's block
TEXT_WIDTH = 80  # of what is wrapped, and of a comparison of three runs
NAME_WIDTH = 14  # of a client
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
    Metric("external_prefix_cache_hit_rate", "Host tier hit rate (% of other tokens)", 1, 100.0),
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
    Metric("mean_transfer_time_ms", "Mean KV transfer (ms)", -1),
    Metric("p99_transfer_time_ms", "P99 KV transfer (ms)", -1),
    Metric("mean_decode_queue_time_ms", "Mean decode queue time (ms)", -1),
)
"""What a comparison shows of vLLM's keys; the gauges follow."""
BY_KEY = {metric.key: metric for metric in METRICS}
PARTS = {"per_client": "", "per_priority": "priority "}
"""Blocks of the summary that tell of single clients and priorities, and what their names follow."""
PART_KEYS = ("mean_ttft_ms", "p99_ttft_ms", "mean_e2el_ms", "slo_attainment")
"""What tables of several runs tell of each."""
PARTS_SHOWN = 8  # clients, and priorities, in a comparison


def part_values(summary: Summary) -> dict[str, Any]:
    """Get the figures of a run's clients and priorities, by names such as mean_ttft_ms[client-0].

    They are those of the clients that have the most requests.
    """
    return {
        f"{key}[{prefix}{name}]": figures[key]
        for block, prefix in PARTS.items()
        for name, figures in [*summary["headway"].get(block, {}).items()][:PARTS_SHOWN]
        for key in PART_KEYS
        if figures.get(key) is not None
    }


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


def run_table(summary: Summary) -> str:
    """Return the report of one run: vLLM bench's labels and number formats, then the gauges.

    Warnings follow, such as of steps outside the fitted range, and whether it was no steady state.
    """
    gauges = summary["headway"]
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *engine_lines(gauges), *_head(summary)]
    for key, name, title in SECTIONS:
        if f"mean_{key}_ms" in summary:
            lines.append(f"{title:-^{WIDTH}}")
            for word in PRINTED:
                value = summary[f"{word}_{key}_ms"]
                none = lacks_gaps(summary, f"_{key}_")
                lines.append(_line(f"{word.capitalize()} {name} (ms)", "n/a" if none else value))
        if key == "itl" and not lacks_gaps(summary, "_itl_"):
            lines.append(_line("Std ITL (ms)", summary["std_itl_ms"]))
            if "max_itl_ms" in gauges:  # not in the files of earlier versions
                least, greatest = gauges["min_itl_ms"], gauges["max_itl_ms"]
                lines.append(_line("Range of ITL (ms)", f"{least:.2f} to {greatest:.2f}"))
    if service := slo_lines(summary):
        lines += [f"{'Service Levels':-^{WIDTH}}", *(_line(*pair) for pair in service)]
    for block, title in (("per_client", "Clients"), ("per_priority", "Priorities")):
        if parts := gauges.get(block):
            lines += [f"{title:-^{WIDTH}}", *_parts(parts, gauges.get("clients"))]
    lines += [f"{'Engine':-^{WIDTH}}", *_engine(gauges)]
    if sensitivity := sensitivity_lines(gauges):
        lines += [f"{'Sensitivity':-^{WIDTH}}", *(_line(*pair) for pair in sensitivity)]
    if gauges.get("diagnosis") is not None:
        lines += [f"{'Diagnosis':-^{WIDTH}}", *diagnosis_lines(gauges)]
    lines.append("=" * WIDTH)
    if gauges.get("interrupted"):
        lines.append("Interrupted: the figures are those up to then.")
    lines += [f"Warning: {text}" for text in gauges.get("warnings", ())]
    lines += [
        f"Warning: on a cliff: 1 % of step time moves mean {key.split('_')[1].upper()} by "
        f"{one['elasticity']:.1f} %; near saturation a small error of the profile is a large one"
        for key, one in (gauges.get("sensitivity") or {}).items()
        if one["cliff"]
    ]
    return "\n".join([*lines, *filter(None, [trend_warning(gauges)])])


def _parts(parts: Summary, count: object) -> list[str]:
    """Tabulate what each client, or each priority, felt; times in ms."""
    bounds = any("slo_attainment" in one for one in parts.values())
    columns = (
        *(("requests", "requests", 1), ("mean_ttft_ms", "TTFT", 1), ("p99_ttft_ms", "P99", 1)),
        *(("mean_tpot_ms", "TPOT", 1), ("mean_e2el_ms", "E2EL", 1), ("p99_e2el_ms", "P99", 1)),
        *([("slo_attainment", "SLO, %", 100)] if bounds else []),
    )
    rows = [("mean, ms", *(label for _, label, _ in columns))]
    for name, one in parts.items():
        cells = (None if (value := one.get(key)) is None else value * k for key, _, k in columns)
        told = ["n/a" if cell is None else amount(cell) for cell in cells]
        rows.append((shortened(printable(name)), *told))
    lines = align(rows, heads=0).splitlines()
    if isinstance(count, int) and count > len(parts):
        lines.append(f"{len(parts)} of {count} clients; the others are in clients.csv")
    return lines


def shortened(name: str) -> str:
    """Cut a name off that is too long for its column."""
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"


def amount(value: float) -> str:
    """Write a number in eight letters at most, where it is below a billion."""
    if isinstance(value, int):
        return str(value) if value < 10**8 else f"{value:.2e}"
    size = abs(value)
    return f"{value:{'.2f' if size < 1e5 else '.0f' if size < 1e8 else '.2e'}}"


def sensitivity_lines(gauges: Summary) -> list[tuple[str, str]]:
    """Say how far metrics move for 1 % of step time, and by what is unsure of the cost model."""
    lines = []
    for key, one in (gauges.get("sensitivity") or {}).items():
        name = key.removeprefix("mean_").removesuffix("_ms").upper()
        moved = moved_by(
            one["elasticity"], one.get("elasticity_95"), resolved=one.get("resolved", True)
        )
        lines.append((f"Mean {name}, 1 % longer steps (%)", moved))
        shown = "not known"
        if one["interval_95"] is not None:
            shown = " to ".join(f"{end:.2f}" for end in one["interval_95"])
        lines.append((f"Mean {name}, 95 % by the profile (ms)", shown))
    return lines


def moved_by(elasticity: float, ends: Sequence[float] | None, *, resolved: bool) -> str:
    """Say by how much, in %, a metric moves for 1 % of step time, and what of it is chance."""
    chance = "" if ends is None else f"±{(ends[1] - ends[0]) / 2:.2f}"
    return f"{elasticity:+.2f} {chance}".strip() if resolved else f"below resolution ({chance})"


def _line(label: str, value: object) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<40} {text:<10}".rstrip()


def _verdict(one: Mapping[str, Any], *, nobody: bool) -> str:
    """Say whether a service level is kept, by how much, and whether the clock can tell."""
    return "broken" if nobody else str(Judged.of(one))


def slo_lines(summary: Summary) -> list[tuple[str, str]]:
    """Say of each service level whether it is kept, and how many requests keep their bounds.

    A latency is that of the requests that were served: of how many, where that is not all.
    """
    gauges, served = summary["headway"], summary["completed"]
    ended = served + summary.get("failed", 0)  # not in the files of others
    of = f", by the {served:,} of {ended:,} served" if served < ended else ""
    found = [
        (
            one["bound"],
            f"{_short(one['value'])} {_verdict(one, nobody=not served)}"
            f"{of if '_ms' in one['bound'] else ''}",
        )
        for one in gauges.get("slo") or ()
    ]
    names = [name for name in ("ttft", "tpot", "e2el") if f"slo_{name}_ms" in gauges]
    for name in names:
        if (kept := gauges.get(f"slo_attainment_{name}")) is not None:
            label = f"Requests of {name.upper()}<={gauges[f'slo_{name}_ms']:g} ms (%)"
            found.append((label, f"{100 * kept:.2f}"))
    if len(names) > 1 and gauges.get("slo_attainment") is not None:
        found.append(("Requests that keep all (%)", f"{100 * gauges['slo_attainment']:.2f}"))
    return found


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


MAIN_KEYS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "async_scheduling",
    "enable_prefix_caching",
    "gpu_memory_utilization",
)
"""Those of an engine's defaults that the head of a report tells."""


def engine_lines(gauges: Summary) -> list[str]:
    """Say which engines were simulated, which of their defaults applied and what was set."""
    lines = []
    engines = gauges.get("engines") or ()  # not in the files of earlier versions
    for one in engines:
        who = f" of {', '.join(one['groups'])}" if len(engines) > 1 else ""
        usual = {key: one["defaults"][key] for key in MAIN_KEYS if key in one["defaults"]}
        lines.append(f"Engine{who}: {one['follows']}")
        for word, keys in (
            (f"Defaults on {one['gpu']}", usual),
            ("Set", one["set"]),
            ("vLLM's default, not simulated here", one.get("not_simulated")),
        ):
            if keys:
                text = f"{word}: {', '.join(_said(*pair) for pair in keys.items())}"
                lines += wrap(text, TEXT_WIDTH, initial_indent="  ", subsequent_indent="    ")
    return lines


def _said(key: str, value: object) -> str:
    """Write a key of an engine with its value, a flag as on or off."""
    if isinstance(value, bool):
        return f"{key} {'on' if value else 'off'}"
    if isinstance(value, Mapping):
        value = "{" + ", ".join(f"{k}: {v}" for k, v in value.items() if v is not None) + "}"
    return f"{key} {value}"


def _engine(gauges: Summary) -> list[str]:
    """Return our own block; what is unknown (null) is left out."""
    lines = [*cost_lines([""], [gauges]), _line("Steps", gauges["steps"])]
    lines += _lines(gauges, (*GAUGES, *PRICE))
    lines += _lines(gauges, (*COPIES, *COUNTS), zeros=False)
    return lines + (_cluster(gauges["cluster"]) if "cluster" in gauges else [])


def _lines(values: Summary, metrics: Sequence[Metric], *, zeros: bool = True) -> list[str]:
    """Return a line for each metric that is known; without `zeros`, that is not 0."""
    labels = PAID_LABELS if "paid_times" in values.get("cluster", values) else {}
    return [
        _line(labels.get(metric.key, metric.label), metric.scale * value)
        for metric in metrics
        if (value := values.get(metric.key)) or (zeros and value is not None)
    ]


def costs_of(gauges: Summary) -> list[str]:
    """Name the cost profiles and how far off their steps may be; groups may have several."""
    cluster = gauges.get("cluster")
    groups = cluster.get("groups") if isinstance(cluster, Mapping) else None
    found = groups.values() if isinstance(groups, Mapping) else [gauges]
    named = [one for one in found if isinstance(one, Mapping) and one.get("profile")]
    return [*dict.fromkeys("; ".join([str(one["profile"]), *step_errors(one)]) for one in named)]


def step_errors(gauges: Summary) -> list[str]:
    """Say where step times lie with 95 %, and of what there are no measurements."""
    known = gauges.get("step_times") or {}  # not in the files of earlier versions
    told = []
    if ends := known.get("interval_95"):
        spans = {
            regime: f"{100 * (low - 1):+.0f} to {100 * (high - 1):+.0f} %"
            for regime, (low, high) in ends.items()
        }
        if len({*spans.values()}) == 1 and len(spans) == len(REGIMES):
            spans = {"": spans["decode"]}
        each = [f"{span} ({regime})" if regime else span for regime, span in spans.items()]
        told.append(f"95 % of steps within {', '.join(each)}")
    if known.get("unmeasured"):
        lacking = known["unmeasured"].replace("; ", " or of ")
        told.append(f"Headway has no measurements of {lacking}")
    return told


COSTS_NAMED = 3  # runs whose step times come from one cost model


def cost_lines(labels: Sequence[str], gauges: Sequence[Summary]) -> list[str]:
    """Say of several runs what their step times come from; what is the same of all, once."""
    found: dict[str, list[str]] = {}
    for label, one in zip(labels, gauges, strict=True):
        for said in costs_of(one):
            found.setdefault(said, []).append(label)
    lines = []
    for said, names in found.items():
        more = len(names) - COSTS_NAMED
        first = printable(", ".join(names[:COSTS_NAMED]))
        of = f" of {first}{f' and {more} more' if more > 0 else ''}"
        text = f"Step times{'' if len(names) == len(labels) else of}: {said}"
        kept = wrap(text.replace(" %", "\xa0%"), TEXT_WIDTH, subsequent_indent="  ")
        lines += [line.replace("\xa0", " ") for line in kept]
    return lines


def _cluster(cluster: Summary) -> list[str]:
    """Return the figures of a cluster, then a line for each group where there are several."""
    lines = [f"{'Cluster':-^{WIDTH}}", f"Router: {cluster['router']}"]
    lines += _lines(cluster, CLUSTER) + _lines(cluster, INCIDENTS, zeros=False)
    if links := cluster.get("kv_transfer"):
        lines += [_line("KV caches moved (GB)", links["bytes"] / 1e9)]
        lines += [_line("Links of the producers busy (%)", 100 * links["link_utilization"])]
    groups = cluster["groups"]
    if len(groups) > 1:
        return lines + [_group(name, group) for name, group in groups.items()]
    ranks = next(iter(groups.values()))["data_parallel_size"]
    return [*lines, *([_line("Data-parallel ranks of a replica", ranks)] if ranks > 1 else [])]


def _group(name: str, group: Summary) -> str:
    """Return the figures of one group of a cluster in a line."""
    ranks, busy = group["data_parallel_size"], 100 * group["gpu_busy_fraction"]
    each = f" of {ranks} ranks" if ranks > 1 else ""
    what = f"requests, {group['output_throughput']:.0f} tok/s"
    if group.get("kv_role") == "kv_producer":
        what = "prompts"
    return (
        f"{name}: {group['replicas']}{each} on {group['gpus']} {group['gpu']}, busy {busy:.0f} %, "
        f"{group['completed']} {what}"
    )


LABEL, VALUE, RATIO = 32, 8, 7  # widths in a comparison
RUNS_PER_BLOCK = 2  # runs that a block of a comparison shows beside the first: 80 columns
ALIKE = 0.01  # relative: what is no further apart is not worth a row
MANY_RUNS = 9  # runs from which a comparison has a row for each, with the metrics that matter most

COLUMNS = (
    Metric("output_throughput", "output/tok per s", 1),
    Metric("request_goodput", "goodput/req per s", 1),
    Metric("mean_ttft_ms", "TTFT/mean, ms", -1),
    Metric("p99_ttft_ms", "TTFT/P99, ms", -1),
    Metric("mean_tpot_ms", "TPOT/mean, ms", -1),
    Metric("p99_itl_ms", "ITL/P99, ms", -1),
    Metric("mean_e2el_ms", "E2EL/mean, ms", -1),
    Metric("p99_e2el_ms", "E2EL/P99, ms", -1),
    Metric("mean_running", "batch/mean", 0),
    Metric("kv_cache_usage_mean", "KV used/%", 0, 100.0),
    Metric("preemptions", "pre-/empted", -1),
    Metric("jain_index", "Jain's/index", 1),
    Metric("slo_attainment", "SLO/kept, %", 1, 100.0),
    Metric("dollars_per_million_output_tokens", "$ per/M tokens", -1),
    Metric("joules_per_output_token", "J per/token", -1),
)
"""What many runs are compared by: their labels fill two lines of a head."""


def compare_table(
    labels: Sequence[str], summaries: Sequence[Summary], *, everything: bool = False
) -> str:
    """Put runs side by side, each value with its ratio to the first run's.

    `+` marks a value that is better than the first run's, `-` one that is worse, `n/a` what a run
    does not have. Rows of which no value is ALIKE from the first's are left out, unless
    `everything` is asked for; of a single run all are shown. Several blocks of runs come with the
    first in each, 80 columns wide; of MANY_RUNS runs or more each is one row.
    """
    if len(labels) >= MANY_RUNS:
        return row_per_run(labels, summaries, "All metrics of all runs are in comparison.csv.")
    metrics = metric_rows(summaries)
    told = metrics
    if len(labels) > 1 and not everything:
        told = [(metric, values) for metric, values in metrics if differ(values)]
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
    costs = cost_lines(labels, [summary["headway"] for summary in summaries])
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
    """Return a row for each run; `*` marks the best of a column, `n/a` what a run does not have."""
    columns = [("", "", *labels)]
    for column in COLUMNS:
        values = [metric_value(s, column.key) for s in summaries]
        known = [value for value in values if value is not None]
        if not any(known) or (column.better == 0 and len(set(known)) < 2):
            continue
        best = max(known, key=lambda value: value * column.better) if column.better else None
        cells = [
            "n/a" if value is None else _short(value * column.scale) + " *"[value == best]
            for value in values
        ]
        columns.append((*(word + " " for word in column.label.rsplit("/", 1)), *cells))
    text = align([*zip(*columns, strict=True)], heads=2)
    costs = cost_lines(labels, [summary["headway"] for summary in summaries])
    return "\n".join([f"{text}\n\n* best of its column. {note}", *costs])


def _short(value: float) -> str:
    """Write a number with about three digits that tell."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 1 else f"{value:.4g}"


def _amount(metric: Metric, value: float | None) -> str:
    return "n/a" if value is None else amount(value * metric.scale)


def align(rows: Sequence[Sequence[str]], heads: int = 1) -> str:
    """Put cells under each other, a line below the first row, or as many as there are heads.

    Without heads there is no line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    if heads:
        lines.insert(heads, "-" * (sum(widths) + 2 * len(widths) - 2))
    return "\n".join(lines)


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
