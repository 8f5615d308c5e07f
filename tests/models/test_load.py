"""Models are found by name, folder or path."""

import json
from pathlib import Path

import pytest

from simulator.models.load import MODELS, load_model, shipped_models
from tests.support.model_configs import write_config


def test_a_folder_and_a_relative_path(tmp_path: Path) -> None:
    """A model is found by its folder, or by a path beside the scenario."""
    write_config(tmp_path)
    assert load_model(tmp_path) == load_model("config.json", tmp_path)


def test_an_unknown_name_lists_the_shipped_ones_nearest_first() -> None:
    """The user sees at once what was meant."""
    with pytest.raises(
        ValueError, match=r"'lama-3-8b'; did you mean llama-3-8b\?; there are llama-3-8b, "
    ):
        load_model("lama-3-8b")


def test_shipped_files_are_plain_configs() -> None:
    """Each folder holds a config.json that names its architecture; Kimi-K2 has DeepSeek's."""
    for name in shipped_models():
        raw = json.loads((MODELS / name / "config.json").read_text())
        kind = raw["model_type"].removesuffix("_text").replace("_", "")
        assert kind.replace("kimik2", "deepseekv3") in raw["architectures"][0].lower()
