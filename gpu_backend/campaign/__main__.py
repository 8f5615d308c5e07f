"""Everything that wants a GPU, in one command of at most nine minutes.

`python -m gpu_backend.campaign --out FOLDER` checks the kernels, times them against the roofline,
calibrates a model, replays two workloads live and compares them with the simulation, then
calibrates a small model if time is left. All is in FOLDER as soon as it is known; a table comes
last. With `--device cpu` it is a rehearsal.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_backend.campaign.plan import SETUPS, plan
from gpu_backend.campaign.report import write_report
from gpu_backend.campaign.runner import pack_large_files, run_parts, write_record


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign; the exit code is 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder, new or empty")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--device", default="cuda", choices=[*SETUPS])
    parser.add_argument("--model", default=None, help="llama-3.1-8b; tiny-test on cpu")
    parser.add_argument("--small-model", default=None, help="llama-3.2-1b; tiny-test on cpu")
    parser.add_argument("--parts", default=None, help="names of the only ones to run, with commas")
    given = parser.parse_args(words)
    begun = time.time()
    setup = SETUPS[given.device]
    model, small = given.model or setup.model, given.small_model or setup.small_model
    folder = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--out {given.out}: is not empty")
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    parts = plan(folder, given.device, model, small, given.budget_s / 540)
    if given.parts is not None:
        parts = [part for part in parts if part.name in given.parts.split(",")]
    outcomes = run_parts(parts, folder, given.budget_s - 5)
    write_record(
        folder, outcomes, begun=begun, ended=time.time(), device=given.device, model=model,
        small_model=small, budget_s=given.budget_s, bytes=pack_large_files(folder),
    )  # fmt: skip
    print(write_report(folder))
    return int(any(outcome.status in {"failed", "timeout"} for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
