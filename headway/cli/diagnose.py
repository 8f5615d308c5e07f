"""The verb `headway diagnose`: what limits a run, and what each advice would bring."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.cli.options import DEFAULT_SETTINGS, Json, Quiet, Settings, Workers, print_json
from headway.cli.progress import runs_progress


def diagnose(
    scenario: Annotated[
        Path,
        Parameter(
            name="SCENARIO",
            help="scenario file (YAML), a shipped one's name, or a folder that `headway run` wrote",
        ),
    ],
    /,
    *,
    settings: Settings = DEFAULT_SETTINGS,
    jobs: Workers = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> int:
    """Find what limits a run, and simulate each change that it advises."""
    from headway.planning.diagnose import diagnose as find
    from headway.planning.diagnose import find_held, table
    from simulator.scenario.load import load_scenario

    path = scenario / "scenario.yaml" if scenario.is_dir() else scenario
    loaded = load_scenario(path, settings.overrides, settings.seed)
    with runs_progress("runs", quiet or json_) as progress:
        found = find(loaded, jobs=jobs, progress=progress)
    if not found.trials:
        found = replace(found, held=find_held(path, settings.overrides, settings.seed, jobs))
    if json_:
        print_json(found.as_dict())
    elif not quiet:
        print(table(found))
    return 0
