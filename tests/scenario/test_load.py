"""From a file and its overrides to a scenario, and all that is wrong at once."""

import copy
import json
from pathlib import Path

import pytest

from simulator.core.request import Step
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import engine_specs
from simulator.util.errors import HeadwayError
from tests.support.scenarios import errors

DEMO = Path(__file__).parents[2] / "scenarios" / "demo.yaml"


@pytest.mark.parametrize(
    ("file", "name"),
    [("a b.yaml", "a b"), ("-x(1).yaml", "x-1-"), (".yaml", "yaml"), ("(((", "scenario")],
)
def test_a_scenario_without_a_name_has_that_of_its_file(write, file, name):
    """Less what the name of a folder should not hold."""
    assert load_scenario(write("seed: 1\n", file)).name == name


def test_overrides_set_any_key(write):
    """Values are YAML; blocks that are not there are made; the last one counts."""
    path = write("engine: {max_num_seqs: 8}\nworkload: {request_rate: 1}\n")
    sets = [
        "engine.max_num_seqs=4",
        "engine.scheduling_policy={policy: static, batch_size: 2}",
        "goodput.ttft=1e3",
        "workload.request_rate=inf",
        "workload.num_prompts=2e1",
        "engine.max_num_seqs=16",
    ]
    scenario = load_scenario(path, sets, 7)
    assert scenario.engine.max_num_seqs == 16
    policy = scenario.engine.scheduling_policy
    assert (policy.name, policy.arguments) == ("static", {"batch_size": 2})
    assert scenario.resolved()["engine"]["scheduling_policy"] == policy.written
    assert (scenario.goodput.ttft, scenario.seed) == (1000, 7)
    assert len(make_workload(scenario)) == 20


def test_an_override_can_mend_a_bad_file(write):
    """What is overridden is not looked at; but the file must be YAML with no key given twice."""
    path = write("engine:\n  max_num_seqs: none\n  foo: 1\n")
    assert load_scenario(path, ["engine={max_num_seqs: 4}"]).engine.max_num_seqs == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "engine.max_num_seqs",
            "--set engine.max_num_seqs: must be dotted.key=value, as engine.max_num_seqs=64",
        ),
        (
            "engine.max_num_seqs=",
            "--set engine.max_num_seqs=: must be dotted.key=value, as engine.max_num_seqs=64",
        ),
        ("=4", "--set =4: must be dotted.key=value, as engine.max_num_seqs=64"),
        ("engine..x=4", "--set engine..x=4: must be dotted.key=value, as engine.max_num_seqs=64"),
        (
            "name.x.y=4",
            "--set name.x.y=4: name is 'n' and has no keys",
        ),
        (
            "seed=[1",
            "--set seed=[1: not YAML: while parsing a flow sequence, expected ',' or ']', but got "
            "'<stream end>'",
        ),
        (
            "seed=x",
            "--set seed=x: seed: must be a whole number such as 64, not 'x' (seed of all random "
            "numbers)",
        ),
        (
            "engine.max_num_seq=4",
            "--set engine.max_num_seq=4: engine.max_num_seq: unknown key; did you mean "
            "max_num_seqs?",
        ),
        (
            "engine={block_size: 0}",
            "--set engine={block_size: 0}: engine.block_size: must be at least 1, not 0 (tokens in "
            "a block of the KV cache; vllm: a multiple of 16)",
        ),
    ],
)
def test_bad_overrides_are_named(write, override, message):
    """An error says which --set it comes from."""
    assert errors(write("name: n\n"), [override]) == [message]


def test_what_an_override_alone_has_made_is_its_own_fault(write):
    """Not the file's, which may not even have the block; a block of the file is the file's."""
    path = write("name: x\nbar: {}\n")
    assert errors(path, ["foo.a=1", "cost.kind=linear", "bar.a=1"]) == [
        "s.yaml:2: bar: unknown key; there is name, description, model, gpu, engine, "
        "host, cost, cluster, predictor, workload, goodput, slo, sweep, plan, rollouts, seed",
        "--set foo.a=1: foo: unknown key; there is name, description, model, gpu, engine, "
        "host, cost, cluster, predictor, workload, goodput, slo, sweep, plan, rollouts, seed",
        "--set cost.kind=linear: cost.base: is missing (s)",
    ]


def test_all_errors_are_told_at_once_by_line(write):
    """Of every kind; what depends on a wrong key is not guessed at."""
    text = """name: x
model: llama-9
gpu: {name: A100-80GB, count: two}
engine:
  max_num_seqs: 4096
  max_num_batched_tokens: lots
  num_lookahead_slots: 4
  scheduling_policy: lifo
workload:
  request_rate: 0
  input_len: {kind: uniform, low: 5, high: 3}
cost: {kind: cubic}
"""
    told = errors(write(text), ["engine.block_size=0"])
    assert [message.split(": ")[:2] for message in told] == [
        ["s.yaml:2", "model"],
        ["s.yaml:3", "gpu.count"],
        ["s.yaml:6", "engine.max_num_batched_tokens"],
        ["s.yaml:7", "engine.num_lookahead_slots"],
        ["s.yaml:8", "engine.scheduling_policy"],
        ["s.yaml:10", "workload.request_rate"],
        ["s.yaml:11", "workload.input_len.low"],
        ["--set engine.block_size=0", "engine.block_size"],
    ]


def test_a_slip_in_a_scenarios_name_is_guessed():
    with pytest.raises(HeadwayError, match=r"; did you mean demo\?$"):
        load_scenario("demmo")


