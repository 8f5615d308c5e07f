"""The points of a comparison."""

import re
from pathlib import Path

import numpy as np
import pytest

from headway.planning.design import axes_of, expand, split_values
from simulator.util.errors import HeadwayError
from tests.support.scenarios import SMALL


@pytest.fixture
def path(tmp_path) -> Path:
    """A scenario file."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def test_points_are_all_combinations(path):
    """The last key varies fastest; labels and folders tell the points apart."""
    vary = ["engine.max_num_seqs=1,2", "engine.scheduling_policy={policy: static, timeout: 0},sjf"]
    points = expand(path, vary, ["workload.num_prompts=3"], 5)
    assert [point.label for point in points] == [
        "max_num_seqs=1, scheduling_policy={policy: static, timeout: 0}",
        "max_num_seqs=1, scheduling_policy=sjf",
        "max_num_seqs=2, scheduling_policy={policy: static, timeout: 0}",
        "max_num_seqs=2, scheduling_policy=sjf",
    ]
    assert len({point.folder for point in points}) == 4
    assert all(re.fullmatch(r"[\w.=+-]+", point.folder) for point in points)
    assert {point.scenario.seed for point in points} == {5}
    assert points[0].scenario.engine.scheduling_policy.arguments == {"timeout": 0}


def test_folders_of_points_never_coincide(path):
    """Values that differ only in what a folder's name cannot hold get a number."""
    points = expand(path, ["description='a b',a-b,a/b"])
    assert [point.folder for point in points] == ["a-b", "a-b-2", "a-b-3"]


