"""Pareto fronts."""

from headway.common.pareto import pareto_front


def test_the_front_is_what_nothing_beats():
    """By hand; a point that is beaten in one coordinate and equal in the other is left out."""
    assert pareto_front([(1, 5), (2, 4), (2, 3), (3, 1), (1, 4)]) == [0, 1, 3]
    assert pareto_front([]) == []
