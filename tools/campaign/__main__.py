"""Everything that wants a GPU, in one command of at most nine minutes.

`python -m tools.campaign --out FOLDER` compiles and checks the kernels, times them against
the roofline, calibrates a model, replays two workloads live and compares them with the simulation.
All is in FOLDER as soon as it is known; a table comes last. With `--device cpu` it is a rehearsal.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from simulator.models.gpus import find_gpu
from simulator.models.load import load_model
from simulator.util.environment import source_commit
from simulator.util.errors import HeadwayError
from tools.campaign.plan import SETUPS, plan, scaled
from tools.campaign.report import write_report
from tools.campaign.runner import Campaign

COUNT_GPUS = """\
from ctypes import CDLL, byref, c_int
driver, count = CDLL("libcuda.so.1"), c_int()
raise SystemExit(driver.cuInit(0) or driver.cuDeviceGetCount(byref(count)) or not count.value)
"""
LEAST_BUDGET = 10.0  # s of a campaign that go to the report


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign; the exit code is 1 where a part failed or was not begun.

    Parts that need what is not installed count only where nothing else was run.
    """
    parser = _parser()
    given = parser.parse_args(words)
    device = given.device
    model = given.model or SETUPS[device].model
    gpu = _gpu_name() if device == "cuda" else ""
    folder = given.out.resolve()
    names = [*SETUPS[device].seconds]
    chosen = names if given.parts is None else given.parts.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--parts: no {', '.join(unknown)}; there are {', '.join(names)}")
    if not LEAST_BUDGET < given.budget_s < float("inf"):
        parser.error(f"--budget-s {given.budget_s:g}: must be more than {LEAST_BUDGET:g} seconds")
    try:
        load_model(model)
        if device == "cuda":
            _check_cuda()
        if folder.exists() and any(folder.iterdir()):
            raise HeadwayError(f"--out {folder}: is not empty")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    parts = [part for part in plan(folder, device, model, gpu) if part.name in chosen]
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    commit = os.environ["HEADWAY_COMMIT"] = source_commit()
    about = {"begun": time.time(), "device": device, "model": model, "gpu": gpu, "commit": commit}
    campaign = Campaign(folder, {**about, "budget_s": given.budget_s, "planned": names})
    campaign.keep()
    if device == "cuda" and parts:
        parts = scaled(parts, given.budget_s - LEAST_BUDGET)
    outcomes = campaign.run(parts, given.budget_s - LEAST_BUDGET / 2)
    print(write_report(folder))
    became = {outcome.status for outcome in outcomes}
    return int(bool(became & {"failed", "timeout", "skipped"}) or "ok" not in became)


def _check_cuda() -> None:
    """Refuse a machine without torch or a GPU, by the driver: to import torch takes seconds."""
    if find_spec("torch") is None:
        raise HeadwayError("--device cuda: needs torch: pip install headway[gpu]")
    look = [sys.executable, "-c", COUNT_GPUS]  # apart: what the driver opens stays open
    if subprocess.run(look, stderr=subprocess.DEVNULL, check=False).returncode:
        raise HeadwayError(
            "--device cuda: there is no CUDA GPU here; --device cpu rehearses without one"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools.campaign", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder, new or empty")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--device", default="cuda", choices=[*SETUPS])
    parser.add_argument("--model", help="[default: llama-3.1-8b, tiny-test on cpu]")
    parser.add_argument("--parts", default=None, help="parts to run, separated by commas")
    return parser


def _gpu_name() -> str:
    """Name the GPU as scenarios do; nothing where nobody can tell, or knows it."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        return find_gpu(said.stdout.splitlines()[0]).name
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
