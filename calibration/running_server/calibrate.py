"""`headway calibrate --server`: ask a running vLLM, send it loads, fit its model, write it down."""

import json
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from calibration.profile_yaml import rounded, scenario_profile
from calibration.running_server.ask import (
    ASSUMED,
    UNTOLD,
    ask,
    check_calm,
    given_keys,
    scenario_of,
)
from calibration.running_server.drive import DRIFT, Drive, Sent
from calibration.running_server.judge import METRICS, Outcome, fit_sent
from calibration.running_server.page import calibration_page
from headway.twin.measured_run import write_measured
from simulator.core.engine_config import EngineConfig
from simulator.models.load import load_model
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.files import write_together

PROFILE, SCENARIO, PAGE, LOADS = "profile.yaml", "scenario.yaml", "calibration.html", "loads"
MOST_MINUTES = 24 * 60
KEPT = ("name", "gpu", "engine", "host")
"""Blocks of the scenario that stand for the server, beside model and cost."""


def calibrate_server(
    url: str,
    out: Path,
    *,
    minutes: float = 5.0,
    max_rate: float = inf,
    steps: Path | None = None,
    scenario: Path | None = None,
    overrides: Sequence[str] = (),
    echo: Callable[[str], None] = print,
) -> int:
    """Calibrate a server; return the exit code: 0, 2 where its figures are not to be trusted, 130.

    Whatever ends it half-way, each load that was sent is in `out`/loads; where they are enough, the
    model is fitted to them. Raises HeadwayError where there is nothing to measure or to fit.
    """
    _check(minutes, max_rate, steps, out)
    server = ask(url)
    loaded = scenario_of(server, scenario, overrides)
    check_calm(server.url)
    echo(f"vLLM {server.version}, {server.model}")
    given = given_keys(scenario, overrides)
    untold = [key for key in ASSUMED if f"engine.{key}" not in given]
    echo(f"it does not tell, and vLLM's default is taken unless set: {', '.join(untold)}")
    drive = Drive(
        server,
        vocab_size=load_model(loaded.known_model, loaded.folder).vocab_size,
        max_num_seqs=loaded.engine.max_num_seqs,
        seconds=60.0 * minutes,
        max_rate=max_rate,
        steps=steps,
        echo=echo,
        kept=lambda sent: _write_load(out, len(drive.sent), sent),
    )
    drive.run()
    if not drive.sent:
        raise HeadwayError(
            f"--server: {server.url}: {drive.fault or 'stopped before a load ended'}"
        )
    faults = _faults(drive, loaded.engine.max_num_seqs)
    if drive.stopped:
        echo("stopped: what was measured so far is fitted (Ctrl-C again: it is only kept)")
    try:
        outcome = fit_sent(loaded, drive.sent, steps)
    except HeadwayError as error:
        kept = f"what was measured is in {out / LOADS}"
        raise HeadwayError([*faults, f"{error}; {kept}"]) from None
    faults += outcome.doubts
    paths = write_together(out, _files(drive, loaded, given, outcome, faults))
    for line in _report(outcome):
        echo(line)
    for note in outcome.notes:
        warnings.warn(f"--server: {note}", HeadwayWarning, stacklevel=2)
    echo(f"written to {out}: {', '.join(path.name for path in paths)}, {LOADS}/")
    if drive.stopped:
        return 130
    if faults:
        raise HeadwayError(f"--server: {server.url}: {one}; see {out / PAGE}" for one in faults)
    return 0


def _check(minutes: float, max_rate: float, steps: Path | None, out: Path) -> None:
    if not 0 < minutes <= MOST_MINUTES:
        raise HeadwayError(f"--minutes {minutes:g}: must be more than 0 and at most {MOST_MINUTES}")
    if not max_rate > 0:
        raise HeadwayError(f"--max-rate {max_rate:g}: must be more than 0 requests/s")
    if steps is not None and not steps.is_file():
        raise HeadwayError(f"--steps {steps}: no such file; the server's recorder writes it")
    if (out / LOADS).exists():
        raise HeadwayError(f"--out {out}: has a calibration's loads already; give another folder")


def _write_load(out: Path, number: int, sent: Sent) -> None:
    folder = out / LOADS / f"{number:02}-{sent.load.name}"
    write_measured(sent.replayed, sent.load.workload, folder)


def _faults(drive: Drive, max_num_seqs: int) -> list[str]:
    """Say why the figures are not to be trusted."""
    faults = [drive.fault] if drive.fault else []
    if (seats := drive.seats) is not None and seats < max_num_seqs:
        faults.append(
            f"never more than {seats} requests ran while others waited: is engine.max_num_seqs "
            f"{seats}, not {max_num_seqs}?"
        )
    drift = drive.drift
    if drift is not None and abs(drift) > DRIFT:
        faults.append(
            f"it drifts: the same probe took {drift:+.1%} at the end (more than {DRIFT:.0%}): the "
            "machine has changed meanwhile, or others use it"
        )
    return faults


