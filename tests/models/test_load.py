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
        ValueError, match=r"'lama-3-8b'; did you mean llama-3-8b\?; .*; there are llama-3-8b, "
    ):
        load_model("lama-3-8b")


def test_shipped_files_are_plain_configs() -> None:
    """Each folder holds a config.json that names its architecture; Kimi-K2 has DeepSeek's."""
    for name in shipped_models():
        raw = json.loads((MODELS / name / "config.json").read_text())
        kind = raw["model_type"].removesuffix("_text").replace("_", "")
        assert kind.replace("kimik2", "deepseekv3") in raw["architectures"][0].lower()


@pytest.mark.parametrize(
    "name",
    [
        *("llama-3-8bb", "llama-3-8b-foo", "my-llama-3-8b", "Llama-3-8B-SFT"),
        *("llama-38b", "llama-3-8bit", "llama-3-8b-1234", "llama-3-8b-v7"),
    ],
)
def test_other_words_beside_a_known_name_are_another_model(name: str) -> None:
    """A fine-tune or a misprint is not taken for the model that its name begins with."""
    with pytest.raises(ValueError, match=r"did you mean llama-3-8b\?"):
        load_model(name)


def test_a_release_of_the_same_shape_is_that_model() -> None:
    """The owner, the maker's tuning, the version and the quantization change no shape."""
    llama = load_model("llama-3-8b")
    assert load_model("meta-llama/Meta-Llama-3-8B-Instruct") == llama
    assert load_model("acme/Llama-3-8B-Instruct-FP8-dynamic") == llama
    assert load_model("acme/Meta-Llama-3-8B-Instruct-quantized.w4a16") == llama
    assert load_model("mistralai/Mistral-7B-Instruct-v0.1") == load_model("mistral-7b-v0.1")
    assert load_model("mistralai/Mistral-7B-Instruct-v0.2") == load_model("mistral-7b-v0.3")
