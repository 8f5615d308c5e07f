"""What the report says in tables and words, and what the runs were given, as HTML."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import floor, isnan, log10
from typing import Any

from headway.figures.data import Run
from headway.report.metric_rows import BY_KEY, DOLLARS, metric_rows
from headway.report.text import load_lines, sensitivity_lines, slo_lines, step_errors
from headway.report.whole_runs import of_group, run_band
from headway.report.winner import winner_lines
from simulator.diagnosis.levels import BROKEN
from simulator.diagnosis.rules import NOTHING, told_findings
from simulator.results.request_table import DELIVERY, RETRY
from simulator.results.steady_state import trend_warning
from simulator.util.yaml_lines import dump_yaml

CARDS = (
    "output_throughput",
    "request_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
)
SHOWN = ("slo_attainment", DOLLARS.key, *CARDS)
"""What of several runs is not folded away."""
LATENCIES = (
    ("ttft", "TTFT"),
    ("tpot", "TPOT"),
    ("itl", "ITL"),
    ("e2el", "E2EL"),
    ("queue_time", "Queue time"),
)
NOT_LOOKED = "Nobody has looked: the run forgot its requests (--no-tables)."
STATISTICS = ("mean", "median", "p90", "p95", "p99")
TIME_LABELS = {
    RETRY: "earlier tries",
    "encoder_time": "encoders",
    "ec_transfer_time": "encoder outputs sent",
    "queue_time": "queue",
    "prefill_time": "prefill",
    "decode_queue_time": "waiting to decode",
    "transfer_time": "KV transfer",
    "decode_alone_time": "decode",
    "decode_slowed_time": "decode slowed by prompts",
    "preempted_time": "preempted",
    "recompute_time": "recompute",
    "swap_time": "swap copies",
    DELIVERY: "waiting for the batch",
}
GROUP_COLUMNS = {
    "busy, %": ("gpu_busy_fraction", 100.0),
    "batch": ("mean_running", 1),
    "KV used, %": ("kv_cache_usage_mean", 100.0),
    "requests": ("completed", 1),
    "output tok/s": ("output_throughput", 1),
    "replica-hours": ("replica_hours", 1),
    "$": ("dollars", 1),
}
"""Columns of a cluster's groups: the key of the summary, and what it is multiplied by."""
SQUEEZED = 5.0  # times the shortest bar: a longer one has a scale of its own
WIDE = 0.11  # of the page: a part of a bar that has room for its figure
MOST_TICKS = 6  # under a bar
MAX_CLIENTS = 12  # shown of each run


