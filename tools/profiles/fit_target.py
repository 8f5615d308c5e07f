"""Fit one target's cost profile to published kernel times.

The matrix products go into a profile as they were measured, thinned to what straight lines in
between need; the few coefficients of attention and head are fitted to relative errors of the whole
step, a robust loss keeping single bad measurements from mattering. Cross-validation leaves out
whole token counts: both their matrix products and their attention.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from calibration.errors import Errors, Floats, residuals
from simulator.core.engine_config import UNIFORM
from simulator.costs.linear import Limits
from simulator.costs.piecewise import PiecewiseCost, add_tables
from simulator.costs.roofline import TILE, roofline
from simulator.costs.split import SPLIT_TERMS, SplitCost
from simulator.costs.tables import Table
from simulator.costs.terms import TERMS
from simulator.models.spec import ModelSpec
from tools.profiles.attention import LinearKernels, TimedSteps
from tools.profiles.compose import (
    MAX_SEQUENCES,
    Kernels,
    Routings,
    Target,
    compose_kernels,
)
from tools.profiles.llmservingsim import (
    BLOCK,
    LONGEST,
    MIXED_START,
    Form,
    MixedFactors,
    fa2_factors,
    mixed_form,
)
from tools.profiles.positive import fit_positive
from tools.profiles.tables import NotTimedError

FOLDS = 5
DIGITS = 4  # significant, in the profile
KNOTS = 40  # of the dense table, at most
EXPERT_KNOTS = 16  # of a table of experts
FARTHER = 4
"""Times the cached tokens that were timed: as many a step may have, if the memory holds them."""
KNOT_TOLERANCE = 0.005  # relative error of the dense table that is not worth a knot


@dataclass(frozen=True)
class FitReport:
    """A fitted cost with its range and relative errors."""

    cost: PiecewiseCost
    limits: Limits
    errors: Errors | None = None  # of the samples fitted to; None: a roofline, fitted to nothing
    held_out: Errors | None = None  # of samples that the fit had not seen
    notes: tuple[str, ...] = ()  # what was not measured
    sources: frozenset[str] = frozenset()
    mixed: MixedFactors | None = None
    residuals: Mapping[str, float] = field(default_factory=dict)  # by regime, held out
    mixed_timed: bool = False  # whether mixed batches of the target itself were timed
    timed_context: int = 0  # cached tokens of a step, at most; `limits` may go on beyond
    own: Table = ()  # the dense table without experts, where they have tables of their own
    experts: Mapping[str, Table] = field(default_factory=dict)  # by routing, as in Kernels
    whole_experts: Mapping[str, Table] = field(default_factory=dict)
    marlin: Mapping[str, Table] = field(default_factory=dict)


def compose_steps(kernels: Kernels) -> TimedSteps:
    """Add up the kernels of every step whose attention was measured."""
    found = kernels.attention
    dense = np.interp(found.tokens, kernels.tokens, kernels.steps)
    head = np.interp(found.sequences, kernels.counts, kernels.head)
    most = min(kernels.timed, kernels.tokens[-1])
    inside = (found.tokens <= most) & (found.sequences <= MAX_SEQUENCES)
    long = found.mixed & (found.longest > LONGEST)
    linear = kernels.linear
    states = np.where(
        found.chunks > 0,
        linear.prefill,
        linear.decode + _state_per_sequence(linear) * found.decodes,
    )
    return replace(found, rest=dense + head + states).select(inside & ~long)


def _state_per_sequence(linear: LinearKernels) -> float:
    """Return what a decode's state takes besides the share of its token in the dense table."""
    return max(0.0, linear.per_sequence - linear.per_token)


def roofline_errors(data: Path, target: Target) -> tuple[Floats, Floats]:
    """Return the seconds of the target's steps, by roofline and measured."""
    steps = compose_steps(compose_kernels(data, target))
    return steps.predict(roofline(target.model, target.tables.gpu)), steps.seconds


def _fit_terms(form: Form, rest: Floats, truth: Floats, start: Iterable[float]) -> Floats:
    """Fit positive coefficients to the relative error of rest + form."""
    return fit_positive(lambda p: rest + form(p), rest + truth, start, 1e-12)


def fit_decode(steps: TimedSteps) -> Floats:
    """Fit decode + max(c S, e N)."""
    context, count, seconds = steps.context, steps.decodes, steps.attention
    longest = np.argsort(context)[-8:]  # bound by reading the cache, whatever else
    start = [seconds.min(), np.median(seconds[longest] / context[longest]), seconds.min() / 64]
    return _fit_terms(
        lambda p: p[0] + np.maximum(p[1] * context, p[2] * count), steps.rest, seconds, start
    )


