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

FINE, COARSE = (-1, -0.5, 0, 0.5, 1), (-1, 0, 1)
MIN_CURVATURE = 1e-5  # curvature per block below which the losses say nothing of a term
CONFIDENCE = 0.95
SEARCH_LIMIT = 1.5  # half widths of the grid: as far as the minimum is sought


def grid(terms: int) -> Floats:
    """Return places around a center, in units of half the width: fine in the first two terms of up
    to three, coarse in all of four, so that there are 81 at most."""
    fine = [FINE] * min(terms, 2) if terms <= 3 else []
    return np.array([*product(*fine, *[COARSE] * (terms - len(fine)))])


@dataclass(frozen=True)
class Prior:
    """What is known of a term beforehand: as its standard deviation says, about some value."""

    term: int
    value: float
    sd: float

    def losses(self, terms: Floats, blocks: int) -> float:
        """Return each of so many blocks' share of the loss."""
        return float(((terms[self.term] - self.value) / self.sd) ** 2 / 2 / blocks)


@dataclass(frozen=True)
class Surface:
    """Quadratics through the losses of every block around a center; in units of `width`."""

    center: Floats
    width: Floats  # half of the grid's, of each term
    gradients: Floats  # of each block, at the center
    hessians: Floats  # second derivatives of each block
    prior: Prior | None = None  # within the losses already

    @classmethod
    def around(
        cls,
        center: Floats,
        width: Floats,
        losses: Callable[[Floats], Floats],
        prior: Prior | None = None,
    ) -> "Surface":
        """Fit to `losses`, each block's, at `center + grid * width`."""
        count = len(center)
        places = grid(count)
        found = np.stack([losses(place) for place in center + places * width])
        first, second = np.triu_indices(count)
        products = places[:, first] * places[:, second]
        table = np.column_stack([np.ones(len(places)), places, products])
        terms = np.asarray(np.linalg.lstsq(table, found, rcond=None)[0], np.float64)
        hessians = np.zeros((found.shape[1], count, count))
        hessians[:, first, second] += terms[1 + count :].T
        hessians[:, second, first] += terms[1 + count :].T
        return cls(center, width, terms[1 : 1 + count].T, hessians, prior)

    def minimum(self, blocks: Flags) -> Floats:
        """Return the terms of least loss of some blocks, within the grid and at least 0."""
        from scipy.optimize import minimize

        slope, hessians = self.gradients[blocks].sum(axis=0), self.hessians[blocks].sum(axis=0)
        low = np.maximum(-self.center / self.width, -SEARCH_LIMIT)
        result = minimize(
            lambda d: float(slope @ d + d @ hessians @ d / 2),
            np.zeros(len(slope)),
            jac=lambda d: slope + hessians @ d,
            bounds=[(edge, SEARCH_LIMIT) for edge in low],
        )
        return np.asarray(self.center + result.x * self.width)

    def intervals(self, terms: Floats, blocks: Flags) -> Intervals:
        """Return each term's confidence interval, from 0 on; None where the losses are flat."""
        from scipy.special import stdtrit  # scipy.stats takes 1 s longer to import

        hessians = self.hessians[blocks].sum(axis=0)
        scores = (self.gradients + self.hessians @ ((terms - self.center) / self.width))[blocks]
        count = len(scores)
        free = np.diag(hessians) > MIN_CURVATURE * count
        noise = np.zeros(len(terms))
        if self.prior is not None:  # where it alone decides, it is as unsure as it says
            noise[self.prior.term] = (self.width[self.prior.term] / self.prior.sd) ** 2
        bread = np.linalg.pinv(hessians[np.ix_(free, free)])
        meat = scores[:, free].T @ scores[:, free] * count / (count - int(free.sum()))
        meat = meat + np.diag(noise[free])
        spread = np.sqrt(np.diag(bread @ meat @ bread)) * self.width[free]
        factor = float(stdtrit(count - int(free.sum()), (1 + CONFIDENCE) / 2))
        found: Intervals = [None] * len(terms)
        for k, half in zip(np.flatnonzero(free), factor * spread, strict=True):
            found[k] = float(max(0.0, terms[k] - half)), float(terms[k] + half)
        return found
