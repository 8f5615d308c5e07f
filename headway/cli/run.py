"""The verb `headway run`: one scenario, once, several times or without its tables."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from headway.cli.console import print_interrupted_run, print_interrupted_runs
from headway.cli.options import (
    DEFAULT_RUN,
    DEFAULT_SETTINGS,
    DEPLOYMENT,
    RunOptions,
    ScenarioOrName,
    Settings,
    between,
    print_json,
    silent,
    whole,
    with_slo,
)
from headway.cli.progress import run_progress, runs_progress
from simulator.util.errors import HeadwayError
from simulator.util.files import READ_FILES, check_file, check_unread

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from headway.planning.sensitivity import Change
    from simulator.scenario.scenario import Scenario
    from simulator.simulation.result import Result
    from simulator.workload.workload import Workload

SAMPLING_INTERVAL = (
    15.0  # s, `headway.report.prometheus.INTERVAL`, of which only --prometheus knows
)

FILES = (
    "scenario.yaml",
    "summary.json",
    "replications.csv",
    "intervals.json",
    "requests.csv",
    "requests.parquet",
    "steps.csv",
    "steps.parquet",
)
"""What is written to the folder of a run."""


@Parameter(name="*")
@dataclass(slots=True, eq=False)
class Exports:
    """What else may be written of a run, each to a file or folder of its own."""

    timeline: Annotated[
        Path | None, Parameter(help="trace for ui.perfetto.dev (JSON); gzipped if it ends in .gz")
    ] = None
    prometheus: Annotated[
        Path | None, Parameter(help="metrics over time under vLLM's names, as OpenMetrics")
    ] = None
    prometheus_interval: Annotated[
        float, silent("seconds between samples of --prometheus [default: 15]"), between(1e-3, 10**9)
    ] = SAMPLING_INTERVAL
    prometheus_start: Annotated[
        str | None, silent("date at which --prometheus starts, or seconds since 1970 [default: 0]")
    ] = None
    deploy: Annotated[
        Path | None,
        silent("folder for files that start these servers: Kubernetes, Helm, vllm serve"),
    ] = None

    @property
    def files(self) -> dict[str, Path | None]:
        """What each option names."""
        return {name: getattr(self, name) for name in ("timeline", "deploy", "prometheus")}

    def check(self, folder: Path) -> None:
        """See before a run that it reads none of its files, and that its further ones are two."""
        from simulator.simulation.write import check_folder

        for own in (folder / name for name in FILES):
            check_unread("--out", own)
            if own.exists() and not (folder / "summary.json").exists():
                raise HeadwayError(f"--out {own}: no run wrote it; give another folder")
        timeline, prometheus = self.timeline, self.prometheus
        for option, path in (("--timeline", timeline), ("--prometheus", prometheus)):
            if path is not None:
                check_file(option, path)
        if timeline and prometheus and timeline.resolve() == prometheus.resolve():
            raise HeadwayError(f"--prometheus {prometheus}: --timeline names the same file")
        start = self.prometheus_start
        if prometheus is None and (start, self.prometheus_interval) != (None, SAMPLING_INTERVAL):
            option = "--prometheus-interval" if start is None else "--prometheus-start"
            raise HeadwayError(f"{option}: needs --prometheus")
        self.start_s()
        if self.deploy is not None:
            check_folder(self.deploy, option="--deploy")

    def start_s(self) -> float:
        """Return when the run begins for --prometheus, s since 1970."""
        start = self.prometheus_start
        if start is None:
            return 0.0
        from simulator.workload.traces.fields import parse_date

        try:
            number = start.replace(".", "", 1).isdigit()
            seconds = float(start) if number else parse_date(start) / 1e6
        except ValueError:
            raise HeadwayError(
                f"--prometheus-start {start}: must be a date such as 2026-01-31, or s since 1970"
            ) from None
        if not 0 <= seconds < 1e11:
            raise HeadwayError(f"--prometheus-start {start}: must be from 1970 to 5138")
        return seconds

    def write(self, result: "Result") -> list[str]:
        """Write what was asked for; return a line about each."""
        notes = []
        if self.timeline is not None:
            from headway.report.timeline import write_timeline

            shown = write_timeline(result, self.timeline)
            notes.append(f"written to {self.timeline}: {shown}; open it at https://ui.perfetto.dev")
        if self.prometheus is not None:
            from headway.report.prometheus import DASHBOARD, write_prometheus

            write_prometheus(result, self.prometheus, self.prometheus_interval, self.start_s())
            notes.append(
                f"written to {self.prometheus}: vLLM's metrics; Grafana's dashboard: {DASHBOARD}"
            )
        if self.deploy is not None:
            written = import_module(DEPLOYMENT).write_deployment(result.scenario, self.deploy)
            notes.append(f"written to {self.deploy}: {', '.join(file.name for file in written)}")
        return notes


DEFAULT_EXPORTS = Exports()


@Parameter(name="*")
@dataclass(slots=True, eq=False)
class Workers:
    """What runs a cluster's replicas, if this process does not."""

    jobs: Annotated[
        int | None,
        silent("workers for replicas in pods, or behind a router that ignores their state"),
        whole(),
    ] = None
    backend: Annotated[
        Literal["loky", "dask", "ray"] | None, Parameter(help="what runs the workers")
    ] = None
    address: Annotated[
        str | None, silent("address of a Dask scheduler or Ray cluster, host:port")
    ] = None

    def __bool__(self) -> bool:
        return self != DEFAULT_WORKERS

    def use(self) -> "AbstractContextManager[None]":
        """Make them joblib's, if there are some."""
        if not self:
            return nullcontext()
        from simulator.util.workers import use_backend

        return use_backend(self.backend or "loky", self.jobs, self.address)


