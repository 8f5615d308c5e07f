"""Standard output that is closed, full or not there."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import FILES, TRACE, headway, names


def test_a_closed_pipe_is_no_error():
    """`headway ... | head` ends quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    done = headway("run", "small.yaml", stdout=writer, stderr=subprocess.PIPE, capture_output=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


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
