"""How far a cost model may be off, and a cost model that is off by that much.

A profile's `residuals` are the standard deviations of log(measured / predicted) of whole steps
that its fit had not seen, one for pure decode steps and one for steps with prompts. What is left
of a fit is mostly of one sign over a region of steps (a table too high at these batch sizes), and a
run keeps to few regions: it does not average out as white noise would over thousands of steps. So
a replication draws one factor per regime, lognormal, and keeps it from its first step to its last.
Two cost models err each by itself: what one profile's tables miss says nothing of another's.
Within a run nothing is random, and leaps stay exact.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp
from numbers import Real
from typing import NamedTuple
from zlib import crc32

import numpy as np

from simulator.core.executor import Leap, StagedExecutor, StageTimes, Timing
from simulator.core.request import Step
from simulator.costs.cost_model import CostDecorator, CostModel, Counts, Seconds
from simulator.util.errors import MappingError
from simulator.util.from_mapping import short_repr

REGIMES = ("decode", "prompts")
"""Pure decode steps; steps that compute prompts."""
QUANTILE = 1.96
"""Standard deviations on either side that hold 95 % of a normal variable."""
STREAM = 0x0FF  # of the random numbers; the workload takes the children 0 to 5 of the seed


class Noise(NamedTuple):
    """How far off a replication's steps are, in standard deviations."""

    decode: float
    prompts: float

    @classmethod
    def draw(cls, seed: int, cost: CostModel) -> "Noise":
        """Draw standard normal numbers: of a seed the same for one cost model, others for another.

        A cost model is known by its name and by what of its times nobody has measured.
        """
        key = crc32(f"{cost.name}: {cost.unmeasured}".encode())
        draw = np.random.default_rng(np.random.SeedSequence([seed, STREAM, key]))
        decode, prompts = draw.standard_normal(2).tolist()
        return cls(decode, prompts)

    def apply(self, cost: CostModel) -> CostModel:
        """Return the cost model that is off so far; the same one where it has no residuals."""
        sd = cost.residuals or {}
        if not any(sd.values()):
            return cost
        decode, prompts = sd.get("decode", 0.0), sd.get("prompts", 0.0)
        return ScaledCost(cost, exp(self.decode * decode), exp(self.prompts * prompts))


Errors = Callable[[CostModel], CostModel]
"""Makes of a cost model one that is off."""


def with_drawn_noise(seed: int, cost: CostModel) -> CostModel:
    """Return a cost model that is off as it is in the replication with this seed."""
    return Noise.draw(seed, cost).apply(cost)


@dataclass(frozen=True)
class ScaledCost(CostDecorator):
    """A cost model whose steps take longer by a factor per regime; copies of KV blocks do not."""

    decode: float
    prompts: float

    def execute(self, step: Step) -> Timing:
        factor = self.prompts if step.prefills else self.decode
        bare = self.inner.execute(step.without_copies() if step.copies else step)
        seconds, swap = self.inner.with_copies(factor * bare.seconds, step)
        return Timing(seconds, swap, bare.features, factor * bare.host)

    def stage_seconds(self, step: Step) -> StageTimes:
        """Say what a step takes, in s, of an executor with pipeline stages."""
        assert isinstance(self.inner, StagedExecutor)
        factor = self.prompts if step.prefills else self.decode
        host, stages, send = self.inner.stage_seconds(step)
        return StageTimes(factor * host, [factor * seconds for seconds in stages], factor * send)

    def leap(self, step: Step, repeats: int) -> Leap:
        found, factor = self.inner.leap(step, repeats), self.decode
        waits = [factor * wait for wait in found.host]
        return Leap([factor * seconds for seconds in found.seconds], waits)

    def decode_seconds(self, counts: Counts, contexts: Counts) -> Seconds:
        return self.decode * self.inner.decode_seconds(counts, contexts)

    def host_seconds(self, prompts: Counts, sequences: Counts, new: Counts) -> Seconds | None:
        found = self.inner.host_seconds(prompts, sequences, new)
        return None if found is None else found * np.where(prompts, self.prompts, self.decode)


def describe_cost(cost: CostModel) -> dict[str, object]:
    """Return what summaries say of a cost model: its name and how far off its steps may be.

    `interval_95` has, by regime, the least and greatest measured / predicted of a step; None:
    nobody knows. `unmeasured` says what of the times nobody has measured; the interval of a
    roofline reckons with that, that of pipelines and of ranks that share experts does not.
    """
    sd = cost.residuals or {}
    ends = {one: [exp(sign * QUANTILE * sd[one]) for sign in (-1, 1)] for one in sd}
    known = {"interval_95": ends or None, "unmeasured": cost.unmeasured or None}
    return {"profile": cost.name, "step_times": known}


def check_residuals(raw: object) -> dict[str, float]:
    """Check standard deviations by regime; ValueError names those that are wrong."""
    if not isinstance(raw, Mapping):
        raise MappingError("", f"must be a mapping of {' and '.join(REGIMES)} to numbers")
    wrong: dict[str, str] = {}
    for key, value in raw.items():
        number = isinstance(value, Real) and not isinstance(value, bool)
        if key not in REGIMES:
            wrong[str(key)] = f"unknown; there are {', '.join(REGIMES)}"
        elif not number or not 0 <= value <= 1:
            wrong[str(key)] = f"must be a standard deviation of 0 to 1, not {short_repr(value)}"
    if wrong:
        raise MappingError.of(wrong)
    return {key: float(value) for key, value in raw.items()}
