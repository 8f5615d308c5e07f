"""A place that is looked at again and again is judged no more rashly than one that is seen once."""

import random

from headway.planning.verdict import LOOKS, Criteria, judge
from simulator.results.service_levels import parse_slo

ON_AVERAGE = Criteria([parse_slo("mean_ttft_ms<=100")])


def runs(values: list[float]) -> list[dict[str, float]]:
    return [{"mean_ttft_ms": value} for value in values]


def test_what_one_look_tells_ten_looks_do_not() -> None:
    """Five runs of mean 93 and deviation 5: the 95 % interval ends below 100, the 99.5 % above."""
    values = [93 + 5 * one for one in (-1.4, -0.5, 0.0, 0.5, 1.4)]
    assert judge(runs(values), ON_AVERAGE).kept is True
    assert judge(runs(values), ON_AVERAGE, strict=True).kept is None


def test_ten_looks_are_wrong_no_more_often_than_the_confidence_allows() -> None:
    """Of places that are just on their bound, each looked at after 3, 4, ... 12 runs, so many get a
    verdict: at most one in twenty if each look is strict (Bonferroni), clearly more if none is."""
    rng, places = random.Random(5), 300
    told = {True: 0, False: 0}
    for _ in range(places):
        values = [rng.gauss(100, 10) for _ in range(2 + LOOKS)]
        for strict in told:
            looks = (
                judge(runs(values[:count]), ON_AVERAGE, strict=strict).kept
                for count in range(3, 3 + LOOKS)
            )
            told[strict] += any(look is not None for look in looks)
    allowed = places * (1 - ON_AVERAGE.confidence)
    assert told[True] <= allowed
    assert told[False] > 2 * allowed
