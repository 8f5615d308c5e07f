"""A campaign on a CPU that is killed at random moments, and goes on from its archive each time."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gpu_backend.campaign.archive import MAX_BYTES, unpack_archive
from simulator.util.errors import HeadwayError

PARTS = "calibration,refit,live-light,validate-light"
FIRST_ROWS_BYTES = 1000  # of a file of steps that has more than the columns' names
LATEST = 40.0  # s after which a campaign is killed at the latest


def rehearse(folder: Path, kills: int, seed: int = 0) -> Iterator[str]:
    """Kill a campaign so many times; a line for whatever its archive does not hold."""
    rng = random.Random(seed)
    kept: Path | None = None
    profiles = rows = 0
    for number in range(kills):
        out, archive = folder / f"out-{number}", folder / f"{number}.tgz"
        _killed(out, archive, kept, rng.uniform(1.0, LATEST))
        if not archive.exists():
            if kept is None:
                continue  # it had not even begun
            yield f"kill {number}: no archive"
            continue
        opened = folder / "opened"
        shutil.rmtree(opened, ignore_errors=True)
        try:
            unpack_archive(archive, opened)
        except HeadwayError as error:
            yield f"kill {number}: {error}"
            continue
        if archive.stat().st_size > MAX_BYTES:
            yield f"kill {number}: an archive of {archive.stat().st_size} bytes"
        if any(opened.glob("calibration*/*.yaml")):
            profiles += 1
        elif found := [*opened.glob("calibration*/steps.csv.gz")]:
            steps = max(found, key=lambda path: path.stat().st_size)
            if steps.stat().st_size > FIRST_ROWS_BYTES:
                rows += 1
                yield from _refit(steps, number)
        kept = archive
        shutil.rmtree(out, ignore_errors=True)
    yield f"+ {kills} kills: {profiles} archives with a profile, {rows} with rows that refit"
    if not profiles + rows:
        yield "no archive held a measurement"


def _refit(steps: Path, number: int) -> Iterator[str]:
    words = [sys.executable, "-m", "simulator", "calibrate", "--from", str(steps)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"kill {number}: {done.stderr.strip().splitlines()[-1]}"


def _killed(out: Path, archive: Path, resume: Path | None, seconds: float) -> None:
    """Run a campaign and kill it, and what it has begun, after so many seconds."""
    words = [sys.executable, "-m", "gpu_backend.campaign", "--device", "cpu", "--out", str(out)]
    words += ["--archive", str(archive), "--parts", PARTS]
    words += ["--resume", str(resume)] if resume is not None else []
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    begun = _children(process.pid)
    process.kill()
    process.wait()
    for child in begun:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    time.sleep(0.1)


def _children(parent: int) -> list[int]:
    """Give the processes that a process has begun (Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found
