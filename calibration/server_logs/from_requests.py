"""Fit an engine's overheads to the latencies of its own requests: a server's log, simulated.

Three terms are fitted, each bounded: what every step waits for, what it waits for by sequence, and
what lies between the log's clock and the scheduler. Where the engine schedules asynchronously there
is a fourth, the host's hidden work: a step takes the longer of kernels and host, and the wait of
every step, its launch gap, besides. Where the host is always the longer, the log tells only the sum
of the two; then what the version says of the gap, known within GAP_SD, decides. The rest of a
profile, its kernels, stays. The residuals are log(simulated / measured) of each request's TTFT and
TPOT, under a loss that lets single requests be far off.

The sum of losses is rough: a little more of a term, and a request waits for one step more. So the
terms are sought without derivatives (Nelder and Mead), and a quadratic through the losses of a
grid around the place found, each a simulation, then gives the minimum and the curvature (Box and
Wilson's response surface). Requests of one time share their batches, so their residuals are no
independent data: confidence intervals come from the spread between blocks of time (the sandwich
estimator, clustered), and every other block is held out from the fit that errors are reported of.
"""

import json
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from calibration.errors import MAX_HELD_OUT_ERROR, Floats, root_mean_square
from calibration.profile_yaml import how_to_use, rounded, scenario_profile
from calibration.server_logs.request_log import (
    BLOCKS,
    HIDDEN_SCALES,
    SCALES,
    RequestLog,
    read_log,
    scaled,
    terms_of,
    with_terms,
)
from calibration.server_logs.response_surface import Flags, Intervals, Surface, grid
from simulator.costs.linear import Fitted
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayWarning
from simulator.util.files import write_together

AT_BOUND = 0.99  # of the most that a term may be
NEGLIGIBLE = 1e-3  # units: less is nothing
MAX_SIMULATIONS = 40  # of a search, at most
MEANINGS = {
    "step": ("per step", 1e3, "ms"),
    "host": ("hidden host, per step", 1e3, "ms"),
    "per_sequence": ("per sequence and step", 1e6, "us"),
    "client": ("clock to scheduler", 1e3, "ms"),
}


def calibrate_from_requests(source: Path, scenario: Scenario, out: Path, **reading: Any) -> str:
    """Fit a scenario's cost to a log of requests; write the profile and calibration.json.

    Gives the report. Raises HeadwayError about the log.
    """
    fit = fit_log(read_log(source, scenario, **reading))
    name = f"{scenario.name}-adjusted.yaml"
    about = {"source": source.name, **asdict(fit)}
    del about["cost"]
    text = json.dumps(about, indent=2, allow_nan=False) + "\n"
    profile = _profile(fit, scenario, source)
    write_together(out, {name: profile.encode(), "calibration.json": text.encode()})
    doubts = _doubts(fit)
    if doubts:
        warnings.warn(
            f"{source}: the fit explains too little to be used: {'; '.join(doubts)}; are its "
            "columns in the units that their names say, and is the scenario that of the server?",
            HeadwayWarning,
            stacklevel=2,
        )
    return "\n".join(_report(fit, out / name, scenario, useful=not doubts))


def _doubts(fit: "LogFit") -> list[str]:
    """Say why a fit should not be used; nothing where it may be."""
    found = [
        f"half of the held-out requests are off by {after:.0%} or more in {name.upper()}"
        for name, (_, after) in fit.errors.items()
        if after > MAX_HELD_OUT_ERROR
    ]
    scales = HIDDEN_SCALES if any(term.name == "host" for term in fit.terms) else SCALES
    for term in fit.terms:
        words, scale, unit = MEANINGS[term.name]
        if term.interval is not None and term.value >= AT_BOUND * scales[term.name].most:
            found.append(f"{words} is at its bound, {scale * term.value:.4g} {unit}")
    return found


@dataclass(frozen=True)
class Term:
    """A fitted term, s."""

    name: str
    before: float
    value: float
    interval: tuple[float, float] | None  # None: the log does not tell it, it stays as it was


@dataclass(frozen=True)
class LogFit:
    """The fitted terms, and the errors on requests that another fit had not seen."""

    cost: Fitted
    terms: list[Term]
    errors: dict[str, tuple[float, float]]  # by metric: median |relative error| before, after
    means: dict[str, tuple[float, float]]  # relative error of the mean, before and after
    residuals: dict[str, float]  # for the profile
    requests: int
    held_out: int