def fit_prefill(steps: TimedSteps) -> Floats:
    """Fit prefill + d P + f T."""
    pairs, tokens, seconds = steps.pairs, steps.tokens, steps.attention
    most = np.argsort(pairs)[-8:]
    start = [seconds.min(), np.median(seconds[most] / pairs[most]), seconds.min() / 512]
    return _fit_terms(lambda p: p[0] + p[1] * pairs + p[2] * tokens, steps.rest, seconds, start)


def fit_mixed_steps(steps: TimedSteps) -> Floats:
    """Fit prefill + max(d P + f T_p + c' S + e' N, r K) to steps of prompts and decodes."""
    return _fit_terms(mixed_form(steps), steps.rest, steps.attention, 32 * MIXED_START)


def fit_head(kernels: Kernels) -> Floats:
    """Fit max(head, head_per_sequence n)."""
    count = kernels.counts[kernels.counts <= MAX_SEQUENCES]
    seconds = kernels.head[: len(count)]
    start = [seconds[0], seconds[-1] / count[-1]]
    return _fit_terms(lambda p: np.maximum(p[0], p[1] * count), 0 * count, seconds, start)


def fit_cost(
    kernels: Kernels, steps: TimedSteps, mixed: MixedFactors | None, target: Target
) -> PiecewiseCost:
    """Fit all coefficients.

    Those of mixed steps come from mixed batches where these were timed; else `mixed` gives them,
    the rule of FlashAttention-2. Without it they are those of pure decode steps, and no sequence
    holds up the others: what FlashAttention-3 is built for, packing the heads of a group and
    splitting long sequences, and what FlashInfer does, with a launch of its own for decodes.
    """
    alone = steps.chunks == 0
    decode, with_prompts = fit_decode(steps.select(alone)), steps.select(~alone)
    if steps.mixed.any():
        prompts = fit_mixed_steps(with_prompts)
    else:
        prompts = np.array([*fit_prefill(with_prompts), *decode[1:], 0.0])
        if mixed is not None:
            tile = TILE * prompts[1]
            per_key = max(mixed.keys * tile, decode[1])
            share = target.tables.multiprocessors / target.shape[0]
            prompts[3:] = per_key, mixed.block * BLOCK * per_key, mixed.serial * tile * share
    cost = _cost(kernels.tokens, kernels.steps, (0.0, *fit_head(kernels), *decode, *prompts))
    linear, states = kernels.linear, _rounded(_state_per_sequence(kernels.linear))
    cost = replace(
        cost,
        decode=_rounded(cost.decode + linear.decode),
        prefill=_rounded(cost.prefill + linear.prefill),
        mixed_per_sequence=_rounded(cost.mixed_per_sequence + states),
        state_per_sequence=states,
    )
    if not kernels.wait_per_key:
        return cost
    terms = _rounded(kernels.wait_per_key), target.shape[1], target.tables.multiprocessors, True
    return SplitCost.of(cost, **dict(zip(SPLIT_TERMS, terms, strict=True)))


def with_window(cost: PiecewiseCost, model: ModelSpec) -> PiecewiseCost:
    """Let the layers that have a sliding window read and compute no further than it."""
    share = model.windowed
    if not share:
        return cost
    names = {
        "decode_per_context": "decode_per_window",
        "mixed_per_context": "mixed_per_window",
        "prefill_per_pair": "prefill_per_window_pair",
    }
    all_layers = {name: getattr(cost, name) for name in names}
    terms: dict[str, Any] = {
        **{name: _rounded((1 - share) * seconds) for name, seconds in all_layers.items()},
        **{names[name]: _rounded(share * seconds) for name, seconds in all_layers.items()},
    }
    return replace(cost, window=model.sliding_window, **terms)


def _cost(tokens: Floats, dense: Floats, terms: Iterable[float]) -> PiecewiseCost:
    """Make a cost of a table, which is thinned, and of the coefficients in the order of TERMS."""
    rows = _rows(tokens, dense)
    values: dict[str, Any] = dict(zip(TERMS, map(_rounded, terms), strict=True))
    return PiecewiseCost(dense=rows, **values)


def _rows(tokens: Floats, seconds: Floats, knots: int = KNOTS) -> list[list[float]]:
    """Thin a table, and round it."""
    return [[int(count), _rounded(time)] for count, time in thin_table(tokens, seconds, knots)]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def thin_table(tokens: Floats, seconds: Floats, knots: int = KNOTS) -> list[tuple[float, float]]:
    """Choose the rows that a table needs, adding where straight lines between them err the most."""
    kept = [0, len(tokens) - 1]
    while len(kept) < min(knots, len(tokens)):
        errors = np.abs(np.interp(tokens, tokens[kept], seconds[kept]) / seconds - 1)
        worst = int(np.argmax(errors))
        if errors[worst] < KNOT_TOLERANCE:
            break
        kept = sorted({*kept, worst})
    return [(tokens[i], seconds[i]) for i in kept]


