"""How the user CPU of a request grows: with how many there are, and with the size of all else.

    python benchmarks/growth.py [NAME ...] [--requests 4000] [--rounds 3] [--out growth.png]

*Requests*: all come at once, two of each client, so nearly all of them wait for most of the run: in
one engine under each policy and each way to keep KV blocks, or before four replicas behind each
router. *Sizes*: as many requests, of a fleet as many for each replica, meet more of what `SIZES`
names; a trace is read, not simulated.
Each is run with 1, 2, 4 and 8 times as many, in turns, and the best round counts; the exponent is
the slope of the logarithms of what a request costs, without what an empty run takes. At 0 it costs
the same, and n log n is 0.1 here. Nothing may have more than 0.1 but what keeps who waits, or which
replica's step ends next, in an order, as a heap finds less and less in the processor's caches: that
may have 0.25. What has more is measured once more, since machines disturb; if it has again, the
exit code is 1. A picture, `--out`, is drawn where nothing has been named.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from headway.figures.style import COLORS, grid, label_ends, log_scale, save, sheet
from simulator.build.policy_table import POLICIES
from simulator.cluster.routers import ROUTERS
from simulator.scenario.draw import make_workload
from simulator.scenario.load import check_scenario
from simulator.simulation.run import run
from simulator.util.yaml_lines import SourceMap
from simulator.workload.traces import write_mooncake

MOST = 0.1
MOST_SORTING = 0.25
SORTING = {
    *("priority", "preemptive", "deadline", "sjf", "srpt", "hrrn", "mlfq", "boost"),
    *("fair", "wfq", "drr", "virtual-finish-time", "sglang", "radix tree", "replicas"),
}
"""What keeps who waits in an order, or which replica's step ends next."""
TIMES = (1, 2, 4, 8)
ARGUMENTS = {"sjf": {"by": "hint"}, "hrrn": {"by": "hint"}, "boost": {"by": "hint"}}

Raw = dict[str, Any]

FEW_BLOCKS = {"num_gpu_blocks_override": 100}
MEMORY: dict[str, Raw] = {
    "recompute": FEW_BLOCKS,
    "swap": {**FEW_BLOCKS, "preemption_mode": "swap", "swap_space": 1.0},
    "prefix cache": {"enable_prefix_caching": True},
    "prefix cache, preempting": {**FEW_BLOCKS, "enable_prefix_caching": True},
    "radix tree": {"name": "sglang", "enable_prefix_caching": True, "scheduling_policy": "sglang"},
}
"""Ways to keep KV blocks: keys of `engine`."""
CACHE = {"enable_prefix_caching": True}
SIZES: dict[str, tuple[int, Callable[[int], Raw]]] = {
    "replicas": (8, lambda n: {"cluster": {"replicas": n, "router": "least_outstanding"}}),
    "seats": (32, lambda n: {"engine": {"max_num_seqs": n, "num_gpu_blocks_override": 8000}}),
    "KV blocks": (2000, lambda n: {"engine": {"num_gpu_blocks_override": n, **CACHE}}),
    "prefixes": (
        50,
        lambda n: {
            "engine": CACHE,
            "workload": {"prefix_groups": {"num_prefixes": n, "prefix_len": 64}},
        },
    ),
}
"""What else grows: its least size, and what of a scenario it changes, block by block."""
TRACE = "lines of a trace"


