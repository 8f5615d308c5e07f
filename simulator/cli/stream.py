"""`headway run --no-tables`: a run of any length, and its summary."""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from simulator.cli.progress import Bar
from simulator.scenario.scenario import Scenario
from simulator.simulation.stream import run_streamed
from simulator.simulation.write import write_scenario
from simulator.util.errors import HeadwayError
from simulator.util.files import Writer, write_together
from simulator.util.quantile_sketch import ERROR
from simulator.views.report import run_table


def run_without_tables(
    scenario: Scenario, folder: Path, given: Mapping[str, object], stepwise: bool, quiet: bool
) -> int:
    """Run, print the report, write summary.json and scenario.yaml.

    `given` are the command's other options; those that are there and need tables are refused.
    """
    for name, value in given.items():
        if value:
            raise HeadwayError(f"--no-tables: goes without --{name}")
    bar = None if quiet or not sys.stderr.isatty() else Bar(scenario.name)
    try:
        summary = run_streamed(scenario, stepwise=stepwise, progress=bar)
    finally:
        if bar is not None:
            bar.close()

    def write(file: BinaryIO) -> None:
        file.write(json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n")

    writers: dict[str, Writer] = {
        "summary.json": write,
        "scenario.yaml": partial(write_scenario, scenario),
    }
    files = write_together(folder, writers)
    if not quiet:
        print(run_table(summary))
        print(f"Requests were not kept: percentiles within {ERROR:.2%} of themselves.")
        print(f"written to {folder}: {', '.join(file.name for file in files)}", flush=True)
    return 0
