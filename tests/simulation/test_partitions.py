"""Runs without tables on workers: what one process says, and nothing lost that was done."""

import os
import signal
import subprocess
import sys
import time
from itertools import count
from math import isclose
from pathlib import Path

import numpy as np
import pytest
from joblib import parallel_config

from headway.cli.main import main
from simulator.scenario.load import load_scenario
from simulator.scenario.scenario import Scenario
from simulator.simulation import partitions, stream
from simulator.simulation.independent import attempt
from simulator.simulation.partitions import FOLDER, Partition, run_partition, run_partitions
from simulator.simulation.run import run
from simulator.simulation.stream import run_streamed
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.quantile_sketch import RELATIVE_ERROR
from simulator.util.workers import WorkerDied, use_backend
from tests.simulation.test_stream import LENGTHS, PERCENTILES, flat
from tests.support.scenarios import SMALL

WEEKLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("dask", "ray")]
"""Sweeps try them each time."""
GROUPS = "groups: {a: {replicas: 4}, b: {replicas: 2, engine: {max_num_seqs: 2}}}"
CASES = {
    "round robin": ["cluster={replicas: 6}", *LENGTHS],
    "random": ["cluster={replicas: 6, router: random}", "workload.request_rate=400"],
    "groups": [f"cluster={{router: random, {GROUPS}}}"],
    "all at once": ["cluster={replicas: 6}", "workload.request_rate=inf"],
    "frontend": [
        "cluster={replicas: 5}",
        "workload.frontend={latency: 10, per_request: 20, per_token: 1}",
    ],
    "some rejected": ["cluster={replicas: 6}", "engine.max_model_len=200", *LENGTHS],
    "prefixes": [
        "cluster={replicas: 4, router: prefix_hash}",
        "workload.prefix_groups={num_prefixes: 9}",
        "engine.enable_prefix_caching=true",
    ],
    "pods": ["cluster={replicas: 6, pods: 3, router: random}", "workload.request_rate=400"],
    "pods of groups": [
        f"cluster={{pods: 2, router: session_hash, pod_router: least_tokens, {GROUPS}}}"
    ],
    "drafts": [
        "cluster={replicas: 6}",
        "engine.speculative_config={num_speculative_tokens: 2, acceptance: 0.6}",
    ],
    "answers at once": [
        "cluster={replicas: 6}",
        "engine.scheduling_policy={policy: static, deliver: batch}",
    ],
}


def scenario(folder: Path, *overrides: str) -> Scenario:
    path = folder / "s.yaml"
    path.write_text(SMALL)
    return load_scenario(path, ["workload.num_prompts=300", *overrides])


def assert_alike(told: dict, expected: dict, but: str = "") -> None:
    """Hold a summary against another: percentiles within their error, means within rounding."""
    told, expected = flat(told), flat(expected)
    assert told.keys() == expected.keys()
    for key, value in told.items():
        if key == but:
            continue
        if isinstance(value, float):
            error = 2 * RELATIVE_ERROR if key.startswith(PERCENTILES) else 1e-9
            assert isclose(value, expected[key], rel_tol=error, abs_tol=1e-9), key
        else:
            assert value == expected[key], key


@pytest.mark.many
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_partitions_say_what_one_process_says(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = scenario(tmp_path, *CASES[case])
    monkeypatch.setattr(stream, "CHUNK", 32)
    monkeypatch.setattr(stream, "PER_REPLICA", 8)
    monkeypatch.setattr("simulator.engine.drive.EVENTS_PER_LOOK", 7)
    with parallel_config(backend="sequential"):
        told = run_partitions(what, tmp_path / "out")
    assert len([*(tmp_path / "out" / FOLDER).iterdir()]) > 1
    assert told["completed"]
    # Seconds begin with the first request here, there with the first that is completed.
    but = "max_output_tokens_per_s" if case == "some rejected" else ""
    assert_alike(told, run_streamed(what), but)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["loky", *WEEKLY])
@pytest.mark.filterwarnings("ignore")
def test_workers_of_every_backend_say_the_same(name: str, tmp_path: Path) -> None:
    pytest.importorskip({"dask": "distributed", "loky": "joblib"}.get(name, name))
    what = scenario(tmp_path, *CASES["pods"])
    told: list[tuple[float, int, int]] = []
    with use_backend(name, 2):
        found = run_partitions(
            what, tmp_path / "out", jobs=2, progress=lambda *now: told.append(now)
        )
    assert_alike(found, run_streamed(what))
    assert told[-1][1:] == (300, 300)


