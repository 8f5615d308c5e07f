"""When generated requests come: the arrival processes of `vllm bench serve`."""

from dataclasses import dataclass
from math import inf, pi
from typing import TYPE_CHECKING

import numpy as np

from simulator.fields import build, refuse
from simulator.workload import Floats

if TYPE_CHECKING:
    from simulator.generate import Generator

WARP = 10_000  # points of the table of a diurnal load, a period


@dataclass(slots=True)
class Diurnal:
    """A load that swings about its mean: request_rate x (1 - amplitude cos(2 pi t / period))."""

    period: float = 86400.0  # s
    amplitude: float = 0.5

    def __post_init__(self) -> None:
        refuse(
            (not 0 < self.period < inf, f"period: {self.period} is not above 0"),
            (not 0 <= self.amplitude <= 1, f"amplitude: {self.amplitude} is not from 0 to 1"),
        )

    def warp(self, times: Floats) -> Floats:
        """Move times of a steady load so that they come by the swinging one.

        The integral of the rate has no inverse in closed form: it is tabulated.
        """
        if not len(times) or not self.amplitude:
            return times
        turn = 2 * pi / self.period
        grid = np.linspace(0.0, times[-1] + self.period, WARP * (2 + int(times[-1] / self.period)))
        integral = grid - self.amplitude / turn * np.sin(turn * grid)
        warped: Floats = np.interp(times, integral, grid)
        return warped


def check_rates(spec: "Generator") -> list[tuple[bool, str]]:
    """Check what a generator says of its arrivals; for `refuse`."""
    start, end, ramp = spec.ramp_up_start_rps, spec.ramp_up_end_rps, spec.ramp_up_strategy
    checks = [
        (not spec.request_rate > 0, f"request_rate: {spec.request_rate} is not above 0"),
        (not spec.burstiness > 0, f"burstiness: {spec.burstiness} is not above 0"),
    ]
    if ramp is None:
        given = start is not None or end is not None
        return [*checks, (given, "ramp_up_strategy: missing, but there is a rate to ramp up")]
    if start is None or end is None:
        name = "ramp_up_start_rps" if start is None else "ramp_up_end_rps"
        return [*checks, (True, f"{name}: missing, as ramp_up_strategy is given")]
    return [
        *checks,
        (ramp not in {"linear", "exponential"}, f"ramp_up_strategy: {ramp!r} is unknown"),
        (spec.request_rate < inf, "request_rate: cannot be given with ramp_up_strategy"),
        (not start > 0, f"ramp_up_start_rps: {start} is not above 0"),
        (not start <= end < inf, f"ramp_up_end_rps: {end} is not finite and {start} or more"),
    ]


def arrival_times(spec: "Generator", count: int, rng: np.random.Generator) -> Floats:
    """Draw when `count` requests (or sessions) come, in seconds.

    As `get_request` in vllm/benchmarks/serve.py: the gap before request i is
    Gamma(shape=burstiness, scale=1 / (rate_i * burstiness)), the first one included, so that
    nobody comes at 0 unless the rate is infinite, when all do. An infinite burstiness makes gaps
    of 1 / rate. Rates ramp up from the first request to the last, by i / (count - 1). Without a
    ramp all times are then stretched so that the last is count / request_rate. A diurnal load
    comes by the same gaps, longer at night and shorter by day.
    """
    rate = _rates(spec, count)
    if spec.burstiness == inf:
        gaps = 1 / rate
    else:
        gaps = rng.standard_gamma(spec.burstiness, count) / (rate * spec.burstiness)
    times = np.cumsum(gaps)
    if spec.rescale and spec.ramp_up_strategy is None and times[-1] > 0:
        times *= count / spec.request_rate / times[-1]
    if spec.diurnal is not None and spec.request_rate < inf:
        times = build(Diurnal, spec.diurnal).warp(times)
    return times


def _rates(spec: "Generator", count: int) -> Floats:
    """Give the rate at which each request comes."""
    start, end = spec.ramp_up_start_rps, spec.ramp_up_end_rps
    if start is None or end is None:
        return np.full(count, float(spec.request_rate))
    progress = np.arange(count) / max(count - 1, 1)
    if spec.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress
