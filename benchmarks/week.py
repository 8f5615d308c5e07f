"""A week of a thousand GPUs: how long it takes to simulate, by a hundredth of it.

    python benchmarks/week.py [--num-prompts 1000000] [--compare 250000] [--jobs 2]

Runs scenarios/what-if/week.yaml without tables for `--compare` requests in one process and on
workers, which gives the efficiency, and for `--num-prompts` on workers. The day is as much shorter
as the run is. Prints times, the peak memory of a process, and what the whole week would take.
Trust the ratio: machines differ.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from measure import HEADWAY, ROOT

WEEK = ROOT / "scenarios" / "what-if" / "week.yaml"
WHOLE = 100_000_000
LOOK = 0.5  # s between two looks at the memory


def run(prompts: int, jobs: int | None) -> tuple[float, float, float]:
    """Run so many requests; return wall and user time, s, and the most MB of one process."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *HEADWAY, "run", str(WEEK), "--no-tables", "--quiet"]
        words += ["--out", str(Path(folder) / "out"), "--set", f"workload.num_prompts={prompts}"]
        words += ["--set", f"workload.diurnal.period={86400 * prompts / WHOLE}"]
        words += [] if jobs is None else ["--jobs", str(jobs)]
        begin = time.perf_counter()
        child = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
        most, used = 0, dict[int, float]()
        while child.poll() is None:
            for one in processes(child.pid):
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    most = max(most, one.memory_info().rss)
                    used[one.pid] = one.cpu_times().user
            time.sleep(LOOK)
        if child.returncode:
            raise SystemExit(f"{' '.join(words)} failed")
        return time.perf_counter() - begin, sum(used.values()), most / 1e6


def processes(parent: int) -> list[psutil.Process]:
    """Return a process and its workers, as far as it still runs."""
    with suppress(psutil.NoSuchProcess):
        return [psutil.Process(parent), *psutil.Process(parent).children(recursive=True)]
    return []


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=WHOLE // 100)
    parser.add_argument("--compare", type=int, default=WHOLE // 400)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    alone, user, most = run(args.compare, None)
    told = f"{args.compare:,} requests, one process"
    print(f"{told}: {alone:.1f} s, {user:.1f} s user CPU, {most:,.0f} MB", flush=True)
    spread, shared, most = run(args.compare, args.jobs)
    told = f"the same with --jobs {args.jobs}"
    print(f"{told}: {spread:.1f} s, {shared:.1f} s user CPU, {most:,.0f} MB in a process at most")
    told = f"efficiency: {alone / spread / args.jobs:.2f} by wall time"
    print(f"{told}, {user / shared:.2f} by user CPU", flush=True)
    part, shared, most = run(args.num_prompts, args.jobs)
    told = f"{args.num_prompts:,} requests with --jobs {args.jobs}: {part:.1f} s"
    print(f"{told}, {shared:.1f} s user CPU, {most:,.0f} MB")
    hours = part * WHOLE / args.num_prompts / 3600
    print(f"the whole week, as many times longer: {hours:.1f} h with --jobs {args.jobs}")


if __name__ == "__main__":
    main()
