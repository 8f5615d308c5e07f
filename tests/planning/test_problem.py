"""What a plan is asked: by options, by the block `plan`, and what cannot be asked."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.planning.candidate import Candidate
from headway.planning.design import load_point
from headway.planning.measure import Change
from headway.planning.plan import Runs, search_all
from headway.planning.problem import PlanOptions, is_random, make_problem
from headway.planning.runs import read_metric_values
from headway.planning.search import PlannedRun
from simulator import load_scenario, plan, run
from simulator.results.service_levels import parse_slo
from tests.support.scenarios import AZURE, ONE_A_SECOND


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no service level; give --slo 'p99_ttft_ms<=1000'"),
        (["--slo", "p99_ttft"], "--slo p99_ttft: must be METRIC<=NUMBER or METRIC>=NUMBER"),
        (["--slo", "p99_tftt_ms<=3"], "no metric 'p99_tftt_ms'; there are mean, median"),
        (["--slo", "p99_tftt_ms<=3"], "; did you mean p99_ttft_ms?"),
        (["--set", "plan.slo=[goodput>=1s]"], ": plan.slo: goodput>=1s: must be goodput>=NUMBER"),
        (["--slo", "p99_ttft_ms>=3"], "--slo p99_ttft_ms>=3: must be p99_ttft_ms<=NUMBER"),
        (["--slo", "p101_ttft_ms<=3"], "must be a percentile from 0 to 100, as p99"),
        (["--slo", "goodput>=0.9"], "needs bounds in the scenario's `goodput`"),
        (["--slo", "completion>=2"], "as completion>=0.99 (a share from 0 to 1)"),
        (
            ["--slo", "p99_ttft_ms<=9", "--fewest", "cluster.replicas=1..2", "--cheapest"],
            "--cheapest: cannot be used with --fewest, which chooses the cheapest of --vary",
        ),
        (["--slo", "p99_ttft_ms<=9", "--fewest", "seed=4..1"], "must be dotted.key=LOW..HIGH"),
        (["--slo", "p99_ttft_ms<=9", "--fewest", "seed=0..0"], "0 <= LOW <= HIGH and HIGH >= 1"),
        (
            ["--slo", "p99_ttft_ms<=9", "--vary", "workload.request_rate=1,2"],
            "the plan searches workload.request_rate itself: --vary workload.request_rate",
        ),
        (
            [
                *("--slo", "p99_ttft_ms<=9", "--cheapest", "--vary", "gpu.name=L4,L40S"),
                *("--set", "gpu.dollars_per_hour=1"),
            ],
            "gpu.dollars_per_hour: is of one GPU; where gpu.name is varied, vary both",
        ),
        (["--slo", "p99_ttft_ms<=9", "--jobs", "0"], "--jobs 0: must be 1 or more ("),
        (["--slo", "p99_ttft_ms<=9", "--tolerance", "0"], "--tolerance 0: must be more than 0"),
        (["--slo", "p99_ttft_ms<=9", "--tolerance", "5%"], "--tolerance 5%: must be a number such"),
        (["--slo", "p99_ttft_ms<=9", "--min-duration", "-1"], "--min-duration -1: must be more th"),
        (
            ["--slo", "p99_ttft_ms<=9", "--min-duration", "9", "--max-duration", "5"],
            "--max-duration 5: must be at least min_duration (9), not 5",
        ),
        (
            ["--slo", "p99_ttft_ms<=9", "--vary", "engine.max_num_seqs=8,x"],
            "--vary engine.max_num_seqs=x: engine.max_num_seqs: must be a whole number",
        ),
        (
            ["--slo", "p99_ttft_ms<=9", "--vary", "engine.max_num_seqs=8,0"],
            "--vary engine.max_num_seqs=0: engine.max_num_seqs: must be at least 1, not 0",
        ),
        (
            ["--slo", "p99_ttft_ms<=9", "--fewest", "engine.max_num_seqs=0..4"],
            "--fewest engine.max_num_seqs=0: engine.max_num_seqs: must be at least 1, not 0",
        ),
        (
            ["--slo", "p99_ttft_ms<=9", "--set", "workload.max_concurrency=3"],
            "clients that wait for answers slow down with the server",
        ),
    ],
)
def test_a_wrong_question_is_one_clear_error_and_no_file(
    scenario: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    out = scenario.parent / "out"
    command = ["plan", str(scenario), "--set", "workload.num_prompts=20", *args, "--out", str(out)]
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(("least", "longest"), [(None, 2400), (100, 2400), (5000, 5000)])
def test_the_longest_run_follows_the_least_that_is_longer(
    scenario: Path, least: float | None, longest: float
):
    options = PlanOptions(["p99_ttft_ms<=9"], min_duration=least)
    assert make_problem(scenario, options).criteria.max_seconds == longest


def test_where_nothing_meets_the_bounds_the_runs_that_showed_it_are_kept(
    scenario: Path, capsys: pytest.CaptureFixture[str]
):
    """So that other bounds need not run them again."""
    out = scenario.parent / "out"
    command = ["plan", str(scenario), "--set", "workload.num_prompts=20", "--jobs", "1"]
    assert main([*command, "--slo", "output_throughput>=1e9", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert "no configuration meets output_throughput>=1e+09 and completion>=1; " in said
    assert [path.name for path in out.iterdir()] == ["runs.jsonl"]


def test_a_trace_is_run_once_unless_a_seed_makes_a_difference(tmp_path: Path):
    (tmp_path / "t.csv").write_text(AZURE)
    path = tmp_path / "s.yaml"
    path.write_text(
        re.sub("workload: {.*}", "workload: {trace: {path: t.csv}}", ONE_A_SECOND)
        + "cluster: {replicas: 2}\n"
    )
    axes = {"cluster.router": ["round_robin", "random", "least_outstanding"]}
    frame = plan(path, ["p99_ttft_ms<=60000"], axes, cheapest=True, jobs=1)
    runs = frame.set_index("cluster.router")["replications"]
    assert runs.to_dict() == {"round_robin": 1, "random": 3, "least_outstanding": 1}
    for more in (
        "cluster.failures={mtbf: 1000}",
        "cluster.client={timeout: 9, max_retries: 1, jitter: 0.5}",
        "predictor={kind: noisy, sigma: 1}",
        "engine.speculative_config={num_speculative_tokens: 1, acceptance: 0.5}",
    ):
        assert is_random(load_scenario(path, [more]))
    assert not is_random(load_scenario(path, ["cluster.failures={outages: []}"]))
    assert not is_random(load_scenario(path, ["cluster=null"]))


def test_the_block_of_the_scenario_asks_the_question(scenario: Path):
    scenario.write_text(
        ONE_A_SECOND
        + """
