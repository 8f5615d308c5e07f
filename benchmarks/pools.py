"""How much eight GPUs serve, by how many of them prefill, and what a slow network then costs.

    python benchmarks/pools.py [--num-prompts 3000] [--out docs/images/pools.png]

The largest rate at which 99 % of the requests keep the SLO of `scenarios/what-if/pools.yaml`, to
3 %, for each split of eight GPUs and two loads: long prompts with short answers, and short prompts
with long answers. The line is the same engine with chunked prefill on all eight. Then TTFT by the
bandwidth of the links, where the consumer pulls a whole KV cache and where each layer goes as it is
computed.
"""

import argparse
import warnings
from pathlib import Path

from headway.figures.style import color, grid, legend_below, log_scale, marker, save, sheet
from simulator import load_scenario, run

SCENARIO = "what-if/pools"
GPUS = 8
LOADS = {"long prompts, short answers": (2000, 100), "short prompts, long answers": (300, 400)}
MIXED = f"cluster={{replicas: {GPUS}, router: least_outstanding}}"
BANDWIDTHS = (2.5, 5.0, 10.0, 25.0, 50.0)  # GB/s
BEST = "5P3D"


def holds(rate: float, prompts: int, *keys: str) -> bool:
    """Say whether 99 % of the requests keep the SLO."""
    more = [f"workload.request_rate={rate}", f"workload.num_prompts={prompts}"]
    summary = run(load_scenario(SCENARIO, [*keys, *more])).summary()
    return bool(summary["request_goodput"] >= 0.99 * summary["request_throughput"])


def largest(prompts: int, *keys: str) -> float:
    """Find the largest rate that holds, by bisection."""
    low, high = 0.0, 4.0
    while holds(high, prompts, *keys):
        low, high = high, 2 * high
    while high - low > 0.03 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle, prompts, *keys) else (low, middle)
    return low


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("docs/images/pools.png"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    apart, mixed = {}, {}
    for load, (prompt, answer) in LOADS.items():
        sizes = f"workload.input_len.median={prompt}", f"workload.output_len.median={answer}"
        mixed[load] = largest(args.num_prompts, *sizes, MIXED)
        print(f"{load}: chunked prefill on {GPUS}: {mixed[load]:.1f} requests/s", flush=True)
        for count in range(1, GPUS):
            split = f"cluster.kv_transfer.ratio={count}P{GPUS - count}D"
            apart[load, count] = largest(args.num_prompts, *sizes, split)
            print(f"{load}: {split}: {apart[load, count]:.1f} requests/s", flush=True)
    ttft = {}
    for bandwidth in BANDWIDTHS:
        for layerwise in (False, True):
            links = f"cluster.kv_transfer={{bandwidth: {bandwidth}, latency: 1, ratio: {BEST}"
            keys = [f"{links}, layerwise: {str(layerwise).lower()}}}", "workload.request_rate=40"]
            summary = run(load_scenario(SCENARIO, keys)).summary()
            ttft[layerwise, bandwidth] = summary["mean_ttft_ms"], summary["p99_ttft_ms"]
            print(f"{bandwidth} GB/s, layerwise {layerwise}: TTFT {ttft[layerwise, bandwidth]}")
    draw(apart, mixed, ttft, args.out)


def draw(
    apart: dict[tuple[str, int], float],
    mixed: dict[str, float],
    ttft: dict[tuple[bool, float], tuple[float, float]],
    out: Path,
) -> None:
    """Draw the largest rate over the split, and TTFT over the bandwidth."""
    with sheet(1, 2, 3.6) as figure:
        rates, times = figure.axes
        for number, load in enumerate(LOADS):
            counts = [*range(1, GPUS)]
            look = {"color": color(number), "marker": marker(number)}
            rates.plot(counts, [apart[load, count] for count in counts], label=load, **look)
            label = "chunked prefill on all" if not number else None
            rates.axhline(mixed[load], color=color(number), linestyle="--", label=label)
        rates.set(xlabel=f"GPUs that prefill, of {GPUS}", ylabel="requests/s that keep the SLO")
        rates.set_ylim(bottom=0)
        for layerwise in (False, True):
            look = {"color": color(2 + layerwise), "marker": marker(2 + layerwise)}
            label = "layer by layer" if layerwise else "pulled as a whole"
            values = [ttft[layerwise, one][0] for one in BANDWIDTHS]
            times.plot(BANDWIDTHS, values, label=label, **look)
        log_scale(times, "x")
        times.set_xticks(BANDWIDTHS, [f"{one:g}" for one in BANDWIDTHS])
        times.minorticks_off()
        times.set_ylim(bottom=0)
        times.set(xlabel="GB/s of a GPU's link", ylabel=f"mean TTFT (ms), {BEST}")
        for axes in (rates, times):
            grid(axes)
            legend_below(figure, axes) if axes is rates else axes.legend()
    save(figure, out)


if __name__ == "__main__":
    main()
