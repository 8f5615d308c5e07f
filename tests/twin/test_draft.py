"""A replay writes as it goes: what was answered is there when it is killed."""

import json
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from calibration.measured.requests import read_requests
from headway.twin import measured_run
from headway.twin.measured_run import Draft
from headway.twin.replay import Answered
from simulator.util.errors import HeadwayError
from simulator.workload.workload import Workload
from tests.support.commands import ROOT, headway
from tests.support.twins import twin

LOAD = Workload(np.arange(3.0), np.array([5, 6, 7]), np.array([1, 2, 3]), client=["a", "=b", "c"])
GOOD = Answered(sent=0.5, first=0.75, end=1.0, tokens=2)


@pytest.mark.medium
def test_a_killed_replay_leaves_its_answers_and_the_next_one_names_them(tmp_path: Path) -> None:
    trace, out = tmp_path / "log.csv", tmp_path / "out"
    trace.write_text("arrival,prompt_tokens,output_tokens\n0,30,400\n0.1,20,4\n900,50,6\n")
    draft = out / "requests.draft-1.csv"
    with twin("demo", "--port", "0") as ((url,), _):
        words = ["replay", str(trace), "--url", url, "--out", str(out)]
        program = subprocess.Popen([sys.executable, "-m", "headway", *words], cwd=ROOT)
        until = time.monotonic() + 60
        while not draft.is_file() or draft.read_text().count("\n") < 3:
            assert time.monotonic() < until
            time.sleep(0.05)
        program.kill()
        assert program.wait() == -signal.SIGKILL
        assert [path.name for path in out.iterdir()] == [draft.name]
        requests = read_requests(draft)
        assert requests.output.tolist() == [400, 4]  # by arrival; the second ended first
        assert (requests.ttft > 0).all()
        assert (requests.e2el > requests.ttft).all()
        left = draft.read_bytes()

        trace.write_text("arrival,prompt_tokens,output_tokens\n0,30,4\n")
        again = headway(*words)
    assert again.returncode == 0, again.stderr
    assert f"{draft}: the answers of a replay that did not end" in again.stderr
    assert draft.read_bytes() == left
    names = {"metrics.csv", "requests.csv", "requests.draft-1.csv", "summary.json"}
    assert {path.name for path in out.iterdir()} == names
    assert json.loads((out / "summary.json").read_text())["completed"] == 1


def test_a_draft_has_the_columns_of_the_requests_also_of_those_that_failed(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "new", LOAD)
    draft.add(2, Answered(sent=0.0, end=0.25, error="500: \n no"))
    assert not draft.path.parent.exists()  # nothing is answered yet
    draft.add(0, GOOD)
    draft.add(1, GOOD)
    draft.__exit__(HeadwayError)  # of the final files
    assert draft.path.read_text().splitlines() == [
        "arrival_s,prompt_tokens,output_tokens,ttft_s,e2e_s,client_id,max_tokens,error",
        "0.000000,7,0,,0.250000,c,3,500: no",
        "0.500000,5,2,0.250000,0.500000,a,,",
        "0.500000,6,2,0.250000,0.500000,'=b,,",
    ]
    with Draft(tmp_path / "new", LOAD) as second:
        assert second.earlier == [draft.path]
        second.add(0, GOOD)
        assert second.path.is_file()
    assert not second.path.exists()
    assert draft.path.exists()


def test_a_full_disk_costs_the_draft_and_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: bytes) -> int:
        raise OSError(28, "No space left on device")

    file = SimpleNamespace(write=full)
    monkeypatch.setattr(measured_run, "FileIO", lambda *_: nullcontext(file))
    with Draft(tmp_path, LOAD) as draft:
        draft.add(0, GOOD)
        draft.add(1, GOOD)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"warning: {draft.path}: No space left on device: has no later answers"
