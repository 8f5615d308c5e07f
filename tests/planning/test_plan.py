"""`headway plan`: the largest load, the fewest, the cheapest."""

import json
import re
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.planning.candidate import result_row
from headway.planning.plan import Runs, find_best, search_by_optuna
from headway.planning.plan_report import plan_table
from headway.planning.problem import PlanOptions, make_problem
from simulator import load_scenario, plan, run
from simulator.util.errors import HeadwayError, HeadwayWarning
from tests.support.scenarios import ONE_A_SECOND


def test_a_run_that_cannot_be_made_is_told(scenario: Path, monkeypatch):
    """A longer look has more requests than fit into memory, though short ones held."""
    monkeypatch.setattr("simulator.workload.generate.MAX_KEPT_REQUESTS", 400)
    with pytest.raises(HeadwayError, match=r"fails: .* do not fit into memory together"):
        plan(scenario, ["p99_ttft_ms<=3000"], jobs=1, overrides=["plan.min_duration=600"])


def test_the_rate_of_a_server_that_takes_a_second_a_request(scenario: Path):
    """M/D/1 with unit service: the mean wait rho / (2 (1 - rho)) is 1 s at rho = 2/3.

    The first token comes a step later.
    """
    frame = plan(scenario, ["mean_ttft_ms<=1100"], jobs=1)
    row = frame.iloc[0]
    assert row["holds"]
    assert row["at"] == pytest.approx(2 / 3, rel=0.12)
    assert row["capacity_low"] <= 2 / 3 <= row["capacity_high"]
    assert row["capacity_low"] <= row["capacity"] <= row["capacity_high"]
    assert row["mean_ttft_ms"] <= 1100
    assert row["reason"] == "mean_ttft_ms"  # which breaks just beyond
    assert row["headroom"] == pytest.approx(row["capacity"] / 0.2 - 1)


@pytest.mark.medium
def test_the_function_writes_what_the_command_writes(scenario: Path, tmp_path: Path):
    """With `out`, from the same arguments as `sweep`."""
    more = {"overrides": ["workload.num_prompts=30"], "seed": 3, "jobs": 1}
    frame = plan(scenario, ["mean_ttft_ms<=1100"], out=tmp_path / "o", **more)
    written = {path.name for path in (tmp_path / "o").iterdir()}
    assert {"plan.json", "plan.csv", "best.yaml", "runs.jsonl"} <= written
    again = plan(scenario, ["mean_ttft_ms<=1100"], out=tmp_path / "o", **more)
    assert again.equals(frame)


@pytest.mark.medium
def test_seats_that_nobody_takes_are_not_tried_again(scenario: Path):
    """A server that computes a request in 0.6 s has not 64 at a time.

    Under SGLang seats mean more than a limit, so there all are tried.
    """
    vary = {"engine.max_num_seqs": [128, 64, 1], "engine.max_num_batched_tokens": [2048, 4096]}
    given = {"jobs": 1, "overrides": ["plan.min_duration=60", "cost.per_token=0.02"]}
    frame = plan(scenario, ["mean_ttft_ms<=1100"], vary, **given)
    rows = {
        (r["engine.max_num_seqs"], r["engine.max_num_batched_tokens"]): r
        for _, r in frame.iterrows()
    }
    for tokens in ("2048", "4096"):
        fewer, more = rows["64", tokens], rows["128", tokens]
        assert not more["holds"]
        found = re.fullmatch(r"at most (\d+) of 64 seats were taken with (.*)", more["not_tried"])
        assert found
        assert 1 < int(found[1]) < 64
        assert f"max_num_batched_tokens={tokens}" in found[2]
        assert fewer["holds"]
        assert not isinstance(fewer["not_tried"], str)  # one seat was full
    sglang = ["engine={name: sglang, max_model_len: 256}", *given["overrides"]]
    vary = {"engine.max_num_seqs": [64, 128]}
    out = scenario.parent / "out"
    again = plan(scenario, ["mean_ttft_ms<=1100"], vary, jobs=1, overrides=sglang, out=out)
    assert again["holds"].all()
    answer = json.loads((out / "plan.json").read_text())["answer"]
    (tie,) = [line for line in answer if line.startswith("  too close to tell: ")]
    assert re.fullmatch(r".*: engine.max_num_seqs=(64|128), within 5 %", tie)


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


