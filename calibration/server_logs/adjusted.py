"""What `headway calibrate --from-requests` writes and prints: a profile, the fit, how to use it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from calibration.server_logs.from_requests import TERMS, Cost, LogFit, fit_log, read_log
from simulator.costs.profile import RESERVED
from simulator.util.files import write_together

if TYPE_CHECKING:
    from simulator.scenario.scenario import Scenario

MEANINGS = {
    "step": ("per step", 1e3, "ms"),
    "per_sequence": ("per sequence and step", 1e6, "us"),
    "client": ("clock to scheduler", 1e3, "ms"),
}
DIGITS = 5


def calibrate_from_requests(source: Path, scenario: "Scenario", out: Path) -> str:
    """Fit a scenario's cost to a log of requests; write the profile and calibration.json.

    Gives the report. Raises HeadwayError about the log.
    """
    fit = fit_log(read_log(source, scenario))
    name = f"{scenario.name}-adjusted.yaml"
    about = {"source": source.name, **asdict(fit)}
    del about["cost"]
    text = json.dumps(about, indent=2, allow_nan=False) + "\n"
    profile = profile_text(fit, scenario, source)
    write_together(
        out,
        {
            name: partial(put, profile.encode()),
            "calibration.json": partial(put, text.encode()),
        },
    )
    return "\n".join([*_report(fit), *_use(fit, out / name)])


def put(data: bytes, file: BinaryIO) -> None:
    """Write bytes."""
    file.write(data)


def profile_text(fit: LogFit, scenario: "Scenario", source: Path) -> str:
    """Write the adjusted profile as YAML."""
    about = {
        "requests": fit.requests,
        "held_out": fit.held_out,
        "terms_s": {
            term.name: {
                "before": plain(term.before),
                "fitted": plain(term.value),
                "interval_95": None if term.interval is None else plain(term.interval),
            }
            for term in fit.terms
        },
        "held_out_median_relative_error": {k: plain(v) for k, v in fit.errors.items()},
    }
    kernels = f"kernels: {fit.cost.name or 'terms of the scenario'}"
    sources = [kernels, f"overheads: fitted to {source.name}"]
    head = "# Written by `headway calibrate --from-requests`; errors: before and after the fit.\n"
    return head + profile_yaml(fit.cost, fit.residuals, scenario, about, sources)


def profile_yaml(
    cost: Cost,
    residuals: Mapping[str, float],
    scenario: "Scenario",
    about: Mapping[str, Any],
    sources: list[str],
) -> str:
    """Write a profile of a scenario's model, GPU and precision."""
    import yaml

    from simulator.costs.precision import settings_of
    from simulator.costs.profile import FORMS
    from simulator.scenario.assemble import assemble

    parts = assemble(scenario)
    kind = next(kind for kind, form in FORMS.items() if form is type(cost))
    values: dict[str, Any] = {"kind": kind}
    for field in fields(cost):
        if field.init and field.name not in RESERVED:
            values[field.name] = plain(getattr(cost, field.name))
    raw: dict[str, Any] = {
        "model": parts.model.name,
        "hardware": {"gpu": parts.gpu.name, **settings_of(parts.model, scenario.engine)},
        "cost": values,
        "range": {name: [*map(int, pair)] for name, pair in (cost.limits or {}).items()},
        "residuals": {name: round(value, 4) for name, value in residuals.items()},
        "fit": about,
        "sources": sources,
    }
    return str(yaml.safe_dump(raw, sort_keys=False, width=98))


def plain(value: Any) -> Any:
    """Round numbers, make lists of sequences."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, tuple | list):
        return [plain(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}")


def _report(fit: LogFit) -> Iterator[str]:
    yield f"{'term':<28}{'before':>10}{'fitted':>10}   95 % interval"
    for term in fit.terms:
        words, scale, unit = MEANINGS[term.name]
        told = "not told by this log: kept"
        if term.interval is not None:
            told = " to ".join(f"{scale * end:.3f}" for end in term.interval)
        label = f"{words} ({unit})"
        yield f"{label:<28}{scale * term.before:>10.3f}{scale * term.value:>10.3f}   {told}"
    yield ""
    yield f"errors on {fit.held_out} of {fit.requests} requests, held out of a fit to the others:"
    for name, (before, after) in fit.errors.items():
        means = " -> ".join(f"{value:+.1%}" for value in fit.means[name])
        yield f"  {name.upper()}: median |error| {before:.1%} -> {after:.1%}, mean {means}"


def _use(fit: LogFit, path: Path) -> Iterator[str]:
    client = fit.terms[TERMS.index("client")].value
    yield ""
    yield f"written: {path}, calibration.json. To use it, in a scenario:"
    yield f"  cost: {{profile: {path}}}"
    if client:
        yield f"  workload: {{client_latency: {client:.4g}}}"
