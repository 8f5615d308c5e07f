"""Models are found by name, folder or path."""

import json
from pathlib import Path

import pytest

from simulator.models.config_parts import TABLE
from simulator.models.gpus import find_gpu
from simulator.models.load import (
    MODELS,
    PRECISION,
    load_model,
    same_shape,
    shipped_models,
    shipped_name,
)
from simulator.models.quantization import READERS
from tests.support.budgets import kv_budget
from tests.support.model_configs import write_config


def test_a_folder_and_a_relative_path(tmp_path: Path) -> None:
    """A model is found by its folder, or by a path beside the scenario."""
    write_config(tmp_path)
    assert load_model(tmp_path) == load_model("config.json", tmp_path)


def test_an_unknown_name_tells_the_three_nearest() -> None:
    """The user sees at once what was meant, and where all names are."""
    nearest = r"did you mean llama-3-8b or llama-3.1-8b or llama-3-70b\?;"
    with pytest.raises(ValueError, match=rf"'lama-3-8b'; {nearest}.*; `headway profile list`"):
        load_model("lama-3-8b")
    with pytest.raises(ValueError, match=r"'a\\nb'; a fine-tune is .*"):
        load_model("a\nb")


def test_shipped_files_are_plain_configs() -> None:
    """Each folder holds a config.json that names its architecture; Kimi-K2 has DeepSeek's."""
    for name in shipped_models():
        raw = json.loads((MODELS / name / "config.json").read_text())
        kind = raw["model_type"].removesuffix("_text").replace("_", "")
        architecture = raw["architectures"][0].lower().replace("_", "")
        assert kind.replace("kimik2", "deepseekv3") in architecture


@pytest.mark.parametrize(
    "name",
    [
        *("llama-3-8b-foo", "my-llama-3-8b", "Llama-3-8B-SFT"),
        *("evil/Meta-Llama-3-8B", "meta-llama/Llama-3-8B", "Qwen/Meta-Llama-3-8B", "llama-3-8b:x"),
        *("Llama-3-8B", "llama-3-8b-1234", "llama-3-8b-v7"),
    ],
)
def test_other_words_beside_a_known_name_are_another_model(name: str) -> None:
    """A fine-tune or a misprint is not taken for the model that its name begins with."""
    with pytest.raises(ValueError, match=r"did you mean llama-3-8b or .*\?; a fine-tune"):
        load_model(name)


@pytest.mark.parametrize("name", ["foo/llama-3-8b-gguf", "foo/llama-3-8b-exl2"])
def test_another_precision_is_not_taken_for_16_bits(name: str) -> None:
    with pytest.raises(ValueError, match=r"\{like: llama-3-8b, .*\} and engine\.quantization;"):
        load_model(name)


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        ("casperhansen/llama-3-8b-instruct-awq", "int4", 4 + 16 / 128 + 4 / 128),
        ("llama-3-8b-int4", "int4", 4 + 16 / 128),
        ("unsloth/llama-3-8b-Instruct-bnb-4bit", "int4", 4 + 32 / 64),
    ],
)
def test_a_precision_in_the_name_is_taken_and_said(name: str, dtype: str, bits: float) -> None:
    """Of a shape that is shipped: 6.98 billion weights in the layers, 1.05 beside them."""
    model = load_model(name)
    assert model.weight_dtype() == dtype
    assert "by the name; its config.json has them" in model.unread
    plain = load_model("llama-3-8b")
    matrices = plain.matrix_bytes(0, None)
    rest = plain.weight_bytes() - 2 * matrices
    assert model.weight_bytes() - rest == pytest.approx(matrices * bits / 8, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("Qwen/Qwen3-8B-FP8", 128),
        ("RedHatAI/Qwen3-8B-FP8", 1),
        ("zai-org/GLM-4.5-Air-FP8", 1),
        ("zai-org/GLM-4.6-FP8", 1),
        ("RedHatAI/Meta-Llama-3-8B-Instruct-FP8", 1),
    ],
)
def test_fp8_by_name_is_in_blocks_where_its_maker_has_them(name: str, rows: int) -> None:
    """No more GPUs are refused on a guess: GLM's are in channels, and vLLM's recipe has eight."""
    model = load_model(name)
    found = model.formats()
    assert found is not None
    own = found.rules[-1].format
    assert own is not None
    assert (own.word, own.rows) == ("fp8", rows)
    if rows == 1:
        kv_budget(model, find_gpu("H200"), tensor_parallel_size=8)