def number(value: object) -> str:
    """Write a number for people: four digits, thousands apart."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escape(str(value))
    if isnan(value):
        return "&ndash;"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Make a table of cells that are HTML; the first of each row names it."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><tr>{top}</tr>{body}</table></div>'
    )


def run_name(run: Run, index: int) -> str:
    """Name a run behind a dot of its colour."""
    return f'<span class="dot run-{index}"></span>{escape(run.label)}'


def verdict(runs: Sequence[Run]) -> str:
    """Say in a line what came out, and what to do; of several runs which is best, and why."""
    if len(runs) > 1:
        lines = winner_lines([run.label for run in runs], [run.summary for run in runs])
        first = [line for line in lines if line.startswith(("Winner", "No winner"))]
        rest = [line for line in lines if line not in first]
        return f"<p class=verdict>{escape(' '.join(first))}</p><p>{escape(' '.join(rest))}</p>"
    found = told_findings(runs[0].summary["headway"])
    broken = [pair for pair in found if pair[0].startswith(BROKEN)]
    text, knob = next(iter([*broken, *found]), (NOTHING, ""))
    knob = knob or next((knob for _, knob in found if knob), "")
    todo = f"<p>What to do: <span class=knob>{escape(knob)}</span></p>" if knob else ""
    return f"<p class=verdict>{escape(text)}</p>{todo}"


def headline(runs: Sequence[Run]) -> str:
    """Return cards for one run, and a folded table of all metrics with ratios to the first."""
    rows, short = [], []
    for metric, values in metric_rows([run.summary for run in runs]):
        if not all(isinstance(value, int | float) for value in values):
            continue
        cells = [number(value * metric.scale) for value in values]
        marks = ["", *(_ratio(value, values[0]) for value in values[1:])]
        rows.append([escape(metric.label), *map("".join, zip(cells, marks, strict=True))])
        short += [rows[-1]] if metric.key in SHOWN else []
    names = [run_name(run, k) for k, run in enumerate(runs)]
    whole = table(["", *names], rows, "numbers")
    if len(runs) > 1:
        return (
            f"{table(['', *names], short, 'numbers')}<p class=note>Ratios are to the first.</p>"
            f"<details><summary>All metrics</summary>{whole}</details>"
        )
    summary = runs[0].summary
    cards = "".join(
        f"<div class=card><b>{number(summary[key])}</b> {unit}<br><span>{name}</span></div>"
        for key in CARDS
        for name, unit in [BY_KEY[key].label.removesuffix(")").split(" (")]
        if key in summary and (summary["completed"] or not key.endswith("_ms"))
    )
    return f"<div class=cards>{cards}</div><details><summary>All metrics</summary>{whole}</details>"


def _ratio(value: float, first: float) -> str:
    if not first:
        return ""
    ratio = value / first
    text = f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.3g}"
    return f' <span class="ratio">{text}&times;</span>'


def per_run(runs: Sequence[Run], section: Callable[[Run], str]) -> str:
    """Return what each run has to show, if anything, under its name where there are several."""
    named = len(runs) > 1
    return "".join(
        (f"<h3>{run_name(run, k)}</h3>" if named else "") + text
        for k, run in enumerate(runs)
        if (text := section(run))
    )


def service_levels(run: Run) -> str:
    """Say which service levels the run keeps, and how many requests; empty without any."""
    return _two_columns(slo_lines(run.summary))


def sensitivity(run: Run) -> str:
    """Say how near the load is to saturation, and how far latencies move with the step times."""
    gauges = run.summary["headway"]
    told = "".join(f"<p class=note>{escape(line)}</p>" for line in load_lines(gauges))
    return _two_columns(sensitivity_lines(gauges)) + told


def _two_columns(lines: Sequence[tuple[str, str]]) -> str:
    """Return a table of labels and values; empty without any."""
    if not lines:
        return ""
    return table(["", ""], [[escape(label), escape(value)] for label, value in lines], "numbers")


def diagnosis(run: Run) -> str:
    """List what stands out, the advice, and warnings."""
    gauges = run.summary["headway"]
    items = [
        escape(text) + (f" <span class=knob>{escape(knob)}</span>" if knob else "")
        for text, knob in told_findings(gauges)
    ]
    items += [f"Warning: {escape(str(warning))}" for warning in gauges.get("warnings") or []]
    items += map(escape, filter(None, [trend_warning(gauges)]))
    lines = "".join(f"<li>{item}</li>" for item in items)
    nothing = NOTHING if gauges.get("diagnosis", ()) is not None else NOT_LOOKED
    return f"<ul>{lines}</ul>" if items else f"<p>{nothing}</p>"


def percentiles(runs: Sequence[Run]) -> str:
    """Return mean and percentiles of each latency, a row for each run."""
    rows = []
    for key, name in LATENCIES:
        for k, run in enumerate(runs):
            cells = [run.summary.get(f"{point}_{key}_ms") for point in STATISTICS]
            if None not in cells and run.summary["completed"]:
                label = f"{name} {run_name(run, k)}" if len(runs) > 1 else name
                rows.append([label, *map(number, cells)])
    return table(["ms", *(point.capitalize() for point in STATISTICS)], rows, "numbers")


def time_parts(runs: Sequence[Run]) -> str:
    """Draw where the time of the mean request went, and of the slowest hundredth, in seconds."""
    found: dict[str, list[tuple[str, dict[str, float]]]] = {"mean of all": [], "slowest": []}
    for k, run in enumerate(runs):
        done = run.requests[run.requests["prefill_time"].notna()]
        if not len(done):
            continue
        slow = done.nlargest(max(len(done) // 100, 1), "e2el")
        told = f"slowest {len(slow):,} of {len(done):,}" + " that were drawn" * (run.each > 1)
        for kind, what, part in (("mean of all", "mean of all", done), ("slowest", told, slow)):
            title = f"{run_name(run, k)} &ndash; {what}" if len(runs) > 1 else what
            means = {name: float(part[name].mean()) for name in TIME_LABELS if name in part}
            found[kind].append((title, means))
    there = [name for name in TIME_LABELS if any(name in run.requests for run in runs)]
    keys = "".join(f'<span><i class="{name}"></i>{TIME_LABELS[name]}</span>' for name in there)
    bars = "".join(_bars(rows) for rows in found.values() if rows)
    rows = [
        [title, *(number(means.get(name, 0.0)) for name in there), number(sum(means.values()))]
        for group in found.values()
        for title, means in group
    ]
    whole = table(["s", *(TIME_LABELS[name] for name in there), "in all"], rows, "numbers")
    return (
        f"<div class=keys>{keys}</div>{bars}<details><summary>In figures</summary>{whole}</details>"
    )


def _bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Draw bars on one scale of seconds; one far longer than the shortest has its own."""
    wholes = [sum(means.values()) for _, means in rows]
    common = max(whole for whole in wholes if whole <= SQUEEZED * max(min(wholes), 1e-9))
    texts = []
    for (title, means), whole in zip(rows, wholes, strict=True):
        own = whole > common
        times = f"{whole / common:,.0f} times as long" if own and common else ""
        note = f" <span class=own>(own scale: {times})</span>" if own else ""
        texts.append(f"<p class=bar-title>{title}: {number(whole)} s{note}</p>")
        texts.append(_bar(means, whole if own else common))
        if own:
            texts.append(_scale(whole))
    return "".join(texts) + ("" if wholes[-1] > common else _scale(common))


