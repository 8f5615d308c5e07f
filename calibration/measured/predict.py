"""Simulate a measured run, and measure the simulation as the run was measured."""

import warnings
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from calibration.measured import names
from calibration.measured.costs import with_tables, with_terms
from calibration.measured.engine import assumptions, engine_block, refuse_what_is_not_replayed
from calibration.measured.gauges import Gauges, measured_gauges, predicted_gauges
from calibration.measured.requests import Requests, read_requests
from calibration.measured.runs import Run
from calibration.measured.workload import frontend, make, read_config, replay
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from simulator.scenario.assemble import Parts
    from simulator.scenario.scenario import Scenario
    from simulator.simulation.result import Result
    from simulator.workload.workload import Workload

Floats = npt.NDArray[np.float64]
LATENCIES = ("ttft", "tpot", "e2el")
LEAST_GAUGE = 0.1  # a mean below it is nothing to compare


@dataclass(frozen=True)
class Compared:
    """One metric: ms, requests/s, tokens/s, or a share."""

    metric: str
    predicted: float
    measured: float  # NaN: nothing was measured of the whole run

    @property
    def error(self) -> float:
        """Relative error of the prediction; NaN where nothing was measured."""
        return self.predicted / self.measured - 1.0 if self.measured else nan


@dataclass
class Outcome:
    """What became of one run: its metrics, or why there are none."""

    run: Run
    rows: list[Compared] = field(default_factory=list)
    reason: str = ""  # why it cannot be predicted
    profile: str = ""
    engine: str = ""  # the rules that the simulation followed, in a line
    notes: list[str] = field(default_factory=list)  # what the prediction had to assume
    samples: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)
    gauges: tuple[Gauges, Gauges] | None = None  # predicted, measured


def predict(run: Run, folder: Path, terms: tuple[float, float] | None = None) -> Outcome:
    """Simulate a run and compare; a run that cannot be simulated comes back with the reason.

    `terms` are the seconds that a step waits for, and each sequence in it, in place of the
    engine's.
    """
    outcome = Outcome(run, reason="; ".join(run.faults))
    if run.faults:
        return outcome
    outcome.notes += run.remarks
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _predict(outcome, folder, terms)
        outcome.notes += list(dict.fromkeys(str(warning.message) for warning in caught))
    except (HeadwayError, ValueError) as error:
        outcome.reason = "; ".join(str(error).split("\n"))
    except Exception as error:  # one run must not take the others with it
        outcome.reason = f"{type(error).__name__}: {error}"
    return outcome


def _predict(outcome: Outcome, folder: Path, terms: tuple[float, float] | None) -> None:
    run = outcome.run
    refuse_what_is_not_replayed(run)
    outcome.notes += assumptions(run)
    path = find_file(folder, run.word("per_request_file"))
    requests = None if path is None else read_requests(path)
    if requests is None:
        workload = make(run)
    else:
        workload = replay(run, requests, read_config(companion(path, "config.json")))
    workload.check()
    scenario, parts = assemble_run(run, folder)
    if not _in_lock_step(scenario, parts):
        parts = with_tables(parts, scenario.engine)
    if terms is not None:
        parts = with_terms(parts, *terms)
    workload.frontend = frontend(run)
    outcome.profile = parts.cost.name or "?"
    outcome.engine = _rules(scenario, parts)
    result = _play(scenario, parts, workload)
    _compare(outcome, result, requests)
    if len(result.logs) > 1:
        return  # polls of several engines are not told apart
    polls = companion(path, "server.csv.gz") or companion(path, "timeseries.csv.gz")
    if polls is not None:
        _compare_gauges(outcome, result, polls)


def _compare_gauges(outcome: Outcome, result: "Result", polls: Path) -> None:
    """Put a server's polls beside the simulation's; what is wrong with them is a note."""
    try:
        measured = measured_gauges(polls)
    except (HeadwayError, ValueError) as error:
        outcome.notes.append(f"{polls.name}: left out: {error}")
        return
    if measured is None:
        return
    outcome.gauges = predicted_gauges(result), measured
    outcome.rows += [
        Compared(f"mean_{name}", theirs[0], theirs[1])
        for name in measured.columns
        if (theirs := _means(outcome.gauges, name))[1] >= LEAST_GAUGE
    ]


def _play(scenario: "Scenario", parts: "Parts", workload: "Workload") -> "Result":
    """Send the workload to the engine, or to the replicas of a data-parallel one."""
    import simpy

    from simulator.engine.async_replica import make_replica
    from simulator.scenario import make_scheduler
    from simulator.simulation.cluster import run_cluster
    from simulator.simulation.run import play

    if scenario.cluster is not None:
        cost = None if _in_lock_step(scenario, parts) else parts.cost
        return run_cluster(scenario, workload=workload, cost=cost)
    scheduler = make_scheduler(scenario, parts, workload.segments is not None)
    return play(scenario, parts, workload, make_replica(simpy.Environment(), scheduler, parts.cost))


def _in_lock_step(scenario: "Scenario", parts: "Parts") -> bool:
    """Tell whether ranks share experts: what that costs is put together with the ranks alone."""
    return scenario.engine.data_parallel_size > 1 and parts.model.num_experts > 0


