"""Fit a whole cost profile to a server's own log of steps, or to a trace of torch's profiler.

vLLM names each step in the trace (`execute_context_1(512)_generation_3(3)`; with
`detailed_trace_annotation` also the tokens that they read, and the profiler's own file is
`*.pt.trace.json.gz`). A kernel belongs to the step within whose range it was launched, or before
the next one's began: sampling comes after the range. Launches and kernels share a `correlation`.
The shapes are those of vLLM 0.33 (`vllm/v1/worker/gpu_worker.py`, `annotate_profile`).
"""

import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from calibration.engine_steps.fit import HELD_OUT_PREFIX, fit_rows, with_buckets, with_name
from calibration.engine_steps.steps_file import Row, read_chunks
from calibration.errors import MAX_HELD_OUT_ERROR
from calibration.profile_yaml import how_to_use, scenario_profile
from calibration.text_files import read_json, read_rows
from headway.conformance.live import LiveRecord, is_live, read_live
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.files import write_atomic

FEWEST = 100  # steps
BLOCK = 20  # steps in a row; every fifth block is held out
PLAUSIBLE = 30.0  # times what the scenario's own cost says, or one part of it
UNITS = {"_s": 1.0, "_sec": 1.0, "_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9, "": 1.0}
DURATIONS = ("duration", "step_time", "wall", "seconds", "latency")
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


def calibrate_from_steps(source: Path, scenario: Scenario, out: Path) -> str:
    """Fit a profile to a log of steps, write it, and return the report."""
    cost = resolve(scenario).cost
    sizes = getattr(cost, "cudagraph_capture_sizes", ())
    rows = read_steps(source)
    fit = with_name(fit_rows(with_buckets(rows, sizes), "wall", sizes), scenario.name)
    path = out / f"{scenario.name}-steps.yaml"
    about = {
        "steps": len(rows),
        "held_out": {kind: asdict(errors) for kind, errors in fit.held_out.items()},
    }
    sources = [f"steps: {source.name}"]
    text = "# Written by `headway calibrate --from-steps`.\n"
    text += scenario_profile(scenario, fit.cost, fit.residuals, about, sources)
    write_atomic(path, text.encode())
    held_out = [f"held out: {fit.held_out['all']}"] if "all" in fit.held_out else []
    ratio = float(np.median([row.wall_s / cost.execute(row.step).seconds for row in rows]))
    doubts = []
    if not 1 / PLAUSIBLE < ratio < PLAUSIBLE:
        took = float(np.median([row.wall_s for row in rows]))
        doubts.append(
            f"a step takes {took:.3g} s, {ratio:.3g} times what the scenario's own cost says; is "
            "the unit of its column right?"
        )
    if "all" in fit.held_out and fit.held_out["all"].median > MAX_HELD_OUT_ERROR:
        doubts.append("half of the held-out steps are off by more than half: it explains nothing")
    if doubts:
        warnings.warn(
            f"{source}: the fit should not be used: {'; '.join(doubts)}",
            HeadwayWarning,
            stacklevel=2,
        )
    use = [] if doubts else [how_to_use(path, scenario)]
    return "\n".join([*held_out, f"written: {path}", *use])


def calibrate_from_profile(source: Path, scenario: Scenario | None, out: Path) -> tuple[str, bool]:
    """Write the steps of a torch profiler's trace, tell where their time went, fit a profile.

    Gives the report, and whether it did all that was asked for. Without a scenario, or where the
    trace does not tell what decodes read, nothing is fitted.
    """
    steps = read_profile_steps(source)
    path = write_atomic(out / "steps.csv", steps_csv(steps).encode())
    told = [report(steps), f"written: {path}"]
    unread = any(step.context is None for step in steps)
    if unread:
        told.append(
            "The trace does not say how many tokens the decodes read, so no profile is fitted: "
            "profile with detailed_trace_annotation in --profiler-config"
        )
    elif scenario is None:
        told.append("With --scenario a profile is fitted to them")
    else:
        told.append(calibrate_from_steps(path, scenario, out))
    return "\n".join(told), not (unread and scenario)


def read_steps(path: Path) -> list[Row]:
    """Read a log of steps in order; HeadwayError tells file, line and what is wrong.

    It is what `headway.vllm.RecordedScheduler` writes on a server, or a table. Columns:
    `decodes` (sequences that advance by a token), `context` (tokens in their KV caches
    in all), `chunks` (pieces of prompts, `cached+new` with blanks between them) or
    `prefill_tokens` (one piece without history), and the step's time, `duration_s` or `_ms`.
    """
    live = is_live(path)
    cells = [*_live_cells(read_live(path))] if live else read_rows(path)
    known = list(cells[0]) if cells else []
    times = [(w + s, unit) for w in DURATIONS for s, unit in UNITS.items() if w + s in known]
    prompts = next((name for name in ("chunks", "prefill_tokens") if name in known), None)
    if {"device_s", "point"} <= {*known}:
        raise HeadwayError(f"{path}: these are steps of `headway calibrate`; --from fits them")
    lacking = [name for name in ("decodes", "context") if name not in known]
    lacking += [] if prompts else ["chunks or prefill_tokens"]
    lacking += [] if times else ["duration_s"]
    if lacking:
        more = "; these are steps of `headway run`, which were simulated, not measured"
        more = more if {"start", "end"} <= {*known} else ""
        raise HeadwayError(f"{path}:1: lacks the column {', '.join(lacking)}{more}")
    if len(cells) < FEWEST:
        raise HeadwayError(f"{path}: {len(cells)} steps are too few to fit: it takes {FEWEST}")
    assert prompts is not None
    return [
        _row(f"{path}:{number + 2}", number, cell, times[0], prompts)
        for number, cell in enumerate(cells)
    ]


def _live_cells(record: LiveRecord) -> Iterator[dict[str, str]]:
    """Yield the steps of a live server's record as rows of such a table."""
    prompts = [row["prompt_len"] for row in record.arrivals]
    for row, before_it in zip(record.steps, _host_between(record), strict=True):
        decodes = context = 0
        chunks = []
        for number, tokens, before in row["sched"]:
            if tokens == 1 and before >= prompts[number]:
                decodes, context = decodes + 1, context + before + 1
            else:
                chunks.append(f"{before}+{tokens}")
        if row["sched"]:
            yield {
                "decodes": f"{decodes}",
                "context": f"{context}",
                "chunks": " ".join(chunks),
                "duration_s": f"{(row['dur'] + before_it) / 1e9!r}",
            }


def _host_between(record: LiveRecord) -> list[int]:
    """Return the ns from the step before until each was scheduled, where somebody waited meanwhile.

    A synchronous engine sends tokens and takes requests in then; an asynchronous one schedules
    before, and has none. Where nobody was there, the server was idle.
    """
    came = sorted(row["t"] for row in record.arrivals)
    left = sorted([row["t"] for row in (*record.ends.values(), *record.aborts)])
    found, end = [], 0
    for row in record.steps:
        start = max(row["t"], end)
        there = bisect_right(came, end) - bisect_right(left, row["t"])
        found.append(start - end if there > 0 and end else 0)
        end = start + row["dur"]
    return found


def _row(
    place: str, number: int, cell: Mapping[str, str], time: tuple[str, float], prompts: str
) -> Row:
    def read(name: str, kind: Callable[[str], Any]) -> Any:
        try:
            return kind(cell[name] or "0")
        except (ValueError, OverflowError):
            raise HeadwayError(f"{place}: {name}: {cell[name]!r} is no number") from None

    decodes, context = (read(name, lambda x: int(float(x))) for name in ("decodes", "context"))
    seconds = read(time[0], float) * time[1]
    try:
        chunks = read_chunks(cell[prompts]) if prompts == "chunks" else ()
    except ValueError as error:
        raise HeadwayError(f"{place}: chunks: {error}") from None
    if prompts == "prefill_tokens" and (new := read(prompts, lambda x: int(float(x)))) > 0:
        chunks = ((0, new),)
    if not 0 < seconds < 1e6:
        raise HeadwayError(f"{place}: {time[0]}: a step cannot take {cell[time[0]]}")
    if decodes < 0 or context < decodes or not (decodes or chunks):
        raise HeadwayError(f"{place}: {decodes} decodes over {context} tokens: impossible")
    held = number // BLOCK % 5 == 4
    return Row(
        run=f"{HELD_OUT_PREFIX}-log" if held else "log",
        kind="onpolicy",
        turn=number,
        decodes=decodes,
        context=context,
        longest=int(np.ceil(context / decodes)) if decodes else 0,
        chunks=chunks,
        device_s=seconds,
        wall_s=seconds,
    )


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
    """Yield the steps that have kernels, in the order of their launches."""
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
    """Describe where the time of decodes and of steps with prompts went, in ms per step."""
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
