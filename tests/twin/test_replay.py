"""Requests sent to a server of our own: what is measured is what it simulated, and never early."""

import asyncio
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("aiohttp")

from calibration.measured.predict import validate_measured
from calibration.measured.requests import read_requests
from calibration.measured.runs import read_runs
from headway.cli.main import main
from headway.twin.measured_run import summary, table, write_measured
from headway.twin.options import ServeOptions
from headway.twin.replay import prompt_of, replay
from headway.twin.server import Server, token_counter
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError
from simulator.workload.traces import read_trace
from tests.support.commands import ROOT, headway
from tests.support.twins import twin

SCENARIO = """
name: here
model: llama-3.1-8b
gpu: {name: H100-80GB}
engine: {name: vllm, max_model_len: 2000}
workload: {num_prompts: 12, request_rate: 20, input_len: 300, output_len: 15}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    path = tmp_path / "here.yaml"
    path.write_text(SCENARIO)
    return load_scenario(path)


@pytest.fixture
def served(scenario: Scenario) -> Iterator[tuple[Server, str]]:
    """Serve a scenario in a thread; give the server and its address."""
    server = Server(scenario, ServeOptions(port=0), token_counter(None))
    started, address = threading.Event(), [""]
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def ready(where: str) -> None:
        address[0] = where
        started.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(server.run(stop, ready)))
    thread.start()
    assert started.wait(30)
    yield server, address[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    loop.close()


@pytest.mark.medium
def test_what_is_measured_is_what_was_simulated(
    scenario: Scenario, served: tuple[Server, str], tmp_path: Path
) -> None:
    server, url = served
    load = make_workload(scenario)
    found = replay(load, url)
    assert [one.error for one in found.requests] == [""] * 12
    assert [one.tokens for one in found.requests] == load.output_tokens.tolist()
    assert (found.model, found.version) == ("llama-3.1-8b", "0.33.0")
    assert found.gauges
    assert all(one.late >= 0 for one in found.requests)
    # Requests may reach the server in another order than they were meant to.
    simulated = server.engine.result().requests
    assert sorted(simulated.prompt_tokens) == sorted(load.prompt_tokens)
    measured = np.sort([one.end - one.sent for one in found.requests])
    # Tokens leave early by what a busy machine is usually late.
    assert (measured >= np.sort(simulated.e2el) - 0.02).all()
    assert "12 of 12 requests answered" in table(found, load)

    write_measured(found, load, tmp_path / "run", (scenario, resolve(scenario)))
    (run,) = read_runs(tmp_path / "run")
    assert run.faults == ()
    assert run.word("model") == "llama-3.1-8b"
    assert run.count("kv_capacity_tokens") == 16 * resolve(scenario).num_gpu_blocks
    requests = read_requests(tmp_path / "run" / "requests.csv")
    assert len(requests.arrival) == 12
    result = headway("validate", "--measured", str(tmp_path / "run"))
    assert result.returncode == 0
    assert "requests/s" in result.stdout


def test_a_request_that_fails_is_told_beside_the_others(
    scenario: Scenario, served: tuple[Server, str], tmp_path: Path
) -> None:
    load = make_workload(scenario)
    load.prompt_tokens[3] = 5000
    found = replay(load, served[1])
    assert [number for number, one in enumerate(found.requests) if one.error] == [3]
    write_measured(found, load, tmp_path, (scenario, resolve(scenario)))
    (wrong,) = pd.read_csv(tmp_path / "errors.csv").error
    assert wrong.startswith("400: ")
    rows = pd.read_csv(tmp_path / "requests.csv")
    (failed,) = rows[rows.error.notna()].itertuples()
    assert (len(rows), failed.prompt_tokens, failed.output_tokens) == (12, 5000, 0)
    assert failed.max_tokens == load.output_tokens[3]


def test_turns_wait_for_the_turn_before(served: tuple[Server, str], tmp_path: Path) -> None:
    path = tmp_path / "talk.yaml"
    path.write_text(SCENARIO.replace("num_prompts: 12,", "num_prompts: 6, sessions: {turns: 3},"))
    load = make_workload(load_scenario(path))
    assert load.after is not None
    found = replay(load, served[1]).requests
    for number, before in enumerate(load.after.tolist()):
        if before >= 0:
            assert found[number].sent >= found[before].end


def test_prompts_are_equal_where_the_workload_says_so(scenario: Scenario) -> None:
    load = make_workload(scenario)
    load.segments = [(("shared", 200), (k, 100)) for k in range(12)]
    first, second = prompt_of(load, 0), prompt_of(load, 1)
    assert len(first) == 300
    assert first[:200] == second[:200]
    assert first[200:] != second[200:]
    load.segments[2] = (("shared", 50), ("other", 250))
    assert prompt_of(load, 2)[:50] == first[:50]


@pytest.mark.medium
def test_prompts_differ_from_run_to_run(scenario: Scenario, served: tuple[Server, str]) -> None:
    """The server's prefix cache finds none of a replay before, but where the seed is the same."""
    load = make_workload(scenario)
    for seed, share in ((None, 0.0), (7, 0.0), (7, 0.96), (None, 0.0)):
        found = replay(load, served[1], prompt_seed=seed)
        told = summary(found, load)
        assert told["prefix_hit_share"] == pytest.approx(share, abs=0.03)
        warned = f"warning: {told['prefix_hit_share']:.0%} of the prompts' tokens hit"
        assert (warned in table(found, load)) == bool(share)
        assert f"--prompt-seed {found.prompt_seed}" in table(found, load)
        assert seed in (None, found.prompt_seed)


