"""Clients that hang up: their requests leave, nothing is left behind, and leaps change nothing."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import run
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.workload.workload import Workload
from tests.engine.test_laws import _unroll, clocks, engines, workloads
from tests.support.commands import headway
from tests.support.engines import fcfs, play, workload

patience = st.sampled_from([np.nan, np.nan, 0.0, 0.3, 1.0, 2.5, 7.0])


@given(workloads(), engines(), clocks, st.lists(patience, min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_who_hangs_up_leaves_and_nothing_is_left_behind(load, engine, clock, patience) -> None:
    load.cancel_after = np.resize(np.array(patience), len(load))
    scheduler = engine()
    leapt, client = play(load, scheduler, clock)
    stepped, again = play(load, engine(), clock, leap=False)
    hung_up = [one.id for one in client.hung_up]
    assert hung_up == [one.id for one in again.hung_up]
    assert [one.received for one in client.hung_up] == [one.received for one in again.hung_up]
    assert leapt.request_rows == stepped.request_rows
    assert leapt.run_rows == stepped.run_rows
    assert _unroll(leapt) == _unroll(stepped)
    ended = leapt.requests["id"].tolist()
    assert sorted([*ended, *hung_up]) == list(range(len(load)))
    assert not np.isnan(load.cancel_after[hung_up]).any()
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.decodes.count == scheduler.decodes.context == 0
    assert scheduler.blocks.free == scheduler.blocks.usable
    assert scheduler.blocks.shared == scheduler.blocks.reserved == 0


@pytest.mark.many
@pytest.mark.parametrize(
    "overrides",
    [
        ["engine={name: sglang}"],
        ["engine={name: sglang, async_scheduling: true}"],
        ["engine={name: tgi}"],
        ["engine={name: hf, max_num_seqs: 8}"],
        ["engine.speculative_config={num_speculative_tokens: 3, acceptance: 0.7}"],
        ["engine.scheduling_policy=srpt", "predictor={kind: oracle}"],
        ["cluster={replicas: 2, router: least_outstanding, client: {ttft_timeout: 2}}"],
        ["cluster={replicas: 2, router: random}"],
    ],
)
def test_a_scenario_whose_clients_hang_up(overrides: list[str]) -> None:
    """Half hang up: they are told as unfinished, and the others are served."""
    scenario = load_scenario("demo", overrides)
    load = make_workload(scenario)
    load.cancel_after = np.where(np.arange(len(load)) % 2, 0.4, np.nan)
    found, stepped = run(scenario, workload=load), run(scenario, workload=load, stepwise=True)
    words = found.requests.finish_reason
    gone = words == "unfinished"
    assert 0 < gone.sum() <= len(load) // 2
    assert not gone[::2].any()
    assert found.requests.equals(stepped.requests)
    assert found.summary()["headway"]["unfinished"] == gone.sum()


def test_a_client_that_hangs_up_lets_its_next_request_be_sent() -> None:
    load = workload((0, 4, 50), (0, 4, 2), max_concurrency=1)
    load.cancel_after = np.array([0.5, np.nan])
    log, client = play(load, fcfs())
    assert [(one.id, one.received) for one in client.hung_up] == [(0, 0)]
    assert client.sent[1] == 0.5
    assert log.requests["id"].tolist() == [1]


def test_a_trace_says_when_clients_hang_up(tmp_path: Path) -> None:
    lines = [
        '{"timestamp": 0, "input_length": 40, "output_length": 900, "cancel_after": 0.25}',
        '{"timestamp": 100, "input_length": 40, "output_length": 5, "predicted_output_tokens": 7}',
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    (tmp_path / "s.yaml").write_text(
        "model: llama-3.1-8b\ngpu: {name: H100-80GB}\nworkload: {trace: {path: t.jsonl}}\n"
    )
    scenario = load_scenario(tmp_path / "s.yaml")
    load = make_workload(scenario)
    assert load.cancel_after is not None
    assert load.hint is not None
    assert load.cancel_after.tolist()[0] == 0.25
    assert load.hint.tolist() == [0, 7]
    found = run(scenario).requests
    assert [*found.finish_reason] == ["unfinished", "stop"]
    tpot = found.tpot[1]
    assert found.output_tokens[0] == pytest.approx(1 + (0.25 - found.ttft[0]) / tpot, abs=1)
    (tmp_path / "t.jsonl").write_text(lines[0].replace("0.25", "-1"))
    found = headway("run", str(tmp_path / "s.yaml"))
    assert found.returncode == 2
    assert "t.jsonl:1: cancel_after: -1 is negative" in found.stderr


def test_times_below_0_are_refused() -> None:
    load = Workload(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
    load.cancel_after = np.array([-1.0])
    with pytest.raises(ValueError, match="cancel_after: not every one is 0 or more"):
        load.check()
    load.cancel_after, load.hint = None, np.array([-1])
    with pytest.raises(ValueError, match="hint: not every one is 0 or more"):
        load.check()


def test_a_turn_after_one_whose_client_hung_up_has_waited_no_nan(tmp_path: Path) -> None:
    """The first is let go at 0.5 s; its next turn is due 0.25 s later, behind nobody."""
    values = {"model": "tiny-test", "cost": {"kind": "linear", "base": 0.125}}
    load = workload((0.0, 4, 50), (None, 4, 2), max_concurrency=1)
    load.cancel_after = np.array([0.5, np.nan])
    load.after, load.delay = np.array([-1, 0]), np.array([0.0, 0.25])
    found = run(values, workload=load)
    assert found.requests.arrival.tolist() == [0.0, 0.75]
    assert found.summary()["mean_client_queue_time_ms"] == 0.0
