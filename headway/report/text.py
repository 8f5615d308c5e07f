"""Summaries as text.

Of one run the block that `vllm bench serve` prints, then what the engine did. `comparison.py` has
several runs side by side.
"""

from collections.abc import Mapping, Sequence
from textwrap import wrap

from headway.report.metric_rows import (
    CLUSTER,
    COPIES,
    COUNTS,
    GAUGES,
    HEAD,
    INCIDENTS,
    PAID_LABELS,
    PRICE,
    SESSION_LABELS,
    Metric,
    Summary,
    part_throughput,
)
from headway.report.whole_runs import of_group, run_band
from simulator.costs.noise import REGIMES
from simulator.diagnosis.rules import diagnosis_lines
from simulator.results.fairness import parts_of
from simulator.results.service_levels import SHARES, Judged, Slo
from simulator.results.steady_state import trend_warning
from simulator.results.token_times import lacks_gaps
from simulator.util.errors import printable
from simulator.util.files import read_table

WIDTH = 50  # of vLLM's block
TEXT_WIDTH = 80  # of what is wrapped, and of a comparison of three runs
NAME_WIDTH = 14  # of a client
BUSY = 0.95  # of the time: not yet full, though it looks like it
NEAR = 0.9  # share of saturation from which on an error of step times is told as a warning
SECTIONS = read_table(__file__, "sections.csv")
"""Key, name and title; all but the last six as vLLM has them."""
ACCEPTANCE = "Acceptance typical: {mean:.2f}, published are {least:.2f} to {most:.2f}: {where}"
PRINTED = ("mean", "median", "p99")  # vLLM's default; the summary has more


def run_table(summary: Summary) -> str:
    """Return the report of one run: vLLM bench's labels and number formats, then the gauges.

    Warnings follow, such as of steps outside the fitted range, and whether it was no steady state.
    """
    gauges = summary["headway"]
    lines = [
        f"{' Serving Benchmark Result ':=^{WIDTH}}",
        *engine_lines(gauges),
        *_lines(summary, HEAD),
    ]
    for section in SECTIONS:
        key, name = section["key"], section["name"]
        if f"mean_{key}_ms" in summary:
            lines.append(f"{section['title']:-^{WIDTH}}")
            for word in PRINTED:
                value = summary[f"{word}_{key}_ms"]
                none = not summary["completed"] or lacks_gaps(summary, f"_{key}_")
                lines.append(_line(f"{word.capitalize()} {name} (ms)", "n/a" if none else value))
        if key == "itl" and summary["completed"] and not lacks_gaps(summary, "_itl_"):
            lines.append(_line("Std ITL (ms)", summary["std_itl_ms"]))
            least, greatest = gauges["min_itl_ms"], gauges["max_itl_ms"]
            lines.append(_line("Range of ITL (ms)", f"{least:.2f} to {greatest:.2f}"))
    if service := slo_lines(summary):
        lines += [f"{'Service Levels':-^{WIDTH}}", *(_line(*pair) for pair in service)]
    for block, parts in parts_of(summary).items():
        title = "Clients" if block == "per_client" else "Priorities"
        lines += [f"{title:-^{WIDTH}}", *_parts(parts, gauges.get("clients"), summary)]
    lines += [f"{'Engine':-^{WIDTH}}", *_engine(summary)]
    if sensitivity := sensitivity_lines(gauges):
        lines += [f"{'Sensitivity':-^{WIDTH}}", *(_line(*pair) for pair in sensitivity)]
    if gauges.get("diagnosis") is not None:
        lines += [f"{'Diagnosis':-^{WIDTH}}", *diagnosis_lines(gauges)]
    lines.append("=" * WIDTH)
    if gauges.get("interrupted"):
        lines.append("Interrupted: the figures end there.")
    lines += [f"Warning: {text}" for text in gauges.get("warnings", ())]
    lines += load_lines(gauges)
    lines += [
        f"On a cliff: 1 % of step time moves {metric_name(key).replace('M', 'm')} "
        f"by {one['elasticity']:.1f} %; near saturation a small error of the profile is a large one"
        for key, one in (gauges.get("sensitivity") or {}).items()
        if one["cliff"]
    ]
    return "\n".join([*lines, *filter(None, [trend_warning(gauges)])])


def _parts(parts: Summary, count: object, summary: Summary) -> list[str]:
    """Tabulate what each client, or each priority, felt and got; times in ms."""
    bounds = any("slo_attainment" in one for one in parts.values())
    columns = (
        ("requests", "requests", 1),
        ("mean_ttft_ms", "TTFT", 1),
        ("p99_ttft_ms", "P99", 1),
        ("mean_tpot_ms", "TPOT", 1),
        ("mean_e2el_ms", "E2EL", 1),
        ("p99_e2el_ms", "P99", 1),
        ("output_throughput", "tok/s", 1),
        *([("slo_attainment", "SLO, %", 100)] if bounds else []),
    )
    rows = [("mean, ms", *(label for _, label, _ in columns))]
    for name, figures in parts.items():
        one = {**figures, "output_throughput": part_throughput(figures, summary)}
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


