"""Standard output that is closed, full or not there."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import FILES, ROOT, TRACE, headway, names


def test_a_closed_pipe_is_no_error():
    """`headway ... | head` ends quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    done = headway("run", "small.yaml", stdout=writer, stderr=subprocess.PIPE, capture_output=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.medium
@pytest.mark.parametrize(
    "arguments", [["run", "small.yaml"], ["--help"], ["--version"], ["trace", "describe", "t.csv"]]
)
def test_a_full_disk_behind_stdout_is_one_line_and_exit_code_2(folder, arguments):
    """Be it the report, a help page or a line."""
    (folder / "t.csv").write_text(TRACE)
    with Path("/dev/full").open("w") as full:
        done = headway(*arguments, stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert (done.returncode, done.stderr) == (
        2,
        "headway: error: standard output: cannot write: No space left on device\n",
    )


def test_without_stdout_nothing_is_printed(folder):
    """`headway ... >&-` runs all the same."""
    done = headway("run", "small.yaml", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")
    assert names(folder / "out" / "small") == FILES


AT_THE_END = {
    "atexit": "import atexit\n\natexit.register(lambda: open('last', 'w').write('done'))",
    "thread": """import threading, time

threading.Thread(target=lambda: (time.sleep(0.3), open('last', 'w').write('done'))).start()""",
    "open file": "file = open('last', 'w')\nfile.write('done')",
}


@pytest.mark.parametrize("kind", AT_THE_END)
def test_what_own_code_leaves_for_the_end_is_done(folder, kind):
    """The process ends at once only where nobody has anything left to do."""
    (folder / "own.py").write_text(AT_THE_END[kind] + "\n\n\nclass Policy:\n    key = id\n")
    policy = ["--set", "engine.scheduling_policy=own:Policy", "--quiet"]
    assert headway("run", "small.yaml", *policy).returncode == 0
    assert (folder / "last").read_text() == "done"


@pytest.mark.medium
def test_without_stderr_a_run_and_a_mistake_end_as_usual(folder):
    """`headway ... 2>&-`; and no file of ours gets the number of a closed stream."""
    for closed in ((2,), (1, 2), (0, 1, 2)):

        def close(numbers=closed):
            for number in numbers:
                os.close(number)

        done = headway("run", "small.yaml", "--out", f"o{len(closed)}", preexec_fn=close)
        assert (done.returncode, done.stderr) == (0, "")
        assert names(folder / f"o{len(closed)}") == FILES
        assert headway("run", "none.yaml", preexec_fn=close).returncode == 2


@pytest.mark.medium
@pytest.mark.parametrize(
    "settings",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_names_that_a_terminal_cannot_show(folder, settings):
    """They are printed as Python writes them, and go into files as they are."""
    (folder / "naïve.yaml").write_text((folder / "small.yaml").read_text())
    for command in (["run", "naïve.yaml", "--out", "ö"], ["report", "ö"], ["explain", "ö", "0"]):
        done = headway(*command, env=os.environ | {"PYTHONPATH": ROOT} | settings)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.isascii()
    assert names(folder / "ö") == FILES
    assert "<title>" in (folder / "report.html").read_text("utf-8")
    done = headway("run", "nö.yaml", env=os.environ | {"PYTHONPATH": ROOT} | settings)
    assert done.returncode == 2
    assert done.stderr.startswith("headway: error: n\\")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["run", "demo", "--set", "engine.scheduling_policy=deadline", "--out", "o"], 0),
        (["run", "nosuch.yaml"], 2),
    ],
)
@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_what_stderr_does_not_take_changes_nothing(tmp_path, arguments, code, stderr) -> None:
    """Neither warnings nor errors: the files are written, and the exit code is the same."""
    words = [sys.executable, "-m", "headway", *arguments]
    if arguments[1] == "demo":
        words += ["--set", "workload.num_prompts=20"]
    command = f"{shlex.join(words)} {stderr} >/dev/null"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, check=False, shell=True, cwd=tmp_path, env=environment)
    assert done.returncode == code
    assert (tmp_path / "o" / "requests.csv").exists() == (code == 0)
