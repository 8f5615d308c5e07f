"""What can never hold is told before anything runs, and the change that it names makes it fit."""

import json
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.studio.worker import Job, answers
from simulator import load_scenario, run
from simulator.diagnosis.feasibility import Traffic, never_holds, obstacles
from simulator.scenario.draw import make_workload
from simulator.scenario.load import with_keys
from simulator.scenario.scenario import Scenario

LARGE = """name: large
model: llama-3.3-70b
gpu: {name: H100-80GB}
engine: {tensor_parallel_size: 2, gpu_memory_utilization: 0.8811}
workload: {num_prompts: 60, request_rate: 1, input_len: 3000, output_len: 100, range_ratio: 0.8}
slo: ["p99_ttft_ms<=100000"]
"""
"""An engine of 90 KV blocks of 16 tokens: it serves who has no more than 1,440."""
# A step takes 10 ms and 10 us a token: 64 tokens in 10.64 ms are the most prompts, 4 decodes the
# most answers, 372 tokens/s.
SMALL = """name: small
engine: {name: textbook, max_num_seqs: 4, max_num_batched_tokens: 64, enable_prefix_caching: false,
         max_model_len: 256}
cost: {kind: linear, base: 1e-2, per_token: 1e-5}
workload: {num_prompts: 60, request_rate: 8, input_len: 64, output_len: 50}
slo: ["p99_ttft_ms<=1000"]
"""


def found(scenario: Scenario) -> list[str]:
    return [str(one) for one in obstacles(scenario, make_workload(scenario))]


def test_the_shipped_demo_is_feasible() -> None:
    assert not found(load_scenario("demo"))


def test_where_nobody_fits_nothing_is_too_fast(write) -> None:
    sets = ["workload.input_len=300", "workload.request_rate=1000"]
    (told,) = found(load_scenario(write(SMALL), sets))
    assert told.startswith("not one request fits: ")


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ([], "50 of 60 requests never fit: the largest has 5,358 tokens, 335 KV blocks; there"),
        (["workload.input_len=20000"], "not one request fits: "),
        (["engine.max_model_len=1000"], "55 of 60 requests never fit: prompts of up to 5,247"),
    ],
)
def test_the_least_change_makes_room(write, sets, told) -> None:
    """Followed, nothing is in the way."""
    scenario = load_scenario(write(LARGE), sets)
    (first, *_) = obstacles(scenario, make_workload(scenario))
    assert str(first)[: len(told)] == told
    assert first.memory
    assert first.change
    changed = with_keys(scenario, first.change)
    assert not [one for one in obstacles(changed, make_workload(changed)) if one.memory]


def test_a_load_that_one_replica_never_keeps_up_with(write) -> None:
    """8 answers of 49 decoded tokens a second are 392, and four seats decode 398 at most."""
    assert not found(load_scenario(write(SMALL)))
    many = load_scenario(write(SMALL), ["workload.request_rate=10"])
    (one,) = obstacles(many, make_workload(many))
    assert one.text.startswith("answers of 490 tokens/s come, and 1 replica can decode 398 at most")
    assert one.change == {"cluster.replicas": 2}
    assert not found(with_keys(many, one.change))
    prompts = [
        "workload.input_len=200",
        "workload.output_len=1",
        "engine.max_num_batched_tokens=64",
    ]
    fast = load_scenario(write(SMALL), [*prompts, "workload.request_rate=600"])
    assert found(fast)[0].startswith("prompts of 120,000 tokens/s come")
    assert not found(load_scenario(write(SMALL), ["workload.request_rate=inf"]))  # all at once


@pytest.mark.parametrize("name", ["vllm", "textbook", "sglang", "tensorrt-llm", "hf"])
@pytest.mark.parametrize("lengths", [(1500, 2), (20, 300)])
def test_no_run_is_faster_than_the_bounds(name: str, lengths: tuple[int, int]) -> None:
    """What a burst is served at, in tokens/s of prompts and answers, is below what is told."""
    keys = [f"workload.input_len={lengths[0]}", f"workload.output_len={lengths[1]}"]
    keys += ["workload.num_prompts=100", f"engine={name}", "workload.request_rate=inf"]
    scenario = load_scenario({"name": "burst", "model": "llama-3-8b"}, keys)
    done = run(scenario).summary()
    rate = done["request_throughput"]
    assert done["completed"] == 100
    slower = with_keys(scenario, {"workload.request_rate": 0.99 * rate})
    assert not found(slower)
    assert found(with_keys(scenario, {"workload.request_rate": 40 * rate}))


