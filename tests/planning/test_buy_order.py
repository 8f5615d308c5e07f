"""Which order comes first among those that cost nearly the same."""

from types import SimpleNamespace
from typing import cast

from headway.planning.market import Offer, by_headroom


def test_within_two_percent_of_the_price_headroom_decides() -> None:
    """The order of each is judged by its first; those of one order stay as they were."""

    def order(name: str, cost: float, strain: float) -> Offer:
        best = SimpleNamespace(strain=(0.0, strain, 0.0))
        return cast("Offer", SimpleNamespace(order=name, cost=cost, best=best))

    offers = [order("2 x A100", 6.86, -0.02), order("2 x A100", 6.86, -0.9)]
    offers += [order("1 x H100", 6.88, -0.6), order("L4", 7.0, -0.99)]
    assert [by_headroom(offers).index(one) for one in offers] == [1, 2, 0, 3]
