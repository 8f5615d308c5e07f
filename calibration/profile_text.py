"""The text of a fitted profile: the numbers with their meaning, range, errors and origin."""

from collections.abc import Iterator
from dataclasses import dataclass

from calibration.kernel_tables import Floats, System
from calibration.mixed_steps import MixedFactors
from simulator.model import ModelSpec
from simulator.piecewise import TERMS, Limits, PiecewiseCost


@dataclass(frozen=True)
class FitReport:
    """A fitted cost with its range and relative errors."""

    cost: PiecewiseCost
    limits: Limits
    errors: Floats  # of the samples fitted to
    held_out: Floats  # of samples that the fit had not seen


MEANINGS = {
    "overhead": "a step's scheduling, sampling, input and output in the engine",
    "head": "output projection: reading its weights",
    "head_per_sequence": "output projection, where it is bound by its products",
    "decode": "attention of a pure decode step: its launches",
    "decode_per_context": "the same, per cached token read",
    "decode_per_sequence": "the same, per sequence, where the contexts are short",
    "prefill": "attention of a step with prompts: its launches",
    "prefill_per_pair": "the same, per (query, key) pair of the prompts",
    "prefill_per_token": "the same, per token of the prompts",
    "mixed_per_context": "the same, per cached token that its decodes read",
    "mixed_per_sequence": "the same, per decode",
    "serial_per_token": "the same, per token of the longest sequence: no step is faster",
}

COMPOSED = """\
  - Steps were composed of kernels timed one by one, back to back; no whole step was timed.
  - Norms, rotary embedding, cache writes and activation are reckoned from their bytes.
  - overhead is not in the tables: vLLM V1's steps exceed their kernels by 0.6 to 1.0 ms (H100 and
    RTX PRO 6000, vLLM 0.11 and 0.19); it is taken as constant, without async scheduling.
  - No prompt was timed with a history: a pair with a cached key is taken to cost what others do."""

FA2_MIXED = """\
  - No mixed step was timed on this GPU. In one FlashAttention-2 computes each decode as a tile of
    64 queries against blocks of 128 keys, so that
      mixed_per_context = {keys:.2f} x 64 x prefill_per_pair,
      mixed_per_sequence = {block:.2f} x 128 x mixed_per_context,
      serial_per_token = {serial:.2f} x 64 x prefill_per_pair x multiprocessors / heads.
    The three factors were fitted to mixed batches on RTX 4090 and RTX PRO 6000: median error
    {median_error:.0%}, 95th percentile {p95_error:.0%} of the attention alone. With them a decode
    reads its context at {ratio:.1f} times the cost of a pure decode step."""

FA3_MIXED = """\
  - No mixed step was timed on this GPU. Decodes are taken to cost in one what they cost alone:
    FlashAttention-3 packs the queries of a KV head and splits long sequences in mixed steps too."""

AICONFIGURATOR = """\
- repository: https://github.com/ai-dynamo/aiconfigurator
  commit: 095f58a51c4c
  tables: aic-core/src/aiconfigurator_core/systems/data/{folder}/{{gemm,attention}}/vllm/{version}
  licence: Apache-2.0"""

LLMSERVINGSIM = """\
- repository: https://github.com/casys-kaist/LLMServingSim
  commit: 5daddb21a545
  tables: profiler/perf/{RTX4090,RTXPRO6000}/meta-llama/Llama-3.1-8B/bf16/tp1/attention.csv
  licence: MIT"""


def profile_text(
    model: ModelSpec, system: System, report: FitReport, mixed: MixedFactors | None
) -> str:
    """Write a profile as YAML."""
    return "\n".join(_lines(model, system, report, mixed)) + "\n"


def _lines(
    model: ModelSpec, system: System, report: FitReport, mixed: MixedFactors | None
) -> Iterator[str]:
    cost = report.cost
    yield f"# What a step of {model.name} costs on one {system.gpu.name}."
    yield "# Written by calibration/fit_tables.py from the tables named at the end."
    yield f"model: {model.name}"
    yield "hardware:"
    yield f"  gpu: {system.gpu.name}"
    yield "  tensor_parallel_size: 1"
    yield "  dtype: bfloat16"
    yield "  kv_cache_dtype: bfloat16"
    yield f"engine: vLLM {system.version}, {system.attention}"
    yield ""
    yield "cost: # seconds, all layers together"
    yield "  kind: piecewise"
    for term in TERMS:
        yield f"  {term}: {getattr(cost, term)} # {MEANINGS[term]}"
    yield "  dense: # [tokens, seconds]: matrix products and small kernels, as measured"
    yield from (f"  - [{tokens}, {seconds}]" for tokens, seconds in cost.dense)
    yield ""
    yield "range: # of the steps fitted to; beyond, a run warns"
    yield from (f"  {name}: [{low}, {high}]" for name, (low, high) in report.limits.items())
    yield ""
    yield from _errors(report)
    yield ""
    yield "assumptions: |"
    yield COMPOSED
    if mixed is None:
        yield FA3_MIXED
    else:
        ratio = cost.mixed_per_context / cost.decode_per_context
        yield FA2_MIXED.format(ratio=ratio, **vars(mixed))
    yield "sources:"
    yield AICONFIGURATOR.format(folder=system.folder, version=system.version)
    if mixed is not None:
        yield LLMSERVINGSIM


def _errors(report: FitReport) -> Iterator[str]:
    """Write down the relative errors of whole steps."""
    import numpy as np

    yield "fit: # relative errors of the kernels' sum"
    yield f"  points: {len(report.errors)}"
    yield f"  median_relative_error: {np.median(report.errors):.4f}"
    yield f"  p95_relative_error: {np.percentile(report.errors, 95):.4f}"
    yield "  cross_validation: # 5 folds; each leaves out whole token counts"
    yield f"    points: {len(report.held_out)}"
    yield f"    median_relative_error: {np.median(report.held_out):.4f}"
    yield f"    p95_relative_error: {np.percentile(report.held_out, 95):.4f}"