def scenario_of(requests: int, engine: Raw, **blocks: Raw):
    """Describe a run in which so many requests come at once."""
    workload = {
        "num_prompts": requests,
        "clients": requests // 2,
        "priorities": [k % 7 for k in range(requests // 2)],
        "input_len": 100,
        "output_len": 20,
        "range_ratio": 0.5,
    }
    raw = {
        "model": "tiny-test",
        "predictor": "oracle",
        "cost": {"kind": "linear", "base": 0.01, "per_token": 1e-5},
        **blocks,
        "engine": {
            "max_num_seqs": 64,
            "max_model_len": 512,
            "num_gpu_blocks_override": 4000,
            "enable_prefix_caching": False,
            **engine,
        },
        "workload": {**workload, **blocks.get("workload", {})},
    }
    return check_scenario(raw, SourceMap("scenario", {}))


def named(name: str, requests: int):
    """Describe the run of a policy, a router or a way to keep KV blocks."""
    if name in ROUTERS:
        return scenario_of(requests, {}, cluster={"replicas": 4, "router": name})
    policy = name if name in POLICIES else "fcfs"
    order = {"scheduling_policy": {"policy": policy, **ARGUMENTS.get(policy, {})}}
    return scenario_of(requests, {**order, **MEMORY.get(name, {})})


def simulated(scenario) -> Callable[[], object]:
    """Return what simulates a scenario, its requests made beforehand."""
    return partial(run, scenario, workload=make_workload(scenario))


def reading(requests: int, folder: Path) -> Callable[[], object]:
    """Return what reads a trace of so many requests."""
    path = folder / f"{requests}.jsonl"
    write_mooncake(make_workload(named("fcfs", requests)), path)
    trace = {"trace": {"path": str(path), "format": "mooncake"}}
    raw = {"model": "tiny-test", "cost": {"kind": "linear", "base": 0.01}, "workload": trace}
    return partial(make_workload, check_scenario(raw, SourceMap("scenario", {})))


def seconds(works: list[Callable[[], object]], rounds: int) -> list[float]:
    """Measure the user CPU of each, the best of some rounds."""
    best = [inf] * len(works)
    for _ in range(rounds):
        for at, work in enumerate(works):
            before = time.process_time()
            work()
            best[at] = min(best[at], time.process_time() - before)
    return best


def works_of(name: str, requests: int, folder: Path) -> list[tuple[int, int, Callable]]:
    """Return sizes of something, the requests at each, and what is to be measured.

    Before the sizes that count comes an empty run.
    """
    if name not in SIZES:
        make = partial(reading, folder=folder) if name == TRACE else simulated_by(name)
        return [(size, size, make(size)) for size in (2, *(requests * n for n in TIMES))]
    least, change = SIZES[name]
    counts = [requests * n if name == "replicas" else requests for n in TIMES]
    cases = [(2, least), *zip(counts, (least * n for n in TIMES), strict=True)]
    return [
        (size, count, simulated(scenario_of(count, **{"engine": {}, **change(size)})))
        for count, size in cases
    ]


def simulated_by(name: str) -> Callable[[int], Callable[[], object]]:
    """Return what makes the run of a policy, a router or a way to keep KV blocks."""
    return lambda requests: simulated(named(name, requests))


def growth(name: str, requests: int, rounds: int) -> tuple[float, list[int], list[float]]:
    """Measure how something grows; print a row, return exponent, sizes, and us of each request."""
    with tempfile.TemporaryDirectory() as folder:
        sizes, counts, works = zip(*works_of(name, requests, Path(folder)), strict=True)
        empty, *times = seconds(list(works), rounds)
    pairs = zip(times, counts[1:], strict=True)
    costs = [1e6 * max(found - empty, 1e-4) / count for found, count in pairs]
    exponent = float(np.polyfit(np.log(TIMES), np.log(costs), 1)[0])
    print(f"{name:<25}" + "".join(f"{cost:>10.1f}" for cost in costs) + f"{exponent:>10.2f}")
    sys.stdout.flush()
    return exponent, list(sizes[1:]), costs


def draw(found: dict[str, tuple[list[int], list[float]]], out: Path) -> None:
    """Draw what a request costs: over all requests, and over all else as it grows."""
    shown = ("fcfs", "virtual-finish-time", "radix tree", "least_outstanding")
    others = (*SIZES, TRACE)
    labels: list[list[tuple[float, float, str, str]]] = []
    with sheet(1, 2, 4.2, sharey=True) as figure:
        for axes, named, label, title in (
            (figure.axes[0], shown, "requests", "policies, routers, KV blocks"),
            (figure.axes[1], others, "times the least size", "what else grows"),
        ):
            ends: list[tuple[float, float, str, str]] = []
            for name, (sizes, costs) in found.items():
                if (name in others) != (named is others):
                    continue
                at = TIMES if named is others else sizes
                if name not in named:
                    axes.plot(at, costs, color="0.8", zorder=1)
                    continue
                hue = COLORS[named.index(name)]
                axes.plot(at, costs, color=hue, marker="o")
                text = f"{name}, from {sizes[0]:,}" if named is others else name
                ends.append((at[-1], costs[-1], text, hue))
            log_scale(axes, "x")
            axes.set(xlabel=label, title=title)
            axes.set_xticks(at, [f"{size:,}" for size in at])
            axes.minorticks_off()
            grid(axes)
            labels.append(ends)
        log_scale(axes, "y")
        figure.axes[0].set_ylabel("user CPU of a request (us)")
        figure.canvas.draw()
        for axes, ends in zip(figure.axes, labels, strict=True):
            label_ends(axes, ends)
    save(figure, out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if none is named")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a picture of all")
    words = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        f"{'us of a request, at size':<25}"
        + "".join(f"{f'x {n}':>10}" for n in TIMES)
        + f"{'exponent':>10}"
    )
    above, found = [], {}
    for name in words.names or [*POLICIES, *ROUTERS, *MEMORY, *SIZES, TRACE]:
        most = MOST_SORTING if name in SORTING else MOST
        exponent, *found[name] = growth(name, words.requests, words.rounds)
        if exponent > most:
            exponent, *found[name] = growth(name, words.requests, words.rounds)
        if exponent > most:
            above.append(name)
    if words.out and not words.names:
        draw(found, words.out)
    if above:
        print(f"grows too fast: {', '.join(above)}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
