"""Fit a profile to a file of measured steps of our own engine, and write it."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from calibration.engine_steps.fit import StepFit, fit_rows, with_name
from calibration.engine_steps.meta import capture_sizes, read_meta
from calibration.engine_steps.steps_file import read_rows
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
from simulator.util.errors import HeadwayWarning
from simulator.util.files import write_together

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
}
NOT_TERMS = {"kind", "dense"}
CLOCK_WORDS = {
    "cpu": "CPU time of one thread, forward pass and the host's part",
    "wall": "wall time from schedule to tokens",
}


def profile_name(meta: Mapping[str, object]) -> str:
    """Name a profile by model, hardware and dtype, as shipped ones are."""
    key = str(meta["gpu"]).lower().split("-")[0].replace(" ", "")
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return f"{meta['model']}.{key}.{short[str(meta['dtype'])]}"


def refit(source: Path, out: Path, echo: Echo = print) -> StepFit:
    """Fit a profile to a file of measured steps, meta.json beside it; write profile and plot."""
    meta = read_meta(source.parent / META)
    rows = read_rows(source)
    name = profile_name(meta)
    sizes = capture_sizes(meta, source.parent / META)
    fit = with_name(fit_rows(rows, str(meta["clock"]), sizes), name)
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
    if "onpolicy" not in fit.held_out:
        warnings.warn(
            f"{source}: has no steps of held-out runs; the errors are those of the grid",
            HeadwayWarning,
            stacklevel=2,
        )
    echo(f"written to {out}: {', '.join(path.name for path in written)}")
    return fit


def _by_kind(fit: StepFit) -> dict[str, tuple[Floats, Floats]]:
    """Give every sample's predicted and measured seconds by kind; held-out runs apart."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in fit.samples:
        held = sample.row.point < 0 and sample.held_out
        name = "held-out runs" if held else sample.row.kind
        groups[name].append((fit.cost.execute(sample.row.step), sample.seconds))
    arrays = {name: np.array(pairs).T for name, pairs in sorted(groups.items())}
    return {name: (predicted, measured) for name, (predicted, measured) in arrays.items()}


def steps_profile(fit: StepFit, meta: Mapping[str, object]) -> str:
    """Write a profile as YAML."""
    model, gpu, dtype = meta["model"], meta["gpu"], meta["dtype"]
    hardware = {"gpu": gpu, "tensor_parallel_size": 1, "dtype": dtype, "kv_cache_dtype": dtype}
    title = f"What a step of {model} costs in our own torch engine on one {gpu}"
    terms = {k: v for k, v in cost_block(fit.cost).items() if v and k not in NOT_TERMS}
    return join_blocks(
        [
            *head_lines(title, "`headway calibrate` from measured steps", model, hardware),
            f"engine: headway gpu_backend, torch {meta['torch']}, blocks of {meta['block_size']}",
        ],
        [
            *cost_lines(terms, MEANINGS | ENGINE_MEANINGS),
            "  dense: # [tokens, seconds]: all that grows with the tokens, and what any step takes",
            *(f"  - [{tokens}, {seconds}]" for tokens, seconds in fit.cost.dense),
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