DEFAULT_WORKERS = Workers()


def run(
    scenario: ScenarioOrName,
    /,
    *,
    settings: Settings = DEFAULT_SETTINGS,
    out: Annotated[Path | None, silent("folder for the files [default: out/NAME]")] = None,
    exports: Exports = DEFAULT_EXPORTS,
    sensitivity: Annotated[
        bool, silent("simulate how far 1 % longer steps move the results; print 95 % intervals")
    ] = False,
    options: RunOptions = DEFAULT_RUN,
    workers: Workers = DEFAULT_WORKERS,
    no_tables: Annotated[
        bool,
        silent(
            "write no requests.csv and steps.csv; memory does not grow with the run",
            "--no-tables",
        ),
    ] = False,
    tables_in: Annotated[
        Path | None, silent("with --no-tables: folder for requests and steps, written as they end")
    ] = None,
) -> int:
    """Simulate a scenario; print its report, write its files."""
    from headway.planning.knee import add_load
    from headway.report.text import run_table
    from simulator.results.service_levels import service_levels
    from simulator.scenario.load import load_scenario
    from simulator.simulation.run import run as simulate
    from simulator.simulation.run import spread_cluster
    from simulator.simulation.write import check_folder, check_parts, remove_tables, write_run
    from simulator.util.files import lock_folder

    loaded = load_scenario(scenario, with_slo(settings.overrides, options.slo), settings.seed)
    service_levels(loaded)  # what is wrong with them is told before the run
    folder = check_folder(out or _unread_folder(loaded.name), options.format)
    if tables_in is None:
        check_parts(folder)
    exports.check(folder)
    others = {**exports.files, "sensitivity": sensitivity}
    if no_tables:
        _refuse_beside_no_tables(others, options)
        return _run_without_tables(loaded, folder, options, workers, tables_in)
    if tables_in is not None:
        raise HeadwayError("--tables-in: needs --no-tables")
    if options.replications is not None:
        if workers or any(others.values()):
            raise HeadwayError(
                "--replications: cannot be used with --timeline, --prometheus, --deploy, "
                "--sensitivity and --jobs"
            )
        return _run_replications(loaded, folder, options.replications, options)
    changed = None
    if sensitivity:
        from headway.planning.sensitivity import changed_runs

        changed = changed_runs(loaded)  # what it is not for is told before the run
    with lock_folder(folder):
        with workers.use(), run_progress(loaded.name, options.quiet) as progress:
            play = partial(spread_cluster, jobs=workers.jobs) if workers else simulate
            result = play(
                loaded, stepwise=options.stepwise, progress=progress, workload=_requests(loaded)
            )
        result.warmup, result.cooldown = options.warmup, options.cooldown
        if result.interrupted:
            return print_interrupted_run(result)
        add_load(result)
        if changed is not None:
            _add_sensitivity(result, changed, options.quiet)
        files = write_run(result, folder, options.format)
        remove_tables(folder, files)
    notes = exports.write(result)
    if options.json_:
        print_json(folder / "summary.json")
    elif not options.quiet:
        print(run_table(result.summary()), *notes, sep="\n")
        _print_written(folder, [file.name for file in files])
    return int(not result.summary()["completed"] and len(result.workload) > 0)


def _unread_folder(name: str) -> Path:
    """Return out/NAME, or another folder where its scenario is read: that is not written over."""
    from simulator.scenario.load import OWN

    read = (Path("out") / name / OWN).absolute() in READ_FILES
    return Path("out") / (f"{name}-again" if read else name)


