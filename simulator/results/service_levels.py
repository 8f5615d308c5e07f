"""Service levels: bounds on the numbers of a run, as `p99_ttft_ms<=1000` or `goodput>=0.95`."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import ceil, exp, floor, inf, log, log10
from typing import Any, NamedTuple

import numpy as np

from simulator.costs.cost_model import CostModel
from simulator.costs.noise import QUANTILE
from simulator.results.request_table import Flags, Floats, RequestTable
from simulator.scenario.scenario import GoodputConfig, Scenario
from simulator.util.errors import FieldError, HeadwayError, did_you_mean
from simulator.workload.workload import Workload

LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue_time")
SHARES = ("goodput", "completion")
"""Of all requests: those that keep the scenario's `goodput` bounds, those that were completed."""
ALL_SERVED = "completion>=1"
"""The level that every list of them has, given or not."""
REQUEST_BOUNDS = ("ttft", "tpot", "e2el")
"""Latencies that each request has, and that can be bounded for each."""
QUEUED = ("ttft", "e2el", "queue_time")
"""Latencies with the time in the queue."""
RATES = ("output_throughput", "total_token_throughput", "request_throughput")
FINISH = "finish"
"""When the last of the requests ended, s from the beginning of the run; written h:mm[:ss]."""
EXAMPLES = {
    FINISH: "6:00 (hours and minutes of the run)",
    **dict.fromkeys(SHARES, "0.99 (a share from 0 to 1)"),
    **dict.fromkeys(RATES, "100 (per s)"),
}
"""What is beside each, for messages; the others are latencies."""

NAMED = 8  # clients that a message names
EACH = "each"
"""In place of a model: every model, by itself."""
_TEXT = re.compile(
    r"\s*(?:((?:(?:client|priority|model) +)?[^\s:<>=]+):\s*)?([\w.]+)\s*(<=|>=)\s*([^\s_]+)\s*"
)
_STATISTIC = re.compile(r"(?:mean|median|std|p(?P<p>\d+(?:\.\d+)?))_(?P<name>\w+)_ms")


Bound = float | Floats
"""Of all requests, or of each; in ms."""


def asks(workload: Workload, part: str) -> Flags:
    """Return which requests are of `client NAME`, `priority N` or a model; of "" all are."""
    kind, _, name = part.rpartition(" ")
    values = getattr(workload, kind or "model") if part else None
    if values is None:
        return np.full(len(workload), not part)
    return np.array([str(value) == name for value in values])


def goodput_of(goodput: GoodputConfig, workload: Workload) -> dict[str, Bound]:
    """Return the bounds of requests by latency, ms: of each, where they differ; inf: it has none.

    A request of several classes has the bounds of the first.
    """
    if not goodput.classes:
        return {**goodput.bounds}
    each = np.full((3, len(workload)), inf)
    for part, block in [*goodput.classes.items(), ("", goodput)][::-1]:
        own = np.array([block.bounds.get(name, inf) for name in REQUEST_BOUNDS])
        each[:, asks(workload, part)] = own[:, None]
    return dict(zip(REQUEST_BOUNDS, each, strict=True))


