"""What host memory and a store that replicas share save for agents' sessions, by the load.

    python benchmarks/kv_tiers.py [--num-prompts 8000] [--out docs/images/kv-tiers.png]

The sessions of `scenarios/what-if/kv-tiers.yaml` on four H100, at several rates, with the KV
caches of old turns nowhere, in 64 and in 256 GiB of host memory a replica, and in a store of 1 TiB
that all share (25 GB/s for all); sessions stay at a replica, or go round. Prints and draws the mean
TTFT, and the share of the prompt tokens that had to be computed.
"""

import argparse
import warnings
from pathlib import Path

from headway.figures.style import color, grid, legend_below, log_scale, marker, save, sheet
from simulator import load_scenario, run

SCENARIO = "what-if/kv-tiers"
RATES = (0.1, 0.2, 0.3, 0.4)  # sessions/s
STAY, NO_STORE = "cluster.router=session_affinity", "engine.secondary_tiers=[]"
NOTHING = ["engine.kv_offloading_size=null", "engine.hicache_write_policy=write_back", NO_STORE]
FLEETS = {
    "nowhere, sessions stay": [STAY, *NOTHING],
    "host, 64 GiB, sessions stay": [STAY, NO_STORE],
    "host, 256 GiB, sessions stay": [STAY, NO_STORE, "engine.kv_offloading_size=256"],
    "host, 256 GiB, round robin": [NO_STORE, "engine.kv_offloading_size=256"],
    "shared store, round robin": [],
}


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=8000)
    parser.add_argument("--out", type=Path, default=Path("docs/images/kv-tiers.png"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[tuple[str, float], tuple[float, float]] = {}
    for name, keys in FLEETS.items():
        for rate in RATES:
            more = [f"workload.request_rate={rate}", f"workload.num_prompts={args.num_prompts}"]
            result = run(load_scenario(SCENARIO, [*keys, *more]))
            rows, summary = result.requests, result.summary()
            computed = 1.0 - rows["cached_tokens"].sum() / rows["prompt_tokens"].sum()
            found[name, rate] = summary["mean_ttft_ms"] / 1e3, computed
            kept = summary["request_goodput"] / summary["request_throughput"]
            told = (
                f"TTFT {found[name, rate][0]:8.3f} s, {computed:.1%} computed, {kept:.1%} in time"
            )
            print(f"{name}, {rate} sessions/s: {told}", flush=True)
    draw(found, args.out)


def draw(found: dict[tuple[str, float], tuple[float, float]], out: Path) -> None:
    """Draw both over the rate."""
    with sheet(1, 2, 3.6) as figure:
        for number, name in enumerate(FLEETS):
            look = {"color": color(number), "marker": marker(number), "label": name}
            for at, axes in enumerate(figure.axes):
                scale = 100 if at else 1
                axes.plot(RATES, [scale * found[name, rate][at] for rate in RATES], **look)
        log_scale(figure.axes[0], "y")
        figure.axes[0].set(ylabel="mean TTFT (s)")
        figure.axes[1].set(ylabel="prompt tokens computed (%)")
        figure.axes[1].set_ylim(bottom=0)
        for axes in figure.axes:
            axes.set(xlabel="sessions/s")
            grid(axes)
        legend_below(figure, figure.axes[0])
    save(figure, out)


if __name__ == "__main__":
    main()
