"""Kernel timings and whole steps of a model, written to a CSV row by row as they are measured.

`python -m tools.campaign.timings --device cuda --out FOLDER` leaves `kernels.csv`,
`device.json` and `graph-tokens.txt` there, which is up to how many tokens CUDA graphs of steps with
prompts win. A section that fails becomes a row that says so, and the next one begins.
"""

import argparse
import csv
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import numpy as np
import torch

from gpu_backend.cuda.graphs import MIXED_SIZES, Graphs
from gpu_backend.engine import Engine
from simulator.core.request import Chunk, Request
from simulator.models.config_json import read_config
from simulator.models.load import MODELS
from simulator.util.files import write_atomic
from tools.campaign.eager import launched_one_by_one
from tools.campaign.kernel_timings import (
    LLAMA_8B,
    TINY,
    Bench,
    Row,
    ceilings,
    decodes,
    fused,
    matmuls,
    prefills,
)
from tools.campaign.runner import GRAPH_TOKENS

COLUMNS = (
    "kernel", "rows", "context", "tokens", "variant", "us", "gb_s", "tflop_s", "host_us",
    "launch_us", "kernels_us", "wall_us", "note",
)  # fmt: skip
Section = tuple[str, Callable[[], Iterator[Row]]]
PAGE = 16
REPEATS = 12
WARM_REPLAYS = 3  # before replays are timed
AHEAD_CYCLES = 40_000_000  # some 20 ms: a GPU that is busy for so long has all launches of a step
MIXED_DECODES = 16  # of a step with a prompt, at most


def steps(bench: Bench, model: str, *, graphs: bool = True) -> Iterator[Row]:
    """Time whole steps of a model: decodes in graphs and one by one, prompts, and both."""
    cuda = bench.cuda
    spec = read_config(MODELS / model / "config.json")  # needs less than load_model
    engine = Engine(spec, 24576 if cuda else 256, PAGE, bench.device, graphs=graphs)
    engine.fill_random()
    random = np.random.default_rng(0)
    batches = (
        [(1, 1024), (8, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024), (64, 4096)]
        if cuda
        else [(1, 64), (4, 64)]
    )
    for rows, context in batches:
        chunks = [_chunk(random, engine, k, context - 1, 1) for k in range(rows)]
        yield _step(engine, chunks, "graph" if engine.graphs is not None else "eager")
    for new, cached in [(512, 0), (2048, 0), (8192, 0), (2048, 4096)] if cuda else [(64, 0)]:
        yield _step(engine, [_chunk(random, engine, 0, cached, new)], "prompt")
    if engine.graphs is not None:
        with launched_one_by_one(engine):
            for rows, context in batches[:4]:
                chunks = [_chunk(random, engine, k, context - 1, 1) for k in range(rows)]
                yield _step(engine, chunks, "eager")


