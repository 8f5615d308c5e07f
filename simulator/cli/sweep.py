"""The verb `headway sweep`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from simulator.cli.console import INTERRUPTED


def sweep(
    scenario: Annotated[Path, Parameter(name="SCENARIO", help="scenario file (YAML)")],
    /,
    *,
    vary: Annotated[
        list[str] | None,
        Parameter(negative="", help="dotted.key=a,b,c (repeated: all combinations)"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", help="set a key: dotted.key=value (repeatable)"),
    ] = None,
    seed: Annotated[int | None, Parameter(help="seed, in place of the scenario's")] = None,
    out: Annotated[
        Path | None,
        Parameter(help="folder for the files [default: out/NAME-sweep]", show_default=False),
    ] = None,
    jobs: Annotated[
        int | None, Parameter(help="workers [default: one per core]", show_default=False)
    ] = None,
    backend: Annotated[
        Literal["loky", "dask", "ray"], Parameter(help="who runs the workers")
    ] = "loky",
    address: Annotated[
        str | None,
        Parameter(
            help="of a Dask scheduler or Ray cluster, host:port [default: start one here]",
            show_default=False,
        ),
    ] = None,
    quiet: Annotated[
        bool, Parameter(negative="", show_default=False, help="print errors and warnings only")
    ] = False,
) -> int:
    """Simulate a scenario at many points, on all cores or a cluster; one row per point.

    The points are those of `--vary` and of the scenario's block `sweep`. The same command goes
    on where an earlier one was stopped. Exit code 1 if a point failed.
    """
    from simulator.planning.points import hidden, split_values
    from simulator.planning.sweep import TABLE, plan_points, sweep_points
    from simulator.simulation.write import check_folder
    from simulator.util.errors import HeadwayError

    if jobs is not None and jobs < 1:
        raise HeadwayError(f"--jobs {jobs}: must be at least 1")
    axes = [split_values(item) for item in vary or ()]
    if messages := hidden([key for key, _ in axes], set_ or (), seed):
        raise HeadwayError(messages)
    points = plan_points(scenario, axes, set_ or (), seed)
    name = next(point.scenario.name for point in points if point.scenario is not None)
    folder = check_folder(out or Path("out") / f"{name}-sweep")
    try:
        with _bar(len(points), quiet) as progress:
            rows = sweep_points(
                points, folder, jobs=jobs, backend=backend, address=address, progress=progress
            )
    except KeyboardInterrupt:
        print(
            f"headway: interrupted; what is done is in {folder / TABLE}, and the same command "
            "goes on from there",
            file=sys.stderr,
        )
        return INTERRUPTED
    failed = [(k, row["error"]) for k, row in enumerate(rows) if "error" in row]
    for k, error in failed:
        where = " ".join(f"{key}={value}" for key, value in points[k].varied.items())
        print(f"headway: error: {where}: {error}", file=sys.stderr)
    if not quiet:
        print(f"{len(rows) - len(failed):,} of {len(rows):,} points done")
        print(f"written to {folder}: {TABLE}")
    return int(bool(failed))


@contextmanager
def _bar(total: int, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show the points done and the time left, on a terminal only."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    progress = Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("points, left"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        speed_estimate_period=600,
    )
    task = progress.add_task("", total=total)
    with progress:
        yield lambda done, _: progress.update(task, completed=done)
