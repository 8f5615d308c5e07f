"""Fit the shipped cost profiles to published kernel times.

    python -m calibration.fit_tables --data DIR --out simulator/profiles

DIR holds AIConfigurator's `systems/data` and LLMServingSim's `profiler/perf`. The matrix products
go into the profile as they were measured; the few coefficients of attention and head are fitted to
relative errors of the whole step, a robust loss keeping single bad measurements from mattering.
Cross-validation leaves out whole token counts: both their matrix products and their attention.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from calibration.kernel_tables import SYSTEMS, Floats, Kernels, System, read_kernels
from calibration.mixed_steps import BLOCK, MULTIPROCESSORS_A100, MixedFactors, fa2_factors
from calibration.profile_text import FitReport, profile_text
from simulator.errors import HeadwayError
from simulator.files import write_atomic
from simulator.model import ModelSpec, load_model
from simulator.piecewise import PiecewiseCost
from simulator.request import Chunk, Request, Step
from simulator.roofline import OVERHEAD, TILE

MODEL = "llama-3-8b"
MAX_SEQUENCES = 1024
FOLDS = 5
LOSS_SCALE = 0.05  # relative error beyond which a sample counts less
DIGITS = 4  # significant, in the profile


@dataclass(frozen=True)
class Samples:
    """Steps composed of measured kernels: times in seconds, without the engine's overhead."""

    prompts: npt.NDArray[np.bool_]  # whether the step computes prompts (else it decodes)
    sequences: Floats
    tokens: Floats
    context: Floats  # S
    pairs: Floats  # P
    rest: Floats  # matrix products, small kernels and head
    attention: Floats

    @property
    def seconds(self) -> Floats:
        """The whole step."""
        return self.rest + self.attention

    def select(self, rows: npt.NDArray[np.bool_]) -> "Samples":
        """Give some of the samples."""
        return Samples(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def steps(self) -> list[Step]:
        """Give the steps as an executor receives them."""
        return [
            _prompts(int(n), int(t / n)) if prompt else Step([], int(n), int(s))
            for prompt, n, t, s in zip(
                self.prompts, self.sequences, self.tokens, self.context, strict=True
            )
        ]


def _prompts(count: int, length: int) -> Step:
    request = Request(0, 0.0, length, 1)
    return Step([Chunk(request, 0, length)] * count)


def compose(kernels: Kernels) -> Samples:
    """Add up the kernels of every step whose attention was measured."""
    decode, prefill = kernels.decode, kernels.prefill
    zeros, nothing = np.zeros(len(decode["N"])), np.zeros(len(prefill["n"]))
    tokens = np.concatenate([decode["N"], prefill["T"]])
    sequences = np.concatenate([decode["N"], prefill["n"]])
    dense = np.interp(tokens, kernels.tokens, kernels.dense)
    head = np.interp(sequences, kernels.tokens, kernels.head)
    samples = Samples(
        np.concatenate([zeros, nothing + 1]).astype(bool),
        sequences,
        tokens,
        np.concatenate([decode["S"], nothing]),
        np.concatenate([zeros, prefill["P"]]),
        dense + head,
        np.concatenate([decode["seconds"], prefill["seconds"]]),
    )
    return samples.select((tokens <= kernels.tokens[-1]) & (sequences <= MAX_SEQUENCES))


def _fit(predict: Callable[[Floats], Floats], rest: Floats, truth: Floats, start: Floats) -> Floats:
    """Fit positive coefficients to the relative error of rest + prediction."""
    from scipy.optimize import least_squares

    def residuals(logs: Floats) -> Floats:
        return np.asarray(np.log((rest + predict(np.exp(logs))) / (rest + truth)))

    result = least_squares(residuals, np.log(start), loss="soft_l1", f_scale=LOSS_SCALE, xtol=1e-12)
    return np.asarray(np.exp(result.x))


def fit_decode(samples: Samples) -> Floats:
    """Fit decode + max(c S, e N)."""
    context, count = samples.context, samples.sequences

    def predict(p: Floats) -> Floats:
        return np.asarray(p[0] + np.maximum(p[1] * context, p[2] * count))

    return _fit(predict, samples.rest, samples.attention, np.array([4e-4, 6e-8, 8e-6]))


def fit_prefill(samples: Samples) -> Floats:
    """Fit prefill + d P + f T."""

    def predict(p: Floats) -> Floats:
        return np.asarray(p[0] + p[1] * samples.pairs + p[2] * samples.tokens)

    return _fit(predict, samples.rest, samples.attention, np.array([4e-4, 2e-9, 5e-7]))


def fit_head(kernels: Kernels) -> Floats:
    """Fit max(head, head_per_sequence n)."""
    count = kernels.tokens[kernels.tokens <= MAX_SEQUENCES]

    def predict(p: Floats) -> Floats:
        return np.asarray(np.maximum(p[0], p[1] * count))

    return _fit(predict, count * 0, kernels.head[: len(count)], np.array([5e-4, 2e-6]))


def fit_cost(
    kernels: Kernels, samples: Samples, mixed: MixedFactors | None, model: ModelSpec
) -> PiecewiseCost:
    """Fit all coefficients; `mixed` gives those of mixed steps under FlashAttention-2.

    Without it they are those of pure decode steps, and no sequence holds up the others: what
    FlashAttention-3 is built for, packing the heads of a group and splitting long sequences.
    """
    head, head_per_sequence = fit_head(kernels)
    decode, per_context, per_sequence = fit_decode(samples.select(~samples.prompts))
    prefill, per_pair, per_token = fit_prefill(samples.select(samples.prompts))
    mixed_context, mixed_sequence, serial = per_context, per_sequence, 0.0
    if mixed is not None:
        tile = TILE * per_pair
        mixed_context = mixed.keys * tile
        mixed_sequence = mixed.block * BLOCK * mixed_context
        serial = mixed.serial * tile * MULTIPROCESSORS_A100 / model.num_attention_heads
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
    rows = zip(kernels.tokens, kernels.dense, strict=True)
    return PiecewiseCost(
        dense=[[int(tokens), _rounded(seconds)] for tokens, seconds in rows],
        **{name: _rounded(value) for name, value in coefficients.items()},  # type: ignore[arg-type]
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def relative_errors(cost: PiecewiseCost, samples: Samples) -> Floats:
    """Compare a cost without overhead to composed steps."""
    said = np.array([cost.execute(step) for step in samples.steps()])
    return np.asarray(np.abs(said / samples.seconds - 1))


def cross_validate(
    kernels: Kernels, samples: Samples, fit: Callable[[Kernels, Samples], PiecewiseCost]
) -> Floats:
    """Give the errors at token counts that the fit has not seen; the outermost are always seen."""
    counts = np.unique(np.concatenate([kernels.tokens, samples.tokens]))[1:-1]
    errors = []
    for fold in range(FOLDS):
        hidden = counts[fold::FOLDS]
        seen = ~np.isin(kernels.tokens, hidden)
        known = replace(
            kernels, tokens=kernels.tokens[seen], dense=kernels.dense[seen], head=kernels.head[seen]
        )
        held = np.isin(samples.tokens, hidden)
        errors.append(relative_errors(fit(known, samples.select(~held)), samples.select(held)))
    return np.concatenate(errors)


def calibrate(
    data: Path, system: System, model: ModelSpec, mixed: MixedFactors | None
) -> FitReport:
    """Fit one GPU's cost."""
    kernels = read_kernels(data, system, model)
    samples = compose(kernels)
    fit = partial(fit_cost, mixed=mixed, model=model)
    cost = fit(kernels, samples)
    limits = {
        "tokens": (1, int(kernels.tokens[-1])),
        "sequences": (1, int(samples.sequences.max())),
        "context": (1, int(samples.context.max())),
        "pairs": (1, int(samples.pairs.max())),
    }
    return FitReport(
        replace(cost, overhead=OVERHEAD),
        limits,
        relative_errors(cost, samples),
        cross_validate(kernels, samples, fit),
    )


def mixed_factors(data: Path, system: System) -> MixedFactors | None:
    """Give the factors of mixed steps where FlashAttention-2 runs."""
    return fa2_factors(data) if system.attention == "FlashAttention-2" else None


def _write(text: str, file: BinaryIO) -> None:
    file.write(text.encode())


def main(arguments: list[str] | None = None) -> int:
    """Fit and write all profiles."""
    parser = argparse.ArgumentParser(description="Fit the shipped cost profiles.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the kernel tables")
    parser.add_argument("--out", type=Path, required=True, help="folder to write profiles to")
    options = parser.parse_args(arguments)
    model = load_model(MODEL)
    try:
        for system in SYSTEMS:
            mixed = mixed_factors(options.data, system)
            report = calibrate(options.data, system, model, mixed)
            text = profile_text(model, system, report, mixed)
            path = options.out / f"{MODEL}.{system.key}.bf16.yaml"
            write_atomic(path, partial(_write, text))
            print(f"{path}: median error {np.median(report.errors):.1%}")
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
