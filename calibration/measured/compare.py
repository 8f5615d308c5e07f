"""Measure a simulation as a run was measured: latencies, throughput, and gauges over time."""

from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.errors import Floats
from calibration.measured.requests import Requests
from calibration.measured.runs import BLANK, Run
from calibration.text_files import read_rows
from headway.planning.sensitivity import BATCH_MEANS, Sensitivity, batch_means
from headway.twin.polled_gauges import Gauges, polled_gauges
from simulator.results.request_table import gather_requests
from simulator.simulation.result import Result
from simulator.util.errors import HeadwayError

LATENCIES = ("ttft", "tpot", "e2el")
MIN_GAUGE_MEAN = 0.1  # a mean below it is nothing to compare
TIME_COLUMNS = ("relative_time_sec", "t", "time_s", "time")
KV_SHARE = "kv_cache_usage_perc"  # vLLM's gauge: a share, for all that its name says
GAUGE_COLUMNS = {
    "running": ("num_requests_running", "running"),
    "waiting": ("num_requests_waiting", "waiting"),
    "kv_usage": ("kv_cache_usage_pct", "kv_cache_pct", KV_SHARE),
}


@dataclass(frozen=True)
class MetricComparison:
    """One metric: ms, requests/s, tokens/s, or a share."""

    metric: str
    predicted: float
    measured: float  # NaN: nothing was measured of the whole run

    @property
    def error(self) -> float:
        """Relative error of the prediction; NaN where nothing was measured."""
        return self.predicted / self.measured - 1.0 if self.measured else nan


def measured_gauges(path: Path) -> Gauges | None:
    """Read a server's polls; None where they tell nothing. A column of zeros was not recorded.

    HeadwayError where the file is damaged, ValueError where a cell holds no number.
    """
    rows = read_rows(path)
    known = list(rows[0]) if rows else []
    time = next((word for word in TIME_COLUMNS if word in known), None)
    found = {
        ours: next((word for word in theirs if word in known), None)
        for ours, theirs in GAUGE_COLUMNS.items()
    }
    columns = {
        ours: np.array([float(row[theirs] or "nan") for row in rows])
        for ours, theirs in found.items()
        if theirs is not None
    }
    if found["kv_usage"] == KV_SHARE:
        columns["kv_usage"] *= 100
    columns = {name: column for name, column in columns.items() if np.nansum(column) > 0}
    if time is None or not columns:
        return None
    return Gauges(np.array([float(row[time]) for row in rows]), columns)


def mean_of(gauges: Gauges, name: str) -> float:
    """Return the mean of a gauge over time."""
    widths = np.diff(gauges.time)
    total = float(widths.sum())
    values = gauges.columns[name][:-1]
    return float((values * widths).sum()) / total if total > 0 else 0.0


def predicted_gauges(result: Result) -> Gauges:
    """Return the simulation's gauges, a value for each logged row of steps."""
    log = result.logs[0]
    steps = log.steps
    return Gauges(
        np.append(steps["start"], steps["end"][-1:]),
        {
            "running": np.append(steps["running"].astype(float), 0.0),
            "waiting": np.append(steps["waiting"].astype(float), 0.0),
            "kv_usage": np.append(steps["blocks_used"] / log.num_blocks * 100.0, 0.0),
        },
    )


@dataclass
class Outcome:
    """What became of one run: its metrics, or why there are none."""

    run: Run
    rows: list[MetricComparison] = field(default_factory=list)
    reason: str = ""  # why it cannot be predicted
    impossible: str = ""  # by how much it beats the data sheet; then it is no part of any mean
    load: dict[str, Any] | None = None  # how near the load is to saturation; None: no rate
    sensitivity: list[Sensitivity] = field(default_factory=list)
    computed: float = nan  # tokens of a prompt that are not in the prefix cache, in the mean
    profile: str = ""
    engine: str = ""  # the rules that the simulation followed, in a line
    notes: list[str] = field(default_factory=list)  # what the prediction had to assume
    samples: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)
    gauges: tuple[Gauges, Gauges] | None = None  # predicted, measured

    def interval(self, metric: str) -> tuple[float, float] | None:
        """Return the 95 % interval of a prediction; None: it has none."""
        return next((one.interval for one in self.sensitivity if one.metric == metric), None)


