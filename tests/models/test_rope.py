"""Angles of a config.json: theta, scaling, and the norms' epsilon."""

from pathlib import Path

import pytest

from simulator.models.config_json import read_config, read_rope
from simulator.models.load import load_model
from simulator.models.spec import RopeScaling
from simulator.util.errors import HeadwayError
from tests.models.test_spec import write


def test_llama_3_1_as_published() -> None:
    spec = load_model("llama-3.1-8b")
    assert spec.rope_theta == 500_000
    assert spec.rope_scaling == RopeScaling("llama3", 8, 1, 4, 8192)
    assert spec.rms_norm_eps == 1e-5
    scaling = load_model("llama-3.2-1b").rope_scaling
    assert scaling is not None
    assert scaling.factor == 32


def test_what_a_config_leaves_out_is_plain_rotation() -> None:
    assert read_rope({}) == (10_000, None)
    assert read_rope({"rope_theta": 1e6, "rope_scaling": None}) == (1e6, None)


def test_newer_files_hold_all_in_one_mapping() -> None:
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    assert read_rope(new) == (5e5, RopeScaling("linear", 2.0))
    assert read_rope({"rope_parameters": {"rope_theta": 7, "rope_type": "default"}}) == (7, None)


def test_angles_do_not_change_the_time_of_a_step(tmp_path: Path) -> None:
    """So models that differ in them alone share profiles."""
    one = read_config(write(tmp_path))
    two = read_config(write(tmp_path, rope_theta=3.0, rms_norm_eps=1e-5))
    assert one != two
    assert one.shape == two.shape


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_theta": "big"}, "rope_theta: must be a positive number, not 'big'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: must be a positive number, not 0"),
        ({"rope_scaling": 8}, "rope_scaling: must be a mapping, not 8"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": -1}},
            "factor: must be a positive number, not -1",
        ),
    ],
)
def test_what_is_no_number_is_refused_by_line(tmp_path: Path, changes, told) -> None:
    path = write(tmp_path, **changes)
    line = next(
        k for k, text in enumerate(path.read_text().splitlines(), 1) if told.split(":")[0] in text
    )
    with pytest.raises(HeadwayError) as caught:
        read_config(path)
    assert caught.value.messages == [f"{path}:{line}: {told}"]
