"""How far predicted steps are off: their relative errors, and what a fit leaves unexplained."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
MAX_HELD_OUT_ERROR = 0.5  # median, above which a fit explains nothing


@dataclass(frozen=True)
class Errors:
    """Relative errors of predicted steps, predicted / measured - 1."""

    points: int
    median: float  # of the absolute errors
    p95: float
    bias: float  # of the sum of all

    @classmethod
    def of(cls, predicted: Floats, measured: Floats) -> "Errors":
        """Compare seconds with seconds."""
        off = np.abs(predicted / measured - 1.0)
        return cls(
            len(off),
            float(np.median(off)),
            float(np.percentile(off, 95)),
            float(predicted.sum() / measured.sum() - 1.0),
        )

    def __str__(self) -> str:
        return (
            f"{self.points} steps, median {self.median:.1%}, P95 {self.p95:.1%}, "
            f"bias {self.bias:+.1%}"
        )


def residuals(
    predicted: Floats, measured: Floats, *, tokens: Floats, pairs: Floats, context: Floats
) -> dict[str, float]:
    """Return the standard deviation of log(measured / predicted) of held-out steps, by regime.

    As profiles carry it (simulator/costs/noise.py). A step has `tokens` in all, (query, key)
    `pairs` of prompts, none in pure decode steps, and `context`, cached tokens that its decodes
    read. Only what is systematic counts: the root mean square of the medians of regions, an octave
    of tokens by an octave of what is read. Jitter of single steps evens out in a run; a region's
    error does not.
    """
    logs = np.log(measured / predicted)
    prompts = pairs > 0
    sizes = np.stack([tokens, np.where(prompts, pairs, context)], axis=1)
    octaves = np.floor(np.log2(np.maximum(sizes, 1))).astype(np.int64)
    found = {}
    for name, chosen in (("decode", ~prompts), ("prompts", prompts)):
        if chosen.any():
            regions, where = np.unique(octaves[chosen], axis=0, return_inverse=True)
            mine = logs[chosen]
            found[name] = root_mean_square(
                float(np.median(mine[where == k])) for k in range(len(regions))
            )
    return found


def root_mean_square(medians: Iterable[float]) -> float:
    """Return the systematic error that medians of logarithms stand for; profiles have 1 at most."""
    return min(1.0, float(np.sqrt(np.mean(np.square([*medians])))))
