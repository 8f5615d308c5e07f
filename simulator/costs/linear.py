"""A cost that is a straight line, and what all fitted costs share: name, range, swaps.

`simulator/costs/piecewise.py` says what T, n, S and P stand for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from simulator.core.executor import Leap, Timing
from simulator.core.request import Step
from simulator.costs.cost_model import CostModel, Counts, Seconds
from simulator.util.errors import MappingError
from simulator.util.from_mapping import Check, raise_if, short_repr

QUANTITIES = ("tokens", "sequences", "context", "pairs")
"""What a fitted range can bound: T, n, S and P."""

Limits = Mapping[str, tuple[float, float]]
"""The lowest and highest fitted value of each quantity."""


Term = Annotated[float, "s"]
"""A coefficient of a cost; what it is multiplied by has no unit."""
SLICE = 1 << 16  # logged rows looked at together: bounds the temporaries


def quantities(steps: npt.NDArray[np.void]) -> dict[str, Counts]:
    """Return T, n, S and P of logged steps (rows of dtype STEP), S being that of each row's last.

    The number of prompts in a step is not logged: n counts the decodes alone.
    """
    alone = (steps["prefill_tokens"] == 0) & (steps["decodes"] > 0)  # else it is padding
    finished = np.where(alone, steps["wasted"], 0)
    sequences = steps["decodes"].astype(np.int64) + finished
    tokens = steps["decodes"].astype(np.int64) + steps["prefill_tokens"] + steps["wasted"]
    context = steps["context"] + (steps["steps"] - 1) * sequences
    return {
        "tokens": tokens,
        "sequences": sequences,
        "context": context,
        "pairs": steps["prefill_context"],
    }


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Fitted(CostModel):
    """A cost model's name and the range of steps that it was fitted to."""

    name: str = field(default="", compare=False)
    limits: Limits | None = field(default=None, repr=False, compare=False)
    residuals: Mapping[str, float] | None = field(default=None, repr=False, compare=False)
    unmeasured: str = field(default="", repr=False, compare=False)
    swap_out: Term = 0.0  # per request whose KV blocks a step copies to the host
    swap_out_per_block: Term = 0.0
    swap_in: Term = 0.0  # and back
    swap_in_per_block: Term = 0.0
    load: Term = 0.0  # per request whose prefix comes from the host tier
    load_per_block: Term = 0.0
    swap_overlap: bool = False  # copies run beside the compute of their step

    whole_terms: ClassVar[tuple[str, ...]] = ()
    """Numbers that a stage of a pipeline has in full: those that are not of its layers."""
    last_terms: ClassVar[tuple[str, ...]] = ()
    """Seconds of the last stage alone."""

    def swap_seconds(self, step: Step) -> float:
        if step.copies is None:
            return 0.0
        return (
            self.swap_out * len(step.copies.outgoing)
            + self.swap_out_per_block * step.copies.swapped_out
            + self.swap_in * len(step.copies.incoming)
            + self.swap_in_per_block * step.copies.swapped_in
        )

    def logged_swap_seconds(self, swaps: npt.NDArray[np.void]) -> Seconds:
        return np.asarray(
            self.swap_out * swaps["requests_out"]
            + self.swap_out_per_block * swaps["blocks_out"]
            + self.swap_in * swaps["requests_in"]
            + self.swap_in_per_block * swaps["blocks_in"]
        )

    def with_engine(self, *, step: float, apart: float, prompts: float, **terms: Any) -> Self:
        """Put on a cost of kernels alone what an engine adds, s.

        That is to each step, likewise what is no host's (`apart`: ranks that wait, sampling),
        and to a step with prompts; `terms` are others by their names. ValueError: the cost has no
        place for them.
        """
        raise MappingError("overhead", "needs a piecewise cost")

    def with_experts(self, table: Sequence[Sequence[float]]) -> Self:
        """Add the time of experts, rows of (tokens, seconds)."""
        raise ValueError("needs a piecewise cost")

    def part(self, share: float, *, last: bool) -> Self:
        """Return what a pipeline stage takes that has a share of the layers; `last`: the head."""
        values: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if not one.init or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if one.name not in self.whole_terms:
                values[one.name] = value * (last if one.name in self.last_terms else share)
        return replace(self, **values)

    def with_copies(self, seconds: float, step: Step) -> tuple[float, float]:
        if step.copies is None:
            return seconds, 0.0
        copies = swaps = self.swap_seconds(step)
        layerwise = 0.0
        for load in step.copies.loads:
            if load.layerwise:
                layerwise += self.load + self.load_per_block * load.count
            elif not load.beside:
                copies += self.load + self.load_per_block * load.count
        seconds = max(seconds, layerwise)
        if not self.swap_overlap:
            return seconds + copies, swaps
        longer = max(copies - seconds, 0.0)
        return max(seconds, copies), swaps and longer * (swaps / copies)

    def range_warnings(self, *logged: npt.NDArray[np.void]) -> list[str]:
        limits = self.limits or {}
        outside, most = dict.fromkeys(limits, 0), dict.fromkeys(limits, 0)
        least, total = dict.fromkeys(limits, 0), 0
        for steps in (
            rows[at : at + SLICE] for rows in logged for at in range(0, len(rows), SLICE)
        ):
            found, repeats = quantities(steps), steps["steps"]
            total += int(repeats.sum())
            for what, (low, high) in limits.items():
                values = found[what]
                over = np.flatnonzero(values > high)
                late = repeats[over]
                if what == "context":  # it grows: the last steps of a row alone may be beyond
                    sequences = np.maximum(found["sequences"][over], 1)
                    late = np.minimum(late, (values[over] - high + sequences - 1) // sequences)
                outside[what] += int(late.sum() + repeats[(values < low) & (values > 0)].sum())
                most[what] = max(most[what], int(values.max()))
                if (there := values[values > 0]).size:
                    least[what] = min(least[what] or int(there.min()), int(there.min()))
        return [
            f"cost {self.name}: {what} of {least[what]:,} to {most[what]:,} in a step, fitted from "
            f"{low:,} to {high:,}: {outside[what] / total:.2%} of the steps are extrapolated"
            for what, (low, high) in limits.items()
            if outside[what]
        ]


COPY_TERMS = ("swap_out", "swap_out_per_block", "swap_in", "swap_in_per_block")
LONGEST_TERM = 1e6
"""Seconds: a larger term is a mistake, and times that add up to infinity would follow."""


def check_terms(cost: object, names: Sequence[str]) -> list[Check]:
    """Check that the named fields are numbers of seconds that can be; for `raise_if`."""
    found: list[Check] = []
    for name in names:
        value = getattr(cost, name)
        good = isinstance(value, Real) and not isinstance(value, bool)
        good = good and 0 <= value <= LONGEST_TERM
        what = f"must be from 0 to {LONGEST_TERM:,.0f}, not {short_repr(value)} (s)"
        found.append((not good, name, what))
    return found


@dataclass(frozen=True)
class LinearCost(Fitted):
    """Seconds = base + per_token T + per_context S + per_sequence n.

    S counts what decodes read: a prompt's attention is in `per_token`.
    """

    base: Term
    per_token: Term = 0.0
    per_context: Term = 0.0
    per_sequence: Term = 0.0

    def __post_init__(self) -> None:
        terms = ("base", "per_token", "per_context", "per_sequence")
        raise_if(*check_terms(self, terms + COPY_TERMS))
        raise_if(
            (not any(getattr(self, term) for term in terms), "base", "every step takes no time")
        )

    def execute(self, step: Step) -> Timing:
        mixed = step.prefills or step.drafts
        seconds = self._mixed_seconds(step) if mixed else self.leap(step, 1).seconds[0]
        return Timing(*self.with_copies(seconds, step)) if step.copies else Timing(seconds)

    def _mixed_seconds(self, step: Step) -> float:
        """Return the time of a step with prompts or drafts, without swaps."""
        prefills = step.prefills
        tokens = step.decodes + step.drafts
        sequences = step.decodes + len(prefills)
        for chunk in prefills:
            tokens += chunk.tokens
        fixed = self.base + self.per_token * tokens + self.per_sequence * sequences
        return fixed + self.per_context * step.context

    def leap(self, step: Step, repeats: int) -> Leap:
        count, first = step.decodes, step.context
        fixed = self.base + self.per_token * count + self.per_sequence * count
        slope = self.per_context
        reads = range(first, first + repeats * count, count)
        return Leap([fixed + slope * read for read in reads])

    @property
    def fitted_terms(self) -> Mapping[str, str]:
        return {"step": "base", "per_sequence": "per_sequence"}

    def decode_seconds(self, counts: Counts, contexts: Counts) -> Seconds:
        fixed = self.base + self.per_token * counts + self.per_sequence * counts
        return np.asarray(fixed + self.per_context * contexts)
