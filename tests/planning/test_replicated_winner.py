"""The winner of replicated runs: by the rule of single ones, as far as chance allows."""

import numpy as np
import pytest

from headway.planning.replications import differences, overloaded_lines, winner_lines


def runs_with(*attainments: list[float], met: bool = True) -> list[list[dict[str, float]]]:
    return [[{"slo_attainment": value, "slo_met": met} for value in same] for same in attainments]


def test_the_winner_is_told_from_all_others_or_there_is_none():
    """Differences of 0.4, 0.41, 0.39 and 0.4 are no chance; 0.1, -0.1, 0.1, -0.09 are."""
    near, far = [0.8, 1.0, 0.8, 0.99], [0.5, 0.49, 0.51, 0.5]
    best = [0.92, 0.92, 0.92, 0.92]
    kept = "the highest SLO attainment (92 %) of the {} that keep the service levels"
    assert winner_lines(["a", "b"], runs_with(far, best)) == [
        f"Winner: b: {kept.format(2)}; significant, p <= 0.001 by Holm."
    ]
    (line,) = winner_lines(["near", "far", "best"], runs_with(near, far, best))
    assert line.startswith(f"No winner: best leads: {kept.format(3)}; near may be as good: p ")
    assert winner_lines(["a", "b"], runs_with(best, best)) == [
        "No winner: no difference to speak of between the 2 that keep the service levels."
    ]


def test_replications_name_the_winner_that_single_runs_name():
    """All requests of both are in time, so E2EL decides, as it does in one run of each."""
    runs = runs_with([1.0] * 3, [1.0] * 3)
    for same, e2el in zip(runs, ((90.0, 91.0, 92.0), (50.0, 51.0, 52.0)), strict=True):
        for one, value in zip(same, e2el, strict=True):
            one["mean_e2el_ms"] = value
    assert winner_lines(["a", "b"], runs) == [
        "Winner: b: the lowest mean E2EL (51 ms) of the 2 that keep the service levels; "
        "significant, p <= 0.001 by Holm."
    ]
    for one in (one for same in runs for one in same):
        del one["slo_met"], one["slo_attainment"]
        one["output_throughput"] = 10.0
    lines = winner_lines(["a", "b"], runs)
    assert lines[0].startswith("No winner: no service level")
    assert lines[1:] == ["The lowest mean E2EL (51 ms): b; significant, p <= 0.001 by Holm."]


GROWS = {"stationary": False, "trend_per_s": 2.0, "served_by_last_arrival": 0.5}


def test_a_run_is_overloaded_by_its_growing_replications_not_by_its_middle_one():
    """Three of eight grow, though not the one that serves the middle share; one of 20 is chance."""
    steady = {"completed": 9, **GROWS, "stationary": True, "output_throughput": 1.0}
    some = [{**steady, **GROWS, "served_by_last_arrival": x} for x in (0.1, 0.2, 0.9)]
    runs = [[*some, *[steady] * 5], [steady] * 8]
    (line,) = [told for told in winner_lines(["a", "l"], runs) if "Overloaded" in told]
    assert "arrival a served 90% of its requests" in line
    assert overloaded_lines(["a"], [[some[0], *[steady] * 19]]) == []


def test_no_run_that_breaks_the_levels_wins_replicated_either():
    """One rule with and without replications; most replications decide whether a run keeps them."""
    runs = runs_with([0.2, 0.21, 0.2], [0.5, 0.52, 0.5], [0.4, 0.6, 0.3], met=False)
    assert winner_lines(["a", "b", "c"], runs)[0] == "No winner: none keeps the service levels."
    for one in runs[1][:2]:
        one["slo_met"] = True
    (line,) = winner_lines(["a", "b", "c"], runs)
    assert line.startswith(
        "No winner: b leads: the only one that keeps the service levels; c may be"
    )
    runs[2] = [dict(one) for one in runs[0]]
    (line,) = winner_lines(["a", "b", "c"], runs)
    assert line.startswith("Winner: b: the only one that keeps the service levels; significant")


def test_the_nearest_of_replicated_runs_keeps_the_most_levels_too():
    """Of two given levels a keeps one and b none; b serves more requests in time."""
    runs = runs_with([0.2, 0.21, 0.2], [0.5, 0.52, 0.5], [0.5, 0.52, 0.5], met=False)
    for same, ttft in zip(runs, (90.0, 101.0, 102.0), strict=True):
        for one in same:
            levels = {"p99_ttft_ms<=100": ttft, "p90_tpot_ms<=20": 30.0, "completion>=1": 1.0}
            one |= {f"slo {level}": value for level, value in levels.items()}
    _, told = winner_lines(["a", "b", "c"], runs)
    assert told == "Nearest: a, 1 of 2 service levels kept, 20.3% of its requests keep them."
    for one in runs[0]:
        one["slo completion>=1"] = 0.99
    assert winner_lines(["a", "b", "c"], runs)[1].startswith("Nearest: b, 0 of 2 service levels")
    for one in runs[0]:
        one["slo p90_tpot_ms<=20"] = 10.0
    for one in (one for same in runs for one in same):
        one["slo completion>=0.995"] = one.pop("slo completion>=1")
    assert winner_lines(["a", "b", "c"], runs)[1].startswith("Nearest: b, 1 of 3 service levels")


@pytest.mark.parametrize("others", [1, 2])
def test_the_table_and_the_winner_tell_the_same_p(others):
    """A p of 0.03 for throughput alone is chance among several lines, for the winner, too."""
    rng = np.random.default_rng(0)

    def same(speeds: list[float]) -> list[dict[str, float]]:
        noise = ("p99_ttft_ms", "mean_e2el_ms", "mean_tpot_ms", "p99_tpot_ms")
        return [{"output_throughput": x, **{k: rng.uniform(9, 10) for k in noise}} for x in speeds]

    runs = [same([10.0, 10.1, 9.9]), *(same([10.5, 10.7, 10.2]) for _ in range(others))]
    found = next(one for one in differences(runs)[0] if one.metric == "output_throughput")
    assert found.p < 0.05 < found.adjusted
    line = winner_lines(["a", "b", "c"][: others + 1], runs)[1]
    assert "may be as good" in line
    if others == 1:
        assert f": p {found.adjusted:.2g} by Holm" in line
