"""What AIConfigurator recommends to buy, what `plan --buy` does, and how both stand in a long run.

    python benchmarks/recommend.py [--only 2] [--folder DIR]

Five problems: a model, a GPU, Poisson requests of one length and bounds on the means, as
AIConfigurator has them. It is installed from PyPI in a virtual environment under `--folder` (kept;
about 1 GB). Its aggregated answer (replicas, tensor parallelism, seats and token budget of the
command that it writes) and Headway's are then simulated for half an hour under three seeds that
neither has seen: `docs/comparison.md`. The judge is Headway's clock; a server may judge otherwise.
"""

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from against import install

from headway.planning.measure import measure_run
from simulator.results.service_levels import parse_slo
from simulator.scenario.load import load_scenario

PACKAGE = "aiconfigurator==0.12.0"
LONG, SEEDS = 1800.0, (101, 102, 103)  # s, of the runs that judge
FLAGS = {
    "tensor-parallel-size": "engine.tensor_parallel_size",
    "max-num-seqs": "engine.max_num_seqs",
    "max-num-batched-tokens": "engine.max_num_batched_tokens",
}


class Problem(NamedTuple):
    """A model and a GPU, by both tools' names, requests/s, tokens, and bounds in ms."""

    model: tuple[str, str]
    gpu: tuple[str, str]
    rate: float
    prompt: int
    answer: int
    ttft: float
    tpot: float

    @property
    def scenario(self) -> dict[str, Any]:
        """What Headway is given."""
        lengths = {"input_len": self.prompt, "output_len": self.answer}
        return {
            "name": "recommend",
            "model": self.model[0],
            "gpu": {"name": self.gpu[0]},
            "cluster": {"router": "least_outstanding"},
            "workload": {"num_prompts": 1000, "request_rate": self.rate, **lengths},
            "slo": [f"mean_ttft_ms<={self.ttft:g}", f"mean_tpot_ms<={self.tpot:g}"],
        }


LLAMA, QWEN = "meta-llama/Meta-Llama-3.1", "Qwen/Qwen3"
H100, H200, L40S = ("H100", "h100_sxm"), ("H200", "h200_sxm"), ("L40S", "l40s")
PROBLEMS = [
    Problem(("llama-3-8b", f"{LLAMA}-8B"), H100, 30, 1024, 256, 500, 20),
    Problem(("llama-3-8b", f"{LLAMA}-8B"), H200, 10, 3000, 150, 1000, 20),
    Problem(("qwen3-8b", f"{QWEN}-8B"), L40S, 8, 2000, 200, 2000, 60),
    Problem(("llama-3-70b", f"{LLAMA}-70B"), H200, 4, 2000, 400, 2000, 40),
    Problem(("qwen3-8b", f"{QWEN}-8B"), H100, 12, 1500, 300, 1000, 15),
]


def theirs(problem: Problem, bin: Path, folder: Path) -> tuple[dict[str, str], str]:
    """Return AIConfigurator's aggregated answer as keys, and what it needs with a split."""
    words = [f"{bin}/aiconfigurator", "cli", "recommend", "--backend", "vllm", "--strict-sla"]
    words += ["--model-path", problem.model[1], "--system", problem.gpu[1], "--top-n", "1"]
    words += ["--isl", f"{problem.prompt}", "--osl", f"{problem.answer}", "--save-dir", f"{folder}"]
    words += ["--target-request-rate", f"{problem.rate}"]
    words += ["--ttft", f"{problem.ttft}", "--tpot", f"{problem.tpot}"]
    if not [*folder.glob("**/best_config_topn.csv")]:
        subprocess.run(words, check=True, capture_output=True)
    rows = {
        path.parent.name: next(csv.DictReader(path.open()))
        for path in folder.glob("**/best_config_topn.csv")
    }
    command = next(folder.glob("**/agg/top1/run_0.sh")).read_text()
    keys = {key: re.search(rf'--{flag} "?(\d+)', command)[1] for flag, key in FLAGS.items()}  # type: ignore[index]
    apart = rows["disagg"]["total_gpus_needed"] if "disagg" in rows else "none"
    return keys | {"cluster.replicas": rows["agg"]["replicas_needed"]}, f"{apart} GPUs"


def ours(problem: Problem, folder: Path) -> dict[str, str]:
    """Return the answer of `plan --buy` as keys."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(problem.scenario))
    words = [sys.executable, "-m", "headway", "plan", str(path), "--buy"]
    words += ["--gpus", problem.gpu[0], "--precision", "bf16"]
    subprocess.run([*words, "--out", f"{folder}/plan", "--quiet"], check=True)
    report = json.loads((folder / "plan" / "plan.json").read_text())
    print("\n".join(f"    {line}" for line in report["answer"]), flush=True)
    best = report["candidates"][report["best"]]
    keys = {key: best[key] for key in FLAGS.values() if best.get(key) is not None}
    return keys | {"cluster.replicas": str(int(best["at"]))}


def judge(problem: Problem, keys: dict[str, str]) -> str:
    """Simulate a fleet for long, and say what the means are and whether anything breaks."""
    slos = [parse_slo(text) for text in problem.scenario["slo"]]
    told, broken, size = [], set(), keys["engine.tensor_parallel_size"]
    for seed in SEEDS:
        more = {"gpu.count": size, "workload.num_prompts": f"{problem.rate * LONG:.0f}"}
        scenario = load_scenario(problem.scenario, seed=seed, vary=(keys | more).items())
        run = measure_run(scenario, slos, steady=True)
        told.append([run["mean_ttft_ms"], run["mean_tpot_ms"]])
        broken |= {slo.metric for slo in slos if not slo.met(run[slo.metric])}
        broken |= {why for why in (run["broken"], run["growing"]) if why}
    ttft, tpot = (sum(column) / len(SEEDS) for column in zip(*told, strict=True))
    verdict = "breaks " + ", ".join(sorted(broken)) if broken else "keeps"
    gpus = int(keys["cluster.replicas"]) * int(size)
    return f"{gpus} GPUs {keys}: TTFT {ttft:.0f} ms, TPOT {tpot:.1f} ms: {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", type=int, action="append", help="number of a problem, from 1")
    folder = Path(tempfile.gettempdir()) / "headway-peers"
    parser.add_argument("--folder", type=Path, default=folder)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    bin = install(PACKAGE, options.folder)
    if bin is None:
        sys.exit(1)
    for number in options.only or range(1, len(PROBLEMS) + 1):
        problem = PROBLEMS[number - 1]
        print(f"{number}: {problem}", flush=True)
        keys, apart = theirs(problem, bin, options.folder / f"recommend-{number}")
        print(f"  AIConfigurator: {judge(problem, keys)}; with a split {apart}", flush=True)
        keys = ours(problem, options.folder / f"ours-{number}")
        print(f"  Headway: {judge(problem, keys)}", flush=True)


if __name__ == "__main__":
    main()
