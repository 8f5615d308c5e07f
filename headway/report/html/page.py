"""The report's file: tables, charts and everything that they need, without a network."""

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from headway.figures.data import Run, shown_until
from headway.figures.fleet import has_fleet, has_imbalance
from headway.figures.style import COLORS, DARK_COLORS, DARK_PHASES, PHASES, STATE_COLORS, ink
from headway.report.html import tables
from headway.report.html.charts import charts
from headway.report.text import costs_of
from simulator.util.version import __version__

ASSETS = Path(__file__).parent / "assets"

ZOOM = "Drag to zoom, double-click to see all."
OVER_TIME = (
    ("running", "Requests in the batch", "At most max_num_seqs."),
    ("waiting", "Requests waiting", "In the engine's queue."),
    ("kv", "KV blocks in use, %", "Of all blocks of the KV cache; within a leap an estimate."),
    ("tokens", "Output tokens per second", "Decoded tokens and first tokens."),
    ("itl", "Inter-token latency, ms", "Mean over tokens; dots: preemptions."),
    ("ttft", "Longest TTFT of requests sent then, ms", "Of requests that have got a token."),
    ("longest", "Longest step with decodes, ms", "What the unluckiest token waited for."),
)
FLEET = (
    ("replicas", "Replicas", "By state; triangles: scaling decisions; crosses: failures."),
    ("load", "Load, requests/s", "Offered, and served; shaded: outages."),
    ("queue", "Requests waiting at each replica", "Of replicas that serve then."),
    ("kv", "KV blocks in use at each replica, %", "Of replicas that serve then."),
    ("imbalance", "Imbalance", "Requests at the fullest replica, over the mean of its group."),
)
LATENCY = (("ttft", "TTFT, ms"), ("tpot", "TPOT, ms"), ("e2el", "E2EL, ms"))

Section = tuple[str, str]
"""A head and what stands below it, as HTML; nothing: the section is left out."""


def page(runs: Sequence[Run], *, name: str = "", above: Sequence[Section] = ()) -> str:
    """Return the whole page, of runs that may be none, with sections `above` theirs."""
    name = name or str(runs[0].summary["headway"].get("scenario") or runs[0].label)
    scripts = _scripts(runs)
    if above:
        scripts += f"<script>{read_asset('sort.js')}</script>"
    return frame(name, _body(runs, name, above), scripts)


def frame(name: str, body: str, scripts: str) -> str:
    """Return a whole page of a body and what runs in it, in the house's look, with both themes."""
    return f"""<!doctype html>
<html lang="en" data-theme="light">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(name)} - Headway</title>
<style>{read_asset("uPlot.min.css")}{palette()}{read_asset("report.css")}</style>
<script>{read_asset("theme.js")}</script>
</head>
<body>
{body}
{scripts}
<script>{read_asset("page.js")}</script>
</body>
</html>
"""


