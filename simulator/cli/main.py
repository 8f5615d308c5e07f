"""The command `headway`: thin verbs over the package, and what goes wrong told in one line each.

Everything but the command line itself is imported by the verb that needs it.
"""

import os
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError

from simulator.cli.console import (
    INTERRUPTED,
    left_behind,
    tell_errors,
    tell_interrupted,
    tell_os_error,
    told_warnings,
)
from simulator.cli.options import Address, Backend, Jobs, NoTables, workers_asked_for
from simulator.util.errors import HeadwayError
from simulator.util.files import WRITTEN
from simulator.util.version import __version__

if TYPE_CHECKING:
    from simulator.scenario.scenario import Scenario
    from simulator.simulation.result import Result


# Nothing here multiplies matrices, and numpy's BLAS spends 0.1 s of CPU on starting its threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

app = App(
    name="headway",
    help="Simulate how an LLM server batches requests, and what its users feel.",
    version=__version__,
    version_flags=["--version"],
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app.command(
    "simulator.cli.trace:app",
    name="trace",
    help="Describe a workload, or write it as Mooncake JSONL.",
)
app.command(
    "simulator.cli.memory:memory",
    name="memory",
    help="Tell how many tokens and requests fit on a GPU.",
)
app.command(
    "simulator.cli.conform:conform",
    name="conform",
    help="Compare every decision with a schedule recorded from vLLM; exit code 1 on a difference.",
)
app.command("simulator.views.html.page:report", name="report", help="Write an HTML page of runs.")
app.command(
    "simulator.diagnosis.explain:command", name="explain", help="Tell one request's story in words."
)
# These need torch, or what it has measured: they are imported when they are called.
app.command("calibration.commands:live", name="live", help="Run a scenario on a real engine.")
app.command(
    "calibration.commands:calibrate",
    name="calibrate",
    help="Measure what steps take on a device, and fit a cost profile to them.",
)
app.command(
    "calibration.profile_commands:app",
    name="profile",
    help="Build cost profiles from kernel tables; list and show those here.",
)
app.command(
    "calibration.commands:validate",
    name="validate",
    help="Compare a live run, or measured runs of real servers, with their simulation.",
)
app.command("simulator.cli.engines:engines", name="engines", help="List the named engines.")
app.command(
    "simulator.cli.sweep:sweep",
    name="sweep",
    help="Simulate a scenario at many points, on all cores or a cluster; one row per point.",
)
app.command(
    "simulator.cli.plan:plan_command",
    name="plan",
    help="Find the largest rate under service levels, the fewest replicas, the cheapest fleet.",
)
app.command(
    "simulator.cli.plot:plot",
    name="plot",
    help="Draw a picture of what run, compare, sweep, plan or live wrote.",
)

ScenarioFile = Annotated[
    Path, Parameter(name="SCENARIO", help="scenario file (YAML), or a shipped one's name: demo")
]
Overrides = Annotated[
    list[str] | None,
    Parameter(
        name="--set",
        negative="",
        help="set a key: dotted.key=value (repeatable)",
    ),
]
Seed = Annotated[int | None, Parameter(help="seed, in place of the scenario's")]
Stepwise = Annotated[
    bool,
    Parameter(negative="", show_default=False, help="every step by itself: same result, slower"),
]
Format = Annotated[Literal["csv", "parquet"], Parameter(help="of the tables")]
Quiet = Annotated[
    bool, Parameter(negative="", show_default=False, help="print errors and warnings only")
]
Replications = Annotated[
    int | None,
    Parameter(help="runs with other arrivals, lengths and errors of the cost model; intervals"),
]
Warmup = Annotated[
    float, Parameter(show_default=False, help="seconds from the first request on to leave out")
]
Cooldown = Annotated[
    float, Parameter(show_default=False, help="seconds before the last request to leave out")
]


@app.command
def run(
    scenario: ScenarioFile,
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
    jobs: Jobs = None,
    backend: Backend = None,
    address: Address = None,
    no_tables: NoTables = False,
) -> int:
    """Simulate a scenario; print its report, write its files."""
    from simulator.scenario.load import load_scenario
    from simulator.simulation.write import check_folder, write_run
    from simulator.views.exports import check_exports, write_exports
    from simulator.views.report import run_table

    loaded = load_scenario(scenario, set_ or (), seed)
    folder = check_folder(out or Path("out") / loaded.name, format)
    check_exports(timeline, prometheus)
    trim = _trim(warmup, cooldown)
    spread = workers_asked_for(jobs, backend, address)
    if no_tables:
        from simulator.cli.stream import run_without_tables

        given: dict[str, object] = {"replications": replications, "jobs": spread}
        given |= {"timeline": timeline, "prometheus": prometheus, "format": format != "csv"}
        given |= {"warmup": warmup, "cooldown": cooldown}
        return run_without_tables(loaded, folder, given, stepwise, quiet)
    if replications is not None:
        if timeline or prometheus or spread:
            raise HeadwayError("--replications: goes without --timeline, --prometheus and --jobs")
        from simulator.cli.replicated import run_replicated

        return run_replicated(loaded, folder, replications, trim, quiet)
    result = _simulate(loaded, stepwise, None if quiet else loaded.name, trim, spread)
    if result.interrupted:
        return tell_interrupted(result)
    files = write_run(result, folder, format)
    notes = write_exports(result, timeline, prometheus)
    if not quiet:
        print(run_table(result.summary()))
        told = f"written to {folder}: {', '.join(file.name for file in files)}"
        print(*notes, told, sep="\n", flush=True)
    return 0


@app.command
def compare(
    scenario: ScenarioFile,
    /,
    *,
    vary: Annotated[
        list[str],
        Parameter(
            negative="",
            help="dotted.key=a,b,c (repeated: all combinations)",
        ),
    ],
    set_: Overrides = None,
    seed: Seed = None,
    out: Annotated[
        Path | None,
        Parameter(help="folder for the files [default: out/NAME-compare]", show_default=False),
    ] = None,
    stepwise: Stepwise = False,
    format: Format = "csv",
    quiet: Quiet = False,
    replications: Replications = None,
    warmup: Warmup = 0.0,
    cooldown: Cooldown = 0.0,
) -> int:
    """Simulate a scenario with some keys varied, side by side."""
    from simulator.planning.comparison import write_comparison
    from simulator.planning.points import expand
    from simulator.simulation.write import check_folder

    points = expand(scenario, vary, set_ or (), seed)
    folder = check_folder(out or Path("out") / f"{points[0].scenario.name}-compare", format)
    trim = _trim(warmup, cooldown)
    if replications is not None:
        from simulator.cli.replicated import compare_replicated

        return compare_replicated(points, folder, replications, trim, quiet)
    results = []
    for k, point in enumerate(points, 1):
        label = None if quiet else f"{k}/{len(points)} {point.label}"
        results.append(_simulate(point.scenario, stepwise, label, trim))
        if results[-1].interrupted:
            return tell_interrupted(results[-1])
    write_comparison(points, results, folder, format, quiet)
    return 0


@app.command
def schema() -> int:
    """Print the scenario's JSON Schema, for completion and checks in an editor."""
    import json

    from simulator.scenario.json_schema import json_schema

    print(json.dumps(json_schema(), indent=1))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code. Whatever the user did wrong is told on stderr."""
    WRITTEN.clear()
    try:
        with told_warnings():
            code = app(argv, exit_on_error=False, print_error=False)
            print(end="", flush=True)
    except HeadwayError as error:
        return tell_errors(error.messages)
    except UnusedCliTokensError as error:
        return tell_errors([f"unexpected argument: {' '.join(error.unused_tokens or ())}"])
    except CycloptsError as error:
        return tell_errors([" ".join(str(error).split())])
    except KeyboardInterrupt:
        print(f"headway: interrupted; {left_behind()}", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        return tell_os_error(error)
    return code or 0


def _trim(warmup: float, cooldown: float) -> tuple[float, float]:
    """Check the seconds to leave out."""
    given = {"--warmup": warmup, "--cooldown": cooldown}
    if wrong := [
        f"{option} {seconds:g}: must be seconds, 0 or more"
        for option, seconds in given.items()
        if not 0 <= seconds < inf
    ]:
        raise HeadwayError(wrong)
    return warmup, cooldown


def _simulate(
    scenario: "Scenario",
    stepwise: bool,
    label: str | None,
    trim: tuple[float, float],
    spread: dict[str, Any] | None = None,
) -> "Result":
    """Run a scenario; with a label, behind a progress bar if there is a terminal to show it on."""
    from simulator.cli.progress import Bar
    from simulator.simulation.run import run

    bar = None if label is None or not sys.stderr.isatty() else Bar(label)
    try:
        if spread:
            from simulator.simulation.cluster import spread_cluster
            from simulator.util.workers import use_backend

            with use_backend(**spread):
                result = spread_cluster(
                    scenario, stepwise=stepwise, progress=bar, jobs=spread["jobs"]
                )
        else:
            result = run(scenario, stepwise=stepwise, progress=bar)
    finally:
        if bar is not None:
            bar.close()
    result.warmup, result.cooldown = trim
    return result
