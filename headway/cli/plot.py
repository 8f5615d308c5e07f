"""The verb `headway plot`: a picture of what other commands wrote."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import Parameter

from headway.cli.options import LaunchOption, between, named_by_option, silent, with_launch
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OfRuns = Literal["throughput", "occupancy", "kv", "policies", "fairness", "clients", "fleet"]
Kind = Literal[OfRuns, "latency", "pareto", "chunk", "steps", "memory"]
ENDINGS = (".png", ".svg")


def plot(
    kind: Annotated[Kind, Parameter(name="KIND", help="what to draw")],
    folders: Annotated[
        list[Path],
        Parameter(
            name="OUT_DIR",
            negative="",
            show_default=False,
            help="folder that run or compare wrote; latency, chunk: sweep's; pareto: sweep's or "
            "plan's; steps: live's; memory: a scenario, or give --model or --command",
        ),
    ] = (),  # type: ignore[assignment]
    /,
    *,
    out: Annotated[Path | None, silent("picture, .png or .svg [default: OUT_DIR/KIND.png]")] = None,
    start: Annotated[
        float | None,
        Parameter(help="occupancy: first second to show [default: near the middle]"),
        between(0),
    ] = None,
    seconds: Annotated[
        float | None,
        Parameter(help="occupancy: seconds to show [default: all of up to 100 requests, else 60]"),
    ] = None,
    gpu: Annotated[
        list[str] | None, silent("memory: a GPU to draw (repeatable) [default: all with a price]")
    ] = None,
    model: Annotated[str | None, silent("memory: a model in place of a scenario's")] = None,
    command: LaunchOption = None,
) -> int:
    """Draw a picture of what run, compare, sweep, plan or live wrote."""
    from headway import figures
    from headway.figures.data import read_runs
    from headway.figures.style import save
    from simulator.util.files import check_file

    alone = kind == "memory" and (model is not None or command is not None)
    if not folders and not alone:
        raise HeadwayError("OUT_DIR: is missing; give a folder of `headway run`, as out/demo")
    if files := [one for one in folders if kind != "memory" and one.is_file()]:
        takes = f"{kind} draws a folder that run, compare, sweep, plan or live wrote, as out/demo"
        raise HeadwayError(f"{files[0]}: is a file; {takes}")
    source = folders[0] if folders else Path()
    place = source.parent if kind == "memory" and source.is_file() else source
    path = check_file("--out", out or place / f"{kind}.png")
    if path.suffix.lower() not in ENDINGS:
        raise HeadwayError(f"--out {path}: must end in .png or .svg")
    if seconds is not None and not seconds > 0:
        raise HeadwayError(f"--seconds {seconds:g}: must be more than 0 s, as 60")
    of = {"start": "occupancy", "seconds": "occupancy", "gpu": "memory", "model": "memory"}
    given = {"start": start, "seconds": seconds, "gpu": gpu, "model": model, "command": command}
    for name, value in given.items():
        if value is not None and kind != of.get(name, "memory"):
            raise HeadwayError(f"--{name}: is of {of.get(name, 'memory')}, not of {kind}")
    if kind == "memory":
        overrides = with_launch(command, [] if model is None else [f"model={model}"])
        figure = _draw_memory(source if folders else {}, gpu, overrides)
    elif kind not in get_args(OfRuns):
        figure = _draw_table(kind, folders)
    elif kind == "occupancy":
        runs = read_runs(folders)
        with named_by_option({"start": start, "seconds": seconds}):
            figure = figures.draw_occupancy(runs, start=start, seconds=seconds)
    else:
        runs = read_runs(folders)
        figure = getattr(figures, f"draw_{kind}")(runs)
        drawn = [
            f"{run.label}: drawn of {len(run.requests):,} of {run.count:,} requests"
            for run in runs
            if run.each > 1
        ]
        figure.supxlabel("\n".join(drawn), fontsize="small")
    print(f"written to {save(figure, path)}")
    return 0


def _draw_memory(
    source: Path | dict[str, Any], names: list[str] | None, overrides: list[str]
) -> "Figure":
    """Draw what fills the memory of GPUs that may serve a scenario's model."""
    from headway.cli.memory import does_not_start, name_options, read_budget
    from headway.figures import draw_memory
    from simulator.models.gpus import GPUS

    if isinstance(source, Path):
        source = source / "scenario.yaml" if source.is_dir() else source
    found, refusal = [], None
    for one in names or [gpu.name for gpu in GPUS.values() if gpu.dollars_per_hour]:
        try:
            # Profiles are of one GPU.
            keys = [*overrides, f"gpu.name={one}", "cost={kind: roofline}"]
            found.append(read_budget(source or {"cost": {"kind": "roofline"}}, keys))
        except HeadwayError as error:  # it has no kernels for the model's format
            refusal = error
    if refusal is not None and (names or not found):
        options = {f"gpu.name={one}: gpu.name": f"--gpu {one}" for one in names or ()}
        options |= {one: f"--{one.replace('=', ' ')}" for one in overrides if one[:6] == "model="}
        raise HeadwayError(name_options(refusal.messages, options, source or None))
    for budget, change in found:
        if budget.refusal:
            print(does_not_start(budget, change))
    return draw_memory([budget for budget, _ in found])


def _draw_table(kind: Kind, folders: list[Path]) -> "Figure":
    """Draw one of the pictures of a folder's table."""
    from headway import figures
    from headway.runs.read import find_table, read_table, refuse_unfinished

    if len(folders) > 1:
        raise HeadwayError(f"headway plot {kind}: takes one folder, not {len(folders)}")
    (folder,) = folders
    if not folder.is_dir():
        raise HeadwayError(f"{folder}: no such folder")
    refuse_unfinished(folder)
    name = "steps_measured" if kind == "steps" else "results"
    if kind == "pareto" and (folder / "plan.csv").is_file():
        name = "plan"
    if not find_table(folder, name).is_file():
        whose = {"steps": "headway live", "pareto": "a sweep or plan"}.get(kind, "a sweep")
        raise HeadwayError(f"{folder}: has no {name}.csv: {kind} needs a folder of {whose}")
    rows = read_table(folder, name)
    try:
        figure: Figure = getattr(figures, f"draw_{kind}")(rows)
    except HeadwayError as error:
        raise HeadwayError(
            f"{folder / name}.csv: {message}" for message in error.messages
        ) from None
    return figure
