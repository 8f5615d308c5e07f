"""What a format asks of shapes on several GPUs, and encoders in the formats of a file."""

from dataclasses import replace
from pathlib import Path

import pytest

from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import find_gpu
from simulator.models.load import load_model
from simulator.models.loaded import loaded
from simulator.models.quantization import read_quantization
from tests.models.test_quantization import FP8_GROUP
from tests.support.model_configs import write_config

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
H100 = find_gpu("H100-80GB")


@pytest.mark.parametrize(
    ("inner", "formats", "why"),
    [
        (1536, BLOCKS, "Weight output_partition_size = 192 is not divisible .* block_n = 128"),
        (29568, {"quant_method": "awq", "bits": 4, "group_size": 128}, "The input size is not"),
    ],
)
def test_gpus_share_no_block_of_weights(
    tmp_path: Path, inner: int, formats: dict, why: str
) -> None:
    """vLLM stops there, and Headway gave figures."""
    sizes = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}
    path = write_config(tmp_path, **sizes, intermediate_size=inner, quantization_config=formats)
    model = load_model(path)
    assert loaded(model, H100, EngineSizes(tensor_parallel_size=1)).layers[0] > 0
    with pytest.raises(ValueError, match=why):
        loaded(model, H100, EngineSizes(tensor_parallel_size=8))


def test_gpus_share_no_block_of_an_expert() -> None:
    """Qwen3-235B-A22B-FP8 on 8 GPUs (vLLM, issue 17569); whole experts fit.

    vLLM 0.32 loads it with scales for 64 x 64 numbers, the largest blocks of which 192 has some.
    """
    model = load_model("Qwen/Qwen3-235B-A22B-FP8")
    assert loaded(model, H100, EngineSizes(tensor_parallel_size=8)).layers[0] > 0
    eight = EngineSizes(tensor_parallel_size=8, release=(0, 31, 0))
    with pytest.raises(ValueError, match="output_size of gate's and up's weight = 192 is not"):
        loaded(model, H100, eight)
    assert (
        loaded(model, H100, eight.model_copy(update={"enable_expert_parallel": True})).layers[0] > 0
    )
    assert loaded(model, H100, eight.model_copy(update={"tensor_parallel_size": 4})).layers[0] > 0


def test_a_model_without_mtp_layers_drafts_nothing() -> None:
    drafts = {"method": "mtp", "num_speculative_tokens": 1, "acceptance": 0.0}
    with pytest.raises(ValueError, match="llama-3-8b has no MTP layers"):
        loaded(load_model("llama-3-8b"), H100, EngineSizes(speculative_config=drafts))


VISIONS = {
    "qwen2.5-vl-7b": ("visual", 0.628, 1.256),
    "gemma-3-27b": ("vision_tower", 0.638, 0.777),  # no MLPs: 4,304 is no multiple of 64
    "llava-1.5-7b": ("vision_tower", 0.285, 0.570),
}
"""GiB of encoders in blocks of fp8 and in 16 bits; vLLM 0.32's classes have them within 3 %."""


@pytest.mark.parametrize("name", VISIONS)
def test_an_encoder_is_in_the_formats_of_the_file(name: str, tmp_path: Path) -> None:
    """Unless the file leaves it out, or its maker: also under `--quantization fp8`."""
    module, narrow, wide = VISIONS[name]
    model, gpu = load_model(name), find_gpu("H100-80GB")
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    skipped = {"quant_method": "compressed-tensors", "ignore": [f"re:{module}.*"], **FP8_GROUP}
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8"}
    found = {}
    for key, config in {"blocks": block, "skipped": skipped, "modelopt": modelopt}.items():
        one = replace(model, checkpoint=read_quantization(config))
        found[key] = loaded(one, gpu, EngineSizes()).tower / 2**30
    asked = loaded(model, gpu, EngineSizes(quantization="fp8")).tower / 2**30
    by_modelopt = narrow if module == "visual" else wide
    assert [found["blocks"], found["skipped"], found["modelopt"], asked] == pytest.approx(
        [narrow, wide, by_modelopt, narrow], abs=0.003
    )


@pytest.mark.parametrize("name", VISIONS)
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_tools_of_awq_and_gptq_leave_encoders_in_16_bits(name: str, method: str) -> None:
    """Also where no list says so: 0.93 GiB of 6.57 of a Qwen2.5-VL-7B were missing."""
    config = {"quant_method": method, "bits": 4, "group_size": 128}
    one = replace(load_model(name), checkpoint=read_quantization(config))
    found = loaded(one, find_gpu("H100-80GB"), EngineSizes()).tower / 2**30
    assert found == pytest.approx(VISIONS[name][2], abs=0.003)


def test_makers_leave_encoders_in_16_bits() -> None:
    """A name says no more: `Qwen/Qwen2.5-VL-7B-Instruct-AWQ` leaves `visual` out."""
    wide, named = (
        loaded(load_model(name), find_gpu("H100-80GB"), EngineSizes()).tower
        for name in ("qwen2.5-vl-7b", "Qwen/Qwen2.5-VL-7B-Instruct-AWQ")
    )
    assert named == wide


@pytest.mark.parametrize(
    ("config", "cache"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NONE"}, ""),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, ""),
    ],
)
def test_words_for_the_cache_are_read(config: dict[str, object], cache: str) -> None:
    """NONE was fp8, and AutoFP8's word refused, which vLLM reads with --kv-cache-dtype alone."""
    found = read_quantization(config)
    assert found is not None
    assert found.cache == cache


@pytest.mark.parametrize("published", [False, True])
def test_what_is_not_quantized_is_as_wide_as_the_dtype(tmp_path: Path, published: bool) -> None:
    """Of bitsandbytes, which vLLM runs in float32, too: embeddings, `lm_head` and norms."""
    word, model = "bitsandbytes", load_model("llama-3-8b")
    if published:
        block = {"quant_method": word, "load_in_4bit": True}
        word, model = None, load_model(str(write_config(tmp_path, quantization_config=block)))
    half, whole = (
        loaded(model, find_gpu("H100"), EngineSizes(dtype=dtype, quantization=word))
        for dtype in ("bfloat16", "float32")
    )
    assert (whole.embedding, whole.head) == (2 * half.embedding, 2 * half.head)
    norms = 2 * model.hidden_size * model.num_hidden_layers
    assert sum(whole.layers) - sum(half.layers) == 2 * norms
    if not published:
        assert whole.embedding == whole.head == 4 * 128_256 * 4096  # 1.96 GiB each, half before
