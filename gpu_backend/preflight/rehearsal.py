"""Campaigns on a CPU that are killed at random moments and go on from their archives."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from enum import Enum
from pathlib import Path

from gpu_backend.campaign.archive import MAX_BYTES, unpack_archive
from simulator.util.errors import HeadwayError

PARTS = "calibration,refit,live-light,validate-light"
FIRST_ROWS_BYTES = 1000  # of a file of steps that has more than the columns' names
TOO_FEW = "too few to fit"  # what `calibrate --from` says of a file with hardly any rows
LATEST = 25.0  # s after which a campaign is killed at the latest


class Held(Enum):
    """What of a calibration an archive holds; a profile is more than rows."""

    NOTHING = 0
    ROWS = 1  # that refit
    PROFILE = 2


def rehearse(folder: Path, kills: int) -> Iterator[str]:
    """Kill campaigns so many times; a line for whatever an archive does not hold.

    After every other kill a campaign goes on from its archive, else, and where one was over before
    its kill, another one begins. What an archive held once, those after it must hold.
    """
    rng = random.Random(0)
    resume: Path | None = None
    held = Held.NOTHING  # by the archive that is gone on from
    found: Counter[Held] = Counter()
    killed = number = 0
    while killed < kills and number < 3 * kills:
        number += 1
        out, archive = folder / f"out-{number}", folder / f"{number}.tgz"
        hit = _killed(out, archive, resume, rng.uniform(1.0, LATEST))
        shutil.rmtree(out, ignore_errors=True)
        killed += hit
        now = Held.NOTHING
        if archive.exists():
            now = yield from _opened(archive, folder / "opened", number)
        elif resume is not None:
            archive = resume  # it had not even begun
            now = held
        if now.value < held.value:
            yield f"kill {number}: {now.name}, where there was {held.name}"
        found[now] += hit
        goes_on = hit and killed % 2 and archive.exists()
        resume, held = (archive, now) if goes_on else (None, Held.NOTHING)
    told = ", ".join(f"{found[one]} {one.name.lower()}" for one in reversed(Held))
    yield f"+ {killed} kills of {number} campaigns left archives with: {told}"
    if not found[Held.PROFILE] + found[Held.ROWS]:
        yield "no archive held a measurement"


def _opened(archive: Path, folder: Path, number: int) -> Generator[str, None, Held]:
    """Open an archive, refit the rows in it; give what it holds."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        unpack_archive(archive, folder)
    except HeadwayError as error:
        yield f"kill {number}: {error}"
        return Held.NOTHING
    if archive.stat().st_size > MAX_BYTES:
        yield f"kill {number}: an archive of {archive.stat().st_size} bytes"
    if any(folder.glob("calibration*/*.yaml")):
        return Held.PROFILE
    held = Held.NOTHING
    for path in folder.glob("calibration*/steps.csv.gz"):
        if path.stat().st_size > FIRST_ROWS_BYTES:
            wrong = _refit(path)
            if not wrong:
                held = Held.ROWS
            elif TOO_FEW not in wrong:
                yield f"kill {number}: {wrong}"
    return held


def _refit(steps: Path) -> str:
    """Fit the rows; give what is wrong with them."""
    words = [sys.executable, "-m", "simulator", "calibrate", "--from", str(steps)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or ["?"])[-1] if done.returncode else ""


def _killed(out: Path, archive: Path, resume: Path | None, seconds: float) -> bool:
    """Run a campaign and kill it, and what it has begun, after so many seconds.

    False where it was over before.
    """
    words = [sys.executable, "-m", "gpu_backend.campaign", "--device", "cpu", "--out", str(out)]
    words += ["--archive", str(archive), "--parts", PARTS]
    words += ["--resume", str(resume)] if resume is not None else []
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    hit = process.poll() is None
    begun = child_processes(process.pid)
    process.kill()
    process.wait()
    for child in begun:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    time.sleep(0.1)
    return hit


def child_processes(parent: int) -> list[int]:
    """Give the processes that a process has begun (Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found
