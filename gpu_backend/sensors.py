"""What a GPU says of its clock and power while it is measured, without a step waiting for it."""

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

import torch

QUERY = "clocks.sm,power.draw"
EVERY_MS = 500


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading; None: not known."""

    sm_mhz: float | None = None
    power_w: float | None = None


NO_READING = Reading()


class Sensors:
    """Keeps the latest reading while a `with` block lasts.

    One `nvidia-smi` runs beside the measurement and writes a line every half second, which a thread
    reads: asking anew takes it a few hundred milliseconds. On a CPU, and where there is no such
    program, nothing is known.
    """

    def __init__(self, device: torch.device) -> None:
        self.latest = NO_READING
        self._device = device
        self._process: subprocess.Popen[str] | None = None
        self._reader: Thread | None = None

    def __enter__(self) -> "Sensors":
        if self._device.type == "cuda":
            with suppress(AssertionError, RuntimeError):  # torch's, where there is no such device
                self._start(gpu_id(self._device))
        return self

    def _start(self, gpu: str) -> None:
        words = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={QUERY}"]
        words += ["--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}"]
        try:
            self._process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.latest = parse(line)

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._reader is not None:
            self._process.terminate()
            self._process.wait()
            self._reader.join()


def gpu_id(device: torch.device) -> str:
    """Name a GPU as nvidia-smi does, which does not know CUDA_VISIBLE_DEVICES."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return f"GPU-{uuid.removeprefix('GPU-')}"


def parse(line: str) -> Reading:
    """Read a line such as `1980, 431.25`; what is no number is not known: `[N/A]`."""
    numbers: list[float | None] = []
    for word in line.split(","):
        try:
            numbers.append(float(word))
        except ValueError:
            numbers.append(None)
    return Reading(*numbers) if len(numbers) == 2 else NO_READING
