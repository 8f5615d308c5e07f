"""Fit an engine's overheads to the latencies of its own requests: a server's log, simulated.

Three terms are fitted, each bounded: what every step waits for, what it waits for by sequence, and
what lies between the log's clock and the scheduler. The rest of a profile, its kernels, stays. The
residuals are log(simulated / measured) of each request's TTFT and TPOT, under a loss that lets
single requests be far off.

The sum of losses is rough: a little more of a term, and a request waits for one step more. So the
terms are sought without derivatives (Nelder and Mead), and a quadratic through the losses of a
grid around the place found, each a simulation, then gives the minimum and the curvature (Box and
Wilson's response surface). Requests of one time share their batches, so their residuals are no
independent data: confidence intervals come from the spread between blocks of time (the sandwich
estimator, clustered), and every other block is held out from the fit that errors are reported of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from calibration.measured.predict import companion
from calibration.measured.requests import Requests, read_requests
from calibration.measured.runs import Run
from calibration.measured.workload import read_config, replay
from simulator.costs.linear import LinearCost
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.split_decode import SplitCost
from simulator.util.errors import HeadwayError
from simulator.util.workers import Died, each

if TYPE_CHECKING:
    from simulator.scenario.scenario import Scenario
    from simulator.workload.workload import Workload

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Cost = LinearCost | PiecewiseCost

BLOCKS = 20  # of time
FEWEST = 3 * BLOCKS  # requests
LARGE = 1000  # requests: below, starting workers takes longer than they save
SCALE = 0.1  # of the robust loss: a relative error beyond which a request counts less
TERMS = ("step", "per_sequence", "client")
UNITS = np.array([1e-3, 1e-5, 1e-3])  # s: a change of one matters
MOST = np.array([0.1, 2e-3, 10.0])  # s
LEAST = 1e-3  # units: less is nothing
FIRST = ((0.0, 0.0), (1.0, 0.0), (0.0, 2.0))  # units, of the first simplex of the search
SEARCH = 40  # simulations of a search, at most
GRID = np.array([0.5, 4.0, 2.0])  # units, half the width of the grid: it evens out what is rough
AT = (-1.0, -0.5, 0.0, 0.5, 1.0)
TOLD = 1e-5  # curvature per request below which the log says nothing of a term
CONFIDENCE = 0.95
FIELDS: Mapping[type, tuple[str, str]] = {
    LinearCost: ("base", "per_sequence"),
    PiecewiseCost: ("overhead", "host_per_sequence"),
    SplitCost: ("overhead", "host_per_sequence"),
}
"""Where a cost model has the first two terms."""


@dataclass(frozen=True)
class Log:
    """A server's requests, and how to simulate them."""

    requests: Requests
    workload: "Workload"
    scenario: "Scenario"
    cost: Cost
    block: npt.NDArray[np.int64]  # of each request, by time
    known: dict[bytes, dict[str, Floats]] = field(default_factory=dict)

    def simulate(self, terms: Floats) -> dict[str, Floats]:
        """Give the simulated seconds of every request by latency; NaN: never completed.

        What lies before the scheduler delays all alike, and needs no other simulation.
        """
        key = _key(terms)
        if key not in self.known:
            self.known[key] = self._simulate(terms)
        known = self.known[key]
        return known | {name: known[name] + terms[2] for name in ("ttft", "e2el")}

    def prepare(self, every: Sequence[Floats]) -> None:
        """Simulate many terms at once, a large log on all cores."""
        known = [_key(terms) for terms in every]
        new = {key: terms for key, terms in zip(known, every, strict=True) if key not in self.known}
        if len(self.requests) < LARGE:
            return
        alone = replace(self, known={})  # sent to the workers
        keys = list(new)
        for index, found in each(alone._simulate, list(new.values())):
            if not isinstance(found, Died):  # else it is simulated here
                self.known[keys[index]] = found

    def _simulate(self, terms: Floats) -> dict[str, Floats]:
        from simulator.results.request_table import gather_requests
        from simulator.simulation.run import run

        result = run(self.scenario, workload=self.workload, cost=with_terms(self.cost, terms))
        table = gather_requests(self.workload, result.sent, result.logs)
        found = {"ttft": table.ttft, "tpot": table.tpot, "e2el": table.e2el}
        return {name: np.where(table.completed, found[name], np.nan) for name in found}

    def measured(self) -> dict[str, Floats]:
        """Give what was measured, likewise."""
        found = {"ttft": self.requests.ttft, "tpot": self.requests.tpot, "e2el": self.requests.e2el}
        return {name: np.where(values > 0, values, np.nan) for name, values in found.items()}

    def residuals(self, terms: Floats) -> Floats:
        """Give log(simulated / measured), a row for TTFT and one for TPOT, else for E2EL alone."""
        simulated, measured = self.simulate(terms), self.measured()
        names = ("ttft", "tpot") if np.isfinite(measured["ttft"]).any() else ("e2el",)
        rows = [np.log(simulated[name] / measured[name]) for name in names]
        return np.stack(rows)

    def losses(self, terms: Floats) -> Floats:
        """Give the loss of each block (soft l1, in units of squared relative errors)."""
        z = (self.residuals(terms) / SCALE) ** 2
        each = np.nan_to_num(np.sqrt(1 + z) - 1, nan=0.0).sum(axis=0)
        return np.asarray(np.bincount(self.block, each, BLOCKS), np.float64)


