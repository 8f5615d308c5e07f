"""When generated requests come: the arrival processes of `vllm bench serve`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, pi
from typing import TYPE_CHECKING

import numpy as np

from simulator.util.from_mapping import build, refuse
from simulator.workload.workload import Floats

if TYPE_CHECKING:
    from simulator.workload.generate import Generator

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

    def warp(self, times: Floats, last: float) -> Floats:
        """Move times of a steady load, none after `last`, so that they come by the swinging one.

        The integral of the rate has no inverse in closed form: it is tabulated.
        """
        if not len(times) or not self.amplitude:
            return times
        turn = 2 * pi / self.period
        grid = np.linspace(0.0, last + self.period, WARP * (2 + int(last / self.period)))
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
    return next(arrival_parts(spec, count, lambda: rng, [count]))


def arrival_parts(
    spec: "Generator",
    count: int,
    make_rng: Callable[[], np.random.Generator],
    sizes: Sequence[int],
) -> Iterator[Floats]:
    """Yield the same times in parts of these sizes, which add up to `count`.

    In several parts the gaps are drawn twice, to know their sum beforehand.
    """
    gaps = list(_gaps(spec, count, make_rng(), sizes)) if len(sizes) == 1 else None
    stretch, last = 1.0, 0.0
    stretches = spec.rescale and spec.ramp_up_strategy is None
    swings = spec.diurnal is not None and spec.request_rate < inf
    if stretches or swings:
        for times in _add_up(gaps or _gaps(spec, count, make_rng(), sizes)):
            last = float(times[-1]) if len(times) else last
    if stretches and last > 0:
        stretch = count / spec.request_rate / last
    for times in _add_up(gaps or _gaps(spec, count, make_rng(), sizes)):
        stretched = times * stretch
        if swings and spec.diurnal is not None:
            stretched = build(Diurnal, spec.diurnal).warp(stretched, last * stretch)
        yield stretched


def _gaps(
    spec: "Generator", count: int, rng: np.random.Generator, sizes: Sequence[int]
) -> Iterator[Floats]:
    """Draw the gaps before successive requests."""
    first = 0
    for size in sizes:
        rate = _rates(spec, count, first, size)
        first += size
        if spec.burstiness == inf:
            yield 1 / rate
        else:
            yield rng.standard_gamma(spec.burstiness, size) / (rate * spec.burstiness)


def _add_up(parts: Iterable[Floats]) -> Iterator[Floats]:
    """Turn gaps into times: one sum over all parts, in the same order as over one."""
    last = 0.0
    for gaps in parts:
        times = gaps.copy()
        if len(times):
            times[0] += last
            np.cumsum(times, out=times)
            last = float(times[-1])
        yield times


def _rates(spec: "Generator", count: int, first: int, size: int) -> Floats:
    """Give the rate at which each of `size` requests comes, from number `first` on."""
    start, end = spec.ramp_up_start_rps, spec.ramp_up_end_rps
    if start is None or end is None:
        return np.full(size, float(spec.request_rate))
    progress = np.arange(first, first + size) / max(count - 1, 1)
    if spec.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress
