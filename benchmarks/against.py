"""User CPU and memory of Headway and its peers on the same work, in turns: `docs/comparison.md`.

    python benchmarks/against.py [--rounds 5] [--only conv] [--peer "DynoSim, polynomial"]

Installs DynoSim (the replay of `ai-dynamo`) and AISimulate from PyPI, in a virtual environment each
under `--folder` (kept; about 1.5 GB), and runs all of them on one engine: Llama-3-8B, at most 256
requests and 512 tokens in a step, 27,000 KV blocks of 16 tokens, chunked prefill, no prefix cache.
The peers read the requests as Mooncake JSONL; Headway as its scenario says, once more with vLLM's
defaults, and from that very file. The work is that of the Azure 2023 conversation trace where
HEADWAY_DATA names a folder that holds it, else of a generated workload with its statistics.

A round runs every tool once, one after the other, so what disturbs the machine disturbs them alike.
A ratio is the median over the rounds of Headway's user CPU by the tool's in the same round; beside
it the least and the greatest. A round before the first, which is not counted, warms up all caches.
A peer that cannot be installed is left out, with a word.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import venv
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from measure import Usage, headway_run, measure
from speed import CONV, POISSON, VLLM_KEYS, conv, timeouts

from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.workload.traces import write_mooncake

BLOCKS = 27_000
ENGINE = [f"engine.num_gpu_blocks_override={BLOCKS}", "engine.block_size=16"]
CASES = {
    "poisson2k": [f"workload={POISSON}"],
    "conv": conv(19366),
    "conv100k": conv(100_000),
}
HEADWAY = "Headway"

Run = Callable[[], Usage]


@dataclass(frozen=True)
class Peer:
    """Another simulator: what pip installs, and how it is called with a trace of requests.

    `command(bin, trace, folder)` may write what it needs, and reports, to the folder.
    """

    package: str  # words of pip
    command: Callable[[Path, Path, Path], list[str]]


DYNOSIM = {
    "num_gpu_blocks": BLOCKS,
    "block_size": 16,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": True,
}
REPLAY = """
import json, sys
from dynamo.replay.api import run_trace_replay
options = json.loads(sys.argv[1])
if "engine" not in options:
    from dynamo.mocker import MockEngineArgs
    options = MockEngineArgs.from_json(sys.argv[1])
found = run_trace_replay([sys.argv[2]], extra_engine_args=options)
open(sys.argv[3], "w").write(json.dumps(found.summary))
"""
"""From 1.5 on the command is AISimulate's, which fetches its wheel from an index of NVIDIA's.

