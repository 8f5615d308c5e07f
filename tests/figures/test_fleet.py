"""A fleet over time, by hand and from runs: states, load, queues, KV and imbalance."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from headway.cli.main import main
from headway.figures import Run, draw_fleet
from headway.figures.data import read_runs
from headway.figures.fleet import band, fleet_levels, replica_states
from headway.report.html.charts import charts
from headway.report.html.page import page
from simulator import load_scenario, run
from simulator.results.breakdown import PARTS
from simulator.util.errors import HeadwayError

ENGINE = """
engine: {max_num_seqs: 4, num_gpu_blocks_override: 200, max_model_len: 256}
cost: {kind: linear, base: 0.05, per_token: 0.0001}
"""
LOST = f"""{ENGINE}
workload: {{num_prompts: 120, request_rate: 8, input_len: 20, output_len: 20}}
cluster: {{replicas: 2, failures: {{outages: [{{replica: 0, start: 4, duration: 4}}]}}}}
"""
SCALED = f"""{ENGINE}
workload: {{num_prompts: 400, request_rate: 10, input_len: 20, output_len: 20,
           diurnal: {{period: 40, amplitude: 0.9}}}}
cluster: {{replicas: 1, autoscaling: {{target: 2, max_replicas: 4, interval: 2, startup_delay: 2,
          cooldown: 4}}}}
