"""The text of a profile that was composed of kernel tables: its numbers, errors and origin."""

from collections.abc import Iterator, Mapping

import numpy as np

from calibration.profile_yaml import (
    MEANINGS,
    cost_lines,
    error_lines,
    head_lines,
    join_blocks,
    range_lines,
    residual_lines,
)
from simulator.costs.roofline import efficiency_of
from simulator.costs.split import SPLIT_TERMS, SplitCost
from simulator.costs.tables import Table
from simulator.costs.terms import TERMS, WINDOW_TERMS
from tools.profiles.compose import GAP, KERNELS, SHARED_BESIDE, Target
from tools.profiles.fit_target import FitReport
from tools.profiles.product_slowdown import slowdown

ROW = 98  # columns

COMPOSED = """\
  - Steps were composed of kernels timed one by one; no whole step was timed."""
GRID = """\
  - Products were timed back to back and are taken to last up to {factor:.2f} times as long within a
    model (tools/profiles/product_slowdown.py). Norms, rotary embedding, cache writes and
    activation are reckoned from their bytes, the sampler by LLMServingSim's on RTX 4090 and RTX
    PRO 6000.
  - No prompt was timed with a history: a pair with a cached key is taken to cost what others do."""
LAYERS = """\
  - Attention was timed in vLLM's worker, prompts with history and mixed batches among it, and
    batches of a few long sequences among short ones, which decodes wait for (per_key).
  - Kernels were timed without the gaps between them: {gap} us for each of {kernels} in a layer."""
REDUCED = """\
  - All-reduce: {reduced}. Collecting logits takes half as long."""
DISPATCHED = """\
what vLLM {version} dispatched each size to, timed in a CUDA graph: its own kernel for
    few bytes, symmetric memory and NCCL for more"""
FUSED = """\
FlashInfer's one-shot and two-shot kernels (timed in TensorRT-LLM {version}) with the norm
    behind them for up to 64, 32 or 1 MiB between 2, 4 or 8 GPUs, as vLLM's fuse_allreduce_rms, else
    what vLLM dispatches to"""

EXPERTS = """\
  - Experts: tokens that choose evenly take the time of the table's balanced routing, less the share
    of experts that nobody has chosen."""
WITH_MARLIN = """\
  - Marlin's kernel, which vLLM before 0.12 runs, was not timed with these experts on this GPU.
    Its times with int4 experts are scaled, beside the launches, by all experts' padded bytes at as
    many tokens an expert. On L40S and RTX PRO 6000, which have both, half of the rows are within -9
    and +2 % of that."""
BESIDE = """\
  - Shared experts run beside the chosen ones in steps of up to {most} tokens, as in vLLM since
    0.11.1, as far as the memory can serve both; beyond, after them."""
WINDOWED = """\
  - Layers with a window of {window} tokens have the times of kernels without one at that
    context."""

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

FARTHER = """\
  - No step with more than {timed:,} cached tokens was timed. Beyond, decode attention is taken to
    go on in a straight line, up to the largest cache that fits the GPU, at most 4 times as far."""

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
    tables, name = target.tables, target.model.name
    gpus = f"{target.gpus} {tables.gpu.name}" if target.gpus > 1 else f"one {tables.gpu.name}"
    hardware = {
        "gpu": tables.gpu.name,
        "tensor_parallel_size": target.gpus,
        "dtype": target.dtype,
        "kv_cache_dtype": target.kv_cache_dtype,
    }
    title = f"What the kernels of a step of {name} cost on {gpus}"
    terms = {term: getattr(report.cost, term) for term in _terms(report)}
    kind = "piecewise-split" if isinstance(report.cost, SplitCost) else "piecewise"
    author = "`python -m tools.profiles.build` from the tables named at the end"
    blocks = (
        [
            *head_lines(title, author, name, hardware),
            f"engine: vLLM {tables.version}, {tables.attention}",
            "overhead: vllm # comes on top, from simulator/costs/overheads.yaml",
        ],
        [
            *cost_lines(terms, MEANINGS, kind),
            "  dense: # [tokens, seconds]: matrix products, small kernels, all-reduce",
            *_table(report.own or report.cost.dense),
        ],
        _experts("experts", "as slices on each GPU", report.experts),
        _experts("expert_parallel", "whole experts on each GPU", report.whole_experts),
        _experts("experts_marlin", "as slices, with Marlin's kernel", report.marlin),
        range_lines(report.limits),
        residual_lines(
            report.residuals,
            "sd of log(timed / fitted) of whole steps held out, for --replications",
        ),
        _fit(target, report),
        _origin(target, report),
    )
    return join_blocks(blocks)