def assemble_run(run: Run, folder: Path = Path()) -> "tuple[Scenario, Parts]":
    """Give the scenario and its parts for a run's model, GPU and engine."""
    from simulator.scenario.assemble import assemble
    from simulator.scenario.load import check_scenario
    from simulator.util.yaml_lines import Places

    gpu = names.gpu_name(run.word("gpu"))
    engine = engine_block(run, gpu)
    gpus = engine["tensor_parallel_size"] * engine["data_parallel_size"]
    raw = {
        "name": "measured",
        "model": names.model_name(run.word("model"), folder),
        "gpu": {"name": gpu, "count": gpus},
        "engine": engine,
    }
    scenario = check_scenario(raw, Places(run.run_id, {}))
    return scenario, assemble(scenario)


def _rules(scenario: "Scenario", parts: "Parts") -> str:
    engine = scenario.engine
    kind = "asynchronous" if engine.async_scheduling else "synchronous"
    cached = "on" if engine.enable_prefix_caching else "off"
    return (
        f"{kind}, max_num_seqs {engine.max_num_seqs}, max_num_batched_tokens "
        f"{engine.max_num_batched_tokens}, KV {parts.num_gpu_blocks * engine.block_size:,} tokens, "
        f"prefix cache {cached}"
    )


def _means(pair: tuple[Gauges, Gauges], name: str) -> tuple[float, float]:
    predicted, measured = (gauges.mean(name) for gauges in pair)
    return predicted, measured


def find_file(folder: Path, name: str) -> Path | None:
    """Find a file that runs.csv names: from the folder, from the one above it, or beside it."""
    if not name:
        return None
    places = (folder / name, folder.parent / name, folder / Path(name).name)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise HeadwayError(f"per_request_file: no file {places[0]}")
    return found


def companion(path: Path | None, ending: str) -> Path | None:
    """Find `RUN__ENDING` beside `RUN__requests.csv.gz`."""
    if path is None or "requests" not in path.name:
        return None
    other = path.with_name(path.name[: path.name.rindex("requests")] + ending)
    return other if other.is_file() else None


def _compare(outcome: Outcome, result: "Result", requests: Requests | None) -> None:
    """Put the run's numbers beside the simulation's.

    With a per-request file both are computed over the same requests: those that both completed,
    without the first, which met a cold engine. Else the row's numbers are the measured ones.
    """
    from simulator.results.request_table import gather_requests

    table = gather_requests(result.workload, result.sent, result.logs)
    keep = table.completed.copy()
    if not keep.any():
        raise ValueError("; ".join(result.warnings) or "no request was completed in simulation")
    simulated = {"ttft": table.ttft, "tpot": table.tpot, "e2el": table.e2el}
    if lost := int((~keep).sum()):
        outcome.notes.append(f"{lost} of {len(keep)} requests were rejected in simulation")
    if requests is None:
        predicted = _statistics(simulated, result.workload.output_tokens, keep)
        predicted |= _throughput(result.sent, table.finish, result.workload.output_tokens, keep)
        measured = dict(outcome.run.measured)
    else:
        recorded = {"ttft": requests.ttft, "tpot": requests.tpot, "e2el": requests.e2el}
        if len(keep) > 1:
            keep[0] = False
        predicted = _statistics(simulated, requests.output, keep)
        predicted |= _throughput(result.sent, table.finish, requests.output, keep)
        measured = _statistics(recorded, requests.output, keep)
        ends = requests.arrival + requests.e2el
        measured |= _throughput(requests.arrival, ends, requests.output, keep)
        for name, column in recorded.items():
            both = keep & ~np.isnan(column) & ~np.isnan(simulated[name])
            outcome.samples[name] = simulated[name][both] * 1e3, column[both] * 1e3
    outcome.rows = [
        Compared(name, predicted[name], value)
        for name, value in measured.items()
        if name in predicted and not isnan(value) and not isnan(predicted[name])
    ]
    if not outcome.rows:
        outcome.notes.append("nothing measured is recorded: the prediction alone")
        outcome.rows = [Compared(name, value, nan) for name, value in predicted.items()]


def _statistics(
    columns: dict[str, Floats], output: npt.NDArray[np.int64], keep: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """Give mean, P50, P90 and P99 of each latency, ms; ITL is the mean over all gaps."""
    found = {}
    for name, column in columns.items():
        values = column[keep & ~np.isnan(column)] * 1e3
        if not len(values):
            continue
        found[f"mean_{name}_ms"] = float(values.mean())
        for p in (50, 90, 99):
            found[f"p{p}_{name}_ms"] = float(np.percentile(values, p))
    gaps = keep & (output > 1) & ~np.isnan(columns["tpot"])
    if gaps.any():
        weights = output[gaps] - 1
        found["mean_itl_ms"] = float(np.average(columns["tpot"][gaps], weights=weights)) * 1e3
    return found


def _throughput(
    sent: Floats, ends: Floats, output: npt.NDArray[np.int64], keep: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """Give requests/s and output tokens/s from the first request to the last token."""
    good = keep & ~np.isnan(ends)
    span = float(ends[good].max() - sent[good].min()) if good.any() else 0.0
    if span <= 0:
        return {}
    return {
        "request_throughput": float(good.sum()) / span,
        "output_throughput": float(output[good].sum()) / span,
    }
