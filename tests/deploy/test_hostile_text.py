"""Text of a scenario goes into scripts, manifests and values as data, whatever is in it."""

import copy
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.cli.json_schema import json_schema
from headway.deploy.deployment import deployment
from simulator.models.load import MODELS
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError
from tests.conftest import FULL

HOSTILE = (
    "a\ntouch pwned #",
    "a\r\ntouch pwned #",
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "a\u2028touch pwned",
    "a\x85touch pwned",
    "a\u202etouch pwned",
    "--trust-remote-code",
    "a: {b: [c, &d *d !!e]}",
    "a # b",
    "{{ .Values.x }} ${HOME} %s \\n",
    "é\t ü",
)
SCENARIO: dict[str, Any] = {
    "name": "plain",
    "gpu": {"name": "H100-80GB"},
    "cluster": {"groups": {"left": {"replicas": 2}, "right": {"replicas": 1}}},
    "workload": {"num_prompts": 1, "request_rate": 1, "input_len": 10, "output_len": 10},
}


ANY_KEY = "<key>"
SCHEMA = json_schema()


def text_keys(node: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key of a scenario that takes any text; names of one's own, too."""
    while "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    for one in node.get("anyOf", []):
        yield from text_keys(one, at)
    if node.get("type") == "string" and "enum" not in node:
        yield at
    if isinstance(node.get("items"), dict):
        yield from text_keys(node["items"], (*at, "0"))
    for key, inner in node.get("properties", {}).items():
        yield from text_keys(inner, (*at, key))
    others = node.get("additionalProperties", False)
    if others is not False:
        yield (*at, ANY_KEY)
    if isinstance(others, dict):
        yield from text_keys(others, (*at, "left"))


KEYS = list(dict.fromkeys(text_keys(SCHEMA)))


def with_text(scenario: dict[str, Any], path: tuple[str, ...], text: str) -> dict[str, Any]:
    """Return a copy of a scenario with a text at a path, or with a key of that name."""
    changed = copy.deepcopy(scenario)
    block: Any = changed
    for key, following in zip(path, (*path[1:], None), strict=True):
        if key == ANY_KEY:
            block[text] = {"replicas": 1} if path[-2] == "groups" else text
        elif following is None:
            block[0 if key == "0" else key] = text
        elif following == "0":
            block[key] = [""]
            block = block[key]
        else:
            inner = block.get(key) if isinstance(block, dict) else {}
            given = {"like": "tiny-test", "name": "mine"} if key == "model" else {}
            block[0 if key == "0" else key] = inner if isinstance(inner, dict) else given
            block = block[0 if key == "0" else key]
    return changed


def stub(folder: Path) -> dict[str, str]:
    """Put a `vllm` on the path that writes down its arguments."""
    command = folder / "vllm"
    command.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" >> {folder}/vllm.args\n')
    command.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def argument(model: str) -> str:
    """Return what `vllm serve` is given: a folder where a name would be an option."""
    return f"./{model}" if model.startswith("-") else model


def strings(value: object) -> list[str]:
    """Return all text in a YAML document, as Kubernetes reads `$$` in arguments."""
    return [text.replace("$$", "$") for text in texts(value)]


def texts(value: object) -> list[str]:
    """Return all text in a YAML document, as it stands there."""
    if isinstance(value, dict):
        return [word for pair in value.items() for one in pair for word in texts(one)]
    if isinstance(value, list):
        return [word for one in value for word in texts(one)]
    return [value] if isinstance(value, str) else []


def expanded(value: object) -> object:
    """Expand a manifest's words as Kubernetes does, of whose variables each is `pwned`."""
    if isinstance(value, dict):
        return {key: expanded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [expanded(one) for one in value]
    if isinstance(value, str):
        return re.sub(r"\$\$|\$\(.*?\)", lambda hit: "$" if hit[0] == "$$" else "pwned", value)
    return value


@pytest.mark.many
@pytest.mark.parametrize("text", ["$(HF_TOKEN)", "$$(HF_TOKEN)", "a$", "$$$(X)", "$x ${y}"])
def test_kubernetes_expands_nothing(tmp_path: Path, text: str) -> None:
    """In no argument and no variable of a container."""
    mine = {"model": {"like": "tiny-test", "name": text}}
    policy = {"engine": {"scheduling_policy": {"policy": "fair", "weights": {text: 2.0}}}}
    out = written(tmp_path, SCENARIO | mine | policy)
    parts = [*yaml.safe_load_all((out / "kubernetes.yaml").read_text())]
    pods = [one["spec"]["template"]["spec"] for one in parts if one["kind"] == "Deployment"]
    assert len(pods) == 2
    for pod in map(expanded, pods):
        container = pod["containers"][0]
        values = {one["name"]: one.get("value") for one in container["env"]}
        assert container["args"][0] == text
        assert json.loads(values["HEADWAY_POLICY"])["weights"] == {text: 2.0}
    charts = [yaml.safe_load(path.read_text()) for path in out.glob("*values*.yaml")]
    assert len(charts) > 1
    for chart in charts:  # whose names are no arguments
        assert [*chart.pop("modelArtifacts").values()][:2] == [text, f"hf://{text}"]
        told = [one for one in texts(expanded(chart)) if "weights" in one and "fair" in one]
        assert told
        assert not [one for one in texts(expanded(chart)) if "pwned" in one]
        assert all(json.loads(one)["weights"] == {text: 2.0} for one in told)


def written(folder: Path, scenario: dict[str, Any]) -> Path:
    """Write all files of `--deploy` for a scenario; give their folder."""
    path, out = folder / "s.yaml", folder / "deploy"
    path.write_text(json.dumps(scenario))
    out.mkdir()
    for name, text in deployment(load_scenario(path)).items():
        (out / name).write_bytes(text)
    return out


@pytest.mark.many
@pytest.mark.parametrize("text", HOSTILE)
def test_a_model_is_one_argument_whatever_its_name(tmp_path: Path, text: str) -> None:
    """In bash that is run with a stub for vLLM, and in every YAML file."""
    model = tmp_path / text
    model.mkdir()
    (model / "config.json").write_bytes((MODELS / "tiny-test/config.json").read_bytes())
    out = written(tmp_path, SCENARIO | {"model": text})
    commands = tmp_path / "stubs"
    commands.mkdir()
    subprocess.run(["bash", out / "vllm_serve.sh"], cwd=tmp_path, env=stub(commands), check=True)
    assert all(one.isprintable() for one in (out / "vllm_serve.sh").read_text().splitlines())
    arguments = (commands / "vllm.args").read_bytes().decode().split("\0")
    assert arguments.count(argument(text)) == 2  # one of each group
    assert not (tmp_path / "pwned").exists()
    for path in out.glob("*.yaml"):
        found = [word for one in yaml.safe_load_all(path.read_text()) for word in strings(one)]
        assert argument(text) in found, path.name


def test_the_keys_that_take_text_are_known() -> None:
    """What the next test draws into: a new key of text is drawn into by itself."""
    found = {".".join(path) for path in KEYS}
    assert {"model.name", "engine.scheduling_policy.<key>", "cluster.groups.<key>"} <= found
    assert {"name", "description", "workload.trace.path", "slo.0", "cost.<key>"} <= found
    assert len(found) > 30


@pytest.mark.many
@pytest.mark.parametrize("path", KEYS, ids=".".join)
def test_text_of_any_key_is_data_or_refused_in_one_line(
    tmp_path: Path, path: tuple[str, ...]
) -> None:
    """In scripts that bash runs with stubs, and in every YAML file: that very text or none.

    Every week all texts; else a third with each key, another one with the next.
    """
    refusals: list[list[str]] = []
    texts = HOSTILE if FULL else HOSTILE[KEYS.index(path) // 2 % 3 :: 3]
    for number, text in enumerate(texts):
        folder = tmp_path / str(number)
        commands = folder / "stubs"
        commands.mkdir(parents=True)
        scenario = with_text(SCENARIO | {"model": "tiny-test"}, path, text)
        try:
            out = written(folder, scenario)
        except HeadwayError as error:
            refusals.append(error.messages)
            continue
        subprocess.run(["bash", out / "vllm_serve.sh"], cwd=folder, env=stub(commands), check=True)
        assert not (folder / "pwned").exists()
        arguments = (commands / "vllm.args").read_bytes().decode().split("\0")
        assert arguments.count("serve") == (3 if path[-2:] == ("groups", ANY_KEY) else 2)
        assert arguments.count(argument(text)) == (2 if path == ("model", "name") else 0)
        for file in out.glob("*.yaml"):
            found = [one for part in yaml.safe_load_all(file.read_text()) for one in strings(part)]
            if path == ("model", "name"):
                assert argument(text) in found
            hostile = {one for one in found if "pwned" in one and re.search(r"[^a-z-]", one)}
            whole = json.dumps({text: text})  # of hf_overrides; Kubernetes reads $$ as $
            assert hostile <= {text, f"hf://{text}", whole, whole.replace("$", "$$")}
    assert all(refusals)
    assert all(len(line.splitlines()) == 1 for lines in refusals for line in lines)
    assert not refusals or path not in {("description",), ("model", "name")}


@pytest.mark.many
@pytest.mark.parametrize("text", HOSTILE)
def test_a_group_s_name_is_made_plain(tmp_path: Path, text: str) -> None:
    """It names Kubernetes' objects; in comments it stands on one line."""
    groups = {text: {"replicas": 2}, "other": {"replicas": 1}}
    scenario = SCENARIO | {"model": "tiny-test", "cluster": {"groups": groups}}
    out = written(tmp_path, scenario)
    commands = tmp_path / "stubs"
    commands.mkdir()
    subprocess.run(["bash", out / "vllm_serve.sh"], cwd=tmp_path, env=stub(commands), check=True)
    assert not (tmp_path / "pwned").exists()
    for path in out.glob("*.yaml"):
        for one in yaml.safe_load_all(path.read_text()):
            if name := one.get("metadata", {}).get("name"):
                assert set(name) <= {*"abcdefghijklmnopqrstuvwxyz0123456789-"}


@pytest.mark.many
@pytest.mark.parametrize("text", HOSTILE)
def test_a_policy_s_words_are_one_value(tmp_path: Path, text: str) -> None:
    """Its arguments come to the server as JSON in an environment variable."""
    policy = {"policy": "fair", "weights": {text: 2.0}}
    scenario = SCENARIO | {"model": "tiny-test", "engine": {"scheduling_policy": policy}}
    out = written(tmp_path, scenario)
    commands = tmp_path / "stubs"
    commands.mkdir()
    (commands / "vllm").write_text(f'#!/bin/sh\nprintf %s "$HEADWAY_POLICY" > {commands}/told\n')
    (commands / "vllm").chmod(0o755)
    env = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}"}
    subprocess.run(["bash", out / "vllm_serve.sh"], cwd=tmp_path, env=env, check=True)
    assert json.loads((commands / "told").read_text())["weights"] == {text: 2.0}
    assert not (tmp_path / "pwned").exists()
