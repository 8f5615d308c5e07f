"""Validate against measured runs: every run of a folder, in parallel."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from calibration.measured.predict import Outcome, predict
from calibration.measured.runs import choose, read_runs
from simulator.util.workers import Died, each


def validate_measured(folder: Path, wanted: Sequence[str] = ()) -> list[Outcome]:
    """Predict the runs of DIR/runs.csv, or those that are named; in the order of the file.

    HeadwayError where runs.csv is at fault or does not have a run; what is wrong with one run
    alone is told in its `reason`.
    """
    runs = choose(read_runs(folder), list(wanted), folder)
    one = partial(predict, folder=folder)
    if len(runs) == 1:
        return [one(runs[0])]
    found = [Outcome(run) for run in runs]
    for index, outcome in each(one, runs):
        if isinstance(outcome, Died):
            found[index].reason = outcome.reason
        else:
            found[index] = outcome
    return found