"""


def step(replica: int, start: float, running: int, waiting: int, used: int) -> dict[str, float]:
    """Return a step of a second."""
    return {
        **dict.fromkeys(("prefill_tokens", "decode_tokens", "wasted_tokens", "preempted"), 0),
        "replica": replica,
        "start": start,
        "duration": 1.0,
        "steps": 1,
        "running": running,
        "waiting": waiting,
        "kv_blocks_used": used,
        "kv_blocks_free": 10 - used,
    }


def by_hand() -> Run:
    """Two replicas for four seconds; 1 fails at 2 s with three waiting, and is back at 3 s."""
    steps = [step(0, k, running=2, waiting=0, used=5) for k in range(4)]
    steps += [step(1, 0, 4, 1, 10), step(1, 1, 4, 3, 10), step(1, 3, 1, 0, 1)]
    requests = pd.DataFrame(
        [
            dict.fromkeys(("client_queue_time", "queue_time", "preemptions", *PARTS), 0.0)
            | {"id": k, "arrival": float(k), "ttft": 0.1, "tpot": 0.1, "e2el": 1.0, "replica": 0}
            | {"finish_reason": "stop" if k else "timeout"}
            for k in range(4)
        ]
    )
    requests.loc[0, "e2el"] = np.nan
    changes = [(0, 0, "up"), (0, 1, "up"), (2, 1, "down"), (3, 1, "up")]
    groups = {"all": {"replicas": 2, "data_parallel_size": 1}}
    summary = {"headway": {"cluster": {"groups": groups, "failures": 1}}, "completed": 3}
    frames = requests, pd.DataFrame(steps), None
    table = pd.DataFrame(changes, columns=["time", "replica", "state"])
    return Run("hand", summary | {"duration": 4.0}, {"engine": {"block_size": 16}}, *frames, table)


def test_bins_are_divided_by_who_serves_and_what_fails_is_not_there() -> None:
    found, edges = by_hand(), np.arange(5.0)
    states = replica_states(found, edges)
    assert states["up"].tolist() == [2, 2, 1, 2]
    assert states["down"].tolist() == [0, 0, 1, 0]
    levels = fleet_levels(found, edges)
    assert levels.queue[0].tolist() == [0, 0, 0, 0]
    np.testing.assert_allclose(levels.queue[1], [1, 3, np.nan, 0])
    np.testing.assert_allclose(levels.kv, [[50] * 4, [100, 100, np.nan, 10]])
    # 5 and 7 requests beside 2; alone there is no imbalance; then 1 beside 2.
    np.testing.assert_allclose(levels.imbalance, [5 / 3.5, 7 / 4.5, np.nan, 2 / 1.5])
    assert levels.sent.tolist() == [1, 1, 1, 1]
    assert levels.given_up.tolist() == [1, 0, 0, 0]
    assert levels.ended.tolist() == [0, 0, 1, 2]  # after 2, 3 and 4 s
    assert levels.outages == [(2.0, 3.0)]
    assert levels.scalings == []


def test_half_a_bin_in_service_counts_for_half() -> None:
    levels = fleet_levels(by_hand(), np.array([0.0, 1.5, 2.5, 4.0]))
    # From 1.5 to 2.5 s replica 1 served for half a second, with three waiting all the time.
    np.testing.assert_allclose(levels.queue[1], [(1 * 1 + 3 * 0.5) / 1.5, 3, 0])
    np.testing.assert_allclose(levels.kv[1], [100, 100, 10])


def test_what_waits_for_a_replica_to_serve_is_not_divided_by_the_time_it_serves() -> None:
    found = by_hand()
    found.requests.loc[2, ["arrival", "replica"]] = 2.25, 1  # the gateway keeps it until 3 s
    found.requests.loc[2, "finish_reason"] = "stop"
    levels = fleet_levels(found, np.array([0.0, 1.2, 2.2, 3.2, 4.2]))
    assert levels.queue[1, 2] == pytest.approx(0.0)  # as its step says, which begins at 3 s


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_queues_of_the_picture_are_those_of_the_summary(overlaps: bool) -> None:
    """An asynchronous engine has decided who runs before the step that its row tells of starts."""
    keys = [f"engine={{async_scheduling: {overlaps}}}", "cluster={replicas: 2}"]
    result = run(load_scenario("demo", ["workload.num_prompts=400", *keys]))
    found = Run.of("demo", result)
    levels = fleet_levels(found, np.linspace(0.0, found.end, 101))
    waiting = result.summary()["headway"]["mean_waiting"]
    assert levels.queue.mean() == pytest.approx(waiting, rel=0.03)


def test_a_band_is_of_those_that_are_there() -> None:
    low, median, high = band(np.array([[1.0, np.nan, np.nan], [3.0, 4.0, np.nan], [8, 6, np.nan]]))
    assert low[:2].tolist() == [1, 4]
    assert median[:2].tolist() == [3, 5]
    assert high[:2].tolist() == [8, 6]
    assert np.isnan([low[2], median[2], high[2]]).all()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fleet")
    found = {}
    for name, text in (("lost", LOST), ("scaled", SCALED)):
        (folder / f"{name}.yaml").write_text(text)
        found[name] = folder / name
        assert (
            main(["run", str(folder / f"{name}.yaml"), "--out", str(found[name]), "--quiet"]) == 0
        )
    return found


def test_the_table_tells_when_each_replica_came_and_went(folders: dict[str, Path]) -> None:
    lines = (folders["lost"] / "replicas.csv").read_text().splitlines()
    assert lines[0] == "time,replica,group,state"
    rows = [(float(t), k, g, s) for t, k, g, s in (line.split(",") for line in lines[1:])]
    known = [(0, "0", "up"), (0, "1", "up"), (4, "0", "down"), (8, "0", "up")]
    assert rows == [(time, replica, "all", state) for time, replica, state in known]
    (found,) = read_runs([folders["scaled"]])
    cluster = found.summary["headway"]["cluster"]
    levels = fleet_levels(found, np.linspace(0, found.end, 50))
    assert len(levels.scalings) == cluster["scalings"] > 2
    assert {np.sign(change) for _, change in levels.scalings} == {1, -1}
    edges = np.linspace(0, found.end, 2)
    paid = sum(one[0] for one in replica_states(found, edges).values()) * found.end / 3600
    first = float(found.sent.min())  # the summary counts from the first request on
    assert paid == pytest.approx(cluster["replica_hours"] + first / 3600, rel=1e-6)


def test_from_memory_and_from_files_the_same_and_one_rank_is_a_part(folders, tmp_path) -> None:
    for name, text in (("lost", LOST), ("scaled", SCALED)):
        (tmp_path / "s.yaml").write_text(text)
        result = Run.of("x", run(load_scenario(tmp_path / "s.yaml")))
        (read,) = read_runs([folders[name]])
        edges = np.linspace(0, read.end, 20)
        one, other = fleet_levels(result, edges), fleet_levels(read, edges)
        np.testing.assert_allclose(one.kv, other.kv, rtol=1e-6)
        np.testing.assert_allclose(one.queue, other.queue, rtol=1e-6, atol=1e-6)
    ranks = "gpu: {count: 2}\n" + LOST.replace("max_num_seqs: 4", "data_parallel_size: 2")
    (tmp_path / "s.yaml").write_text(ranks)
    found = Run.of("ranks", run(load_scenario(tmp_path / "s.yaml")))
    states = replica_states(found, np.array([0.0, 4.0, 8.0, found.end]))
    assert states["up"].tolist() == [2, 1, 2]
    assert states["down"].tolist() == [0, 1, 0]
    assert len(fleet_levels(found, np.array([0.0, 4.0])).queue) == 4


@pytest.mark.medium
def test_the_picture_and_the_page(folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "f.svg"
    words = ["plot", "fleet", *map(str, folders.values()), "--out", str(out)]
    assert main(words) == 0
    first = out.read_bytes()
    assert main(words) == 0
    assert out.read_bytes() == first
    figure = draw_fleet(read_runs([*folders.values()]))
    assert [axes.get_ylabel() for axes in figure.axes[::2]][:2] == ["replicas", "requests/s"]
    runs = read_runs([*folders.values()])
    assert page(runs).count('data-kind="fleet-') == 10
    lost, scaled = charts(runs)["fleets"]
    assert lost["outages"] == [(4.0, 8.0)]
    assert scaled["scalings"]
    assert [name for name, *_ in lost["charts"]["replicas"]] == ["failed", "serving"]
    assert len(lost["charts"]["queue"]) == 2  # few replicas: a line each
    json.dumps(lost, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,replica,group,state\n", "has no change of a replica's state"),
        ("time,replica,group,state\n1,0,all,up\n0,0,all,down\n", "row 1: is no change"),
        ("time,replica,group,state\n0,0.5,all,up\n", "row 0: is no change"),
        ("time,replica,group,state\n0,0,all,gone\n", "row 0: is no change"),
        ("time,replica,group\n0,0,all\n", "has no column state"),
        ("time,replica,group,state\n0,x,all,up\n", "replica has what is no number"),
        (None, "no such file"),
    ],
)
def test_a_damaged_table_is_told_by_its_place(folders, tmp_path, capsys, text, message) -> None:
    for path in folders["lost"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if text is None:
        (tmp_path / "replicas.csv").unlink()
    else:
        (tmp_path / "replicas.csv").write_text(text)
    assert main(["plot", "fleet", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "replicas.csv" in error
    assert message in error
    assert not (tmp_path / "fleet.png").exists()


APART = """cluster={kv_transfer: {bandwidth: 50},
groups: {a: {replicas: 1, kv_role: kv_producer}, b: {replicas: 1, kv_role: kv_consumer}}}"""


def test_without_two_that_serve_in_a_group_there_is_no_imbalance(write) -> None:
    found = Run.of("apart", run(load_scenario(write(LOST), [APART])))
    figure = draw_fleet([found])
    assert [axes.get_ylabel() for axes in figure.axes][-1] == "% of KV blocks"
    assert all(axes.get_ylim()[0] < axes.get_ylim()[1] for axes in figure.axes)
    (fleet,) = charts([found])["fleets"]
    assert "imbalance" not in fleet["charts"]
    assert page([found]).count('data-kind="fleet-') == 4


def test_what_has_no_fleet_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(HeadwayError, match="4 runs are too many"):
        draw_fleet(read_runs([folders["lost"]]) * 4)
    alone = by_hand()
    alone.summary = {"headway": {}}
    with pytest.raises(HeadwayError, match="hand: has no cluster"):
        draw_fleet([alone])


def test_a_fleet_whose_requests_are_all_rejected_is_drawn(write) -> None:
    """It makes no step, and no time passes."""
    scenario = load_scenario(write(LOST), ["workload.input_len=300", "workload.num_prompts=3"])
    figure = draw_fleet([Run.of("full", run(scenario))])
    assert figure.axes[0].get_legend_handles_labels()[1] == ["serving"]
