"""Replicas that nothing ties together, simulated each by itself: the same bytes as in one fleet."""

from pathlib import Path

import numpy as np
import pytest
from joblib import parallel_config

from headway.cli.main import main
from simulator.scenario.load import load_scenario
from simulator.scenario.scenario import Scenario
from simulator.simulation import cluster, independent
from simulator.simulation.result import Result
from simulator.simulation.run import run, spread_cluster
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError
from simulator.util.workers import use_backend
from tests.simulation.test_partitions import WEEKLY
from tests.support.scenarios import SMALL

CLUSTER = """
cluster:
  router: random
  groups:
    a: {replicas: 3}
    b: {replicas: 2, engine: {max_num_seqs: 3, max_num_batched_tokens: 64}}
"""
CASES = {
    "round robin": ["cluster.router=round_robin"],
    "random": [],
    "all at once": ["workload.request_rate=inf"],
    "prefixes": [
        "workload.prefix_groups={num_prefixes: 3, prefix_len: 40}",
        "engine.enable_prefix_caching=true",
    ],
    "frontend": ["workload.frontend={latency: 10, per_request: 20, per_token: 10}"],
    "hints": ["predictor={kind: noisy, sigma: 0.5}", "engine.scheduling_policy=sjf"],
    "clients": ["workload.clients=3", "workload.priorities=[2, 1, 1]"],
    "host": [
        "cost={kind: piecewise, dense: [[1, 0.01], [512, 0.02]]}",
        "cluster.groups.a.host={per_step: 0.003}",
    ],
    "async": ["cluster.groups.a.engine={async_scheduling: true}"],
}


def scenario(folder: Path, *overrides: str) -> Scenario:
    path = folder / "s.yaml"
    path.write_text(SMALL + CLUSTER)
    return load_scenario(path, ["workload.num_prompts=120", *overrides])


def files(result: Result, folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in write_run(result, folder)}


def together(what: Scenario, monkeypatch: pytest.MonkeyPatch, stepwise: bool = False) -> Result:
    """Run all replicas on one clock."""
    with monkeypatch.context() as patch:
        patch.setattr(independent, "find_coupling", lambda *_: "for the test")
        return run(what, stepwise=stepwise)


@pytest.mark.many
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stepwise", [False, True])
def test_each_by_itself_gives_the_bytes_of_one_fleet(
    case: str, stepwise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = scenario(tmp_path, *CASES[case])
    one = files(together(what, monkeypatch, stepwise), tmp_path / "one")
    monkeypatch.setattr(cluster, "make_fleet", None)  # else this would prove nothing
    assert files(run(what, stepwise=stepwise), tmp_path / "two") == one


@pytest.mark.medium
@pytest.mark.parametrize("name", ["loky", *WEEKLY])
@pytest.mark.filterwarnings("ignore")
def test_workers_of_every_backend_give_the_same_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({"dask": "distributed", "loky": "joblib"}.get(name, name))
    what = scenario(tmp_path, *CASES["prefixes"])
    told: list[tuple[float, int, int]] = []
    with use_backend(name, 2):
        result = spread_cluster(what, jobs=2, progress=lambda *now: told.append(now))
    expected = files(together(what, monkeypatch), tmp_path / "one")
    assert files(result, tmp_path / "two") == expected
    assert told[-1][1:] == (120, 120)


def test_what_workers_have_done_is_told_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = scenario(tmp_path)
    told: list[tuple[float, int, int]] = []
    with parallel_config(backend="sequential"):
        logs = spread_cluster(what, jobs=2, progress=lambda *now: told.append(now)).logs
        assert told[-1] == (max(float(log.steps["end"][-1]) for log in logs), 120, 120)
        monkeypatch.setattr(independent, "run_group", lambda group: [])
        with pytest.raises(RuntimeError, match=r"^120 requests never ended"):
            spread_cluster(what, jobs=2)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["cluster.router=least_tokens"], "cluster.router: least_tokens looks at the replicas"),
        (["cluster.router=session_affinity"], "cluster.router: session_affinity looks at"),
        (["cluster.failures={mtbf: 100}"], "cluster.failures: acts on several replicas"),
        (["cluster.client={timeout: 9}"], "cluster.client: acts on"),
        (
            [
                "cluster={groups: {p: {kv_role: kv_producer}, d: {kv_role: kv_consumer}}}",
                "cluster.kv_transfer={}",
            ],
            "cluster.kv_transfer: acts on",
        ),
        (["workload.max_concurrency=4"], "workload.max_concurrency: a request waits"),
        (["workload.sessions={turns: 2}"], "workload: a session's turn waits for the one before"),
        (["predictor={kind: percentile}"], "predictor: learns from"),
        (["engine.data_parallel_size=2", "gpu.count=2"], "engine.data_parallel_size: the ranks"),
    ],
)
def test_what_ties_replicas_together_is_named(
    overrides: list[str], why: str, tmp_path: Path
) -> None:
    with pytest.raises(HeadwayError, match=f"^--jobs: replicas cannot run each by itself: {why}"):
        spread_cluster(scenario(tmp_path, *overrides))


def test_an_interrupt_leaves_all_replicas_at_one_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(independent, "REQUESTS_PER_TURN", 4)
    what = scenario(tmp_path, "workload.num_prompts=400")

    def stop(now: float, done: int, total: int) -> None:
        assert total == 400
        if done > 100:
            for replica in replicas[2:3]:
                monkeypatch.setattr(replica, "advance", interrupt)

    def interrupt(until: float | None = None) -> None:
        raise KeyboardInterrupt

    replicas: list[independent.IndependentReplica] = []
    made = independent.ReplicaGroup.replicas
    monkeypatch.setattr(
        independent.ReplicaGroup,
        "replicas",
        lambda *given: replicas.extend(made(*given)) or replicas,
    )
    result = run(what, progress=stop)
    assert result.interrupted
    sent = ~np.isnan(result.sent)
    last = float(result.sent[sent].max())
    assert 100 < sent.sum() < 400
    assert (result.workload.arrival[~sent] > last).all()
    assert result.summary()["completed"] + result.summary()["failed"] <= sent.sum()


def test_the_command_line_says_why_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL)
    for words, message in (
        (["--jobs", "0"], "--jobs 0: must be 1 or more ("),
        (["--jobs", "2"], "--jobs: replicas cannot run each by itself: cluster: there is none"),
        (["--jobs", "2", "--replications", "3"], "--replications: cannot be used with"),
        (["--address", "a:1"], "--address: needs --backend dask or ray"),
    ):
        assert main(["run", str(path), "--out", str(tmp_path / "o"), *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not (tmp_path / "o").exists()
