"""Faults that a GPU day may bring, brought about on purpose; campaigns killed, that go on."""

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
from unittest.mock import patch

import torch

from gpu_backend import sensors
from simulator.util.errors import HeadwayError
from tools.campaign.plan import Part
from tools.campaign.runner import MAX_BYTES, Campaign, unpack_archive

ROWS_SECONDS = 60.0  # in which a calibration on a CPU must have left its first rows
PARTS = "calibration,refit,live-light,validate-light"
FIRST_ROWS_BYTES = 1000  # of a file of steps that has more than the columns' names
TOO_FEW = "too few to fit"  # what `calibrate --from` says of a file with hardly any rows
LATEST = 25.0  # s after which a campaign is killed at the latest


def check_missing_sensors() -> Iterator[str]:
    """Let there be no nvidia-smi, and then no device: nothing is known, and nothing raised."""
    device = torch.device("cuda")
    no_program = patch.dict(os.environ, {"PATH": ""})
    some_gpu = patch.object(sensors, "gpu_id", lambda _: "GPU-0")
    with no_program, some_gpu, sensors.Sensors(device) as found:
        if found.latest != sensors.NO_READING:
            yield "a reading without nvidia-smi"
    with sensors.Sensors(device) as found:
        if not torch.cuda.is_available() and found.latest != sensors.NO_READING:
            yield "a reading without a device"


def calibration(folder: Path, budget_s: float) -> list[str]:
    """Return the command of a small calibration on a CPU."""
    return [
        sys.executable, "-m", "simulator", "calibrate", "--model", "tiny-test",
        "--budget-s", f"{budget_s}", "--out", str(folder), "--num-blocks", "256",
        "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "256",
    ]  # fmt: skip


def check_refit(folder: Path) -> Iterator[str]:
    """Kill a calibration before its fit: the part after it fits what there is."""
    there = folder / "calibration"
    process = subprocess.Popen(
        calibration(there, 600.0), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + ROWS_SECONDS
    steps = there / "steps.csv.gz"
    while time.monotonic() < until and not (
        steps.exists() and steps.stat().st_size > FIRST_ROWS_BYTES
    ):
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if not steps.exists():
        yield f"no rows after {ROWS_SECONDS:.0f} s"
        return
    part = Part(
        "refit", (sys.executable, "-m", "simulator", "calibrate", "--from", "{0}"), 120.0,
        needs=("calibration*/steps.csv.gz",), unless="calibration*/*.yaml",
    )  # fmt: skip
    outcome = Campaign(folder).run([part], 120.0)[0]
    if outcome.status != "ok" or not [*there.glob("*.yaml")]:
        yield f"refit: {outcome.status}: {outcome.note}"


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
    words = [sys.executable, "-m", "tools.campaign", "--device", "cpu", "--out", str(out)]
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
    """Return the processes that a process has begun (Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found
