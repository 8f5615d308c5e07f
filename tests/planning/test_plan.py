"""`headway plan`: the largest load, the fewest, the cheapest, and what it says if there is none."""

import csv
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import load_scenario, plan, run
from simulator.cli.main import main
from simulator.planning.plan_report import bound_ratio
from simulator.planning.question import Question, is_random
from simulator.planning.search import (
    Answer,
    Rules,
    Search,
    Trial,
    fewest,
    interval,
    largest_rate,
    not_monotone,
    verdict,
)
from simulator.planning.service_levels import parse_slo, read_numbers
from simulator.planning.vllm_serve import serve_command
from simulator.util.errors import HeadwayError
from simulator.util.pareto import front
from tests.support.scenarios import AZURE

SLO = parse_slo("p99_ttft_ms<=100")

# A step takes 0.1 s whatever is in it, and one request has room: 1 prefill and 9 decodes are 1 s.
ONE_A_SECOND = """
model: tiny-test
gpu: {name: A100-80GB}
engine: {max_num_seqs: 1, num_gpu_blocks_override: 200, max_model_len: 256}
cost: {kind: linear, base: 0.1}
workload: {num_prompts: 200, request_rate: 0.2, burstiness: 1, input_len: 20, output_len: 10}
seed: 3
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "one.yaml"
    path.write_text(ONE_A_SECOND)
    return path


def play(search: Search, measure) -> Answer:
    """Answer a search's wishes by a function of place and replication."""
    wishes = next(search)
    while True:
        try:
            wishes = search.send([{"p99_ttft_ms": measure(at, k)} for at, k in wishes])
        except StopIteration as end:
            return end.value


@given(st.floats(0.02, 300.0), st.floats(0.5, 5.0))
def test_the_largest_rate_is_found_within_the_tolerance(limit: float, start: float):
    found = play(largest_rate(start, Rules([SLO])), lambda at, _: 50.0 if at <= limit else 200.0)
    assert found.best is not None
    assert limit / 1.02 <= found.best.at <= limit
    low, high = found.between
    assert low == found.best.at
    assert limit < high <= 1.021 * low


@given(st.integers(1, 64))
def test_the_fewest_is_exact_and_the_place_below_was_seen_to_fail(least: int):
    found = play(fewest(1, 64, Rules([SLO])), lambda at, _: 50.0 if at >= least else 200.0)
    assert found.best is not None
    assert found.best.at == least
    assert least == 1 or any(t.at == least - 1 and not t.ok for t in found.trials)
    assert len(found.trials) <= 13  # doubling and bisection, not one by one


def test_a_search_without_an_end_gives_up():
    always = play(largest_rate(1.0, Rules([SLO])), lambda *_: 50.0)
    assert always.best is not None
    assert always.best.at == 2.0**10
    never = play(largest_rate(1.0, Rules([SLO])), lambda *_: 200.0)
    assert never.best is None
    assert min(trial.at for trial in never.trials) == 2.0**-10
    assert play(fewest(1, 5, Rules([SLO])), lambda *_: 200.0).best is None


def test_replications_are_added_until_the_interval_tells():
    noise = random.Random(1)

    def noisy(at: float, _: int) -> float:
        return 90.0 * at + noise.gauss(0, 8)

    found = play(largest_rate(1.0, Rules([SLO], replications=3, most_replications=12)), noisy)
    counts = {len(trial.runs) for trial in found.trials}
    assert 3 in counts  # far from the bound three are enough
    assert 12 in counts  # near to it they are not
    assert all(3 <= count <= 12 for count in counts)
    assert found.best is not None
    assert found.best.at == pytest.approx(100 / 90, rel=0.06)


def test_the_interval_is_students():
    runs = [{"x": value} for value in (1.0, 2.0, 3.0)]
    found = interval(runs, "x", 0.95)
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(
        4.302652729911275 / 3**0.5
    )  # t(0.975, 2) * 1 / sqrt(3)
    assert interval(runs[:1] * 4, "x").half_width == 0.0


def test_the_verdict_is_open_while_the_interval_holds_the_bound():
    rules = Rules([SLO])

    def told(*values: float) -> bool | None:
        return verdict([{"p99_ttft_ms": value} for value in values], rules)

    assert told(50, 51, 52) is True
    assert told(150, 151, 152) is False
    assert told(60, 90, 120) is None
    assert told(99) is True  # a single run has no interval


def test_more_that_is_worse_is_told():
    one, two = Trial(1, ok=True), Trial(2, ok=False)
    assert not_monotone([one, two], rising=True) == [(one, two)]
    assert not_monotone([one, two], rising=False) == []
    two.sure = False
    assert not_monotone([one, two], rising=True) == []


def test_the_front_is_what_nothing_beats():
    assert front([(1, 5), (2, 4), (2, 3), (3, 1), (1, 4)]) == [0, 1, 3]
    assert front([]) == []


