"""Service levels of a run: how many requests keep their bounds, worked out by hand."""

import re
from math import inf

import numpy as np
import pytest

from headway.report.text import slo_lines
from simulator.costs.noise import ScaledCost
from simulator.costs.piecewise import PiecewiseCost
from simulator.results.service_levels import (
    Judged,
    moved,
    parse_slo,
    request_bounds,
    service_levels,
    step_span,
)
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import run
from simulator.simulation.stream import run_streamed
from simulator.util.errors import HeadwayError

# Steps of 1 s; of one request at a time, so that the k-th waits for k whole requests.
ONE_AT_A_TIME = {
    "model": "tiny-test",
    "gpu": {"name": "A100-80GB"},
    "engine": {
        "name": "textbook",
        "max_num_seqs": 1,
        "num_gpu_blocks_override": 100,
        "max_model_len": 64,
    },
    "cost": {"kind": "linear", "base": 1.0, "per_token": 0, "per_context": 0},
    "workload": {"num_prompts": 4, "request_rate": inf, "input_len": 8, "output_len": 3},
}


def scenario(**more: object) -> Scenario:
    return Scenario.model_validate(ONE_AT_A_TIME | more)


def test_attainment_per_bound_and_jointly() -> None:
    """TTFTs are 1, 4, 7 and 10 s, E2ELs 3, 6, 9 and 12 s."""
    own = run(scenario(goodput={"ttft": 4000.0, "e2el": 9000.0})).summary()["headway"]
    assert own["slo_attainment_ttft"] == 0.5
    assert own["slo_attainment_e2el"] == 0.75
    assert own["slo_attainment"] == 0.5
    assert (own["slo_ttft_ms"], own["slo_e2el_ms"]) == (4000.0, 9000.0)
    assert own["slo"] == [
        {"bound": "goodput>=0.99", "value": 0.5, "met": False},
        {"bound": "completion>=1", "value": 1.0, "met": True},
    ]
    assert own["slo_met"] is False


def test_a_percentile_bounds_each_request_and_is_judged_itself() -> None:
    """The median TTFT of 1, 4, 7, 10 is 5.5 s; half of them keep it."""
    found = run(scenario(slo=["p50_ttft_ms<=5500", "output_throughput>=0.9"])).summary()
    own = found["headway"]
    assert own["slo_attainment_ttft"] == own["slo_attainment"] == 0.5
    assert [(one["bound"], one["value"], one["met"]) for one in own["slo"]] == [
        ("p50_ttft_ms<=5500", 5500.0, True),
        ("output_throughput>=0.9", 1.0, True),
        ("completion>=1", 1.0, True),
    ]
    assert own["slo_met"] is True
    assert "p50_ttft_ms" not in found


def test_a_failed_request_keeps_no_bound() -> None:
    """All prompts are too long for the engine."""
    load = {"num_prompts": 4, "request_rate": inf, "input_len": 70, "output_len": 3}
    own = run(scenario(goodput={"ttft": 1e6}, workload=load)).summary()["headway"]
    assert own["slo_attainment"] == 0.0
    assert own["slo_met"] is False


def test_without_bounds_there_is_no_verdict() -> None:
    own = run(scenario()).summary()["headway"]
    assert not [key for key in own if key.startswith("slo")]


def test_a_streamed_run_counts_the_same() -> None:
    asked = scenario(goodput={"ttft": 4000.0}, slo=["goodput>=0.5"])
    kept, streamed = run(asked).summary()["headway"], run_streamed(asked)["headway"]
    names = [key for key in kept if key.startswith("slo")]
    assert {key: streamed[key] for key in names} == {key: kept[key] for key in names}