def fit_log(log: RequestLog) -> LogFit:
    """Fit to every other block of time, judge by the others; then fit to all."""
    before = terms_of(log.cost, log.scenario.workload.client_latency)
    every, even = np.ones(BLOCKS, bool), np.arange(BLOCKS) % 2 == 0
    free = np.ones(len(before), bool)
    while True:
        fit = partial(_fit, _surface(log, before, free), log.names, before, free)
        found, intervals = fit(every)
        told = np.array([interval is not None for interval in intervals])
        if (told == free).all():
            break
        free = told  # what the log does not tell stays as it was: the others are found beside that
    half, _ = fit(even)
    found, half = _no_worse(log, before, found, every), _no_worse(log, before, half, even)
    intervals = [
        None if known is None else (min(known[0], value), max(known[1], value))
        for known, value in zip(intervals, found, strict=True)
    ]
    terms = [Term(*row) for row in zip(log.names, before, found, intervals, strict=True)]
    unseen = log.block % 2 == 1
    old, new = log.simulate(before), log.simulate(half)
    errors, means = {}, {}
    for name, truth in log.measured().items():
        judged = unseen & np.isfinite([truth, old[name], new[name]]).all(axis=0)
        if judged.any():
            here, *both = truth[judged], old[name][judged], new[name][judged]
            first, second = (float(np.median(np.abs(said / here - 1))) for said in both)
            errors[name] = first, second
            first, second = (float(said.mean() / here.mean() - 1) for said in both)
            means[name] = first, second
    cost = with_terms(log.cost, found)
    hosts = [term.interval or () for term in terms if term.name == "host"]
    if hosts:
        cost = cost.with_host(host_interval=hosts[0])
    left, judged = _residuals(log, half, unseen), int(unseen.sum())
    return LogFit(cost, terms, errors, means, residuals=left, requests=len(unseen), held_out=judged)


def _no_worse(log: RequestLog, before: Floats, found: Floats, blocks: Flags) -> Floats:
    """Return what was found, unless some blocks of time are no better explained by it."""
    kept, gained = (float(log.losses(terms)[blocks].sum()) for terms in (before, found))
    return before if kept <= gained else found


def _surface(log: RequestLog, start: Floats, free: Flags) -> Surface | None:
    """Put a surface over the terms that are free, around the best place; None: none is."""
    if not free.any():
        return None
    width = scaled(log.names, "half_width")[free]
    center = np.maximum(_search(log, start, free)[free], width)  # no term of the grid below 0

    def place(terms: Floats) -> Floats:
        whole = start.copy()
        whole[free] = terms
        return whole

    log.simulate_all(place(center + one * width) for one in grid(len(center)))
    prior = log.prior
    if prior is not None:
        known = bool(free[prior.term])
        prior = replace(prior, term=int(free[: prior.term].sum())) if known else None
    return Surface.around(center, width, lambda terms: log.losses(place(terms)), prior)


def _fit(
    surface: Surface | None, names: Sequence[str], start: Floats, free: Flags, blocks: Flags
) -> tuple[Floats, Intervals]:
    """Fit the terms that are free to some blocks of time; an interval is None where none tells."""
    found, intervals = start.copy(), list[tuple[float, float] | None]([None] * len(start))
    if surface is None:
        return found, intervals
    least = surface.minimum(blocks)
    least = np.where(least > NEGLIGIBLE * scaled(names, "unit")[free], least, 0.0)
    known = surface.intervals(least, blocks)
    for k, value, interval in zip(np.flatnonzero(free), least, known, strict=True):
        intervals[k] = interval
        if interval is not None:
            found[k] = value
    return found, intervals


def _search(log: RequestLog, start: Floats, free: Flags) -> Floats:
    """Search the terms that are free; the last is found for each of the others by itself.

    A hidden host is sought before the launch gap is: the two are nearly one.
    """
    from scipy.optimize import minimize, minimize_scalar

    ttft = log.measured()["ttft"]
    units, bounds = scaled(log.names, "unit")[:-1], scaled(log.names, "most")
    most = float(np.nanmedian(ttft)) if np.isfinite(ttft).any() else float(bounds[-1])
    best: dict[str, Any] = {"loss": np.inf, "terms": np.minimum(start, bounds)}

    def loss(x: Floats) -> float:
        these = x * units
        if free[-1]:
            last = minimize_scalar(
                lambda late: log.losses(np.array([*these, late])).sum(),
                bounds=(0.0, min(most, bounds[-1])),
                method="bounded",
                options={"xatol": 1e-5},
            )
            late, found = float(last.x), float(last.fun)
        else:
            late = float(start[-1])
            found = float(log.losses(np.array([*these, late])).sum())
        if found < best["loss"]:
            best.update(loss=found, terms=np.array([*these, late]))
        return found

    def minimize_over(sought: list[int]) -> None:
        first = best["terms"][:-1] / units
        if not sought:
            loss(first)
            return
        steps = np.diag(scaled(log.names, "first")[:-1] / units)[sought]

        def with_sought(x: Floats) -> Floats:
            whole = first.copy()
            whole[sought] = x
            return whole

        minimize(
            lambda x: loss(with_sought(x)),
            first[sought],
            method="Nelder-Mead",
            bounds=[(0.0, bounds[k] / units[k]) for k in sought],
            options={
                "initial_simplex": [
                    first[sought],
                    *(first[sought] + step[sought] for step in steps),
                ],
                "maxfev": MAX_SIMULATIONS,
                "xatol": 0.01,
                "fatol": 1e-3,
            },
        )

    every = [*map(int, np.flatnonzero(free[:-1]))]
    if "host" in log.names and 0 in every:
        minimize_over(every[1:])
    minimize_over(every)
    return np.asarray(best["terms"])