1.5 takes its engine's options as an object, 1.6 as a mapping.
"""


def dynosim(bin: Path, trace: Path, folder: Path) -> list[str]:
    """Replay a trace in DynoSim; its timing is a polynomial."""
    engine = json.dumps({"engine_type": "vllm", **DYNOSIM})
    words = ["--extra-engine-args", engine, "--report-json", f"{folder}/report.json"]
    return [f"{bin}/python", "-m", "dynamo.replay", *words, str(trace)]


def dynosim_core(engine: dict[str, Any], bin: Path, trace: Path, folder: Path) -> list[str]:
    """Replay a trace in the core of a newer DynoSim, without its command."""
    return [f"{bin}/python", "-c", REPLAY, json.dumps(engine), str(trace), f"{folder}/report.json"]


def aisimulate(timing: str, bin: Path, trace: Path, folder: Path) -> list[str]:
    """Replay a trace in AISimulate, by the polynomial or by kernels measured on an H100."""
    worker = {
        "parallelism": {"tensor": 1},
        "scheduler": {"max_batched_tokens": 512, "max_sequences": 256},
        "kv_cache": {
            "block_size": 16,
            "prefix_caching": False,
            "capacity": {"type": "fixed", "blocks": BLOCKS},
        },
        "timing": {"type": timing},
    }
    config = {
        "engine": {
            "model": "meta-llama/Meta-Llama-3.1-8B",
            "hardware": "h100_sxm",
            "backend": "vllm",
            "workers": {"aggregated": worker},
        },
        "traffic": {
            "source": {"type": "trace", "paths": [str(trace)], "block_size": 512},
            "load": {"type": "trace_timestamps"},
        },
    }
    path = folder / f"{timing}.yaml"
    path.write_text(yaml.safe_dump(config))
    out = ["--output-dir", f"{folder}/{timing}", "--overwrite"]
    return [f"{bin}/aisimulate", "predict", "-c", str(path), *out]


AISIMULATE = "aisimulate==0.13.0.dev202610270000000085"
NEWER = "--no-deps ai-dynamo=={0} ai-dynamo-runtime=={0} typing-extensions"
PEERS = {
    "DynoSim, polynomial": Peer("ai-dynamo==1.4.2", dynosim),
    "DynoSim 1.5.1, polynomial": Peer(
        NEWER.format("1.5.1"), partial(dynosim_core, {"engine_type": "vllm", **DYNOSIM})
    ),
    "DynoSim 1.6.1, polynomial": Peer(
        NEWER.format("1.6.1"), partial(dynosim_core, {"engine": {"backend": "vllm", **DYNOSIM}})
    ),
    "AISimulate, polynomial": Peer(AISIMULATE, partial(aisimulate, "polynomial")),
    "AISimulate, measured kernels": Peer(AISIMULATE, partial(aisimulate, "default")),
}


def install(package: str, folder: Path) -> Path | None:
    """Install a package in a virtual environment of its own; None where it cannot be had."""
    place = folder / package.replace("==", "-").removeprefix("--no-deps ").partition(" ")[0]
    done = place / "installed"
    if not done.exists():
        print(f"installing {package} in {place}", flush=True)
        venv.create(place, with_pip=True, clear=True)
        pip = [f"{place}/bin/python", "-m", "pip", "install", "--quiet", *package.split()]
        found = subprocess.run(pip, check=False, capture_output=True, text=True)
        if found.returncode:
            print(f"{package} is left out: {found.stderr.strip().splitlines()[-1]}")
            return None
        done.touch()
    return place / "bin"


def tools(case: str, bins: dict[str, Path], folder: Path) -> dict[str, Run]:
    """Say how each tool does a case; write the trace that the peers read."""
    overrides = [*CASES[case], *ENGINE]
    trace = folder / "trace.jsonl"
    write_mooncake(make_workload(load_scenario(CONV, overrides)), trace)
    file = f"workload={{trace: {{path: {trace}, format: mooncake}}}}"
    found: dict[str, Run] = {
        HEADWAY: lambda: headway_run(CONV, overrides),
        f"{HEADWAY}, vLLM's defaults": lambda: headway_run(CONV, [*overrides, *VLLM_KEYS]),
        f"{HEADWAY}, the peers' file": lambda: headway_run(CONV, [file, *ENGINE]),
    }
    for name, bin in bins.items():
        command = PEERS[name].command(bin, trace, folder)
        found[name] = lambda command=command: measure(command)  # type: ignore[misc]
    return found


def show(case: str, usages: dict[str, list[Usage]]) -> None:
    """Print a row for each tool."""
    ours = [usage.user for usage in usages[HEADWAY]]
    print(f"\n{case:30} {'user s':>7} {'wall s':>7} {'MB':>6} {'Headway by it':>20}")
    for name, found in usages.items():
        seconds = median(usage.user for usage in found)
        wall, memory = median(u.wall for u in found), median(u.memory for u in found)
        ratios = sorted(a / b.user for a, b in zip(ours, found, strict=True))
        ratio = f"{median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        print(f"{name:30} {seconds:7.2f} {wall:7.2f} {memory:6.0f} {ratio:>20}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=CASES, action="append", help="a case; may be repeated")
    parser.add_argument("--peer", choices=PEERS, action="append", help="one; may be repeated")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "headway-peers"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    peers = {name: PEERS[name] for name in options.peer or PEERS}
    packages = {peer.package for peer in peers.values()}
    places = {package: install(package, options.folder) for package in packages}
    bins = {name: place for name, peer in peers.items() if (place := places[peer.package])}
    print(f"a million SimPy timeouts take {timeouts():.2f} s here; {sys.version.split()[0]}")
    for case in options.only or CASES:
        with tempfile.TemporaryDirectory() as folder:
            runs = tools(case, bins, Path(folder))
            usages: dict[str, list[Usage]] = {name: [] for name in runs}
            for at in range(options.rounds + 1):
                for name, run in runs.items():
                    usage = run()
                    if at:
                        usages[name].append(usage)
        show(case, usages)


if __name__ == "__main__":
    main()
