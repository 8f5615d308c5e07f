"""A running server calibrated: the twin, whose truth is known, and servers with faults."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

pytest.importorskip("aiohttp")

from calibration.engine_steps.steps_file import make_step
from calibration.running_server.ask import Server, ask, scenario_of
from calibration.running_server.calibrate import calibrate_server
from calibration.running_server.drive import Drive
from headway.cli.main import main
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
from simulator.util.errors import HeadwayError
from tests.support.commands import ROOT
from tests.support.known_server import SCENARIO, TRUTH
from tests.support.twins import twin

TOLD = ["model=tiny-test", "gpu.name=CPU", "engine.max_num_seqs=8",
        "engine.max_num_batched_tokens=256"]  # fmt: skip


@pytest.mark.slow
def test_a_served_scenario_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A circle: serve a scenario, calibrate the server, predict what it does."""
    path, out = tmp_path / "truth.yaml", tmp_path / "out"
    path.write_text(SCENARIO)
    words = ["calibrate", "--minutes", "0.4", "--out", str(out)]
    for told in TOLD:
        words += ["--set", told]
    with twin(str(path), "--port", "0") as (addresses, _):
        code = main([*words, "--server", addresses[0]])
    printed = capsys.readouterr()
    assert code in {0, 2}, printed.err  # 2: this machine had others at work, and it is said
    assert code == 0 or "drifts" in printed.err
    written = yaml.safe_load((out / "scenario.yaml").read_text())
    assert written["engine"] == {
        "version": "0.32.0",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "num_gpu_blocks_override": 2000,
        "enable_prefix_caching": True,
        "max_model_len": 1024,
        "async_scheduling": False,
    }
    assert written["cost"] == {"profile": "profile.yaml"}
    cost = resolve(load_scenario(out / "scenario.yaml")).cost
    step = make_step((), 4, 800)
    assert cost.execute(step).seconds == pytest.approx(TRUTH.execute(step).seconds, rel=0.5)
    page = (out / "calibration.html").read_text()
    assert 1 <= page.count("<svg") <= 4  # of loads held out
    assert "Latencies of requests were fitted" in page
    figures = json.loads((out / "calibration.json").read_text())
    assert figures["to"] == "requests"
    assert all(
        set(errors) == {"ttft", "tpot", "e2el"} for errors in figures["held_out_loads"].values()
    )
    folders = sorted(folder.name for folder in (out / "loads").iterdir())
    assert folders[:3] == ["01-warm-up", "02-probe", "03-closed-2"]
    assert folders[-1].endswith("probe-again")
    assert "held out" in printed.out
    assert main([*words, "--server", "http://127.0.0.1:9"]) == 2  # and the folder is left as it is
    assert "has a calibration's loads already" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    path, out = tmp_path / "truth.yaml", tmp_path / "out"
    path.write_text(SCENARIO)
    with twin(str(path), "--port", "0") as (addresses, _):
        words = [sys.executable, "-m", "headway", "calibrate", "--server", addresses[0],
                 "--minutes", "2", "--out", str(out)]  # fmt: skip
        for told in TOLD:
            words += ["--set", told]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": ROOT},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("closed-2"):
                    break
            time.sleep(1)
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=120)
        assert process.returncode in {2, 130}, errors  # 2: too few requests to fit
        assert (out / "loads" / "02-probe" / "requests.csv").is_file()
        if process.returncode == 130:
            assert "its times: it was stopped half-way" in (out / "scenario.yaml").read_text()
            assert "stopped" in rest
        else:
            assert "too few to fit" in errors


# What a server may have wrong.


METRICS = """vllm:num_requests_running 0
vllm:num_requests_waiting 0
vllm:request_success_total{finished_reason="length"} %d
vllm:cache_config_info{block_size="16",num_gpu_blocks="2000",enable_prefix_caching="True"} 1.0
"""