def mixed_steps(bench: Bench, model: str, path: Path, *, graphs: bool = True) -> Iterator[Row]:
    """Time steps with a prompt as graphs and launched one by one; write down which win as graphs.

    Each graph runs full, and with one token more than the size before it holds, as which it pads
    most. A size wins where the graph takes less time than the launches for both steps together;
    those up to the first size that does not are worth it.
    """
    cuda = bench.cuda
    spec = read_config(MODELS / model / "config.json")
    engine = Engine(
        spec, 24576 if cuda else 256, PAGE, bench.device, graphs=graphs, mixed_sizes=MIXED_SIZES
    )
    engine.fill_random()
    random = np.random.default_rng(0)
    if engine.graphs is not None:
        yield {"kernel": "graphs", "note": f"{engine.graphs.bytes / 2**20:.0f} MiB of all graphs"}
    best, before = 0, 1
    wins = True
    for size in engine.mixed_sizes or (8,):  # without graphs one step is timed as it is launched
        seconds = {"mixed graph": 0.0, "mixed": 0.0}
        for tokens in {before + 1, size}:
            decodes = min(MIXED_DECODES, tokens // 2)
            chunks = [_chunk(random, engine, k, 1023 if cuda else 63, 1) for k in range(decodes)]
            chunks.append(_chunk(random, engine, decodes, 0, tokens - decodes))
            if engine.mixed_sizes:
                row = _step(engine, chunks, "mixed graph")
                seconds["mixed graph"] += float(row["wall_us"])  # type: ignore[arg-type]
                yield row
            with launched_one_by_one(engine):
                row = _step(engine, chunks, "mixed")
            seconds["mixed"] += float(row["wall_us"])  # type: ignore[arg-type]
            yield row
        wins = wins and seconds["mixed graph"] < seconds["mixed"]
        best, before = size if wins else best, size
        if engine.mixed_sizes:
            write_atomic(path, f"{best}\n".encode())


def _chunk(random: np.random.Generator, engine: Engine, name: int, start: int, new: int) -> Chunk:
    """Make a request with random pages that computes `new` tokens after `start` cached ones."""
    pages = random.integers(1, engine.num_blocks, -(-(start + new) // PAGE)).tolist()
    return Chunk(Request(name, 0.0, start + new, 2, blocks=pages), start, new)


def _step(engine: Engine, chunks: list[Chunk], variant: str) -> Row:
    """Time one step; medians."""
    engine.reset()
    repeats = REPEATS if engine.device.type == "cuda" else 3
    done = [engine.execute(chunks, keep=False) for _ in range(2 + repeats)][2:]
    row: Row = {
        "kernel": "step", "rows": sum(chunk.tokens for chunk in chunks), "variant": variant,
        "context": chunks[0].start + chunks[0].tokens, "us": 1e6 * median(m.device_s for m in done),
        "tokens": sum(chunk.start + chunk.tokens for chunk in chunks),
        "host_us": 1e6 * median(m.host_s for m in done),
        "launch_us": 1e6 * median(m.launch_s for m in done),
        "wall_us": 1e6 * median(m.wall_s for m in done),
    }  # fmt: skip
    graphs, bucket = engine.graphs, done[0].bucket
    if graphs is not None and bucket:
        mixed = any(chunk.tokens > 1 for chunk in chunks)  # that graph ends before the logits
        row["kernels_us"] = 1e6 * _replay_seconds(graphs, bucket, repeats, mixed=mixed)
        row["note"] = f"padded to {bucket}"
    elif engine.device.type == "cuda":
        row["kernels_us"] = 1e6 * _seconds_of_kernels(engine, chunks, repeats)
    return row


def _replay_seconds(graphs: Graphs, size: int, repeats: int, *, mixed: bool) -> float:
    """Return the device's seconds of a replay of the graph that has just run: kernels alone."""
    graph = graphs.mixed[size][0] if mixed else graphs.captured[size][0]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    for _ in range(WARM_REPLAYS):
        graph.replay()
    events[0].record()
    for _ in range(repeats):
        graph.replay()
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) / 1e3 / repeats


def _seconds_of_kernels(engine: Engine, chunks: list[Chunk], repeats: int) -> float:
    """Time a step launched one by one behind work that lasts until all of it is launched.

    Nothing then waits for the host: what a graph of the step would take.
    """
    seconds = []
    for _ in range(repeats):
        torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        seconds.append(engine.execute(chunks, keep=False).device_s)
    return median(seconds)


def kernel_sections(bench: Bench) -> list[Section]:
    """The sections on single kernels, at sizes for a GPU or for a rehearsal."""
    if bench.cuda:
        batches = [(1, 1024), (1, 16384), (8, 1024), (16, 2048), (32, 2048), (64, 1024)]
        batches += [(64, 2048), (128, 1024), (128, 4096), (256, 2048)]
        chunks = [(512, 0), (2048, 0), (2048, 4096), (8192, 0), (512, 16384)]
        sizes: list[int] = [1, 64, 256, 2048]
    else:
        batches, chunks, sizes = [(2, 64)], [(32, 16)], [2]
    return [
        ("decode", lambda: decodes(bench, batches)),
        ("prefill", lambda: prefills(bench, chunks)),
        ("fused", lambda: fused(bench, sizes)),
        ("matmuls", lambda: matmuls(bench, sizes)),
    ]


def run_sections(sections: Sequence[Section], path: Path, until: float) -> int:
    """Write every section's rows as they come; count the sections that failed."""
    failed = 0
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, COLUMNS)
        out.writeheader()
        for name, section in sections:
            note = ""
            try:
                for row in section():
                    short = {k: f"{v:.4g}" for k, v in row.items() if isinstance(v, float)}
                    out.writerow(row | short)
                    file.flush()
                    if time.monotonic() > until:
                        note = "out of time"
                        break
            except ModuleNotFoundError as error:
                note = f"skipped: {error.name} is not installed"
            except Exception as error:  # whatever it is, the other sections go on
                note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                failed += 1
            if note:
                print(f"{name}: {note}", file=sys.stderr)
                out.writerow({"kernel": name, "note": note})
            if (
                torch.cuda.is_available()
            ):  # the next section's engine needs the memory of this one's
                gc.collect()
                torch.cuda.empty_cache()
    return failed


def describe_device(device: str) -> dict[str, object]:
    """Tell what machine and which versions this is."""
    found: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
    }
    for package in ("triton", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["memory_bytes"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
        query = "driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        found[query] = said.stdout.strip()
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Time everything; return the number of sections that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=120.0)
    parser.add_argument("--no-graphs", action="store_true", help="steps kernel by kernel alone")
    given = parser.parse_args(words)
    until = time.monotonic() + given.budget_s
    given.out.mkdir(parents=True, exist_ok=True)
    said = describe_device(given.device)
    (given.out / "device.json").write_text(json.dumps(said, indent=1) + "\n")
    bench = Bench(given.device, LLAMA_8B if "cuda" in given.device else TINY)
    sections: list[Section] = [
        ("ceilings", lambda: ceilings(bench)),
        ("step", lambda: steps(bench, given.model, graphs=not given.no_graphs)),
        (
            "mixed",
            lambda: mixed_steps(
                bench, given.model, given.out / GRAPH_TOKENS, graphs=not given.no_graphs
            ),
        ),
        *kernel_sections(bench),
    ]
    with torch.inference_mode():
        return run_sections(sections, given.out / "kernels.csv", until)


if __name__ == "__main__":
    sys.exit(main())
