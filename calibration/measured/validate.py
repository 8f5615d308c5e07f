"""Validate against measured runs: every run of a folder, in parallel."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from calibration.measured.predict import Outcome, predict
from calibration.measured.runs import choose, read_runs


def validate_measured(folder: Path, wanted: Sequence[str] = ()) -> list[Outcome]:
    """Predict the runs of DIR/runs.csv, or those that are named; in the order of the file.

    HeadwayError where runs.csv is at fault or does not have a run; what is wrong with one run
    alone is told in its `reason`.
    """
    runs = choose(read_runs(folder), list(wanted), folder)
    workers = min(len(runs), os.cpu_count() or 1)
    one = partial(predict, folder=folder)
    if workers == 1:
        return list(map(one, runs))
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(one, runs, chunksize=1))
