"""A plan writes over no answer to another question."""

import json
from pathlib import Path

import pytest

from headway.cli.main import main
from simulator import plan

BOUND = ["--slo", "p99_ttft_ms<=60000", "--cheapest", "--jobs", "1"]


@pytest.fixture
def ask(scenario, monkeypatch):
    """Return a function that asks by the command line, in a folder of its own."""
    monkeypatch.chdir(scenario.parent)
    return lambda *more: main(["plan", str(scenario), *BOUND, "--quiet", *more])


def test_another_question_takes_another_folder(ask, scenario: Path):
    assert ask() == 0
    (first,) = Path("out").iterdir()
    answer = (first / "plan.json").read_bytes()
    assert ask() == 0  # the same once more
    assert [*Path("out").iterdir()] == [first]
    for number, more in enumerate((["--seed", "5"], ["--set", "engine.max_num_seqs=3"]), 2):
        assert ask(*more) == 0
        assert {one.name for one in Path("out").iterdir()} >= {f"{first.name}-{number}"}
    scenario.write_text(scenario.read_text() + "\ngoodput: {ttft: 1234}\n")
    assert ask() == 0
    assert len([*Path("out").iterdir()]) == 4
    assert (first / "plan.json").read_bytes() == answer


def test_a_folder_that_is_named_is_not_written_over(ask, scenario: Path, capsys):
    assert ask("--out", "here") == 0
    answer = (Path("here") / "plan.json").read_bytes()
    assert ask("--out", "here") == 0
    assert ask("--out", "here", "--seed", "5") == 2
    assert "--out here: plan.json there answers another question" in capsys.readouterr().err
    assert (Path("here") / "plan.json").read_bytes() == answer


def test_the_command_and_the_function_ask_the_same(ask, scenario: Path):
    assert ask("--out", "here") == 0
    told = json.loads((Path("here") / "plan.json").read_text())
    plan(scenario, ["p99_ttft_ms<=60000"], cheapest=True, jobs=1, out="here")
    assert json.loads((Path("here") / "plan.json").read_text()) == told
