"""Progress of what lasts, on stderr and on a terminal only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

DELAY = 0.7  # s; a shorter run shows nothing and pays nothing


class ProgressBar:
    """Shows the simulated time and the requests done of a run, after DELAY seconds."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._began = perf_counter()
        self._shown: tuple[Progress, TaskID] | None = None

    def __call__(self, now: float, done: int, total: int) -> None:
        """Show how far the run is: simulated seconds, requests done, requests in all."""
        if self._shown is None:
            if perf_counter() - self._began < DELAY:
                return
            self._shown = self._show(total)
        progress, task = self._shown
        progress.update(task, completed=done, simulated=f"{now:,.0f} s simulated")

    def _show(self, total: int) -> "tuple[Progress, TaskID]":
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

        progress = _progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("requests, {task.fields[simulated]}"),
        )
        task = progress.add_task(self.label[:20], total=total, simulated="")
        progress.start()
        return progress, task

    def close(self) -> None:
        """Take the bar away."""
        if self._shown is not None:
            self._shown[0].stop()


@contextmanager
def run_progress(label: str, quiet: bool) -> Iterator[ProgressBar | None]:
    """Show how far a run is."""
    if not _shown(quiet):
        yield None
        return
    bar = ProgressBar(label)
    try:
        yield bar
    finally:
        bar.close()


@contextmanager
def runs_progress(unit: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show how many runs, or whatever their unit is, are done of how many, and the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (MofNCompleteColumn(), TextColumn(f"{unit}, left"), TimeRemainingColumn())
    with _progress(BarColumn(bar_width=20), *columns, shown=_shown(quiet)) as progress:
        task = progress.add_task("")
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def search_progress(quiet: bool) -> Iterator[Callable[[int], None]]:
    """Count the runs of a search; how many it takes is not known before."""
    from rich.progress import SpinnerColumn, TextColumn

    text = TextColumn("searching: {task.completed:,.0f} runs")
    with _progress(SpinnerColumn(), text, shown=_shown(quiet)) as progress:
        task = progress.add_task("", total=None)
        yield lambda runs: progress.update(task, advance=runs)


def _shown(quiet: bool) -> bool:
    return not quiet and sys.stderr.isatty()


def _progress(*columns: "ProgressColumn", shown: bool = True) -> "Progress":
    from rich.console import Console
    from rich.progress import Progress

    return Progress(
        *columns,
        console=Console(file=sys.stderr),
        transient=True,
        speed_estimate_period=600,
        disable=not shown,
    )
