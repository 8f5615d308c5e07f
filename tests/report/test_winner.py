"""Who wins a comparison, and why."""

from headway.figures.runs import part_names
from headway.report.comparison import row_per_run
from headway.report.winner import DOLLARS, best_run, winner_lines
from simulator.results.fairness import parts_of


def summary(speed: float, e2el: float, met: bool | None = None, **own: object) -> dict:
    judged = {} if met is None else {"slo_met": met, "slo_attainment": 1.0 if met else 0.7}
    words = {"completed": 10, "output_throughput": speed, "mean_e2el_ms": e2el, "p99_ttft_ms": 5.0}
    return words | {"headway": judged | own}


def test_the_only_run_that_keeps_the_service_levels_wins() -> None:
    runs = [summary(900, 10, met=False), summary(100, 99, met=True)]
    assert best_run(runs) == (1, "the only one that keeps the service levels")
    assert winner_lines(["a", "b"], runs)[0] == (
        "Winner: b: the only one that keeps the service levels."
    )


def test_of_those_that_keep_them_the_cheapest_by_the_token() -> None:
    costs = [{"cluster": {DOLLARS.key: dollars}} for dollars in (2.0, 1.5, 1.0)]
    mets = (True, True, False)
    runs = [summary(100, 9, met=m, **cost) for m, cost in zip(mets, costs, strict=True)]
    place, why = best_run(runs)
    assert place == 1
    assert why == "the lowest cost of a token ($1.5 for 1M) of the 2 that keep the service levels"


def test_of_one_load_the_fastest_for_users_wins_as_throughput_is_the_loads() -> None:
    runs = [summary(100.0, 50, met=True), summary(100.5, 60, met=True)]
    assert best_run(runs)[0] == 0
    runs = [summary(100.0, 50, met=True), summary(102.0, 60, met=True)]
    assert best_run(runs)[0] == 1


def test_where_none_keeps_them_the_nearest_is_named() -> None:
    runs = [summary(1, 1, met=False), summary(1, 1, met=False, slo_attainment=0.9)]
    assert winner_lines(["a", "b"], runs)[:2] == [
        "No winner: none keeps the service levels.",
        "Nearest: b, 90.0% of its requests keep them.",
    ]


def test_the_nearest_keeps_the_most_levels_whatever_its_requests() -> None:
    """One that kept 1 of 4 was called the nearest; of as many the smallest excess decides."""
    texts = [f"client paid: p{k}_ttft_ms<=100" for k in (50, 90, 95, 99)]

    def run(attainment: float, *values: float) -> dict:
        levels = [
            {"bound": b, "value": v, "met": v <= 100} for b, v in zip(texts, values, strict=True)
        ]
        levels.append({"bound": "completion>=1", "value": 1.0, "met": True})
        return summary(1, 1, met=False, slo_attainment=attainment, slo=levels)

    runs = [
        run(0.75, 90, 101, 102, 5470),
        run(0.6, 90, 95, 120, 300),
        run(0.5, 90, 95, 110, 250),
    ]
    told = winner_lines(["fcfs", "priority", "sjf"], runs)
    (nearest,) = [line for line in told if line.startswith("Nearest")]
    assert nearest == ("Nearest: sjf, 2 of 4 service levels kept, 50.0% of its requests keep them.")


def test_of_equals_the_one_with_the_fewest_seats_is_named() -> None:
    """In whatever order they were given."""
    for met, told in (
        (True, "b has the fewest seats for it: 40.0% "),
        (False, "Nearest: b, 90.0% "),
    ):
        runs = [
            summary(1, 1, met=met, slo_attainment=0.9, batch_occupancy=part)
            for part in (0.2, 0.4, 0.1)
        ]
        assert winner_lines(["a", "b", "c"], runs)[1].startswith(told)


def test_without_service_levels_there_is_no_winner_but_leaders() -> None:
    runs = [summary(100, 50), summary(200, 70), {"completed": 0, "headway": {}}]
    assert winner_lines(["a", "b", "c"], runs)[:3] == [
        "No winner: no service level is given (--slo, or goodput in the scenario).",
        "The highest output throughput (200 tok/s): b.",
        "The lowest mean E2EL (50 ms): a.",
    ]
    assert best_run(runs) == (1, "the highest output throughput (200 tok/s)")


def test_equal_runs_have_no_best() -> None:
    assert best_run([summary(1, 1), summary(1, 1)]) == (None, "no difference to speak of")


def test_at_one_price_the_highest_goodput_of_those_that_keep_them() -> None:
    """At the same price per hour a token costs less where more come out, but users want goodput."""
    runs = [summary(100, 50, met=True), summary(120, 60, met=True)]
    for run, goodput, cost in zip(runs, (9.0, 7.0), (1.2, 1.0), strict=True):
        run["request_goodput"] = goodput
        run["headway"][DOLLARS.key] = cost
    assert best_run(runs) == (
        0,
        "the highest request goodput (9 req/s) of the 2 that keep the service levels",
    )