class Faulty:
    """A server that says what it is told to say."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[], tuple[int, str]]] = {
            "/version": lambda: (200, '{"version": "0.32.0"}'),
            "/v1/models": lambda: (200, '{"data": [{"id": "m", "max_model_len": 1024}]}'),
            "/metrics": lambda: (200, METRICS % 0),
        }
        self.completion: Callable[[int], tuple[int, str]] = lambda _: (500, "out of order")
        self.asked = 0


@contextmanager
def faulty() -> Iterator[tuple[Faulty, str]]:
    """Serve such a one; give it and its address."""
    faults = Faulty()

    class Handler(BaseHTTPRequestHandler):
        def _send(self, code: int, text: str) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            self._send(*faults.answers.get(self.path, lambda: (404, ""))())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            faults.asked += 1
            self._send(*faults.completion(faults.asked))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield faults, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def told(url: str, out: Path, overrides: list[str] | None = None) -> str:
    """Calibrate a server that cannot be; give the messages."""
    with pytest.raises(HeadwayError) as error:
        calibrate_server(url, out, minutes=0.1, overrides=TOLD if overrides is None else overrides)
    return str(error.value)


def test_a_server_that_is_none(tmp_path: Path) -> None:
    assert "cannot be reached" in told("http://127.0.0.1:9", tmp_path)
    assert "does not begin with http" in told("localhost:8000", tmp_path)


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/version", (200, "<!DOCTYPE html><html>"), "/version: is no vLLM: not JSON, but '<!DOC"),
        ("/version", (500, ""), "/version: is no vLLM: answers 500"),
        ("/version", (404, "<html>"), "/version: is no vLLM: answers 404"),
        ("/metrics", (500, ""), "/metrics: answers 500"),
        ("/version", (401, ""), "set OPENAI_API_KEY"),
        ("/version", (200, '{"version": "dev"}'), "the version 'dev' is not as vLLM says it"),
        ("/v1/models", (200, '{"data": []}'), "names no model"),
        ("/v1/models", (200, '{"data": [{"id": "m"}]}'), "max_model_len is not as vLLM says it"),
        ("/metrics", (200, "sglang:num_running_reqs 0\n"), "is no vLLM: its /metrics have no"),
        ("/metrics", (200, METRICS % 0 + "vllm:cache_config_info{} 1\n"), "has 2 engines"),
        ("/metrics", (200, (METRICS % 0).replace("running 0", "running 3")), "3 in it"),
        (
            "/v1/models",
            (200, '{"data": [{"id": "m", "max_model_len": 100}]}'),
            "max_model_len 100 is too small for the probe",
        ),
    ],
)  # fmt: skip
def test_what_it_says_of_itself(
    tmp_path: Path, path: str, answer: tuple[int, str], message: str
) -> None:
    with faulty() as (faults, url):
        faults.answers[path] = lambda: answer
        said = told(url, tmp_path / "out")
    assert message in said
    assert "\n" not in said
    assert not (tmp_path / "out").exists()


def test_others_that_use_it(tmp_path: Path) -> None:
    with faulty() as (faults, url):
        counts = iter(range(100))
        faults.answers["/metrics"] = lambda: (200, METRICS % next(counts))
        assert "is busy with others' requests (0 in it, 1 more ended within 1 s)" in told(
            url, tmp_path
        )


ASKED = Server("http://127.0.0.1:9", "0.32.0", "m", "m", 1024, {})
STREAM = (
    'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": "b"}]}\n\n'
    'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.medium
def test_a_server_that_fails_while_it_is_driven(tmp_path: Path) -> None:
    """What was answered until then is kept."""
    with faulty() as (faults, url):
        assert "12 of 12 requests of warm-up failed: 500: out of order" in told(url, tmp_path / "a")
        assert not (tmp_path / "a").exists()
        faults.asked = 0
        faults.completion = lambda turn: (200, STREAM) if turn < 9 else (400, "too long")
        said = told(url, tmp_path / "b")
    assert "4 of 12 requests of warm-up failed: 400: too long" in said
    assert len((tmp_path / "b/loads/01-warm-up/requests.csv").read_text().splitlines()) == 9


@pytest.mark.medium
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, STREAM), "the server is gone: after warm-up; /metrics: answers 500"),
        ((500, "x"), "gone: 12 of 12 requests of warm-up failed: 500: x; /metrics: answers 500"),
    ],
)
def test_a_server_that_dies(tmp_path: Path, answer: tuple[int, str], message: str) -> None:
    with faulty() as (faults, url):
        faults.completion = lambda _: answer
        faults.answers["/metrics"] = lambda: (500, "") if faults.asked else (200, METRICS % 0)
        assert message in told(url, tmp_path)
    drive = Drive(ASKED, 1000, 8, 60.0)
    assert not drive._send("probe", drive._closed(1, 1, "mixed"), held_out=False)
    assert drive.fault.startswith("the server is gone: before probe; cannot be reached: ")


@pytest.mark.medium
def test_others_that_come_meanwhile(tmp_path: Path) -> None:
    with faulty() as (faults, url):
        faults.completion = lambda _: (200, STREAM)
        faults.answers["/metrics"] = lambda: (200, METRICS % (faults.asked and faults.asked + 7))
        assert "7 requests of others ended during warm-up" in told(url, tmp_path)


def test_what_the_server_does_not_tell_is_asked_for() -> None:
    with faulty() as (_, url):
        server = ask(url)
        with pytest.raises(HeadwayError) as error:
            scenario_of(server, None, ["gpu=H100-80GB"])
        asked = [line.split(":")[0] for line in str(error.value).splitlines()]
        assert asked == ["model", "engine.max_num_seqs", "engine.max_num_batched_tokens"]
        with pytest.raises(HeadwayError, match="block_size: the server says 16, the scenario 32"):
            scenario_of(server, None, [*TOLD, "engine.block_size=32"])
        found = scenario_of(server, None, TOLD)
        assert (found.engine.version, found.engine.num_gpu_blocks_override) == ("0.32.0", 2000)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--server", "http://x", "--minutes", "0"], "--minutes 0: must be more than 0"),
        (["--server", "http://x", "--max-rate", "-1"], "--max-rate -1: must be more than 0"),
        (["--server", "http://x", "--steps", "none.csv"], "--steps none.csv: no such file"),
        (["--server", "http://x", "--columns", "a=b"], "--columns: needs --from-requests"),
        (["--model", "tiny-test", "--steps", "s"], "--steps: needs --server"),
        (["--server", "http://x", "--from", "a"], "--server: cannot be used with --from"),
    ],
)
def test_options(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *words]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_server_on_a_cpu_decides_one_step_after_another() -> None:
    """vLLM's CPU platform turns asynchronous scheduling off, and there are no CUDA graphs."""
    scenario = load_scenario({"model": "tiny-test", "gpu": "CPU", "engine": {"version": "0.32.0"}})
    assert not scenario.engine.async_scheduling
    assert resolve(scenario).cost.cudagraph_capture_sizes == ()
    assert resolve(load_scenario({"model": "tiny-test"})).cost.cudagraph_capture_sizes