@pytest.mark.medium
def test_by_energy_the_best_draws_the_fewest_watts(scenario: Path):
    """Of three at the same price, by their power caps; by money it is the first of them."""
    caps = "gpu.power.max=400,150,300"
    for objective, best in (("cost", "400"), ("energy", "150")):
        options = PlanOptions(["p99_ttft_ms<=60000"], [caps], cheapest=True, objective=objective)
        problem = make_problem(scenario, options)
        candidates, found, _ = find_best(problem, None, Runs(1))
        assert found.varied["gpu.power.max"] == best
        watts = [result_row(problem, c)["power_w"] for c in candidates if c.result.best]
        assert len(watts) == 3
        assert all(0.17 * 150 < watt < 400 for watt in watts)
        words = plan_table(problem, candidates, found).rpartition("\n* ")[2]
        assert (f"; {result_row(problem, found)['power_w']:,.4g} W" in words) == (best == "150")
        ties = [text for text in words.splitlines() if "  the same " in text]
        others = ("150", "300") if objective == "cost" else ()
        assert ties == [f"  the same cost: gpu.power.max={cap}, within 2 %" for cap in others]


def test_by_energy_every_gpu_must_have_a_power(scenario: Path):
    """GH200's is unknown, unless it is given."""
    options = PlanOptions(["p99_ttft_ms<=60000"], ["gpu.name=GH200"], objective="energy")
    with pytest.raises(HeadwayError, match="GH200 has no power in the table"):
        find_best(make_problem(scenario, options), None, Runs(1))


@pytest.mark.medium
def test_optuna_tries_some_of_the_combinations_and_finds_the_best(scenario: Path):
    pytest.importorskip("optuna")
    args = ["plan", str(scenario), "--slo", "p90_ttft_ms<=500", "--replications", "1"]
    args += ["--vary", "engine.max_num_seqs=1,2,3,4,5,6,7,8", "--min-duration", "60", "--jobs", "1"]
    args += ["--vary", "engine.max_num_batched_tokens=2048"]  # of one value, which is tried
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


def test_optuna_seldom_names_what_it_has_named(scenario: Path, monkeypatch):
    """Four are named before the first of them is judged; 24 trials are most of 18 combinations.

    By a seed that is too large for Optuna's own generator, too.
    """
    pytest.importorskip("optuna")
    monkeypatch.setattr("headway.planning.plan.search_all", lambda *_: None)
    seats = "engine.max_num_seqs"
    monkeypatch.setattr("headway.planning.plan._objective", lambda c, _: -float(c.varied[seats]))
    axes = [f"{seats}=1,2,3,4,5,6", "engine.max_num_batched_tokens=512,1024,2048"]
    for seed in (1, 2**32 + 1):
        options = PlanOptions(["p90_ttft_ms<=500"], axes, cheapest=True)
        problem = make_problem(scenario, options, seed=seed)
        assert len(search_by_optuna(problem, 24, Runs(1))) > 14


@pytest.mark.medium
def test_a_candidate_that_cannot_run_is_told_and_the_others_are_searched(
    scenario: Path, capsys: pytest.CaptureFixture[str]
):
    args = ["--slo", "p99_ttft_ms<=60000", "--cheapest", "--vary", "engine.max_num_seqs=1,5000"]
    out = scenario.parent / "out"
    assert main(["plan", str(scenario), *args, "--jobs", "1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "cannot run" in said
    assert "max_num_batched_tokens: must be at least max_num_seqs (5000)" in said
    assert "\n  1 of 2 candidates cannot run, so another may be better\n" in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gpu.name", "H10"),
        ("model", "llama-9"),
        ("engine.max_num_seqs", "many"),
        ("engine.max_num_sequs", "many"),
        ("engine.scheduling_policy", "fcsf"),
        ("engine.kv_cache_dtype", "fp9"),
    ],
)
def test_a_misspelt_value_is_refused_before_any_run(scenario: Path, key: str, value: str):
    """Though other candidates could run."""
    axes = {"engine.max_num_batched_tokens": [512, 2048], key: [value]}
    with pytest.raises(HeadwayError, match=f"^--vary {key}={value}: ") as error:
        plan(scenario, ["p99_ttft_ms<=60000"], axes, cheapest=True, out=scenario.parent / "o")
    assert len(error.value.messages) == 1
    assert not (scenario.parent / "o").exists()


