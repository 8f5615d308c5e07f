"""Fit a whole cost model to the latencies of loads that were sent to a server, kernels and all.

A latency is a sum of steps, and a step's time a sum of terms that are linear in their coefficients
(`calibration.engine_steps.fit`). Which steps a request sat through, a simulation of its load tells,
under the cost that was found before: so simulation and least squares take turns until the terms
stay. A request gives two equations, one of its TTFT, with a constant for the way between client and
scheduler, and one of the time from its first token to its last. Errors are relative, so a
request whose tokens came at once, to a client that was stalled, would decide alone: it is left out.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibration.engine_steps.fit import (
    Form,
    cost_of,
    features_of,
    limits_of,
    linear_pieces,
    solve,
    with_buckets,
)
from calibration.engine_steps.steps_file import Row
from calibration.errors import Floats, root_mean_square
from simulator.build.assemble_scheduler import make_scheduler
from simulator.build.engine_spec import EngineSpec
from simulator.core.alarm import FastEnvironment
from simulator.core.executor import Timing
from simulator.core.request import Step
from simulator.costs.cost_model import CostModel
from simulator.costs.piecewise import PiecewiseCost
from simulator.engine.replica import Replica
from simulator.results.request_table import RequestTable, gather_requests
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import play
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.workload import Frontend, Workload

ROUNDS = 12  # of simulation and fit, at most
SETTLED = 0.002  # relative change of the mean latency between rounds, below which they end
FEWEST = 60  # requests
LATENCY_ROUNDS = 4  # of asking what lies before the scheduler
BURST = 3.0  # times as fast as the fastest load's median TPOT: no step is, its tokens came at once


@dataclass(frozen=True)
class Load:
    """Requests that were sent to a server, and what was measured of them; NaN: no answer."""

    name: str
    workload: Workload
    ttft: Floats  # s
    e2el: Floats
    held_out: bool = False

    @property
    def tpot(self) -> Floats:
        """Seconds per token after the first; NaN for a single token."""
        after = np.where(self.workload.output_tokens > 1, self.workload.output_tokens - 1.0, np.nan)
        return np.asarray((self.e2el - self.ttft) / after)


class _RecordingCost:
    """Keeps what each step computed."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.rows: list[Row] = []

    def execute(self, step: Step) -> Timing:
        timing = self.cost.execute(step)
        seconds = timing.seconds
        chunks = tuple((chunk.start, chunk.tokens) for chunk in step.prefills)
        longest = int(np.ceil(step.context / step.decodes)) if step.decodes else 0
        row = Row(
            run="", kind="onpolicy", turn=len(self.rows), decodes=step.decodes,
            context=step.context, longest=longest, chunks=chunks, device_s=seconds, wall_s=seconds,
        )  # fmt: skip
        self.rows.append(row)
        return timing


@dataclass(frozen=True)
class Played:
    """A simulated load: its steps, when each began and ended (s), and its requests."""

    rows: list[Row]
    start: Floats
    end: Floats
    table: RequestTable


def play_load(
    scenario: Scenario,
    parts: EngineSpec,
    cost: CostModel,
    workload: Workload,
    latency: float = 0.0,
) -> Played:
    """Simulate a load step by step under a cost, so many seconds between client and scheduler."""
    scheduler = make_scheduler(parts, workload.segments is not None)
    recording = _RecordingCost(cost)
    replica = Replica(FastEnvironment(), scheduler, recording, leap=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadwayWarning)  # of steps beyond a range
        load = replace(workload, frontend=Frontend(latency=latency))
        result = play(scenario, parts, load, replica).whole()
    steps = result.logs[0].steps
    table = gather_requests(workload, result.sent, result.logs)
    return Played(recording.rows[: len(steps)], steps["start"], steps["end"], table)


@dataclass(frozen=True)
class LoadsFit:
    """A fitted cost, and the seconds between a client and the scheduler."""

    cost: PiecewiseCost
    latency: float
    residuals: Mapping[str, float]  # by regime, as a profile has them
    left_out: int = 0  # requests whose tokens came in a burst


