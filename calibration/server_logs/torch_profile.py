"""Read a trace of torch's profiler from a vLLM server: its steps, and where their time went.

vLLM names each step in the trace (`execute_context_1(512)_generation_3(3)`; with
`detailed_trace_annotation` also the tokens that they read, and the profiler's own file is
`*.pt.trace.json.gz`). A kernel belongs to the step within whose range it was launched, or before
the next one's began: sampling comes after the range. Launches and kernels share a `correlation`.
The shapes are those of vLLM 0.33 (`vllm/v1/worker/gpu_worker.py`, `annotate_profile`).
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibration.text_files import read_json
from simulator.util.errors import HeadwayError

KINDS = ("gemm", "attention", "all_reduce", "other")
WORDS = {
    "all_reduce": ("nccl", "all_reduce", "allreduce", "cross_device_reduce", "all_gather",
                   "reduce_scatter", "multimem", "lamport"),
    "attention": ("flash", "fmha", "attention", "attn", "mla", "paged", "splitkv", "mha",
                  "reshape_and_cache"),
    "gemm": ("gemm", "cutlass", "cublas", "nvjet", "matmul", "gemv", "xmma", "marlin", "moe",
             "deep_gemm", "splitk", "wgmma"),
}  # fmt: skip
"""Words in the names of kernels, in the order in which they are looked for: attention kernels of
FlashAttention 3 are CUTLASS's, too."""
STEP = re.compile(
    r"execute_(?:\d+_)?context_(?P<prompts>\d+)\((?P<prompt>[^)]*)\)"
    r"_generation_(?P<decodes>\d+)\((?P<decode>[^)]*)\)$"
)
SUMS = re.compile(r"sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)$")
LAUNCHES = ("cuda_runtime", "cuda_driver")
GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
LONGEST_GAP = 2e-3  # s without a kernel between two steps, above which the server was idle


@dataclass
class ProfiledStep:
    """One step: what it computed, and its seconds on the GPU."""

    decodes: int
    context: int | None  # KV entries that they read; None: the trace does not say
    chunks: list[tuple[int, int]]  # of prompts: (cached, new)
    start: float = 0.0  # s, of the first kernel
    end: float = 0.0  # s, of the last
    duration: float = 0.0  # s, to the next step's first kernel where that follows at once
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))


def kernel_kind(name: str) -> str:
    """Say what a kernel does by its name: gemm, attention, all_reduce or other."""
    lower = name.lower()
    return next((kind for kind, words in WORDS.items() if any(w in lower for w in words)), "other")


def parse_step(name: str) -> ProfiledStep | None:
    """Read the name that vLLM gives a step; None where it is another range's."""
    found = STEP.match(name)
    if found is None:
        return None
    prompts, decodes = int(found["prompts"]), int(found["decodes"])
    said = SUMS.match(found["prompt"]), SUMS.match(found["decode"])
    if said[0] and said[1]:
        new, end = int(said[0][1]), int(said[0][2])
        return ProfiledStep(decodes, int(said[1][2]), _even(prompts, end - new, new))
    new = int(found["prompt"])
    return ProfiledStep(decodes, None if decodes else 0, _even(prompts, 0, new))


def _even(count: int, cached: int, new: int) -> list[tuple[int, int]]:
    """Share tokens out evenly among the pieces of prompts, of which the trace tells the sums."""
    shares = [
        (cached * (k + 1) // count - cached * k // count, new * (k + 1) // count - new * k // count)
        for k in range(count)
    ]
    return [(start, size) for start, size in shares if size]


def read_profile_steps(path: Path) -> list[ProfiledStep]:
    """Read the steps of a trace in order; HeadwayError where it has none."""
    events = read_json(path).get("traceEvents")
    if not isinstance(events, list):
        raise HeadwayError(f"{path}: is no trace of torch's profiler: has no traceEvents")
    whole = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    try:
        steps = [*_steps(whole)]
    except (KeyError, TypeError, ValueError) as error:
        raise HeadwayError(f"{path}: damaged: an event lacks {error}") from None
    if not steps:
        raise HeadwayError(
            f"{path}: has no steps of vLLM's with kernels (ranges `execute_context_...`): profile "
            "a server's GPU, `--profiler-config`"
        )
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        gap = after.start - step.end if after else LONGEST_GAP
        step.duration = (after.start if after and gap < LONGEST_GAP else step.end) - step.start
    return steps


def _steps(events: Sequence[Mapping[str, Any]]) -> Iterator[ProfiledStep]:
    """Give the steps that have kernels, in the order of their launches."""
    ranges = sorted(
        (float(event["ts"]), str(event["name"]))
        for event in events
        if event.get("cat") == "user_annotation" and parse_step(str(event["name"]))
    )
    begins = [begin for begin, _ in ranges]
    found = [parse_step(name) for _, name in ranges]
    where: dict[int, int] = {}  # the step of a correlation
    for event in events:
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {}):
            where[event["args"]["correlation"]] = bisect_right(begins, float(event["ts"])) - 1
    for event in events:
        if event.get("cat") not in GPU_EVENTS:
            continue
        number = where.get(event.get("args", {}).get("correlation"), -1)
        step = found[number] if number >= 0 else None
        if step is None:
            continue
        start = float(event["ts"]) / 1e6
        end = start + float(event["dur"]) / 1e6
        step.start = min(step.start or start, start)
        step.end = max(step.end, end)
        kind = kernel_kind(str(event["name"])) if event["cat"] == "kernel" else "other"
        step.seconds[kind] += end - start
    yield from (step for step in found if step is not None and step.end > step.start)


def steps_csv(steps: Sequence[ProfiledStep]) -> str:
    """Write steps as `--from-steps` reads them, the seconds of their kernels beside."""
    lines = [f"decodes,context,chunks,duration_s,{','.join(f'{kind}_s' for kind in KINDS)}"]
    for step in steps:
        pieces = " ".join(f"{start}+{new}" for start, new in step.chunks)
        times = ",".join(f"{step.seconds[kind]:.7f}" for kind in KINDS)
        context = "" if step.context is None else step.context
        lines.append(f"{step.decodes},{context},{pieces},{step.duration:.7f},{times}")
    return "\n".join(lines) + "\n"


def report(steps: Sequence[ProfiledStep]) -> str:
    """Tell where the time of decodes and of steps with prompts went, in ms per step."""
    import numpy as np

    head = f"{'ms per step':<14}{'steps':>7}{'tokens':>9}{'step':>9}"
    lines = [head + "".join(f"{kind.replace('_', '-'):>12}" for kind in (*KINDS, "idle"))]
    groups = {
        "decode": [step for step in steps if not step.chunks],
        "with prompts": [step for step in steps if step.chunks],
    }
    for name, chosen in groups.items():
        if not chosen:
            continue
        tokens = [step.decodes + sum(new for _, new in step.chunks) for step in chosen]
        total = np.array([step.duration for step in chosen])
        parts = np.array([[step.seconds[kind] for kind in KINDS] for step in chosen])
        idle = np.maximum(total - parts.sum(axis=1), 0.0)
        cells = [*parts.mean(axis=0), idle.mean()]
        row = f"{name:<14}{len(chosen):>7,}{np.mean(tokens):>9.1f}{1e3 * total.mean():>9.3f}"
        lines.append(row + "".join(f"{1e3 * cell:>12.3f}" for cell in cells))
    return "\n".join(lines)
