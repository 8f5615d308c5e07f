"""What the benchmarks share: what a command costs, measured from outside."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "scenarios" / "demo.yaml"
HEADWAY = ("-m", "simulator")


@dataclass(frozen=True, order=True)
class Usage:
    """What a process took, and what it printed."""

    user: float  # CPU time, s
    wall: float  # s
    memory: float  # peak, MB
    text: str


def python(arguments: Sequence[str]) -> Usage:
    """Run Python in the repository; ends the benchmark where that fails."""
    begin = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    assert child.stdout is not None
    text = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return Usage(usage.ru_utime, time.perf_counter() - begin, usage.ru_maxrss / 1024, text)


def headway_run(scenario: Path, overrides: Iterable[str], *more: str) -> Usage:
    """Run a scenario as the command does, all files written."""
    words = [word for override in overrides for word in ("--set", override)]
    with tempfile.TemporaryDirectory() as out:
        return python([*HEADWAY, "run", str(scenario), *words, *more, "--out", f"{out}/o"])
