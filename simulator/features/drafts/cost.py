"""What drafting adds to a step: draft steps after the one that verifies."""

from dataclasses import dataclass

from simulator.core.executor import Leap, Timing
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

    def execute(self, step: Step) -> Timing:
        """Say what a step takes, and the drafting after it."""
        timing = self.inner.execute(step)
        verified = timing.seconds - self.inner.swap_seconds(step)
        seconds = timing.seconds + self._drafting(step, verified)
        return Timing(seconds, timing.swap, timing.features, timing.host)

    def _drafting(self, step: Step, verified: float) -> float:
        """Return the seconds of all draft steps after a step that took `verified` seconds."""
        draft, count = self.draft, self.drafts if step.drafting < 0 else step.drafting
        sequences = step.decodes + len(step.prefills)
        seconds = count * (draft.seconds + draft.seconds_per_sequence * sequences)
        if draft.fraction and count:
            context = step.context + sum(chunk.start + chunk.tokens for chunk in step.prefills)
            one = Step([], sequences, context)
            later = self.inner.execute(one).seconds if count > 1 else 0.0
            seconds += draft.fraction * (verified + (count - 1) * later)
        return seconds

    def leap(self, step: Step, repeats: int) -> Leap:
        """Say what successive decode steps take; there are none alike, so one at most."""
        assert repeats == 1, "steps that verify drafts do not repeat"
        timing = self.execute(step)
        return Leap([timing.seconds], [timing.host])