def test_a_prefix_cache_may_spare_the_prompts() -> None:
    """3,000 of 3,020 tokens are known: what comes is computed once."""
    keys = ["workload.prefix_len=3000", "workload.input_len=20", "workload.output_len=2"]
    keys += ["workload.num_prompts=200", "workload.request_rate=20"]
    base = {"name": "known", "model": "llama-3-8b", "gpu": {"name": "L40S"}}
    assert not found(load_scenario(base, keys))
    assert found(load_scenario(base, [*keys, "engine.enable_prefix_caching=false"]))


def test_the_rate_of_a_trace_and_of_sessions(write) -> None:
    """Requests over the time in which they come; turns of a session come with it."""
    sessions = ["workload.sessions={turns: 3}", "workload.num_prompts=30"]
    scenario = load_scenario(write(SMALL), sessions)
    assert Traffic.of(scenario, make_workload(scenario)).rate == pytest.approx(24.0)
    closed = load_scenario(write(SMALL), ["workload.max_concurrency=3"])
    assert Traffic.of(closed, make_workload(closed)).rate == 0.0


def test_keys_of_the_group_that_has_no_room(write) -> None:
    groups = "cluster={groups: {wide: {engine: {tensor_parallel_size: 4}}, narrow: {}}}"
    scenario = load_scenario(write(LARGE), [groups])
    (one,) = obstacles(scenario, make_workload(scenario))
    assert next(iter(one.change)).startswith("cluster.groups.narrow.engine.")


def test_never_holds(write) -> None:
    """What may be lost is no reason; nor is a load that comes for a while only."""
    scenario = load_scenario(write(LARGE))
    load = make_workload(scenario)
    assert never_holds(scenario, load)
    assert not never_holds(scenario, load, lost=0.99, steady=False)
    assert "a queue grows" in never_holds(scenario, load, lost=0.99)  # of those that fit
    fast = load_scenario(write(SMALL), ["workload.request_rate=10"])
    assert never_holds(fast, make_workload(fast))
    assert not never_holds(fast, make_workload(fast), steady=False)


def test_run_and_sweep_warn_before_they_begin(write, tmp_path: Path, capsys) -> None:
    """One line on stderr; the figures are there all the same."""
    path = write(LARGE)
    assert main(["run", str(path), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("headway: warning: 50 of 60 requests never fit: ")
    vary = ["--vary", "workload.num_prompts=60", "--jobs", "1", "--out", str(tmp_path / "sweep")]
    assert main(["sweep", str(path), *vary, "--quiet"]) == 0
    assert "50 of 60 requests never fit" in capsys.readouterr().err


@pytest.mark.medium
def test_a_plan_spends_no_run_on_what_never_fits(write, tmp_path: Path, capsys) -> None:
    """The table, the files and the error where there is nothing else say why."""
    vary = ["--cheapest", "--jobs", "1", "--out", str(tmp_path), "--min-duration", "20"]
    one = ["--vary", "cluster.replicas=1"]
    many = ["--set", "workload.request_rate=10"]
    assert main(["plan", str(write(SMALL)), *many, *vary, *one]) == 1
    assert "error: answers of 490 tokens/s come, and 1 replica can" in capsys.readouterr().err
    assert not (tmp_path / "runs.jsonl").exists()
    two = ["--vary", "cluster.replicas=1,3"]
    assert main(["plan", str(write(SMALL)), *many, *vary, *two]) == 0
    told = capsys.readouterr().out
    assert "fails: answers of 490 tokens/s come" in told
    rows = json.loads((tmp_path / "plan.json").read_text())["candidates"]
    assert rows[0]["never_holds"].endswith("it takes cluster.replicas=2 at least")
    assert rows[1]["holds"]


def test_the_studio_says_it_first(write) -> None:
    (view,) = answers(Job(1, str(write(LARGE)), ()), lambda: False)
    assert view["advice"][0]["text"].startswith("50 of 60 requests never fit")
