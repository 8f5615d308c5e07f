"""Compile every kernel variant that checks, timings and engines launch, side by side, before any of
them runs; and tell what became of each.

The launches are the real ones, on CPU tensors: a driver that only knows the target's name stands
in for CUDA's, and every kernel is compiled instead of launched. So the hints that the compiler gets
(which arguments divide by 16) are those of a GPU run, which then finds the kernels in Triton's
cache. It needs no GPU: `--capability 90` says for which one. A line of JSON per kernel is printed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gpu_backend.cuda import ops
from gpu_backend.input_batch import prefill_tiles
from tools.campaign.runner import die_with

Found = dict[str, Any]
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that one program may have, by compute capability (CUDA C programming guide, table
of technical specifications: 163 KB, 227 KB, 227 KB)."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer whose kernels are launched."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int = 0  # 0: attention alone
    wide: int = 0
    norms: bool = False
    dtype: str = "bfloat16"


LAYERS = {
    "llama-3.1-8b": Layer(32, 8, 128, 4096, 14336),
    "llama-3.2-1b": Layer(32, 8, 64, 2048, 8192),
    "qwen3-0.6b": Layer(16, 8, 128, 1024, 3072, norms=True),
    "checks": Layer(4, 2, 64, 96, 96, norms=True, dtype="float32"),
    "checks-texts": Layer(4, 2, 32, 64, 96, norms=True, dtype="float32"),
}
"""Shapes by name. Those of float32 are the checks' own."""
Launch = tuple[str, Callable[[], None]]


