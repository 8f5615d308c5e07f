"""The campaign on a GPU machine, rehearsed without one."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'headway[gpu]'")

import torch

from calibration.engine_steps.steps_file import read_rows
from tests.gpu_backend.preflight.faults import child_processes
from tools.campaign.__main__ import main as campaign_main
from tools.campaign.plan import SETUPS, Part, plan, scaled
from tools.campaign.report import write_report
from tools.campaign.runner import Campaign, run_part

PYTHON = sys.executable
ROOT = Path(__file__).parents[2]


def say(name: str, code: str, most: float = 20.0, **more: object) -> Part:
    """A part that runs a line of Python."""
    return Part(name, (PYTHON, "-c", code), most, **more)


def test_a_failing_part_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that fail, hang or cannot be started are written down, and the next one begins."""
    monkeypatch.setattr("tools.campaign.runner.GRACE_SECONDS", 0.5)  # where SIGINT is ignored
    parts = [
        say("bad", "raise ValueError('no luck')"),
        say("slow", "import time; time.sleep(60)", most=1.0),
        Part("absent", ("/no/such/program",), 5.0),
        say("good", "print('fine')"),
    ]
    outcomes = Campaign(tmp_path).run(parts, 60.0)
    assert [outcome.status for outcome in outcomes] == ["failed", "timeout", "failed", "ok"]
    assert outcomes[0].note == "ValueError: no luck"
    assert outcomes[1].seconds < 60  # it was ended before its sleep was over
    record = json.loads((tmp_path / "campaign.json").read_text())
    assert [part["name"] for part in record["parts"]] == ["bad", "slow", "absent", "good"]
    assert (tmp_path / "good.log").read_text() == "fine\n"


def test_a_calibration_gets_the_graphs_that_the_timings_found_to_win(tmp_path: Path) -> None:
    """The file's number, 0 where it is not there or damaged."""
    code = "import sys; print(sys.argv[1:])"
    part = Part("calibrate", (PYTHON, "-c", code, "--graph-tokens", "{graph_tokens}"), 20.0)
    for text, wanted in ((None, "0"), ("256\n", "256"), ("", "0"), ("many", "0")):
        if text is not None:
            (tmp_path / "graph-tokens.txt").write_text(text)
        assert run_part(part, Campaign(tmp_path), 20.0).command[-1] == wanted
    parts = {part.name: part for part in plan(tmp_path, "cuda", "llama-3.1-8b")}
    assert parts["calibration"].command[-2:] == ("--graph-tokens", "{graph_tokens}")


def test_a_part_is_skipped_where_time_or_a_file_is_lacking(tmp_path: Path) -> None:
    """Nothing is begun that could not end, or that has nothing to work on."""
    here = Campaign(tmp_path)
    late = run_part(say("late", "pass", least=30.0), here, left=10.0)
    assert (late.status, late.note) == ("skipped", "10 s were left")
    part = Part(
        "next", (PYTHON, "-c", "import sys; print(sys.argv[1])", "x={0}"), 9.0, needs=("a/*",)
    )
    assert run_part(part, here, 20.0).note == "there is no a/*"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "profile.yaml").touch()
    assert run_part(part, here, 20.0).status == "ok"
    assert (tmp_path / "next.log").read_text() == f"x={tmp_path / 'a' / 'profile.yaml'}\n"
    again = Part("more", ("/no/such/program",), 9.0, unless="a/*.yaml")
    assert run_part(again, here, 20.0).note == "not needed: there is a a/*.yaml"