def three_digits(value: float) -> str:
    """Write a number with about three digits that tell."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 1 else f"{value:.4g}"


def sensitivity_lines(gauges: Summary) -> list[tuple[str, str]]:
    """Say how far metrics move for 1 % of step time, and by what is unsure of the cost model."""
    lines = []
    if load := gauges.get("load"):
        moves = load["e2el_elasticity"]
        lines.append(("Load (% of saturation throughput)", f"{100 * load['share']:.1f}"))
        moved = "no bound" if moves is None else f"+{moves:.2f}"
        lines.append(("Theory: E2EL with 1 % longer steps (%)", moved))
    for key, one in (gauges.get("sensitivity") or {}).items():
        name = metric_name(key)
        moved = moved_by(
            one["elasticity"], one.get("elasticity_95"), resolved=one.get("resolved", True)
        )
        lines.append((f"{name} if steps are 1 % longer (%)", moved))
        shown = "not known"
        if one["interval_95"] is not None:
            ends = " to ".join(three_digits(end) for end in one["interval_95"])
            shown = f"{ends}: {shares_line(one.get('shares') or {})}"
        lines.append((f"{name}, 95 % (ms)", shown))
    return lines


def metric_name(key: str) -> str:
    """Write a metric's key as people say it: Mean TTFT, P99 TTFT."""
    statistic, name = key.removesuffix("_ms").split("_")
    return f"{statistic.capitalize()} {name.upper()}"


