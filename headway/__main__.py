"""Where the command `headway` begins, also `python -m headway`.

Ctrl-C is told in one line even while the command line itself is still being imported; see
`headway/cli/console.py` for later. SIGTERM, by which `kill`, `timeout`, batch systems and
containers end a command, is taken as Ctrl-C.
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` looks for modules in the current folder first, where a stranger's scenario may be.
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.path[0] != here:
        del sys.path[0]

import atexit
import gc
import signal
import threading
from types import FrameType
from typing import NoReturn

SELDOM = 100_000
"""Objects that come before the garbage collector looks for circles: imports make few, and stay."""


def command() -> NoReturn:
    """Run the command line, and end the process with its exit code."""
    code = main()
    from simulator.util.user_code import LOADED

    if not (LOADED or atexit._ncallbacks()) and threading.active_count() == 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nobody has anything left to do, but for Python to free it all, 0.004 s
    gc.freeze()  # else Python would look through all that is left, 0.1 s of a run
    sys.exit(code)


def main() -> int:
    """Import the command line and run it; return the exit code."""
    _prepare_streams()
    gc.set_threshold(SELDOM)
    try:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # else whoever started us cares
            signal.signal(signal.SIGTERM, _interrupt)
        from headway.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        print("headway: interrupted; no file was written", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Do as on Ctrl-C; a second one, while workers are still being ended, waits for nothing."""
    signal.signal(number, lambda *_: os._exit(128 + number))
    signal.default_int_handler(number, frame)


def _prepare_streams() -> None:
    """Let what is printed always have a place to go, and a way to be written.

    A closed stream becomes /dev/null, so that no file of ours takes its number, and what the
    terminal's encoding lacks is written as `\\xe9`.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    command()
