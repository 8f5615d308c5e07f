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
import numpy.typing as npt

from calibration.errors import Errors, Floats, fit_positive, residuals
from calibration.kernel_tables.attention_batches import Batches
from calibration.kernel_tables.compose import (
    MAX_SEQUENCES,
    Kernels,
    NotTimedError,
    Target,
    compose_kernels,
)
from calibration.kernel_tables.mixed_attention import (
    BLOCK,
    LONGEST,
    MIXED_START,
    Form,
    MixedFactors,
    fa2_factors,
    mixed_form,
)
from simulator.costs.linear import Limits
from simulator.costs.noise import REGIMES
from simulator.costs.piecewise import TERMS, PiecewiseCost
from simulator.costs.roofline import TILE, efficiency_of, roofline

FOLDS = 5
DIGITS = 4  # significant, in the profile
KNOTS = 40  # of the dense table, at most
NORMAL = 1.4826  # standard deviation of a normal variable / median of its absolute values
THIN = 0.005  # relative error of the dense table that is not worth a knot


@dataclass(frozen=True)
class Samples:
    """Steps composed of measured kernels: times in seconds, without the engine's overhead."""

    batches: Batches
    rest: Floats  # matrix products, small kernels and head

    @property
    def seconds(self) -> Floats:
        """The whole step."""
        return self.rest + self.batches.seconds

    def select(self, rows: npt.NDArray[np.bool_]) -> "Samples":
        """Give some of the samples."""
        return Samples(self.batches.select(rows), self.rest[rows])


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
    joint: bool = False  # whether mixed batches of the target itself were timed


def compose(kernels: Kernels) -> Samples:
    """Add up the kernels of every step whose attention was measured."""
    found = kernels.attention
    dense = np.interp(found.tokens, kernels.tokens, kernels.dense)
    head = np.interp(found.sequences, kernels.counts, kernels.head)
    most = min(kernels.timed, kernels.tokens[-1])
    inside = (found.tokens <= most) & (found.sequences <= MAX_SEQUENCES)
    long = found.mixed & (found.longest > LONGEST)
    return Samples(found, dense + head).select(inside & ~long)


def _fit(form: Form, rest: Floats, truth: Floats, start: Iterable[float]) -> Floats:
    """Fit positive coefficients to the relative error of rest + form."""
    return fit_positive(lambda p: rest + form(p), rest + truth, start, 1e-12)


def fit_decode(samples: Samples) -> Floats:
    """Fit decode + max(c S, e N)."""
    found, seconds = samples.batches, samples.batches.seconds
    context, count = found.context, found.decodes
    longest = np.argsort(context)[-8:]  # bound by reading the cache, whatever else
    start = [seconds.min(), np.median(seconds[longest] / context[longest]), seconds.min() / 64]
    return _fit(
        lambda p: p[0] + np.maximum(p[1] * context, p[2] * count), samples.rest, seconds, start
    )


def fit_prefill(samples: Samples) -> Floats:
    """Fit prefill + d P + f T."""
    pairs, tokens, seconds = samples.batches.pairs, samples.batches.tokens, samples.batches.seconds
    most = np.argsort(pairs)[-8:]
    start = [seconds.min(), np.median(seconds[most] / pairs[most]), seconds.min() / 512]
    return _fit(lambda p: p[0] + p[1] * pairs + p[2] * tokens, samples.rest, seconds, start)


def fit_joint(samples: Samples) -> Floats:
    """Fit prefill + max(d P + f T_p + c' S + e' N, r K) to batches of prompts and decodes."""
    return _fit(
        mixed_form(samples.batches), samples.rest, samples.batches.seconds, 32 * MIXED_START
    )


def fit_head(kernels: Kernels) -> Floats:
    """Fit max(head, head_per_sequence n)."""
    count = kernels.counts[kernels.counts <= MAX_SEQUENCES]
    seconds = kernels.head[: len(count)]
    start = [seconds[0], seconds[-1] / count[-1]]
    return _fit(lambda p: np.maximum(p[0], p[1] * count), 0 * count, seconds, start)


