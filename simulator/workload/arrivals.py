"""When generated requests come: the arrival processes of `vllm bench serve`, and a diurnal load."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, pi
from typing import Annotated, Literal

import numpy as np

from simulator.util.config import PositiveFinite, Share
from simulator.util.errors import MappingError
from simulator.util.from_mapping import Check, Field, raise_if, short_repr
from simulator.workload.distributions import Weight, check_weights
from simulator.workload.workload import MAX_KEPT_REQUESTS, Floats

POINTS_PER_PERIOD = 10_000  # of the table that inverts a diurnal load
MOST_PERIODS = 1_000  # in one table; a longer load goes through that of a single period
SHORTEST_PERIOD = 1e-3  # s
LOWEST = 1e-100  # rate and burstiness: gaps of the inverse of both do not overflow


Things = Annotated[int, Field(ge=1, le=MAX_KEPT_REQUESTS)]
"""A number of them, for a run that keeps its requests."""
FASTEST = 1e9  # requests/s, of a load that takes time at all


def _check_rate(rate: object) -> object:
    if isinstance(rate, int | float) and FASTEST < rate < inf:
        most = f"must be at most {FASTEST:g} requests/s, or inf for all at once"
        raise MappingError("", f"{most}, not {short_repr(rate)}")
    return rate


Rate = Annotated[float, _check_rate, Field(gt=0, ge=LOWEST)]


@dataclass(slots=True, eq=False)
class Diurnal:
    """A load that swings about its mean: request_rate x (1 - amplitude cos(2 pi t / period)).

    Or as `rates` say, each for an equal part of the period, relative to their mean.
    """

    period: Annotated[float, Field(ge=SHORTEST_PERIOD, lt=inf), "s"] = 86400.0
    amplitude: Annotated[Share, "share of request_rate"] = 0.5  # where there are no rates
    rates: Annotated[list[Weight] | None, "relative rates of equal parts of the period"] = None

    def __post_init__(self) -> None:
        raise_if(check_weights("rates", self.rates))

    @property
    def peak(self) -> float:
        """The greatest rate, by the mean."""
        if self.rates is not None:
            return max(self.rates) / sum(self.rates) * len(self.rates)
        return 1.0 + self.amplitude

    def warp(self, times: Floats, last: float) -> Floats:
        """Move times of a steady load, none after `last`, so that they come by the swinging one.

        The integral of a cosine's rate has no inverse in closed form: it is tabulated.
        """
        whole = np.floor(times / self.period) * self.period
        if self.rates is not None:
            edges = np.linspace(0.0, self.period, len(self.rates) + 1)
            come = np.append(0.0, np.cumsum(self.rates))
            inside: Floats = np.interp(times - whole, come / come[-1] * self.period, edges)
            return whole + inside
        if not self.amplitude:
            return times
        if last / self.period > MOST_PERIODS:
            return whole + self.warp(times - whole, self.period)
        turn = 2 * pi / self.period
        grid = np.linspace(
            0.0, last + self.period, POINTS_PER_PERIOD * (2 + int(last / self.period))
        )
        integral = grid - self.amplitude / turn * np.sin(turn * grid)
        warped: Floats = np.interp(times, integral, grid)
        return warped


def _one_curve(given: object) -> object:
    """Let through keys that say one curve, less those that are null."""
    if not isinstance(given, Mapping):
        return given
    told = {key: value for key, value in given.items() if value is not None}
    raise_if(({"rates", "amplitude"} <= {*told}, "rates", "cannot be used with amplitude"))
    return told


Ramp = Literal["linear", "exponential"]


@dataclass(slots=True, kw_only=True, init=False, repr=False, eq=False)
class ArrivalProcess:
    """When requests (or sessions) come.

    As `get_request` in vllm/benchmarks/serve.py: the gap before request i is
    Gamma(shape=burstiness, scale=1 / (rate_i * burstiness)), the first one included, so that
    nobody comes at 0 unless the rate is infinite, when all do. An infinite burstiness makes gaps
    of 1 / rate. Rates ramp up from the first request to the last, by i / (count - 1). Without a
    ramp all times are then stretched so that the last is count / request_rate. A diurnal load
    comes by the same gaps, longer at night and shorter by day.
    """

    request_rate: Annotated[Rate, "requests/s, with sessions: sessions/s; inf: all at once"] = inf
    burstiness: Annotated[Rate, "shape of the gaps' Gamma law; 1: Poisson, less: burstier"] = 1.0
    rescale: Annotated[bool, "stretch gaps: last arrival at num_prompts / request_rate s"] = True
    ramp_up_strategy: Annotated[Ramp | None, "how the rate changes; not with request_rate"] = None
    ramp_up_start_rps: Annotated[Rate | None, "rate of the first request, requests/s"] = None
    ramp_up_end_rps: Annotated[PositiveFinite | None, "rate of the last request, requests/s"] = None
    diurnal: Annotated[
        Diurnal | None,
        _one_curve,
        "{period: 86400, amplitude: 0.5}: the rate swings about request_rate, the lowest comes "
        "first; {rates: [...]}: relative rates of equal parts of the period",
    ] = None

    def check_rates(self) -> list[Check]:
        """Check what is said of the rates."""
        start, end, ramp = self.ramp_up_start_rps, self.ramp_up_end_rps, self.ramp_up_strategy
        if ramp is None:
            given = start is not None or end is not None
            return [(given, "ramp_up_strategy", "missing, but there is a rate to ramp up")]
        if start is None or end is None:
            name = "ramp_up_start_rps" if start is None else "ramp_up_end_rps"
            return [(True, name, "missing, as ramp_up_strategy is given")]
        return [
            (self.request_rate < inf, "request_rate", "cannot be given with ramp_up_strategy"),
            (start > end, "ramp_up_end_rps", f"{end} is less than ramp_up_start_rps, {start}"),
        ]

    def arrival_parts(
        self, count: int, make_rng: "Callable[[], np.random.Generator]", sizes: Sequence[int]
    ) -> Iterator[Floats]:
        """Yield the same times in parts of these sizes, which add up to `count`.

        In several parts they are drawn twice, to know the last beforehand.
        """
        whole = list(self._drawn(count, make_rng(), sizes)) if len(sizes) == 1 else None
        stretches = self.rescale and self.ramp_up_strategy is None
        diurnal = self.diurnal if self.request_rate < inf else None
        last, stretch = 0.0, 1.0
        if stretches or diurnal:
            for times in whole or self._drawn(count, make_rng(), sizes):
                last = float(times[-1])
        if stretches and last > 0:
            stretch = count / self.request_rate / last
        for times in whole or self._drawn(count, make_rng(), sizes):
            stretched = times * stretch
            yield diurnal.warp(stretched, last * stretch) if diurnal else stretched

    def _drawn(
        self, count: int, rng: "np.random.Generator", sizes: Sequence[int]
    ) -> Iterator[Floats]:
        """Draw the times: one sum of gaps over all parts, in the same order as over one."""
        first, last = 0, 0.0
        for size in sizes:
            rate = self._rates(count, first, size)
            if self.burstiness == inf:
                gaps = 1 / rate
            else:
                gaps = rng.standard_gamma(self.burstiness, size) / (rate * self.burstiness)
            gaps[0] += last
            times = np.cumsum(gaps)
            first, last = first + size, float(times[-1])
            yield times

    def _rates(self, count: int, first: int, size: int) -> Floats:
        """Return the rate at which each of `size` requests comes, from number `first` on."""
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if start is None or end is None:
            return np.full(size, float(self.request_rate))
        progress = np.arange(first, first + size) / max(count - 1, 1)
        if self.ramp_up_strategy == "linear":
            return start + (end - start) * progress
        return start * (end / start) ** progress