def test_the_loosest_percentile_bounds_requests_and_goodput_where_it_is_asked_for() -> None:
    slos = [parse_slo(t) for t in ("p50_ttft_ms<=200", "p99_ttft_ms<=900", "mean_tpot_ms<=9")]
    assert request_bounds({}, slos) == {"ttft": 900.0}
    goodput = {"ttft": 50.0, "e2el": 7.0}
    assert request_bounds(goodput, slos) == {"ttft": 900.0}
    assert request_bounds(goodput, [*slos, parse_slo("goodput>=0.9")]) == goodput
    assert request_bounds(goodput, slos[2:]) == request_bounds(goodput, []) == goodput
    assert request_bounds({}, [parse_slo("p99_queue_time_ms<=5")]) == {}


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ("p99_tft_ms<=1", "no metric 'p99_tft_ms'"),
        ("throughput>=3", r"finish; did you mean output_throughput\?$"),
        ("goodput>=0.9", "needs bounds"),
        ("ttft_p99_ms<=1000", r"; did you mean p99_ttft_ms\?$"),
        ("p99_ttft_s<=1", r"as p99_ttft_ms<=1000 \(ms\), and .*; did you mean p99_ttft_ms\?$"),
        ("p99_ttft_ms<=1s", r"must be p99_ttft_ms<=NUMBER, as p99_ttft_ms<=1000 \(ms, more than"),
        ("p99_ttft_ms<=inf", "must be p99_ttft_ms<=NUMBER"),
        ("p99_ttft_ms<=1_000", "must be METRIC<=NUMBER"),
        ("median_tpot_ms>=30", r"as median_tpot_ms<=1000 \(ms, more than 0\)"),
        ("goodput>=99%", r"as goodput>=0.99 \(a share from 0 to 1\)"),
        ("goodput>=99", r"as goodput>=0.99 \(a share from 0 to 1\)"),
        ("request_throughput>=4/s", r"as request_throughput>=100 \(per s\)"),
        ("finish<=6", "as finish<=6:00"),
        ("finish<=0:00", "as finish<=6:00"),
        ("finish<=6:70", "as finish<=6:00"),
        ("finish>=6:00", "must be finish<=NUMBER"),
    ],
)
def test_wrong_levels_are_refused(slo: str, message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        service_levels(scenario(slo=[slo]))


def close_to(bound: str, **ends: object) -> str:
    """Say how 39.45 lies beside a bound."""
    return str(Judged.of({"bound": bound, "value": 39.45} | ends))


def test_a_verdict_carries_the_error_of_the_clock() -> None:
    """39.45 ms and 3 % are 38.3 to 40.6 ms: 40 lies between; 45 and 35 do not."""
    known = {"ends": [38.3, 40.6], "step_times": [0.97, 1.03]}
    told = "kept, but steps about 1.5 % slower break it"
    assert close_to("p99_tpot_ms<=40", **known) == told
    assert close_to("p99_tpot_ms<=45", **known) == "kept with 12.3 % to spare"
    assert close_to("p99_tpot_ms<=35", **known) == "broken by 12.7 %"
    assert close_to("p99_tpot_ms<=40") == "kept with 1.37 % to spare"
    assert close_to("p99_tpot_ms<=4") == "broken, 9.86 times the bound"
    share = {"bound": "goodput>=0.99", "value": 0.088, "step_times": [0.8, 1.25]}
    share |= {"ends": [0.01, 0.999]}
    assert str(Judged.of(share)) == (
        "broken: 8.8 % of requests keep it, within the error of the step times"
    )
    assert str(Judged.of(share | {"kept_until": 0.81})) == (
        "broken: 8.8 % of requests keep it, but steps about 19 % faster keep it"
    )
    rate = {"bound": "output_throughput>=39", "ends": [38.3, 40.6], "step_times": [0.97, 1.03]}
    assert str(Judged.of({**rate, "value": 39.45})) == "kept, but steps about 1.2 % slower break it"
    share["value"] = 0.995
    assert (
        str(Judged.of(share | {"ends": [0.991, 0.999]}))
        == "kept: 99.5 % of requests keep it, 0.5 points to spare"
    )
    for value, told in ((1.0, "1 point"), (0.88, "11 points")):
        assert f", {told} " in str(Judged.of({"bound": "goodput>=0.99", "value": value}))
    assert str(Judged.of({"bound": "completion>=1", "value": 1.0})) == (
        "kept: 100 % of requests keep it"
    )


def test_the_ends_are_what_slower_and_faster_steps_give() -> None:
    """Latencies of one request alone grow with its steps; goodput is counted again."""
    keys = ["workload.num_prompts=40", "workload.request_rate=0.5", "goodput={e2el: 6000}"]
    keys += ["slo=[p50_e2el_ms<=4000, goodput>=0.5]"]
    demo = load_scenario("demo", keys)
    cost = resolve(demo).cost
    (low, high), found = step_span([cost]), run(demo).summary()["headway"]["slo"]
    for end, factor in ((0, low), (1, high)):
        slower = run(demo, cost=ScaledCost(cost, factor, factor)).summary()["headway"]["slo"]
        assert found[0]["ends"][end] == pytest.approx(slower[0]["value"], rel=0.02)
        assert found[1]["ends"][1 - end] == pytest.approx(slower[1]["value"], abs=0.03)
    until = found[1]["kept_until"]
    kept = run(demo, cost=ScaledCost(cost, 0.94 * until, 0.94 * until)).summary()["headway"]["slo"]
    lost = run(demo, cost=ScaledCost(cost, 1.06 * until, 1.06 * until)).summary()["headway"]["slo"]
    assert (kept[1]["met"], lost[1]["met"]) == (True, False)
    assert step_span([cost, PiecewiseCost([[1, 1e-3]])]) is None


def test_steps_as_much_faster_as_a_verdict_says_keep_the_level() -> None:
    """Queues move by more than steps: 3 % do where the verdict says 8 %."""
    demo = load_scenario("demo", ["workload.request_rate=4.2", "slo=[p99_tpot_ms<=47]"])
    cost = resolve(demo).cost
    level = run(demo).summary()["headway"]["slo"][0]
    (percent,) = re.search(r"broken, but steps about (\S+) % f", str(Judged.of(level))).groups()
    faster = 1.0 - float(percent) / 100.0
    again = run(demo, cost=ScaledCost(cost, faster, faster)).summary()["headway"]["slo"][0]
    assert (level["met"], again["met"]) == (False, True)


def test_near_saturation_what_queues_moves_by_more_than_steps() -> None:
    """Steps of +-10 %, an elasticity of 3: E2EL is kept by 20 %, or by 6 % of the steps."""
    one = {"bound": "p99_e2el_ms<=12000", "value": 1e4, "step_times": [0.9, 1.1]}
    one |= {"ends": [9e3, 1.1e4], "met": True}
    assert str(Judged.of(one)) == "kept with 16.7 % to spare"
    near = {**one, **moved(one, 3.0)}
    assert near["ends"] == pytest.approx([1e4 * 0.9**3, 1e4 * 1.1**3])
    assert str(Judged.of(near)) == "kept, but steps about 6.3 % slower break it"  # 1.2 ** (1 / 3)
    tokens = {**one, "bound": "p90_tpot_ms<=12000"}
    assert not moved(tokens, 3.0)
    assert not moved(one, 0.9)
    assert not moved(one, float("inf"))


def test_levels_of_a_client_and_of_a_priority_are_of_its_requests_alone() -> None:
    """TTFTs of 1, 4, 7 and 10 s: client a has 1 and 7, priority 5 has 7 and 10."""
    slo = ["client a: p100_ttft_ms<=7000", "priority 5:p100_ttft_ms<=9000", "client b:goodput>=0.5"]
    found = scenario(slo=slo, goodput={"ttft": 4000.0})
    load = make_workload(found)
    load.client, load.priority = ["a", "b", "a", "b"], np.array([0, 0, 5, 5])
    own = run(found, workload=load).summary()["headway"]
    told = {one["bound"]: (one["value"], one["met"]) for one in own["slo"]}
    assert told["client a:p100_ttft_ms<=7000"] == (7000.0, True)
    assert told["priority 5:p100_ttft_ms<=9000"] == (10000.0, False)
    assert told["client b:goodput>=0.5"] == (0.5, True)
    assert own["per_client"]["b"]["mean_ttft_ms"] == 7000.0


CLASSES = {"ttft": 4000.0, "client a": {"e2el": 9000.0}, "priority 5": {"tpot": 1000.0}}


def test_a_class_has_bounds_of_its_own_and_its_share_is_a_level() -> None:
    """TTFTs of 1, 4, 7, 10 s, E2ELs 2 s later: a's 3 and 9 are kept, 4 of all's, and any TPOT."""
    found = scenario(goodput=CLASSES)
    load = make_workload(found)
    load.client, load.priority = ["a", "b", "a", "b"], np.array([0, 0, 5, 5])
    own = run(found, workload=load).summary()["headway"]
    levels = ["goodput>=0.99", "client a:goodput>=0.99", "priority 5:goodput>=0.99"]
    assert [one["bound"] for one in own["slo"]] == [*levels, "completion>=1"]
    assert all(one["value"] == 1.0 for one in own["slo"])
    assert (own["slo_ttft_ms"], own["slo_attainment"]) == (None, 1.0)
    tight = scenario(goodput={**CLASSES, "client a": {"e2el": 8000.0}}, slo=["goodput>=0.9"])
    own = run(tight, workload=load).summary()["headway"]
    assert own["slo"][0]["value"] == 0.75
    assert own["per_client"]["a"]["slo_attainment"] == 0.5
    (text,) = (one["text"] for one in own["diagnosis"] if one["rule"] == "levels")
    assert "P90 E2EL is 1.05 times its bound (8,400 ms; the bound is 8,000 ms)" in text


def test_bounds_of_a_class_are_read_written_and_refused() -> None:
    found = scenario(goodput=CLASSES)
    assert found.goodput.model_dump(exclude_unset=True) == CLASSES
    assert found.goodput.of("b", 5, "") == {"tpot": 1000.0}
    assert found.goodput.of("b", 0, "") == {"ttft": 4000.0}
    with pytest.raises(ValueError, match=r"goodput\.client a\.ttfs: unknown key"):
        scenario(goodput={"client a": {"ttfs": 1.0}})
    wrong = ONE_AT_A_TIME | {"goodput": {"clientpaid": {"ttft": 1.0}}}
    with pytest.raises(HeadwayError, match=r"goodput\.clientpaid: .*did you mean client NAME"):
        load_scenario(wrong)
    exempt = scenario(goodput={"ttft": 1.0, "client b": {}})
    assert [slo.text for slo in service_levels(exempt)] == ["goodput>=0.99", "completion>=1"]
    assert exempt.goodput.of("b", 0, "") == {}
    with pytest.raises(HeadwayError, match=r"goodput\.client a: no request is of client a"):
        run(found)


def test_the_last_request_of_a_client_ends_by_a_time() -> None:
    """The four end after 3, 6, 9 and 12 s."""
    slo = ["client a: finish<=0:00:09", "finish<=0:00:10"]
    found = scenario(slo=slo)
    load = make_workload(found)
    load.client = ["a", "b", "a", "b"]
    result = run(found, workload=load)
    told = [(one["bound"], one["value"], one["met"]) for one in result.summary()["headway"]["slo"]]
    assert told[:2] == [("client a:finish<=0:00:09", 9.0, True), ("finish<=0:00:10", 12.0, False)]
    assert ("finish<=0:00:10", "0:00:12: broken by 20 %") in slo_lines(result.summary())
    with pytest.raises(HeadwayError, match="or of the last one, needs all of them"):
        run_streamed(scenario(slo=slo[1:]))


def test_a_level_of_requests_that_nobody_sends_is_refused() -> None:
    found = scenario(slo=["client paid:p95_ttft_ms<=1000"])
    with pytest.raises(HeadwayError, match="no request is of client paid; none names a client"):
        run(found)
    load = make_workload(found)
    load.client = ["free", "free", "trial", "free"]
    with pytest.raises(HeadwayError, match="client paid; there are free, trial"):
        run(found, workload=load)
    with pytest.raises(HeadwayError, match="--no-tables: slo: a level of some requests"):
        run_streamed(found)
    with pytest.raises(HeadwayError, match="a client is named 'client paid"):
        service_levels(scenario(slo=["paid:p95_ttft_ms<=1000"]))


@pytest.mark.medium
@pytest.mark.parametrize("metric", ["p90_tpot_ms", "p90_ttft_ms", "mean_e2el_ms"])
@pytest.mark.parametrize("share", [0.97, 1.03])
def test_the_error_that_turns_a_verdict_turns_it(metric: str, share: float) -> None:
    """Steps that are as much faster or slower as it says are simulated."""
    scenario = load_scenario("demo", ["workload.num_prompts=300", "workload.request_rate=4"])
    value = _value(scenario, metric, 1.0)
    slo = parse_slo(f"{metric}<={value * share!r}")
    told = str(Judged(slo, value, (0.8 * value, 1.2 * value), (0.8, 1.2)))
    found = re.search(r"steps (?:are |about )?([\d.]+) % (faster|slower)", told)
    assert found is not None
    off = float(found[1]) / 100
    faster = found[2] == "faster"
    assert slo.met(_value(scenario, metric, 1 - off if faster else 1 + off)) == faster


def _value(scenario: Scenario, metric: str, factor: float) -> float:
    """A metric where all steps take `factor` times as long."""
    cost = ScaledCost(resolve(scenario).cost, factor, factor)
    return float(run(scenario, cost=cost).summary()[metric])