def test_what_the_workers_would_warn_of_is_said_once(tmp_path: Path) -> None:
    """Schedulers are made there, for each replica."""
    given = [*CASES["prefixes"], "engine.scheduling_policy=tgi"]
    what = scenario(tmp_path, *given)
    with parallel_config(backend="sequential"), pytest.warns(HeadwayWarning) as caught:
        run_partitions(what, tmp_path / "out")
    texts = [str(warning.message) for warning in caught]
    assert sum(text.startswith("tgi has no prefix cache") for text in texts) == 1


def test_why_all_requests_are_rejected_is_said(tmp_path: Path) -> None:
    """As by one process: what the first engine has room for."""
    groups = "{a: {replicas: 1}, b: {replicas: 3, engine: {num_gpu_blocks_override: 3}}}"
    what = scenario(tmp_path, f"cluster={{groups: {groups}}}", "engine.num_gpu_blocks_override=2")
    with parallel_config(backend="sequential"), pytest.warns(HeadwayWarning) as caught:
        told = run_partitions(what, tmp_path / "out")
    assert not told["completed"]
    [text] = [str(one.message) for one in caught if "were rejected" in str(one.message)]
    assert "or too large for the 1 KV blocks of" in text


def test_pods_kept_in_one_process_are_one_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = scenario(tmp_path, *CASES["pods of groups"])
    apart = run(what)
    monkeypatch.setattr("simulator.simulation.independent.find_coupling", lambda *_: "for the test")
    together = run(what)
    assert apart.requests.equals(together.requests)
    pods = apart.requests.groupby(apart.requests.replica % 2).size()  # 4 + 2 replicas, in turn
    assert pods.min() > 100