def test_where_prices_differ_the_cheapest_by_the_token_is_named_without_service_levels() -> None:
    runs = [summary(100, 50, **{DOLLARS.key: 1.0}), summary(200, 40, **{DOLLARS.key: 1.5})]
    assert winner_lines(["L40S", "H100"], runs)[:2] == [
        "Winner by price: L40S: the lowest cost of a token ($1 for 1M); no service level is given "
        "(--slo).",
        "The highest output throughput (200 tok/s): H100.",
    ]
    runs = [summary(100, 50, **{DOLLARS.key: 2.0}), summary(200, 40, **{DOLLARS.key: 1.0})]
    assert winner_lines(["slow", "fast"], runs)[0].startswith("No winner")  # the same price


def test_candidates_whose_step_times_nobody_measured_are_named() -> None:
    """Where the others have another cost model: within one the error is common to all."""
    runs = [summary(100, 50), summary(120, 60)]
    runs[0]["headway"] |= {"profile": "a", "step_times": {"unmeasured": None}}
    runs[1]["headway"] |= {"profile": "roofline", "step_times": {"unmeasured": "kernels"}}
    told = [line for line in winner_lines(["H100", "MI300X"], runs) if "without meas" in line]
    assert len(told) == 1
    assert "without measurements: MI300X." in told[0]
    runs[0]["headway"] |= runs[1]["headway"]
    assert not any("without measurements" in line for line in winner_lines(["a", "b"], runs))


def test_of_those_that_keep_them_alike_none_is_nearest() -> None:
    lines = winner_lines(["a", "b"], [summary(1, 1, met=True), summary(1, 1, met=True)])
    assert lines[0] == (
        "No winner: no difference to speak of between the 2 that keep the service levels."
    )
    assert not any(line.startswith("Nearest") for line in lines)


def test_a_run_alone_leads_in_nothing() -> None:
    told = winner_lines(["a"], [summary(100, 9)])
    assert not [line for line in told if "highest" in line or "lowest" in line]
    assert [
        line
        for line in winner_lines(["a", "b"], [summary(100, 9), summary(50, 9)])
        if "highest" in line
    ]


def test_a_run_that_lost_requests_is_the_best_of_nothing() -> None:
    """Those that it served may well have been quick; where all lost some it is as ever."""

    def starred(*lost: int) -> list[bool]:
        given = [
            {
                "p99_ttft_ms": 10.0 * k,
                "mean_ttft_ms": 5.0,
                "completed": 9,
                "failed": n,
                "headway": {},
            }
            for k, n in enumerate(lost, 1)
        ]
        lines = row_per_run([f"run{k}" for k in range(len(lost))], given, "").splitlines()
        return ["*" in line for line in lines if line.startswith("run")]

    assert starred(3, 0, 0) == [False, True, True]
    assert starred(3, 1, 1) == [True, True, True]


BEHIND = {"stationary": False, "trend_per_s": 1.0, "served_by_last_arrival": 0.21}


def test_no_latency_names_a_winner_among_overloaded_runs() -> None:
    """What grows with the run's length is said, with the question that has an answer."""
    runs = [summary(100, 900, **BEHIND), summary(100.2, 9)]
    assert best_run(runs) == (None, "no difference to speak of")
    told = winner_lines(["static", "fcfs"], runs)
    assert told[0].startswith("Overloaded: by the last arrival static served 21% of its requests")
    assert "`headway plan` finds" in told[0]
    assert not any("E2EL" in line for line in told)
    runs = [summary(100, 900, met=True, **BEHIND), summary(90, 9, met=False)]
    assert best_run(runs) == (None, "none keeps the service levels for long: queues grow")
    filling = {**BEHIND, "served_by_last_arrival": 0.97}  # an empty system that fills
    assert best_run([summary(100, 900, met=True, **filling), runs[1]])[0] == 0


def test_points_that_differ_by_less_than_a_percent_are_alike() -> None:
    """Of 100.07 and 100 beside 50 neither is the best: the first is named, with its equal."""
    runs = [summary(50, 9), summary(100, 9), summary(100.07, 9)]
    assert best_run(runs) == (
        1,
        "the highest output throughput (100 tok/s), to which another is within 1%",
    )
    runs[2] = summary(100.07, 7)
    assert best_run(runs) == (2, "the lowest mean E2EL (7 ms)")


def test_clients_that_are_priorities_are_told_once() -> None:
    """A priority of two clients has a row of its own."""
    fast, slow = {"mean_ttft_ms": 1.0}, {"mean_ttft_ms": 2.0}
    clients = {"paid": fast, "free": slow}
    same = {"headway": {"per_client": clients, "per_priority": {"0": fast, "1": slow}}}
    assert parts_of(same) == {"per_client": clients}
    assert part_names([same, same]) == [("per_client", "paid"), ("per_client", "free")]
    other = {"headway": {"per_client": clients, "per_priority": {"0": {"mean_ttft_ms": 1.5}}}}
    assert parts_of(other).keys() == {"per_client", "per_priority"}
