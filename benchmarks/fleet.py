"""Time fleets: whether a request costs the same in any of them; a million on 64 replicas.

    python benchmarks/fleet.py [--big] [--router least_outstanding]

Without `--big` 200,000 requests on fleets of 1 to 1,000 replicas, 4 requests/s for each of them,
in one process for each fleet: user CPU per request of the simulation alone (no files), best of
three, and as a ratio to that of 8 replicas. Trust the ratios: machines differ. `--big` adds the
whole command `headway run` for a million requests on 64 replicas, files and all.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "scenarios" / "demo.yaml"
SIZES = (1, 8, 64, 1000)
REQUESTS = 200_000


def options(replicas: int, requests: int, router: str) -> list[str]:
    """Give the overrides of the demo scenario for a fleet under the same load per replica."""
    return [
        f"cluster.replicas={replicas}",
        f"cluster.router={router}",
        f"workload.num_prompts={requests}",
        f"workload.request_rate={4 * replicas}",
    ]


def measure(replicas: int, router: str) -> float:
    """Simulate in this process; return the user CPU per request, in microseconds."""
    from simulator.load import load_scenario
    from simulator.simulation import run

    warnings.simplefilter("ignore")
    scenario = load_scenario(DEMO, options(replicas, REQUESTS, router))
    before = os.times().user
    run(scenario)
    return (os.times().user - before) / REQUESTS * 1e6


def child(arguments: list[str]) -> tuple[str, float, float]:
    """Run Python; return its output, user CPU in s and peak memory in MB."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return text, usage.ru_utime, usage.ru_maxrss / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--big", action="store_true")
    parser.add_argument("--router", default="least_outstanding")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.one:
        print(measure(args.one, args.router))
        return
    costs = {size: [] for size in SIZES}
    for _ in range(args.rounds):  # in turn, so that what disturbs one disturbs all
        for size in SIZES:
            text, _, _ = child([__file__, "--one", str(size), "--router", args.router])
            costs[size].append(float(text))
    base = min(costs[8])
    print(f"{'replicas':>8}  {'us/request':>10}  {'ratio':>6}")
    for size in SIZES:
        print(f"{size:>8}  {min(costs[size]):>10.1f}  {min(costs[size]) / base:>6.2f}")
    if args.big:
        with tempfile.TemporaryDirectory() as out:
            words = [w for o in options(64, 1_000_000, args.router) for w in ("--set", o)]
            command = ["-m", "simulator", "run", str(DEMO), *words, "--quiet", "--out", out + "/o"]
            _, user, memory = child(command)
        print(f"1,000,000 requests on 64 replicas: {user:.1f} s user CPU, {memory:,.0f} MB")


if __name__ == "__main__":
    main()
