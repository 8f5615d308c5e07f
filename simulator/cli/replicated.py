"""What `headway run` and `headway compare` do with --replications."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from simulator.planning.intervals import Estimate
from simulator.planning.points import Point
from simulator.planning.replications import check_count, encode_runs, replicate
from simulator.util.errors import HeadwayWarning
from simulator.util.files import write_together

if TYPE_CHECKING:
    from simulator.scenario.scenario import Scenario


def run_replicated(
    scenario: "Scenario", folder: Path, count: int, trim: tuple[float, float], quiet: bool
) -> int:
    """Run a scenario so many times; write every run, print and write intervals."""
    from simulator.planning.interval_report import encode_intervals, estimates, run_intervals

    check_count(count)
    with _bar(quiet) as progress:
        runs = replicate([scenario], count, warmup=trim[0], cooldown=trim[1], progress=progress)
    found = estimates(runs[0])
    _warn_constant([found])
    about = {
        "scenario": scenario.name,
        "seed": scenario.seed,
        "replications": count,
        "warmup_s": trim[0],
        "cooldown_s": trim[1],
    }
    point = Point(scenario.name, scenario.name, {}, scenario)
    files = {
        "replications.csv": encode_runs([point], runs),
        "intervals.json": encode_intervals(found, about),
        "scenario.yaml": _resolved(scenario),
    }
    _write(folder, files)
    if not quiet:
        print(run_intervals(scenario.name, found))
        print(f"written to {folder}: {', '.join(files)}", flush=True)
    return 0


def compare_replicated(
    points: Sequence[Point], folder: Path, count: int, trim: tuple[float, float], quiet: bool
) -> int:
    """Run every point so many times under common random numbers; tell paired differences."""
    from simulator.planning.interval_report import (
        compare_intervals,
        differences,
        encode_differences,
        estimates,
        plot_intervals,
    )

    check_count(count, [*points[0].varied])
    with _bar(quiet) as progress:
        runs = replicate(
            [point.scenario for point in points],
            count,
            warmup=trim[0],
            cooldown=trim[1],
            progress=progress,
        )
    _warn_constant([estimates(same) for same in runs])
    found = differences(runs)
    labels = [point.label for point in points]
    files = {
        "comparison.csv": encode_differences(points, runs, found),
        "replications.csv": encode_runs(points, runs),
    }
    _write(folder, files)
    plot_intervals(labels, runs, folder / "comparison.png")
    if not quiet:
        print(compare_intervals(labels, found))
        print(f"written to {folder}: {', '.join(files)}, comparison.png", flush=True)
    return 0


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    def put(data: bytes, file: BinaryIO) -> None:
        file.write(data)

    write_together(folder, {name: partial(put, data) for name, data in files.items()})


def _resolved(scenario: "Scenario") -> bytes:
    import yaml

    return yaml.safe_dump(scenario.resolved(), sort_keys=False, allow_unicode=True).encode()


def _warn_constant(found: Sequence[Mapping[str, Estimate]]) -> None:
    from simulator.planning.interval_report import CONSTANT

    if not any(e.sd for same in found for e in same.values()):
        warnings.warn(CONSTANT, HeadwayWarning, stacklevel=2)


@contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show the runs done, on a terminal only."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("runs")
        yield lambda done, total: bar.update(task, completed=done, total=total)