def _key(terms: Floats) -> bytes:
    """Give what tells simulations apart."""
    return np.ascontiguousarray(terms[:2]).tobytes()


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

    cost: Cost
    terms: list[Term]
    errors: dict[str, tuple[float, float]]  # by metric: median |relative error| before, after
    means: dict[str, tuple[float, float]]  # relative error of the mean, before and after
    residuals: dict[str, float]  # for the profile
    requests: int
    held_out: int


def read_log(path: Path, scenario: "Scenario") -> Log:
    """Read a log of requests; HeadwayError tells what is wrong with it.

    The layouts are those of `headway validate --measured`, among them the plain one: `arrival_s`,
    `prompt_tokens`, `output_tokens`, `ttft_s`, and `e2e_s` or `tpot_s`.
    """
    from simulator.scenario.assemble import assemble

    requests = read_requests(path)
    if len(requests) < FEWEST:
        raise HeadwayError(
            f"{path}: {len(requests)} requests are too few to fit; {FEWEST} would do"
        )
    if not any(np.isfinite(x).any() for x in (requests.ttft, requests.tpot, requests.e2el)):
        raise HeadwayError(f"{path}:1: lacks a column of latencies: ttft_s, tpot_s or e2e_s")
    run = Run({"run_id": path.name}, {}, {})
    workload = replay(run, requests, read_config(companion(path, "config.json")))
    cost = assemble(scenario).cost
    if not isinstance(cost, LinearCost | PiecewiseCost):
        raise HeadwayError(f"cost {cost.name}: has no terms to fit")
    block = np.arange(len(requests)) * BLOCKS // len(requests)
    return Log(requests, workload, scenario, cost, block)


def terms_of(cost: Cost, client: float = 0.0) -> Floats:
    """Give a cost model's terms."""
    step, per_sequence = FIELDS[type(cost)]
    return np.array([getattr(cost, step), getattr(cost, per_sequence), client])


def with_terms(cost: Cost, terms: Floats) -> Cost:
    """Put terms into a cost model."""
    step, per_sequence = FIELDS[type(cost)]
    changed: dict[str, Any] = {step: float(terms[0]), per_sequence: float(terms[1])}
    return replace(cost, **changed)


def fit_log(log: Log) -> LogFit:
    """Fit to every other block of time, judge by the others; then fit to all."""
    before = terms_of(log.cost, log.scenario.workload.client_latency)
    seen = log.block % 2 == 0
    every, even = np.ones(BLOCKS, bool), np.arange(BLOCKS) % 2 == 0
    surface = Surface.around(log, _search(log, before, every))
    half, _ = _fit(surface, before, even)
    found, intervals = _fit(surface, before, every)
    terms = [Term(*row) for row in zip(TERMS, before, found, intervals, strict=True)]
    measured = log.measured()
    told = [log.simulate(before), log.simulate(half)]
    errors, means = {}, {}
    for name, truth in measured.items():
        judged = (
            ~seen & np.isfinite(truth) & np.isfinite(told[0][name]) & np.isfinite(told[1][name])
        )
        if judged.any():
            off = [np.abs(said[name][judged] / truth[judged] - 1) for said in told]
            errors[name] = float(np.median(off[0])), float(np.median(off[1]))
            both = [said[name][judged].mean() / truth[judged].mean() - 1 for said in told]
            means[name] = float(both[0]), float(both[1])
    cost = with_terms(log.cost, found)
    left = _residuals(log, half, ~seen)
    return LogFit(cost, terms, errors, means, left, len(seen), int((~seen).sum()))


Intervals = list[tuple[float, float] | None]


def _fit(surface: "Surface", start: Floats, blocks: Flags) -> tuple[Floats, Intervals]:
    """Fit to some blocks of time; what the log does not tell of stays as it was."""
    found = surface.least(blocks)
    intervals = surface.intervals(found, blocks)
    told = np.array([interval is not None for interval in intervals])
    return np.where(told, found, start), intervals


