"""Time the whole command `headway run`, and say where the time goes.

    python benchmarks/speed.py [--big] [--profile]

Figures are the user CPU and the peak memory of the process, everything written. The work is that
of the Azure 2023 conversation trace (19,366 requests, 4.09 M output tokens) where HEADWAY_DATA
names a folder that holds it, else of a generated workload with its statistics. Machines differ and
other processes disturb: the second column of times divides by what this machine needs for a
million SimPy timeouts, so compare that one between machines. `--big` adds a million requests.
"""

import argparse
import cProfile
import os
import pstats
import subprocess
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADWAY = Path(sys.executable).parent / "headway"
CONV = ROOT / "scenarios" / "azure-conv-llama3-8b-a100.yaml"
DEMO = ROOT / "scenarios" / "demo.yaml"
REAL = (Path(os.environ.get("HEADWAY_DATA", "-")) / "traces/azure_llm_2023_conv.csv.gz").exists()


def conv(requests: int) -> list[str]:
    """Replay the trace end to end until so many requests have come, or generate as many."""
    if REAL:
        repeats = -(-requests // 19366)
        more = [f"workload.trace.repeat={repeats}", f"workload.trace.limit={requests}"]
        return [str(CONV), *(word for pair in more for word in ("--set", pair))]
    return [str(DEMO), "--set", f"workload.num_prompts={requests}"]


POISSON = "{num_prompts: 2000, request_rate: 8, rescale: false, input_len: 512, output_len: 256}"
PLAIN = "19,366 requests (conv)"
VLLM = "conv with vLLM's defaults"  # a prefix cache, though nobody shares; asynchronous
VLLM_KEYS = ("engine.name=vllm", "engine.enable_prefix_caching=true")
CASES = {
    # name: (arguments, target user CPU in s, target memory in MB)
    "--help": (["--help"], 0.3, None),
    "2,000 requests, Poisson 8/s, 512/256": (
        ["run", str(DEMO), "--set", f"workload={POISSON}"],
        0.6,
        None,
    ),
    PLAIN: (["run", *conv(19366)], 1.2, 130),
    "the same, stepwise": (["run", *conv(19366), "--stepwise"], None, None),
    VLLM: (
        ["run", *conv(19366), *(word for key in VLLM_KEYS for word in ("--set", key))],
        1.8,
        130,
    ),
    "100,000 requests": (["run", *conv(100_000)], 4.0, 350),
}
BIG = {"1,000,000 requests": (["run", *conv(1_000_000)], 40.0, 1500)}


def measure(arguments: list[str]) -> tuple[float, float, float]:
    """Run `headway` once; return user CPU and wall time in s and peak memory in MB."""
    with tempfile.TemporaryDirectory() as out:
        where = ["--out", out + "/out"] if arguments[0] == "run" else []
        command = [str(HEADWAY), *arguments, *where]
        begin = time.perf_counter()
        child = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
        )
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage.ru_utime, wall, usage.ru_maxrss / 1024


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

    from simulator.scenario.load import load_scenario
    from simulator.simulation.run import run
    from simulator.simulation.write import write_run
    from simulator.views.report import run_table

    mark("import")
    arguments = conv(19366)
    scenario = load_scenario(Path(arguments[0]), overrides=arguments[2::2])
    mark("read the scenario")
    scenario.make_workload()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--big", action="store_true", help="add a million requests")
    parser.add_argument("--profile", action="store_true", help="list the costliest functions")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    unit = timeouts()
    source = "the Azure 2023 conversation trace" if REAL else "a generated workload of its kind"
    print(f"conv is {source}; a million SimPy timeouts take {unit:.2f} s here\n")
    print(f"{'case':40} {'user s':>7} {'ratio':>6} {'wall s':>7} {'MB':>6}   target")
    users = {}
    for name, (arguments, target, memory) in {**CASES, **(BIG if options.big else {})}.items():
        runs = sorted(measure(arguments) for _ in range(1 if name in BIG else 3))
        user, wall, peak = runs[len(runs) // 2]
        users[name] = user
        wanted = f"{target} s" if target else ""
        wanted += f", {memory} MB" if memory else ""
        print(f"{name:40} {user:7.2f} {user / unit:6.2f} {wall:7.2f} {peak:6.0f}   {wanted}")
    print(f"\nvLLM's defaults take {users[VLLM] / users[PLAIN]:.2f} times as long as plain fcfs.")
    print("\nWhere the time of conv goes (user CPU, s):")
    for name, seconds in phases():
        print(f"  {name:30} {seconds:6.3f}")
    if options.profile:
        from simulator.scenario.load import load_scenario
        from simulator.simulation.run import run

        arguments = conv(19366)
        scenario = load_scenario(Path(arguments[0]), overrides=arguments[2::2])
        profile = cProfile.Profile()
        profile.runcall(run, scenario)
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
