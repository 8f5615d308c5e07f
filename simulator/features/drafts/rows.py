"""What the log has of a step that verifies drafts."""

from simulator.core.log import STEP_ROW, StepRow
from simulator.core.request import Step

DECODES = STEP_ROW.index("decodes")  # and behind it `wasted`


def verified_row(row: StepRow, step: Step, tokens: int) -> StepRow:
    """Return a step's row where decodes bring so many tokens: all else of them is wasted."""
    if not step.decodes:
        return row
    wasted = step.decodes + step.drafts - tokens
    return *row[:DECODES], tokens, wasted, *row[DECODES + 2 :]
