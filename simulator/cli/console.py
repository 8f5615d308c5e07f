"""Errors and warnings on stderr, one in a line, and exit codes."""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from simulator.util.errors import HeadwayWarning

BAD_INPUT, BROKEN_PIPE = 2, 141  # the latter as a shell gives it


def print_errors(messages: Iterable[str]) -> int:
    """Print errors, one in a line; return the exit code."""
    for message in messages:
        print(f"headway: error: {message}", file=sys.stderr)
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
            print(f"headway: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", HeadwayWarning)
        warnings.showwarning = show
        yield