def test_who_can_never_hold_is_told_at_once_and_costs_no_run(scenario: Path):
    """Prompts of 300 tokens where 256 are the most."""
    told: list[tuple[int, str]] = []
    lengths, more = ["workload.input_len=20,300"], ["workload.num_prompts=20"]
    options = PlanOptions(["p99_ttft_ms<=60000"], lengths, cheapest=True, replications=1)
    problem = make_problem(scenario, options, more)
    runs = Runs(1, lambda _, made, one: told.append((made, one.label if one else "")))
    _, never = find_best(problem, None, runs)[0]
    assert never.never.startswith("not one request fits")
    assert told[0] == (0, "workload.input_len=300")
    assert sum(label == "workload.input_len=300" for _, label in told) == 1


def test_what_is_wrong_with_the_searched_key_names_its_option(scenario: Path):
    with pytest.raises(HeadwayError, match=r"--fewest engine.max_num_sequs=1: .*unknown key"):
        plan(scenario, ["p99_ttft_ms<=60000"], fewest="engine.max_num_sequs=1..3", jobs=1)


def test_the_closest_is_named(scenario: Path):
    told = r"the closest is engine.max_num_seqs=2: p99.*; its runs keep p99_ttft_ms<=\d+; `headway"
    with pytest.raises(HeadwayError, match=told) as raised:
        plan(
            scenario,
            ["p99_ttft_ms<=150"],
            {"engine.max_num_seqs": [1, 2]},
            cheapest=True,
            jobs=1,
        )
    ended, kept = re.search(
        r"p99_ttft_ms (\S+), .* p99_ttft_ms<=(\d+);", str(raised.value)
    ).groups()
    assert (
        150 < float(ended) < float(kept)
    )  # the plan's runs end as they break it, this one did not


def test_where_the_closest_is_is_told_by_the_key_that_was_searched(scenario: Path):
    with pytest.raises(HeadwayError, match=r"the scenario at workload.request_rate=\S+: out"):
        plan(scenario, ["output_throughput>=1e9"], jobs=1)


@pytest.mark.medium
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
        count = round(0.2 * row["seconds_of_load"])
        for seed in range(3, 3 + row["replications"]):
            chosen = [f"{k}={v}" for k, v in row.items() if k in axes]
            chosen += [f"seed={seed}", f"workload.num_prompts={count}"]
            summary = run(load_scenario(path, chosen)).summary()
            cluster = summary["headway"]["cluster"]
            assert cluster["gpu_hours"] == pytest.approx(cluster["dollars"] / 3.43)
            paid.append(cluster["gpu_hours"] * 3600 / summary["duration"])
        assert row["gpus"] == pytest.approx(sum(paid) / len(paid))
        assert row["dollars_per_hour"] == pytest.approx(3.43 * row["gpus"])
    assert 1 <= frame["gpus"].iloc[0] < 1.5
    assert 3.9 < frame["gpus"].iloc[1] <= 4


@pytest.mark.medium
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


