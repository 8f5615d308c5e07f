"""Validate: a live run against the simulation of the same scenario.

Three comparisons: each step's time as predicted for just what it computed (teacher-forced); the
run as a whole, simulated freely; and, where the live run was repeated, live against live, since
no prediction can be closer to a run than its own repetition.
"""

import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path

import numpy as np

from calibration.engine_steps.live_folder import (
    RERUN_PATTERN,
    MeasuredStep,
    read_about,
    read_measured,
    read_requests,
)
from calibration.errors import Errors, Floats
from calibration.plots import plot_live
from calibration.text_files import read_json
from simulator.costs.cost_model import CostModel
from simulator.costs.profile import shipped_profiles
from simulator.results.request_table import gather_requests
from simulator.scenario.load import load_scenario
from simulator.simulation.result import Result
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.files import Contents, write_together

STATISTICS = {"mean": "mean", "median": "median", "p99": "P99"}
METRICS = (
    ("request_throughput", "Request throughput"),
    ("output_throughput", "Output throughput"),
    *(
        (f"{key}_{name}_ms", f"{name.upper()} {word}")
        for name in ("ttft", "tpot", "e2el")
        for key, word in STATISTICS.items()
    ),
)
UNITS = {"Request throughput": "(1/s)", "Output throughput": "(tok/s)"}
"""Of the metrics that are not latencies, which are in ms."""
OFTEN = 20  # steps, of which a spread tells
DISTURBED = 3.0  # P90 over P10 of one kind of steps; on a core of its own an engine had 1.4 at most


@dataclass(frozen=True)
class LiveMetric:
    """One metric of the whole run: live, simulated, and what live runs differ by."""

    label: str
    live: float
    simulated: float
    band: tuple[float, float] | None  # relative to the live run, of its repetitions

    @property
    def error(self) -> float:
        """Relative error of the simulation."""
        return self.simulated / self.live - 1.0 if self.live else float("nan")


@dataclass(frozen=True)
class Validation:
    """All that the comparison found."""

    device: str
    clock: str
    measure: str  # cpu or wall: what a step's time is here
    steps: dict[str, Errors]
    free: list[LiveMetric]
    per_request: dict[str, float]  # median absolute relative errors of ttft, tpot, e2el
    preemptions: tuple[int, int]  # live, simulated
    schedule_s: float  # median CPU time of scheduler and log per step; NaN: not measured
    reruns: int


def validate(folder: Path, profile: str | None = None, out: Path | None = None) -> Validation:
    """Compare the live run in `folder` with its simulation; write validation.json and .png.

    `profile` replaces the cost of the run's scenario. Nothing runs on a device.
    """
    about = read_about(folder)
    steps = read_measured(folder)
    result = run(load_scenario(folder / "scenario.yaml", _override(profile)))
    in_parts = all(isfinite(step.schedule) for step in steps)
    own = about["device"] == "cpu" and about["clock"] != "wall" and in_parts
    measure = "cpu" if own else "wall"
    forced = teacher_forced(steps, result.spec.cost, measure)
    reruns = [_summary(path) for path in sorted(folder.glob(RERUN_PATTERN))]
    found = Validation(
        device=str(about["device"]),
        clock=str(about["clock"]),
        measure=measure,
        steps={name: Errors.of(*pair) for name, pair in forced.items()},
        free=_compare(_summary(folder), result.summary(), reruns),
        per_request=_per_request(folder, result),
        preemptions=(_preemptions(_summary(folder)), _preemptions(result.summary())),
        schedule_s=float(np.median([step.schedule for step in steps])),
        reruns=len(reruns),
    )
    if not reruns:
        warnings.warn(
            f"{folder}: the run was not repeated, so nothing tells how far live runs differ; "
            "`headway live --reruns 2` would",
            HeadwayWarning,
            stacklevel=2,
        )
    if (spread := spread_of(steps, measure)) > DISTURBED:
        warnings.warn(
            f"{folder}: something disturbed the machine: steps of the same number of decodes "
            f"differ {spread:.1f}-fold (P90 over P10), so its times are not the engine's alone",
            HeadwayWarning,
            stacklevel=2,
        )
    parts = {name: pair for name, pair in forced.items() if name != "all steps"}
    metrics = [(metric.label, metric.error, metric.band) for metric in found.free]
    title = f"Simulation against a live run on {found.device}"
    text = json.dumps(_null_for_nan(asdict(found)), indent=1, allow_nan=False)
    draw = partial(plot_live, title, parts, metrics)
    files: dict[str, Contents] = {"validation.json": f"{text}\n".encode(), "validation.png": draw}
    write_together(out or folder, files)
    return found