@pytest.mark.medium
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_replay_that_is_stopped_keeps_what_was_answered(
    number: signal.Signals, served: tuple[Server, str], tmp_path: Path
) -> None:
    trace, out = tmp_path / "log.csv", tmp_path / "out"
    trace.write_text("arrival,prompt_tokens,output_tokens\n0,30,4\n0.1,20,1800\n900,50,6\n")
    words = ["replay", str(trace), "--url", served[1], "--out", str(out)]
    program = subprocess.Popen(
        [sys.executable, "-m", "headway", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    while len(served[0].engine.streams) != 1 or served[0].engine.next_id < 2:
        time.sleep(0.01)
    time.sleep(0.2)  # the first answer is on its way
    program.send_signal(number)
    told, _ = program.communicate(timeout=30)
    assert program.returncode == 130
    assert "1 of 3 requests answered" in told
    rows = pd.read_csv(out / "requests.csv")
    assert [*rows.error.isna()] == [True, False]
    assert rows.e2e_s[1] > 0.1
    wrong = pd.read_csv(out / "errors.csv")
    assert [*wrong.error] == ["not answered when the replay was stopped"] * 2
    assert [*np.isnan(wrong.sent_s)] == [False, True]


@pytest.mark.medium
def test_a_server_that_dies_is_told_and_the_exit_code_is_1(tmp_path: Path) -> None:
    trace, out = tmp_path / "log.csv", tmp_path / "out"
    rows = "".join(f"{k * 0.05:.2f},30,{4 if k == 0 else 4000}\n" for k in range(40))
    trace.write_text("arrival,prompt_tokens,output_tokens\n" + rows)
    with twin("demo", "--port", "0") as ((url,), server):
        words = ["replay", str(trace), "--url", url, "--out", str(out)]
        program = subprocess.Popen(
            [sys.executable, "-m", "headway", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        while 'finished_reason="length"} 1.0' not in urlopen(f"{url}/metrics").read().decode():
            time.sleep(0.05)
        server.kill()
        told, _ = program.communicate(timeout=60)
    assert program.returncode == 1
    assert "failed requests, not in these figures: 39; the first: the server " in told
    causes = {text.partition(":")[0] for text in pd.read_csv(out / "errors.csv").error}
    assert causes <= {"the server broke the connection", "the server takes no connections"}


def test_prompts_have_tokens_of_the_scenarios_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server refuses those beyond its vocabulary."""
    sizes: list[int] = []

    def sent(*_: object, vocab_size: int, **__: object) -> None:
        sizes.append(vocab_size)
        raise HeadwayError("sent")

    monkeypatch.setattr("headway.twin.replay.replay", sent)
    config = Path(ROOT) / "calibration/measurements/cpu/vllm-0.32-tiny-llama/config.json"
    words = ["demo", "--url", "http://x", "--out", str(tmp_path / "o")]
    assert main(["replay", *words, "--set", f"model={config}", "--set", "cost=null"]) == 2
    assert sizes == [json.loads(config.read_text())["vocab_size"]]


def test_nobody_there_is_told_in_a_line(scenario: Scenario, tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"--url: http://127\.0\.0\.1:9: "):
        replay(make_workload(scenario), "http://127.0.0.1:9")
    found = headway("replay", "demo", "--url", "ftp://x", "--out", str(tmp_path / "o"))
    assert found.returncode == 2
    assert "--url: 'ftp://x' does not begin with http://" in found.stderr
    assert not (tmp_path / "o").exists()


TRAFFIC = "num_prompts: 60, request_rate: 20"
LOOP = """
name: loop
model: llama-3.1-8b
gpu: {name: A100-80GB}
engine: {name: vllm}
workload: {num_prompts: 12, request_rate: 1, input_len: 8000, output_len: 60}
"""
TOTALS = ("completed", "total_input_tokens", "total_output_tokens")
TRIES = 5  # on a machine that others keep busy an answer may be late


@pytest.mark.slow
def test_replayed_against_its_own_twin_a_scenario_validates(tmp_path: Path) -> None:
    """What is measured of a server that is on time is what is simulated, within 3 % everywhere."""
    path, out = tmp_path / "loop.yaml", tmp_path / "measured"
    path.write_text(LOOP)
    for _ in range(TRIES):
        with twin(str(path), "--port", "0") as ((url,), _):
            assert headway("replay", str(path), "--url", url, "--out", str(out)).returncode == 0
        (outcome,) = validate_measured(out)
        assert not outcome.reason
        errors = {row.metric: abs(row.error) for row in outcome.rows}
        if max(errors.values()) <= 0.03:
            break
    assert max(errors.values()) <= 0.03, errors
    assert {"mean_ttft_ms", "p99_e2el_ms", "output_throughput", "mean_running"} <= errors.keys()


@pytest.mark.slow
def test_the_four_commands_of_the_page_follow_one_another(tmp_path: Path) -> None:
    """Pasted as they stand, against the server that the page names; with less traffic."""
    page = Path(ROOT, "docs", "serve.md").read_text()
    before, after = page[page.index("# load.yaml") :].split("```console\n", 1)
    text = before.split("```")[0].replace("num_prompts: 100, request_rate: 4", TRAFFIC)
    assert TRAFFIC in text
    (tmp_path / "load.yaml").write_text(text)
    pasted = [line.removeprefix("$ headway ") for line in after.split("```")[0].splitlines()]
    assert [line.split()[0] for line in pasted] == ["replay", "calibrate", "run", "validate"]
    served = tmp_path / "served"
    with twin(str(tmp_path / "load.yaml"), "--port", "0", "--out", str(served)) as ((url,), server):
        for line in pasted:
            words = shlex.split(line.replace("http://127.0.0.1:8000", url))
            done = headway(*words, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        assert "profile load-adjusted;" in done.stdout
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    measured = str(tmp_path / "out" / "measured")
    refused = headway("validate", "--measured", measured, "--profile", "no")
    assert "--profile no: no such file and no shipped profile" in refused.stderr

    # What was served is a trace that says itself what it is.
    trace = served / "served.jsonl"
    load, again = read_trace(trace), make_workload(load_scenario(served / "replay.yaml"))
    assert len(load) == 60
    assert load.arrival.tolist() == again.arrival.tolist()
    assert load.segments == again.segments
    with twin("demo", "--port", "0", "--speed", "5") as ((url,), _):
        done = headway("replay", str(trace), "--url", url, "--out", str(tmp_path / "again"))
        assert "60 of 60 requests answered" in done.stdout, done.stderr


@pytest.mark.medium
def test_clients_hang_up_where_the_trace_says_so(
    served: tuple[Server, str], tmp_path: Path
) -> None:
    line = '{"timestamp": %s, "input_length": 20, "output_length": %s, "hash_block_size": 16%s}\n'
    trace = tmp_path / "served.jsonl"
    trace.write_text(line % (0, 4, "") + line % (0.1, 1500, ', "cancel_after": 0.5'))
    done = headway("replay", str(trace), "--url", served[1], "--out", str(tmp_path / "out"))
    assert "1 of 2 requests answered" in done.stdout
    assert "repeated hang-ups, not in these figures: 1" in done.stdout
    assert "failed requests" not in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["failed"], summary["hung_up"]) == (0, 1)
    (error,) = pd.read_csv(tmp_path / "out" / "errors.csv").error
    assert error.startswith("the client hung up after 0.5")
    assert [*served[0].engine.result().requests.finish_reason] == ["length", "unfinished"]


def test_a_server_that_wants_a_key_gets_it(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the environment, as `vllm bench serve` takes it; without one a line says what to do."""

    class Guarded(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer('{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            chunk = '{"choices": [{"text": "a"}], "usage": {"completion_tokens": 15}}'
            self.answer(f"data: {chunk}\n\ndata: [DONE]\n\n")

        def answer(self, text: str) -> None:
            known = self.headers["Authorization"] == "Bearer sesame"
            self.send_response(200 if known else 401)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        load = make_workload(scenario)
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with pytest.raises(HeadwayError, match="401: the server wants a key: set OPENAI_API_KEY"):
            replay(load, url)
        monkeypatch.setenv("OPENAI_API_KEY", "sesame")
        found = replay(load, url)
        assert [one.error for one in found.requests] == [""] * 12
        assert found.unseen == "no num_requests_running in it"
        server.shutdown()


def test_what_a_measurement_says_of_its_own_faults_is_noted(
    scenario: Scenario, served: tuple[Server, str], tmp_path: Path
) -> None:
    load = make_workload(scenario)
    load.prompt_tokens[3] = 5000
    found = replay(load, served[1])
    found.server_late, found.requests[0].late = 0.25, 3.0
    write_measured(found, load, tmp_path, (scenario, resolve(scenario)))
    (outcome,) = validate_measured(tmp_path)
    failed, sent, answered, *_, replayed = outcome.notes[1:]
    assert replayed.endswith("failed requests that are replayed until their clients let go: 1")
    assert failed == f"failed requests, which are not compared: 1; see {tmp_path / 'errors.csv'}"
    assert sent.startswith("the client sent requests ")
    assert answered.startswith("the simulated server answered 250.0 ms late (P99)")
    assert f"warning: {answered}" in table(found, load)


@pytest.mark.medium
def test_a_trace_is_replayed_without_a_scenario(served: tuple[Server, str], tmp_path: Path) -> None:
    trace = tmp_path / "log.csv"
    trace.write_text("arrival,prompt_tokens,output_tokens\n0,30,4\n0.1,50,6\n0.1,20,1\n")
    found = headway("replay", str(trace), "--url", served[1], "--out", str(tmp_path / "out"))
    assert found.returncode == 0, found.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("requests.csv", "summary.json", "metrics.csv")
    }
    told = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [told[key] for key in TOTALS] == [3, 100, 11]
    requests = read_requests(tmp_path / "out" / "requests.csv")
    assert np.sort(requests.output).tolist() == [1, 4, 6]
    assert told["mean_ttft_ms"] == pytest.approx(1e3 * requests.ttft.mean(), abs=1e-2)
    assert told["mean_e2el_ms"] == pytest.approx(1e3 * requests.e2el.mean(), abs=1e-2)
    refused = headway("replay", str(trace), "--url", served[1], "--seed", "3")
    assert refused.returncode == 2
    assert "--set, --seed: need a scenario" in refused.stderr


def test_without_aiohttp_replay_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["replay", "demo", "--url", "http://127.0.0.1:9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headway: error: --url: needs aiohttp: pip install 'headway[serve]'")
