"""Time the whole command `headway run`, and say where the time goes.

    python benchmarks/speed.py [--big] [--sweep]

Figures are the user CPU and the peak memory of the process, everything written. Engines are
those that the scenarios name, `textbook`, but where a case says vLLM's defaults. The work is that
of the Azure 2023 conversation trace (19,366 requests, 4.09 M output tokens) where HEADWAY_DATA
names a folder that holds it, else of a generated workload with its statistics. Machines differ and
other processes disturb: the second column of times divides by what this machine needs for a
million SimPy timeouts, so compare that one between machines. `--big` adds a million requests;
`--sweep` times sweeps alone, on one core and on two, and needs both for itself.
The costliest functions: `python -m cProfile -s tottime -m headway run ...`.
"""

import argparse
import os
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path

from measure import DEMO, HEADWAY, ROOT, Usage, headway_run, python

from simulator.scenario.draw import make_workload

AZURE = ROOT / "scenarios" / "azure-conv-llama3-8b-a100.yaml"
REAL = (Path(os.environ.get("HEADWAY_DATA", "-")) / "traces/azure_llm_2023_conv.csv.gz").exists()
CONV = AZURE if REAL else DEMO


def conv(requests: int) -> list[str]:
    """Replay the trace end to end until so many requests have come, or generate as many."""
    if REAL:
        repeats = -(-requests // 19366)
        return [f"workload.trace.repeat={repeats}", f"workload.trace.limit={requests}"]
    return [f"workload.num_prompts={requests}"]


POISSON = "{num_prompts: 2000, request_rate: 8, rescale: false, input_len: 512, output_len: 256}"
BIG = "1,000,000 requests"
PLAIN = "19,366 requests (conv)"
VLLM = "conv with vLLM's defaults"  # a prefix cache, though nobody shares; asynchronous
SGLANG = "conv with SGLang's defaults"  # its radix tree, overlap; 1.2 times the steps
SGLANG_KEYS = ("engine={name: sglang, max_model_len: 16384}",)
VLLM_KEYS = ("engine.name=vllm", "engine.enable_prefix_caching=true")
CASES = {
    # name: (scenario, overrides, options, target user CPU in s, target memory in MB)
    "2,000 requests, Poisson 8/s, 512/256": (DEMO, [f"workload={POISSON}"], (), 0.6, None),
    PLAIN: (CONV, conv(19366), (), 1.2, 130),
    "the same, stepwise": (CONV, conv(19366), ("--stepwise",), None, None),
    VLLM: (CONV, [*conv(19366), *VLLM_KEYS], (), 1.8, 130),
    SGLANG: (CONV, [*conv(19366), *SGLANG_KEYS], (), 1.8, 130),
    "100,000 requests": (CONV, conv(100_000), (), 4.0, 350),
    BIG: (CONV, conv(1_000_000), (), 40.0, 600),
}


def timeouts() -> float:
    """Measure the user CPU of a million SimPy timeouts, in seconds."""
    import simpy

    def tick(env: simpy.Environment):
        while True:
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(tick(env))
    begin = time.process_time()
    for _ in range(1_000_000):
        env.step()
    return time.process_time() - begin


def phases() -> list[tuple[str, float]]:
    """Do in this process what `headway run` does, and time each part."""
    marks = [("start", time.process_time())]

    def mark(name: str) -> None:
        marks.append((name, time.process_time()))

    from headway.report.text import run_table
    from simulator.scenario.load import load_scenario
    from simulator.simulation.run import run
    from simulator.simulation.write import write_run

    mark("import")
    scenario = load_scenario(CONV, conv(19366))
    mark("read the scenario")
    make_workload(scenario)
    mark("read the trace")
    result = run(scenario)
    mark("read it again and simulate")
    result.summary()
    mark("metrics")
    run_table(result.summary())
    mark("report")
    with tempfile.TemporaryDirectory() as out:
        write_run(result, Path(out) / "out")
        mark("write all files")
    return [(name, now - before) for (_, before), (name, now) in pairwise(marks)]


def sweep_seconds(points: int, jobs: int) -> float:
    """Measure a sweep of so many seeds, 20,000 requests each; wall time, s, start-up included."""
    seeds = "seed=" + ",".join(map(str, range(points)))
    words = ["sweep", str(DEMO), "--set", "workload.num_prompts=20000", "--vary", seeds]
    with tempfile.TemporaryDirectory() as out:
        return python([*HEADWAY, *words, "--jobs", str(jobs), "--out", out]).wall


def sweeps() -> None:
    """Print how well two cores share sweeps: 1 would be half the time of one core."""
    print(f"{'points':>6} {'1 core, s':>10} {'2 cores, s':>10} {'efficiency':>10}")
    for points in (16, 40):
        for _ in range(2):
            one, two = (sweep_seconds(points, jobs) for jobs in (1, 2))
            print(f"{points:6} {one:10.2f} {two:10.2f} {one / two / 2:10.2f}", flush=True)


def show(name: str, usages: list[Usage], unit: float, target: str) -> float:
    """Print the median of a case; return its user CPU."""
    median = sorted(usages)[len(usages) // 2]
    print(
        f"{name:40} {median.user:7.2f} {median.user / unit:6.2f} {median.wall:7.2f} "
        f"{median.memory:6.0f}   {target}"
    )
    return median.user


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--big", action="store_true", help="add a million requests")
    parser.add_argument("--sweep", action="store_true", help="sweeps on one core and two, alone")
    options = parser.parse_args()
    if options.sweep:
        sweeps()
        return
    warnings.simplefilter("ignore")
    unit = timeouts()
    source = "the Azure 2023 conversation trace" if REAL else "a generated workload of its kind"
    print(f"conv is {source}; a million SimPy timeouts take {unit:.2f} s here\n")
    print(f"{'case':40} {'user s':>7} {'ratio':>6} {'wall s':>7} {'MB':>6}   target")
    show("--help", [python([*HEADWAY, "--help"]) for _ in range(3)], unit, "0.3 s")
    users = {}
    for name, (scenario, overrides, more, target, memory) in CASES.items():
        if name == BIG and not options.big:
            continue
        times = 1 if name == BIG else 3
        usages = [headway_run(scenario, overrides, *more) for _ in range(times)]
        wanted = f"{target} s" if target else ""
        wanted += f", {memory} MB" if memory else ""
        users[name] = show(name, usages, unit, wanted)
    print(f"\nvLLM's defaults take {users[VLLM] / users[PLAIN]:.2f} times as long as plain fcfs, ")
    print(f"SGLang's {users[SGLANG] / users[PLAIN]:.2f} times.")
    print("\nWhere the time of conv goes (user CPU, s):")
    for name, seconds in phases():
        print(f"  {name:30} {seconds:6.3f}")


if __name__ == "__main__":
    main()