def _files(
    drive: Drive,
    scenario: Scenario,
    given: Collection[str],
    outcome: Outcome,
    faults: Sequence[str],
) -> dict[str, bytes]:
    """Return the scenario, the profile, the page and the figures behind it."""
    import yaml

    fit, server, notes = outcome.fit, drive.server, [*faults, *outcome.notes]
    errors = {
        one.load.name: {name: rounded(one.error(name)) for name in METRICS}
        for one in outcome.judged
    }
    about = {
        "to": "requests" if outcome.by_steps is None else "steps",
        "held_out_loads" if outcome.held_out else "fitted_loads": errors,
        **({} if outcome.by_steps is None else {"held_out_steps": asdict(outcome.by_steps)}),
    }
    count = sum(len(one.load.ttft) for one in drive.sent)
    sources = [f"vLLM {server.version} at {server.url}, {count} requests"]
    half = [f"it was stopped half-way: {len(drive.sent)} loads were sent"] if drive.stopped else []
    notes = [*half, *notes]
    if doubts := [*half, *faults]:
        about["do_not_trust"] = "; ".join(doubts)
    profile = (
        "# Written by `headway calibrate --server`; errors: predicted / measured - 1 of means.\n"
    )
    profile += scenario_profile(scenario, fit.cost, fit.residuals, rounded_tree(about), sources)
    text = yaml.safe_dump(_scenario(scenario, drive, fit.latency), sort_keys=False, width=98)
    head = "# A server as it runs, by `headway calibrate --server`; its workload is an example.\n"
    head += "".join(f"# Do not trust its times: {fault}.\n" for fault in doubts)
    figures = {
        "server": {"url": server.url, "version": server.version, "model": server.model},
        "knee_requests_per_s": rounded(drive.knee) if drive.knee else None,
        "drift": None if drive.drift is None else rounded(drive.drift),
        "notes": notes,
        "client_latency_s": rounded(fit.latency),
        **rounded_tree(about),
    }
    page = calibration_page(drive, scenario, given, outcome, notes)
    return {
        SCENARIO: (head + text).encode(),
        PROFILE: profile.encode(),
        "calibration.json": (json.dumps(figures, indent=2) + "\n").encode(),
        PAGE: page.encode(),
    }


def rounded_tree(value: Any) -> Any:
    """Round the numbers within mappings to five digits; None for those that are not finite."""
    if isinstance(value, dict):
        return {key: rounded_tree(inner) for key, inner in value.items()}
    if isinstance(value, float) and not -inf < value < inf:
        return None
    return rounded(value)


def _scenario(scenario: Scenario, drive: Drive, latency: float) -> dict[str, Any]:
    """Return the scenario as it is written: the user's own keys, the server's and the profile."""
    raw = scenario.model_dump(exclude_unset=True)
    kept: dict[str, Any] = {key: raw[key] for key in KEPT if key in raw}
    usual = EngineConfig().model_dump()
    said = {key.removeprefix("engine.") for key in (*drive.server.told, *UNTOLD)}
    kept["engine"] = {k: v for k, v in raw["engine"].items() if k in said or v != usual[k]}
    model = scenario.folder / scenario.known_model
    mixed = [one.load.workload for one in drive.sent if "mixed" in one.load.name] or [
        one.load.workload for one in drive.sent
    ]
    lengths = {}
    for key, name in (("input_len", "prompt_tokens"), ("output_len", "output_tokens")):
        values = np.concatenate([getattr(load, name) for load in mixed])
        low = int(values.min())  # evenly spread, with the loads' mean
        lengths[key] = {
            "kind": "uniform",
            "low": low,
            "high": max(low, round(2 * values.mean()) - low),
        }
    return {
        **kept,
        "model": str(model.resolve()) if model.exists() else raw.get("model", scenario.known_model),
        "cost": {"profile": PROFILE},
        "workload": {
            "num_prompts": 500,
            "request_rate": rounded(0.6 * drive.knee or drive.sent[-1].rate),
            **lengths,
            "client_latency": rounded(latency),
        },
    }


def _report(outcome: Outcome) -> list[str]:
    """Tell the errors of loads held out, or else of all."""
    way = "requests" if outcome.by_steps is None else "steps"
    lines = [
        f"fitted to {way}; error of means, {'held out' if outcome.held_out else 'NOT held out'}:"
    ]
    for one in outcome.judged:
        cells = "".join(f"{name.upper():>8} {one.error(name):+7.1%}" for name in METRICS)
        lines.append(f"  {one.load.name:<22}{cells}")
    return lines
