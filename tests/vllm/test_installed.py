"""The installed vLLM's own scheduler, where there is one, next to Headway's."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.conformance.cases import read_cases
from headway.conformance.compare import conform
from headway.conformance.replay import Replay
from headway.vllm import interface
from headway.vllm.installed import _Queue
from headway.vllm.interface import check_vllm
from simulator.scenario.load import check_scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from simulator.util.yaml_lines import SourceMap
from tests.support.conformance import make

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

SCENARIO = {
    "model": "llama-3-8b",
    "cost": {"kind": "linear", "base": 0.01, "per_token": 1e-4, "per_context": 0.0},
    "engine": {
        "name": "textbook",
        "num_gpu_blocks_override": 60,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    },
    "workload": {"num_prompts": 30, "request_rate": 20, "input_len": 40, "output_len": 60},
}


def scenario(**engine: object) -> object:
    return check_scenario(SCENARIO | {"engine": SCENARIO["engine"] | engine}, SourceMap("s", {}))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_scenario_is_refused() -> None:
    """In one line that names the key."""
    with pytest.raises(HeadwayError, match=r"engine.scheduler: vLLM is not installed"):
        scenario(scheduler="vllm")


def test_without_the_entry_point_the_scenario_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkout that was installed before it had one."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    with pytest.raises(HeadwayError, match=r"engine.scheduler: no installed package has .* vllm"):
        scenario(scheduler="vllm")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_nothing_is_recorded(tmp_path: Path, capsys) -> None:
    """One line, exit code 2, no file."""
    from headway.conformance.record_vllm import main

    log = tmp_path / "log.jsonl.gz"
    assert main([str(make(tmp_path, [(0, 6, 3)])), str(log)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("record_vllm: error: vLLM cannot be imported in this Python: ")
    assert told.count("\n") == 1
    assert not log.exists()


def test_scheduler_cls_goes_with_vllm() -> None:
    """Headway's own scheduler takes no class of vLLM's."""
    with pytest.raises(HeadwayError, match=r"engine.scheduler_cls: needs scheduler: vllm"):
        scenario(scheduler_cls="a.B")


def test_windows_that_are_asked_for_are_refused_under_vllms_own_scheduler() -> None:
    """It would keep all tokens of every layer."""
    raw = {"model": "gemma-3-27b", "gpu": "H200", "workload": SCENARIO["workload"]}
    engine = {"name": "vllm", "scheduler": "vllm", "disable_hybrid_kv_cache_manager": False}
    with pytest.raises(HeadwayError, match="hybrid_kv_cache_manager: false needs scheduler: head"):
        check_scenario(raw | {"engine": engine}, SourceMap("s", {}))


@needs_vllm
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [False, True])
def test_vllm_and_headway_decide_alike(
    tmp_path: Path, policy: str, asynchronous: bool, caching: bool
) -> None:
    """Under pressure, in every field of every step."""
    requests = [(100 * k, 5 + 7 * k % 13, 4 + 5 * k % 11) for k in range(12)]
    path = make(
        tmp_path,
        requests,
        policy=policy,
        async_scheduling=asynchronous,
        enable_prefix_caching=caching,
        num_gpu_blocks=14,
    )
    (case,) = read_cases(path)
    mine, theirs = (list(Replay(case, installed=one).rows()) for one in (False, True))
    assert mine == theirs
    assert any(json.loads(row).get("preempted") for row in mine)


@needs_vllm
def test_nobody_sleeps_after_the_extra_step_of_one_that_was_stopped(tmp_path: Path) -> None:
    """Request 1 comes before, during and after the step that request 0 computes for nothing."""
    path = make(tmp_path, [(0, 6, 3), (0, 5, 2)], async_scheduling=True)
    raw = json.loads(path.read_text())
    raw["requests"][0]["max_tokens"] = 9
    for arrival in range(250, 900, 50):
        raw["requests"][1]["arrival_ns"] = arrival
        path.write_text(json.dumps(raw))
        (case,) = read_cases(path)
        mine, theirs = (list(Replay(case, installed=one).rows()) for one in (False, True))
        assert mine == theirs, arrival


@needs_vllm
def test_a_recording_is_a_golden_file(tmp_path: Path) -> None:
    """What the recorder writes, `headway conform` reads."""
    from headway.conformance.record_vllm import main

    path = make(tmp_path, [(0, 6, 3), (0, 5, 2)])
    log = tmp_path / "log.jsonl.gz"
    assert main([str(path), str(log)]) == 0
    assert not any(outcome.difference for outcome in conform(path, log))


@needs_vllm
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_scenario_under_vllm_is_the_one_under_headway(asynchronous: bool) -> None:
    """The same requests end at the same times, with the same preemptions."""
    rows = [
        run(scenario(scheduler=name, async_scheduling=asynchronous)).logs[0].request_rows
        for name in ("headway", "vllm")
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("installed", "release"),
    [("0.33.0", (0, 33, 0)), ("0.32.0+cu129", (0, 32, 0)), ("0.10.2", None), ("0.34.0", None)],
)
def test_the_release_is_that_of_the_version_without_its_build(
    installed: str, release: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "version", lambda _: installed)
    if release is not None:
        assert check_vllm(f"a test of {installed}") == release
        return
    with pytest.raises(HeadwayError, match=f"0.11 to 0.33, and {installed} is installed"):
        check_vllm(f"a test of {installed}")


def test_the_queue_of_a_scheduler_that_has_not_begun_is_empty() -> None:
    assert len(_Queue(SimpleNamespace(vllm=None))) == 0
    assert len(_Queue(SimpleNamespace(vllm=SimpleNamespace(waiting=[1, 2])))) == 2
