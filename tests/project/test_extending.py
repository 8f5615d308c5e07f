"""The recipes of docs/extending.md, run as they stand there."""

import re
import sys
from pathlib import Path

import pytest

from headway.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(python|yaml)\n(.*?)^```$", PAGE, re.M | re.S)
FILES = {
    match[1]: text for _, text in BLOCKS if (match := re.match(r"# (my_\w+\.(?:py|yaml))\n", text))
}
SCRIPTS = [text for kind, text in BLOCKS if kind == "python" and not text.startswith("# my_")]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with the files of the page, from which modules are imported."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".yaml")])
def test_scenarios_run(folder, capsys, name: str) -> None:
    """With the class from the module beside them."""
    assert main(["run", name, "--out", "out"]) == 0
    assert "Successful requests:" in capsys.readouterr().out


@pytest.mark.medium
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_scripts_run(folder, number: int) -> None:
    """Each by itself."""
    exec(compile(SCRIPTS[number], f"recipe {number}", "exec"), {"__name__": "recipe"})


def test_there_are_four_recipes_and_the_policy_is_short() -> None:
    """Policy, scheduler, cost model, workload; a policy of under 40 lines."""
    assert re.findall(r"^## A (.*)$", PAGE, re.M) == [
        "policy",
        "scheduler",
        "cost model",
        "workload",
    ]
    assert len(SCRIPTS) == 4
    assert len(FILES["my_policies.py"].splitlines()) < 40


def test_the_policy_does_what_it_says(folder) -> None:
    """Those who pay wait less; the others no longer than with patience for them."""
    from simulator.scenario.load import load_scenario
    from simulator.simulation.run import run

    waits = []
    for policy in ("fcfs", "{policy: 'my_policies:PayingFirst', paying: client-0, patience: 1e6}"):
        result = run(load_scenario("my_scenario.yaml", [f"engine.scheduling_policy={policy}"]))
        waits.append(result.requests.groupby("client", observed=True).queue_time.mean())
    assert waits[1]["client-0"] < waits[0]["client-0"] / 2
    assert waits[1]["client-1"] > waits[0]["client-1"]
