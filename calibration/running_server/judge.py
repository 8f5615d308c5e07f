"""Fit a cost to the loads that a server was sent, and judge it by those that were held out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from calibration.engine_steps.fit import HELD_OUT_PREFIX, fit_rows, with_buckets
from calibration.engine_steps.steps_file import Row
from calibration.errors import MAX_HELD_OUT_ERROR, Errors, Floats
from calibration.running_server.drive import Sent
from calibration.server_logs.from_loads import (
    Load,
    LoadsFit,
    fit_latency,
    fit_loads,
    play_load,
    residuals_of,
)
from calibration.server_logs.from_steps import FEWEST, read_steps
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError

METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Compared:
    """A load beside its simulation: each request's values, s, by metric: predicted, measured."""

    load: Load
    values: Mapping[str, tuple[Floats, Floats]]

    def error(self, metric: str) -> float:
        """The relative error of the mean."""
        predicted, measured = self.values[metric]
        return float(predicted.mean() / measured.mean() - 1.0) if len(measured) else np.nan


@dataclass(frozen=True)
class Outcome:
    """A cost fitted to all loads, and how well one predicts that has not seen those held out."""

    fit: LoadsFit
    compared: list[Compared]
    by_steps: Errors | None  # of steps held out; None: none were logged, requests were fitted
    held_out: bool  # else there was none, and the errors are those of loads fitted to

    @property
    def judged(self) -> list[Compared]:
        """The loads held out, else all."""
        return [one for one in self.compared if one.load.held_out or not self.held_out]

    @property
    def notes(self) -> list[str]:
        """Say what the fit left out."""
        if not (count := self.fit.left_out):
            return []
        return [
            f"{count} of the requests {'are' if count > 1 else 'is'} left out of the fit: all "
            "tokens came at once: the client was stalled, or the server held text back"
        ]

    @property
    def doubts(self) -> list[str]:
        """Say that the fit does not even explain what it was fitted to; nothing where it does."""
        off = [
            (abs(error), f"{error:+.0%} in {name.upper()} of {one.load.name}")
            for one in self.compared
            for name in METRICS
            if not one.load.held_out and abs(error := one.error(name)) > MAX_HELD_OUT_ERROR
        ]
        if not off:
            return []
        return [
            "the fit explains too little to be used: the means of what it was fitted to are "
            f"off by up to {max(off)[1]}"
        ]


def fit_sent(scenario: Scenario, sent: Sequence[Sent], steps: Path | None) -> Outcome:
    """Fit a cost to the steps of a server's log, or else to the requests; judge it."""
    loads = [one.load for one in sent if one.load.name != "warm-up"]
    seen = [load for load in loads if not load.held_out]
    held_out = len(seen) < len(loads)
    if steps is None:
        judged = fit_loads(scenario, seen)
        fit = fit_loads(scenario, loads, judged) if held_out else judged
        return Outcome(fit, compare(scenario, judged, loads), None, held_out)
    rows = _rows(sent, steps)
    sizes = getattr(resolve(scenario).cost, "cudagraph_capture_sizes", ())
    found = fit_rows(with_buckets(rows, sizes), "wall", sizes)
    both = []
    for cost, some in ((found.judged, seen), (replace(found.cost, limits=found.limits), loads)):
        latency = fit_latency(scenario, cost, some)
        both.append(LoadsFit(cost, latency, residuals_of(scenario, cost, latency, loads)))
    errors = found.held_out.get("all")
    return Outcome(both[1], compare(scenario, both[0], loads), errors, held_out)


def compare(scenario: Scenario, fit: LoadsFit, loads: Sequence[Load]) -> list[Compared]:
    """Simulate loads under a fit, and put the requests beside those measured."""
    parts = resolve(scenario)
    found = []
    for load in loads:
        table = play_load(scenario, parts, fit.cost, load.workload, fit.latency).table
        values = {}
        for name in METRICS:
            predicted, measured = getattr(table, name), getattr(load, name)
            both = np.isfinite(predicted) & np.isfinite(measured)
            values[name] = predicted[both], measured[both]
        found.append(Compared(load, values))
    return found


def _rows(sent: Sequence[Sent], path: Path) -> list[Row]:
    """Read the steps of the loads from a server's log, those of loads held out named so."""
    rows = read_steps(path)
    found = []
    for one in sent:
        prefix = HELD_OUT_PREFIX if one.load.held_out else "load"
        name = f"{prefix}-{one.load.name}"
        found += [replace(row, run=name) for row in rows[slice(*one.steps)]]
    if len(found) < FEWEST:
        raise HeadwayError(
            f"--steps {path}: {len(found)} steps were written while loads were sent, fewer than "
            f"{FEWEST}: is it the file that this server's recorder writes?"
        )
    return found