def _scripts(runs: Sequence[Run]) -> str:
    """Return the numbers of the charts, and what draws them."""
    if not runs:
        return ""
    data = json.dumps(charts(runs), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<script type="application/json" id="data">{data}</script>
<script>/*! uPlot, MIT licence, Copyright (c) Leon Sorokin */
{read_asset("uPlot.iife.min.js")}</script>
<script>{read_asset("report.js")}</script>"""


def palette() -> str:
    """Return the colours of runs, and of what happens to requests, as variables of both themes."""
    light, dark = [
        {f"run-{k}": hue for k, hue in enumerate(runs)}
        | phases
        | {f"{name}-ink": ink(hue) for name, hue in phases.items()}
        | STATE_COLORS
        for runs, phases in ((COLORS, PHASES), (DARK_COLORS, DARK_PHASES))
    ]
    return "".join(
        f":root{theme}{{{';'.join(f'--{name}:{hue}' for name, hue in hues.items())}}}"
        for theme, hues in (("", light), ("[data-theme=dark]", dark))
    )


def read_asset(name: str) -> str:
    """Return a file of the page, fit to stand in a script."""
    return (ASSETS / name).read_text("utf-8").replace("</script", "<\\/script")


def _body(runs: Sequence[Run], name: str, above: Sequence[Section]) -> str:
    """Return the head with links to all sections, the sections above and those of the runs."""
    legend = "".join(f"<span>{tables.run_name(run, k)}</span>" for k, run in enumerate(runs))
    keys = f"<div class='keys runs'>{legend}</div>" if len(runs) > 1 else ""
    links, sections = "", ""
    for title, text in [*above, *(_sections(runs) if runs else ())]:
        if text:
            anchor = re.sub(r"\W+", "-", title.lower()).strip("-")
            links += f'<a href="#{anchor}">{title}</a>'
            sections += f'<section><h2 id="{anchor}">{title}</h2>{text}</section>'
    return (
        "<header><button type=button id=theme>Theme</button>"
        f"<h1>{escape(name)}</h1><p>{_subtitle(runs)}</p>{keys}"
        f"<nav aria-label=Contents>{links}</nav></header>"
        f"<main>{sections}</main>"
        f"<footer>Headway {__version__}</footer>"
    )


def _sections(runs: Sequence[Run]) -> Sequence[Section]:
    """Return the sections of runs in order; some are empty."""
    return (
        ("Verdict", _verdict(runs)),
        ("Headline", tables.headline(runs)),
        ("Service levels", tables.per_run(runs, tables.service_levels)),
        ("Findings", tables.per_run(runs, tables.diagnosis)),
        ("Latency", _latency(runs)),
        ("Sensitivity", tables.per_run(runs, tables.sensitivity)),
        ("Where the time of a request went", tables.time_parts(runs)),
        ("Requests in the batch", _seats(runs)),
        ("Over time", _over_time(runs)),
        ("Fleet", tables.per_run(runs, lambda run: _fleet(run, runs.index(run)))),
        ("Groups of the cluster", tables.per_run(runs, tables.groups)),
        ("Clients", tables.per_run(runs, tables.clients)),
        ("Scenario", tables.scenarios(runs)),
        ("Cost model", tables.profiles(runs)),
    )


def _model(run: Run) -> str:
    model = run.scenario.get("model")
    return str(model["name"] if isinstance(model, dict) else model)


def _subtitle(runs: Sequence[Run]) -> str:
    """Say what was run on what, as far as it is the same in all runs."""
    facts = (
        [f"{run.count:,} requests" for run in runs],
        [f"drawn of {len(run.requests):,} of them" * (run.each > 1) for run in runs],
        [_model(run) for run in runs],
        [_gpu(run) for run in runs],
        [run.policy for run in runs],
        [_scheduler(run) for run in runs],
        [f"cost {', '.join(costs_of(run.summary['headway']))}" for run in runs],
        [f"seed {run.summary['headway'].get('seed')}" for run in runs],
    )
    told = (values[0] for values in facts if len(set(values)) == 1)
    return escape(" · ".join(filter(None, told)))


def _scheduler(run: Run) -> str:
    engines = run.summary["headway"].get("engines") or ()  # not in earlier versions' files
    return ", ".join(dict.fromkeys(one["follows"] for one in engines))


def _gpu(run: Run) -> str:
    gpu = run.scenario.get("gpu")
    if not isinstance(gpu, dict):
        return str(gpu)
    if len(run.groups) > 1:
        told = (
            f"{name} {group.get('gpus')} {group.get('gpu')}" for name, group in run.groups.items()
        )
        return ", ".join(told)
    replicas = run.summary["headway"].get("replicas", 1)
    for group in run.groups.values():  # of one: servers, not their ranks
        replicas = group.get("replicas")
    several = f"{replicas} replicas of " if replicas != 1 else ""
    return f"{several}{gpu.get('count')} x {gpu.get('name')}"


def _figure(kind: str, key: str, title: str, note: str) -> str:
    return (
        f"<figure><figcaption><b>{title}</b> <span>{note}</span> "
        f'<button type=button class=csv title="The numbers of this chart">CSV</button></figcaption>'
        f'<div class="chart" data-kind="{kind}" data-key="{key}"></div></figure>'
    )


def _seats(runs: Sequence[Run]) -> str:
    """Leave room for each run's picture of its seats."""
    figures = [_figure("seats", str(k), tables.run_name(run, k), "") for k, run in enumerate(runs)]
    rows = (
        "A row is a seat, a bar a request from its admission to its last token, its prefill "
        f"darker; what is empty is idle. {ZOOM} Point at a bar to see which request it is."
    )
    counts = (
        "How many seats compute prompts (prefill), decode, or are kept for requests that are "
        f"done; what is empty is idle. {ZOOM}"
    )
    return f"<p class='note rows'>{rows}</p><p class='note counts'>{counts}</p>{''.join(figures)}"


def _over_time(runs: Sequence[Run]) -> str:
    figures = "".join(_figure("time", *chart) for chart in OVER_TIME)
    cut = shown_until(runs)[1]
    told = f" Not all of the time is in view, {escape(cut)}: double-click shows it." if cut else ""
    return f"<p class=note>{ZOOM} All charts follow.{told}</p><div class=grid>{figures}</div>"


def _fleet(run: Run, index: int) -> str:
    """Leave room for the charts of a cluster, if the run has one."""
    if not has_fleet(run):
        return ""
    shown = FLEET if has_imbalance(run) else FLEET[:-1]
    figures = "".join(_figure(f"fleet-{index}", *chart) for chart in shown)
    return f"<div class=grid>{figures}</div>"


def _verdict(runs: Sequence[Run]) -> str:
    """Say what came out and what to do, beside the latency whose bound the fewest keep."""
    own = [run.summary["headway"] for run in runs]
    shown = min(LATENCY, key=lambda x: min(one.get(f"slo_attainment_{x[0]}", 2.0) for one in own))
    return f"{tables.verdict(runs)}{_figure('cdf', *shown, '% of requests')}"


def _latency(runs: Sequence[Run]) -> str:
    figures = "".join(_figure("cdf", key, title, "% of requests") for key, title in LATENCY)
    whole = tables.percentiles(runs)
    return (
        f'<div class="grid three">{figures}</div>'
        f"<details><summary>In figures</summary>{whole}</details>"
    )