def _search(log: Log, start: Floats, blocks: Flags) -> Floats:
    """Search the first two terms; the third is found for each by itself."""
    from scipy.optimize import minimize, minimize_scalar

    ttft = log.measured()["ttft"]
    most = float(np.nanmedian(ttft)) if np.isfinite(ttft).any() else float(MOST[2])
    best: dict[str, Any] = {"loss": np.inf, "terms": start}

    def loss(x: Floats) -> float:
        two = x * UNITS[:2]
        last = minimize_scalar(
            lambda late: log.losses(np.array([*two, late]))[blocks].sum(),
            bounds=(0.0, min(most, MOST[2])),
            method="bounded",
            options={"xatol": 1e-5},
        )
        if last.fun < best["loss"]:
            best.update(loss=last.fun, terms=np.array([*two, last.x]))
        return float(last.fun)

    first = np.minimum(start, MOST)[:2] / UNITS[:2]
    minimize(
        loss,
        first,
        method="Nelder-Mead",
        bounds=[(0.0, most / unit) for most, unit in zip(MOST[:2], UNITS[:2], strict=True)],
        options={
            "initial_simplex": [first + np.array(corner) for corner in FIRST],
            "maxfev": SEARCH,
            "xatol": 0.01,
            "fatol": 1e-3,
        },
    )
    terms: Floats = best["terms"]
    return np.where(terms > LEAST * UNITS, terms, 0.0)


@dataclass(frozen=True)
class Surface:
    """Quadratics through the losses of every block around a place; in units of GRID."""

    center: Floats  # s
    slopes: Floats  # of each block, at the center
    curved: Floats  # second derivatives of each block

    @classmethod
    def around(cls, log: Log, terms: Floats) -> "Surface":
        """Simulate a grid and fit; no term goes below 0."""
        center = np.maximum(terms, GRID * UNITS)
        at = np.array([*product(AT, AT, (-1.0, 0.0, 1.0))])
        places = center + at * GRID * UNITS
        log.prepare(places)
        losses = np.stack([log.losses(place) for place in places])
        first, second = np.triu_indices(3)
        table = np.column_stack([np.ones(len(at)), at, at[:, first] * at[:, second]])
        found = np.linalg.lstsq(table, losses, rcond=None)[0]
        curved = np.zeros((BLOCKS, 3, 3))
        curved[:, first, second] += found[4:].T
        curved[:, second, first] += found[4:].T
        return cls(center, found[1:4].T, curved)

    def least(self, blocks: Flags) -> Floats:
        """Give the terms of least loss, within the grid; 0 where that is the bound."""
        slope, curved = self.slopes[blocks].sum(axis=0), self.curved[blocks].sum(axis=0)
        low = np.maximum(-self.center / (GRID * UNITS), -1.5)
        from scipy.optimize import minimize

        result = minimize(
            lambda d: float(slope @ d + d @ curved @ d / 2),
            np.zeros(3),
            jac=lambda d: slope + curved @ d,
            bounds=[(edge, 1.5) for edge in low],
        )
        terms = self.center + result.x * GRID * UNITS
        return np.where(terms > LEAST * UNITS, terms, 0.0)

    def intervals(self, terms: Floats, blocks: Flags) -> Intervals:
        """Give each term's confidence interval, from 0 on; None where the log is silent."""
        from scipy.stats import t

        curved = self.curved[blocks].sum(axis=0)
        shift = (terms - self.center) / (GRID * UNITS)
        scores = (self.slopes + self.curved @ shift)[blocks]
        count = len(scores)
        free = np.diag(curved) > TOLD * count
        bread = np.linalg.pinv(curved[np.ix_(free, free)])
        meat = scores[:, free].T @ scores[:, free] * count / (count - int(free.sum()))
        spread = np.sqrt(np.diag(bread @ meat @ bread)) * (GRID * UNITS)[free]
        factor = float(t.ppf((1 + CONFIDENCE) / 2, count - int(free.sum())))
        found: Intervals = [None] * len(terms)
        for k, half in zip(np.flatnonzero(free), factor * spread, strict=True):
            found[k] = float(max(0.0, terms[k] - half)), float(terms[k] + half)
        return found


def _residuals(log: Log, terms: Floats, judged: Flags) -> dict[str, float]:
    """Give the systematic error that is left, by regime: of blocks' medians.

    TPOT stands for decode steps. TTFT stands for steps with prompts, as far as queues let it.
    """
    off = log.residuals(terms)
    names = ("prompts", "decode") if len(off) == 2 else ("decode",)
    found = {}
    for name, row in zip(names, off, strict=True):
        medians = [
            float(np.median(row[mine]))
            for k in range(BLOCKS)
            if (mine := judged & (log.block == k) & np.isfinite(row)).any()
        ]
        if medians:
            found[name] = min(1.0, float(np.sqrt(np.mean(np.square(medians)))))
    return found
