"""A progress bar for runs that last, on a terminal only."""

import sys
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE = 0.7  # s; a shorter run shows nothing and pays nothing


class Bar:
    """Shows the simulated time and the requests done, on stderr, after PATIENCE seconds."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._began = perf_counter()
        self._shown: tuple[Progress, TaskID] | None = None

    def __call__(self, now: float, done: int, total: int) -> None:
        """Tell how far the run is: simulated seconds, requests done, requests in all."""
        if self._shown is None:
            if perf_counter() - self._began < PATIENCE:
                return
            self._shown = self._show(total)
        progress, task = self._shown
        progress.update(task, completed=done, simulated=f"{now:,.0f} s simulated")

    def _show(self, total: int) -> "tuple[Progress, TaskID]":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("requests, {task.fields[simulated]}"),
            console=Console(file=sys.stderr),
            transient=True,
        )
        task = progress.add_task(self.label[:20], total=total, simulated="")
        progress.start()
        return progress, task

    def close(self) -> None:
        """Take the bar away."""
        if self._shown is not None:
            self._shown[0].stop()