def cross_validate(
    kernels: Kernels, steps: TimedSteps, fit: Callable[[Kernels, TimedSteps], PiecewiseCost]
) -> tuple[Errors, dict[str, float]]:
    """Return the errors at token counts that the fit has not seen, and the residuals by regime.

    The outermost counts are always seen.
    """
    counts = np.unique(np.concatenate([kernels.tokens, steps.tokens]))[1:-1]
    counts = counts[counts < kernels.timed]
    predictions, parts = [], []
    for fold in range(FOLDS):
        hidden = counts[fold::FOLDS]
        seen = ~np.isin(kernels.tokens, hidden)
        known = replace(kernels, tokens=kernels.tokens[seen], dense=kernels.dense[seen])
        known = replace(known, experts=_without(kernels.experts, hidden))
        held = np.isin(steps.tokens, hidden)
        parts.append(steps.select(held))
        predictions.append(parts[-1].predict(fit(known, steps.select(~held))))
    predicted, held_out = np.concatenate(predictions), TimedSteps.concatenated(*parts)
    sizes = {"tokens": held_out.tokens, "pairs": held_out.pairs, "context": held_out.context}
    measured = held_out.seconds
    return Errors.of(predicted, measured), residuals(predicted, measured, **sizes)


def _without(routings: Routings, hidden: Floats) -> Routings:
    """Leave token counts out of the times of experts."""
    return {
        name: (tokens[~np.isin(tokens, hidden)], seconds[~np.isin(tokens, hidden)])
        for name, (tokens, seconds) in routings.items()
    }


def fit_by_roofline(target: Target, note: str) -> FitReport:
    """Take a roofline at the efficiency that other models reach on the GPU."""
    gpu = target.tables.gpu
    cost = roofline(
        target.model,
        gpu,
        tensor_parallel_size=target.gpus,
        dtype=target.dtype,
        kv_cache_dtype=target.kv_cache_dtype,
    )
    tokens, seconds = np.array(cost.dense, float).T
    residuals = cost.residuals or {}
    cost = _cost(tokens, seconds, [getattr(cost, name) for name in TERMS])
    limits = {"tokens": (1, cost.dense[-1][0])}
    return FitReport(cost, limits, notes=(note,), residuals=residuals)


def longest_context(target: Target, timed: int) -> int:
    """Return the cached tokens of a step for which a profile stands, so many having been timed.

    Decode attention waits for the memory, so its time goes on in a straight line: as far as the
    GPU's memory could hold a cache, at most `FARTHER` times.
    """
    model = target.model
    each = model.kv_bytes_per_token(target.kv_cache_dtype, target.gpus)
    return max(timed, min(FARTHER * timed, int(target.tables.gpu.memory / each)))


def fit_target(data: Path, target: Target) -> FitReport:
    """Compose and fit one target's cost; where nothing like it was timed, by roofline."""
    try:
        kernels = compose_kernels(data, target)
    except NotTimedError as error:
        return fit_by_roofline(
            target, f"nothing was timed of {error}; roofline at that GPU's efficiency"
        )
    steps = compose_steps(kernels)
    mixed_timed = bool(steps.mixed.any())
    mixed = fa2_factors(data) if target.tables.tiles_decodes and not mixed_timed else None
    fit = partial(fit_cost, mixed=mixed, target=target)
    own = _rows(kernels.tokens, kernels.dense) if kernels.experts else ()
    sliced, whole, marlin = (
        {name: _rows(*curve, EXPERT_KNOTS) for name, curve in each.items()}
        for each in (kernels.experts, kernels.whole_experts, kernels.marlin)
    )
    cost = fit(kernels, steps)
    if sliced:  # as whoever reads the profile puts it together
        cost = replace(cost, dense=add_tables(own, sliced[UNIFORM]))
    timed_context = int(steps.context.max())
    limits = {
        "tokens": (1, int(min(kernels.timed, kernels.tokens[-1]))),
        "sequences": (1, int(steps.sequences.max())),
        "context": (1, longest_context(target, timed_context)),
        "pairs": (1, int(steps.pairs.max())),
    }
    held_out, left = cross_validate(kernels, steps, fit)
    return FitReport(
        cost=with_window(cost, target.model),
        limits=limits,
        errors=Errors.of(steps.predict(cost), steps.seconds),
        held_out=held_out,
        notes=tuple(kernels.notes),
        sources=kernels.sources | ({"LLMServingSim"} if mixed is not None else set()),
        mixed=mixed,
        residuals=left,
        mixed_timed=mixed_timed,
        timed_context=timed_context,
        own=own,
        experts=sliced,
        whole_experts=whole,
        marlin=marlin,
    )