def _terms(report: FitReport) -> tuple[str, ...]:
    """Return the terms that a profile has, those of windows and states where there are such."""
    states = ("state_per_sequence",) if report.cost.state_per_sequence else ()
    split = SPLIT_TERMS if isinstance(report.cost, SplitCost) else ()
    return TERMS[1:] + states + split + (("window", *WINDOW_TERMS) if report.cost.window else ())


def _experts(key: str, how: str, routings: Mapping[str, Table]) -> Iterator[str]:
    """Write the times of experts by routing."""
    if routings:
        yield f"{key}: # [tokens, seconds], to be added to `dense`, by expert_routing: {how}"
    for routing, rows in routings.items():
        yield f'  "{routing}":'
        yield from _table(rows)


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


def _fit(target: Target, report: FitReport) -> Iterator[str]:
    """Write down the relative errors of whole steps."""
    if report.errors is None or report.held_out is None:
        yield "fit: # of no step of this model; other models' steps by the same roofline"
        yield f"  roofline_median_relative_error: {efficiency_of(target.tables.gpu).error}"
        return
    yield "fit: # relative errors of the kernels' sum"
    yield from error_lines(report.errors, "  ")
    yield "  cross_validation: # 5 folds; each leaves out whole token counts"
    yield from error_lines(report.held_out, "    ")


def _origin(target: Target, report: FitReport) -> Iterator[str]:
    """Say what was not measured, what was taken for granted, and who timed the rest."""
    if report.notes:
        yield "fallback: # not measured, but reckoned from what was"
        yield from (f'- "{note}"' for note in report.notes)
    if report.errors is None:
        yield "sources: [simulator/costs/efficiencies.yaml]"
        return
    yield "assumptions: |"
    yield from _assumptions(target, report)
    yield "sources:"
    yield from _sources(target, report)


def _assumptions(target: Target, report: FitReport) -> Iterator[str]:
    """Say what was taken for granted."""
    yield COMPOSED
    if target.tables.layers:
        yield LAYERS.format(gap=GAP * 1e6, kernels=KERNELS)
    else:
        tokens = np.array([row[0] for row in report.cost.dense], float)
        yield GRID.format(factor=slowdown(target.tables, tokens).max())
    if target.gpus > 1:
        yield REDUCED.format(reduced=_reduced(target))
    if target.model.num_experts and report.experts:
        yield EXPERTS
        if report.marlin:
            yield WITH_MARLIN
        if target.model.num_shared_experts:
            yield BESIDE.format(most=SHARED_BESIDE)
    if target.model.windowed:
        yield WINDOWED.format(window=target.model.sliding_window)
    if report.mixed is not None:
        ratio = report.cost.mixed_per_context / report.cost.decode_per_context
        yield FA2_MIXED.format(ratio=ratio, **vars(report.mixed))
    elif not report.mixed_timed:
        yield SEPARATE_MIXED.format(attention=target.tables.attention)
    if report.timed_context and report.limits["context"][1] > report.timed_context:
        yield FARTHER.format(timed=report.timed_context)


def _reduced(target: Target) -> str:
    """Say which kernel adds up over GPUs, and how that is known."""
    tables = target.tables
    if tables.fused:
        return FUSED.format(version=tables.fused)
    if tables.custom and (tables.fully_connected or target.gpus == 2):
        return DISPATCHED.format(version=tables.custom)
    return f"NCCL {tables.nccl}" if tables.nccl else "by the bandwidth of the link"


def _sources(target: Target, report: FitReport) -> Iterator[str]:
    """Name the published tables and their licences."""
    tables = target.tables
    if "AIConfigurator" in report.sources:
        yield AICONFIGURATOR.format(folder=tables.folder)
        if not tables.layers:
            yield VIDUR
    if "LLMServingSim" in report.sources:
        folder = tables.layers or "{RTX4090,RTXPRO6000}"
        yield LLMSERVINGSIM.format(folder=f"{folder} (mixed batches)" if report.mixed else folder)