def fit_cost(
    kernels: Kernels, samples: Samples, mixed: MixedFactors | None, target: Target
) -> PiecewiseCost:
    """Fit all coefficients.

    Those of mixed steps come from mixed batches where these were timed; else `mixed` gives them,
    the rule of FlashAttention-2. Without it they are those of pure decode steps, and no sequence
    holds up the others: what FlashAttention-3 is built for, packing the heads of a group and
    splitting long sequences, and what FlashInfer does, with a launch of its own for decodes.
    """
    alone = samples.batches.chunks == 0
    decode, with_prompts = fit_decode(samples.select(alone)), samples.select(~alone)
    if samples.batches.mixed.any():
        prompts = fit_joint(with_prompts)
    else:
        prompts = np.array([*fit_prefill(with_prompts), *decode[1:], 0.0])
        if mixed is not None:
            tile = TILE * prompts[1]
            per_key = max(mixed.keys * tile, decode[1])
            share = target.tables.multiprocessors / target.shape[0]
            prompts[3:] = per_key, mixed.block * BLOCK * per_key, mixed.serial * tile * share
    return _cost(kernels.tokens, kernels.dense, (0.0, *fit_head(kernels), *decode, *prompts))


def _cost(tokens: Floats, dense: Floats, terms: Iterable[float]) -> PiecewiseCost:
    """Make a cost of a table, which is thinned, and of the coefficients in the order of TERMS."""
    rows = [[int(count), _rounded(seconds)] for count, seconds in thin(tokens, dense)]
    values: dict[str, Any] = dict(zip(TERMS, map(_rounded, terms), strict=True))
    return PiecewiseCost(dense=rows, **values)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def thin(tokens: Floats, seconds: Floats) -> list[tuple[float, float]]:
    """Choose the rows that a table needs, adding where straight lines between them err the most."""
    kept = [0, len(tokens) - 1]
    while len(kept) < min(KNOTS, len(tokens)):
        errors = np.abs(np.interp(tokens, tokens[kept], seconds[kept]) / seconds - 1)
        worst = int(np.argmax(errors))
        if errors[worst] < THIN:
            break
        kept = sorted({*kept, worst})
    return [(tokens[i], seconds[i]) for i in kept]


def predict_steps(cost: PiecewiseCost, batches: Batches) -> Floats:
    """Give the seconds of the steps of batches."""
    return np.array([cost.execute(step) for step in batches.steps()])


def cross_validate(
    kernels: Kernels, samples: Samples, fit: Callable[[Kernels, Samples], PiecewiseCost]
) -> tuple[Errors, dict[str, float]]:
    """Give the errors at token counts that the fit has not seen, and the residuals by regime.

    The outermost counts are always seen.
    """
    counts = np.unique(np.concatenate([kernels.tokens, samples.batches.tokens]))[1:-1]
    counts = counts[counts < kernels.timed]
    predicted, held_out = [], []
    for fold in range(FOLDS):
        hidden = counts[fold::FOLDS]
        seen = ~np.isin(kernels.tokens, hidden)
        known = replace(kernels, tokens=kernels.tokens[seen], dense=kernels.dense[seen])
        held = np.isin(samples.batches.tokens, hidden)
        held_out.append(samples.select(held))
        predicted.append(predict_steps(fit(known, samples.select(~held)), held_out[-1].batches))
    said, measured = np.concatenate(predicted), np.concatenate([one.seconds for one in held_out])
    every = Batches.concatenated(*(one.batches for one in held_out))
    sizes = {"tokens": every.tokens, "pairs": every.pairs, "context": every.context}
    return Errors.of(said, measured), residuals(said, measured, **sizes)


def reckon(target: Target, note: str) -> FitReport:
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
    cost = _cost(tokens, seconds, [getattr(cost, name) for name in TERMS])
    spread = min(1.0, NORMAL * efficiency_of(gpu).error)
    limits = {"tokens": (1, cost.dense[-1][0])}
    return FitReport(cost, limits, notes=(note,), residuals=dict.fromkeys(REGIMES, spread))


def fit_target(data: Path, target: Target) -> FitReport:
    """Compose and fit one target's cost; where nothing like it was timed, by roofline."""
    try:
        kernels = compose_kernels(data, target)
    except NotTimedError as error:
        return reckon(target, f"nothing was timed of {error}; roofline at that GPU's efficiency")
    samples = compose(kernels)
    found = samples.batches
    joint = bool(found.mixed.any())
    mixed = fa2_factors(data) if target.tables.tiles_decodes and not joint else None
    fit = partial(fit_cost, mixed=mixed, target=target)
    cost = fit(kernels, samples)
    limits = {
        "tokens": (1, int(min(kernels.timed, kernels.tokens[-1]))),
        "sequences": (1, int(found.sequences.max())),
        "context": (1, int(found.context.max())),
        "pairs": (1, int(found.pairs.max())),
    }
    held_out, left = cross_validate(kernels, samples, fit)
    return FitReport(
        cost,
        limits,
        Errors.of(predict_steps(cost, found), samples.seconds),
        held_out,
        tuple(kernels.notes),
        kernels.sources | ({"LLMServingSim"} if mixed is not None else set()),
        mixed,
        left,
        joint,
    )