def shares_line(shares: Mapping[str, float]) -> str:
    """Say what an interval is made of, the largest cause first, without those of no weight."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.01)


def near_saturation(load: Summary | None) -> bool:
    """Return whether a load is so near to saturation that errors of step times are multiplied."""
    return load is not None and load["share"] >= NEAR


def load_lines(gauges: Summary) -> list[str]:
    """Warn of a load near saturation, or say why the GPU is busy below it."""
    if not (load := gauges.get("load")):
        return []
    if near_saturation(load):
        lost = any(gauges.get("cluster", {}).get(name) for name in ("shed", "timed_out"))
        return [f"Load: {load_line(load, lost=lost)}"]
    busy = gauges["gpu_busy_fraction"]
    share = f"{load['share']:.0%} of the saturation throughput on average, the GPU {busy:.0%} busy"
    return [f"Load: {share}: fuller steps serve more, bursts may exceed it."] * (busy >= BUSY)


def load_line(load: Summary, *, lost: bool = False) -> str:
    """Say where a load sits, and what 1 % of step time does to it there.

    `lost`: what is too much is refused or given up, and makes no queue.
    """
    elasticity = load["e2el_elasticity"]
    moves = "is of served requests, the rest is lost" if lost else "grows with the run's length"
    if elasticity is not None:
        moves = f"moves by about {elasticity:.1f} % for 1 % of step time"
    return (
        f"sits at {load['share']:.0%} of the saturation throughput "
        f"({three_digits(load['saturation_throughput'])} requests/s): mean E2EL {moves}"
    )


def moved_by(elasticity: float, ends: Sequence[float] | None, *, resolved: bool) -> str:
    """Say by how much, in %, a metric moves for 1 % of step time, and what of it is chance."""
    chance = "" if ends is None else f"±{(ends[1] - ends[0]) / 2:.2f}"
    if not resolved:
        return f"below resolution ({chance})" if chance else "may be chance"
    return f"{elasticity:+.2f} {chance}".strip()


def _line(label: str, value: object) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<40} {text:<10}".rstrip()


def served_of(summary: Summary, slo: Slo) -> str:
    """Say of a latency by how many requests it is judged, where that is not all; else ""."""
    served = summary["completed"]
    ended = served + summary.get("failed", 0)  # not in the files of others
    told = slo.metric.endswith("_ms") and served < ended
    return f", by the {served:,} of {ended:,} served" if told else ""


def slo_lines(summary: Summary) -> list[tuple[str, str]]:
    """Say of each service level whether it is kept, and how many requests keep their bounds.

    A latency is that of the requests that were served: of how many, where that is not all.
    """
    gauges = summary["headway"]
    found = []
    for one in gauges.get("slo") or ():
        judged = Judged.of(one)
        value = judged.slo.words(one["value"], three_digits) if judged.served else "n/a"
        unit = " ms" if judged.served and judged.slo.metric.endswith("_ms") else ""
        value = "" if judged.served and judged.slo.name in SHARES else f"{value}{unit}: "
        found.append((one["bound"], f"{value}{judged}{served_of(summary, judged.slo)}"))
    names = [name for name in ("ttft", "tpot", "e2el") if f"slo_{name}_ms" in gauges]
    for name in names:
        if (kept := gauges.get(f"slo_attainment_{name}")) is not None:
            bound = gauges[f"slo_{name}_ms"]  # None: of each class
            told = " in its bounds" if bound is None else f"<={bound:g} ms"
            found.append((f"Requests of {name.upper()}{told} (%)", f"{100 * kept:.2f}"))
    if len(names) > 1 and gauges.get("slo_attainment") is not None:
        found.append(("Requests that keep all (%)", f"{100 * gauges['slo_attainment']:.2f}"))
    return found


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
        texts = []
        for word, keys in (
            (f"Defaults on {one['gpu']}", usual),
            ("Set", one["set"]),
            ("The engine's default, not simulated here", one.get("not_simulated")),
        ):
            if keys:
                texts.append(f"{word}: {', '.join(_said(*pair) for pair in keys.items())}")
        if known := one.get("acceptance"):
            texts.append(ACCEPTANCE.format(**known))
        for text in texts:
            lines += wrap(text, TEXT_WIDTH, initial_indent="  ", subsequent_indent="    ")
    return lines


def _said(key: str, value: object) -> str:
    """Write a key of an engine with its value, a flag as on or off."""
    if isinstance(value, bool):
        return f"{key} {'on' if value else 'off'}"
    if isinstance(value, Mapping):
        value = "{" + ", ".join(f"{k}: {v}" for k, v in value.items() if v is not None) + "}"
    return f"{key} {value}"


def _engine(summary: Summary) -> list[str]:
    """Return our own block; what is unknown (null) is left out."""
    gauges = summary["headway"]
    lines = [*cost_lines([""], [cost_gauges(summary)]), _line("Steps", gauges["steps"])]
    lines += _lines(gauges, (*GAUGES, *PRICE))
    lines += _lines(gauges, (*COPIES, *COUNTS), zeros=False)
    return lines + (_cluster(gauges["cluster"]) if "cluster" in gauges else [])


def _lines(values: Summary, metrics: Sequence[Metric], *, zeros: bool = True) -> list[str]:
    """Return a line for each metric that is known; without `zeros`, that is not 0."""
    labels = PAID_LABELS if "paid_times" in values.get("cluster", values) else {}
    if values.get("request_rate_unit") == "sessions/s":
        labels = SESSION_LABELS
    return [
        _line(labels.get(metric.key, metric.label), metric.scale * value)
        for metric in metrics
        if (value := values.get(metric.key)) or (zeros and value is not None)
        if value != "inf"
    ]


def costs_of(gauges: Summary) -> list[str]:
    """Name the cost profiles and how far off their steps may be; groups may have several."""
    told = ("; ".join([str(one["profile"]), *step_errors(one)]) for one in _costs_by_group(gauges))
    return [*dict.fromkeys(told)]


def _costs_by_group(gauges: Summary) -> list[Summary]:
    """Return what is said of the cost of each group, or of the whole."""
    cluster = gauges.get("cluster")
    groups = cluster.get("groups") if isinstance(cluster, Mapping) else None
    found = groups if isinstance(groups, Mapping) else {"": gauges}
    whole = {key: gauges[key] for key in ("mean_prompt", "host_share") if key in gauges}
    return [
        {**one, **whole, "engines": of_group(gauges, name)}
        for name, one in found.items()
        if isinstance(one, Mapping) and one.get("profile")
    ]


def cost_gauges(summary: Summary) -> Summary:
    """Return the gauges of a run with the mean of the prompt tokens that a request computes."""
    gauges = summary["headway"]
    return {**gauges, "mean_prompt": gauges.get("prefill_tokens", 0) / (summary["completed"] or 1)}


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
    texts = []
    bands = [band for one in gauges for each in _costs_by_group(one) if (band := run_band(each))]
    for said, names in found.items():
        more = len(names) - COSTS_NAMED
        first = printable(", ".join(names[:COSTS_NAMED]))
        of = f" of {first}{f' and {more} more' if more > 0 else ''}"
        texts.append(f"Step times{'' if len(names) == len(labels) else of}: {said}")
    texts += [f"Whole runs: {band}" for band in dict.fromkeys(bands)]
    return [
        line.replace("\xa0", " ")
        for text in texts
        for line in wrap(text.replace(" %", "\xa0%"), TEXT_WIDTH, subsequent_indent="  ")
    ]


LINKS = (("kv_transfer", "KV caches", "producers"), ("ec_transfer", "Encoder outputs", "encoders"))


def _cluster(cluster: Summary) -> list[str]:
    """Return the figures of a cluster, then a line for each group where there are several."""
    lines = [f"{'Cluster':-^{WIDTH}}", f"Router: {cluster['router']}"]
    lines += _lines(cluster, CLUSTER) + _lines(cluster, INCIDENTS, zeros=False)
    for key, what, whose in LINKS:
        if links := cluster.get(key):
            lines += [_line(f"{what} moved (GB)", links["bytes"] / 1e9)]
            busy = 100 * links["link_utilization"]
            lines += [_line(f"Links of the {whose} busy (%)", busy)]
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
    served = f", {group['completed']} {what}" if group.get("ec_role") is None else ""
    return (
        f"{name}: {group['replicas']}{each} on {group['gpus']} {group['gpu']}, busy {busy:.0f} %"
        f"{served}"
    )


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