def test_steps_of_a_load_are_those_written_meanwhile(tmp_path: Path) -> None:
    drive = Drive(ASKED, 1000, 8, 60.0)
    assert drive._steps() == 0
    table, record = tmp_path / "steps.csv", tmp_path / "steps.jsonl"
    table.write_text("decodes,context,chunks,duration_s\n1,5,,0.1\n1,6,,0.1\n")
    record.write_text(
        '{"type":"case","name":"live"}\n{"type":"arrival","id":0}\n'
        '{"type":"step","sched":[[0,5,0]]}\n{"type":"step","sched":[]}\n{"type":"empty","t":1}\n'
    )
    counts = []
    for drive.steps in (table, record):
        counts.append(drive._steps())
    assert counts == [2, 1]
    drive.steps = tmp_path / "none"
    with pytest.raises(HeadwayError, match=r"--steps .*none: cannot read"):
        drive._steps()


@pytest.mark.parametrize("part", [b"#", b"#" * 2**16], ids=["slow", "endless"])
def test_an_answer_without_end_ends(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its time as a whole, whenever its next byte comes, or by its size."""

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            until = time.monotonic() + 20
            while time.monotonic() < until:
                try:
                    self.wfile.write(part)
                except OSError:
                    return
                time.sleep(0.05 if len(part) == 1 else 0)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr("calibration.running_server.ask.PATIENCE", 1.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        begin = time.monotonic()
        with pytest.raises(
            HeadwayError, match=r"cannot be reached: (it does not answer|more than)"
        ):
            ask(f"http://127.0.0.1:{server.server_port}")
        assert time.monotonic() - begin < 10
        server.shutdown()
