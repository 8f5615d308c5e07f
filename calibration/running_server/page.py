"""The page of a server's calibration: how well it predicts, by what, and what was measured."""

import io
from collections.abc import Collection, Iterable, Sequence
from html import escape
from math import isnan

import numpy as np

from calibration.plots import plot_run
from calibration.running_server.ask import ASSUMED, Server
from calibration.running_server.drive import DRIFT, Drive
from calibration.running_server.judge import METRICS, Compared, Outcome
from headway.report.html.page import frame
from simulator.scenario.scenario import Scenario

SHOWN = 4  # loads whose distributions are drawn


def calibration_page(
    drive: Drive,
    scenario: Scenario,
    given: Collection[str],
    outcome: Outcome,
    notes: Sequence[str],
) -> str:
    """Return the whole page; `given` are the scenario's keys that the user gave."""
    server, judged = drive.server, outcome.judged
    errors = "Held-out errors" if outcome.held_out else "Errors on the loads fitted to"
    sections = [
        ("What to know first", "".join(f"<p>{escape(note)}</p>" for note in notes)),
        (errors, _errors(judged, outcome)),
        ("Predicted against measured", "".join(map(_picture, judged[:SHOWN]))),
        ("What was measured", _measured(drive)),
        ("All loads", _table(_HEAD, map(_row, outcome.compared))),
        ("The server", _server(server, scenario, given, outcome)),
    ]
    body = "".join(f"<section><h2>{title}</h2>{text}</section>" for title, text in sections if text)
    name = scenario.name or "server"
    told = f"vLLM {server.version} at {server.url}, {scenario.model}"
    head = (
        "<header><button type=button id=theme>Theme</button>"
        f"<h1>Calibration of {escape(name)}</h1><p>{escape(told)}</p></header>"
    )
    return frame(name, f"{head}<main>{body}</main>", "")


_HEAD = (
    "load",
    "requests",
    *(word for name in METRICS for word in (f"{name.upper()}, ms", "predicted", "%")),
)


def _row(one: Compared) -> list[str]:
    cells = [one.load.name, f"{len(one.values['e2el'][0]):,}"]
    for name in METRICS:
        predicted, measured = (1e3 * float(np.mean(side)) if len(side) else np.nan
                               for side in one.values[name])  # fmt: skip
        error = one.error(name)
        cells += [
            _number(measured),
            _number(predicted),
            "" if isnan(error) else f"{error:+.1%}"[:-1],
        ]
    return cells


def _number(value: float) -> str:
    return "" if isnan(value) else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _errors(judged: Sequence[Compared], outcome: Outcome) -> str:
    """Tell the errors of loads that the fit had not seen, if there were any."""
    what = (
        "Loads that the fit behind these figures has not seen; the profile that is written was "
        "then fitted to all."
        if outcome.held_out
        else "No load was held out: these are errors of the loads fitted to, and say less."
    )
    way = (
        f"Steps of the server's own log were fitted; held out: {outcome.by_steps}."
        if outcome.by_steps is not None
        else "Latencies of requests were fitted: of steps is known what a simulation tells. "
        "With the step recorder on the server (--steps) the steps themselves are fitted."
    )
    return f"<p>{what}</p>{_table(_HEAD, map(_row, judged))}<p class=note>{escape(way)}</p>"


def _picture(one: Compared) -> str:
    latencies = {
        name: (1e3 * predicted, 1e3 * measured)
        for name, (predicted, measured) in one.values.items()
        if len(measured)
    }
    file = io.BytesIO()
    plot_run(one.load.name, latencies, {}, file, kind="svg")
    text = file.getvalue().decode()
    return f'<figure class="drawn">{text[text.index("<svg") :]}</figure>'


def _measured(drive: Drive) -> str:
    rows = []
    for one in drive.sent:
        load = one.load.workload
        sizes = [f"{values.min():,} to {values.max():,}" for values in (
            load.prompt_tokens, load.output_tokens)]  # fmt: skip
        clients = f"{load.max_concurrency} clients" if load.max_concurrency else "open loop"
        use = (
            "held out"
            if one.load.held_out
            else "not used"
            if one.load.name == "warm-up"
            else "fitted"
        )
        rows.append([one.load.name, clients, f"{len(load):,}", f"{one.rate:.3g}", *sizes, use])
    head = ("load", "sent by", "requests", "requests/s", "prompt tokens", "output tokens", "use")
    drift = drive.drift
    told = "The probe was not repeated: whether the machine has changed is not known."
    if drift is not None:
        word = "more" if abs(drift) > DRIFT else "not more"
        told = f"The probe's mean E2EL at the end differs by {drift:+.1%}, {word} than {DRIFT:.0%}."
    return f"{_table(head, rows)}<p class=note>{told} No prompt came twice.</p>"


def _server(server: Server, scenario: Scenario, given: Collection[str], outcome: Outcome) -> str:
    engine, set_ = scenario.engine.model_dump(), "--set or --scenario"
    rows = [[key, str(value), "the server"] for key, value in server.told.items()]
    rows += [
        ["model", str(scenario.model), set_ if "model" in given else "the server"],
        ["gpu.name", scenario.gpu.name, set_],
    ]
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        rows.append([f"engine.{key}", str(engine[key]), set_])
    for key in ASSUMED:
        source = set_ if f"engine.{key}" in given else "not given: vLLM's default"
        rows.append([f"engine.{key}", str(engine[key]), source])
    rows.append(["workload.client_latency", f"{outcome.fit.latency:.6f} s", "fitted"])
    return _table(("key", "value", "from"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        '<div class="scroll" tabindex="0"><table class="numbers">'
        f"<thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>"
    )