def test_the_rate_of_a_server_that_takes_a_second_a_request(scenario: Path):
    """M/D/1 with unit service: the mean wait rho / (2 (1 - rho)) is 1 s at rho = 2/3.

    The first token comes a step later.
    """
    frame = plan(scenario, ["mean_ttft_ms<=1100"], jobs=1)
    row = frame.iloc[0]
    assert row["holds"]
    assert row["at"] == pytest.approx(2 / 3, rel=0.12)
    assert row["surely_holds"] <= 2 / 3 <= row["surely_fails"]
    assert row["mean_ttft_ms"] <= 1100


def test_the_fewest_seats_and_the_files(scenario: Path, capsys: pytest.CaptureFixture[str]):
    out = scenario.parent / "out"
    args = ["--slo", "p99_ttft_ms<=500", "--fewest", "engine.max_num_seqs=1..16", "--jobs", "1"]
    assert main(["plan", str(scenario), *args, "--out", str(out)]) == 0
    report = json.loads((out / "plan.json").read_text())
    assert report["slo"] == ["p99_ttft_ms<=500", "completion>=1"]
    (row,) = report["candidates"]
    seats = int(row["at"])
    assert 1 < seats < 16
    assert f"* the scenario  {seats:>19}" in capsys.readouterr().out
    again = load_scenario(out / "best.yaml")
    assert again.engine.max_num_seqs == seats
    values = read_numbers(run(again), [parse_slo("p99_ttft_ms<=500")])
    with (out / "runs.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if int(float(r["engine.max_num_seqs"])) == seats]
    assert float(rows[0]["p99_ttft_ms"]) == values["p99_ttft_ms"]
    command = (out / "vllm_serve.sh").read_text()
    assert f"--max-num-seqs {seats} " in command
    assert (out / "plan.png").stat().st_size > 10_000
    fewer = run(load_scenario(scenario, [f"engine.max_num_seqs={seats - 1}"]))
    assert read_numbers(fewer, [])["p99_ttft_ms"] > 500


def test_the_cheapest_that_holds_the_load(scenario: Path):
    frame = plan(
        scenario,
        ["p99_ttft_ms<=60000"],
        {"gpu.name": ["H100-80GB", "L40S", "A100-80GB"]},
        cheapest=True,
        jobs=1,
    )
    assert frame["gpu.name"].iloc[0] == "L40S"  # the same speed here, for the least money
    assert frame["dollars_per_hour"].iloc[0] == 1.86


def test_optuna_tries_some_of_the_combinations_and_finds_the_best(scenario: Path):
    pytest.importorskip("optuna")
    args = [
        "plan",
        str(scenario),
        "--slo",
        "p90_ttft_ms<=500",
        "--replications",
        "1",
        "--jobs",
        "1",
    ]
    args += ["--vary", "engine.max_num_seqs=1,2,3,4,5,6,7,8", "--set", "workload.num_prompts=40"]
    texts = []
    for folder in ("a", "b"):
        out = scenario.parent / folder
        assert main([*args, "--optuna", "8", "--out", str(out)]) == 0
        texts.append((out / "plan.json").read_bytes())
    report = json.loads(texts[0])
    assert 3 <= len(report["candidates"]) <= 6
    prices = [row["dollars_per_hour"] for row in report["candidates"]]
    assert prices[report["best"]] == min(prices)
    assert texts[0] == texts[1]


def test_a_candidate_that_cannot_run_is_told_and_the_others_are_searched(
    scenario: Path, capsys: pytest.CaptureFixture[str]
):
    args = ["--slo", "p99_ttft_ms<=60000", "--cheapest", "--vary", "engine.max_num_seqs=1,5000"]
    out = scenario.parent / "out"
    assert main(["plan", str(scenario), *args, "--jobs", "1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "cannot run" in said
    assert "max_num_batched_tokens: must be at least max_num_seqs (5000)" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--slo", "p99_ttft_ms<=1"], "no configuration meets p99_ttft_ms<=1 and completion>=1; "),
        ([], "no service level; give --slo 'p99_ttft_ms<=1000'"),
        (["--slo", "p99_ttft"], "--slo p99_ttft: must be METRIC<=NUMBER or METRIC>=NUMBER"),
        (["--slo", "p99_tftt_ms<=3"], "no metric 'p99_tftt_ms'; there are mean, median"),
        (["--slo", "p99_ttft_ms>=3"], "p99_ttft_ms is to be <= something"),
        (["--slo", "p101_ttft_ms<=3"], "a percentile is from 0 to 100"),
        (["--slo", "goodput>=0.9"], "needs bounds in the scenario's `goodput`"),
        (["--slo", "completion>=2"], "a share is from 0 to 1"),
        (["--slo", "p99_ttft_ms<=9", "--fewest", "seed=4..1"], "must be dotted.key=LOW..HIGH"),
        (["--slo", "p99_ttft_ms<=9", "--fewest", "seed=0..0"], "0 <= LOW <= HIGH and HIGH >= 1"),
        (
            ["--slo", "p99_ttft_ms<=9", "--vary", "workload.request_rate=1,2"],
            "the plan searches workload.request_rate itself: --vary workload.request_rate",
        ),
        (["--slo", "p99_ttft_ms<=9", "--jobs", "0"], "--jobs 0: must be at least 1"),
        (["--slo", "p99_ttft_ms<=9", "--tolerance", "0"], "--tolerance 0.0: must be more than 0"),
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


def test_the_closest_is_named(scenario: Path):
    with pytest.raises(HeadwayError, match=r"the closest is engine.max_num_seqs=2: p99"):
        plan(
            scenario,
            ["p99_ttft_ms<=150"],
            {"engine.max_num_seqs": [1, 2]},
            cheapest=True,
            jobs=1,
        )


def test_where_the_closest_is_is_told_by_the_key_that_was_searched(scenario: Path):
    with pytest.raises(HeadwayError, match=r"the scenario at workload.request_rate=0\.\d+: p99"):
        plan(scenario, ["p99_ttft_ms<=50"], jobs=1)  # less than a step takes


def test_a_fleet_that_scales_is_priced_by_what_its_runs_paid(tmp_path: Path):
    """At least 1 or 4 of at most 4: not the 2 that it begins with, for the price of an A100."""
    path = tmp_path / "s.yaml"
    path.write_text(
        ONE_A_SECOND.replace("num_prompts: 200", "num_prompts: 100")
        + "cluster: {replicas: 2, autoscaling: {target: 5, max_replicas: 4, interval: 1, "
        "startup_delay: 0, cooldown: 0}}\n"
    )
    axes = {"cluster.autoscaling.min_replicas": [1, 4]}
    frame = plan(path, ["p99_ttft_ms<=60000"], axes, cheapest=True, jobs=1)
    assert frame["cluster.autoscaling.min_replicas"].tolist() == ["1", "4"]
    for row in frame.to_dict("records"):
        paid = []
        for seed in (3, 4, 5):
            chosen = [f"{k}={v}" for k, v in row.items() if k in axes] + [f"seed={seed}"]
            summary = run(load_scenario(path, chosen)).summary()
            cluster = summary["headway"]["cluster"]
            assert cluster["gpu_hours"] == pytest.approx(cluster["dollars"] / 3.43)
            paid.append(cluster["gpu_hours"] * 3600 / summary["duration"])
        assert row["gpus"] == pytest.approx(sum(paid) / 3)
        assert row["dollars_per_hour"] == pytest.approx(3.43 * row["gpus"])
    assert 1 <= frame["gpus"].iloc[0] < 1.5
    assert 3.9 < frame["gpus"].iloc[1] <= 4


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


def test_none_may_be_the_fewest(tmp_path: Path):
    """How many must be bought beside the one that is there: at 0.2 requests/s none, at 1.6 one."""
    path = tmp_path / "s.yaml"
    path.write_text(
        ONE_A_SECOND.replace("num_prompts: 200", "num_prompts: 60")
        + "cluster: {groups: {old: {}, new: {replicas: 1}}}\n"
    )
    found = []
    for rate in (0.2, 1.6):
        path.write_text(re.sub(r"request_rate: [\d.]+", f"request_rate: {rate}", path.read_text()))
        more = "cluster.groups.new.replicas=0..8"
        found.append(int(plan(path, ["p99_ttft_ms<=20000"], fewest=more, jobs=1)["at"].iloc[0]))
    assert found == [0, 1]


def test_each_group_gets_the_command_of_its_own_engine(tmp_path: Path):
    path = tmp_path / "s.yaml"
    path.write_text(
        ONE_A_SECOND
        + """cluster:
  groups:
    small: {replicas: 3}
    big: {gpu: {name: H100-80GB, count: 2}, engine: {tensor_parallel_size: 2, watermark: 0.1}}
    none: {replicas: 0}
"""
    )
    lines = serve_command(load_scenario(path)).splitlines()
    assert [line for line in lines if not line.startswith("vllm")] == [
        "# tiny-test: put its name on Hugging Face here, or its folder",
        "# small: 3, each on 1 A100-80GB",
        "# big: 1, each on 2 H100-80GB",
        "# not in this command: watermark 0.1",
    ]
    small, big = (line for line in lines if line.startswith("vllm serve tiny-test "))
    assert "--tensor-parallel-size" not in small
    assert "--tensor-parallel-size 2 " in big


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
    assert frame["engine.max_num_seqs"].tolist() == ["2", "1"]
    assert (frame["goodput"] >= 0.9).all()


def test_a_share_is_as_near_to_its_bound_as_what_is_missed_to_what_may_be():
    question = Question(Path(), (), 0, Rules([parse_slo("goodput>=0.99"), SLO]), "seed")
    for goodput, ttft, strain in ((0.0, 90.0, 100.0), (0.98, 0.0, 2.0), (1.0, 90.0, 0.9)):
        trial = Trial(1.0, [{"goodput": goodput, "p99_ttft_ms": ttft}])
        assert bound_ratio(trial, question) == pytest.approx(strain)


def test_any_percentile_can_be_bounded(scenario: Path):
    result = run(load_scenario(scenario))
    numbers = read_numbers(result, [parse_slo("p97.5_e2el_ms<=1")])
    frame = result.requests
    assert numbers["p97.5_e2el_ms"] == pytest.approx(frame["e2el"].quantile(0.975) * 1000)
