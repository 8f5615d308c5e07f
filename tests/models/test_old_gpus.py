"""Formats that need a newer GPU than the one asked for."""

from dataclasses import replace

import pytest

from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import find_gpu
from simulator.models.kv_budget import estimate
from simulator.models.load import load_model
from simulator.models.loaded import loaded
from simulator.models.quantization import read_quantization
from simulator.util.errors import ScenarioError
from tests.models.test_quantization import COMPRESSED, QUARK


@pytest.mark.parametrize(
    ("config", "gpu", "least"),
    [
        (QUARK, "A100-80GB", "quark fp8 from compute capability 8.9"),
        (COMPRESSED, "V100-16GB", "from compute capability 7.5"),
        ({"quant_method": "fbgemm_fp8"}, "T4", "fbgemm_fp8 from compute capability 8.0"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "V100-16GB", "nvfp4 from compute"),
    ],
)
def test_a_gpu_may_be_too_old_for_a_method(config: dict, gpu: str, least: str) -> None:
    """vLLM 0.33's get_min_capability of methods and of Quark's and compressed-tensors' schemes."""
    model = replace(load_model("llama-3-8b"), checkpoint=read_quantization(config))
    with pytest.raises(ValueError, match=least):
        loaded(model, find_gpu(gpu), EngineSizes())
    assert loaded(model, find_gpu("L4"), EngineSizes()).layers[0] > 0
    assert loaded(model, find_gpu(gpu), EngineSizes(fraction_of="free")).layers[0] > 0


@pytest.mark.parametrize(
    ("model", "gpu", "keys", "least"),
    [
        ("gpt-oss-20b", "T4", {}, "mxfp4 from compute capability 8.0"),
        ("llama-3-8b", "V100-16GB", {"quantization": "fp8"}, "fp8 from compute capability 7.5"),
        ("llama-3-8b", "T4", {"dtype": "bfloat16"}, "bfloat16 from compute capability 8.0"),
    ],
)
def test_a_gpu_may_be_too_old_for_a_format(model: str, gpu: str, keys: dict, least: str) -> None:
    """They were counted as if they ran."""
    with pytest.raises(ValueError, match=least):
        loaded(load_model(model), find_gpu(gpu), EngineSizes(**keys))
    assert (
        loaded(load_model("llama-3-8b"), find_gpu(gpu), EngineSizes(dtype="float16")).layers[0] > 0
    )


@pytest.mark.parametrize(
    ("gpu", "keys", "dtype"),
    [
        ("H100-80GB", {"kv_cache_dtype": "float16"}, "bfloat16"),
        ("H100-80GB", {"kv_cache_dtype": "bfloat16", "dtype": "float16"}, "float16"),
        ("H100-80GB", {"kv_cache_dtype": "bfloat16", "dtype": "float32"}, "float32"),
        ("V100-16GB", {"kv_cache_dtype": "bfloat16"}, "float16"),
    ],
)
def test_a_cache_in_16_bits_is_of_the_models_dtype(gpu: str, keys: dict, dtype: str) -> None:
    """vLLM 0.33's VllmConfig._reject_mismatched_float_kv_cache; SGLang has no such rule."""
    model, on = load_model("llama-3.2-1b"), find_gpu(gpu)
    with pytest.raises(ScenarioError, match=f"refuses it beside dtype {dtype}$"):
        estimate(model, on, EngineSizes(**keys))
    for others in (
        {"release": (0, 32, 0)},
        {"fraction_of": "static"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": dtype},
    ):
        assert estimate(model, on, EngineSizes(**keys | others)).num_gpu_blocks > 0