def _bar(means: Mapping[str, float], full: float) -> str:
    """Draw a bar of parts on a scale of `full` seconds; wide ones have their figure on them."""
    pieces = []
    for name, value in means.items():
        if value <= 0:
            continue
        share = value / (full or 1.0)
        figure = f"<b>{number(value)}</b>" if share > WIDE else ""
        title = f"{TIME_LABELS[name]}: {number(value)} s"
        style = f"width:{100 * share:.3f}%"
        pieces.append(f'<i class="{name}" style="{style}" title="{title}">{figure}</i>')
    return f"<div class=bar>{''.join(pieces)}</div>"


def _scale(full: float) -> str:
    """Draw the ticks under bars of `full` seconds at most."""
    step = 10.0 ** floor(log10(full)) if full > 0 else 1.0
    step = next(step * f for f in (0.1, 0.2, 0.5, 1.0, 2.0) if full / (step * f) <= MOST_TICKS)
    marks = [tick * step for tick in range(int(full / step) + 1)] if full > 0 else [0.0]
    ticks = "".join(
        f'<span style="left:{100 * mark / (full or 1.0):.3f}%">{number(mark)} s</span>'
        for mark in marks
    )
    return f'<div class=scale aria-hidden="true">{ticks}</div>'


def groups(run: Run) -> str:
    """Compare the groups of a cluster; empty where there are not several."""
    if len(run.groups) < 2:
        return ""
    rows = [
        [
            escape(name),
            number(group.get("replicas")),
            number(group.get("gpus")),
            escape(str(group.get("gpu"))),
            *(number(_scaled(group.get(key), scale)) for key, scale in GROUP_COLUMNS.values()),
        ]
        for name, group in run.groups.items()
    ]
    return table(["", "replicas", "GPUs", "", *GROUP_COLUMNS], rows, "numbers")


def _scaled(value: object, scale: float) -> object:
    return value * scale if isinstance(value, int | float) else value or "-"


def clients(run: Run) -> str:
    """Compare what the clients felt; empty where there are not several."""
    parts = run.requests.groupby("client", observed=True) if "client" in run.requests else []
    if len(parts) < 2:
        return ""
    index, share = (run.summary["headway"].get(k) for k in ("jain_index", "contended_share"))
    evenly = ""
    if isinstance(index, int | float) and isinstance(share, int | float):
        evenly = f" While they compete ({share:.0%} of the time) Jain's index of service is "
        evenly += f"{index:.3f}."
    found = sorted(parts, key=lambda part: -len(part[1]))
    rows = [
        [
            escape(str(name)),
            number(round(run.each * len(part))),
            number(round(run.each * int(part["output_tokens"].sum()))),
            *(number(float(part[key].mean() * 1e3)) for key in ("queue_time", "ttft", "e2el")),
            number(float(part["ttft"].quantile(0.99) * 1e3)),
        ]
        for name, part in found[:MAX_CLIENTS]
    ]
    means = [float(part["ttft"].mean()) for _, part in found]
    means = [mean for mean in means if mean > 0]  # NaN: nobody got a token
    low, high = min(means, default=0.0), max(means, default=0.0)
    spread = f" The highest mean TTFT is {high / low:.3g} times the lowest." if means else ""
    head = ["", "requests", "tokens out", "mean queue", "mean TTFT", "mean E2EL", "P99 TTFT"]
    shown = f"{min(len(found), MAX_CLIENTS)} of {len(found)} clients; times in ms."
    return table(head, rows, "numbers") + f"<p class=note>{shown}{spread}{evenly}</p>"


