"""The commands that need an engine, or measure one: calibrate, live, replay, shadow, validate.

The command line loads this module only for them: it is all that reaches from it to torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from calibration.engine_steps.grid import NoGraphs, Setup
from headway.cli.options import (
    DEFAULT_READING,
    DEFAULT_SETTINGS,
    Json,
    NoOwnCode,
    Quiet,
    Reading,
    Settings,
    named_by_option,
    print_json,
    refuse_own_code,
    silent,
    whole,
)
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.simulation.write import check_folder
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from gpu_backend.live import LiveRun

Device = Annotated[str, Parameter(help="cpu or cuda")]
DEFAULT_SETUP = Setup()
STANDARD_OUTPUT = Path("-")


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server to calibrate from, and how it is driven."""

    server: Annotated[
        str | None,
        Parameter(help="drive this running vLLM (http://HOST:PORT), and write its scenario"),
    ] = None
    minutes: Annotated[float | None, silent("with --server: minutes of load [default: 5]")] = None
    max_rate: Annotated[
        float | None, silent("with --server: requests/s at most [default: up to saturation]")
    ] = None
    steps: Annotated[
        Path | None, silent("with --server: the file that its step recorder writes")
    ] = None

    @property
    def beside(self) -> dict[str, object]:
        """What each option beside --server gives."""
        return {"--minutes": self.minutes, "--max-rate": self.max_rate, "--steps": self.steps}


NO_SERVER = RunningServer()