def test_a_part_whose_module_is_not_installed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told apart from those that failed; a campaign of nothing else has failed."""
    part = say("kernels", "raise SystemExit(1)", module="no_such_module")
    (outcome,) = Campaign(tmp_path).run([part], 20.0)
    assert (outcome.status, outcome.note) == ("not installed", "no_such_module is what it needs")
    for name in ("HEADWAY_COMMIT", "TRITON_INTERPRET"):  # a campaign sets them, for its parts
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for parts, code in (([part], 1), ([part, say("good", "pass")], 0)):
        monkeypatch.setattr(
            "tools.campaign.__main__.plan",
            lambda *_, parts=parts: [
                replace(one, name=name)
                for one, name in zip(parts, ("checks", "timings"), strict=False)
            ],
        )
        out = tmp_path / f"out-{code}"
        assert campaign_main(["--device", "cpu", "--out", str(out)]) == code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parts", "checks,nope"], "--parts: no nope; there are checks, timings,"),
        (["--budget-s", "0"], "--budget-s 0: must be more than 10 seconds"),
        (["--budget-s", "nan"], "--budget-s nan: must be more than 10 seconds"),
        (["--model", "nope"], "no shipped model 'nope'"),
        *(
            []
            if torch.cuda.is_available()
            else [(["--device", "cuda"], "--device cuda: there is no CUDA GPU here")]
        ),
    ],
)
def test_what_cannot_be_begun_leaves_no_file(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        campaign_main(["--device", "cpu", "--out", str(tmp_path / "out"), *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.medium
def test_a_part_that_had_done_its_work_when_its_time_was_over_is_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends well once it is told to, or had left its result; else it is a timeout."""
    monkeypatch.setattr("tools.campaign.runner.GRACE_SECONDS", 10.0)
    sleep = "import time, sys, pathlib\ntry: {}time.sleep(90)\nexcept KeyboardInterrupt: {}"
    written = f"pathlib.Path({str(tmp_path / 'live.json')!r}).touch(); "
    parts = [
        say("fits", sleep.format("", "pass"), most=2.0),
        say("none", sleep.format("", "sys.exit(130)"), most=2.0, result="live.json"),
        say("whole", sleep.format(written, "sys.exit(130)"), most=2.0, result="live.json"),
    ]
    outcomes = Campaign(tmp_path).run(parts, 90.0)
    assert [outcome.status for outcome in outcomes] == ["ok", "timeout", "ok"]
    assert outcomes[2].note == "ended at its limit of 2 s, with what it had"


@pytest.mark.medium
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel does it")
def test_a_part_dies_with_its_campaign(tmp_path: Path) -> None:
    """Also where nobody lives to tell it: it would hold the GPU's memory."""
    code = "import time; time.sleep(60)"
    words = [PYTHON, "-c", CAMPAIGN, str(tmp_path), code]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while time.monotonic() < until and not (begun := child_processes(process.pid)):
        time.sleep(0.05)
    time.sleep(0.5)  # it has said so by now
    process.kill()
    process.wait()
    until = time.monotonic() + 10
    while time.monotonic() < until and any(Path(f"/proc/{name}").exists() for name in begun):
        time.sleep(0.05)
    assert not any(Path(f"/proc/{name}").exists() for name in begun)


def test_a_part_that_fails_is_begun_again_in_its_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left is set aside; parts after it take the other way at once."""
    code = "import sys, os; os.mkdir('left'); sys.exit('--no-graphs' not in sys.argv)"
    other = {"retry": ("--no-graphs",), "leaves": "left"}
    monkeypatch.chdir(tmp_path)
    campaign = Campaign(tmp_path)
    first, second = campaign.run(
        [say("capture", code, **other), say("next", code.replace("left", "new"), **other)], 60.0
    )
    assert (first.status, second.status) == ("ok", "ok")
    assert first.note.startswith("--no-graphs, since: ")
    assert second.command[-1] == "--no-graphs"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "left", "left-before-1", "new",
    ]  # fmt: skip


def test_a_file_that_is_there_adds_its_words(tmp_path: Path) -> None:
    """A live run takes the profile of its own, or else what the scenario would."""
    part = say("live", "import sys; print(sys.argv[1:])", extra=("c*/*.yaml", ("--set", "p={0}")))
    for there, said in ((False, "[]"), (True, f"['--set', 'p={tmp_path}/c/x.yaml']")):
        if there:
            (tmp_path / "c").mkdir()
            (tmp_path / "c" / "x.yaml").touch()
        assert run_part(part, Campaign(tmp_path), 20.0).status == "ok"
        assert (tmp_path / "live.log").read_text().splitlines()[-1] == said


MEASURING = """\
import dataclasses, sys, time
from pathlib import Path
from calibration.engine_steps.steps_file import ROWS_PER_MEMBER, Row, RowFile

file = RowFile(Path(sys.argv[1]) / "calibration" / "steps.csv.gz")
row = Row(run="r", kind="decode", turn=0, decodes=2, context=30, device_s=1e-3, wall_s=1e-3)
while True:
    for _ in range(ROWS_PER_MEMBER):
        file.add(row)
    time.sleep(0.01)
"""
CAMPAIGN = """\
import sys
from pathlib import Path
from tools.campaign.plan import Part
from tools.campaign.runner import Campaign

