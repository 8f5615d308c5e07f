"""The points of a comparison."""

import re
from pathlib import Path

import pytest

from simulator.compare import expand, split_values
from simulator.errors import HeadwayError
from tests.scenarios import SMALL


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
    assert points[0].scenario.engine.scheduling_policy == {"policy": "static", "timeout": 0}


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
        ("k", "must be dotted.key=value,value,..."),
        ("k=", "must be dotted.key=value,value,..."),
        ("k=1,", "must be dotted.key=value,value,..."),
        ("=1", "must be dotted.key=value,value,..."),
        ("k=1,2,1", "has a value twice"),
    ],
)
def test_bad_values_to_vary_are_told(item, what):
    """With the option as it was given."""
    with pytest.raises(HeadwayError) as caught:
        split_values(item)
    assert str(caught.value) == f"--vary {item}: {what}"
