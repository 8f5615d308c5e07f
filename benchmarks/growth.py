"""How the user CPU of each policy, router and memory mode grows with the requests.

    python benchmarks/growth.py [NAME ...] [--requests 4000]

All requests come at once, two of each client, so nearly all of them wait for most of the run: in
one engine under each policy and each way to keep KV blocks, or before four behind each router.
Each is run with 1, 2, 4 and 8 times `--requests`, in turns, and the best of three counts; the
exponent is the slope of the logarithms of the times without what an empty run takes. 1 is linear.
Nothing may have more than 1.1 but what keeps who waits in an order: n log n is 1.1 here, and a heap
finds less and less in the processor's caches. That may have 1.25. What has more is measured once
more, since machines disturb; if it has again, the exit code is 1.
"""

import argparse
import sys
import time
import warnings
from math import inf

import numpy as np

from simulator.cluster.routers import ROUTERS
from simulator.scenario.load import check_scenario
from simulator.scenario.policy_table import POLICIES
from simulator.simulation.run import run
from simulator.util.yaml_lines import SourceMap

MOST = 1.1
MOST_SORTING = 1.25
SORTING = {
    *("priority", "preemptive", "deadline", "sjf", "srpt", "hrrn", "mlfq", "boost"),
    *("fair", "wfq", "drr", "virtual-finish-time", "sglang", "radix tree"),
}
"""What keeps who waits in an order."""
ROUNDS = 3
TIMES = (1, 2, 4, 8)
ARGUMENTS = {"sjf": {"by": "hint"}, "hrrn": {"by": "hint"}, "boost": {"by": "hint"}}


FEW_BLOCKS = {"num_gpu_blocks_override": 100}
MEMORY = {
    "recompute": FEW_BLOCKS,
    "swap": {**FEW_BLOCKS, "preemption_mode": "swap", "swap_space": 1.0},
    "prefix cache": {"enable_prefix_caching": True},
    "prefix cache, preempting": {**FEW_BLOCKS, "enable_prefix_caching": True},
    "radix tree": {"name": "sglang", "enable_prefix_caching": True, "scheduling_policy": "sglang"},
}
"""Ways to keep KV blocks: keys of `engine`."""


def scenario_of(name: str, requests: int):
    """Describe a run in which so many requests come at once."""
    policy = name if name in POLICIES else "fcfs"
    raw = {
        "model": "tiny-test",
        "engine": {
            "scheduling_policy": {"policy": policy, **ARGUMENTS.get(policy, {})},
            "max_num_seqs": 64,
            "max_model_len": 512,
            "num_gpu_blocks_override": 4000,
            "enable_prefix_caching": False,
            **MEMORY.get(name, {}),
        },
        **({"cluster": {"replicas": 4, "router": name}} if name in ROUTERS else {}),
        "predictor": "oracle",
        "cost": {"kind": "linear", "base": 0.01, "per_token": 1e-5},
        "workload": {
            "num_prompts": requests,
            "clients": requests // 2,
            "priorities": [k % 7 for k in range(requests // 2)],
            "input_len": 100,
            "output_len": 20,
            "range_ratio": 0.5,
        },
    }
    return check_scenario(raw, SourceMap("scenario", {}))


def seconds(name: str, sizes: list[int]) -> list[float]:
    """Measure the user CPU of the simulation alone, of each size the best of some rounds."""
    scenarios = [scenario_of(name, size) for size in sizes]
    workloads = [scenario.make_workload() for scenario in scenarios]
    best = [inf] * len(sizes)
    for _ in range(ROUNDS):
        for at, (scenario, workload) in enumerate(zip(scenarios, workloads, strict=True)):
            before = time.process_time()
            run(scenario, workload=workload)
            best[at] = min(best[at], time.process_time() - before)
    return best


def growth(name: str, requests: int) -> float:
    """Measure how something grows; print a row, return the exponent."""
    empty, *times = seconds(name, [2, *(requests * count for count in TIMES)])
    logs = np.log(np.maximum(np.array(times) - empty, 1e-4))
    exponent = float(np.polyfit(np.log(TIMES), logs, 1)[0])
    print(f"{name:<25}" + "".join(f"{t:>10.2f}" for t in times) + f"{exponent:>10.2f}", flush=True)
    return exponent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if none is named")
    parser.add_argument("--requests", type=int, default=4000)
    words = parser.parse_args()
    warnings.simplefilter("ignore")
    sizes = [words.requests * times for times in TIMES]
    print(f"{'':<25}" + "".join(f"{size:>10,}" for size in sizes) + f"{'exponent':>10}")
    above = []
    for name in words.names or [*POLICIES, *ROUTERS, *MEMORY]:
        most = MOST_SORTING if name in SORTING else MOST
        if growth(name, words.requests) > most and growth(name, words.requests) > most:
            above.append(name)
    if above:
        print(f"grows too fast: {', '.join(above)}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
