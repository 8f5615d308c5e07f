"""Fit a profile to a file of measured steps of our own engine, with its `meta.json`; write it."""

import json
import platform
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibration.engine_steps.fit import CLOCKS, StepFit, fit_rows, with_name
from calibration.engine_steps.steps_file import Row, read_rows
from calibration.errors import Errors, Floats
from calibration.plots import plot_steps
from calibration.profile_yaml import (
    MEANINGS,
    cost_block,
    cost_lines,
    error_lines,
    head_lines,
    join_blocks,
    range_lines,
    residual_lines,
)
from calibration.text_files import read_json
from simulator.models.gpus import find_gpu
from simulator.util.environment import source_commit
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.files import write_atomic, write_together

if TYPE_CHECKING:
    from gpu_backend.engine import Engine

Meta = dict[str, object]

REQUIRED_KEYS = ("model", "gpu", "dtype", "clock", "block_size", "torch", "started", "commit")
STEPS, META = "steps.csv.gz", "meta.json"

Echo = Callable[[str], None]

ENGINE_MEANINGS = {
    "prefill_per_key": "prompts: per token that a chunk's queries can see",
    "prefill_per_sequence": "prompts: per chunk",
    "swap_out": "per request whose KV blocks a step copies to the host",
    "swap_out_per_block": "per block of them",
    "swap_in": "per request whose KV blocks come back",
    "swap_in_per_block": "per block of them",
    "head_per_sequence": "per sequence: its attention's start, its logits",
    "cudagraph_capture_sizes": "batches that pure decodes are padded to",
    "launch": "least time of the kernels of a step launched one by one",
}
NOT_TERMS = {"kind", "dense", "graph_dense", "graph_mixed"}
MIXED_SIZES = "cudagraph_mixed_sizes"
MAX_DRIFT = 0.02  # of the probe's median between two passes, above which a warning tells
CLOCK_WORDS = {
    "cpu": "CPU time of one thread, forward pass and the host's part",
    "wall": "wall time from schedule to tokens",
}


def profile_name(meta: Mapping[str, object]) -> str:
    """Name a profile by model, hardware and dtype, as shipped ones are.

    Of a GPU it also says whose kernels these are: no other engine takes these times.
    """
    key = str(meta["gpu"]).lower().split("-")[0].replace(" ", "")
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    own = ".headway" if meta["clock"] == "wall" else ""
    return f"{meta['model']}.{key}.{short[str(meta['dtype'])]}{own}"


def refit(source: Path, out: Path, echo: Echo = print) -> StepFit:
    """Fit a profile to a file of measured steps, meta.json beside it; write profile and plot."""
    if lacking := [one for one in (source, source.parent / META) if not one.is_file()]:
        raise HeadwayError(f"--from {source}: no such file: {lacking[0]}")
    meta = read_meta(source.parent / META)
    rows = read_rows(source)
    name = profile_name(meta)
    sizes = capture_sizes(meta, source.parent / META)
    clock = str(meta["clock"])
    mixed = capture_sizes(meta, source.parent / META, MIXED_SIZES)
    fit = with_name(fit_rows(rows, clock, sizes, mixed, launched=clock == "wall"), name)
    text = steps_profile(fit, meta).encode()
    title = f"Steps of {name}, predicted and measured"
    written = write_together(
        out,
        {
            f"{name}.yaml": text,
            "predicted-vs-measured.png": partial(plot_steps, title, _by_kind(fit)),
        },
    )
    for kind, errors in fit.held_out.items():
        echo(f"held out, {kind}: {errors}")
    _tell_drift(rows, clock, echo)
    if "onpolicy" not in fit.held_out:
        warnings.warn(
            f"{source}: has no steps of held-out runs; the errors are the grid's",
            HeadwayWarning,
            stacklevel=2,
        )
    echo(f"written to {out}: {', '.join(path.name for path in written)}")
    return fit


def _tell_drift(rows: Sequence[Row], clock: str, echo: Echo) -> None:
    """Tell how the probe, always the same step, changed from pass to pass."""
    passes: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.kind == "probe":
            passes[row.turn].append(CLOCKS[clock](row))
    if not passes:
        return
    medians = [float(np.median(passes[turn])) for turn in sorted(passes)]
    drift = max(medians) / min(medians) - 1.0
    line = f"probe: {', '.join(f'{1e3 * median:.3f}' for median in medians)} ms in the passes"
    echo(f"{line}, {drift:.1%} apart")
    if clock == "wall" and drift > MAX_DRIFT:
        warnings.warn(
            f"the probe's median drifted by {drift:.1%} between passes: clocks or neighbours "
            "changed while it was measured",
            HeadwayWarning,
            stacklevel=3,
        )


