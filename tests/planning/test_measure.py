"""One run of a plan: its warm-up, what grows, and when it is broken off."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.planning.measure import _Watch, broken_bound, measure_run
from headway.planning.verdict import LEVELS
from simulator import load_scenario, run
from simulator.core.log import Log
from simulator.results.service_levels import parse_slo
from simulator.results.steady_state import find_growth, find_warmup
from simulator.scenario.draw import make_workload
from tests.support.logs import ObservedRequest, add_request
from tests.support.scenarios import ONE_A_SECOND

P99 = parse_slo("p99_ttft_ms<=1050")
MEDIAN = parse_slo("median_ttft_ms<=1050")


def loaded(path: Path, rate: float, count: int, *more: str):
    return load_scenario(
        path, [f"workload.request_rate={rate}", f"workload.num_prompts={count}", *more]
    )


def test_an_overload_is_broken_off_as_soon_as_it_is_certain(scenario: Path):
    """At twice what is served, more than 5 x 1 % of 4,000 wait over 1 s long before the end."""
    values = measure_run(loaded(scenario, 2.0, 4000), [P99], steady=True)
    assert values["broken"] == "p99_ttft_ms"
    whole = run(loaded(scenario, 2.0, 4000)).request_table()
    ended = whole.finish - whole.sent[0] <= values["run_duration"]
    assert (whole.ttft[ended] > 1.05).sum() > 5 * 0.01 * 4000
    assert values["run_duration"] < 0.3 * whole.finish.max()
    unchanged = measure_run(loaded(scenario, 2.0, 4000), [P99], steady=False)
    assert (unchanged["broken"], unchanged["completed"]) == ("", 4000)


def test_a_run_is_looked_at_whenever_another_hundredth_is_over(scenario: Path):
    """Of 20 one is more: five times the hundredth that P99 allows is one, so two break it."""
    given = loaded(scenario, 2.0, 20)
    log, sent = Log(num_blocks=9, block_size=4, num_seats=1), np.zeros(20)
    watch = _Watch(make_workload(given), given, [P99], None)
    told = [watch(sent, [log])]
    for number in range(2):
        add_request(log, number, ObservedRequest(sent=0.0, scheduled=8.0, tokens=[9.0]))
        told.append(watch(sent, [log]))
    assert told == [False, False, True]
    assert watch.told == "p99_ttft_ms"


def test_what_is_broken_for_certain_is_so_at_the_end(scenario: Path):
    """A bound is named when its part of all requests is over it five times, not before."""
    result = run(loaded(scenario, 0.9, 1000))
    table = result.request_table()
    late = np.sort(table.ttft)[::-1]
    bound = float(late[51] + late[50]) / 2 * 1000  # 51 of 1,000 are above
    assert broken_bound(table, result.scenario, [parse_slo(f"p99_ttft_ms<={bound}")])
    bound = float(late[49] + late[50]) / 2 * 1000
    assert not broken_bound(table, result.scenario, [parse_slo(f"p99_ttft_ms<={bound}")])


def test_the_batches_hold_every_measured_request(scenario: Path):
    values = measure_run(loaded(scenario, 0.7, 1000), [MEDIAN], steady=True)
    assert (values["broken"], values["growing"]) == ("", "")
    shares = values["batches"][MEDIAN.text]
    assert len(shares) == 10
    table = run(loaded(scenario, 0.7, 1000)).request_table()
    late = table.ttft[table.sent >= table.sent[0] + values["warmup_s"]] > 1.05
    assert values["measured"] == len(late)
    assert values["completion"] == 1.0  # of those measured, whatever the warm-up is
    assert values["attainment"] == pytest.approx(1 - late.mean())
    assert shares == [part.mean() for part in np.array_split(late, 10)]
    ttft = 1e3 * table.ttft[table.sent >= table.sent[0] + values["warmup_s"]]
    middle = np.interp(0.5, LEVELS, values["quantiles"][MEDIAN.text])
    assert values["quantiles"][MEDIAN.text][-1] == pytest.approx(ttft.max(), rel=1e-5)
    assert middle == pytest.approx(np.median(ttft), rel=0.05)


def test_a_warm_up_that_is_known_is_left_out(scenario: Path):
    """In place of what the run itself finds, and never more than half of it."""
    own = measure_run(loaded(scenario, 0.7, 1000), [MEDIAN], steady=True)
    given = measure_run(loaded(scenario, 0.7, 1000), [MEDIAN], steady=True, warmup=100.0)
    assert (own["warmup_s"], given["warmup_s"]) == (own["found_warmup_s"], 100.0)
    assert given["found_warmup_s"] == own["found_warmup_s"]
    sent = run(loaded(scenario, 0.7, 1000)).sent
    assert given["measured"] == (sent >= sent[0] + 100.0).sum()
    most = measure_run(loaded(scenario, 0.7, 1000), [MEDIAN], steady=True, warmup=1e6)
    assert most["warmup_s"] == (sent[-1] - sent[0]) / 2


def test_the_ramp_up_of_an_idle_fleet_is_no_growth(tmp_path: Path):
    """Requests of 300 s fill ten replicas for half of the run, and use a tenth of each."""
    path = tmp_path / "s.yaml"
    path.write_text(
        ONE_A_SECOND.replace("base: 0.1", "base: 1")
        .replace("max_num_seqs: 1", "max_num_seqs: 100")
        .replace("num_gpu_blocks_override: 200", "num_gpu_blocks_override: 4000")
        .replace("max_model_len: 256", "max_model_len: 512")
        .replace("output_len: 10", "output_len: 300")
        + "cluster: {replicas: 10}\n"
    )
    result = run(loaded(path, 0.4, 480))
    ramped = run(loaded(path, 0.4, 480))
    assert find_growth(result) != ""  # with the ramp
    warmup = find_warmup(ramped)
    assert warmup is not None
    assert 200 < warmup < 600
    ramped.warmup = warmup
    assert find_growth(ramped) == ""


def test_growth_is_told_by_queue_and_by_what_is_served(scenario: Path):
    for rate in (1.1, 2.0):
        result = run(loaded(scenario, rate, 2000))
        assert find_growth(result) == "requests in the system"
    assert find_growth(run(loaded(scenario, 0.5, 1000))) == ""


def test_a_few_requests_more_in_the_system_are_chance(tmp_path: Path):
    """At 4 requests/s of 20 s each there are 80: in half a minute 12 more or fewer mean nothing."""
    path = tmp_path / "s.yaml"
    path.write_text(
        ONE_A_SECOND.replace("base: 0.1", "base: 2").replace("max_num_seqs: 1", "max_num_seqs: 200")
    )
    told = []
    for seed in range(40):
        result = run(loaded(path, 4.0, 260, f"seed={seed}"))
        result.warmup = 30.0
        told.append(find_growth(result))
    assert told.count("served requests fall behind offered ones") <= 1


def test_growth_of_the_kv_cache_is_told(tmp_path: Path):
    """Ever longer prompts, which take no longer: as many requests are there, with more blocks."""
    path = tmp_path / "s.yaml"
    path.write_text(
        ONE_A_SECOND.replace("max_num_seqs: 1", "max_num_seqs: 64").replace(
            "max_model_len: 256", "max_model_len: 256, max_num_batched_tokens: 8192"
        )
    )
    scenario = loaded(path, 5.0, 1000)
    workload = make_workload(scenario)
    assert find_growth(run(scenario, workload=workload)) == ""
    longer = replace(workload, prompt_tokens=np.linspace(16, 240, 1000).astype(np.int64))
    assert find_growth(run(scenario, workload=longer)) == "KV cache usage"