def _residuals(log: RequestLog, terms: Floats, judged: Flags) -> dict[str, float]:
    """Return the systematic error that is left, by regime: of blocks' medians.

    TPOT stands for decode steps. TTFT stands for steps with prompts, as far as queues let it.
    """
    off = log.residuals(terms)
    found = {}
    for name, row in zip(("prompts", "decode") if len(off) == 2 else ("decode",), off, strict=True):
        blocks = [row[judged & (log.block == k) & np.isfinite(row)] for k in range(BLOCKS)]
        if medians := [float(np.median(block)) for block in blocks if len(block)]:
            found[name] = root_mean_square(medians)
    return found


def _profile(fit: LogFit, scenario: Scenario, source: Path) -> str:
    """Write the adjusted profile as YAML."""
    about = {
        "requests": fit.requests,
        "held_out": fit.held_out,
        "terms_s": {
            term.name: {
                "before": rounded(term.before),
                "fitted": rounded(term.value),
                "interval_95": None if term.interval is None else rounded(term.interval),
            }
            for term in fit.terms
        },
        "held_out_median_relative_error": {k: rounded(v) for k, v in fit.errors.items()},
    }
    kernels = f"kernels: {fit.cost.name or 'terms of the scenario'}"
    sources = [kernels, f"overheads: fitted to {source.name}"]
    head = "# Written by `headway calibrate --from-requests`; errors: before and after the fit.\n"
    return head + scenario_profile(scenario, fit.cost, fit.residuals, about, sources)


def _host(fit: LogFit) -> str:
    """Get a scenario's `host` that says the same; "" where the host's part is not known apart."""
    work, terms = fit.cost.host_work, {term.name: term for term in fit.terms}
    if "host" not in terms or work is None or work.launch_gap is None:
        return ""
    step = terms["step"]
    gap = max(0.0, work.launch_gap + step.value - step.before)
    text = f"{{per_step: {work.per_step:.4g}, per_sequence: {work.per_sequence:.4g}, "
    text += f"launch_gap: {gap:.4g}"
    if interval := terms["host"].interval:
        text += ", per_step_interval: [{:.4g}, {:.4g}]".format(*interval)
    return text + "}"


def _report(fit: LogFit, path: Path, scenario: Scenario, *, useful: bool) -> Iterator[str]:
    yield f"{'term':<28}{'before':>10}{'fitted':>10}   95 % interval"
    for term in fit.terms:
        words, scale, unit = MEANINGS[term.name]
        told = "not shown by this log: kept"
        if term.interval is not None:
            told = " to ".join(f"{scale * end:.3f}" for end in term.interval)
        label = f"{words} ({unit})"
        yield f"{label:<28}{scale * term.before:>10.3f}{scale * term.value:>10.3f}   {told}"
    yield ""
    yield f"errors on {fit.held_out} of {fit.requests} requests, held out of a fit to the others:"
    for name, (before, after) in fit.errors.items():
        means = " -> ".join(f"{value:+.1%}" for value in fit.means[name])
        yield f"  {name.upper()}: median |error| {before:.1%} -> {after:.1%}, mean {means}"
    yield ""
    client = fit.terms[-1].value
    latency = f" --set workload.client_latency={client:.4g}  # in s" if client else ""
    yield f"written: {path}, calibration.json"
    if not useful:
        return
    yield how_to_use(path, scenario) + latency
    if host := _host(fit):
        yield "or, beside the profile that it has, also for other models on this machine:"
        yield f"--set {shlex.quote(f'host={host}')}{latency}"
