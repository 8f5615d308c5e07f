"""A scenario names code: it is looked at before it is called, and may be refused altogether."""

import pytest

from headway.cli.main import main
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError
from tests.support.scenarios import SMALL, errors

TOUCH = "args: [touch, touched]"
OWN = """
made = []
class Policy:
    def __init__(self):
        made.append("policy")
    def key(self, request):
        return request.arrival
class Router:
    def __init__(self):
        made.append("router")
    def choose(self, request, targets):
        return 0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWAY_NO_OWN_CODE", raising=False)
    (tmp_path / "s.yaml").write_text(SMALL)
    return tmp_path


@pytest.mark.parametrize("name", ["subprocess:Popen", "os:system", "builtins:dict", "math:pi"])
@pytest.mark.parametrize(
    "override",
    [
        "cluster={replicas: 2, router: {router: '%s', args: [touch, touched]}}",
        "cluster={replicas: 2, router: '%s'}",
        "engine.scheduling_policy={policy: '%s', args: [touch, touched]}",
        "cluster={kv_transfer: {router: {router: '%s', args: [touch, touched]}}}",
    ],
)
def test_what_is_no_policy_and_no_router_is_not_called(folder, name, override):
    """A function may be a router, and is told that it takes no arguments, or first run by a run."""
    if name == "os:system" and override.endswith("'%s'}"):
        load_scenario("s.yaml", [override % name])
    else:
        with pytest.raises(HeadwayError, match=name):
            load_scenario("s.yaml", [override % name])
    assert not (folder / "touched").exists()


def test_loading_imports_and_makes_nothing(folder):
    (folder / "own_code_of_a_scenario.py").write_text(OWN)
    named = (
        "engine.scheduling_policy=own_code_of_a_scenario:Policy",
        "cluster={replicas: 2, router: 'own_code_of_a_scenario:Router'}",
    )
    load_scenario("s.yaml", named)
    import own_code_of_a_scenario  # it lies beside the scenario

    assert own_code_of_a_scenario.made == []
    assert main(["run", "s.yaml", "--quiet", "--set", named[0], "--set", named[1]]) == 0
    assert own_code_of_a_scenario.made == ["router", "policy", "policy"]


def test_code_lies_in_the_current_folder_too(folder):
    """A scenario that a run wrote lies elsewhere than the code it names."""
    (folder / "code_in_this_folder.py").write_text(OWN)
    (folder / "out").mkdir()
    (folder / "out" / "scenario.yaml").write_text(SMALL)
    load_scenario("out/scenario.yaml", ["engine.scheduling_policy=code_in_this_folder:Policy"])


def test_arguments_are_held_against_the_constructor_without_calling_it(folder):
    (folder / "own_router.py").write_text(OWN)
    wrong = "cluster={replicas: 2, router: {router: 'own_router:Router', weight: 3}}"
    with pytest.raises(HeadwayError, match="cannot make own_router:Router: got an unexpected"):
        load_scenario("s.yaml", [wrong])


NAMED = {
    "engine.scheduling_policy": "engine.scheduling_policy={policy: 'unimported:P', a: 1}",
    "engine.scheduler_cls": "engine={scheduler: vllm, scheduler_cls: unimported.S}",
    "cluster.router": "cluster={replicas: 2, router: 'unimported:R'}",
    "cluster.pod_router": "cluster={replicas: 2, pods: 2, pod_router: 'unimported:R'}",
    "cluster.kv_transfer.router": "cluster={kv_transfer: {router: 'unimported:R'}}",
    "cluster.groups.a.engine.scheduling_policy": (
        "cluster={groups: {a: {engine: {scheduling_policy: 'unimported:P'}}}}"
    ),
}
TOLD = "is code of the scenario's own, which --no-own-code refuses"


@pytest.mark.parametrize("key", NAMED)
def test_own_code_is_refused_before_it_is_imported(folder, capsys, key):
    """By the API, by the command and by the environment, with the key that names it."""
    (folder / "unimported.py").write_text("open('touched', 'w')\n")
    for options in ([], ["--no-own-code"]):
        assert main(["run", "s.yaml", "--set", NAMED[key], *options]) == 2 or not options
    said = capsys.readouterr().err.splitlines()[-1]
    assert f": {key}: unimported" in said
    assert said.endswith(TOLD)
    (folder / "touched").unlink(missing_ok=True)
    with pytest.raises(HeadwayError, match=rf"{key}: unimported.*: serve runs it with --own-code"):
        load_scenario("s.yaml", [NAMED[key]], own_code=False)
    assert not (folder / "touched").exists()


def test_the_environment_refuses_for_every_command(folder, monkeypatch, capsys):
    monkeypatch.setenv("HEADWAY_NO_OWN_CODE", "1")
    assert errors(folder / "s.yaml", [NAMED["cluster.router"]])[0].endswith(TOLD)
    (folder / "own.yaml").write_text(SMALL.replace("max_num_seqs: 8", "scheduling_policy: 'a:B'"))
    assert main(["trace", "describe", "own.yaml"]) == 2
    assert TOLD in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [["live"], ["calibrate", "--from-requests", "log.csv", "--scenario"], ["trace", "describe"]],
    ids=["live", "calibrate", "trace"],
)
def test_every_command_with_a_scenario_has_the_flag(folder, capsys, command):
    pytest.importorskip("torch")
    (folder / "own.yaml").write_text(SMALL.replace("max_num_seqs: 8", "scheduling_policy: 'a:B'"))
    assert main([*command, "own.yaml", "--no-own-code"]) == 2
    assert capsys.readouterr().err.endswith(f"{TOLD}\n")


def test_the_flag_holds_for_one_command(folder, capsys):
    assert main(["run", "s.yaml", "--quiet", "--no-own-code"]) == 0
    assert main(["run", "s.yaml", "--quiet", "--set", NAMED["cluster.router"]]) == 2
    assert "cannot load unimported:R" in capsys.readouterr().err


def test_workers_of_a_sweep_refuse_it_too(folder, capsys):
    (folder / "unimported.py").write_text("open('touched', 'w')\n")
    policies = "engine.scheduling_policy=fcfs,unimported:P"
    main(["sweep", "s.yaml", "--vary", policies, "--no-own-code", "--out", "o"])
    assert TOLD in capsys.readouterr().err
    assert not (folder / "touched").exists()
