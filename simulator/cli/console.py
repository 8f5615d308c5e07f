"""What the command says on stderr, and its exit codes."""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from simulator.util.errors import HeadwayWarning
from simulator.util.files import WRITTEN

if TYPE_CHECKING:
    from simulator.simulation.result import Result

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # the last two as a shell gives them


def tell_errors(messages: Iterable[str]) -> int:
    """Tell errors, one in a line; return the exit code."""
    for message in messages:
        print(f"headway: error: {message}", file=sys.stderr)
    return BAD_INPUT


def left_behind() -> str:
    """Say what an interrupted command has written."""
    folders = {path.parent for path in WRITTEN}
    outer = sorted(str(folder) for folder in folders if not folders & set(folder.parents))
    if not outer:
        return "no file was written"
    count = "1 file is" if len(WRITTEN) == 1 else f"{len(WRITTEN)} files are"
    return f"{count} written, in {', '.join(outer)}"


def tell_interrupted(result: "Result") -> int:
    """Say how far an interrupted run came, and what there is of those before it."""
    from simulator.core.log import REASONS

    unfinished = REASONS.index("unfinished")
    done = sum(int((log.requests["reason"] != unfinished).sum()) for log in result.logs)
    now = max((float(log.steps["end"][-1]) for log in result.logs if log.step_rows), default=0.0)
    print(
        f"headway: interrupted at {now:,.1f} s of simulated time, {done:,} of "
        f"{len(result.workload):,} requests done; {left_behind()}",
        file=sys.stderr,
    )
    return INTERRUPTED


def tell_os_error(error: OSError) -> int:
    """Tell what the system refused, most likely to take what we print; return the exit code.

    A closed pipe, as in `headway ... | head`, is no error and ends quietly. What is still to be
    printed is dropped, as Python would try once more at its exit.
    """
    if error.filename is not None:
        return tell_errors([f"{error.filename}: {error.strerror}"])
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    return tell_errors([f"standard output: cannot write: {error.strerror or error}"])


@contextmanager
def told_warnings() -> Iterator[None]:
    """Tell each of our own warnings once, in one line on stderr; leave others to Python."""
    others = warnings.showwarning
    told: set[str] = set()

    def tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, HeadwayWarning):
            others(message, category, *where, **more)
        elif str(message) not in told:
            told.add(str(message))
            print(f"headway: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", HeadwayWarning)
        warnings.showwarning = tell
        yield