def decode_launch(layer: Layer, splits: int) -> None:
    """Launch decode attention of one layer."""
    rows = 32
    kind = getattr(torch, layer.dtype)
    cache = torch.zeros(2, 128, layer.kv_heads, layer.dim, dtype=kind)
    table, width = torch.zeros(rows, 16, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    wide = torch.zeros(rows, layer.heads + 2 * layer.kv_heads, layer.dim, dtype=kind)
    q = wide[:, : layer.heads]
    cells = rows * layer.heads * ops.MAX_SPLITS
    scratch = ops.Scratch(torch.zeros(cells * layer.dim), torch.zeros(cells))
    paged = ops.PagedLayer(cache[0], cache[1], table, width)
    lengths, out = torch.zeros(rows, dtype=torch.int32), torch.zeros(q.shape, dtype=kind)
    ops.decode(q, paged, lengths, out, scratch, splits=splits)


def prefill_launch(layer: Layer) -> None:
    """Launch prefill attention of one layer."""
    kind = getattr(torch, layer.dtype)
    cache = torch.zeros(2, 128, layer.kv_heads, layer.dim, dtype=kind)
    table, width = torch.zeros(32, 16, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    q = torch.zeros(32, layer.heads, layer.dim, dtype=kind)
    new = np.array([32], np.int32)
    tiles = torch.from_numpy(prefill_tiles(new * 0, new, 0, ops.prefill_cut(kind).rows))
    paged = ops.PagedLayer(cache[0], cache[1], table, width)
    ops.prefill(q, paged, tiles, torch.empty_like(q))


def other_launches(layer: Layer) -> None:
    """Launch what else a layer has: norm, rotation and store, activation."""
    kind = getattr(torch, layer.dtype)
    cache = torch.zeros(2, 128, layer.kv_heads, layer.dim, dtype=kind)
    whole = torch.zeros(32, dtype=torch.int32)
    qkv = torch.zeros(32, (layer.heads + 2 * layer.kv_heads) * layer.dim, dtype=kind)
    turns = torch.zeros(64, layer.dim)
    for weight in {None, torch.zeros(layer.dim, dtype=kind) if layer.norms else None}:
        ops.rope_store(
            qkv,
            weight,
            weight,
            turns=turns,
            positions=whole,
            slots=whole,
            keys=cache[0],
            values=cache[1],
            eps=1e-6,
        )
    x = torch.zeros(32, layer.hidden, dtype=kind)
    ops.add_rmsnorm(None, x, x[0], 1e-6)
    ops.add_rmsnorm(x, x, x[0], 1e-6)
    ops.silu_mul(torch.zeros(32, 2 * layer.wide, dtype=kind))


def launches(names: Sequence[str]) -> Iterator[Launch]:
    """List what is to be compiled for some layers."""
    for name in names:
        layer = LAYERS[name]
        yield name, partial(prefill_launch, layer)
        for splits in (1, 2, 4, 8, 16, 32):
            yield name, partial(decode_launch, layer, splits)
        yield name, partial(other_launches, layer)


def compile_only(capability: int) -> list[Any]:
    """Make every launch compile for a target, and keep the result; return where it is kept."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    stand_in = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    driver.set_active(stand_in)
    run = JITFunction.run

    def keep(self: Any, *given: object, **options: object) -> None:
        compiled.append(run(self, *given, **{**options, "warmup": True}))

    JITFunction.run = keep
    return compiled


def compile_some(capability: int, some: Sequence[Launch], *, describes: bool) -> list[Found]:
    """Compile a few launches, in a process of its own; tell of each kernel."""
    torch.set_num_threads(1)
    compiled = compile_only(capability)
    found = []
    for name, launch in some:
        begun, before = time.perf_counter(), len(compiled)
        try:
            launch()
        except Exception as error:  # the others go on
            found.append({"layer": name, "name": "", "error": f"{type(error).__name__}: {error}"})
            continue
        took = time.perf_counter() - begun
        for kernel in compiled[before:]:
            row = {"layer": name, "name": kernel.metadata.name, "seconds": round(took, 2)}
            found.append(row | (describe(kernel) if describes else {}))
    return found


def describe(kernel: Any) -> Found:
    """Tell registers, stack, shared bytes, and which of the arguments have no hint.

    `waits` are those of the asynchronous copies that were left in flight: with none above 0
    nothing is loaded while a tile is computed.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def dump(option: str) -> str:
        words = [str(tool), option, file.name]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said, code = dump("-res-usage"), dump("-sass")
    ttgir = str(kernel.asm["ttgir"])
    usage = {key: int(_first(rf"{key}:(\d+)", said)) for key in ("REG", "STACK", "LOCAL")}
    head = _first(r"tt\.func public @\w+\((.*?)\) attributes", kernel.asm["ttir"])
    pointers = [word for word in re.split(r",\s*(?=%)", head) if "!tt.ptr" in word or "i32" in word]
    return {
        "shared": kernel.metadata.shared,
        **{key.lower(): value for key, value in usage.items()},
        "unhinted": [word.split(":")[0] for word in pointers if "divisibility = 16" not in word],
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "async_copies": "LDGSTS" in code,
        "waits": sorted({int(n) for n in re.findall(r"async_wait.*?num = (\d+)", ttgir)}),
        "matrix": sorted(set(re.findall(r"\b(HGMMA|HMMA|FFMA|UTCHMMA|UTCQMMA)\b", code))),
    }


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.DOTALL)
    assert found is not None, pattern
    return found[1]


def precompile(
    capability: int, chosen: Sequence[Launch], jobs: int, *, describes: bool = False
) -> Iterator[Found]:
    """Compile launches in parallel processes; give what is told of each kernel as it is there."""
    jobs = max(1, min(jobs, len(chosen)))
    shares = [chosen[k::jobs] for k in range(jobs)]
    with ProcessPoolExecutor(
        jobs, get_context("spawn"), initializer=die_with, initargs=(os.getpid(),)
    ) as pool:
        tasks = [pool.submit(compile_some, capability, one, describes=describes) for one in shares]
        for task in as_completed(tasks):
            yield from task.result()


def main(words: Sequence[str] | None = None) -> int:
    """Compile; the exit code is 1 where a kernel cannot be."""
    parser = argparse.ArgumentParser(prog="tools.campaign.precompile", description=__doc__)
    parser.add_argument("--capability", type=int, default=0, help="90 for an H100 [default: here]")
    parser.add_argument("--layers", default=",".join(LAYERS), help="names, with commas")
    parser.add_argument("--describe", action="store_true", help="print registers, spills and so on")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(words)
    capability = given.capability
    if not capability:
        if not torch.cuda.is_available():
            parser.error("--capability: there is no GPU here to ask")
        capability = 10 * torch.cuda.get_device_capability()[0]
        capability += torch.cuda.get_device_capability()[1]
    chosen = list(launches(given.layers.split(",")))
    wrong = 0
    for row in precompile(capability, chosen, given.jobs, describes=given.describe):
        wrong += "error" in row
        print(json.dumps(row), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
