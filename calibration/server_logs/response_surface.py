"""A quadratic through the losses of a grid: its minimum, and how well that is known.

Box and Wilson's response surface, for losses that are too rough to differentiate. Each block of
data has a surface of its own; their spread gives confidence intervals (the sandwich estimator,
clustered by block).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from calibration.errors import Floats

Flags = npt.NDArray[np.bool_]
Intervals = list[tuple[float, float] | None]

GRID = np.array([*product((-1, -0.5, 0, 0.5, 1), (-1, -0.5, 0, 0.5, 1), (-1, 0, 1))])
"""Places around a center in three terms, the third one coarser; in units of half its width."""
MIN_CURVATURE = 1e-5  # curvature per block below which the losses say nothing of a term
CONFIDENCE = 0.95
SEARCH_LIMIT = 1.5  # half widths of the grid: as far as the minimum is sought


@dataclass(frozen=True)
class Surface:
    """Quadratics through the losses of every block around a center; in units of `width`."""

    center: Floats
    width: Floats  # half of the grid's, of each term
    gradients: Floats  # of each block, at the center
    hessians: Floats  # second derivatives of each block

    @classmethod
    def around(cls, center: Floats, width: Floats, losses: Callable[[Floats], Floats]) -> "Surface":
        """Fit to `losses`, each block's, at `center + GRID * width`."""
        found = np.stack([losses(place) for place in center + GRID * width])
        first, second = np.triu_indices(3)
        table = np.column_stack([np.ones(len(GRID)), GRID, GRID[:, first] * GRID[:, second]])
        terms = np.linalg.lstsq(table, found, rcond=None)[0]
        hessians = np.zeros((found.shape[1], 3, 3))
        hessians[:, first, second] += terms[4:].T
        hessians[:, second, first] += terms[4:].T
        return cls(center, width, terms[1:4].T, hessians)

    def minimum(self, blocks: Flags) -> Floats:
        """Give the terms of least loss of some blocks, within the grid and at least 0."""
        from scipy.optimize import minimize

        slope, hessians = self.gradients[blocks].sum(axis=0), self.hessians[blocks].sum(axis=0)
        low = np.maximum(-self.center / self.width, -SEARCH_LIMIT)
        result = minimize(
            lambda d: float(slope @ d + d @ hessians @ d / 2),
            np.zeros(3),
            jac=lambda d: slope + hessians @ d,
            bounds=[(edge, SEARCH_LIMIT) for edge in low],
        )
        return np.asarray(self.center + result.x * self.width)

    def intervals(self, terms: Floats, blocks: Flags) -> Intervals:
        """Give each term's confidence interval, from 0 on; None where the losses are flat."""
        from scipy.stats import t

        hessians = self.hessians[blocks].sum(axis=0)
        scores = (self.gradients + self.hessians @ ((terms - self.center) / self.width))[blocks]
        count = len(scores)
        free = np.diag(hessians) > MIN_CURVATURE * count
        bread = np.linalg.pinv(hessians[np.ix_(free, free)])
        meat = scores[:, free].T @ scores[:, free] * count / (count - int(free.sum()))
        spread = np.sqrt(np.diag(bread @ meat @ bread)) * self.width[free]
        factor = float(t.ppf((1 + CONFIDENCE) / 2, count - int(free.sum())))
        found: Intervals = [None] * len(terms)
        for k, half in zip(np.flatnonzero(free), factor * spread, strict=True):
            found[k] = float(max(0.0, terms[k] - half)), float(terms[k] + half)
        return found