def _by_kind(fit: StepFit) -> dict[str, tuple[Floats, Floats]]:
    """Return every sample's predicted and measured seconds by kind; held-out runs apart."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in fit.samples:
        held = sample.row.point < 0 and sample.held_out
        name = "held-out runs" if held else sample.row.kind
        groups[name].append((fit.cost.execute(sample.row.step).seconds, sample.seconds))
    arrays = {name: np.array(pairs).T for name, pairs in sorted(groups.items())}
    return {name: (predicted, measured) for name, (predicted, measured) in arrays.items()}


def steps_profile(fit: StepFit, meta: Mapping[str, object]) -> str:
    """Write a profile as YAML."""
    model, gpu, dtype = meta["model"], meta["gpu"], meta["dtype"]
    hardware = {"gpu": gpu, "tensor_parallel_size": 1, "dtype": dtype, "kv_cache_dtype": dtype}
    title = f"What a step of {model} costs in our own torch engine on one {gpu}"
    terms = {k: v for k, v in cost_block(fit.cost).items() if v and k not in NOT_TERMS}
    blocks = (
        [
            *head_lines(title, "`headway calibrate` from measured steps", model, hardware),
            f"engine: headway gpu_backend, torch {meta['torch']}, blocks of {meta['block_size']}",
        ],
        [
            *cost_lines(terms, MEANINGS | ENGINE_MEANINGS),
            "  dense: # [tokens, seconds]: all that grows with the tokens, and what any step takes",
            *(f"  - [{tokens}, {seconds}]" for tokens, seconds in fit.cost.dense),
            *_graph_lines(fit),
        ],
        range_lines(fit.limits),
        residual_lines(fit.residuals, "sd of log(measured / fitted) of regions of steps held out"),
        _fit_lines(fit, CLOCK_WORDS[str(meta["clock"])]),
        [
            "sources:",
            f"- measured: {meta['started']} to {meta['ended']}, commit {meta['commit']}",
            f"  processor: {meta['processor']}",
        ],
    )
    return join_blocks(blocks)


def _graph_lines(fit: StepFit) -> Iterator[str]:
    if fit.cost.graph_dense:
        yield "  graph_dense: # [sequences, seconds]: the same of decodes in CUDA graphs, by size"
        yield from (f"  - [{size}, {seconds}]" for size, seconds in fit.cost.graph_dense)
    if fit.cost.graph_mixed:
        yield "  graph_mixed: # [tokens, seconds]: the same of steps with prompts in CUDA graphs"
        yield from (f"  - [{size}, {seconds}]" for size, seconds in fit.cost.graph_mixed)


def _fit_lines(fit: StepFit, clock: str) -> Iterator[str]:
    yield "fit: # relative errors of whole steps; points of the grid by their medians"
    yield f"  clock: {clock}"
    yield from _error_lines(fit.trained, "  ")
    yield "  held_out: # by a fit that had not seen them"
    for kind, errors in fit.held_out.items():
        yield f"    {kind}:"
        yield from _error_lines(errors, "      ")


def _error_lines(errors: Errors, indent: str) -> Iterator[str]:
    yield from error_lines(errors, indent)
    yield f"{indent}bias: {errors.bias:.4f}"


# What a measurement says of itself: the engine, the machine, the software.


def utc_now() -> str:
    """Return the time, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def describe_engine(engine: "Engine") -> Meta:
    """Tell what was measured, and on what."""
    import torch

    cuda = engine.device.type == "cuda"
    name = engine.gpu_name
    try:
        gpu = find_gpu(name).name
    except ValueError:
        gpu = name
    meta: Meta = {
        "model": engine.spec.name,
        "gpu": gpu,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "clock": "wall" if cuda else "cpu",
        "block_size": engine.block_size,
        "num_blocks": engine.num_blocks,
        **describe_machine(),
    }
    if engine.capture_sizes:
        meta["cudagraph_capture_sizes"] = engine.capture_sizes
    if engine.mixed_sizes:
        meta["cudagraph_mixed_sizes"] = engine.mixed_sizes
    if cuda:
        meta |= {"device": name, "cuda": torch.version.cuda}
    return meta


def describe_machine() -> Meta:
    """Tell the software and the processor."""
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "commit": source_commit(),
    }


def _processor() -> str:
    """Name the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "unknown")


def write_meta(path: Path, meta: Mapping[str, object]) -> None:
    """Write meta.json."""
    text = json.dumps(meta, indent=1) + "\n"
    write_atomic(path, text.encode())


def read_meta(path: Path) -> Meta:
    """Read meta.json; HeadwayError where it is damaged."""
    meta = read_json(path)
    if lacking := [key for key in REQUIRED_KEYS if key not in meta]:
        raise HeadwayError(f"{path}: is no description of a measurement: lacks {lacking}")
    if meta["clock"] not in {"cpu", "wall"} or not isinstance(meta["block_size"], int):
        raise HeadwayError(f"{path}: clock must be cpu or wall, block_size a whole number")
    return meta


def capture_sizes(meta: Meta, path: Path, name: str = "cudagraph_capture_sizes") -> list[int]:
    """Return the batches that had a CUDA graph, none on a CPU; HeadwayError where damaged.

    `cudagraph_mixed_sizes` names those of steps with prompts, in tokens.
    """
    sizes = meta.get(name, [])
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise HeadwayError(f"{path}: {name} must be whole numbers, not {sizes!r}")
    return sorted(set(sizes))
