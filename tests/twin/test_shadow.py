"""A server and the simulation of its traffic: they agree, and part when a knob is changed."""

import json
import subprocess
import sys
from math import nan
from pathlib import Path
from time import sleep

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from headway.report.prometheus import histogram_kinds
from headway.twin.shadow import (
    ROWS,
    NoTrafficError,
    Poll,
    Verdict,
    Window,
    as_json,
    conclusion,
    judge,
    lengths,
    read_poll,
    simulated_polls,
    traffic,
)
from simulator import run
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError
from tests.support.commands import ROOT, headway
from tests.support.twins import twin

SCENARIO = """
name: canary
model: llama-3.1-8b
gpu: {name: A100-80GB}
engine: {name: vllm, max_num_seqs: 64}
workload:
  num_prompts: 400
  request_rate: 5
  input_len: 600
  output_len: {kind: lognormal, mean: 150, sigma: 0.5}
  prefix_groups: {num_prefixes: 3, prefix_len: 400}
"""
KNOBS = {
    "": "",
    "engine.max_num_seqs=8": "waiting",
    "engine.enable_prefix_caching=false": "hit_rate",
    "engine.num_gpu_blocks_override=500 engine.max_model_len=2000": "preemptions",
    "gpu.name=L40S": "running",
    "workload.request_rate=2": "",
    "workload.input_len=900": "",
}
BOUNDS = np.array([*histogram_kinds(131072)["request_prompt_tokens"][1], np.inf])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "canary.yaml"
    path.write_text(SCENARIO)
    return path


def polls_of(scenario: Scenario, times: list[float]) -> list[Poll]:
    """Poll a simulated server."""
    result = run(scenario)
    seen = simulated_polls(result.logs, result.workload, np.array(times))
    requests = result.logs[0].requests
    found = []
    for k, time in enumerate(times):
        over = requests[requests["finish"] <= time]
        columns = result.workload.prompt_tokens[over["id"]], over["generated"]
        histograms = [
            (
                BOUNDS,
                np.bincount(np.searchsorted(BOUNDS, column), minlength=len(BOUNDS)).astype(float),
                float(column.sum()),
            )
            for column in columns
        ]
        row = {name: float(column[k]) for name, column in seen.items()}
        found.append(Poll(time, row | {"finished": len(over)}, *histograms))
    return found


@pytest.mark.many
@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("begin", [0.0, 20.0])
def test_they_part_when_a_knob_is_changed_and_agree_whatever_the_traffic(
    path: Path, knob: str, begin: float
) -> None:
    server = load_scenario(path, knob.split())
    polls = polls_of(server, (begin + np.arange(41.0)).tolist())
    verdict = judge(polls, load_scenario(path), 10.0, 0.2)
    assert len(verdict.windows) >= 3
    if not KNOBS[knob]:
        assert not verdict.parted
        assert "agree in" in conclusion(verdict)
    else:
        window = verdict.parted[KNOBS[knob]]
        assert window.start <= begin + 20
        assert f"{KNOBS[knob].replace('_', ' ')}, from " in conclusion(verdict)


def test_the_traffic_is_what_the_counters_say(path: Path) -> None:
    server = load_scenario(path)
    asked = make_workload(server)
    polls = polls_of(server, np.arange(0.0, 200.0).tolist())
    load = traffic(polls, asked, 0)
    load.check()
    assert len(load) == len(asked)
    assert np.abs(load.arrival - asked.arrival).max() < 2  # s: two polls, and a step
    assert load.prompt_tokens.sum() == asked.prompt_tokens.sum()
    assert load.output_tokens.sum() == asked.output_tokens.sum()
    spread = np.percentile(asked.output_tokens, [10, 50, 90])
    assert np.allclose(np.percentile(load.output_tokens, [10, 50, 90]), spread, rtol=0.15)
    with pytest.raises(NoTrafficError):
        traffic(polls[:1], asked, 0)


def test_lengths_have_the_sum_of_their_histogram() -> None:
    before = np.array([10.0, 20.0, np.inf]), np.array([1.0, 0.0, 0.0]), 5.0
    after = np.array([10.0, 20.0, np.inf]), np.array([2.0, 2.0, 1.0]), 5.0 + 3 + 12 + 19 + 60
    found = lengths(before, after)
    assert found.sum() == 94
    assert (found[:3] <= [10, 20, 20]).all()
    assert found[3] > 20
    assert len(lengths(after, after)) == 0
    single = np.array([10.0, 20.0, np.inf]), np.array([2.0, 1.0, 0.0]), 5.0 + 7 + 17
    assert lengths(before, single).sum() == 24


