"""The recipes of docs/extending.md, run as they stand there."""

import re
import sys
from pathlib import Path

import pytest

from headway.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(python|yaml)\n(.*?)^```$", PAGE, re.M | re.S)
FILES = {
    match[1]: text for _, text in BLOCKS if (match := re.match(r"# (my_\w+\.(?:py|yaml))\n", text))
}
SCRIPTS = [text for kind, text in BLOCKS if kind == "python" and not text.startswith("# my_")]

TABLE = "simulator/build/policy_table.py"
DECLARED = {
    "a policy": [("mlfq", TABLE), ("MLFQ", "simulator/policies/preemptive.py", TABLE)],
    "a scheduler": [("HfStatic", "simulator/schedulers/static.py", TABLE)],
    "a knob of a scheduler": [
        (
            "min_decode_blocks_scope",
            "simulator/core/engine_config.py",
            "simulator/schedulers/limits.py",
        )
    ],
    "a router": [
        ("least_kv", "simulator/cluster/routers.py"),
        ("LeastKv", "simulator/cluster/routers.py"),
    ],
    "a trace format": [("trtllm_bench", "simulator/workload/traces/formats.yaml")],
    "a finding": [
        ("scattered_prefixes", "simulator/diagnosis/fleet_rules.py", "simulator/diagnosis/rules.py")
    ],
    "a metric": [
        ("offloading_bytes", "headway/report/metrics.csv", "simulator/results/engine_metrics.py")
    ],
    "a verb": [("doctor", "headway/cli/doctor.py", "headway/cli/main.py")],
}
"""Names of each kind, and the files that declare them."""
USES = re.compile(
    r"parity\.py$|schedulers/vllm/admission\.py$|diagnosis/(advice|memory_advice|prefixes)\.py$|scenario/checks\.py$"
)
"""Files that do what a name says, or draw cases of it."""


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
    """Those who pay wait less; the others no longer than with a lead over them."""
    from simulator.scenario.load import load_scenario
    from simulator.simulation.run import run

    waits = []
    for policy in ("fcfs", "{policy: 'my_policies:PayingFirst', paying: client-0, lead: 1e6}"):
        result = run(load_scenario("my_scenario.yaml", [f"engine.scheduling_policy={policy}"]))
        waits.append(result.requests.groupby("client", observed=True).queue_time.mean())
    assert waits[1]["client-0"] < waits[0]["client-0"] / 2
    assert waits[1]["client-1"] > waits[0]["client-1"]


@pytest.mark.parametrize("kind", DECLARED)
def test_a_thing_is_declared_in_two_files_at_most(kind: str) -> None:
    """Tables, pages, laws and plug-ins find it there."""
    paths = [
        path
        for package in ("simulator", "headway")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".csv", ".yaml", ".json")
    ]
    for name, *files in DECLARED[kind]:
        found = {
            str(path.relative_to(ROOT))
            for path in paths
            if re.search(rf"\b{name}\b", path.read_text("utf-8"))
        }
        assert {file for file in found if not USES.search(file)} == {*files}
        assert len(files) <= 2
