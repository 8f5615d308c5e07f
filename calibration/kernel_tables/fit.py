"""Fit cost profiles to published kernel times.

    python -m calibration.kernel_tables.fit --data DIR --out simulator/costs/profiles

writes all shipped profiles; `headway profile build` writes one. The matrix products go into a
profile as they were measured, thinned to what straight lines in between need; the few coefficients
of attention and head are fitted to relative errors of the whole step, a robust loss keeping single
bad measurements from mattering. Cross-validation leaves out whole token counts: both their matrix
products and their attention.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from calibration.kernel_tables.batches import Batches
from calibration.kernel_tables.compose import (
    MAX_SEQUENCES,
    Kernels,
    NotTimedError,
    Target,
    compose_kernels,
)
from calibration.kernel_tables.mixed_steps import (
    BLOCK,
    LONGEST,
    START,
    MixedFactors,
    fa2_factors,
    mixed_form,
)
from calibration.kernel_tables.tables import Floats
from calibration.residuals import residuals
from simulator.costs.linear import Limits
from simulator.costs.noise import REGIMES
from simulator.costs.piecewise import TERMS, PiecewiseCost
from simulator.costs.roofline import TILE, efficiency_of, roofline
from simulator.util.errors import HeadwayError
from simulator.util.files import write_atomic

FOLDS = 5
LOSS_SCALE = 0.05  # relative error beyond which a sample counts less
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
    errors: Floats  # of the samples fitted to
    held_out: Floats  # of samples that the fit had not seen
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
    mixed = (found.chunks > 0) & (found.decodes > 0)
    return Samples(found, dense + head).select(inside & ~(mixed & (found.longest > LONGEST)))


def _fit(predict: Callable[[Floats], Floats], rest: Floats, truth: Floats, start: Floats) -> Floats:
    """Fit positive coefficients to the relative error of rest + prediction."""
    from scipy.optimize import least_squares

    def residuals(logs: Floats) -> Floats:
        return np.asarray(np.log((rest + predict(np.exp(logs))) / (rest + truth)))

    result = least_squares(residuals, np.log(start), loss="soft_l1", f_scale=LOSS_SCALE, xtol=1e-12)
    return np.asarray(np.exp(result.x))


def fit_decode(samples: Samples) -> Floats:
    """Fit decode + max(c S, e N)."""
    context, count = samples.batches.context, samples.batches.decodes

    def predict(p: Floats) -> Floats:
        return np.asarray(p[0] + np.maximum(p[1] * context, p[2] * count))

    seconds = samples.batches.seconds
    longest = np.argsort(context)[-8:]  # bound by reading the cache, whatever else
    start = [seconds.min(), np.median(seconds[longest] / context[longest]), seconds.min() / 64]
    return _fit(predict, samples.rest, seconds, np.array(start))


def fit_prefill(samples: Samples) -> Floats:
    """Fit prefill + d P + f T."""
    pairs, tokens = samples.batches.pairs, samples.batches.tokens

    def predict(p: Floats) -> Floats:
        return np.asarray(p[0] + p[1] * pairs + p[2] * tokens)

    seconds = samples.batches.seconds
    most = np.argsort(pairs)[-8:]
    start = [seconds.min(), np.median(seconds[most] / pairs[most]), seconds.min() / 512]
    return _fit(predict, samples.rest, seconds, np.array(start))


def fit_joint(samples: Samples) -> Floats:
    """Fit prefill + max(d P + f T_p + c' S + e' N, r K) to batches of prompts and decodes."""
    predict = mixed_form(samples.batches)
    return _fit(predict, samples.rest, samples.batches.seconds, 32 * START)


def fit_head(kernels: Kernels) -> Floats:
    """Fit max(head, head_per_sequence n)."""
    count = kernels.counts[kernels.counts <= MAX_SEQUENCES]

    def predict(p: Floats) -> Floats:
        return np.asarray(np.maximum(p[0], p[1] * count))

    seconds = kernels.head[: len(count)]
    start = np.array([seconds[0], seconds[-1] / count[-1]])
    return _fit(predict, count * 0, seconds, start)


def fit_cost(
    kernels: Kernels, samples: Samples, mixed: MixedFactors | None, target: Target
) -> PiecewiseCost:
    """Fit all coefficients.

    Those of mixed steps come from mixed batches where these were timed; else `mixed` gives them,
    the rule of FlashAttention-2. Without it they are those of pure decode steps, and no sequence
    holds up the others: what FlashAttention-3 is built for, packing the heads of a group and
    splitting long sequences, and what FlashInfer does, with a launch of its own for decodes.
    """
    found = samples.batches
    alone = found.chunks == 0
    head, head_per_sequence = fit_head(kernels)
    decode, per_context, per_sequence = fit_decode(samples.select(alone))
    mixed_context, mixed_sequence, serial = per_context, per_sequence, 0.0
    if (~alone & (found.decodes > 0)).any():
        prefill, per_pair, per_token, mixed_context, mixed_sequence, serial = fit_joint(
            samples.select(~alone)
        )
    else:
        prefill, per_pair, per_token = fit_prefill(samples.select(~alone))
        if mixed is not None:
            tile = TILE * per_pair
            mixed_context = max(mixed.keys * tile, per_context)
            mixed_sequence = mixed.block * BLOCK * mixed_context
            serial = mixed.serial * tile * target.system.multiprocessors / target.shape[0]
    coefficients = {
        "head": head,
        "head_per_sequence": head_per_sequence,
        "decode": decode,
        "decode_per_context": per_context,
        "decode_per_sequence": per_sequence,
        "prefill": prefill,
        "prefill_per_pair": per_pair,
        "prefill_per_token": per_token,
        "mixed_per_context": mixed_context,
        "mixed_per_sequence": mixed_sequence,
        "serial_per_token": serial,
    }
    rows = thin(kernels.tokens, kernels.dense)
    return PiecewiseCost(
        dense=[[int(tokens), _rounded(seconds)] for tokens, seconds in rows],
        **{name: _rounded(value) for name, value in coefficients.items()},  # type: ignore[arg-type]
    )


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


def log_errors(cost: PiecewiseCost, samples: Samples) -> Floats:
    """Give log(composed / predicted) of steps, by a cost without overhead."""
    said = np.array([cost.execute(step) for step in samples.batches.steps()])
    return np.asarray(np.log(samples.seconds / said))


def relative_errors(cost: PiecewiseCost, samples: Samples) -> Floats:
    """Give the absolute errors of the predictions, relative to what was composed."""
    return np.asarray(np.abs(np.expm1(-log_errors(cost, samples))))


def cross_validate(
    kernels: Kernels, samples: Samples, fit: Callable[[Kernels, Samples], PiecewiseCost]
) -> tuple[Floats, dict[str, float]]:
    """Give the errors at token counts that the fit has not seen, and the residuals by regime.

    The outermost counts are always seen.
    """
    counts = np.unique(np.concatenate([kernels.tokens, samples.batches.tokens]))[1:-1]
    counts = counts[counts < kernels.timed]
    logs, held_out = [], []
    for fold in range(FOLDS):
        hidden = counts[fold::FOLDS]
        seen = ~np.isin(kernels.tokens, hidden)
        known = replace(kernels, tokens=kernels.tokens[seen], dense=kernels.dense[seen])
        held = np.isin(samples.batches.tokens, hidden)
        held_out.append(samples.select(held).batches)
        logs.append(log_errors(fit(known, samples.select(~held)), samples.select(held)))
    every = np.concatenate(logs)
    prompts = np.concatenate([batches.chunks > 0 for batches in held_out])
    reads = [np.where(b.chunks > 0, b.pairs, b.context) for b in held_out]
    tokens = [b.tokens for b in held_out]
    sizes = np.stack([np.concatenate(tokens), np.concatenate(reads)], axis=1)
    return np.abs(np.expm1(-every)), residuals(every, prompts, sizes)


def reckon(target: Target, note: str) -> FitReport:
    """Take a roofline at the efficiency that other models reach on the GPU."""
    cost = roofline(
        target.model,
        target.system.gpu,
        tensor_parallel_size=target.gpus,
        dtype=target.dtype,
        kv_cache_dtype=target.kv_cache_dtype,
    )
    tokens, seconds = np.array(cost.dense, float).T
    rows = [[int(count), _rounded(time)] for count, time in thin(tokens, seconds)]
    values = {name: _rounded(getattr(cost, name)) for name in TERMS}
    limits = {"tokens": (1, rows[-1][0])}
    cost = PiecewiseCost(dense=rows, **values)  # type: ignore[arg-type]
    spread = min(1.0, NORMAL * efficiency_of(target.system.gpu).error)
    left = dict.fromkeys(REGIMES, spread)
    return FitReport(cost, limits, np.zeros(0), np.zeros(0), (note,), residuals=left)


def calibrate(data: Path, target: Target) -> FitReport:
    """Compose and fit one target's cost; where nothing like it was timed, by roofline."""
    try:
        kernels = compose_kernels(data, target)
    except NotTimedError as error:
        return reckon(target, f"nothing was timed of {error}; roofline at that GPU's efficiency")
    samples = compose(kernels)
    found = samples.batches
    joint = bool(((found.chunks > 0) & (found.decodes > 0)).any())
    mixed = fa2_factors(data) if target.system.tiles_decodes and not joint else None
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
        relative_errors(cost, samples),
        held_out,
        tuple(kernels.notes),
        kernels.sources | ({"LLMServingSim"} if mixed is not None else set()),
        mixed,
        left,
        joint,
    )


def _write(text: str, file: BinaryIO) -> None:
    file.write(text.encode())


def write_profile(data: Path, target: Target, path: Path) -> FitReport:
    """Fit a target's cost and write its profile."""
    from calibration.kernel_tables.profile_text import profile_text

    report = calibrate(data, target)
    write_atomic(path, partial(_write, profile_text(target, report)))
    return report


def main(arguments: list[str] | None = None) -> int:
    """Fit and write all shipped profiles."""
    from calibration.kernel_tables.shipped import shipped_targets, target_name

    parser = argparse.ArgumentParser(description="Fit the shipped cost profiles.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the kernel tables")
    parser.add_argument("--out", type=Path, required=True, help="folder to write profiles to")
    options = parser.parse_args(arguments)
    try:
        for target in shipped_targets():
            path = options.out / f"{target_name(target)}.yaml"
            report = write_profile(options.data, target, path)
            print(f"{path}: median error {np.median(report.errors):.1%}")
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
