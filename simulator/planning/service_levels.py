"""Service levels: bounds on the numbers of a run, as `p99_ttft_ms<=1000` or `goodput>=0.95`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from simulator.simulation.result import Result

LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue_time")
SHARES = {
    "goodput": "share of all requests that keep the scenario's `goodput` bounds",
    "completion": "share of all requests that were completed",
}
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

    @property
    def text(self) -> str:
        """Write it as the user does."""
        return f"{self.metric}{'<=' if self.at_most else '>='}{self.bound:g}"

    def met(self, value: float) -> bool:
        """Say whether a value keeps the bound."""
        return value <= self.bound if self.at_most else value >= self.bound

    def miss(self, value: float) -> float:
        """Say how far a value is from the bound, relative to it; 0 where it keeps it."""
        if self.met(value):
            return 0.0
        return abs(value - self.bound) / (abs(self.bound) or 1.0)


def parse_slo(text: str) -> Slo:
    """Read one bound; HeadwayError says what there is."""
    match = _TEXT.fullmatch(text)
    try:
        metric, sign, bound = match.groups() if match else ("", "", "")
        limit = float(bound)
    except ValueError:
        raise HeadwayError(
            f"--slo {text}: must be METRIC<=NUMBER or METRIC>=NUMBER, as p99_ttft_ms<=1000"
        ) from None
    if metric in SHARES or metric in RATES:
        if metric in SHARES and not 0 <= limit <= 1:
            raise HeadwayError(f"--slo {text}: a share is from 0 to 1")
        return _directed(Slo(metric, sign == "<=", limit), text, "<=", ">=")
    named = _STATISTIC.fullmatch(metric)
    if named is None or named["name"] not in LATENCIES:
        raise HeadwayError(
            f"--slo {text}: no metric {metric!r}; there are mean, median, std and any percentile "
            f"(p99, p99.9) of {', '.join(LATENCIES)}, as p99_ttft_ms, and "
            f"{', '.join((*SHARES, *RATES))}"
        )
    percentile = None if named["p"] is None else float(named["p"])
    if percentile is not None and not 0 <= percentile <= 100:
        raise HeadwayError(f"--slo {text}: a percentile is from 0 to 100")
    if percentile is not None:
        metric = f"p{_short(percentile)}_{named['name']}_ms"  # as the summary writes it
    return _directed(Slo(metric, sign == "<=", limit, percentile), text, ">=", "<=")


def _directed(slo: Slo, text: str, wrong: str, right: str) -> Slo:
    """Refuse a bound on the wrong side, such as a latency of at least something."""
    if slo.at_most == (wrong == "<="):
        raise HeadwayError(f"--slo {text}: {slo.metric} is to be {right} something")
    return slo


def _short(percentile: float) -> str:
    return str(int(percentile) if percentile.is_integer() else percentile)


def read_numbers(result: "Result", slos: Sequence[Slo]) -> dict[str, float]:
    """Give a run's numbers by name, with those percentiles and shares that the bounds ask for."""
    from simulator.planning.points import numbers
    from simulator.results.metrics import PERCENTILES, summarize_result

    asked = [slo.percentile for slo in slos if slo.percentile is not None]
    found: Mapping[str, float] = numbers(
        summarize_result(result, percentiles=sorted({*PERCENTILES, *asked}))
    )
    total = len(result.workload) or 1
    good = (found.get("request_goodput") or 0.0) * found["duration"]
    return {**found, "goodput": good / total, "completion": found["completed"] / total}
