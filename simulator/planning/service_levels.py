"""Service levels: bounds on the numbers of a run, as `p99_ttft_ms<=1000` or `goodput>=0.95`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simulator.planning.runs import MetricValues, metric_values
from simulator.results.metrics import PERCENTILES, keep_bounds, summarize_record
from simulator.results.request_table import Floats, RequestTable
from simulator.simulation.result import Result
from simulator.util.errors import HeadwayError

LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue_time")
SHARES = ("goodput", "completion")
"""Of all requests: those that keep the scenario's `goodput` bounds, those that were completed."""
RATES = ("output_throughput", "total_token_throughput", "request_throughput")

_TEXT = re.compile(r"\s*([\w.]+)\s*(<=|>=)\s*([-+.\deE]+)\s*")
_STATISTIC = re.compile(r"(?:mean|median|std|p(?P<p>\d+(?:\.\d+)?))_(?P<name>\w+)_ms")


@dataclass(slots=True, frozen=True)
class Slo:
    """A bound that a number of the run must keep."""

    metric: str  # vLLM bench's word, at any percentile; or one of SHARES, RATES
    at_most: bool
    bound: float
    percentile: float | None = None  # that the summary has to have for it
    latency: str = ""  # in the request table, where it is a mean or percentile over requests

    @property
    def text(self) -> str:
        """Write it as the user does."""
        return f"{self.metric}{'<=' if self.at_most else '>='}{self.bound:g}"

    def met(self, value: float) -> bool:
        """Say whether a value keeps the bound."""
        return value <= self.bound if self.at_most else value >= self.bound

    @property
    def of_requests(self) -> bool:
        """Whether it bounds a mean over requests, that of `cost`, which `limit` must not exceed."""
        return bool(self.latency) or self.metric in SHARES

    @property
    def is_share(self) -> bool:
        """Whether that mean is the share of requests that miss something."""
        return self.percentile is not None or self.metric in SHARES

    @property
    def limit(self) -> float:
        """Give the most that the mean of `cost` may be: for a P99 it is 0.01."""
        if self.metric in SHARES:
            return round(1.0 - self.bound, 12)
        return self.bound if self.percentile is None else round(1.0 - self.percentile / 100.0, 12)

    def cost(self, table: RequestTable, goodput: Mapping[str, float]) -> Floats:
        """Give what each request adds: its latency in ms for a mean, else 1 if it misses the bound.

        NaN: it does not count. A percentile keeps its bound where the share of requests above the
        bound is no more than `limit`.
        """
        completed = table.completed
        if self.metric == "completion":
            return np.where(completed, 0.0, 1.0)
        if self.metric == "goodput":
            return np.where(keep_bounds(table, completed, goodput), 0.0, 1.0)
        values: Floats = 1000.0 * getattr(table, self.latency)
        if self.percentile is not None:
            values = np.where(np.isnan(values), np.nan, values > self.bound)
        return np.where(completed, values, np.nan)

    def violation(self, value: float) -> float:
        """Say how far a value is from the bound, relative to it; 0 where it keeps it."""
        if self.met(value):
            return 0.0
        return abs(value - self.bound) / (abs(self.bound) or 1.0)


def parse_slo(text: str) -> Slo:
    """Read one bound; HeadwayError says what there is."""
    match = _TEXT.fullmatch(text)
    try:
        metric, sign, number = match.groups() if match else ("", "", "")
        bound = float(number)
    except ValueError:
        raise HeadwayError(
            f"--slo {text}: must be METRIC<=NUMBER or METRIC>=NUMBER, as p99_ttft_ms<=1000"
        ) from None
    percentile, latency = None, ""
    if metric in SHARES or metric in RATES:
        if metric in SHARES and not 0 <= bound <= 1:
            raise HeadwayError(f"--slo {text}: a share is from 0 to 1")
        useful = ">="
    else:
        named = _STATISTIC.fullmatch(metric)
        if named is None or named["name"] not in LATENCIES:
            raise HeadwayError(
                f"--slo {text}: no metric {metric!r}; there are mean, median, std and any "
                f"percentile (p99, p99.9) of {', '.join(LATENCIES)}, as p99_ttft_ms, and "
                f"{', '.join((*SHARES, *RATES))}"
            )
        if named["p"] is not None:
            percentile = float(named["p"])
            if percentile > 100:
                raise HeadwayError(f"--slo {text}: a percentile is from 0 to 100")
            short = int(percentile) if percentile.is_integer() else percentile
            metric = f"p{short}_{named['name']}_ms"  # as the summary writes it
        useful = "<="
        if named["name"] != "itl" and not metric.startswith("std"):  # gaps are of tokens
            latency = named["name"]
            percentile = 50.0 if metric.startswith("median") else percentile
    if sign != useful:
        raise HeadwayError(f"--slo {text}: {metric} is to be {useful} something")
    return Slo(metric, sign == "<=", bound, percentile, latency)


def read_metric_values(result: Result, slos: Sequence[Slo]) -> MetricValues:
    """Give a run's numbers by name, with those percentiles and shares that the bounds ask for."""
    asked = {slo.percentile for slo in slos if slo.percentile is not None}
    found = metric_values(summarize_record(result, percentiles=sorted({*PERCENTILES, *asked})))
    total = len(result.workload) or 1
    good = (found.get("request_goodput") or 0.0) * found["duration"]
    return {**found, "goodput": good / total, "completion": found["completed"] / total}
