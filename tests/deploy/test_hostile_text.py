"""Text of a scenario goes into scripts, manifests and values as data, whatever is in it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.deployment import deployment
from simulator.models.load import MODELS
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError

HOSTILE = (
    "a\ntouch pwned #",
    "a\r\ntouch pwned #",
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "a\u2028touch pwned",
    "a\x85touch pwned",
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


def stub(folder: Path) -> dict[str, str]:
    """Put a `vllm` and a `vllm-router` on the path that write down their arguments."""
    for name in ("vllm", "vllm-router"):
        command = folder / name
        command.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" >> {folder}/{name}.args\n')
        command.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def strings(value: object) -> list[str]:
    """Return all text in a YAML document."""
    if isinstance(value, dict):
        return [word for pair in value.items() for one in pair for word in strings(one)]
    if isinstance(value, list):
        return [word for one in value for word in strings(one)]
    return [value] if isinstance(value, str) else []


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
    for script in ("vllm_serve.sh", "router.sh"):
        subprocess.run(["bash", out / script], cwd=tmp_path, env=stub(commands), check=True)
    arguments = (commands / "vllm.args").read_bytes().decode().split("\0")
    assert arguments.count(text) == 2  # one of each group
    assert not (tmp_path / "pwned").exists()
    for path in out.glob("*.yaml"):
        found = [word for one in yaml.safe_load_all(path.read_text()) for word in strings(one)]
        if "epp" not in path.name:
            assert text in found, path.name


@pytest.mark.many
@pytest.mark.parametrize("text", HOSTILE)
def test_a_group_s_name_is_made_plain(tmp_path: Path, text: str) -> None:
    """It names Kubernetes' objects; in comments it stands on one line."""
    groups = {text: {"replicas": 2}, "other": {"replicas": 1}}
    scenario = SCENARIO | {"model": "tiny-test", "cluster": {"groups": groups}}
    out = written(tmp_path, scenario)
    commands = tmp_path / "stubs"
    commands.mkdir()
    for script in ("vllm_serve.sh", "router.sh"):
        subprocess.run(["bash", out / script], cwd=tmp_path, env=stub(commands), check=True)
    assert not (tmp_path / "pwned").exists()
    for path in out.glob("*.yaml"):
        for one in yaml.safe_load_all(path.read_text()):
            if name := one.get("metadata", {}).get("name"):
                assert set(name) <= {*"abcdefghijklmnopqrstuvwxyz0123456789-"}


@pytest.mark.medium
@pytest.mark.parametrize("text", HOSTILE)
def test_a_scenario_s_name_is_refused(tmp_path: Path, text: str) -> None:
    """It names a folder, too. The message is one line."""
    with pytest.raises(HeadwayError, match="name: must begin with a letter or digit") as caught:
        written(tmp_path, SCENARIO | {"model": "tiny-test", "name": text})
    assert len(str(caught.value).splitlines()) == 1


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