def test_a_star_in_one_window_is_no_agreement_there() -> None:
    values = dict.fromkeys(ROWS, 1.0)
    windows = [Window(0.0, 10.0, 5, values, values, apart) for apart in ({}, {"running": 1}, {})]
    told = conclusion(Verdict(windows))
    assert told.startswith("server and simulation agree in 2 of 3 windows; no two in a row")


def test_a_server_on_another_clock_is_refused() -> None:
    text = 'vllm:num_requests_running{engine="0"} 1.0\nheadway:speed %s\n'
    read_poll(text % "1.0", 0.0)
    with pytest.raises(HeadwayError, match="--speed 10: shadow needs 1"):
        read_poll(text % "10.0", 0.0)


def test_what_is_not_vllms_is_refused() -> None:
    with pytest.raises(HeadwayError, match="are these vLLM's"):
        read_poll("# HELP x y\nx 3\n", 0.0)


def test_engines_are_summed_and_histograms_read() -> None:
    text = """vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:request_success_total{engine="0",finished_reason="stop"} 5.0
vllm:request_success_total{engine="0",finished_reason="length"} 6.0
vllm:request_prompt_tokens_bucket{engine="0",le="10.0"} 2.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf"} 5.0
vllm:request_prompt_tokens_sum{engine="0"} 99.0
"""
    poll = read_poll(text, 1.0)
    names = ("running", "waiting", "kv_usage", "finished")
    assert [poll.values[name] for name in names] == [7, 1, 50, 11]
    assert poll.seen == 19
    assert [column.tolist() for column in poll.prompt[:2]] == [[10, np.inf], [2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("knob", "code"), [("engine.max_num_seqs=64", 0), ("engine.max_num_seqs=2", 1)]
)
def test_twin_against_simulation(path: Path, knob: str, code: int) -> None:
    """As a user does: a server, a client, and the command beside them."""
    options = "--duration", "20", "--window", "5", "--interval", "0.5", "--tolerance", "0.5"
    with twin(str(path), "--port", "0", "--set", knob) as ((url,), _):
        command = [sys.executable, "-m", "headway"]
        asked = "shadow", "--url", f"{url}/metrics", "--scenario", str(path), *options
        watch = subprocess.Popen([*command, *asked], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert watch.stdout is not None
        told = watch.stdout.readline()
        sleep(1)  # it polls an idle server first
        sent = "replay", str(path), "--url", url, "--out", str(path.parent / "out")
        client = subprocess.Popen([*command, *sent], cwd=ROOT)
        told += watch.communicate(timeout=120)[0]
        client.terminate()
        client.wait(30)
    assert watch.returncode == code, told
    assert ("waiting since" in told) == bool(code)
    assert ("simulation agree in" in told) == (not code)


def test_json_has_every_window_and_null_for_what_nobody_knows() -> None:
    known = {"waiting": 3.0, "hit_rate": nan}
    window = Window(0.0, 10.0, 5.0, known, known | {"waiting": 1.0}, {"waiting": 1})
    found = as_json(Verdict([window], {"waiting": window}, 5.0))
    assert found == json.loads(json.dumps(found, allow_nan=False))
    assert found["windows"][0]["server"] == {"waiting": 3.0, "hit_rate": None}
    assert (found["parted"], found["requests"]) == ({"waiting": 0.0}, 5.0)


@pytest.mark.medium
def test_nothing_to_compare_is_no_agreement(path: Path) -> None:
    """A server that nobody asks anything."""
    with twin(str(path), "--port", "0") as ((url,), _):
        options = "--duration", "2", "--window", "1", "--interval", "0.5"
        command = "shadow", "--url", url, "--scenario", str(path), *options
        text, found = headway(*command), headway(*command, "--json")
    assert text.returncode == found.returncode == 2
    assert "nothing to compare: no request came" in text.stdout
    assert json.loads(found.stdout) == {"requests": 0, "windows": [], "parted": {}}


@pytest.mark.medium
def test_nobody_there_is_told_in_a_line(path: Path) -> None:
    found = headway("shadow", "--url", "http://127.0.0.1:9", "--scenario", str(path))
    assert found.returncode == 2
    assert "--url: http://127.0.0.1:9: " in found.stderr
    found = headway("shadow", "--url", "127.0.0.1:9", "--scenario", str(path))
    assert "does not begin with http://" in found.stderr
    bad = headway("shadow", "--url", "http://x", "--scenario", str(path), "--interval", "0")
    assert ": must be 0.01 or more (" in bad.stderr
