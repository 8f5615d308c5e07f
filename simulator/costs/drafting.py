"""What drafting adds to a step: a cost model around the target's."""

from dataclasses import dataclass

from simulator.core.request import Step
from simulator.core.speculative_config import DraftConfig
from simulator.costs.cost_model import CostDecorator


@dataclass(frozen=True)
class DraftedCost(CostDecorator):
    """The target's cost, which prices the verification, and that of `drafts` draft steps.

    `decode_seconds` are the target's, of decodes without drafts.
    """

    drafts: int
    draft: DraftConfig

    def execute(self, step: Step) -> float:
        """Give the seconds that a step takes, and the drafting after it."""
        seconds = self.inner.execute(step)
        return seconds + self._drafting(step, seconds - self.inner.swap_seconds(step))

    def _drafting(self, step: Step, verified: float) -> float:
        """Give the seconds of all draft steps after a step that took `verified` seconds."""
        draft = self.draft
        sequences = step.decodes + len(step.prefills)
        seconds = self.drafts * (draft.seconds + draft.seconds_per_sequence * sequences)
        if draft.fraction:
            context = step.context + sum(chunk.start + chunk.tokens for chunk in step.prefills)
            later = self.inner.execute(Step([], sequences, context)) if self.drafts > 1 else 0.0
            seconds += draft.fraction * (verified + (self.drafts - 1) * later)
        return seconds

    def leap(self, step: Step, repeats: int) -> list[float]:
        """Give the seconds of successive decode steps; there are none alike, so one at most."""
        assert repeats == 1, "steps that verify drafts do not repeat"
        return [self.execute(step)]
