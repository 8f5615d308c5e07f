"""Pareto fronts."""

from collections.abc import Sequence
from math import inf


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indexes of the points that none beats in both coordinates, by the first."""
    order = sorted(range(len(points)), key=lambda k: (-points[k][0], -points[k][1]))
    chosen, most = [], -inf
    for k in order:
        if points[k][1] > most:
            chosen.append(k)
            most = points[k][1]
    return chosen[::-1]
