"""Ctrl-C, whenever it comes: one line, exit code 130, no half-written file."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.__main__ import main as entry
from headway.cli.main import main
from tests.support.commands import names

STOPPING = """
class Stop:
    def key(self, request):
        if request.id == 20:
            raise KeyboardInterrupt
        return request.arrival
"""


@pytest.mark.parametrize("command", [["run"], ["compare", "--vary", "seed=0,1"]])
def test_an_interrupt_says_how_far_it_came_and_writes_nothing(folder, capsys, command):
    """Exit code 130, as a shell gives it."""
    (folder / "stopping.py").write_text(STOPPING)
    policy = ["--set", "engine.scheduling_policy=stopping:Stop"]
    assert main([command[0], "small.yaml", *command[1:], *policy]) == 130
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(
        r"headway: interrupted at \d\.\d s of simulated time, 1?\d of 40 requests done; "
        r"no file was written\n",
        told.err,
    )
    assert names(folder) == ["small.yaml", "stopping.py"]


def test_an_interrupt_outside_the_loop_is_told_too(folder, capsys, monkeypatch):
    """While files are read or written; what is half-written is taken back."""

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("simulator.simulation.write.encode_rows", stop)
    assert main(["run", "small.yaml"]) == 130
    assert capsys.readouterr().err == "headway: interrupted; no file was written\n"
    assert names(folder) == ["small.yaml"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("command", "stopped", "told"),
    [
        (["run"], "report.text.run_table", "4 files are written"),
        (
            ["run", "--timeline", "t/t.json"],
            "report.timeline.write_timeline",
            "4 files are written",
        ),
        (["compare", "--vary", "seed=0,1"], "figures.style.save", "9 files are written"),
        (
            ["compare", "--vary", "seed=0,1"],
            "report.comparison.compare_table",
            "10 files are written",
        ),
    ],
)
def test_an_interrupt_says_where_the_files_are(folder, capsys, monkeypatch, command, stopped, told):
    """Those written by then, whatever comes after them: further files, a picture, the report."""

    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    assert main(["run", "small.yaml", "--out", "before"]) == 0  # is no business of the next command
    capsys.readouterr()
    monkeypatch.setattr(f"headway.{stopped}", stop)
    assert main([command[0], "small.yaml", *command[1:]]) == 130
    out = Path("out/small" if command[0] == "run" else "out/small-compare")
    assert capsys.readouterr().err == f"headway: interrupted; {told}, in {out}\n"
    assert len([path for path in out.rglob("*") if path.is_file()]) == int(told.split()[0])


@pytest.mark.parametrize("module", ["headway.cli.main", "cyclopts", "headway.cli.console"])
def test_an_interrupt_of_the_imports_is_told_too(monkeypatch, capsys, module):
    """Before the command line is there."""

    class Stop:
        def find_spec(self, name: str, *rest: object) -> None:
            if name == module:
                raise KeyboardInterrupt

    monkeypatch.setattr("headway.cli", sys.modules["headway.cli"])  # as it was, afterwards
    for name in [name for name in sys.modules if name.startswith(("headway.cli", "cyclopts"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.meta_path", [Stop(), *sys.meta_path])
    assert entry() == 130
    assert capsys.readouterr() == ("", "headway: interrupted; no file was written\n")


def test_an_interrupted_sweep_says_where_it_goes_on(capsys, monkeypatch):
    """What is done stays."""

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headway.planning.sweep.run_each", stop)
    assert main(["sweep", "small.yaml", "--vary", "seed=1,2", "--jobs", "1"]) == 130
    assert capsys.readouterr().err == (
        "headway: interrupted; finished runs are in out/small-sweep/results.csv, and the same "
        "command goes on from there\n"
    )


TERMINATED = """
import os, signal
class Terminated:
    def key(self, request):
        if request.id == 20:
            os.close(os.open("sent", os.O_CREAT | os.O_EXCL))  # a second signal ends at once
            os.kill({pid}, signal.SIGTERM)
        return request.arrival
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("verb", "pid", "told"),
    [
        ("run", "os.getpid()", r"interrupted at \d\.\d s of .*; no file was written"),
        ("diagnose", "os.getpid()", "interrupted; no file was written"),
        ("rollouts", "os.getpid()", "interrupted; no file was written"),
        (
            "sweep",
            "os.getppid()",
            r"interrupted; finished runs are in out/small-sweep/results.csv, and the same command "
            r"goes on from there",
        ),
    ],
)
def test_a_sigterm_is_taken_as_an_interrupt(folder, verb, pid, told):
    """Of `run` in its loop; of `sweep` to the parent, whose workers end with it."""
    (folder / "stopping.py").write_text(TERMINATED.format(pid=pid))
    policy = ["--set", "engine.scheduling_policy=stopping:Terminated"]
    more = ["--vary", "seed=1,2,3,4,5,6,7,8", "--jobs", "2"] if verb == "sweep" else []
    command = [sys.executable, "-m", "headway", verb, "small.yaml", *policy, *more]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 130
    assert ended.stdout == ""
    assert re.fullmatch(f"headway: {told}\n", ended.stderr)


def test_a_sweep_of_which_nothing_is_there_says_so(capsys, monkeypatch):
    """As while a cluster starts."""

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headway.planning.sweep.use_backend", stop)
    assert main(["sweep", "small.yaml", "--vary", "seed=1,2"]) == 130
    assert capsys.readouterr().err == "headway: interrupted; no file was written\n"
    assert not Path("out").exists()


TWICE = """
import os, signal
from headway.__main__ import _interrupt
signal.signal(signal.SIGTERM, _interrupt)
try:
    os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    print("first", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("second", flush=True)
"""


def test_a_second_sigterm_ends_the_process_at_once() -> None:
    """The first is taken as Ctrl-C."""
    done = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "first\n", "")