def calibrate(
    *,
    setup: Setup = DEFAULT_SETUP,
    out: Annotated[
        Path | None,
        Parameter(help="folder for the files [default: out/calibrate-MODEL-DEVICE]"),
    ] = None,
    from_: Annotated[
        Path | None,
        Parameter(name="--from", help="fit this steps.csv.gz again, measure nothing"),
    ] = None,
    from_requests: Annotated[
        Path | None, Parameter(help="fit overheads to this log of a server's requests")
    ] = None,
    reading: Reading = DEFAULT_READING,
    from_steps: Annotated[
        Path | None, Parameter(help="fit a whole profile to this log of a server's steps")
    ] = None,
    from_torch_profile: Annotated[
        Path | None,
        Parameter(help="fit a profile to the steps in this trace of torch's profiler, from vLLM"),
    ] = None,
    running: RunningServer = NO_SERVER,
    scenario: Annotated[
        Path | None,
        Parameter(help="scenario file with the model, GPU, engine and cost of a log or server"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", help="set a key of the scenario: dotted.key=value"),
    ] = None,
    no_own_code: NoOwnCode = False,
) -> int:
    """Measure what steps take on a device, and fit a cost profile to them.

    The exit code is 1 where a profiler's trace tells too little for that.
    """
    from calibration.engine_steps.calibrate import calibrate as measure_and_fit
    from calibration.engine_steps.refit import refit

    refuse_own_code(no_own_code)
    sources = {
        "--model": setup.model,
        "--from": from_,
        "--from-requests": from_requests,
        "--from-steps": from_steps,
        "--from-torch-profile": from_torch_profile,
        "--server": running.server,
    }
    beside: dict[str, object] = {"--scenario": scenario, "--set": set_}
    beside |= {f"--{name.replace('_', '-')}": value for name, value in reading.given.items()}
    beside |= running.beside
    _check_source(sources, beside, setup)
    if running.server is not None:
        from calibration.running_server.calibrate import calibrate_server

        return calibrate_server(
            running.server,
            check_folder(out or Path("out") / "calibrate-server"),
            minutes=5.0 if running.minutes is None else running.minutes,
            max_rate=inf if running.max_rate is None else running.max_rate,
            steps=running.steps,
            scenario=scenario,
            overrides=set_ or [],
            echo=partial(print, flush=True),
        )
    if from_ is not None:
        refit(from_, out or from_.parent)
        return 0
    if setup.model is not None:
        setup.check()
        name = f"calibrate-{Path(setup.model).name}-{setup.device}"
        measure_and_fit(setup, out or Path("out") / name, partial(print, flush=True))
        return 0
    loaded = load_scenario(scenario, set_ or []) if scenario is not None else None
    return _calibrate_from_log(
        loaded, out, reading, requests=from_requests, steps=from_steps, profile=from_torch_profile
    )


def _calibrate_from_log(
    loaded: Scenario | None,
    out: Path | None,
    reading: Reading,
    *,
    requests: Path | None,
    steps: Path | None,
    profile: Path | None,
) -> int:
    """Fit to a server's log, one of the three; return the exit code."""
    from calibration.server_logs.from_requests import calibrate_from_requests
    from calibration.server_logs.from_steps import calibrate_from_profile, calibrate_from_steps

    log = requests or steps or profile
    assert log is not None  # else there is no source
    name = loaded.name if loaded is not None else log.name.split(".")[0]
    folder = check_folder(out or Path("out") / f"calibrate-{name}")
    if profile is not None:
        told, whole = calibrate_from_profile(profile, loaded, folder)
        print(told)
        return int(not whole)
    assert loaded is not None
    if requests is not None:
        with named_by_option(reading.given):
            print(calibrate_from_requests(requests, loaded, folder, **reading.given))
    else:
        print(calibrate_from_steps(log, loaded, folder))
    return 0


def _check_source(
    sources: Mapping[str, object], beside: Mapping[str, object], setup: Setup
) -> None:
    """Refuse options of `calibrate` that do not go together, each by its name.

    `sources` say what is fitted: there is to be one. `beside` are of logs, `setup` of a
    measurement.
    """
    of_measuring = {
        "--device": setup.device != DEFAULT_SETUP.device,
        "--budget-s": setup.budget_s != DEFAULT_SETUP.budget_s,
        "--no-graphs": setup.no_graphs,
    }
    measuring = [option for option, given in of_measuring.items() if given]
    named = [option for option, value in sources.items() if value is not None]
    others = [option for option, value in beside.items() if value not in (None, [])]
    wrong: list[str] = []
    if not named:
        wrong += [f"{option}: needs {SOURCES_OF[option]}" for option in others]
        if not wrong:
            wrong = [
                "--model: say which model to measure, or what to fit: --from what was measured, "
                "--from-requests, --from-steps or --from-torch-profile a server's log, or --server"
            ]
    elif len(named) > 1:
        wrong = [f"{named[1]}: cannot be used with {named[0]}"]
    else:
        (source,) = named
        wrong += [
            f"{option}: needs {SOURCES_OF[option]}, not {source}"
            for option in others
            if source not in SOURCES_OF[option].replace(",", " ").split()
        ]
        if source != "--model":
            wrong += [f"{option}: needs --model, not {source}" for option in measuring]
        if source in LOGS and "--scenario" not in others:
            wrong.append(f"{source}: needs --scenario, which says what the server is, as s.yaml")
        elif "--set" in others and "--scenario" not in others and source == TRACE:
            wrong.append("--set: needs --scenario, as s.yaml")
    if wrong:
        raise HeadwayError(wrong)


VALIDATE = "validate: give a folder of `headway live`, as out/demo-live, or --measured runs"
LOGS = ("--from-requests", "--from-steps")
TRACE = "--from-torch-profile"
SOURCES_OF = {
    "--scenario": f"{', '.join(LOGS)}, {TRACE} or --server",
    "--set": f"{', '.join(LOGS)}, {TRACE} or --server",
    **dict.fromkeys(
        ("--columns", "--chars-per-token", "--encoding", "--result"), "--from-requests"
    ),
    **dict.fromkeys(("--minutes", "--max-rate", "--steps"), "--server"),
}
"""What is fitted where an option beside it has a meaning."""


def live(
    scenario: Annotated[Path, Parameter(name="SCENARIO", help="scenario file (YAML)")],
    /,
    *,
    engine: Annotated[
        Literal["headway", "vllm"],
        Parameter(help="the engine: Headway's own in torch, or the installed vLLM"),
    ] = "headway",
    device: Device = "cpu",
    clock: Annotated[
        Literal["exec", "wall", "model"],
        Parameter(help="exec: measured time, idle time skipped; wall: real time; model: predicted"),
    ] = "exec",
    reruns: Annotated[
        int, whole(0), Parameter(help="further runs, each in a folder of its own")
    ] = 0,
    settings: Settings = DEFAULT_SETTINGS,
    out: Annotated[
        Path | None, Parameter(help="folder for the files [default: out/NAME-live]")
    ] = None,
    no_graphs: NoGraphs = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run a scenario on a real engine; print its report, write its files.

    With vLLM the simulation of the same scenario is put beside it.
    """
    from calibration.engine_steps.live_folder import RERUN_PATTERN, write_live
    from headway.cli.console import print_interrupted_run
    from headway.cli.progress import run_progress
    from headway.report.text import run_table

    if engine == "vllm":
        _check_vllm(device, clock)
    loaded = load_scenario(scenario, settings.overrides, settings.seed)
    folder = check_folder(out or Path("out") / f"{loaded.name}-live")
    if there := [*folder.glob("live.json"), *folder.glob(RERUN_PATTERN)]:
        raise HeadwayError(
            f"--out {folder}: has a live run already ({there[0].name}); give another folder"
        )
    play, about = _start_engine(engine, loaded, device, clock, graphs=not no_graphs)
    for number in range(reruns + 1):
        with run_progress(f"{loaded.name} live {number}", quiet) as progress:
            done = play(progress)
        if done.result.interrupted:
            return print_interrupted_run(done.result)
        place = folder / f"rerun-{number}" if number else folder
        summary = done.result.summary()
        report = run_table(summary)
        files = write_live(done, place, about)
        if json_:
            if not number:
                print_json(summary)
        elif not quiet:
            if not number:
                print(report)
            print(f"written to {place}: {', '.join(file.name for file in files)}", flush=True)
    if engine == "vllm":
        return validate(folder, quiet=quiet or json_)
    return 0


def _check_vllm(device: str, clock: str) -> None:
    """Refuse what does not go with vLLM, and vLLM where it is not installed."""
    if (device, clock) != ("cpu", "exec"):
        raise HeadwayError(
            "--engine vllm: cannot be used with --device and --clock: it has its own device"
        )
    if find_spec("vllm") is None:
        raise HeadwayError(
            "--engine vllm: vLLM is not installed in this Python; install Headway into the "
            "environment that has it"
        )


def _start_engine(
    engine: str, scenario: Scenario, device: str, clock: Any, *, graphs: bool
) -> "tuple[Callable[[Any], LiveRun], dict[str, object]]":
    """Return what runs the scenario on an engine, once for each call, and what is told of it."""
    from calibration.engine_steps.refit import describe_engine, describe_machine

    about = {"engine": engine, "seed": scenario.seed}
    if engine == "vllm":
        from gpu_backend.vllm_engine import VllmEngine, run_vllm

        vllm = VllmEngine(scenario, resolve(scenario))
        return (
            lambda progress: run_vllm(scenario, engine=vllm, progress=progress),
            about | vllm.describe() | describe_machine(),
        )
    from gpu_backend.live import build_engine, run_live

    own = build_engine(scenario, resolve(scenario), device, graphs=graphs)
    return (
        lambda progress: run_live(scenario, device, clock, engine=own, progress=progress),
        about | describe_engine(own),
    )


def validate(
    folder: Annotated[
        Path | None,
        Parameter(name="LIVE_DIR", help="folder that `headway live` wrote; or else --measured"),
    ] = None,
    /,
    *,
    measured: Annotated[
        Path | None, Parameter(help="folder with runs.csv: real servers' runs (docs/accuracy.md)")
    ] = None,
    run: Annotated[
        list[str] | None,
        Parameter(negative="", help="with --measured: this run alone (repeatable)"),
    ] = None,
    cells: Annotated[
        list[str] | None,
        silent("with --measured: what fills empty cells, as gpu=A100-80GB (repeatable)", "--set"),
    ] = None,
    command: Annotated[
        str | None, silent("with --measured: the servers' command where a run's cell has none")
    ] = None,
    json: Annotated[
        Path | None,
        Parameter(help="with --measured: write every metric of every run here; --json=-: print it"),
    ] = None,
    reading: Reading = DEFAULT_READING,
    sensitivity: Annotated[
        bool, silent("with --measured: how far each prediction moves with its step times")
    ] = False,
    profile: Annotated[
        str | None, Parameter(help="cost profile, in place of the run's: name or path")
    ] = None,
    out: Annotated[
        Path | None, Parameter(help="folder for files and plots [default: LIVE_DIR]")
    ] = None,
    no_own_code: NoOwnCode = False,
    quiet: Quiet = False,
) -> int:
    """Compare a live run, or real servers' measured runs, with their simulation."""
    refuse_own_code(no_own_code)
    if (folder is None) == (measured is None):
        raise HeadwayError(f"{VALIDATE}, one of the two")
    if measured is not None:
        return _validate_measured(
            measured,
            run or [],
            json=json,
            out=out,
            reading=reading,
            cells=[*(cells or []), *([f"command={command}"] if command else [])],
            profile=profile,
            sensitivity=sensitivity,
            quiet=quiet,
        )
    given = {"--run": run, "--set": cells, "--command": command, "--sensitivity": sensitivity}
    given |= {f"--{name.replace('_', '-')} {value}": True for name, value in reading.given.items()}
    if alone := [name for name, value in given.items() if value]:
        raise HeadwayError(f"{alone[0]}: needs --measured, a folder with runs.csv")
    from calibration.engine_steps.validate import table
    from calibration.engine_steps.validate import validate as compare

    assert folder is not None
    if json is not None and json != STANDARD_OUTPUT:
        raise HeadwayError("--json FILE: needs --measured runs; --json=- prints validation.json")
    found = compare(folder, profile, out)
    if json is not None:
        print_json((out or folder) / "validation.json")
    elif not quiet:
        print(table(found))
        print(f"written to {out or folder}: validation.json, validation.png")
    return 0


def _validate_measured(
    folder: Path,
    wanted: list[str],
    *,
    json: Path | None,
    out: Path | None,
    reading: Reading,
    cells: list[str],
    profile: str | None,
    sensitivity: bool,
    quiet: bool,
) -> int:
    """Return the exit status: 1 where none of the runs could be predicted."""
    from calibration.measured.predict import validate_measured
    from calibration.measured.report import json_rows, outcome_line, report, write_json, write_plots
    from headway.cli.progress import results_progress
    from simulator.util.files import check_file

    if folder.is_file():
        raise HeadwayError(f"--measured {folder}: must be a folder, the one with {folder.name}")
    if alone := json == STANDARD_OUTPUT:
        quiet = True
    elif json is not None and not json.parent.is_dir():
        raise HeadwayError(f"--json {json}: cannot write: no folder {json.parent}")
    elif json is not None:
        check_file("--json", json)
    if out is not None:
        check_folder(out)
    with named_by_option(reading.given), results_progress("runs", quiet) as told:
        outcomes = validate_measured(
            folder,
            wanted,
            sensitivity=sensitivity,
            **reading.given,
            profile=profile,
            cells=cells,
            done=lambda done, total, outcome: told(done, total, outcome_line(outcome)),
        )
    if not quiet:
        print(report(outcomes))
    if alone:
        print_json([*json_rows(outcomes)])
    elif json is not None:
        write_json(json, outcomes)
    if out is not None:
        files = write_plots(out, outcomes)
        if not quiet:
            print(f"written to {out}: {len(files)} plots")
    return 0 if any(not outcome.reason for outcome in outcomes) else 1