def _refuse_beside_no_tables(others: "Mapping[str, object]", options: RunOptions) -> None:
    """Refuse options that need a table of the requests, each by its name."""
    given = {"replications": options.replications, **others, "format": options.format != "csv"}
    given |= {"warmup": options.warmup, "cooldown": options.cooldown}
    if refused := [name for name, value in given.items() if value]:
        hint = "; --tables-in writes Parquet" * (refused[0] == "format")
        raise HeadwayError(f"--no-tables: cannot be used with --{refused[0]}{hint}")


def _requests(scenario: "Scenario") -> "Workload":
    """Make a scenario's requests, and say what of them can never hold."""
    from simulator.diagnosis.feasibility import warn_of_obstacles
    from simulator.scenario.draw import make_workload

    workload = make_workload(scenario)
    warn_of_obstacles(scenario, workload)
    return workload


def _add_sensitivity(result: "Result", changes: "Mapping[str, Change]", quiet: bool) -> None:
    """Put into a run's summary how far it moves with its cost model."""
    from headway.planning.sensitivity import as_summary, measure_sensitivity

    with runs_progress("runs", quiet) as progress:
        found = measure_sensitivity(result, changes, progress=progress)
    result.summary()["headway"]["sensitivity"] = as_summary(found)


def _run_without_tables(
    scenario: "Scenario",
    folder: Path,
    options: RunOptions,
    workers: Workers,
    tables: Path | None,
) -> int:
    """Run, however many requests there are; print the report, write it and the scenario."""
    from headway.report.text import run_table
    from simulator.simulation.partitions import FOLDER, forget_partitions, run_partitions
    from simulator.simulation.stream import run_streamed
    from simulator.simulation.write import check_folder, check_parts, remove_tables, write_scenario
    from simulator.util.files import lock_folder, write_together
    from simulator.util.quantile_sketch import RELATIVE_ERROR

    apart = partial(run_partitions, folder=folder, jobs=workers.jobs)
    simulate = apart if workers else run_streamed
    if tables is not None and not (folder / FOLDER).exists():  # else some are of this run
        check_parts(check_folder(tables, "parquet", "--tables-in"), "--tables-in")
    with lock_folder(folder):
        try:
            with workers.use(), run_progress(scenario.name, options.quiet) as progress:
                summary = simulate(
                    scenario, stepwise=options.stepwise, progress=progress, tables=tables
                )
        except KeyboardInterrupt:
            return print_interrupted_runs(folder / FOLDER, "parts")
        text = json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n"
        files = write_together(
            folder,
            {"summary.json": text, "scenario.yaml": partial(write_scenario, scenario)},
        )
        remove_tables(folder, files)
        forget_partitions(folder)
    if options.json_:
        print_json(folder / "summary.json")
    elif not options.quiet:
        print(run_table(summary))
        print(f"Requests were not kept: percentiles are off by {RELATIVE_ERROR:.2%} at most.")
        _print_written(folder, [file.name for file in files])
    return int(not summary["completed"] and summary["failed"] > 0)


def _run_replications(scenario: "Scenario", folder: Path, count: int, options: RunOptions) -> int:
    """Run a scenario so many times; write every run, print and write intervals."""
    from headway.planning import replications
    from headway.planning.runs import scenario_cost_lines
    from simulator.simulation.write import write_scenario
    from simulator.util.files import write_together

    _requests(scenario)
    with runs_progress("runs", options.quiet) as progress:
        runs = replications.replicate(
            [scenario], count, warmup=options.warmup, cooldown=options.cooldown, progress=progress
        )
    found = replications.estimates(runs[0])
    about = {
        "scenario": scenario.name,
        "seed": scenario.seed,
        "replications": count,
        "warmup_s": options.warmup,
        "cooldown_s": options.cooldown,
    }
    files = write_together(
        folder,
        {
            "replications.csv": replications.encode_replications([{}], runs),
            "intervals.json": replications.encode_intervals(found, about),
            "scenario.yaml": partial(write_scenario, scenario),
        },
    )
    if options.json_:
        print_json(folder / "intervals.json")
    elif not options.quiet:
        print(replications.run_intervals(scenario.name, found))
        print(*scenario_cost_lines([scenario.name], [scenario]), sep="\n")
        print(*replications.overloaded_lines([scenario.name], runs), sep="\n")
        _print_written(folder, [file.name for file in files])
    return int(
        any(run["num_prompts"] for run in runs[0]) and not any(run["completed"] for run in runs[0])
    )


def _print_written(folder: Path, names: list[str]) -> None:
    print(f"written to {folder}: {', '.join(names)}", flush=True)