def scenarios(runs: Sequence[Run]) -> str:
    """Show in what the scenarios differ, and each of them."""
    parts = []
    if len(runs) > 1:
        flat = [dict(_flat(run.scenario)) for run in runs]
        keys = dict.fromkeys(key for one in flat for key in one)
        rows = [
            [escape(key), *(escape(str(one.get(key, ""))) for one in flat)]
            for key in keys
            if len({str(one.get(key, "")) for one in flat}) > 1
        ]
        names = [run_name(run, k) for k, run in enumerate(runs)]
        parts.append(table(["differs in", *names], rows) if rows else "<p>All the same.</p>")
    for k, run in enumerate(runs):
        text = dump_yaml(run.scenario)
        name = f" of {run_name(run, k)}" if len(runs) > 1 else ""
        parts.append(
            f"<details><summary>Scenario{name}</summary><pre>{escape(text)}</pre></details>"
        )
    return "".join(parts)


def _flat(values: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def profiles(runs: Sequence[Run]) -> str:
    """Show the cost models of the runs: what each was fitted to, how well, and from where.

    The groups of a cluster may have one each: then those that have it stand beside its name.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for k, run in enumerate(runs):
        for group, figures, cost in _costs(run):
            where = ([run_name(run, k)] if len(runs) > 1 else []) + ([group] if group else [])
            name = str(figures.get("profile"))
            band = run_band({**figures, "engines": of_group(run.summary["headway"], group)})
            known = "; ".join([*step_errors(figures), *([f"whole runs {band}"] if band else [])])
            found.setdefault(
                (name, f"<p>{escape(known)}</p>" * bool(known) + _cost(cost, name)), []
            ).append(": ".join(where))
    parts = []
    for (name, text), users in found.items():
        texts = f" <small>{', '.join(users)}</small>" if len(found) > 1 else ""
        parts.append(f"<h3>{escape(name)}{texts}</h3>{text}")
    return "".join(parts)


def _cost(cost: object, name: str) -> str:
    text = _profile_text(cost, name)
    if text is None:
        return f"<p>{escape(_pairs(cost))}</p>"
    return f"{_fit(text)}<details><summary>Profile</summary><pre>{escape(text)}</pre></details>"


def _costs(run: Run) -> Iterable[tuple[str, Mapping[str, Any], object]]:
    """Yield the group, what a summary says of it and its `cost`; of all replicas without groups."""
    whole = run.scenario.get("cost")
    cluster = run.scenario.get("cluster")
    kinds = cluster.get("groups") if isinstance(cluster, Mapping) else None
    if not isinstance(kinds, Mapping) or not run.groups:
        yield "", run.summary["headway"], whole
        return
    for name, group in run.groups.items():
        kind = kinds.get(name)
        kind = kind if isinstance(kind, Mapping) else {}
        cost = kind.get("cost") or (None if kind.get("gpu") else whole)
        yield escape(name) if kinds else "", group, cost


def _profile_text(cost: object, name: str) -> str | None:
    """Read the profile that a scenario names, or had for want of one, where it can be found."""
    from simulator.costs.profile import find_profile, shipped_profiles

    named = cost.get("profile") if isinstance(cost, Mapping) else None
    if cost is None and name in shipped_profiles():
        named = name
    try:
        return find_profile(str(named)).read_text("utf-8") if named else None
    except (OSError, ValueError):
        return None


def _fit(text: str) -> str:
    """Make a table of a profile's hardware, range and relative errors."""
    import yaml

    raw = yaml.safe_load(text)
    rows = []
    for key in ("model", "hardware", "engine", "overhead", "range", "fit"):
        value = raw.get(key)
        if value is not None:
            rows.append([key, escape(_pairs(value))])
    sources = [
        ", ".join(str(one[key]) for key in ("repository", "commit", "licence") if key in one)
        for one in raw.get("sources") or []
        if isinstance(one, Mapping)
    ]
    rows += [["source", escape(source)] for source in sources]
    return table(["", ""], rows, "words")


def _pairs(value: object) -> str:
    """Write keys with their values, one after the other."""
    pairs = list(_flat(value)) if isinstance(value, Mapping) else [("", value)]
    texts = [f"{key} {_value_text(inner)}".strip() for key, inner in pairs if inner is not None]
    return ", ".join(texts).replace("_", " ")


def _value_text(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(f"{one:,}" if isinstance(one, int) else str(one) for one in value)
    return str(value)
