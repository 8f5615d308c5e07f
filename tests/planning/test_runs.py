"""Runs of many scenarios: what they share is read once."""

from pathlib import Path

import pytest

from headway.planning.journal import run_key
from headway.planning.plan import Runs
from headway.planning.runs import Outcome, metric_values, run_point
from simulator import load_scenario
from simulator.scenario.draw import make_workload
from simulator.simulation.run import run

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
SCENARIO = """
model: tiny-test
engine: {max_num_seqs: 2, max_model_len: 512, num_gpu_blocks_override: 100}
cost: {kind: linear, base: 0.01, per_token: 1e-4}
workload: {trace: {path: trace.csv, format: azure}}
"""


@pytest.mark.parametrize(("took", "later"), [(0.01, 1), (0.5, None), (60.0, None)])
def test_workers_are_started_once_runs_take_longer_than_to_start_them(
    monkeypatch: pytest.MonkeyPatch, took: float, later: int | None
) -> None:
    """A single run tells how long they take, and is made at once; of several nobody knows."""
    jobs: list[int | None] = []

    def each(_measure: object, _tasks: object, on: int | None) -> list[tuple[int, Outcome]]:
        jobs.append(on)
        return []

    spent = iter((0.0, took))
    monkeypatch.setattr("headway.planning.plan.run_each", each)
    monkeypatch.setattr("headway.planning.plan.process_time", lambda: next(spent, took))
    scenario = load_scenario({"model": "tiny-test", "name": "short"})
    tasks = [(scenario, True, None, ())] * 4
    known, unknown = Runs(), Runs()
    for runs, some in ((known, tasks[:1]), (known, tasks), (unknown, tasks)):
        assert list(runs.make(lambda _: {}, some)) == []
    assert jobs == [1, later, None]


def test_a_run_is_known_again_whatever_the_order_of_its_keys() -> None:
    assert run_key({"a": 1, "b": {"c": 2, "d": 3}}) == run_key({"b": {"d": 3, "c": 2}, "a": 1})
    assert run_key({"a": 1}) != run_key({"a": 2})


def write_trace(folder: Path, tokens: int) -> None:
    rows = [f"2023-11-16 18:15:{second}.0,{tokens},5\n" for second in range(10, 20)]
    (folder / "trace.csv").write_text(TRACE + "".join(rows))


def test_a_trace_is_read_once_and_again_when_it_or_its_block_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every point has the numbers that it has alone."""
    read = []
    monkeypatch.setattr(
        "headway.planning.runs.make_workload", lambda it: read.append(1) or make_workload(it)
    )
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)

    def point(*overrides: str) -> dict[str, int | float]:
        return metric_values(run_point(load_scenario(path, overrides)).summary())

    write_trace(tmp_path, 100)
    first, second = point(), point("engine.max_num_seqs=1")
    assert len(read) == 1
    assert first == point()
    part = point("workload.trace.limit=4")
    assert len(read) == 2
    assert part["completed"] == 4
    write_trace(tmp_path, 200)
    changed = point()
    assert changed["total_input_tokens"] == 2 * first["total_input_tokens"]
    assert changed == metric_values(run(load_scenario(path)).summary())
    write_trace(tmp_path, 100)
    assert second == metric_values(run(load_scenario(path, ["engine.max_num_seqs=1"])).summary())