@pytest.mark.medium
def test_a_plan_that_was_stopped_goes_on_where_it_was(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Stopped after five runs; what is done then is not run again, and the answer is the same."""
    out, whole = scenario.parent / "out", scenario.parent / "whole"
    args = ["plan", str(scenario), "--slo", "mean_ttft_ms<=1500", "--tolerance", "0.2"]
    args += ["--vary", "engine.max_num_seqs=1,2", "--min-duration", "120", "--jobs", "1"]
    made: list[object] = []
    stop_after = 5

    def each(function, items, jobs=None):
        for number, item in enumerate(items):
            if len(made) == stop_after:
                raise KeyboardInterrupt
            made.append((item[0].resolved(), item[1]))
            yield number, function(item)

    monkeypatch.setattr("headway.planning.runs.parallel_map", each)
    assert main([*args, "--out", str(out)]) == 130
    *said, last = capsys.readouterr().err.splitlines(keepends=True)
    decisions = [line for line in said if "candidates done" not in line]  # of a busy machine
    assert decisions[0] == (
        "engine.max_num_seqs=1: request_rate=0.75 keeps the bounds (1 run of 60 s, too close to "
        "tell); so far: request_rate=0.75 keeps the bounds\n"
    )
    assert last == (
        f"headway: interrupted; finished runs are in {out}/runs.jsonl, and the same command goes "
        "on from there\n"
    )
    assert [path.name for path in out.iterdir()] == ["runs.jsonl"]
    stop_after = -1
    assert main([*args, "--out", str(out)]) == 0
    first = made[:]
    made.clear()
    assert main([*args, "--out", str(whole)]) == 0
    assert first == made  # each was made once, in the same order
    for name in ("plan.json", "plan.csv", "runs.csv", "best.yaml"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    made.clear()
    assert main([*args, "--out", str(out)]) == 0
    assert made == []
    other = [arg.replace("mean_ttft_ms<=1500", "p97_ttft_ms<=9000") for arg in args]
    assert main([*other, "--out", str(out)]) == 2  # another question has a folder of its own
    assert made == []


def test_a_plan_that_makes_no_run_leaves_nothing(scenario: Path):
    out = scenario.parent / "out"
    args = ["--slo", "p99_ttft_ms<=1", "--vary", "engine.max_num_seqs=5000,6000", "--jobs", "1"]
    assert main(["plan", str(scenario), *args, "--out", str(out)]) == 2
    assert not out.exists()


@pytest.mark.medium
def test_a_plan_that_is_cut_short_says_so_and_what_it_knows(
    scenario: Path, capsys: pytest.CaptureFixture[str]
):
    args = ["plan", str(scenario), "--slo", "mean_ttft_ms<=1100", "--replications", "1"]
    short = ["--min-duration", "30", "--max-duration", "30", "--jobs", "1"]
    out = scenario.parent / "out"
    assert main([*args, *short, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    at = "the verdict at workload.request_rate="
    assert re.search(rf"cut short: {at}\S+ needs runs longer than 30 s \(--max-duration\)", said)
    assert re.search(r"\(95 %: <?[\d.]+ to >?[\d.]+\)", said)
    (row,) = json.loads((out / "plan.json").read_text())["candidates"]
    assert row["cut_short"] is True
    assert row["broke"] in (None, "mean_ttft_ms")  # what grows is no bound


@pytest.mark.medium
def test_all_that_hold_have_a_headroom(scenario: Path):
    vary = {"engine.max_num_seqs": [4, 8]}
    for more in ({"cheapest": True}, {}):
        quick = ["plan.min_duration=60", "plan.replications=1"]
        frame = plan(scenario, ["p99_ttft_ms<=60000"], vary, jobs=1, overrides=quick, **more)
        assert frame["holds"].all()
        assert (frame["headroom"] > 0).all()


def test_candidates_that_are_wrong_alike_share_a_message():
    with pytest.raises(HeadwayError) as error:
        plan("demo", ["p99_ttft_ms<=1000"], {"engine.max_num_seqs": [5000, 6000, 7000]})
    (message,) = error.value.messages
    assert "must be at least max_num_seqs (5000)" in message
    assert message.endswith("(likewise engine.max_num_seqs=6000, engine.max_num_seqs=7000)")


@pytest.mark.parametrize("command", [["report"], ["plot", "pareto"]])
def test_of_an_unfinished_plan_there_is_one_clear_error(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "runs.jsonl").write_text('{"point": "a", "row": {}}\n')
    assert main([*command, str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"headway: error: {tmp_path}: the plan is unfinished: 1 runs are in runs.jsonl, and no "
        "answer; the same `headway plan` command goes on from there\n"
    )


def test_an_outage_that_meets_no_replica_is_told():
    """Of three that may be ordered, one serves."""
    keys = ["workload.num_prompts=20", "cluster={replicas: 1, autoscaling: {max_replicas: 3}}"]
    keys.append("cluster.failures={outages: [{replica: 2, start: 1, duration: 1}]}")
    with pytest.warns(HeadwayWarning, match=r"outages\.0: has no effect: at 1 s replica 2 is off"):
        result = run(load_scenario("demo", keys))
    assert result.warnings


def test_the_model_need_not_fit_the_gpu_of_the_file(scenario: Path):
    """As long as one candidate has room for it; where none has, each says what it lacks."""
    base = ["model=llama-3.3-70b", "cost=null", "plan.min_duration=20", "engine.max_num_seqs=8"]
    more = {"jobs": 1, "overrides": [*base, "engine.num_gpu_blocks_override=null"]}
    frame = plan(scenario, ["mean_ttft_ms<=60000"], {"gpu.count": [1, 2]}, cheapest=True, **more)
    by_count = frame.set_index("gpu.count")
    assert by_count.loc["2", "holds"]
    assert "does not fit the A100-80GB" in by_count.loc["1", "error"]
    with pytest.raises(HeadwayError, match=r"larger GPU \(likewise engine.max_num_seqs=6\)$"):
        plan(
            scenario,
            ["mean_ttft_ms<=60000"],
            {"engine.max_num_seqs": [4, 6]},
            **more | {"overrides": more["overrides"][:3]},
        )
