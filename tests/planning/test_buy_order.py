"""Which order comes first among those that cost nearly the same."""

from types import SimpleNamespace
from typing import cast

from headway.planning.market import Offer, by_headroom


def test_within_two_percent_of_the_price_headroom_decides() -> None:
    """The order of each is judged by its first; those of one order stay as they were."""

    def order(name: str, cost: float, nearness: float) -> Offer:
        return cast("Offer", SimpleNamespace(order=name, cost=cost, nearness=nearness))

    offers = [order("2 x A100", 6.86, 0.98), order("2 x A100", 6.86, 0.1)]
    offers += [order("1 x H100", 6.88, 0.4), order("L4", 7.0, 0.01)]
    assert [by_headroom(offers).index(one) for one in offers] == [1, 2, 0, 3]