class Slo(NamedTuple):
    """A bound that a number of the run must keep."""

    metric: str  # vLLM bench's word, at any percentile; or one of SHARES, RATES; after `part:`
    at_most: bool
    bound: float
    percentile: float | None = None  # that the summary has to have for it
    latency: str = ""  # in the request table, where it is a mean or percentile over requests
    part: str = ""  # of these requests alone: `client NAME`, `priority N`, a model's name

    @property
    def name(self) -> str:
        """Return what is bounded, without whose it is."""
        return self.metric.rpartition(":")[2]

    @property
    def text(self) -> str:
        """Write it as the user does."""
        return f"{self.metric}{'<=' if self.at_most else '>='}{self.words(self.bound)}"

    def words(self, value: float, number: Callable[[float], str] = "{:g}".format) -> str:
        """Write a value of it as a `number`, or the time of an end as `6:00`."""
        if self.name != FINISH:
            return number(value)
        minutes, seconds = divmod(ceil(round(value, 6)), 60)
        return f"{minutes // 60}:{minutes % 60:02}{f':{seconds:02}' if seconds else ''}"

    @property
    def duration(self) -> float:
        """How long something must take that breaks it, s; 0 of what is no time."""
        return self.bound / 1000.0 if self.metric.endswith("_ms") else 0.0

    def loosened(self, value: float) -> str:
        """Write the nearest bound, to three digits, that a value keeps."""
        digits = 2 - floor(log10(abs(value))) if value else 0
        unit = 10.0**-digits
        rounded = (ceil if self.at_most else floor)(round(value / unit, 6)) * unit
        return self._replace(bound=rounded).text

    def met(self, value: float) -> bool:
        """Say whether a value keeps the bound."""
        return value <= self.bound if self.at_most else value >= self.bound

    @property
    def counted_apart(self) -> bool:
        """Whether its number is not one of the summary, but takes the table of all requests."""
        return bool(self.part) or self.name == FINISH

    @property
    def of_requests(self) -> bool:
        """Whether it bounds a mean over requests, that of `cost`, which `limit` must not exceed."""
        return bool(self.latency) or self.name in SHARES

    @property
    def is_share(self) -> bool:
        """Whether that mean is the share of requests that miss something."""
        return self.percentile is not None or self.name in SHARES

    @property
    def limit(self) -> float:
        """The most that the mean of `cost` may be: for a P99 it is 0.01."""
        if self.name in SHARES:
            return round(1.0 - self.bound, 12)
        return self.bound if self.percentile is None else round(1.0 - self.percentile / 100.0, 12)

    def cost(self, table: RequestTable, goodput: Mapping[str, Bound]) -> Floats:
        """Get what each request adds: its latency in ms for a mean, else 1 if it misses the bound.

        NaN: it does not count. A percentile keeps its bound where the share of requests above the
        bound is no more than `limit`.
        """
        completed = table.completed
        if self.part:
            alike = self._replace(metric=self.name, part="")
            return np.where(self.asked(table), alike.cost(table, goodput), np.nan)
        if self.name == "completion":
            return np.where(completed, 0.0, 1.0)
        if self.name == "goodput":
            return np.where(keep_bounds(table, completed, goodput), 0.0, 1.0)
        values: Floats = 1000.0 * getattr(table, self.latency)
        if self.percentile is not None:
            values = np.where(np.isnan(values), np.nan, values > self.bound)
        return np.where(completed, values, np.nan)

    def asked(self, table: RequestTable) -> Flags:
        """Return which requests it is of."""
        return asks(table.workload, self.part)

    def value(self, table: RequestTable, counted: Flags, goodput: Mapping[str, Bound]) -> float:
        """Return the number of some requests' run; as in vLLM a latency of none is 0."""
        if self.name == FINISH:  # whatever is left out of a steady state
            return float(np.nanmax(table.finish[table.completed & self.asked(table)], initial=0.0))
        cost = self.cost(table, goodput)[counted & (table.reason >= 0)]
        if self.name in SHARES:
            return 1.0 - float(np.nanmean(cost)) if (~np.isnan(cost)).any() else 1.0
        here = counted & table.completed & self.asked(table)
        values: Floats = 1000.0 * getattr(table, self.latency)[here]
        values = values[~np.isnan(values)]
        if not len(values):
            return 0.0
        share = self.percentile
        return float(values.mean() if share is None else np.percentile(values, share))

    def violation(self, value: float) -> float:
        """Say how far a value is from the bound, relative to it; 0 where it keeps it."""
        if self.met(value):
            return 0.0
        return abs(value - self.bound) / (abs(self.bound) or 1.0)


MANY = 2.0  # times a bound: from there on not told in %
Span = tuple[float, float]
"""The least and the greatest."""


def step_span(costs: Iterable[CostModel]) -> Span | None:
    """Return measured / predicted of steps, 95 %, in the regime of steps that is least sure.

    Of several cost models the widest; None where of one nobody knows.
    """
    sds = [max((cost.residuals or {}).values(), default=None) for cost in costs]
    if not sds or None in sds:
        return None
    widest = QUANTILE * max(sd for sd in sds if sd is not None)
    return exp(-widest), exp(widest)


def by_clock(slo: Slo, value: float, span: Span) -> Span:
    """Return what a value is where all steps take `span` times as long: in proportion, at least.

    Latencies with it, rates against it; a share of requests must be counted, and is as it is.
    """
    low, high = span
    if slo.name in (*SHARES, FINISH):
        return value, value
    return (value * low, value * high) if slo.at_most else (value / high, value / low)


