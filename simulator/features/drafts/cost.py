"""What drafting adds to a step: draft steps after the one that verifies."""

from collections.abc import Callable
from dataclasses import dataclass

from simulator.core.executor import Leap, StagedExecutor, StageTimes, Timing
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
        drafting = self._drafting(step, verified, lambda one: self.inner.execute(one).seconds)
        seconds = timing.seconds + drafting
        return Timing(seconds, timing.swap, timing.features, timing.host)

    def stage_seconds(self, step: Step) -> StageTimes:
        """Say what a step takes of host and stages, in s: the last stage drafts."""
        inner = self.inner
        assert isinstance(inner, StagedExecutor)
        host, stages, send = inner.stage_seconds(step)
        drafting = self._drafting(step, sum(stages), lambda one: sum(inner.stage_seconds(one)[1]))
        return StageTimes(host, [*stages[:-1], stages[-1] + drafting], send)

    def _drafting(self, step: Step, verified: float, takes: Callable[[Step], float]) -> float:
        """Return the seconds of all draft steps after a step that took `verified` seconds.

        `takes` says what the target's layers take for a step.
        """
        draft, count = self.draft, self.drafts if step.drafting < 0 else step.drafting
        sequences = step.decodes + len(step.prefills)
        seconds = count * (draft.seconds + draft.seconds_per_sequence * sequences)
        if draft.fraction and count:
            context = step.context + sum(chunk.start + chunk.tokens for chunk in step.prefills)
            one = Step([], sequences, context)
            later = takes(one) if count > 1 else 0.0
            seconds += draft.fraction * (verified + (count - 1) * later)
        return seconds

    def leap(self, step: Step, repeats: int) -> Leap:
        """Say what successive decode steps take; there are none alike, so one at most."""
        assert repeats == 1, "steps that verify drafts do not repeat"
        timing = self.execute(step)
        return Leap([timing.seconds], [timing.host])