@pytest.mark.parametrize(
    ("item", "values"),
    [
        ("k=1,2", ["1", "2"]),
        ("k=[1, 2],{a: 1, b: [2,3]}", ["[1, 2]", "{a: 1, b: [2,3]}"]),
        ("k='a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ("k=x=1, y", ["x=1", "y"]),
        ("k=it's", ["it's"]),
    ],
)
def test_values_are_parted_at_bare_commas(item, values):
    """Commas inside brackets and quotes belong to a value."""
    assert split_values(item) == ("k", values)


@pytest.mark.parametrize(
    ("item", "what"),
    [
        ("k", "must be dotted.key=value,value,..., as seed=1,2"),
        ("k=", "must be dotted.key=value,value,..., as seed=1,2"),
        ("k=1,", "must be dotted.key=value,value,..., as seed=1,2"),
        ("=1", "must be dotted.key=value,value,..., as seed=1,2"),
        ("k=1,2,1", "has a value twice"),
    ],
)
def test_bad_values_to_vary_are_told(item, what):
    """With the option as it was given."""
    with pytest.raises(HeadwayError) as caught:
        split_values(item)
    assert str(caught.value) == f"--vary {item}: {what}"


@pytest.mark.parametrize(
    ("vary", "sets", "seed", "message"),
    [
        (
            ["engine.max_num_seqs=4,8", "engine.max_num_seqs=8,9"],
            [],
            None,
            "--vary engine.max_num_seqs: --vary engine.max_num_seqs before it would have no effect",
        ),
        (
            ["engine.max_num_seqs=4,8"],
            [" engine.max_num_seqs =3"],
            None,
            "--vary engine.max_num_seqs: --set  engine.max_num_seqs =3 would have no effect",
        ),
        (
            ["engine={max_num_seqs: 1},{}"],
            ["engine.block_size=8"],
            None,
            "--vary engine: --set engine.block_size=8 would have no effect",
        ),
        (["seed=1,2"], [], 3, "--vary seed: --seed 3 would have no effect"),
    ],
)
def test_options_that_another_would_undo_are_refused(path, vary, sets, seed, message):
    """Nothing that the user gives is dropped silently."""
    with pytest.raises(HeadwayError) as caught:
        expand(path, vary, sets, seed)
    assert caught.value.messages == [message]


def test_a_key_may_be_varied_within_a_block_that_is_set(path):
    """The later option fills in the earlier one."""
    points = expand(path, ["engine.max_num_seqs=1,2"], ["engine={block_size: 8}"])
    assert [point.scenario.engine.max_num_seqs for point in points] == [1, 2]
    assert {point.scenario.engine.block_size for point in points} == {8}


def test_errors_name_the_varied_values_that_they_come_with(path):
    """Also where another key is to blame; what is wrong without them is told as it is."""
    vary = ["engine.max_num_seqs=8,4096", "workload.input_len=64,x", "gpu.name=H200,H100-80GB"]
    path.write_text(SMALL + "seed: -1\n")
    with pytest.raises(HeadwayError) as caught:
        expand(path, vary, ["cost.base=-1"])
    assert [text.replace(f"{path.parent}/", "") for text in caught.value.messages] == [
        "small.yaml:6: seed: must be at least 0, not -1 (seed of all random numbers)",
        "--set cost.base=-1: cost.base: must be from 0 to 1,000,000, not -1 (s)",
        "--vary workload.input_len=x: workload.input_len: must be a number, not 'x' (tokens of a "
        "prompt; null: 1024)",
        "small.yaml:2: engine.max_num_batched_tokens: must be at least max_num_seqs (4096), not "
        "2048: every running request wants a token of each step (with --vary "
        "engine.max_num_seqs=4096)",
    ]


def test_variants_have_names_and_keys_of_their_own(path):
    """In place of --vary; without keys one is the scenario as it is."""
    variants = [
        "as it is:",
        "Few: engine.max_num_seqs=2, workload.output_len={kind: uniform, low: 1, high: 3}",
    ]
    runs = expand(
        path,
        variants=[*variants, " Clients: engine.scheduling_policy={policy: fair, weights: {a: 2}}"],
    )
    assert [run.label for run in runs] == ["as it is", "Few", "Clients"]
    assert [run.folder for run in runs] == ["as-it-is", "Few", "Clients"]
    assert [run.scenario.engine.max_num_seqs for run in runs] == [8, 2, 8]
    assert runs[0].varied == {}
    assert runs[1].varied["workload.output_len"] == "{kind: uniform, low: 1, high: 3}"
    assert runs[2].scenario.engine.scheduling_policy.arguments["weights"] == {"a": 2}


@pytest.mark.parametrize(
    ("variants", "vary", "sets", "message"),
    [
        (
            ["engine.max_num_seqs=2"],
            [],
            [],
            "--variant engine.max_num_seqs=2: must be 'NAME: dotted",
        ),
        (
            ["engine.scheduling_policy=my:Own"],
            [],
            [],
            "--variant engine.scheduling_policy=my:Own: must",
        ),
        (["a: seed"], [], [], "--variant a: seed: must be 'NAME:"),
        (["a: seed=1, seed=2"], [], [], "--variant a: seed=1, seed=2: must be 'NAME:"),
        (
            ["a: engine.max_num_sqs=1"],
            [],
            [],
            "--variant a: engine.max_num_sqs=1: engine.max_num_sqs: unknown key",
        ),
        (["n" * 61 + ": seed=1"], [], [], "--variant nnnnnnnnnnnnnnnnnnnn...: its name has more"),
        (["a: seed=1", "a: seed=2"], [], [], "--variant: two are named a"),
        (["a: seed=1"], ["seed=1,2"], [], "--variant: cannot be used with --vary"),
        (["a: seed=1"], [], ["seed=2"], "--variant seed: --set seed=2 would have no effect"),
        ([], [], [], "--vary: is missing; for example"),
    ],
)
def test_variants_that_say_nothing_are_refused(path, variants, vary, sets, message):
    with pytest.raises(HeadwayError) as caught:
        expand(path, vary, sets, variants=variants)
    (text,) = caught.value.messages
    assert text.startswith(message)


def test_what_variants_lack_together_is_told_once(path):
    """Though each sets other keys."""
    variants = ["a: engine.max_num_seqs=4", "b: engine.block_size=8"]
    with pytest.raises(HeadwayError) as caught:
        expand(path, (), ["engine.max_num_batched_tokens=1"], variants=variants)
    assert all("--variant b: engine.max_num_seqs" not in text for text in caught.value.messages)


def test_names_with_colons_and_the_folders_of_names(path):
    """A folder's name is fit for every disk, and nobody else's, nor a file's of the comparison."""
    names = ["http://x:8000", "mine", "MINE", "comparison.csv", "..", "a b/c"]
    settings = ["seed=3", "engine.scheduling_policy={policy: fcfs}", "", "", "", "seed=4"]
    variants = [f"{name}: {text}" for name, text in zip(names, settings, strict=True)]
    found = expand(path, variants=variants)
    assert [one.label for one in found] == names
    assert [one.folder for one in found] == [
        *("http-x-8000", "mine", "MINE-2", "comparison.csv-2", "point", "a-b-c"),
    ]
    assert found[0].varied == {"seed": "3"}
    assert found[2].varied == {}


def test_errors_that_differ_in_the_value_alone_are_one(write):
    """The others are named by their values."""
    with pytest.raises(HeadwayError) as caught:
        expand(write(SMALL), ["engine.max_num_sqs=1,2,3"])
    assert caught.value.messages == [
        "--vary engine.max_num_sqs=1: engine.max_num_sqs: unknown key; did you mean max_num_seqs? "
        "(likewise 2, 3)"
    ]


def test_values_of_numpy_and_paths_are_taken(tmp_path):
    """As a notebook has them; what is no value of a file is told."""
    found = axes_of(
        {"a": np.array([4, 8]), "b": [np.float64(0.5), tmp_path / "p"], "c": [np.True_]}
    )
    assert found == [("a", ["4", "8"]), ("b", ["0.5", str(tmp_path / "p")]), ("c", ["true"])]
    with pytest.raises(HeadwayError, match="is no value of a scenario"):
        axes_of({"a": [object()]})
