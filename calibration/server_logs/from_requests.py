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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.errors import MAX_HELD_OUT_ERROR, Floats, root_mean_square
from calibration.measured.compare import LATENCIES
from calibration.measured.predict import sibling_file
from calibration.measured.requests import Requests, read_requests
from calibration.measured.runs import NEAR, Run
from calibration.measured.workload import read_config, replay
from calibration.profile_yaml import how_to_use, rounded, scenario_profile
from calibration.server_logs.response_surface import Flags, Intervals, Prior, Surface, grid
from calibration.text_files import read_rows
from simulator.costs.linear import Fitted
from simulator.results.request_table import gather_requests
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.files import write_together
from simulator.util.workers import WorkerDied, parallel_map
from simulator.workload.traces.fields import SPANS, UNITS, find_fields
from simulator.workload.workload import Workload

BLOCKS = 20  # of time
FEWEST = 3 * BLOCKS  # requests
PARALLEL_FROM = 1000  # requests: below, starting workers takes longer than they save
LOSS_SCALE = 0.1  # of the robust loss: a relative error beyond which a request counts less
TPOT_SCALE = 0.02  # that of TPOT, where the host is hidden: it shows there, TTFT hides it in noise
AT_BOUND = 0.99  # of the most that a term may be
NEGLIGIBLE = 1e-3  # units: less is nothing
MAX_SIMULATIONS = 40  # of a search, at most
GAP_SD = 0.3e-3  # s, of launch gaps: versions and servers differ by so much


@dataclass(frozen=True)
class TermScale:
    """How a term is sought: all in s."""

    unit: float  # a change of one matters
    most: float
    first: float  # of the search's first steps, units
    half_width: float  # of the grid, units: it evens out what is rough


SCALES = {
    "step": TermScale(1e-3, 0.1, 1.0, 0.5),
    "per_sequence": TermScale(1e-5, 2e-3, 2.0, 4.0),
    "client": TermScale(1e-3, 10.0, 0.0, 2.0),
}
HIDDEN_SCALES = {
    "step": TermScale(1e-3, 0.1, 1.0, 0.15),
    "host": TermScale(1e-3, 0.1, 3.0, 0.25),
    "per_sequence": TermScale(1e-5, 2e-3, 2.0, 1.0),
    "client": TermScale(1e-3, 10.0, 0.0, 1.0),
}
"""Where the host is hidden: a term more, in a sharper valley."""


MEANINGS = {
    "step": ("per step", 1e3, "ms"),
    "host": ("hidden host, per step", 1e3, "ms"),
    "per_sequence": ("per sequence and step", 1e6, "us"),
    "client": ("clock to scheduler", 1e3, "ms"),
}


def calibrate_from_requests(
    source: Path, scenario: Scenario, out: Path, columns: str | None = None
) -> str:
    """Fit a scenario's cost to a log of requests; write the profile and calibration.json.

    Gives the report. Raises HeadwayError about the log.
    """
    fit = fit_log(read_log(source, scenario, columns))
    name = f"{scenario.name}-adjusted.yaml"
    about = {"source": source.name, **asdict(fit)}
    del about["cost"]
    text = json.dumps(about, indent=2, allow_nan=False) + "\n"
    profile = _profile(fit, scenario, source)
    write_together(
        out,
        {
            name: profile.encode(),
            "calibration.json": text.encode(),
        },
    )
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
class RequestLog:
    """A server's requests, and how to simulate them."""

    requests: Requests
    workload: Workload
    scenario: Scenario
    cost: Fitted
    block: npt.NDArray[np.int64]  # of each request, by time
    simulated: dict[bytes, dict[str, Floats]] = field(default_factory=dict)

    def simulate(self, terms: Floats) -> dict[str, Floats]:
        """Return the simulated seconds of every request by latency; NaN: never completed.

        What lies before the scheduler delays all alike, and needs no other simulation.
        """
        key = _cache_key(terms)
        if key not in self.simulated:
            self.simulated[key] = self._simulate(terms)
        simulated = self.simulated[key]
        return simulated | {name: simulated[name] + terms[-1] for name in ("ttft", "e2el")}

    def simulate_all(self, every: Iterable[Floats]) -> None:
        """Simulate many terms at once, a large log on all cores."""
        new = {key: terms for terms in every if (key := _cache_key(terms)) not in self.simulated}
        if len(self.requests) < PARALLEL_FROM:
            return
        alone = replace(self, simulated={})  # sent to the workers
        keys = list(new)
        for index, found in parallel_map(alone._simulate, list(new.values())):
            if not isinstance(found, WorkerDied):  # else it is simulated here
                self.simulated[keys[index]] = found

    def _simulate(self, terms: Floats) -> dict[str, Floats]:
        result = run(self.scenario, workload=self.workload, cost=with_terms(self.cost, terms))
        table = gather_requests(self.workload, result.sent, result.logs)
        return {n: np.where(table.completed, getattr(table, n), np.nan) for n in LATENCIES}

    def measured(self) -> dict[str, Floats]:
        """Return what was measured, likewise."""
        found = {name: getattr(self.requests, name) for name in LATENCIES}
        return {name: np.where(values > 0, values, np.nan) for name, values in found.items()}

    def residuals(self, terms: Floats) -> Floats:
        """Get log(simulated / measured), a row for TTFT and one for TPOT, else for E2EL alone."""
        simulated, measured = self.simulate(terms), self.measured()
        names = ("ttft", "tpot") if np.isfinite(measured["ttft"]).any() else ("e2el",)
        return np.stack([np.log(simulated[name] / measured[name]) for name in names])

    def losses(self, terms: Floats) -> Floats:
        """Return the loss of each block (soft l1, in units of squared relative errors)."""
        off = self.residuals(terms)
        own = "host" in self.names and len(off) == 2
        scales = np.array([LOSS_SCALE, TPOT_SCALE] if own else [LOSS_SCALE] * len(off))
        z = (off / scales[:, None]) ** 2
        each = np.nan_to_num(np.sqrt(1 + z) - 1, nan=0.0).sum(axis=0)
        found = np.asarray(np.bincount(self.block, each, BLOCKS), np.float64)
        return found if self.prior is None else found + self.prior.losses(terms, BLOCKS)

    @property
    def names(self) -> tuple[str, ...]:
        """Name the terms that are fitted."""
        return (*self.cost.fitted_terms, "client")

    @property
    def prior(self) -> Prior | None:
        """What is known of the launch gap beside a hidden host."""
        if "host" not in self.names:
            return None
        return Prior(self.names.index("step"), float(terms_of(self.cost)[0]), GAP_SD)


