"""What the recorder of a live server costs a step of vLLM's scheduler: microseconds of CPU.

    python benchmarks/step_recorder.py [--steps 300]

It needs a vLLM, but neither a GPU nor weights. As many requests decode all the time; timed is what
the recorder does when a step has been scheduled and when its tokens are there, the line it writes
included, beside vLLM's `schedule` as a whole. Times are of the thread's CPU, since other processes
disturb.
"""

import argparse
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from conformance.vllm_steps import LiveVllm
from simulator.core.request import Request
from simulator.schedulers.vllm.installed import InstalledBlocks, InstalledScheduler

RUNNING = (32, 256, 1024)
WARM_UP = 20  # steps


def measure(running: int, steps: int) -> tuple[float, float, float]:
    """Return the seconds of the recorder and of `schedule` in a step, and the bytes of a line."""
    own = [0.0]

    def timed(name: str) -> None:
        call = getattr(LiveVllm, name)

        def run(*given: object) -> object:
            before = time.thread_time()
            try:
                return call(*given)
            finally:
                own[0] += time.thread_time() - before

        setattr(LiveVllm, name, run)

    names = ("begin", "take_in", "outcome_begins", "outcome_is_over")
    whole = {name: getattr(LiveVllm, name) for name in names}
    for name in names:
        timed(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "steps.jsonl")
        os.environ["HEADWAY_STEPS"] = str(file)
        scheduler = InstalledScheduler(
            InstalledBlocks(200_000, 16),
            scheduler_cls="headway_vllm.RecordedScheduler",
            async_scheduling=True,
            max_num_seqs=running,
            max_num_batched_tokens=8192,
            max_model_len=8192,
        )
        for number in range(running):
            scheduler.add(Request(number, 0.0, 8, 8000))
        taken, now = [], 0.0
        for step in range(WARM_UP + steps):
            now += 0.02
            own[0] = 0.0
            before = time.thread_time()
            scheduler.schedule(now)
            spent = time.thread_time() - before
            if step:  # two batches are in flight
                scheduler.commit(None, [now])  # type: ignore[arg-type]
            taken.append((own[0], spent))
        size = file.stat().st_size / (WARM_UP + steps)
    for name, call in whole.items():
        setattr(LiveVllm, name, call)
    ours, theirs = (median(column) for column in zip(*taken[WARM_UP:], strict=True))
    return ours, theirs, size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    if find_spec("vllm") is None:
        parser.error("vLLM is not installed here: pip install vllm==0.33.0")
    for running in RUNNING:
        ours, theirs, size = measure(running, options.steps)
        print(
            f"{running:>5} decode: {1e6 * ours:.0f} us, beside {1e6 * theirs:.0f} us of "
            f"`schedule` with it; {size:,.0f} bytes a line",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