@pytest.mark.parametrize(
    ("cluster", "why"),
    [
        ("{replicas: 5, pods: 2}", "cluster.replicas: must be a multiple of pods (2)"),
        ("{replicas: 4, pods: 2, router: least_kv}", "cluster.router: must be one of these if"),
        ("{replicas: 4, pod_router: random}", "cluster.pod_router: needs pods"),
        ("{replicas: 4, pods: 2, pod_router: nearest}", "cluster.pod_router: no router 'nearest'"),
    ],
)
def test_pods_that_cannot_be_are_refused(cluster: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(HeadwayError) as caught:
        scenario(tmp_path, f"cluster={cluster}")
    assert why in str(caught.value)


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what, out = scenario(tmp_path, *CASES["pods"]), tmp_path / "out"
    calls = count()

    def fails(part: Partition) -> object:
        if next(calls) == 1:
            raise HeadwayError("no memory")
        return run_partition(part)

    monkeypatch.setattr(partitions, "run_partition", fails)
    with parallel_config(backend="sequential"):
        with pytest.raises(HeadwayError, match=r"^pods 1 to 1: no memory; 2 of 3 parts are kept"):
            run_partitions(what, out)
        found = run_partitions(what, out)
    assert next(calls) == 4
    assert_alike(found, run_streamed(what))


def test_a_file_that_is_no_part_is_named(tmp_path: Path) -> None:
    what, out = scenario(tmp_path, *CASES["pods"]), tmp_path / "out"
    with parallel_config(backend="sequential"):
        run_partitions(what, out)
        path = sorted((out / FOLDER).iterdir())[0]
        whole = path.read_bytes()
        np.savez(path, counts=np.zeros(3))  # somebody else's
        for text in (whole[:500], path.read_bytes()):
            path.write_bytes(text)
            with pytest.raises(HeadwayError, match=f"^{path}: is no part of a run; take it out"):
                run_partitions(what, out)


def test_a_full_disk_is_told_and_keeps_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, out = scenario(tmp_path, *CASES["pods"]), tmp_path / "out"
    written, savez = count(), partitions.np.savez

    def fills(file: object, **arrays: object) -> None:
        if next(written) == 2:
            raise OSError(28, "No space left on device")
        savez(file, **arrays)

    monkeypatch.setattr(partitions.np, "savez", fills)
    with parallel_config(backend="sequential"):
        with pytest.raises(HeadwayError, match=r"\.npz: cannot write: No space left on device"):
            run_partitions(what, out)
        assert len([*(out / FOLDER).iterdir()]) == 2
        assert_alike(run_partitions(what, out), run_streamed(what))


def test_a_worker_without_the_trace_says_so(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,100,10\n")
    path = tmp_path / "s.yaml"
    load = "workload: {trace: {path: t.csv}}\ncluster: {replicas: 2}\n"
    path.write_text(SMALL.partition("workload")[0] + load)
    what = load_scenario(path)
    trace.unlink()
    told = attempt(run_partition, Partition(what, range(1), 64, 1, True, None))
    assert isinstance(told, WorkerDied)
    assert str(trace) in told.reason
    assert "\n" not in told.reason


@pytest.mark.medium
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_keeps_the_parts_that_are_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "s.yaml", tmp_path / "out"
    path.write_text(SMALL + "cluster: {replicas: 8}\n")
    when = path.stat().st_mtime_ns
    words = ["run", str(path), "--set", "workload.num_prompts=60000", "--no-tables", "--jobs", "2"]
    words += ["--out", str(out), "--quiet"]
    child = subprocess.Popen(
        [sys.executable, "-m", "headway", *words], stderr=subprocess.PIPE, text=True
    )
    kept = out / FOLDER
    until = time.monotonic() + 120
    while not (kept.exists() and [*kept.iterdir()]) and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGSTOP)  # else it may be done before it is interrupted
    assert main(words) == 2  # while the other has the folder
    assert "another command is writing there" in capsys.readouterr().err
    assert main(["run", str(path), "--set", "workload.num_prompts=5", "--out", str(out)]) == 2
    assert "another command is writing there" in capsys.readouterr().err
    os.kill(child.pid, signal.SIGTERM)  # as Ctrl-C, which a job in the background ignores
    os.kill(child.pid, signal.SIGCONT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert f"finished parts are in {kept}, and the same command goes on from there" in err
    before = {file.name: file.stat().st_mtime_ns for file in kept.iterdir()}
    assert 0 < len(before) < 8
    assert main([*words, "--seed", "9"]) == 2
    told = f"{kept}: has parts of another command, of more or fewer workers (now 2)"
    assert told in capsys.readouterr().err
    text = path.read_text()
    path.write_text(f"{text}\n")
    assert main(words) == 2
    assert told in capsys.readouterr().err
    path.write_text(text)
    os.utime(path, ns=2 * (when,))
    assert main(words) == 0
    assert sorted(file.name for file in out.iterdir()) == ["scenario.yaml", "summary.json"]


@pytest.mark.medium
@pytest.mark.parametrize("name", ["loky", WEEKLY[0]])
@pytest.mark.filterwarnings("ignore")
def test_the_part_of_a_worker_that_dies_is_done_again(name: str, tmp_path: Path) -> None:
    pytest.importorskip({"dask": "distributed", "loky": "joblib"}[name])
    armed = tmp_path / "armed"
    (tmp_path / f"dying_{name}.py").write_text(
        "import contextlib, os\n"
        "def choose(request, targets):\n"
        f"    if request.id > 100 and os.path.exists({str(armed)!r}):\n"
        "        with contextlib.suppress(FileNotFoundError):  # another worker is dying of it\n"
        f"            os.unlink({str(armed)!r})\n"
        "            os._exit(1)\n"
        "    return request.id % len(targets)\n"
    )
    what = scenario(
        tmp_path, f"cluster={{replicas: 8, pods: 4, pod_router: 'dying_{name}:choose'}}"
    )
    armed.touch()
    with use_backend(name, 2):
        found = run_partitions(what, tmp_path / "out", jobs=2)
    assert not armed.exists()
    assert found["completed"] == 300


def test_a_run_leaves_no_tables_of_another_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "demo", "--set", "workload.num_prompts=5", "--out", str(tmp_path), "--quiet"]
    assert main([*words, "--format", "parquet"]) == 0
    assert main(words) == 0
    tables = {"requests.csv", "steps.csv"}
    files = {"scenario.yaml", "summary.json"}
    assert {path.name for path in tmp_path.iterdir()} == tables | files
    assert main([*words, "--no-tables"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == files
    assert main([*words, "--no-tables", "--tables-in", str(tmp_path)]) == 0
    assert main(words) == 2
    assert f"--out {tmp_path}: has tables of another run" in capsys.readouterr().err