def moved(one: Mapping[str, Any], elasticity: float) -> Mapping[str, Any]:
    """Return the `ends` of a level of a summary whose value moves by more than the steps do.

    `elasticity` is that of the mean E2EL, % for 1 % of step time; near saturation queues grow, so
    TTFT and queue time move at least as much. {} where they move in proportion, or nobody knows.
    """
    slo = parse_slo(one["bound"])
    if slo.latency not in QUEUED or "ends" not in one or not 1.0 < elasticity < inf:
        return {}
    return {"ends": [one["value"] * end**elasticity for end in one["step_times"]]}


class Judged(NamedTuple):
    """A value beside its bound, and beside the error of the clock."""

    slo: Slo
    value: float
    ends: Span | None  # of the value, by the step times' 95 %; None: nobody knows
    span: Span | None = None  # of these
    served: bool = True  # one request or more; where none was, no latency is kept
    until: float | None = None  # times the steps' time at which a share just keeps its bound

    @classmethod
    def of(cls, one: Mapping[str, Any]) -> "Judged":
        """Read it from a summary's `slo`; files of earlier versions have no ends."""
        ends, span, slo = one.get("ends"), one.get("step_times"), parse_slo(one["bound"])
        return cls(
            slo,
            one["value"],
            ends=None if ends is None else (ends[0], ends[1]),
            span=None if span is None else (span[0], span[1]),
            served=one.get("met", True) or not slo.met(one["value"]),
            until=one.get("kept_until"),
        )

    @property
    def close(self) -> bool:
        """Whether the clock's error covers the bound."""
        return self.ends is not None and len({self.slo.met(end) for end in self.ends}) > 1

    @property
    def unless(self) -> str:
        """Say about which error of the clock turns the verdict; "": nobody knows.

        Of steps in proportion, rounded up: of 60 runs near their bound it turned 52. Queues move
        by more than steps, what a front end adds by less.
        """
        until = self.until
        if self.slo.name not in SHARES and self.ends is not None and self.span is not None:
            # Values move as a power of the steps' time, rates against it.
            slower = self.ends[1 if self.slo.at_most else 0]
            power = log(slower / self.value) / log(self.span[1])
            until = (self.slo.bound / self.value) ** (1.0 / power)
        if until is None:
            return ""
        off = 100 * abs(until - 1.0)
        digits = 1 - floor(log10(off)) if off else 0
        percent = f"{ceil(round(off * 10.0**digits, 6)) / 10.0**digits:g} %"
        return (
            f", but steps about {percent} slower break it"
            if until > 1.0
            else f", but steps about {percent} faster keep it"
        )

    def __str__(self) -> str:
        """Say `kept with 12 % to spare`, `kept, but steps about 1 % slower break it`, ..."""
        slo, value = self.slo, self.value
        if not self.served:
            return "broken"
        verb = "kept" if slo.met(value) else "broken"
        if slo.name in SHARES:
            verb += f": {100 * value:.4g} % of requests keep it"
        if self.close:
            return f"{verb}{self.unless or ', within the error of the step times'}"
        if slo.name in SHARES:
            points = f", {100 * abs(value - slo.bound):.3g} points".replace(" 1 points", " 1 point")
            side = " to spare" if slo.met(value) else " short"
            return verb if value == slo.bound else verb + points + side
        margin = "kept with {} to spare" if slo.met(value) else "broken by {}"
        over, under = (value, slo.bound) if slo.at_most else (slo.bound, value)
        if over >= MANY * under:
            return (
                f"{verb}, {three_digits(over / under)} times the bound"
                if slo.at_most and under
                else verb
            )
        return margin.format(f"{100 * abs(value - slo.bound) / slo.bound:.3g} %")


def short(value: float) -> str:
    """Write four digits, and all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"


def three_digits(value: float) -> str:
    """Write three digits, and all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def parse_slo(text: str, where: str = "--slo") -> Slo:
    """Read one bound; HeadwayError says what there is, and `where` it is given."""
    try:
        return read_slo(text)
    except ValueError as error:
        what = str(error)
        fault = FieldError(("slo",), what, "value")
        raise HeadwayError(f"{where} {text}: {what}", [fault]) from None


