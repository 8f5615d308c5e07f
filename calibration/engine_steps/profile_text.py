"""The text of a profile that was fitted to measured steps of our own engine."""

from collections.abc import Iterator, Mapping
from dataclasses import fields

from calibration.engine_steps.fit import Errors, StepFit
from calibration.kernel_tables.profile_text import MEANINGS

MORE_MEANINGS = {
    "prefill_per_key": "prompts: per token that a chunk's queries can see",
    "prefill_per_sequence": "prompts: per chunk",
    "swap_out": "per request whose KV blocks a step copies to the host",
    "swap_out_per_block": "per block of them",
    "swap_in": "per request whose KV blocks come back",
    "swap_in_per_block": "per block of them",
    "head_per_sequence": "per sequence: its attention's start, its logits",
}
NOT_WRITTEN = {"name", "limits", "residuals", "dense", "cudagraph_capture_sizes"}
CLOCK_WORDS = {
    "cpu": "CPU time of one thread, forward pass and the host's part",
    "wall": "wall time from schedule to tokens",
}


def profile_name(meta: Mapping[str, object]) -> str:
    """Name a profile by model, hardware and dtype, as shipped ones are."""
    key = str(meta["gpu"]).lower().split("-")[0].replace(" ", "")
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return f"{meta['model']}.{key}.{short[str(meta['dtype'])]}"


def steps_profile(fit: StepFit, meta: Mapping[str, object]) -> str:
    """Write a profile as YAML."""
    return "\n".join(_lines(fit, meta)) + "\n"


def _lines(fit: StepFit, meta: Mapping[str, object]) -> Iterator[str]:
    cost = fit.cost
    yield f"# What a step of {meta['model']} costs in our own torch engine on one {meta['gpu']}."
    yield "# Written by `headway calibrate` from measured steps."
    yield f"model: {meta['model']}"
    yield "hardware:"
    yield f"  gpu: {meta['gpu']}"
    yield "  tensor_parallel_size: 1"
    yield f"  dtype: {meta['dtype']}"
    yield f"  kv_cache_dtype: {meta['dtype']}"
    yield f"engine: headway gpu_backend, torch {meta['torch']}, blocks of {meta['block_size']}"
    yield ""
    yield "cost: # seconds, all layers together"
    yield "  kind: piecewise"
    for field in fields(cost):
        value = getattr(cost, field.name)
        if field.init and field.name not in NOT_WRITTEN and value:
            meaning = MORE_MEANINGS.get(field.name) or MEANINGS.get(field.name, "")
            yield f"  {field.name}: {value} # {meaning}"
    if cost.cudagraph_capture_sizes:
        sizes = ", ".join(map(str, cost.cudagraph_capture_sizes))
        yield f"  cudagraph_capture_sizes: [{sizes}] # batches that pure decodes are padded to"
    yield "  dense: # [tokens, seconds]: all that grows with the tokens, and what any step takes"
    yield from (f"  - [{tokens}, {seconds}]" for tokens, seconds in cost.dense)
    yield ""
    yield "range: # of the steps fitted to; beyond, a run warns"
    yield from (f"  {name}: [{low}, {high}]" for name, (low, high) in fit.limits.items())
    yield ""
    if fit.residuals:
        yield "residuals: # sd of log(measured / fitted) of regions of steps held out"
        yield from (f"  {name}: {value:.4f}" for name, value in fit.residuals.items())
        yield ""
    yield "fit: # relative errors of whole steps; points of the grid by their medians"
    yield f"  clock: {CLOCK_WORDS[str(meta['clock'])]}"
    yield from _errors(fit.trained, "  ")
    yield "  held_out: # by a fit that had not seen them"
    for kind, errors in fit.held_out.items():
        yield f"    {kind}:"
        yield from _errors(errors, "      ")
    yield ""
    yield "sources:"
    yield f"- measured: {meta['started']} to {meta['ended']}, commit {meta['commit']}"
    yield f"  processor: {meta['processor']}"


def _errors(errors: Errors, indent: str) -> Iterator[str]:
    yield f"{indent}points: {errors.points}"
    yield f"{indent}median_relative_error: {errors.median:.4f}"
    yield f"{indent}p95_relative_error: {errors.p95:.4f}"
    yield f"{indent}bias: {errors.bias:.4f}"
