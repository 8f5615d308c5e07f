"""The campaign on a GPU machine, rehearsed without one."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'headway[gpu]'")

from gpu_backend.campaign.plan import Part, plan
from gpu_backend.campaign.report import write_report
from gpu_backend.campaign.runner import pack_large_files, run_part, run_parts

PYTHON = sys.executable
ROOT = Path(__file__).parents[2]


def say(name: str, code: str, most: float = 20.0, **more: object) -> Part:
    """A part that runs a line of Python."""
    return Part(name, (PYTHON, "-c", code), most, **more)


def test_a_failing_part_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that fail, hang or cannot be started are written down, and the next one begins."""
    monkeypatch.setattr("gpu_backend.campaign.runner.GRACE_SECONDS", 0.5)  # where SIGINT is ignored
    parts = [
        say("bad", "raise ValueError('no luck')"),
        say("slow", "import time; time.sleep(60)", most=1.0),
        Part("absent", ("/no/such/program",), 5.0),
        say("good", "print('fine')"),
    ]
    outcomes = run_parts(parts, tmp_path, 60.0)
    assert [outcome.status for outcome in outcomes] == ["failed", "timeout", "failed", "ok"]
    assert outcomes[0].note == "ValueError: no luck"
    assert outcomes[1].seconds < 60  # it was ended before its sleep was over
    record = json.loads((tmp_path / "campaign.json").read_text())
    assert [part["name"] for part in record["parts"]] == ["bad", "slow", "absent", "good"]
    assert (tmp_path / "good.log").read_text() == "fine\n"


def test_a_part_is_skipped_where_time_or_a_file_is_lacking(tmp_path: Path) -> None:
    """Nothing is begun that could not end, or that has nothing to work on."""
    late = run_part(say("late", "pass", least=30.0), tmp_path, left=10.0)
    assert (late.status, late.note) == ("skipped", "10 s were left")
    part = Part(
        "next", (PYTHON, "-c", "import sys; print(sys.argv[1])", "x={0}"), 9.0, needs=("a/*",)
    )
    assert run_part(part, tmp_path, 20.0).note == "there is no a/*"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "profile.yaml").touch()
    assert run_part(part, tmp_path, 20.0).status == "ok"
    assert (tmp_path / "next.log").read_text() == f"x={tmp_path / 'a' / 'profile.yaml'}\n"


def test_all_of_it_fits_nine_minutes_and_comes_in_order(tmp_path: Path) -> None:
    """Checks come first, the small model last; a part never gets more than is left."""
    parts = plan(tmp_path, "cuda", "llama-3.1-8b", "llama-3.2-1b")
    assert [part.name for part in parts] == [
        "checks", "timings", "calibration", "live-light", "validate-light", "live-heavy",
        "validate-heavy", "calibration-small",
    ]  # fmt: skip
    assert sum(part.most for part in parts[:4]) < 540


def test_large_files_are_packed(tmp_path: Path) -> None:
    """What is too large to send is packed; the rest stays as it is."""
    (tmp_path / "large.csv").write_bytes(b"1,2\n" * 2_000_000)
    (tmp_path / "small.csv").write_bytes(b"1,2\n")
    assert pack_large_files(tmp_path) < 100_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.csv.gz", "small.csv"]


def test_the_report_survives_what_is_missing_or_damaged(tmp_path: Path) -> None:
    """Each section of the table stands by itself."""
    (tmp_path / "campaign.json").write_text(
        '{"parts": [{"name": "checks", "status": "ok", "seconds": 3.2, "note": ""}]}'
    )
    (tmp_path / "checks.log").write_text(
        '{"check": "x", "error": 1.0, "limit": 0.1, "ok": false}\n'
    )
    (tmp_path / "kernels.csv").write_text(
        "kernel,rows,context,tokens,variant,us,gb_s,tflop_s,host_us,wall_us,note\n"
        "copy,,,,,2000,4000,,,,\n"
        "decode,64,2048,131072,splits=4 tile=64,200,3000,,,,\n"
        "decode,64,2048,131072,splits=8 tile=64,150,4000,,,,\n"
        "step,1,1024,1024,graph,5500,,,100,5800,\n"
        "prefill,oops\n"
    )
    lines = write_report(tmp_path).splitlines()
    assert lines[0].split() == ["checks", "ok", "3", "s"]
    assert lines[1].split() == ["checks", "passed", "0", "of", "1"]
    assert any("200.0 us, 75% of copy; splits=8 tile=64: 150.0" in line for line in lines)
    assert any("5.50 ms, host 0.10, wall 5.80" in line and "5.6 ms" in line for line in lines)
    assert (tmp_path / "summary.txt").read_text().splitlines() == lines


def test_rehearsal_of_the_whole(tmp_path: Path) -> None:
    """Every part runs on a CPU with the tiny model; without triton its two parts say so.

    All of them where a change is judged; elsewhere those that no other one stands for.
    """
    out = tmp_path / "out"
    few = (
        () if os.environ.get("CI") else ("--parts", "timings,calibration,live-light,validate-light")
    )
    words = ["--device", "cpu", "--budget-s", "500", "--out", str(out), *few]
    done = subprocess.run(
        [PYTHON, "-m", "gpu_backend.campaign", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    record = json.loads((out / "campaign.json").read_text())
    status = {part["name"]: part["status"] for part in record["parts"]}
    need_triton = {"checks", "timings"} & set(status)
    others = {name: state for name, state in status.items() if name not in need_triton}
    assert set(others.values()) == {"ok"}, done.stdout
    assert "step eager 1 tokens" in done.stdout
    if find_spec("triton"):
        assert all(status[name] == "ok" for name in need_triton)
    else:
        assert "No module named 'triton'" in done.stdout
