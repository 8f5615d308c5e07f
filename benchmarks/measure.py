"""What the benchmarks share: what a command costs, measured from outside."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "scenarios" / "demo.yaml"
HEADWAY = ("-m", "headway")


@dataclass(frozen=True, order=True)
class Usage:
    """What a process took, and what it printed."""

    user: float  # CPU time, s
    wall: float  # s
    memory: float  # peak, MB
    text: str


def measure(command: Sequence[str]) -> Usage:
    """Run a command in the repository; ends the benchmark where that fails."""
    begin = time.perf_counter()
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=_environment(),
    )
    assert child.stdout is not None
    text = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return Usage(usage.ru_utime, time.perf_counter() - begin, usage.ru_maxrss / 1024, text)


@cache
def _environment() -> dict[str, str]:
    """Let Python keep bytecode, as it does of what is installed; the first run of all writes it.

    Where the environment forbids that, every run would compile all that it imports: 0.6 s.
    """
    folder = Path(tempfile.gettempdir()) / f"headway-bytecode-{os.getuid()}"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(folder)}


def python(arguments: Sequence[str]) -> Usage:
    """Run this Python in the repository; ends the benchmark where that fails."""
    return measure([sys.executable, *arguments])


def headway_run(scenario: Path, overrides: Iterable[str], *more: str) -> Usage:
    """Run a scenario as the command does, all files written."""
    words = [word for override in overrides for word in ("--set", override)]
    with tempfile.TemporaryDirectory() as out:
        return python([*HEADWAY, "run", str(scenario), *words, *more, "--out", f"{out}/o"])
