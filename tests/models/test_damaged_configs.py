"""Each value of a model's files replaced by another: read on purpose, or refused by its key."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.models.config_json import read_config, spec_of
from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import find_gpu
from simulator.models.kv_budget import estimate
from simulator.models.load import MODELS
from simulator.models.quantization import read_quantization

VALUES = [None, "x", -1, 0, 10**18, 1.5, True, [], ["a"], {}, {"a": 1}]
SHAPES = (
    *("gemma-4-e2b", "gpt-oss-20b", "granite-4.0-h-tiny", "kimi-k2-thinking", "llama-4-scout"),
    *("mistral-small-3.1-24b", "nemotron-nano-9b-v2", "qwen2.5-vl-7b", "qwen3.5-35b-a3b"),
)
MOST = 3e12  # bytes of Kimi-K2 in 16 bits and more; no one wrong value makes more of a model
WEIGHTS = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}
GROUP = {"targets": ["re:.*experts.*"], "weights": WEIGHTS}
FORMATS: tuple[dict[str, Any], ...] = (
    {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": []},
    {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "FP8"}}},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["a"]},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:a": {"bits": 8}}},
    {"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": 16}}},
    {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}, "ignore": ["re:b"]},
    {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}, "kv_cache_scheme": {}},
    {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp4"}},
        "layer_quant_config": {"a": {"weight": {"dtype": "int8"}}},
        "export": {"kv_cache_group": ["a"]},
    },
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["a"]},
)


def leaves(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places in a file, of each list the first."""
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in [*enumerate(value)][:1] if isinstance(value, list) else items:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


def damaged(whole: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield an object with each of its values replaced by each other value, and where."""
    for place in leaves(whole):
        inner = whole = copy.deepcopy(whole)
        for key in place[:-1]:
            inner = inner[key]
        kept = inner[place[-1]]
        for value in VALUES:
            inner[place[-1]] = value
            yield whole, (*place, value)
        inner[place[-1]] = kept


@pytest.mark.parametrize("name", SHAPES)
def test_a_value_of_another_kind(name: str) -> None:
    """No traceback, and no negative or boundless bytes; a fault is told once, by its key."""
    gpu, refused, seen = find_gpu("H200"), 0, set()
    for whole, place in damaged(json.loads((MODELS / name / "config.json").read_text())):
        try:
            model = spec_of(name, whole)
        except ValueError as error:
            keys = [line.partition(": ")[0] for line in str(error).split("\n")]
            assert len(set(keys)) == len(keys)
            refused += 1
            continue
        if model not in seen:
            seen.add(model)
            budget = estimate(model, gpu, EngineSizes(disable_hybrid_kv_cache_manager=False))
            assert 0 < budget.weights < MOST, place
    assert refused > 100


@pytest.mark.parametrize("formats", FORMATS, ids=lambda one: one.get("quant_method", "modelopt"))
def test_a_format_of_another_kind(formats: dict[str, Any]) -> None:
    """As in hf_quant_config.json, which has the same keys."""
    said: list[str] = []
    for whole, place in damaged(formats):
        try:
            found = read_quantization(whole)
        except ValueError as error:
            said += str(error).split("\n")
            continue
        assert found is not None
        for module in ("layers.0.mlp.experts.0.up_proj", "layers.0.self_attn.q_proj"):
            own = found.of(module)
            assert own is None or 0 < own.bytes_of(256, 512) <= 4 * 256 * 512, place
    assert len(said) > 5
    assert all(": " in line for line in said)


@pytest.mark.parametrize("value", VALUES)
def test_what_is_wrong_is_said_of_the_file_that_has_it(tmp_path: Path, value: object) -> None:
    """Of the formats in hf_quant_config.json its own name, of config.json's keys that one's."""
    plain = json.loads((MODELS / "tiny-test" / "config.json").read_text())
    for name, whole in (
        ("config.json", plain | {"hidden_size": value}),
        ("hf_quant_config.json", {"quantization": {"quant_algo": value}}),
        ("hf_quant_config.json", {"quantization": value}),
        ("hf_quant_config.json", value),
    ):
        (tmp_path / "config.json").write_text(json.dumps(plain))
        (tmp_path / name).write_text(json.dumps(whole))
        said = str(tmp_path / name)
        try:
            read_config(tmp_path / "config.json")
        except ValueError as error:
            said = str(error)
        assert said.startswith(str(tmp_path / name))
