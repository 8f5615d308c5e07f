"""What eight rarely used models need: a GPU each, or fewer that they share by vLLM's sleep mode.

    python benchmarks/sleep_mode.py [--num-prompts 1500] [--out docs/images/sleep-mode.png]

`scenarios/what-if/rare-models.yaml` under several loads: the P99 TTFT over the GPUs that the models
share, at both sleep levels, beside a GPU for each; then the fewest GPUs with which that is 10 s at
most, over the load.
"""

import argparse
import warnings
from functools import cache
from pathlib import Path

from headway.figures.style import color, grid, legend_below, log_scale, marker, save, sheet
from simulator import load_scenario, run

SCENARIO = "what-if/rare-models"
MODELS = 8
LOAD = 0.4  # requests/s of all models together
LOADS = (0.1, 0.2, 0.4, 0.8)
LEVELS = (1, 2)
BOUND = 10.0  # s


@cache
def p99_ttft(rate: float, prompts: int, level: int = 0, gpus: int = MODELS) -> float:
    """Return the P99 TTFT, s, on GPUs that the models share; level 0: each has its own."""
    mode = f"{{level: {level}, replicas: {gpus}}}" if level else "null"
    keys = [f"cluster.sleep_mode={mode}", f"workload.request_rate={rate}"]
    told = run(load_scenario(SCENARIO, [*keys, f"workload.num_prompts={prompts}"])).summary()
    found = float(told["p99_ttft_ms"]) / 1000.0  # type: ignore[arg-type]
    sleep = told["headway"]["cluster"].get("sleep_mode", {})  # type: ignore[index]
    more = f", {sleep['share_of_ttft']:.0%} of TTFT for wake-ups" if sleep else ""
    what = f"{rate} requests/s, level {level}, {gpus} GPUs"
    print(f"{what}: P99 TTFT {found:.2f} s{more}", flush=True)
    return found


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=Path("docs/images/sleep-mode.png"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    alone = p99_ttft(LOAD, args.num_prompts)
    counts = range(1, MODELS // 2 + 1)
    shared = {
        (level, gpus): p99_ttft(LOAD, args.num_prompts, level, gpus)
        for level in LEVELS
        for gpus in counts
    }
    needed: dict[tuple[int, float], int] = {}
    for level in LEVELS:
        gpus = 1
        for rate in LOADS:
            while gpus < MODELS and p99_ttft(rate, args.num_prompts, level, gpus) > BOUND:
                gpus += 1
            needed[level, rate] = gpus
    draw(alone, shared, needed, args.out)


def draw(
    alone: float,
    shared: dict[tuple[int, int], float],
    needed: dict[tuple[int, float], int],
    out: Path,
) -> None:
    """Draw the P99 TTFT over the GPUs, and the GPUs that it takes over the load."""
    counts = sorted({gpus for _, gpus in shared})
    with sheet(1, 2, 3.6) as figure:
        times, gpus = figure.axes
        for number, level in enumerate(LEVELS):
            look = {"color": color(number), "marker": marker(number)}
            label = f"sleep level {level}"
            times.plot(counts, [shared[level, count] for count in counts], label=label, **look)
            gpus.plot(LOADS, [needed[level, rate] for rate in LOADS], **look)
        look = {"color": color(2), "linestyle": "--"}
        times.axhline(alone, label=f"a GPU for each ({MODELS})", **look)
        gpus.axhline(MODELS, **look)
        log_scale(times, "y")
        times.set_xticks(counts)
        times.set(xlabel="GPUs that eight models share", ylabel=f"P99 TTFT (s), {LOAD} requests/s")
        log_scale(gpus, "x")
        gpus.set_xticks(LOADS, [f"{rate:g}" for rate in LOADS])
        gpus.minorticks_off()
        gpus.set_ylim(0, MODELS + 0.5)
        gpus.set(xlabel="requests/s", ylabel=f"GPUs for a P99 TTFT of {BOUND:g} s")
        for axes in (times, gpus):
            grid(axes)
        legend_below(figure, times)
    save(figure, out)


if __name__ == "__main__":
    main()