def test_metas_fp8_leaves_attention_and_two_layers_in_16_bits() -> None:
    """57.75 GiB on each of eight GPUs, by a server's log; others' FP8 is of all layers."""
    meta = load_model("meta-llama/Llama-3.1-405B-Instruct-FP8").weight_bytes()
    assert 450 < meta / 2**30 < 8 * 57.75
    assert load_model("RedHatAI/Meta-Llama-3.1-405B-Instruct-FP8").weight_bytes() < 0.9 * meta


@pytest.mark.parametrize(
    "name",
    [
        *("facebook/opt-1.3b", "deepseek-ai/DeepSeek-V4-Flash", "google/gemma-3n-E4B-it"),
        *("tiiuae/falcon-7b", "llama-3-8bb", "meta-llama/Llama-3.2-11B-Vision-Instruct"),
    ],
)
def test_another_architecture_or_size_is_not_proposed(name: str) -> None:
    with pytest.raises(ValueError, match=r"for another model give the path of its config\.json"):
        load_model(name)


def test_what_is_no_config_is_told(tmp_path: Path) -> None:
    """A folder without one, Mistral's own file, an adapter's, llama.cpp's."""
    with pytest.raises(ValueError, match=r"has no config\.json$"):
        load_model(tmp_path)
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(
        ValueError,
        match=r"has params\.json and no config\.json; params\.json is Mistral's own format: give",
    ):
        load_model(tmp_path)
    with pytest.raises(ValueError, match=r"params\.json is Mistral's own format: give"):
        load_model(tmp_path / "params.json")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for path in (tmp_path, tmp_path / "adapter_config.json"):
        with pytest.raises(ValueError, match=r"is an adapter's: give its base model, and enable_l"):
            load_model(path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03")
    with pytest.raises(ValueError, match=r"is a GGUF file: give its config\.json"):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("path", ["x/y/llama-3-8b", "./llama-3-8b", "/llama-3-8b", "../llama-3-8b"])
def test_a_path_must_be_there(path: str) -> None:
    with pytest.raises(ValueError, match=f"model: '{path}' is a path, and there is no file "):
        load_model(path)
    with pytest.raises(ValueError, match=r"there is no file '.*a\\nb'$"):
        load_model("./a\nb")


def test_the_names_of_makers_are_known_in_any_case() -> None:
    """Each is of a shipped model, and no two shipped models share one."""
    lines = (MODELS.parent / "hub_names.csv").read_text("utf-8").splitlines()[1:]
    listed = [line.split(",")[:2] for line in lines]
    assert {name for _, name in listed} == set(shipped_models()) - {"tiny-test"}
    assert len({hub.lower() for hub, _ in listed}) == len(listed)
    for hub, name in listed:
        assert shipped_name(hub) == shipped_name(hub.upper()) == name
        assert load_model(same_shape(hub)).shape == load_model(name).shape
        assert not any(map(PRECISION.fullmatch, hub.lower().split("-")))
    assert load_model("meta-llama/Meta-Llama-3-8B-Instruct") == load_model("llama-3-8b")


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("Qwen/Qwen3-30B-A3B", 40_960),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 262_144),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", 262_144),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", 131_072),
        ("zai-org/GLM-4.6-FP8", 202_752),
    ],
)
def test_a_release_may_have_longer_requests(name: str, longest: int) -> None:
    """Also where the name says a precision."""
    assert load_model(name).max_position_embeddings == longest


@pytest.mark.parametrize("word", ["AWQ", "GPTQ-Int4", "GPTQ-Int8"])
def test_qwen_pads_its_72b_so_that_gpus_share_whole_groups(word: str) -> None:
    """As its checkpoints on the hub: intermediate_size 29,696, 232 groups of 128."""
    assert load_model(f"Qwen/Qwen2.5-72B-Instruct-{word}").intermediate_size == 29_696
    assert load_model("Qwen/Qwen2.5-72B-Instruct").intermediate_size == 29_568


def test_the_page_names_what_is_refused() -> None:
    """Its list had four families of nine, and no format."""
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text("utf-8")
    assert all(f"`{names.split()[0]}`" in page for names in TABLE["refused"])
    for method in ("hqq", "torchao", "gguf"):
        assert f"`{method}`" in page
        assert method not in READERS
