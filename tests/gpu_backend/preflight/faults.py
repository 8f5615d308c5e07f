"""Faults that a GPU day may bring, brought about on purpose."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch

from gpu_backend import sensors
from tools.campaign.plan import Part
from tools.campaign.runner import Campaign

ROWS_SECONDS = 60.0  # in which a calibration on a CPU must have left its first rows
FIRST_ROWS_BYTES = 1000  # of a file of steps that has more than the columns' names


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
        sys.executable, "-m", "headway", "calibrate", "--model", "tiny-test",
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
        "refit", (sys.executable, "-m", "headway", "calibrate", "--from", "{0}"), 120.0,
        needs=("calibration*/steps.csv.gz",), unless="calibration*/*.yaml",
    )  # fmt: skip
    outcome = Campaign(folder).run([part], 120.0)[0]
    if outcome.status != "ok" or not [*there.glob("*.yaml")]:
        yield f"refit: {outcome.status}: {outcome.note}"


def child_processes(parent: int) -> list[int]:
    """Return the processes that a process has begun (Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found
