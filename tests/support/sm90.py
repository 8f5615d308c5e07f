"""Compile the Triton kernels for an H100 or H200 where there is none, and tell what ptxas said.

The launches are the real ones, on CPU tensors: a driver that only knows the target's name stands
in for CUDA's, and every kernel is compiled instead of launched. So the hints that the compiler
gets (which arguments divide by 16) are those that a GPU run would give it. Run as a script, it
prints a line of JSON per compiled kernel.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gpu_backend.cuda import ops

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
MODELS = {  # heads, KV heads, dim, hidden, intermediate, norms
    "llama-3.1-8b": (32, 8, 128, 4096, 14336, False),
    "qwen3-0.6b": (16, 8, 128, 1024, 3072, True),
    "llama-3.2-1b": (32, 8, 64, 2048, 8192, False),
}


def compile_only() -> list[object]:
    """Make every launch compile and keep the result; return the list they are kept in."""
    compiled: list[object] = []
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    run = JITFunction.run

    def keep(self: JITFunction, *args: object, **options: object) -> None:
        compiled.append(run(self, *args, **{**options, "warmup": True}))

    JITFunction.run = keep
    return compiled


def launch_all(model: str) -> None:
    """Make each launch of a layer once: small batches, the shapes of the model."""
    heads, kv_heads, dim, hidden, wide, norms = MODELS[model]
    kind = torch.bfloat16
    cache = torch.zeros(2, 128, kv_heads, dim, dtype=kind)
    table, width = torch.zeros(32, 16, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    whole = torch.zeros(32, dtype=torch.int32)
    qkv = torch.zeros(32, (heads + 2 * kv_heads) * dim, dtype=kind)
    weight = torch.zeros(dim, dtype=kind) if norms else None
    turns = torch.zeros(64, dim)
    q = ops.rope_store(qkv, weight, weight, turns, whole, whole, *cache, 1e-6)
    out = torch.empty(32, heads, dim, dtype=kind)
    scratch = ops.Scratch.for_rows(32, heads, kv_heads, dim, torch.device("cpu"))
    for splits in (0, 1, 32):
        ops.decode(q, *cache, table, width, whole, out, scratch, splits=splits)
    new = np.array([32], np.int32)
    tiles = torch.from_numpy(ops.prefill_tiles(new * 0, new, 0))
    ops.prefill(q, *cache, table, width, tiles, out)
    x = torch.zeros(32, hidden, dtype=kind)
    ops.add_rmsnorm(None, x, x[0], 1e-6)
    ops.add_rmsnorm(x, x, x[0], 1e-6)
    ops.silu_mul(torch.zeros(32, 2 * wide, dtype=kind))


def describe(kernel: object) -> dict[str, object]:
    """Tell name, registers, stack, shared bytes, and which of the arguments have no hint."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run(
            [CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {key: int(re.search(rf"{key}:(\d+)", said)[1]) for key in ("REG", "STACK", "LOCAL")}
    head = re.search(r"tt\.func public @\w+\((.*?)\) attributes", kernel.asm["ttir"], re.DOTALL)[1]
    pointers = [word for word in re.split(r",\s*(?=%)", head) if "!tt.ptr" in word or "i32" in word]
    return {
        "name": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        **{key.lower(): value for key, value in usage.items()},
        "unhinted": [word.split(":")[0] for word in pointers if "divisibility = 16" not in word],
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "async_copies": "LDGSTS" in code,
        "matrix": sorted(set(re.findall(r"\b(HGMMA|HMMA|FFMA)\b", code))),
    }


if __name__ == "__main__":
    found = compile_only()
    launch_all(sys.argv[1])
    for kernel in found:
        print(json.dumps(describe(kernel)))
