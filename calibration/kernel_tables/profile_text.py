"""The text of a fitted profile: the numbers with their meaning, range, errors and origin."""

from collections.abc import Iterator

import numpy as np

from calibration.kernel_tables.compose import Target
from calibration.kernel_tables.fit import FitReport
from calibration.kernel_tables.tables import Floats
from simulator.costs.piecewise import TERMS, Table
from simulator.costs.roofline import efficiency_of
from simulator.models.gpus import Gpu

MEANINGS = {
    "overhead": "a step's scheduling, sampling, input and output in the engine",
    "head": "output projection and sampler: reading the weights",
    "head_per_sequence": "the same, where it is bound by its products",
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
ROW = 98  # columns

COMPOSED = """\
  - Steps were composed of kernels timed one by one; no whole step was timed."""
GRID = """\
  - Products were timed back to back and are taken to last up to {factor:.2f} times as long within a
    model (calibration/kernel_tables/in_sequence.py). Norms, rotary embedding, cache writes and
    activation are reckoned from their bytes, the sampler by LLMServingSim's on RTX 4090 and RTX
    PRO 6000.
  - No prompt was timed with a history: a pair with a cached key is taken to cost what others do."""
LAYERS = """\
  - Attention was timed in vLLM's worker, prompts with history and mixed batches among it."""
REDUCED = """\
  - All-reduce: vLLM's own kernel below 8 MiB between GPUs fully connected by NVLink or between two,
    inside a CUDA graph up to 512 tokens; else NCCL. Collecting logits takes half as long."""

FA2_MIXED = """\
  - No mixed step was timed on this GPU. In one FlashAttention-2 computes each decode as a tile of
    64 queries against blocks of 128 keys, so that
      mixed_per_context = {keys:.2f} x 64 x prefill_per_pair, not less than decode_per_context
      mixed_per_sequence = {block:.2f} x 128 x mixed_per_context,
      serial_per_token = {serial:.2f} x 64 x prefill_per_pair x multiprocessors / heads.
    The three factors were fitted to mixed batches on RTX 4090 and RTX PRO 6000: median error
    {median_error:.0%}, 95th percentile {p95_error:.0%} of the attention alone. With them a decode
    reads its context at {ratio:.1f} times the cost of a pure decode step."""

SEPARATE_MIXED = """\
  - No mixed step was timed on this GPU. Decodes are taken to cost in one what they cost alone:
    {attention} packs the queries of a KV head and splits long sequences there too."""

AICONFIGURATOR = """\
- repository: https://github.com/ai-dynamo/aiconfigurator
  commit: 095f58a51c4c
  tables: aic-core/src/aiconfigurator_core/systems/data/{folder}
  licence: Apache-2.0"""
LLMSERVINGSIM = """\
- repository: https://github.com/casys-kaist/LLMServingSim
  commit: 5daddb21a545
  tables: profiler/perf/{folder}
  licence: MIT"""
VIDUR = """\
- repository: https://github.com/microsoft/vidur
  commit: 7d47513363ec
  tables: data/profiling/compute/{a100,h100} (the factor on products alone)
  licence: MIT"""


def profile_text(target: Target, report: FitReport) -> str:
    """Write a profile as YAML."""
    return "\n".join(_lines(target, report)) + "\n"


def _lines(target: Target, report: FitReport) -> Iterator[str]:
    model, system, cost = target.model, target.system, report.cost
    gpus = f"{target.gpus} {system.gpu.name}" if target.gpus > 1 else f"one {system.gpu.name}"
    yield f"# What the kernels of a step of {model.name} cost on {gpus}."
    yield "# Written by `headway profile build` from the tables named at the end."
    yield f"model: {model.name}"
    yield "hardware:"
    yield f"  gpu: {system.gpu.name}"
    yield f"  tensor_parallel_size: {target.gpus}"
    yield f"  dtype: {target.dtype}"
    yield f"  kv_cache_dtype: {target.kv_cache_dtype}"
    yield f"engine: vLLM {system.version}, {system.attention}"
    yield "overhead: vllm # comes on top, from simulator/costs/overheads.yaml"
    yield ""
    yield "cost: # seconds, all layers together"
    yield "  kind: piecewise"
    for term in TERMS[1:]:
        yield f"  {term}: {getattr(cost, term)} # {MEANINGS[term]}"
    yield "  dense: # [tokens, seconds]: matrix products, small kernels, all-reduce"
    yield from _table(cost.dense)
    yield ""
    yield "range: # of the steps fitted to; beyond, a run warns"
    yield from (f"  {name}: [{low}, {high}]" for name, (low, high) in report.limits.items())
    yield ""
    if report.residuals:
        yield "residuals: # sd of log(timed / fitted) of whole steps held out, for --replications"
        yield from (f"  {name}: {value:.4f}" for name, value in report.residuals.items())
        yield ""
    yield from _errors(report, system.gpu)
    yield ""
    if report.notes:
        yield "fallback: # not measured, but reckoned from what was"
        yield from (f'- "{note}"' for note in report.notes)
    if len(report.errors):
        yield "assumptions: |"
        yield from _assumptions(target, report)
        yield "sources:"
        yield from _sources(target, report)
    else:
        yield "sources: [simulator/costs/efficiencies.yaml]"


def _table(rows: Table) -> Iterator[str]:
    """Write the rows of a table, as many to a line as fit."""
    cells = [f"[{int(tokens)}, {seconds}]," for tokens, seconds in rows]
    cells[-1] = cells[-1].removesuffix(",") + "]"
    line = "    ["
    for cell in cells:
        if len(line) + len(cell) > ROW:
            yield line.rstrip()
            line = "     "
        line += f"{cell} "
    yield line.rstrip()


def _errors(report: FitReport, gpu: Gpu) -> Iterator[str]:
    """Write down the relative errors of whole steps."""
    if not len(report.errors):
        yield "fit: # of no step of this model; other models' steps by the same roofline"
        yield f"  roofline_median_relative_error: {efficiency_of(gpu).error}"
        return
    yield "fit: # relative errors of the kernels' sum"
    yield from _spread(report.errors, "  ")
    yield "  cross_validation: # 5 folds; each leaves out whole token counts"
    yield from _spread(report.held_out, "    ")


def _spread(errors: Floats, indent: str) -> Iterator[str]:
    yield f"{indent}points: {len(errors)}"
    yield f"{indent}median_relative_error: {np.median(errors):.4f}"
    yield f"{indent}p95_relative_error: {np.percentile(errors, 95):.4f}"


def _assumptions(target: Target, report: FitReport) -> Iterator[str]:
    """Say what was taken for granted."""
    from calibration.kernel_tables.in_sequence import in_sequence

    yield COMPOSED
    if target.system.layers:
        yield LAYERS
    else:
        tokens = np.array([row[0] for row in report.cost.dense], float)
        yield GRID.format(factor=in_sequence(target.system, tokens).max())
    if target.gpus > 1:
        yield REDUCED
    if report.mixed is not None:
        ratio = report.cost.mixed_per_context / report.cost.decode_per_context
        yield FA2_MIXED.format(ratio=ratio, **vars(report.mixed))
    elif not report.joint:
        yield SEPARATE_MIXED.format(attention=target.system.attention)


def _sources(target: Target, report: FitReport) -> Iterator[str]:
    """Name the published tables and their licences."""
    if "AIConfigurator" in report.sources:
        yield AICONFIGURATOR.format(folder=target.system.folder)
        if not target.system.layers:
            yield VIDUR
    if "LLMServingSim" in report.sources:
        folder = target.system.layers or "{RTX4090,RTXPRO6000}"
        yield LLMSERVINGSIM.format(folder=f"{folder} (mixed batches)" if report.mixed else folder)
