"""`headway schema`: what loads is valid, and plain mistakes are not."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from headway.cli.json_schema import json_schema
from headway.cli.main import main
from simulator.scenario.scenario import Scenario

SCENARIOS = sorted((Path(__file__).parents[2] / "scenarios").rglob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_there_are_scenarios_to_check():
    assert SCENARIOS


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.name)
def test_every_shipped_scenario_is_valid(path: Path, validator: jsonschema.Draft202012Validator):
    validator.validate(yaml.safe_load(path.read_text()))


def test_the_defaults_of_every_key_are_valid(validator: jsonschema.Draft202012Validator):
    validator.validate(json.loads(json.dumps(Scenario().resolved())))


@pytest.mark.parametrize(
    "text",
    [
        "engine: vllm",
        "gpu: L4",
        "cluster: {groups: {a: {gpu: L4, engine: sglang}}}",
        "engine:",
        "engine: {dtype: bf16}",
        "workload: {input_len: {kind: uniform, low: 1, high: 9}, sessions: null}",
        "cost: {kind: linear, base: 0.1}",
    ],
)
def test_what_a_scenario_may_say_is_valid(text: str, validator: jsonschema.Draft202012Validator):
    validator.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("engine: {max_num_sqs: 3}", ["engine"]),
        ("engine: {max_num_seqs: 0}", ["engine"]),
        ("workload: {num_promts: 3}", ["workload"]),
        ("sead: 3", []),
        ("seed: -3", ["seed"]),
        ("workload: {trace: {path: a.csv, format: azur}}", ["workload"]),
    ],
)
def test_a_mistake_is_marked_where_it_is(
    text: str, at: list[str], validator: jsonschema.Draft202012Validator
):
    errors = list(validator.iter_errors(yaml.safe_load(text)))
    assert errors
    assert list(errors[0].absolute_path)[: len(at)] == at


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
