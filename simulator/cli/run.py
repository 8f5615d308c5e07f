"""The verb `headway run`: one scenario, once, several times or without its tables."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from simulator.cli.interrupts import tell_interrupted_run
from simulator.cli.options import (
    Cooldown,
    Format,
    Overrides,
    Quiet,
    Replications,
    ScenarioOrName,
    Seed,
    Stepwise,
    Warmup,
    check_trim,
    workers_asked_for,
)
from simulator.cli.progress import run_progress, runs_progress
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from simulator.scenario.scenario import Scenario


def run(
    scenario: ScenarioOrName,
    /,
    *,
    set_: Overrides = None,
    seed: Seed = None,
    out: Annotated[
        Path | None, Parameter(help="folder for the files [default: out/NAME]", show_default=False)
    ] = None,
    timeline: Annotated[
        Path | None, Parameter(help="trace for ui.perfetto.dev (JSON), packed if it ends in .gz")
    ] = None,
    prometheus: Annotated[
        Path | None, Parameter(help="metrics under vLLM's names, as its /metrics gives them")
    ] = None,
    stepwise: Stepwise = False,
    format: Format = "csv",
    quiet: Quiet = False,
    replications: Replications = None,
    warmup: Warmup = 0.0,
    cooldown: Cooldown = 0.0,
    jobs: Annotated[
        int | None,
        Parameter(help="run a cluster's replicas on so many workers; its router must look at none"),
    ] = None,
    backend: Annotated[
        Literal["loky", "dask", "ray"] | None, Parameter(help="who runs these workers")
    ] = None,
    address: Annotated[
        str | None,
        Parameter(help="of a Dask scheduler or Ray cluster, host:port", show_default=False),
    ] = None,
    no_tables: Annotated[
        bool,
        Parameter(
            name="--no-tables",
            negative="",
            show_default=False,
            help="summary.json alone, in memory that does not grow with the requests",
        ),
    ] = False,
) -> int:
    """Simulate a scenario; print its report, write its files."""
    from simulator.scenario.load import load_scenario
    from simulator.simulation.write import check_folder, write_run
    from simulator.views.exports import check_exports, write_exports
    from simulator.views.report import run_table

    loaded = load_scenario(scenario, set_ or (), seed)
    folder = check_folder(out or Path("out") / loaded.name, format)
    check_exports(timeline, prometheus)
    trim = check_trim(warmup, cooldown)
    workers = workers_asked_for(jobs, backend, address)
    if no_tables:
        given: dict[str, object] = {"replications": replications, "jobs": workers}
        given |= {"timeline": timeline, "prometheus": prometheus, "format": format != "csv"}
        given |= {"warmup": warmup, "cooldown": cooldown}
        if refused := [name for name, value in given.items() if value]:
            raise HeadwayError(f"--no-tables: goes without --{refused[0]}")
        return _run_without_tables(loaded, folder, stepwise, quiet)
    if replications is not None:
        if timeline or prometheus or workers:
            raise HeadwayError("--replications: goes without --timeline, --prometheus and --jobs")
        return _run_replications(loaded, folder, replications, trim, quiet)
    with run_progress(loaded.name, quiet) as progress:
        if workers:
            from simulator.simulation.cluster import spread_cluster
            from simulator.util.workers import use_backend

            with use_backend(**workers):
                result = spread_cluster(loaded, stepwise=stepwise, progress=progress, jobs=jobs)
        else:
            from simulator.simulation.run import run

            result = run(loaded, stepwise=stepwise, progress=progress)
    result.warmup, result.cooldown = trim
    if result.interrupted:
        return tell_interrupted_run(result)
    files = write_run(result, folder, format)
    notes = write_exports(result, timeline, prometheus)
    if not quiet:
        print(run_table(result.summary()), *notes, sep="\n")
        _print_written(folder, [file.name for file in files])
    return 0


def _run_without_tables(scenario: "Scenario", folder: Path, stepwise: bool, quiet: bool) -> int:
    """Run, however many requests there are; print the report, write it and the scenario."""
    from simulator.simulation.stream import run_streamed
    from simulator.simulation.write import write_scenario
    from simulator.util.files import write_together
    from simulator.util.quantile_sketch import ERROR
    from simulator.views.report import run_table

    with run_progress(scenario.name, quiet) as progress:
        summary = run_streamed(scenario, stepwise=stepwise, progress=progress)
    text = json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n"
    files = write_together(
        folder,
        {
            "summary.json": lambda file: file.write(text),
            "scenario.yaml": partial(write_scenario, scenario),
        },
    )
    if not quiet:
        print(run_table(summary))
        print(f"Requests were not kept: percentiles within {ERROR:.2%} of themselves.")
        _print_written(folder, [file.name for file in files])
    return 0


def _run_replications(
    scenario: "Scenario", folder: Path, count: int, trim: tuple[float, float], quiet: bool
) -> int:
    """Run a scenario so many times; write every run, print and write intervals."""
    from simulator.planning.replication_report import (
        encode_intervals,
        encode_replications,
        estimates,
        run_intervals,
        warn_constant,
    )
    from simulator.planning.replications import check_count, replicate
    from simulator.simulation.write import write_scenario
    from simulator.util.files import write_together

    check_count(count)
    with runs_progress("runs", quiet) as progress:
        runs = replicate([scenario], count, warmup=trim[0], cooldown=trim[1], progress=progress)
    warn_constant(runs)
    found = estimates(runs[0])
    about = {
        "scenario": scenario.name,
        "seed": scenario.seed,
        "replications": count,
        "warmup_s": trim[0],
        "cooldown_s": trim[1],
    }
    files = write_together(
        folder,
        {
            "replications.csv": lambda file: file.write(encode_replications([{}], runs)),
            "intervals.json": lambda file: file.write(encode_intervals(found, about)),
            "scenario.yaml": partial(write_scenario, scenario),
        },
    )
    if not quiet:
        print(run_intervals(scenario.name, found))
        _print_written(folder, [file.name for file in files])
    return 0


def _print_written(folder: Path, names: list[str]) -> None:
    print(f"written to {folder}: {', '.join(names)}", flush=True)