def _null_for_nan(value: object) -> object:
    """Put null for every number that JSON cannot hold: there was nothing to take it from."""
    if isinstance(value, dict):
        return {key: _null_for_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_null_for_nan(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _override(profile: str | None) -> list[str]:
    """Put another profile into the scenario; a path counts from where we are, not from there."""
    if profile is None:
        return []
    if profile not in shipped_profiles():
        path = Path(profile).resolve()
        if not path.is_file():
            raise HeadwayError(f"--profile {profile}: no such file and no shipped profile")
        profile = str(path)
    return [f"cost={{profile: {json.dumps(profile)}}}"]


def teacher_forced(
    steps: Sequence[MeasuredStep], cost: CostModel, measure: str
) -> dict[str, tuple[Floats, Floats]]:
    """Predict every live step from what it computed; give predicted and measured seconds."""
    predicted = np.array([cost.execute(step.row.step).seconds for step in steps])
    measured = np.array([step.seconds(measure) for step in steps])
    prompts = np.array([bool(step.row.chunks) for step in steps])
    groups = {"all steps": np.ones(len(steps), bool), "decode": ~prompts, "with prompts": prompts}
    return {name: (predicted[g], measured[g]) for name, g in groups.items() if g.any()}


def spread_of(steps: Sequence[MeasuredStep], measure: str) -> float:
    """Return by how much steps of one kind differ: P90 over P10, the most of the kinds; else 1.

    A kind are the steps of as many decodes, without prompts, that came often; each is taken
    relative to its prediction, since contexts differ.
    """
    kinds = defaultdict[int, list[float]](list)
    for step in steps:
        if not step.row.chunks and step.predicted:
            kinds[step.row.decodes].append(step.seconds(measure) / step.predicted)
    often = [ratios for ratios in kinds.values() if len(ratios) >= OFTEN]
    lows, highs = (np.array([np.percentile(one, at) for one in often]) for at in (10, 90))
    return float((highs / lows).max(initial=1.0))


def _summary(folder: Path) -> dict[str, object]:
    path = folder / "summary.json"
    summary = read_json(path)
    if lacking := [key for key, _ in METRICS if key not in summary]:
        raise HeadwayError(f"{path}: damaged: lacks {', '.join(lacking)}")
    return summary


def _compare(
    live: Mapping[str, object],
    simulated: Mapping[str, object],
    reruns: Sequence[Mapping[str, object]],
) -> list[LiveMetric]:
    found = []
    for key, label in METRICS:
        base = _float(live[key])
        others = [_float(rerun[key]) / base - 1.0 for rerun in reruns] if base else []
        band = (min(0.0, *others), max(0.0, *others)) if others else None
        found.append(LiveMetric(label, base, _float(simulated[key]), band))
    return found


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _preemptions(summary: Mapping[str, object]) -> int:
    engine = summary.get("headway")
    return int(engine["preemptions"]) if isinstance(engine, dict) else -1


def _per_request(folder: Path, result: Result) -> dict[str, float]:
    """Return the median absolute relative error of single requests."""
    table = gather_requests(result.workload, result.sent, result.logs)
    errors = {}
    for name, column in read_requests(folder).items():
        live, simulated = column.to_numpy(), getattr(table, str(name))
        if len(live) != len(simulated):
            raise HeadwayError(
                f"{folder}: has {len(live)} requests, but its scenario makes {len(simulated)}"
            )
        both = np.isfinite(live) & np.isfinite(simulated) & (live > 0)
        off = np.abs(simulated[both] / live[both] - 1.0)
        errors[str(name)] = float(np.median(off)) if both.any() else float("nan")
    return errors


def table(found: Validation) -> str:
    """Write the comparison as text."""
    return "\n".join(_table(found))


def _table(found: Validation) -> Iterator[str]:
    kind = "CPU time" if found.measure == "cpu" else "wall time"
    yield f"Live on {found.device}, clock {found.clock}; steps in {kind}"
    yield f"{'Predicted steps':<22}{'steps':>9}{'median':>9}{'P95':>9}{'bias':>9}"
    for name, errors in found.steps.items():
        yield (
            f"{name:<22}{errors.points:>9,}{errors.median:>9.1%}{errors.p95:>9.1%}"
            f"{errors.bias:>+9.1%}"
        )
    yield ""
    yield f"{'Simulated run':<28}{'live':>11}{'simulated':>11}{'error':>8}   live vs live"
    for free in found.free:
        band = "" if free.band is None else f"   {free.band[0]:+.1%} to {free.band[1]:+.1%}"
        label = f"{free.label} {UNITS.get(free.label, '(ms)')}"
        yield f"{label:<28}{free.live:>11.2f}{free.simulated:>11.2f}{free.error:>+8.1%}{band}"
    for name, error in found.per_request.items():
        yield f"{name.upper() + ' of a request':<28}{'median absolute error':>22}{error:>8.1%}"
    live, simulated = found.preemptions
    yield f"{'Preemptions':<28}{live:>11}{simulated:>11}"
    if isfinite(found.schedule_s):
        yield f"Scheduler and log: {found.schedule_s * 1e3:.3f} ms of CPU time per step (median)"
