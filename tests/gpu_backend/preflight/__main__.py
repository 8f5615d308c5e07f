"""What can be known of the engine on a GPU without one, in some two minutes of CPU time.

`python -m tests.gpu_backend.preflight` runs the engine on fake CUDA tensors, injects faults,
calibrates GPUs that are formulas, and, where Triton is installed, compiles the kernels and reads
the machine code. `--all` takes longer: every layer on fake tensors, and three generations of GPUs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.gpu_backend.preflight.fake_cuda import (
    MODELS,
    check_engine,
    check_failing_capture,
    check_timings,
)
from tests.gpu_backend.preflight.faults import check_missing_sensors, check_refit

Check = Callable[[], Iterator[str]]
"""Yields a line for everything that is wrong; one that begins with `+` only tells."""
CAPABILITIES = (80, 90, 100)
FEW_LAYERS = 3


class NotHereError(Exception):
    """What a check needs is not installed."""


def fake_cuda(*, thorough: bool) -> Iterator[str]:
    """Run the engine on tensors without memory."""
    for model in MODELS:
        seen, told = check_engine(model, 0 if thorough else FEW_LAYERS)
        yield f"+ {told}"
        yield from (f"{model}: {line}" for line in seen.wrong)
    yield from check_timings()


def faults() -> Iterator[str]:
    """Let captures raise, nvidia-smi be missing, a calibration be killed before its fit."""
    yield from check_failing_capture()
    yield from check_missing_sensors()
    with tempfile.TemporaryDirectory() as folder:
        yield from check_refit(Path(folder))


def virtual_gpu() -> Iterator[str]:
    """Calibrate GPUs that are formulas, in a process of its own."""
    yield from _process("tests.gpu_backend.virtual_gpu", "--all")


def compiled(capabilities: Sequence[int], jobs: int) -> Iterator[str]:
    """Compile the kernels of the models and read what became of them."""
    if find_spec("triton") is None:
        raise NotHereError("triton is not installed")
    from tools.campaign.precompile import LAYERS, SHARED_BYTES, launches, precompile

    layers = [name for name, layer in LAYERS.items() if layer.dtype == "bfloat16"]
    for capability in capabilities:
        rows = precompile(capability, [*launches(layers)], jobs, describes=capability < 100)
        count = 0
        for row in rows:
            count += 1
            where = f"sm_{capability}, {row['layer']}: {row['name']}"
            if "error" in row:
                yield f"{where}: {row['error']}"
            if row.get("spills") or row.get("stack"):
                yield f"{where}: {row['spills']} spills, {row['stack']} bytes of stack"
            if row.get("shared", 0) > SHARED_BYTES[capability]:
                yield f"{where}: {row['shared']} bytes of shared memory"
            if row.get("unhinted"):
                yield f"{where}: no hint of alignment for {', '.join(row['unhinted'])}"
        yield f"+ sm_{capability}: {count} kernels"


def _process(module: str, *words: str) -> Iterator[str]:
    done = subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    yield from (f"+ {line}" for line in done.stdout.splitlines())
    if done.returncode:
        yield done.stderr.strip()[-1000:] or "beyond the limits"


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks; the exit code is 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="tests.gpu_backend.preflight", description=__doc__)
    parser.add_argument("--all", action="store_true", help="also what takes minutes")
    parser.add_argument("--only", default=None, help="names of checks, with commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    given = parser.parse_args(words)
    if given.jobs < 1:
        parser.error(f"--jobs {given.jobs}: must be at least 1")
    torch.set_num_threads(1)
    checks: dict[str, Check] = {
        "fake_cuda": partial(fake_cuda, thorough=given.all),
        "faults": faults,
        "virtual_gpu": virtual_gpu,
        "compiled": partial(compiled, CAPABILITIES if given.all else (90,), given.jobs),
    }
    if given.only is not None:
        if unknown := [name for name in given.only.split(",") if name not in checks]:
            parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(checks)}")
        checks = {name: checks[name] for name in given.only.split(",")}
    return int(sum(_report(name, check) for name, check in checks.items()) > 0)


def _report(name: str, check: Check) -> int:
    """Run one check and tell; count what is wrong."""
    begun, wrong = time.monotonic(), 0
    try:
        for line in check():
            wrong += not line.startswith("+")
            print(f"  {line.removeprefix('+ ')}", flush=True)
    except NotHereError as error:
        print(f"{name}: skipped: {error}", flush=True)
        return 0
    took = time.monotonic() - begun
    print(f"{name}: {f'{wrong} WRONG' if wrong else 'ok'}, {took:.0f} s", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