def compare(outcome: Outcome, result: Result, requests: Requests | None, before: int = 0) -> None:
    """Put the run's numbers beside the simulation's.

    The first `before` requests are no part of the run: they filled its prefix cache. Where a
    per-request file has times, both are computed over the same requests: those that both completed,
    without the first, which met a cold engine. What it has no times of are the row's numbers. Where
    requests failed, how many did is compared, too.
    """
    table = gather_requests(result.workload, result.sent, result.logs)
    keep = table.completed.copy()
    lost = int((~keep[before:]).sum())
    keep[:before] = False
    if not keep.any():
        raise ValueError("; ".join(result.warnings) or "no request was completed in simulation")
    simulated = {"ttft": table.ttft, "tpot": table.tpot, "e2el": table.e2el}
    if lost:
        outcome.notes.append(f"{lost} of {len(keep)} requests were rejected or given up")
    if requests is None:
        output = result.workload.output_tokens
        predicted = _statistics(simulated, output, keep, _gaps(outcome.run, result, output))
        predicted |= _throughput(result.sent, table.finish, result.workload.output_tokens, keep)
        measured = dict(outcome.run.measured)
        failed = outcome.run.number("n_failed")
    else:
        given_up = np.isfinite(requests.patience if requests.patience is not None else np.nan)
        keep &= ~given_up
        failed = float(np.sum(given_up))
        recorded = {"ttft": requests.ttft, "tpot": requests.tpot, "e2el": requests.e2el}
        if len(keep) > 1 and requests.timed:
            keep[0] = False
        timed = _statistics(recorded, requests.output, keep)
        by_token = "mean_itl_ms" in timed  # else the row has it, if any
        gaps = None if by_token else _gaps(outcome.run, result, requests.output)
        predicted = _statistics(simulated, requests.output, keep, gaps)
        predicted |= _throughput(result.sent, table.finish, requests.output, keep)
        measured = dict(outcome.run.measured) | timed
        measured |= _throughput(requests.arrival, requests.ends, requests.output, keep)
        for name, column in recorded.items():
            both = keep & ~np.isnan(column) & ~np.isnan(simulated[name])
            if both.any():
                outcome.samples[name] = simulated[name][both] * 1e3, column[both] * 1e3
    if failed:
        measured["failed_requests"], predicted["failed_requests"] = failed, float(lost)
    outcome.rows = [
        MetricComparison(name, predicted[name], value)
        for name, value in measured.items()
        if name in predicted and not isnan(value) and not isnan(predicted[name])
    ]
    if not outcome.rows:
        outcome.notes.append("nothing measured is recorded: the prediction alone")
        outcome.rows = [MetricComparison(name, value, nan) for name, value in predicted.items()]


def completed_means(result: Result, before: int) -> dict[str, Any]:
    """Return latencies, ms, and what a request computes, tokens, without the first requests.

    And, under BATCH_MEANS, the means of batches of requests.
    """
    table = gather_requests(result.workload, result.sent, result.logs)
    keep = table.completed.copy()
    keep[:before] = False
    if not keep.any():
        return {BATCH_MEANS: {}}
    columns = {name: getattr(table, name) for name in ("ttft", "tpot", "e2el")}
    output = result.workload.output_tokens
    found = _statistics(columns, output, keep)
    found["computed"] = float((result.workload.prompt_tokens - table.cached)[keep].mean())
    found["output"] = float(output[keep].mean())
    batches = {f"mean_{name}_ms": column * 1e3 for name, column in columns.items()}
    return found | {BATCH_MEANS: batch_means(batches, keep)}


def _gaps(run: Run, result: Result, output: npt.NDArray[np.int64]) -> Floats | None:
    """Return the gaps of each answer between what a client got at once; None: between tokens.

    Chunks of k tokens come as by vLLM's stream_interval: the first token alone, the last ones
    whatever their number. Of steps each chunk has the drafts that are accepted, in the mean.
    """
    by = run.word("itl_by").lower() if "mean_itl_ms" in run.measured else ""
    if by in BLANK or by == "token":
        return None
    if by == "step":
        drafts = np.concatenate([log.drafts for log in result.logs])
        decodes, accepted = (int(drafts[name].sum()) for name in ("decodes", "accepted"))
        return (output - 1) / (1.0 + accepted / decodes) if decodes else None
    if not by.isdecimal() or int(by) < 1:
        raise ValueError(f"itl_by: must be token, step or a number of tokens, not {by!r}")
    return np.ceil((output - 1) / int(by))


def _statistics(
    columns: dict[str, Floats],
    output: npt.NDArray[np.int64],
    keep: npt.NDArray[np.bool_],
    gaps: Floats | None = None,
) -> dict[str, float]:
    """Return mean, P50, P90 and P99 of each latency, ms; ITL is the mean over all `gaps`.

    By default these are between tokens.
    """
    found = {}
    for name, column in columns.items():
        values = column[keep & ~np.isnan(column)] * 1e3
        if not len(values):
            continue
        found[f"mean_{name}_ms"] = float(values.mean())
        for p in (50, 90, 99):
            found[f"p{p}_{name}_ms"] = float(np.percentile(values, p))
    timed = keep & (output > 1) & ~np.isnan(columns["tpot"])
    if timed.any():
        tokens = output[timed] - 1
        number = tokens if gaps is None else gaps[timed]
        found["mean_itl_ms"] = float((columns["tpot"][timed] * tokens).sum() / number.sum()) * 1e3
    return found


def _throughput(
    sent: Floats, ends: Floats, output: npt.NDArray[np.int64], keep: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """Return requests/s and output tokens/s from the first request to the last token."""
    good = keep & ~np.isnan(ends)
    span = float(ends[good].max() - sent[good].min()) if good.any() else 0.0
    if span <= 0:
        return {}
    return {
        "request_throughput": float(good.sum()) / span,
        "output_throughput": float(output[good].sum()) / span,
    }


def compare_gauges(
    outcome: Outcome, result: Result, polls: Path, *, same_clock: bool = False
) -> None:
    """Put a server's polls beside the simulation's; what is wrong with them is a note.

    With `same_clock` their times are those of the requests: the simulation is looked at then, too.
    """
    try:
        measured = measured_gauges(polls)
    except (HeadwayError, ValueError) as error:
        outcome.notes.append(f"{polls.name}: left out: {error}")
        return
    if measured is None:
        return
    if same_clock:
        predicted = polled_gauges(result.logs[0], measured.time)
    else:
        predicted = predicted_gauges(result)
    outcome.gauges = predicted, measured
    outcome.rows += [
        MetricComparison(f"mean_{name}", mean_of(predicted, name), mean)
        for name in measured.columns
        if (mean := mean_of(measured, name)) >= MIN_GAUGE_MEAN
    ]
