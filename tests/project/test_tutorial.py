"""docs/tutorial.md: each command runs, and prints what the page says."""

import re
import shlex
from pathlib import Path

import pytest

from headway.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.M | re.S)


@pytest.mark.medium
def test_each_command_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of a block stand in the outputs of its commands, in this order; others may be left out.

    A command whose first line on the page is an error is refused.
    """
    monkeypatch.chdir(tmp_path)
    commands = 0
    for kind, text in BLOCK.findall(PAGE.read_text("utf-8")):
        if kind == "python":
            exec(compile(text, str(PAGE), "exec"), {})
            continue
        for part in re.split(r"^\$ headway ", text, flags=re.M)[1:]:
            command, *told = part.splitlines()
            refused = bool(told) and told[0].startswith("headway: error:")
            assert main(shlex.split(command)) == (2 if refused else 0), command
            out, err = capsys.readouterr()
            printed = iter((err if refused else out).splitlines())
            for line in told:
                assert any(other.startswith(line) for other in printed), f"{command}\n{line}"
            commands += 1
    assert commands == 8
