"""A server's log of requests, and how far off a simulation of it is under some terms."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.errors import Floats
from calibration.measured.compare import LATENCIES
from calibration.measured.predict import sibling_file
from calibration.measured.requests import Requests, read_requests
from calibration.measured.runs import NEAR, Run
from calibration.measured.workload import read_config, replay
from calibration.server_logs.response_surface import Prior
from calibration.text_files import read_rows
from simulator.costs.cost_model import CostModel
from simulator.costs.linear import Fitted
from simulator.features.drafts.cost import DraftedCost
from simulator.features.images.cost import EncoderCost
from simulator.features.lora.cost import LoraCost
from simulator.results.request_table import gather_requests
from simulator.scenario.draw import settle_models
from simulator.scenario.resolve import engine_specs, resolve
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.workers import WorkerDied, parallel_map
from simulator.workload.traces.fields import SPANS, UNITS, find_fields
from simulator.workload.unused import warn_of_images
from simulator.workload.workload import Workload

BLOCKS = 20  # of time
FEWEST = 3 * BLOCKS  # requests
PARALLEL_FROM = 1000  # requests: below, starting workers takes longer than they save
LOSS_SCALE = 0.1  # of the robust loss: a relative error beyond which a request counts less
TPOT_SCALE = 0.02  # that of TPOT, where the host is hidden: it shows there, TTFT hides it in noise
ADDING = (DraftedCost, EncoderCost, LoraCost)
"""Costs that add to another what no term of it says."""
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


@dataclass(frozen=True)
class RequestLog:
    """A server's requests, and how to simulate them."""

    requests: Requests
    workload: Workload
    scenario: Scenario
    cost: Fitted
    whole_cost: CostModel  # with what drafts, adapters and encoders add
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
        cost = _in_place(self.whole_cost, with_terms(self.cost, terms))
        result = run(self.scenario, workload=self.workload, cost=cost).whole()
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


def read_log(path: Path, scenario: Scenario, **reading: Any) -> RequestLog:
    """Read a log of requests; HeadwayError tells what is wrong with it.

    Its format is any that traces have, among them the plain one: `arrival_s`, `prompt_tokens`,
    `output_tokens`, `ttft_s`, and `e2e_s` or `tpot_s`; `reading` is as in `read_trace`.
    """
    groups = engine_specs(scenario).values()
    kinds = {(one.model.name, one.gpu.name, one.engine.tensor_parallel_size) for one in groups}
    if len(kinds) > 1:
        raise HeadwayError(
            "cluster.groups: several models, GPUs or sizes, each with a cost of its own: calibrate "
            "a scenario of one group by the requests of that group"
        )
    client = scenario.cluster.client if scenario.cluster else None
    patience = client.timeout if client else None
    requests = read_requests(path, failed=True, timeout=patience, **reading)
    if requests.answered < FEWEST:
        raise HeadwayError(
            f"{path}: {requests.answered} requests are too few to fit: it takes {FEWEST} or more"
        )
    if not any(np.isfinite(getattr(requests, name)).any() for name in LATENCIES):
        raise HeadwayError(f"{path}:1: lacks a column of latencies: ttft_s, tpot_s or e2e_s")
    if requests.unended:
        some = f"{requests.unended} of {len(requests)} requests"
        text = f"{path}: nothing tells when {some} failed; if they loaded the server until then, "
        warnings.warn(f"{text}the fit is not to be trusted", HeadwayWarning, stacklevel=2)
    if "columns" not in reading:
        _check_misspelt(path, requests)
    run = Run({"run_id": path.name}, {}, {})
    workload = replay(run, requests, read_config(sibling_file(path, "config.json")))
    workload.model = requests.asked.get("model")
    settle_models(scenario, workload)
    warn_of_images(workload.source, workload.images)
    whole = cost = resolve(scenario).cost
    while isinstance(cost, ADDING):
        cost = cost.inner
    if not isinstance(cost, Fitted) or not cost.fitted_terms:
        what = "it is of a pipeline, or of data-parallel ranks that share experts"
        raise HeadwayError(f"cost {cost.name}: has no terms to fit: {what}")
    block = np.arange(len(requests)) * BLOCKS // len(requests)
    return RequestLog(requests, workload, scenario, cost, whole_cost=whole, block=block)


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
                "--columns which columns have what"
            )


def _in_place(whole: CostModel, cost: Fitted) -> CostModel:
    """Put a cost in place of the one beneath what others add."""
    return replace(whole, inner=_in_place(whole.inner, cost)) if isinstance(whole, ADDING) else cost


def terms_of(cost: Fitted, client: float = 0.0) -> Floats:
    """Return a cost model's terms."""
    return np.array([*(getattr(cost, field) for field in cost.fitted_terms.values()), client])


def with_terms(cost: Fitted, terms: Floats) -> Fitted:
    """Put terms into a cost model."""
    fields = cost.fitted_terms.values()
    changed: dict[str, Any] = dict(zip(fields, map(float, terms[:-1]), strict=True))
    return replace(cost, **changed)


def scaled(names: Sequence[str], key: str) -> Floats:
    """Return a scale of each term, s."""
    scales = HIDDEN_SCALES if "host" in names else SCALES
    units = key in ("first", "half_width")
    return np.array([getattr(scales[n], key) * (scales[n].unit if units else 1.0) for n in names])
