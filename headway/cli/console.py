"""Errors, warnings and Ctrl-C on stderr, each in a line, and exit codes.

SIGTERM is taken as Ctrl-C (`headway/__main__.py`). It comes up in four places.
`headway/__main__.py` catches it while the command line itself is imported. The loop of a run
(`simulator/engine/drive.py`) ends on it, and `print_interrupted_run` says how far the run came.
`headway sweep` and `plan` say where they will go on. Everywhere else `main.py`
catches it, says in one line what there is of the files, and gives exit code 130: files appear
whole or not at all (`simulator/util/files.py`), and workers leave it to their parent
(`simulator/util/workers.py`).
"""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.util.errors import HeadwayWarning, printable
from simulator.util.files import WRITTEN_FILES

if TYPE_CHECKING:
    from simulator.simulation.result import Result


BAD_INPUT, BROKEN_PIPE = 2, 141  # the latter as a shell gives it


def print_line(text: str) -> None:
    """Print a line on stderr; one that is closed or full takes nothing from the command.

    What a terminal would act on, of a file's keys and values say, is written as escapes.
    """
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


@contextmanager
def warnings_of(label: str) -> Iterator[None]:
    """Name the run that warns, one of several."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HeadwayWarning)
        yield
    for one in caught:
        told = f"{label}: {one.message}" if one.category is HeadwayWarning else one.message
        warnings.warn(told, one.category, stacklevel=2)


def print_errors(messages: Iterable[str]) -> int:
    """Print errors, one in a line; return the exit code."""
    for message in messages:
        print_line(f"headway: error: {message}")
    return BAD_INPUT


def print_os_error(error: OSError) -> int:
    """Print what the system refused, most likely to take what we print; return the exit code.

    A closed pipe, as in `headway ... | head`, is no error and ends quietly. What is still to be
    printed is dropped, as Python would try once more at its exit.
    """
    if error.filename is not None:
        return print_errors([f"{error.filename}: {error.strerror}"])
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    return print_errors([f"standard output: cannot write: {error.strerror or error}"])


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print each of our own warnings once, in one line on stderr; leave others to Python."""
    others = warnings.showwarning
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, HeadwayWarning):
            others(message, category, *where, **more)
        elif str(message) not in shown:
            shown.add(str(message))
            print_line(f"headway: warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", HeadwayWarning)
        warnings.showwarning = show
        yield


INTERRUPTED = 130  # as a shell gives it


def print_interrupt(what: str | None = None) -> int:
    """Say what came of an interrupted command, if not which files; return the exit code."""
    print_line(f"headway: interrupted; {what or _left_behind()}")
    return INTERRUPTED


def print_interrupted_runs(done: Path, what: str = "runs") -> int:
    """Name what holds the finished runs of an interrupted command; return the code."""
    return print_interrupt(
        f"finished {what} are in {done}, and the same command goes on from there"
        if done.exists()
        else None
    )


def print_interrupted_run(result: "Result") -> int:
    """Say how far an interrupted run came, and what there is of those before it."""
    from simulator.core.log import UNFINISHED

    done = sum(int((log.requests["reason"] != UNFINISHED).sum()) for log in result.logs)
    now = max((float(log.steps["end"][-1]) for log in result.logs if log.step_rows), default=0.0)
    print_line(
        f"headway: interrupted at {now:,.1f} s of simulated time, {done:,} of "
        f"{len(result.workload):,} requests done; {_left_behind()}"
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
