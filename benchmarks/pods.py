"""What it costs in latency to split a fleet into pods, against one router that sees all replicas.

    python benchmarks/pods.py [--replicas 64] [--num-prompts 40000] [--out docs/images/pods.png]

Lengths are those of the demo, as of Azure's conversations. The front router is random, as a hash of
conversations is; each pod's, and the global one, least_outstanding. Pods of one replica are random
routing alone. Prints and draws mean and P99 TTFT and P99 E2EL over the size of a pod, at three
loads per replica.
"""

import argparse
import warnings
from pathlib import Path

from measure import DEMO

from headway.figures.style import color, grid, legend_below, log_scale, marker, save, sheet
from simulator import load_scenario
from simulator.simulation.stream import run_streamed

METRICS = {
    "mean_ttft_ms": "mean TTFT (s)",
    "p99_ttft_ms": "P99 TTFT (s)",
    "p99_e2el_ms": "P99 E2EL (s)",
}
RATES = (4.0, 4.5, 4.7)  # requests/s of each replica


def measure(replicas: int, size: int, rate: float, prompts: int) -> dict[str, float]:
    """Simulate a fleet whose pods have so many replicas; return its metrics, s."""
    pods = replicas // size
    split = f"router: random, pods: {pods}" if pods > 1 else "router: least_outstanding"
    overrides = [
        f"cluster={{replicas: {replicas}, {split}}}",
        f"workload.num_prompts={prompts}",
        f"workload.request_rate={rate * replicas}",
    ]
    summary = run_streamed(load_scenario(DEMO, overrides))
    return {name: summary[name] / 1e3 for name in METRICS}


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=40_000)
    parser.add_argument("--out", type=Path, default=Path("docs/images/pods.png"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    sizes = [4**k for k in range(4) if args.replicas % 4**k == 0]
    found = {}
    for rate in RATES:
        for size in sizes:
            found[rate, size] = measure(args.replicas, size, rate, args.num_prompts)
            told = "  ".join(f"{value:8.3f}" for value in found[rate, size].values())
            print(f"{rate:4.1f}/s  pods of {size:3}  {told}", flush=True)
    draw(found, sizes, args.out)


def draw(found: dict[tuple[float, int], dict[str, float]], sizes: list[int], out: Path) -> None:
    """Draw each metric over the size of a pod."""
    with sheet(1, len(METRICS), 3.6) as figure:
        for axes, (name, title) in zip(figure.axes, METRICS.items(), strict=True):
            for number, rate in enumerate(RATES):
                values = [found[rate, size][name] for size in sizes]
                look = {"color": color(number), "marker": marker(number)}
                axes.plot(sizes, values, label=f"{rate:g} requests/s per replica", **look)
            log_scale(axes, "x")
            axes.set_ylim(bottom=0)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.set(title=title, xlabel="replicas in a pod")
            grid(axes)
        figure.axes[0].set_ylabel("s")
        legend_below(figure, figure.axes[0])
    save(figure, out)


if __name__ == "__main__":
    main()
