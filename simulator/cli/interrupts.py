"""Ctrl-C: told in one line on stderr, with what there is of the files, and exit code 130.

It comes up in four places. `simulator/__main__.py` catches it while the command line itself is
imported. The loop of a run (`simulator/engine/drive.py`) ends on it, and `print_interrupted_run`
says how far the run came. `headway sweep` says where it will go on. Everywhere else `main.py`
catches it: files appear whole or not at all (`simulator/util/files.py`), and workers leave it to
their parent (`simulator/util/workers.py`).
"""

import sys
from typing import TYPE_CHECKING

from simulator.util.files import WRITTEN_FILES

if TYPE_CHECKING:
    from simulator.simulation.result import Result

INTERRUPTED = 130  # as a shell gives it


def print_interrupt(what: str | None = None) -> int:
    """Say what came of an interrupted command, if not which files; return the exit code."""
    print(f"headway: interrupted; {what or _left_behind()}", file=sys.stderr)
    return INTERRUPTED


def print_interrupted_run(result: "Result") -> int:
    """Say how far an interrupted run came, and what there is of those before it."""
    from simulator.core.log import REASONS

    unfinished = REASONS.index("unfinished")
    done = sum(int((log.requests["reason"] != unfinished).sum()) for log in result.logs)
    now = max((float(log.steps["end"][-1]) for log in result.logs if log.step_rows), default=0.0)
    print(
        f"headway: interrupted at {now:,.1f} s of simulated time, {done:,} of "
        f"{len(result.workload):,} requests done; {_left_behind()}",
        file=sys.stderr,
    )
    return INTERRUPTED


def _left_behind() -> str:
    """Say what an interrupted command has written."""
    folders = {path.parent for path in WRITTEN_FILES}
    outer = sorted(str(folder) for folder in folders if not folders & set(folder.parents))
    if not outer:
        return "no file was written"
    count = "1 file is" if len(WRITTEN_FILES) == 1 else f"{len(WRITTEN_FILES)} files are"
    return f"{count} written, in {', '.join(outer)}"
