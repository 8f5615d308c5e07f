"""What `headway run` writes for other programs, if it is asked to."""

from pathlib import Path
from typing import TYPE_CHECKING

from simulator.util.errors import HeadwayError
from simulator.util.files import check_file

if TYPE_CHECKING:
    from simulator.simulation.result import Result


def check_exports(timeline: Path | None, prometheus: Path | None) -> None:
    """See before a run that its further files can be written, and are two."""
    for option, path in (("--timeline", timeline), ("--prometheus", prometheus)):
        if path is not None:
            check_file(option, path)
    if (
        timeline is not None
        and prometheus is not None
        and timeline.resolve() == prometheus.resolve()
    ):
        raise HeadwayError(f"--prometheus {prometheus}: --timeline names the same file")


def write_exports(result: "Result", timeline: Path | None, prometheus: Path | None) -> list[str]:
    """Write what was asked for; return a line about each file."""
    notes = []
    if timeline is not None:
        from simulator.views.timeline import write_timeline

        shown = write_timeline(result, timeline)
        notes.append(f"written to {timeline}: {shown}; open it at https://ui.perfetto.dev")
    if prometheus is not None:
        from simulator.views.prometheus import write_prometheus

        write_prometheus(result, prometheus)
        notes.append(f"written to {prometheus}: metrics under vLLM's names")
    return notes