goodput: {ttft: 5000}
plan:
  slo: [goodput>=0.9]
  vary: {engine.max_num_seqs: [1, 2]}
  cheapest: true
"""
    )
    frame = plan(scenario, jobs=1)
    assert sorted(frame["engine.max_num_seqs"]) == ["1", "2"]  # at one price
    assert (frame["goodput"] >= 0.9).all()


@pytest.mark.parametrize(("sessions", "requests"), [("null", 200), ("{turns: 4}", 800)])
def test_a_run_has_all_the_requests_that_come_in_its_time(
    scenario: Path, sessions: str, requests: int
):
    """In 100 s, two a second or sessions of four."""
    problem = make_problem(scenario, PlanOptions(["p99_ttft_ms<=9000"]))
    candidate = load_point(scenario, {}, [f"workload.sessions={sessions}"], None, Candidate)
    assert candidate.rate_unit == ("req/s" if sessions == "null" else "sessions/s")
    keys = dict(problem.settings(candidate, PlannedRun(2.0, seconds=100.0)))
    assert keys["workload.num_prompts"] == str(requests)


def test_a_burst_has_all_its_requests_at_once(scenario: Path):
    """As many as are asked for, whatever the scenario's own rate."""
    problem = make_problem(scenario, PlanOptions(["p99_ttft_ms<=9000"]))
    candidate = load_point(scenario, {}, [], None, Candidate)
    keys = dict(problem.settings(candidate, PlannedRun(2.0, burst=500)))
    assert keys["workload.request_rate"] == ".inf"
    assert keys["workload.num_prompts"] == "500"


def test_more_load_is_a_higher_rate_and_more_requests(scenario: Path):
    """A tenth more of two a second, for 100 s."""
    problem = replace(
        make_problem(scenario, PlanOptions(["p99_ttft_ms<=9000"])), change=Change(load=1.1)
    )
    sets = ["workload.request_rate=2"]
    candidate = load_point(scenario, {}, sets, None, Candidate)
    keys = dict(problem.settings(candidate, PlannedRun(2.0, seconds=100.0)))
    assert float(keys["workload.request_rate"]) == pytest.approx(2.2)
    assert keys["workload.num_prompts"] == "220"


def test_a_second_search_has_the_same_more_load(scenario: Path):
    """The runs that confirm had 21 % more for 10 %: the first search had left its rate behind."""
    options = PlanOptions(["mean_ttft_ms<=90000"], fewest="cluster.replicas=1..2")
    sets = ["workload.request_rate=0.2"]
    problem = replace(make_problem(scenario, options, sets), change=Change(load=1.1))
    candidate = load_point(scenario, {}, sets, None, Candidate)
    search_all(problem, [candidate], Runs(1))
    assert candidate.result.best is not None
    keys = dict(problem.settings(candidate, PlannedRun(1, seconds=1000.0)))
    assert float(keys["workload.request_rate"]) == pytest.approx(0.22)
    assert keys["workload.num_prompts"] == "220"


def test_any_percentile_can_be_bounded(scenario: Path):
    result = run(load_scenario(scenario))
    numbers = read_metric_values(result, [parse_slo("p97.5_e2el_ms<=1")])
    frame = result.requests
    assert numbers["p97.5_e2el_ms"] == pytest.approx(frame["e2el"].quantile(0.975) * 1000)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("engine.nope=1..4", "engine.nope: unknown key"),
        ("engine.scheduling_policy=1..4", "must be a name or a mapping"),
    ],
)
def test_a_key_that_cannot_be_searched_is_bad_input(asked: str, error: str, capsys) -> None:
    """It was a plan without an answer, with exit code 1."""
    assert main(["plan", "demo", "--fewest", asked]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headway: error: --fewest {asked.partition('=')[0]}=1: ")
    assert error in line