@pytest.mark.parametrize(
    ("settings", "cost", "count"),
    [
        ([], {"profile": "llama-3-8b.a100.bf16"}, 1),
        (["gpu.name=a100 80gb"], {"profile": "llama-3-8b.a100.bf16"}, 1),  # the same
        (["gpu.name=H100-80GB"], None, 1),
        (["engine.tensor_parallel_size=2"], None, 2),
        (["engine=vllm"], {"profile": "llama-3-8b.a100.bf16"}, 1),
        (["gpu.name=H100-80GB", "cost.profile=llama-3-8b.h100.bf16"], "given", 1),
        (["gpu.name=H100-80GB", "cost.profile=llama-3-8b.a100.bf16"], "given", 1),
    ],
)
def test_other_hardware_has_its_own_profile_and_count(tmp_path, settings, cost, count) -> None:
    """What the command line says of the cost itself stands."""
    path = tmp_path / "pinned.yaml"
    path.write_text(f"{DEMO.read_text()}cost: {{profile: llama-3-8b.a100.bf16}}\n")
    found = load_scenario(path, settings)
    if cost == "given":
        cost = {"profile": settings[-1].partition("=")[2]}
    assert (found.cost, found.gpu.count) == (cost, count)


def test_the_demo_finds_its_profile_by_model_gpu_and_precision() -> None:
    spec, narrow = (
        engine_specs(load_scenario("demo", settings))[""]
        for settings in ([], ["engine.quantization=fp8"])
    )
    step = Step([], 64, 64 * 500)
    assert spec.cost.name == "llama-3-8b.a100.bf16"
    assert narrow.cost.execute(step).seconds < 0.9 * spec.cost.execute(step).seconds


def test_groups_count_their_gpus_themselves() -> None:
    """A group shares its work out otherwise; one has a GPU of its own; one is as the scenario."""
    groups = "{a: {engine: {tensor_parallel_size: 2}}, b: {gpu: {name: L4}}, c: {}}"
    settings = ["engine.data_parallel_size=4", f"cluster.groups={groups}"]
    scenario = load_scenario("demo", settings)
    kinds = [scenario.of_group(name) for name in "abc"]
    assert [(kind.gpu.name, kind.gpu.count) for kind in kinds] == [
        ("A100-80GB", 8),
        ("L4", 4),
        ("A100-80GB", 4),
    ]
    assert scenario.cluster is not None
    assert scenario.cluster.groups["c"].gpu is None


def test_a_dict_is_as_good_as_a_file(write):
    """The same scenario, overrides and errors; the dict stays as it is."""
    given = {
        "model": "tiny-test",
        "gpu": {"name": "A100-80GB"},
        "cost": {"kind": "linear", "base": 0.01},
        "workload": {"num_prompts": 5, "request_rate": 2, "output_len": (3, 4)[0]},
    }
    before = copy.deepcopy(given)
    found = load_scenario(given, ["engine.max_num_seqs=8"])
    assert found.engine.max_num_seqs == 8
    text = json.dumps(given)  # JSON is YAML
    same = load_scenario(write(text), ["engine.max_num_seqs=8", "name=scenario"])
    assert found.model_dump() == same.model_dump()
    assert given == before


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({}, "scenario: is empty"),
        ({"modell": "x"}, "scenario: modell: unknown key; did you mean model?"),
        ({"model": "tiny-test", 5: 6}, "scenario: 5: unknown key"),
        ({"model": "tiny-test", "workload": {"num_prompts": "many"}},
         "scenario: workload.num_prompts: must be a whole number such as 64, not 'many'"),
        ({"model": "tiny-test", "workload": {"trace": {"path": "no.csv"}}}, "no.csv: no such file"),
    ],
)  # fmt: skip
def test_a_wrong_dict_is_a_value_error(given, wrong):
    """As every error of the package."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        load_scenario(given)
    assert wrong in str(caught.value)
    assert isinstance(caught.value, HeadwayError)


def test_what_is_wrong_is_there_by_its_keys() -> None:
    """For whoever knows better what to say of a key than its message."""
    wrong = {"model": "llama-3-8b", "engine": {"block_size": 0}, "gpu": {"name": "H1"}}
    with pytest.raises(HeadwayError) as caught:
        load_scenario(wrong)
    faults = caught.value.faults
    assert [fault.key for fault in faults] == [("engine", "block_size"), ("gpu", "name")]
    assert [fault.kind for fault in faults] == ["value", "value"]
    lines = {f"scenario: {'.'.join(fault.key)}: {fault.what}" for fault in faults}
    assert lines == {*caught.value.messages}


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("engine.max_seqs", "1", "key"),
        ("engine.max_num_seqs", "0", "value"),
        ("engine.scheduling_policy", "fcsf", "value"),
        ("gpu.name", "H1", "value"),
        ("model", "lama", "value"),
        ("engine.tensor_parallel_size", "3", "model"),
        ("workload.input_len", "9000", "model"),
        ("model", "llama-3-70b", "memory"),
        ("engine.reserve_output_tokens", "8", "unsupported"),
    ],
)
def test_a_fault_has_a_kind(key: str, value: str, kind: str) -> None:
    """So that a plan can stop at what is misspelt, and pass over what one candidate cannot have."""
    base = {"model": "llama-3-8b", "engine": {"allocation": "contiguous"}}
    with pytest.raises(HeadwayError) as caught:
        load_scenario(base, [f"{key}={value}"])
    assert {fault.kind for fault in caught.value.faults} == {kind}
