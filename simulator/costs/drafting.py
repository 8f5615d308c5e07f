"""What drafting adds to a step: a cost model around the target's."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.core.request import Step
from simulator.core.speculative_config import DraftConfig
from simulator.costs.cost_model import CostModel

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftedCost:
    """The target's cost, which prices the verification, and that of `drafts` draft steps."""

    target: CostModel
    drafts: int
    draft: DraftConfig

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.target.name

    def execute(self, step: Step) -> float:
        """Give the seconds that a step takes, and the drafting after it."""
        seconds = self.target.execute(step)
        return seconds + self._drafting(step, seconds - self.target.swap_seconds(step))

    def _drafting(self, step: Step, verified: float) -> float:
        """Give the seconds of all draft steps after a step that took `verified` seconds."""
        draft = self.draft
        sequences = step.decodes + len(step.prefills)
        seconds = self.drafts * (draft.seconds + draft.seconds_per_sequence * sequences)
        if draft.fraction:
            context = step.context + sum(chunk.start + chunk.tokens for chunk in step.prefills)
            later = self.target.execute(Step([], sequences, context)) if self.drafts > 1 else 0.0
            seconds += draft.fraction * (verified + (self.drafts - 1) * later)
        return seconds

    def leap(self, step: Step, repeats: int) -> list[float]:
        """Give the seconds of successive decode steps; there are none alike, so one at most."""
        assert repeats == 1, "steps that verify drafts do not repeat"
        return [self.execute(step)]

    def decode_seconds(self, counts: Counts, contexts: Counts) -> npt.NDArray[np.float64]:
        """Give the target's seconds of decodes without drafts."""
        return self.target.decode_seconds(counts, contexts)

    def swap_seconds(self, step: Step) -> float:
        """Give the seconds of a step's copies of KV blocks to the host and back."""
        return self.target.swap_seconds(step)

    @property
    def residuals(self) -> Mapping[str, float] | None:
        """Those of the target."""
        return self.target.residuals

    def with_copies(self, seconds: float, step: Step) -> float:
        """Give the time of a step whose compute takes so many seconds, with its copies."""
        return self.target.with_copies(seconds, step)

    def logged_swap_seconds(self, swaps: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
        """Give the seconds of logged copies of KV blocks (rows of dtype SWAP)."""
        return self.target.logged_swap_seconds(swaps)

    def outside(self, steps: npt.NDArray[np.void]) -> list[str]:
        """Say, a line per quantity, which logged steps lie outside the target's fitted range."""
        return self.target.outside(steps)