def _cache_key(terms: Floats) -> bytes:
    """Return what tells simulations apart."""
    return np.ascontiguousarray(terms[:-1]).tobytes()


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


def read_log(path: Path, scenario: Scenario, columns: str | None = None) -> RequestLog:
    """Read a log of requests; HeadwayError tells what is wrong with it.

    Its format is any that traces have, among them the plain one: `arrival_s`, `prompt_tokens`,
    `output_tokens`, `ttft_s`, and `e2e_s` or `tpot_s`; `columns` names other columns.
    """
    requests = read_requests(path, columns)
    if len(requests) < FEWEST:
        raise HeadwayError(
            f"{path}: {len(requests)} requests are too few to fit: it takes {FEWEST} or more"
        )
    if not any(np.isfinite(getattr(requests, name)).any() for name in LATENCIES):
        raise HeadwayError(f"{path}:1: lacks a column of latencies: ttft_s, tpot_s or e2e_s")
    if columns is None:
        _check_misspelt(path, requests)
    run = Run({"run_id": path.name}, {}, {})
    workload = replay(run, requests, read_config(sibling_file(path, "config.json")))
    cost = resolve(scenario).cost
    if not isinstance(cost, Fitted) or not cost.fitted_terms:
        raise HeadwayError(f"cost {cost.name}: has no terms to fit")
    block = np.arange(len(requests)) * BLOCKS // len(requests)
    return RequestLog(requests, workload, scenario, cost, block)


def _check_misspelt(path: Path, requests: Requests) -> None:
    """Refuse columns that look like a latency that is lacking: the fit would do without it."""
    there = {name for name in LATENCIES if np.isfinite(getattr(requests, name)).any()}
    lacking = {"ttft"} - there | ({"tpot", "e2el"} if not there & {"tpot", "e2el"} else set())
    if not lacking:
        return
    try:
        names = [*next(iter(read_rows(path)), {})]
    except HeadwayError:
        return  # a format of other files
    read = {name for found in find_fields(names).values() for name in found.names}
    known = [
        f"{word}_{unit}" for field in sorted(lacking) for word in SPANS[field] for unit in UNITS
    ]
    for name in names:
        near = get_close_matches(name.lower(), known, 1, NEAR) if name not in read else []
        if near:
            raise HeadwayError(
                f"{path}:1: {name}: unknown column; did you mean {near[0]}? Else say with "
                "--columns which columns hold what"
            )


def terms_of(cost: Fitted, client: float = 0.0) -> Floats:
    """Return a cost model's terms."""
    return np.array([*(getattr(cost, field) for field in cost.fitted_terms.values()), client])


def with_terms(cost: Fitted, terms: Floats) -> Fitted:
    """Put terms into a cost model."""
    fields = cost.fitted_terms.values()
    changed: dict[str, Any] = dict(zip(fields, map(float, terms[:-1]), strict=True))
    return replace(cost, **changed)


def _scaled(names: Sequence[str], key: str) -> Floats:
    """Return a scale of each term, s."""
    scales = HIDDEN_SCALES if "host" in names else SCALES
    units = key in ("first", "half_width")
    return np.array([getattr(scales[n], key) * (scales[n].unit if units else 1.0) for n in names])


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
    left = _residuals(log, half, unseen)
    cost = with_terms(log.cost, found)
    hosts = [term.interval or () for term in terms if term.name == "host"]
    if hosts:
        cost = cost.with_host(host_interval=hosts[0])
    return LogFit(cost, terms, errors, means, left, len(unseen), int(unseen.sum()))


def _surface(log: RequestLog, start: Floats, free: Flags) -> Surface | None:
    """Put a surface over the terms that are free, around the best place; None: none is."""
    if not free.any():
        return None
    width = _scaled(log.names, "half_width")[free]
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
    least = np.where(least > NEGLIGIBLE * _scaled(names, "unit")[free], least, 0.0)
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
    units, bounds = _scaled(log.names, "unit")[:-1], _scaled(log.names, "most")
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
        steps = np.diag(_scaled(log.names, "first")[:-1] / units)[sought]

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
    yield ""
    client = fit.terms[-1].value
    latency = f" --set workload.client_latency={client:.4g}" if client else ""
    yield f"written: {path}, calibration.json"
    if not useful:
        return
    yield how_to_use(path, scenario) + latency
    if host := _host(fit):
        yield "or, beside the profile that it has, also for other models on this machine:"
        yield f"--set {shlex.quote(f'host={host}')}{latency}"
