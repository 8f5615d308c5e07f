"""A week of a thousand GPUs: how long it takes to simulate, by a hundredth of it.

    python benchmarks/week.py [--num-prompts 1000000] [--compare 250000] [--jobs 2]

Runs scenarios/what-if/week.yaml without tables for `--compare` requests in one process and on
workers, which gives the efficiency, and for `--num-prompts` on workers. The day is as much shorter
as the run is. Prints wall times, the peak memory of a process, and what the whole week would take.
Trust the ratio: machines differ.
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
from measure import HEADWAY, ROOT, sys

WEEK = ROOT / "scenarios" / "what-if" / "week.yaml"
WHOLE = 100_000_000
LOOK = 0.5  # s between two looks at the memory


def run(prompts: int, jobs: int | None) -> tuple[float, float]:
    """Run so many requests; return wall time, s, and the most memory of one process, MB."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *HEADWAY, "run", str(WEEK), "--no-tables", "--quiet"]
        words += ["--out", str(Path(folder) / "out"), "--set", f"workload.num_prompts={prompts}"]
        words += ["--set", f"workload.diurnal.period={86400 * prompts / WHOLE}"]
        words += [] if jobs is None else ["--jobs", str(jobs)]
        begin = time.perf_counter()
        child = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
        most = 0
        while child.poll() is None:
            most = max([most, *memory(child.pid)])
            time.sleep(LOOK)
        if child.returncode:
            raise SystemExit(f"{' '.join(words)} failed")
        return time.perf_counter() - begin, most / 1e6


def memory(parent: int) -> list[int]:
    """Return the bytes that a process and each of its workers have in memory."""
    found = []
    for one in [psutil.Process(parent), *psutil.Process(parent).children(recursive=True)]:
        try:
            found.append(one.memory_info().rss)
        except psutil.NoSuchProcess:  # it has just ended
            continue
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=WHOLE // 100)
    parser.add_argument("--compare", type=int, default=WHOLE // 400)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    alone, most = run(args.compare, None)
    print(f"{args.compare:,} requests, one process: {alone:.1f} s, {most:,.0f} MB", flush=True)
    spread, most = run(args.compare, args.jobs)
    share = alone / spread / args.jobs
    print(f"the same with --jobs {args.jobs}: {spread:.1f} s, {most:,.0f} MB at most in a process")
    print(f"efficiency: {share:.2f}", flush=True)
    part, most = run(args.num_prompts, args.jobs)
    print(f"{args.num_prompts:,} requests with --jobs {args.jobs}: {part:.1f} s, {most:,.0f} MB")
    hours = part * WHOLE / args.num_prompts / 3600
    print(f"the whole week, as many times longer: {hours:.1f} h with --jobs {args.jobs}")


if __name__ == "__main__":
    main()
