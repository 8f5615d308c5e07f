"""The verb `headway sweep`: a row for each of many points, on all cores or a cluster."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headway.cli.console import print_errors, print_interrupted_runs
from headway.cli.options import (
    DEFAULT_SETTINGS,
    Json,
    Quiet,
    ScenarioOrName,
    Settings,
    Slo,
    Vary,
    Workers,
    print_json,
    silent,
    with_slo,
)
from headway.cli.progress import runs_progress


def sweep(
    scenario: ScenarioOrName,
    /,
    *,
    vary: Vary = None,
    slo: Slo = None,
    settings: Settings = DEFAULT_SETTINGS,
    out: Annotated[Path | None, silent("folder for the files [default: out/NAME-sweep]")] = None,
    jobs: Workers = None,
    backend: Annotated[
        Literal["loky", "dask", "ray"], Parameter(help="what runs the workers")
    ] = "loky",
    address: Annotated[
        str | None,
        silent("address of a Dask scheduler or Ray cluster, host:port [default: start one here]"),
    ] = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> int:
    """Simulate a scenario at many points, on all cores or a cluster; one row per point.

    The points are those of `--vary` and of the scenario's block `sweep`. The same command goes
    on where an earlier one was stopped. Exit code 1 if a point failed.
    """
    from headway.planning.design import refuse_overridden, split_values
    from headway.planning.sweep import (
        BEST,
        TABLE,
        load_sweep_points,
        run_sweep,
        sweep_table,
        write_best,
    )
    from simulator.simulation.write import check_folder

    axes = [split_values(item) for item in vary or ()]
    refuse_overridden([key for key, _ in axes], settings.overrides, settings.seed)
    overrides = with_slo(settings.overrides, slo)
    points = load_sweep_points(scenario, axes, overrides, settings.seed)
    name = next(point.scenario.name for point in points if point.scenario is not None)
    folder = check_folder(out or Path("out") / f"{name}-sweep")
    try:
        with runs_progress("points", quiet) as progress:
            rows = run_sweep(
                points, folder, jobs=jobs, backend=backend, address=address, progress=progress
            )
    except KeyboardInterrupt:
        return print_interrupted_runs(folder / TABLE)
    best = write_best(points, rows, folder)
    failed = 0
    for point, row in zip(points, rows, strict=True):
        if "error" in row:
            failed += 1
            print_errors([f"{point.label}: {row['error']}"])
    if json_:
        print_json(folder / TABLE)
    elif not quiet:
        print(sweep_table(points, rows))
        print(f"{len(rows) - failed:,} of {len(rows):,} points done")
        print(f"written to {folder}: {TABLE}{', ' + BEST if best else ''}")
    return int(bool(failed) or not any(row.get("completed") for row in rows))
