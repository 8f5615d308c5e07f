"""Decisions of a platform engineer: the command, its answer, and the long runs that say so.

Each run beside an answer is made by `run`, with other seeds and more requests than any that the
answer was found by.
"""

import csv
import json
import re
from pathlib import Path

import pytest

from headway.cli.main import main
from simulator import load_scenario, run

CHAT = [
    *("model=llama-3-8b", "gpu.name=A100-80GB", "cost=null", "seed=0"),
    "workload={num_prompts: 400, request_rate: 4, input_len: 800, output_len: 150}",
]


def sets(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


def kept(scenario: object, count: int, *keys: str, seeds: int = 3) -> float:
    """Return the mean share of the requests that keep the levels in long runs of other seeds."""
    shares = []
    for seed in range(100, 100 + seeds):
        long = [f"workload.num_prompts={count}", f"seed={seed}", *keys]
        gauges = run(load_scenario(scenario, long)).summary()["headway"]
        shares.append(gauges["slo_attainment"])
    return sum(shares) / len(shares)


@pytest.mark.slow
def test_the_capacity_is_one_number_and_holds_a_long_run(tmp_path: Path, capsys) -> None:
    """Log, table, sentence, CSV, JSON and best.yaml have it; a fifth more breaks the level."""
    out = tmp_path / "plan"
    assert main(["plan", "demo", *sets(*CHAT), "--out", str(out)]) == 0
    said = capsys.readouterr()
    (number, low, high) = re.search(
        r"capacity (\S+) req/s \(95 %: (\S+) to (\S+)\)", said.out
    ).groups()
    assert float(low) <= float(number) <= float(high)
    row = next(line for line in said.out.splitlines() if line.startswith("* the scenario  "))
    assert row.split()[3] == number
    assert f"holds {number} req/s" in said.err.splitlines()[-1]
    with (out / "plan.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert line["at"] == line["capacity"] == number
    assert json.loads((out / "plan.json").read_text())["candidates"][0]["capacity"] == float(number)
    assert kept(out / "best.yaml", 6000) >= 0.988
    assert kept(out / "best.yaml", 6000, f"workload.request_rate={1.2 * float(high):g}") < 0.98


@pytest.mark.medium
def test_what_diagnose_puts_first_keeps_the_level_in_a_long_run(tmp_path: Path, capsys) -> None:
    """TPOT of 12 ms on an A100: broken as it is, kept with the first advice."""
    slow = ["cost=null", "goodput={tpot: 12}", "workload.request_rate=2"]
    few = [*slow, "workload.num_prompts=200"]
    assert main(["diagnose", "demo", *sets(*few), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["trials"][0]["advice"]
    keys = [f"{first['key']}={first['to']}", *(f"{k}={v}" for k, v in first["also"].items())]
    assert kept("demo", 2000, *slow, seeds=1) < 0.1
    assert kept("demo", 2000, *slow, *keys, seeds=1) >= 0.99


def test_what_one_request_alone_breaks_is_said_before_any_run(tmp_path: Path, capsys) -> None:
    """A token takes 11.9 ms on an A100: 32 replicas do not change that, two GPUs each do."""
    keys = ["cost=null", "goodput={tpot: 10}", "workload.num_prompts=200"]
    command = ["plan", "demo", *sets(*keys), "--fewest", "cluster.replicas=1..32"]
    assert main([*command, "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "a token alone takes 11.9 ms" in told
    assert told.rstrip().endswith("it would do with engine.tensor_parallel_size=2")
    assert not (tmp_path / "runs.jsonl").exists() or not (tmp_path / "runs.jsonl").read_text()
    alone = [*keys, "workload.request_rate=0.05"]
    assert kept("demo", 100, *alone, seeds=1) < 0.05
    two = ["engine.tensor_parallel_size=2", "gpu.count=2"]
    assert kept("demo", 100, *alone, *two, seeds=1) >= 0.99


@pytest.mark.medium
def test_runs_over_capacity_are_compared_by_throughput_alone(tmp_path: Path, capsys) -> None:
    """Of three GPUs that all fall behind no latency names a winner: twice as long doubles it."""
    keys = ["cost=null", "goodput=null", "workload.request_rate=40", "workload.num_prompts=300"]
    vary = ["--vary", "gpu.name=A100-80GB,L40S", "--out", str(tmp_path)]
    assert main(["compare", "demo", *sets(*keys), *vary]) == 0
    said = capsys.readouterr().out
    assert "Overloaded: by the last arrival A100-80GB" in said
    assert "`headway plan` finds the load that keeps service levels" in said
    assert "highest output throughput (" in said.lower()
    assert "lowest p99 ttft" not in said.lower()
    short, long = (
        run(load_scenario("demo", [*keys, f"workload.num_prompts={count}"])).summary()
        for count in (300, 900)
    )
    assert long["mean_ttft_ms"] > 2 * short["mean_ttft_ms"]
    assert long["output_throughput"] == pytest.approx(short["output_throughput"], rel=0.3)


@pytest.mark.medium
def test_a_factor_that_may_be_chance_is_shown_and_decided(tmp_path: Path, capsys) -> None:
    """Of two replications: with a mark and the pairs that it takes; then by as many."""
    keys = ["cost=null", "goodput=null", "workload.request_rate=6", "workload.num_prompts=150"]
    vary = ["--vary", "engine.max_num_batched_tokens=256,512", "--out", str(tmp_path)]
    words = ["compare", "demo", *sets(*keys), *vary, "--replications", "2"]
    assert main(words) == 0
    few = capsys.readouterr().out
    assert re.search(r"Mean TTFT \(ms\) .*\(\d+ pairs\) \d\.\d+ \?", few)
    assert main([*words, "--until-decided"]) == 0
    assert "P99 TTFT (ms): the winner is 512" in capsys.readouterr().out
    means = {"256": [], "512": []}
    for tokens, found in means.items():
        for seed in (100, 101, 102):
            more = [f"engine.max_num_batched_tokens={tokens}", f"seed={seed}"]
            long = load_scenario("demo", [*keys, "workload.num_prompts=900", *more])
            found.append(run(long).summary()["p99_ttft_ms"])
    assert min(means["256"]) > max(means["512"])


PAID = "client client-0: p95_ttft_ms<=800"


@pytest.mark.medium
def test_a_paid_class_has_a_level_of_its_own(tmp_path: Path, capsys) -> None:
    """First come keeps it for nobody, priority for the paid; what the others lose is a row."""
    keys = [*CHAT, "goodput=null", "engine.max_num_seqs=12", "workload.clients=[1, 3]"]
    keys += ["workload.priorities=[0, 1]", "workload.num_prompts=300"]
    vary = ["--vary", "engine.scheduling_policy=fcfs,priority", "--slo", PAID]
    assert main(["compare", "demo", *sets(*keys), *vary, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "Winner: priority: the only one that keeps the service levels." in said
    assert re.search(r"client client-0:p95_ttft_ms<=800: fcfs [\d,.]+, broken", said)
    rows = [line for line in said.splitlines() if line.startswith("client-1: ")]
    assert any("Mean E2EL" in row for row in rows)
    with (tmp_path / "comparison.csv").open() as file:
        told = [*csv.DictReader(file)]
    assert all(float(row["output_throughput[client-1]"]) > 0 for row in told)
    for policy, met in (("fcfs", False), ("priority", True)):
        for seed in (100, 101):
            more = [f"engine.scheduling_policy={policy}", f"seed={seed}", f"slo=['{PAID}']"]
            long = load_scenario("demo", [*keys, *more, "workload.num_prompts=1200"])
            assert run(long).summary()["headway"]["slo"][0]["met"] is met


@pytest.mark.medium
def test_what_costs_nothing_is_the_first_advice(tmp_path: Path, capsys) -> None:
    """TensorRT-LLM keeps room for 8,192 tokens a request: max_tokens serves the load, free."""
    keys = [
        "engine={name: tensorrt-llm, quantization: int8}",
        "goodput=null",
        "slo=[p99_ttft_ms<=3000]",
    ]
    keys += ["workload.request_rate=8", "workload.num_prompts=600", "workload.output_len=200"]
    assert main(["diagnose", "demo", *sets(*keys), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["trials"][0]
    assert (first["advice"]["key"], first["advice"]["to"]) == ("workload.max_tokens", 200)
    assert first["missed"] == 0
    long = [*keys, "workload.num_prompts=1500", "seed=100"]
    for more, met in (([], False), (["workload.max_tokens=200"], True)):
        assert run(load_scenario("demo", [*long, *more])).summary()["headway"]["slo_met"] is met
