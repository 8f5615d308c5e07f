"""The command `headway serve`: a server of its own, until it is told to stop."""

import http.client
import json
import signal
import socket
import time
import urllib.request
from pathlib import Path

import pandas as pd
import pytest

from tests.support.commands import FILES, headway, names

pytest.importorskip("aiohttp")

from tests.support.twins import twin


def ask(address: str, **more: object) -> http.client.HTTPResponse:
    """Send a completion; give the answer."""
    body = json.dumps({"prompt": "a b c", "max_tokens": 4} | more).encode()
    head = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{address}/v1/completions", body, head)
    return urllib.request.urlopen(asked, timeout=30)


@pytest.mark.medium
def test_it_serves_until_it_is_told_to_stop_and_writes_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with twin("demo", "--port", "0", "--speed", "20", "--out", str(out)) as ((address,), process):
        with ask(address, ignore_eos=True) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert rest.startswith("1 of 1 requests served; answers late by ")
    assert names(out) == sorted([*FILES, "answers.csv", "replay.yaml", "served.jsonl"])
    assert json.loads((out / "summary.json").read_text())["completed"] == 1


@pytest.mark.medium
def test_each_replica_has_a_port_of_its_own(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("--port", str(port), "--replica-ports", "--out", str(tmp_path))
    cluster = ("--set", "cluster={replicas: 2}", "--speed", "20", "--startup-delay", "1")
    with twin("demo", *options, *cluster, ports=2) as (addresses, process):
        assert addresses == [f"http://127.0.0.1:{port + k}" for k in (0, 1)]
        time.sleep(0.2)
        for number, address in enumerate(addresses):
            for _ in range(number):  # the first stays idle
                ask(address).close()
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert rest.count("requests served") == 2
    for number in (0, 1):
        folder = tmp_path / f"replica-{number}"
        assert names(folder) == sorted([*FILES, "answers.csv", "replay.yaml", "served.jsonl"])
        assert json.loads((folder / "summary.json").read_text())["completed"] == number


@pytest.mark.medium
def test_what_passes_after_the_end_is_no_part_of_the_run(tmp_path: Path) -> None:
    """An open stream keeps the server for a while, in which its engine must not go on."""
    out = tmp_path / "out"
    with twin("demo", "--port", "0", "--out", str(out)) as ((url,), process):
        answer = ask(url, stream=True, max_tokens=4000, ignore_eos=True)
        answer.readline()
        begin = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
        passed = time.perf_counter() - begin
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
    told = pd.read_csv(out / "requests.csv")
    assert [*told.finish_reason] == ["unfinished"]
    assert passed > 1  # s: connections have so long to end by themselves
    assert float(rest.split(" late by ")[1].split()[0]) < 500  # ms


def test_a_port_that_is_taken_is_told_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = headway("serve", "demo", "--port", str(port))
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
    assert f"--port: 127.0.0.1:{port}: " in found.stderr


@pytest.mark.many
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--port", "70000"], "--port 70000: must be 0 to 65,535 ("),
        (["--speed", "0"], "--speed 0: must be 0.001 to 1,000 ("),
        (["--startup-delay", "-1"], "--startup-delay -1: must be 0 to 1,000,000 ("),
        (["--replica-ports"], "--replica-ports: the scenario has no cluster"),
        (
            ["--replica-ports", "--port", "65535", "--set", "cluster={replicas: 3}"],
            "--port: 65535 and 2 more go beyond 65535",
        ),
        (["--tokenizer", "/nowhere"], "--tokenizer: /nowhere"),
        (["--out", __file__], "is not a folder"),
        (
            ["--set", "engine.scheduling_policy={policy: 'mine:Policy'}"],
            "code of the scenario's own",
        ),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_served(arguments: list[str], told: str) -> None:
    found = headway("serve", "demo", *arguments)
    assert found.returncode == 2
    assert told in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.medium
def test_a_tokenizer_is_written(tmp_path: Path) -> None:
    found = headway("tokenizer", str(tmp_path / "tok"), "--vocab-size", "600")
    assert found.returncode == 0
    assert names(tmp_path / "tok") == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert headway("tokenizer", str(tmp_path), "--vocab-size", "3").returncode == 2