folder = Path(sys.argv[1])
part = Part("calibration", (sys.executable, "-c", sys.argv[2], str(folder)), 60.0)
Campaign(folder).run([part], 60.0)
"""


@pytest.mark.parametrize("moment", [0.05, 0.13, 0.31])
def test_a_campaign_killed_while_it_measures_leaves_its_rows(tmp_path: Path, moment: float) -> None:
    """kill -9 of both processes: the record says what ran, and the rows are whole."""
    (tmp_path / "calibration").mkdir()
    steps = tmp_path / "calibration" / "steps.csv.gz"
    words = [PYTHON, "-c", CAMPAIGN, str(tmp_path), MEASURING]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while time.monotonic() < until and not (steps.exists() and steps.stat().st_size > 200):
        time.sleep(0.05)
    time.sleep(moment)
    begun = child_processes(process.pid)
    for name in (process.pid, *begun):
        os.kill(name, signal.SIGKILL)
    process.wait()
    assert len(read_rows(steps)) > 0
    record = json.loads((tmp_path / "campaign.json").read_text())
    assert [part["status"] for part in record["parts"]] == ["running"]


def test_all_of_it_fits_nine_minutes_and_comes_in_order(tmp_path: Path) -> None:
    """Kernels come first, replays last; fewer parts share the time among them."""
    parts = plan(tmp_path, "cuda", "llama-3.1-8b")
    assert [part.name for part in parts] == [
        "precompile", "checks", "timings", "calibration", "refit", "live-light", "validate-light",
        "live-heavy", "validate-heavy",
    ]  # fmt: skip
    assert [part.name for part in parts] == [*SETUPS["cuda"].seconds]
    assert sum(part.most for part in parts) <= 535
    assert sum(part.most for part in scaled(parts[:3], 535.0)) == pytest.approx(535.0)


def test_the_report_survives_what_is_missing_or_damaged(tmp_path: Path) -> None:
    """Each section of the table stands by itself."""
    (tmp_path / "campaign.json").write_text(
        '{"parts": [{"name": "checks", "status": "ok", "seconds": 3.2, "note": ""}], '
        '"planned": ["checks", "calibration"]}'
    )
    (tmp_path / "checks.log").write_text(
        '{"planned": 4}\n{"check": "x", "error": 1.0, "limit": 0.1, "ok": false}\n'
    )
    (tmp_path / "kernels.csv").write_text(
        "kernel,rows,context,tokens,variant,us,gb_s,tflop_s,host_us,wall_us,note\n"
        "copy,,,,,2000,4000,,,,\n"
        "decode,64,2048,131072,splits=4,200,3000,,,,\n"
        "step,1,1024,1024,graph,5500,,,100,5800,\n"
        "prefill,oops\n"
    )
    (tmp_path / "calibration.log").write_text("held out, all: 9 steps, median 1.0%\n")
    (tmp_path / "validate-light.log").write_text(
        "a warning\nLive on cpu, clock exec\n" + "row\n" * 20
    )
    lines = write_report(tmp_path).splitlines()
    block = lines.index("validate-light")
    assert lines[block + 1 :] == ["Live on cpu, clock exec", *20 * ["row"]]
    lines = lines[: block - 1]
    assert lines[-1].split() == ["held", "out,", "all", "9", "steps,", "median", "1.0%"]
    assert lines[0].split() == ["checks", "ok", "3", "s"]
    assert [line.split()[1:3] for line in lines if line.startswith("MISSING")] == [
        ["calibration", "all"], ["no", "profile"], ["3", "checks"],
    ]  # fmt: skip
    assert any(line.split()[:5] == ["checks", "passed", "0", "of", "4"] for line in lines)
    assert any("200.0 us, 75% of copy" in line for line in lines)
    assert any("5.50 ms, host 0.10, wall 5.80" in line and "5.6 ms" in line for line in lines)
    assert (tmp_path / "summary.txt").read_text().splitlines()[: len(lines)] == lines
    (tmp_path / "kernels.csv").unlink()
    assert "FileNotFoundError" not in write_report(tmp_path)


@pytest.mark.slow
def test_rehearsal_of_the_whole(tmp_path: Path) -> None:
    """Every part runs on a CPU with the tiny model; without triton its two parts say so."""
    out = tmp_path / "out"
    words = ["--device", "cpu", "--budget-s", "500", "--out", str(out)]
    done = subprocess.run(
        [PYTHON, "-m", "tools.campaign", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    record = json.loads((out / "campaign.json").read_text())
    status = {part["name"]: part["status"] for part in record["parts"]}
    others = {name: state for name, state in status.items() if name != "checks"}
    assert set(others.values()) == {"ok"}, done.stdout
    assert "step eager 1 tokens" in done.stdout
    assert done.returncode == 0
    if find_spec("triton"):
        assert status.get("checks", "ok") == "ok"
    else:
        assert status.get("checks", "not installed") == "not installed"
        assert "skipped: triton is not installed" in done.stdout