def read_slo(text: str) -> Slo:
    """Read one bound; ValueError says what there is."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(
            "must be METRIC<=NUMBER or METRIC>=NUMBER, as p99_ttft_ms<=1000 (ms), or finish<=6:00 "
            "(hours and minutes of the run)"
        )
    part, metric, sign, number = match.groups()
    percentile, latency = None, ""
    if metric not in (*SHARES, *RATES, FINISH):
        named = _STATISTIC.fullmatch(metric)
        if named is None or named["name"] not in LATENCIES:
            others = (*SHARES, *RATES, FINISH)
            near = [f"{word}_{name}_ms" for word in metric.split("_") for name in LATENCIES]
            raise ValueError(
                f"no metric {metric!r}; there are mean, median, std and any percentile (p99, "
                f"p99.9) of {', '.join(LATENCIES)}, as p99_ttft_ms<=1000 (ms), and "
                f"{', '.join(others)}"
                f"{did_you_mean(metric, (*others, *filter(_STATISTIC.fullmatch, near)))}"
            )
        if named["p"] is not None:
            percentile = float(named["p"])
            if percentile > 100:
                raise ValueError("must be a percentile from 0 to 100, as p99")
            short = int(percentile) if percentile.is_integer() else percentile
            metric = f"p{short}_{named['name']}_ms"  # as the summary writes it
        if named["name"] != "itl" and not metric.startswith("std"):  # gaps are of tokens
            latency = named["name"]
            percentile = 50.0 if metric.startswith("median") else percentile
    slo = Slo(metric, sign == "<=", _read_bound(metric, sign, number), percentile, latency)
    if part is None:
        return slo
    if not latency and metric not in (*SHARES, FINISH):
        raise ValueError(f"{metric} is of all requests together; write it without {part}:")
    part = " ".join(part.split())
    return slo._replace(metric=f"{part}:{metric}", part=part)


def _read_bound(metric: str, sign: str, number: str) -> float:
    """Read what is beside a metric and its sign; ValueError has an example, and the unit."""
    useful = ">=" if metric in (*SHARES, *RATES) else "<="
    with suppress(ValueError):
        bound = _seconds(number) if metric == FINISH else float(number)
        fits = 0.0 <= bound <= 1.0 if metric in SHARES else 0.0 <= bound < inf
        if sign == useful and fits and (bound or useful == ">="):
            return bound
    example = EXAMPLES.get(metric, "1000 (ms, more than 0)")
    raise ValueError(f"must be {metric}{useful}NUMBER, as {metric}{useful}{example}")


def _seconds(text: str) -> float:
    """Read h:mm or h:mm:ss; ValueError where it is neither, or 0."""
    # Nothing ends before it begins.
    match = re.fullmatch(r"(?!0+:00(?::00)?$)(\d+):([0-5]\d)(?::([0-5]\d))?", text)
    if match is None:
        raise ValueError
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def service_levels(scenario: Scenario, texts: Sequence[str] = (), key: str = "slo") -> list[Slo]:
    """Return what runs of a scenario are judged by: `texts` of a key, its `slo`, `default_levels`.

    A bound of a model by itself, `MODEL:` before it, or of `each`, names who is served.
    `client NAME:`, `priority N:` and `model NAME:` are of requests, which `need_parts` knows.
    Beside them all requests must be completed, unless a bound says otherwise, since latencies are
    of those that were. Nothing where there are no bounds. Raises HeadwayError for a wrong one,
    with its place.
    """
    goodput, models, where = scenario.goodput, scenario.models, _place(scenario, key)
    found = []
    for text in texts or scenario.slo or default_levels(goodput):
        slo = parse_slo(text, where)
        if " " not in slo.part and slo.part not in ("", EACH, *models):
            served = ", ".join(dict.fromkeys(models)) or "one alone"
            raise HeadwayError(
                f"{where} {text}: no model {slo.part!r}; the groups serve {served}; a client is "
                f"named 'client {slo.part}: ...', a priority 'priority 0: ...'"
            )
        named = dict.fromkeys(models) if slo.part == EACH else [slo.part]
        found += [slo._replace(metric=f"{n}:{slo.name}", part=n) if n else slo for n in named]
        if not named:
            raise HeadwayError(f"{where} {text}: the groups serve one model alone")
    if not (goodput.bounds or goodput.classes) and any(slo.name == "goodput" for slo in found):
        raise HeadwayError(f"{where} goodput: needs bounds in the scenario's `goodput`, in ms")
    if found and all(slo.metric != "completion" for slo in found):
        found.append(parse_slo(ALL_SERVED))
    return found


def _place(scenario: Scenario, key: str) -> str:
    """Return where bounds are given: the option, else the file, its line and the key."""
    place = key if key.startswith("--") else scenario.place(key)
    return "--slo" if place == key or place.startswith("--set slo= ") else f"{place}: {key}:"


def given_levels(texts: Iterable[str]) -> list[str]:
    """Leave ALL_SERVED out of bounds, or sentences that begin with one, unless it is alone."""
    found = [*texts]
    return [text for text in found if not text.startswith(ALL_SERVED)] or found


def default_levels(goodput: GoodputConfig) -> list[str]:
    """Say that 99 % of all requests, and of each class, keep the bounds that there are."""
    levels = ["goodput>=0.99"] if goodput.bounds else []
    return levels + [
        f"{part}: goodput>=0.99" for part, own in goodput.classes.items() if own.bounds
    ]


def need_parts(slos: Iterable[Slo], scenario: Scenario, workload: Workload) -> None:
    """Refuse a level, or bounds, of requests of which there are none: nobody would break them."""
    where = _place(scenario, "slo")
    named = {slo.part: f"{where} {slo.text}" for slo in slos}
    for part, what in (named | {it: f"goodput.{it}" for it in scenario.goodput.classes}).items():
        kind, _, _ = part.rpartition(" ")
        if kind and not asks(workload, part).any():
            values = getattr(workload, kind)
            there = sorted({*map(str, values)} if values is not None else ())[:NAMED]
            raise HeadwayError(
                f"{what}: no request is of {part}; "
                f"{'there are ' + ', '.join(there) if there else f'none names a {kind}'}"
            )


def bounds_of_all(slos: Sequence[Slo]) -> dict[str, float]:
    """Return, by key, bounds on means, and percentiles whose bounds `request_bounds` takes.

    Of levels of all requests. No percentile where `goodput` is a level: its bounds are of each.
    """
    of_all = [slo for slo in slos if slo.latency in REQUEST_BOUNDS and not slo.part]
    found = {f"slo_{slo.latency}_mean_ms": slo.bound for slo in of_all if slo.percentile is None}
    if all(slo.name != "goodput" for slo in slos):
        for slo in sorted(of_all, key=lambda slo: slo.bound):
            if slo.percentile is not None:
                found[f"slo_{slo.latency}_percentile"] = slo.percentile
    return found


def request_bounds(goodput: Mapping[str, Bound], slos: Sequence[Slo]) -> dict[str, Bound]:
    """Return the bounds (ms) that each request is held against, for the SLO attainment.

    They are those of the percentiles that `slos` bound: that the P99 TTFT is at most 1000 ms says
    that 99 % of the requests keep 1000 ms; of several percentiles of a latency the loosest bound.
    Those of `goodput` count where `slos` bound no percentile, or name `goodput`; where it bounds
    the same latency, its bound then stands.
    """
    found: dict[str, Bound] = {}
    for slo in sorted(slos, key=lambda slo: slo.bound):
        if slo.percentile is not None and slo.latency in REQUEST_BOUNDS and not slo.part:
            found[slo.latency] = slo.bound
    if not found or any(slo.name == "goodput" for slo in slos):
        found |= goodput
    return {k: found[k] for k in REQUEST_BOUNDS if np.isfinite(found.get(k, inf)).any()}


def keep_bounds(table: RequestTable, completed: Flags, goodput: Mapping[str, Bound]) -> Flags:
    """Return which of the completed requests keep every bound (ms, inclusive)."""
    keep = completed.copy()
    for name, bound in goodput.items():
        values: Floats = getattr(table, name)
        if name == "tpot":
            values = np.where(table.generated > 1, values, 0.0)  # a single token keeps any bound
        keep &= values <= bound / 1000.0  # NaN: not completed
    return keep


def strain(table: RequestTable, completed: Flags, goodput: Mapping[str, Bound]) -> Floats:
    """Return how many times its bound, of several the worst, each completed request takes."""
    found: Floats = np.zeros(int(completed.sum()))
    for name, bound in goodput.items():
        values = (1000.0 * getattr(table, name) / bound)[completed]
        found = np.fmax(found, values)  # NaN: a single token has no TPOT
    return found
