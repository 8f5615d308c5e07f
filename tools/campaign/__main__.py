"""Everything that wants a GPU, in one command of at most nine minutes.

`python -m tools.campaign --out FOLDER` compiles and checks the kernels, times them against
the roofline, calibrates a model, replays two workloads live and compares them with the simulation.
All is in FOLDER, and in FOLDER.tgz, as soon as it is known; a table comes last. With
`--device cpu` it is a rehearsal.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simulator.models.gpus import find_gpu
from simulator.models.load import load_model
from simulator.util.environment import source_commit
from simulator.util.errors import HeadwayError
from tools.campaign.plan import SETUPS, plan, scaled
from tools.campaign.report import write_report
from tools.campaign.runner import (
    RECORD,
    Campaign,
    read_outcomes,
    read_record,
    set_aside,
    unpack_archive,
)

COUNT_GPUS = """\
from ctypes import CDLL, byref, c_int
driver, count = CDLL("libcuda.so.1"), c_int()
raise SystemExit(driver.cuInit(0) or driver.cuDeviceGetCount(byref(count)) or not count.value)
"""
LEAST_BUDGET = 10.0  # s of a campaign that go to archives and the report


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign; the exit code is 1 where a part failed or was not begun.

    Parts that need what is not installed count only where nothing else was run.
    """
    parser = _parser()
    given = parser.parse_args(words)
    try:
        before = {} if given.resume is None else read_record(given.resume, RECORD)
        device = _as_before("device", given.device, before, given.resume) or "cuda"
        if device not in SETUPS:
            raise HeadwayError(f"--resume {given.resume}: its device {device!r} is none")
        setup = SETUPS[device]
        model = _as_before("model", given.model, before, given.resume) or setup.model
        gpu = _gpu_name() if device == "cuda" else ""
        _as_before("gpu", gpu, before, given.resume)
    except HeadwayError as error:
        parser.error(str(error))
    folder = given.out.resolve()
    archive = given.archive or folder.with_name(f"{folder.name}.tgz")
    names = [*setup.seconds]
    chosen = names if given.parts is None else given.parts.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--parts: no {', '.join(unknown)}; there are {', '.join(names)}")
    if not LEAST_BUDGET < given.budget_s < float("inf"):
        parser.error(f"--budget-s {given.budget_s:g}: must be more than {LEAST_BUDGET:g} seconds")
    try:
        load_model(model)
        if device == "cuda":
            _check_cuda()
        _begin(folder, given.resume)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    parts = [part for part in plan(folder, device, model, gpu) if part.name in chosen]
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    commit = os.environ["HEADWAY_COMMIT"] = source_commit()
    about = {"begun": time.time(), "device": device, "model": model, "gpu": gpu, "commit": commit}
    campaign = Campaign(
        folder, {**about, "budget_s": given.budget_s, "planned": names}, archive.resolve(),
        setup.archive_s,
    )  # fmt: skip
    if given.resume is not None:
        campaign.outcomes = read_outcomes(folder)
        done = {outcome.name for outcome in campaign.outcomes if outcome.status == "ok"}
        for part in parts:
            if part.name not in done:
                set_aside(folder, part.leaves)
        parts = [part for part in parts if part.name not in done]
    campaign.keep()
    if device == "cuda" and parts:
        parts = scaled(parts, given.budget_s - LEAST_BUDGET)
    outcomes = campaign.run(parts, given.budget_s - LEAST_BUDGET / 2)
    print(write_report(folder))
    campaign.keep()
    print(f"all of it: {archive}")
    became = {outcome.status for outcome in outcomes}
    return int(bool(became & {"failed", "timeout", "skipped"}) or "ok" not in became)


def _as_before(
    name: str, given: str | None, record: Mapping[str, Any], archive: Path | None
) -> str:
    """Return what a campaign that goes on had; HeadwayError where something else is asked for."""
    before = record.get(name) or ""
    if given and before and given != before:
        raise HeadwayError(
            f"--resume {archive}: its {name} is {before}, not {given}: begin a new campaign"
        )
    return given or str(before)


def _check_cuda() -> None:
    """Refuse a machine without torch or a GPU, by the driver: to import torch takes seconds."""
    if find_spec("torch") is None:
        raise HeadwayError("--device cuda: needs torch: pip install headway[gpu]")
    look = [sys.executable, "-c", COUNT_GPUS]  # apart: what the driver opens stays open
    if subprocess.run(look, stderr=subprocess.DEVNULL, check=False).returncode:
        raise HeadwayError(
            "--device cuda: there is no CUDA GPU here; --device cpu rehearses without one"
        )


def _begin(folder: Path, resume: Path | None) -> None:
    """Make the folder, out of an archive if there is one; HeadwayError where that cannot be."""
    if folder.exists() and any(folder.iterdir()):
        raise HeadwayError(f"--out {folder}: is not empty")
    there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if resume is not None:
            unpack_archive(resume, folder)
    except HeadwayError:
        shutil.rmtree(folder)
        if there:
            folder.mkdir()
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools.campaign", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder, new or empty")
    parser.add_argument("--archive", type=Path, help="file that keeps it all [default: OUT.tgz]")
    parser.add_argument("--resume", type=Path, help="archive of a campaign to go on with")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds in all")
    parser.add_argument(
        "--device", default=None, choices=[*SETUPS], help="as --resume has it; else cuda"
    )
    parser.add_argument(
        "--model", default=None, help="as --resume has it; else llama-3.1-8b, tiny-test on cpu"
    )
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