def fit_loads(scenario: Scenario, loads: Sequence[Load], start: LoadsFit | None = None) -> LoadsFit:
    """Fit a cost to loads, beginning with that of `start`, else of the scenario.

    HeadwayError where too few requests were answered.
    """
    loads, left_out = _without_bursts(loads)
    answered = sum(int(np.isfinite(load.e2el).sum()) for load in loads)
    if answered < FEWEST:
        raise HeadwayError(f"{answered} answered requests are too few to fit: it takes {FEWEST}")
    parts = resolve(scenario)
    sizes = getattr(parts.cost, "cudagraph_capture_sizes", ())
    cost, latency = (parts.cost, 0.0) if start is None else (start.cost, start.latency)
    before = np.inf
    for _ in range(ROUNDS):
        played = [play_load(scenario, parts, cost, load.workload, latency) for load in loads]
        rows = [with_buckets(one.rows, sizes) for one in played]
        every = [row for some in rows for row in some]
        most = max((row.tokens for row in every if not row.bucket), default=1)
        form = Form(linear_pieces(most), sorted({row.bucket for row in every if row.bucket}))
        pairs = zip(loads, played, rows, strict=True)
        tables, times = zip(*[_equations(*each, form, latency) for each in pairs], strict=True)
        table, measured = np.concatenate(tables), np.concatenate(times)
        weights = np.full(len(measured), 1.0 / len(measured))
        found = solve(table, measured, weights, np.zeros(len(measured)))
        latency = float(found[-1])
        fitted = replace(cost_of(found[:-1], form, 0.0), cudagraph_capture_sizes=sizes)
        cost = replace(fitted, limits=limits_of(every))
        mean = float((table @ found).mean())
        if abs(mean / before - 1.0) < SETTLED:
            break
        before = mean
    assert isinstance(cost, PiecewiseCost)
    return LoadsFit(cost, latency, residuals_of(scenario, cost, latency, loads), left_out)


def _without_bursts(loads: Sequence[Load]) -> tuple[list[Load], int]:
    """Return loads without the answers of requests whose tokens came in a burst, and their number.

    Every token after the first takes a step, and none is much shorter than those of the fastest
    load, often a lone client's. Such a request's first token was late, too.
    """
    medians = [np.median(tpot) for load in loads if len(tpot := load.tpot[load.tpot > 0])]
    least = min(medians, default=0.0) / BURST
    bursts = [load.tpot < least for load in loads]
    kept = [
        replace(
            load,
            ttft=np.where(burst, np.nan, load.ttft),
            e2el=np.where(burst, np.nan, load.e2el),
        )
        for load, burst in zip(loads, bursts, strict=True)
    ]
    return kept, int(sum(burst.sum() for burst in bursts))


def fit_latency(scenario: Scenario, cost: CostModel, loads: Sequence[Load]) -> float:
    """Return the seconds between a client and the scheduler that fit loads under a cost, >= 0.

    The median over loads of what their requests' TTFT is longer than simulated, in the median. A
    request that comes later may wait for another step, so the simulation is asked again with it.
    Where there are open loops, only these count: a closed loop begins with a burst, which a server
    takes in one by one.
    """
    parts, latency = resolve(scenario), 0.0
    loads = [load for load in loads if load.workload.max_concurrency is None] or loads
    for _ in range(LATENCY_ROUNDS):
        late = []
        for load in loads:
            table = play_load(scenario, parts, cost, load.workload, latency).table
            late.append(float(np.nanmedian(load.ttft - table.ttft)))
        latency = max(0.0, latency + float(np.median(late)))
    return latency


def residuals_of(
    scenario: Scenario, cost: CostModel, latency: float, loads: Sequence[Load]
) -> dict[str, float]:
    """Return the systematic error of loads, by regime: TPOT is decodes', TTFT that of prompts."""
    parts, found = resolve(scenario), dict[str, list[float]](decode=[], prompts=[])
    for load in loads:
        table = play_load(scenario, parts, cost, load.workload, latency).table
        for name, one, two in (
            ("decode", load.tpot, table.tpot),
            ("prompts", load.ttft, table.ttft),
        ):
            both = (one > 0) & (two > 0)
            if both.any():
                found[name].append(float(np.median(np.log(one[both] / two[both]))))
    return {name: root_mean_square(medians) for name, medians in found.items() if medians}


def _equations(
    load: Load, played: Played, steps: Sequence[Row], form: Form, latency: float
) -> tuple[Floats, Floats]:
    """Return a row for each equation of a load, the last column the constant, and its seconds."""
    each = np.array([features_of(row, form) for row in steps])
    upto = np.concatenate([np.zeros((1, each.shape[1])), np.cumsum(each, axis=0)])
    edges = np.column_stack([played.start, played.end]).ravel()
    values = np.repeat(upto, 2, axis=0)[1:-1]

    def at(times: Floats) -> Floats:
        columns = [np.interp(times, edges, values[:, k]) for k in range(values.shape[1])]
        return np.stack(columns, axis=1)

    table = played.table
    there = table.completed & np.isfinite(load.e2el)
    several = there & (load.workload.output_tokens > 1)
    first = at(table.first_token[there]) - at(table.sent[there] + latency)
    rest = at(table.finish[several]) - at(table.first_token[several])
    rows = np.concatenate([
        np.column_stack([first, np.ones(len(first))]),
        np.column_stack([rest, np.zeros(len(rest))]),
    ])  # fmt: skip
    measured = np.concatenate([load.ttft[there], (load.e2el - load.ttft)[several]])
    good = measured > 0
    return rows[good], measured[good]
