"""Models with nested configs, shared experts, linear attention and published quantization, by hand.

The bytes are those of vLLM 0.24's cache specs (kv_cache_interface.py): 2 x heads x size x bytes of
a FullAttentionSpec, latent + rope of an MLAAttentionSpec, the shapes of a MambaSpec.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.build.kv_room import longest_of
from simulator.core.engine_config import EngineConfig
from simulator.models.config_json import spec_of
from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import find_gpu
from simulator.models.kv_layout import Tables
from simulator.models.load import MODELS, load_model
from simulator.models.loaded import loaded
from simulator.models.spec import SMALL
from simulator.models.vision import read_vision
from simulator.util.errors import HeadwayError
from tests.support.budgets import kv_budget
from tests.support.model_configs import TINY, of_attention, write_config

H100, B200 = find_gpu("H100-80GB"), find_gpu("B200")

KV_BYTES = {
    "deepseek-v3": 61 * (512 + 64) * 2,
    "kimi-k2": 61 * (512 + 64) * 2,
    "qwen3-235b-a22b": 94 * 2 * 4 * 128 * 2,
    "qwen3-30b-a3b": 48 * 2 * 4 * 128 * 2,
    "qwen3-next-80b-a3b": 12 * 2 * 2 * 256 * 2,  # 36 of 48 layers keep no token
    "gpt-oss-20b": 24 * 2 * 8 * 64 * 2,
    "gpt-oss-120b": 36 * 2 * 8 * 64 * 2,
    "llama-4-scout": 48 * 2 * 8 * 128 * 2,
    "llama-4-maverick": 48 * 2 * 8 * 128 * 2,
    "glm-4.5": 92 * 2 * 8 * 128 * 2,
    "mixtral-8x7b": 32 * 2 * 8 * 128 * 2,
    "mixtral-8x22b": 56 * 2 * 8 * 128 * 2,
    "gemma-3-27b": 62 * 2 * 16 * 128 * 2,
    "mistral-small-24b": 40 * 2 * 8 * 128 * 2,
}
PUBLISHED_BYTES = {  # of the checkpoints' files, in 1e9, without drafting layers and images
    "gpt-oss-20b": (13.7, 13.8),
    "gpt-oss-120b": (65.1, 65.3),
    "deepseek-v3": (671, 675),
    "llama-4-scout": (215.4, 215.7),
}

LENGTH = {"max_position_embeddings": 4096}


@pytest.mark.parametrize("name", KV_BYTES)
def test_bytes_that_a_token_keeps(name: str) -> None:
    model = load_model(name)
    assert model.kv_bytes_per_token() == KV_BYTES[name]
    assert model.kv_bytes_per_token("fp8") == KV_BYTES[name] / 2


@pytest.mark.parametrize("name", PUBLISHED_BYTES)
def test_weights_weigh_what_their_files_do(name: str) -> None:
    least, most = PUBLISHED_BYTES[name]
    assert least < load_model(name).weight_bytes() / 1e9 < most


def test_mxfp4_is_of_the_experts_alone(tmp_path: Path) -> None:
    """4.25 bits a weight: 4, and 8 for every 32. Attention and router stay in 16 bits."""
    path = write_config(
        tmp_path,
        num_local_experts=4,
        num_experts_per_tok=2,
        quantization_config={"quant_method": "mxfp4"},
    )
    model = load_model(path)
    experts = 2 * 4 * 3 * 8 * 10
    assert model.weight_dtype() == "mxfp4"
    assert model.weight_dtype("bfloat16") == "mxfp4"  # as vLLM's --dtype: of the rest
    scales = 2 * 4 * (2 * 10 + 8)  # rows are shorter than a block of 32
    assert model.weight_bytes() == 2 * (model.parameters - experts) + experts // 2 + scales
    assert model.kv_bytes_per_token() == 2 * 2 * 2 * 2 * 2


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
        ),
    ],
)
def test_published_quantization(tmp_path: Path, config: dict, dtype: str) -> None:
    assert load_model(write_config(tmp_path, quantization_config=config)).weight_dtype() == dtype


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("fp8", "quantization_config: must be a mapping, not 'fp8'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}},
            "quantization_config: weights of None bits are not",
        ),
        ({"quant_method": "magic"}, "quantization_config: quant_method 'magic' is not known"),
        (
            {"quant_method": "gptq", "bits": 3, "group_size": 128},
            "quantization_config: weights of 3 bits are not",
        ),
    ],
)
def test_a_quantization_that_is_not_known(tmp_path: Path, config: object, told: str) -> None:
    path = write_config(tmp_path, quantization_config=config)
    with pytest.raises(HeadwayError, match=rf"config.json:\d+: {told}"):
        load_model(path)


def test_a_nested_config_is_read_as_the_flat_one(tmp_path: Path) -> None:
    """The files of Llama 4, Mistral Small 3.1 and Kimi-K2.5 hold the language model inside."""
    for name in ("llama-4-scout", "mistral-small-24b", "kimi-k2"):
        inner = json.loads((MODELS / name / "config.json").read_text())
        outer = {key: inner.pop(key) for key in ("quantization_config",) if key in inner}
        outer |= {"model_type": "wrapper", "vision_config": {"hidden_size": 7}}
        path = tmp_path / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(outer | {"text_config": inner}, indent=1))
        found = load_model(path)
        assert found.unread == "vision_config"
        assert replace(found, unread="") == replace(load_model(name), vision=None)


def test_gemma_3_leaves_defaults_unsaid(tmp_path: Path) -> None:
    """The 4B's text_config names no heads, vocabulary or length; transformers' defaults count."""
    inner = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": inner}))
    model, shipped = load_model(path), load_model("gemma-3-4b")
    assert model.shape == shipped.shape
    assert model.max_position_embeddings == shipped.max_position_embeddings


def test_what_is_wrong_inside_is_told_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    inner = TINY | {"model_type": "qwen3_next", "hidden_size": 0}
    path.write_text(json.dumps({"text_config": inner}, indent=1))
    with pytest.raises(HeadwayError, match=r"config.json:\d*:? ?linear_num_key_heads: must be"):
        load_model(path)


def test_llama_4_by_hand() -> None:
    """Scout: 16 experts and a shared one in 48 layers; Maverick: 128 in 24, an MLP in 24 others.

    Three of four layers attend within chunks of 8,192 tokens, which have tables of their own since
    vLLM 0.14 (0.32: 2.07 of the longest requests in 1,000 GiB); a run keeps all tokens.
    """
    scout, maverick = load_model("llama-4-scout"), load_model("llama-4-maverick")
    attention = 5120 * (2 * 40 + 2 * 8) * 128
    expert, mlp = 3 * 5120 * 8192, 3 * 5120 * 16384
    head, norms = 202048 * 5120, 97 * 5120
    assert scout.parameters == 2 * head + norms + 48 * (attention + 17 * expert + 5120 * 16)
    layers = 48 * attention + 24 * (129 * expert + 5120 * 128) + 24 * mlp
    assert maverick.parameters == 2 * head + norms + layers
    assert (scout.sliding_window, scout.windowed * scout.attention_layers) == (8192, 36)
    assert not scout.keeps_window
    keys = {"tensor_parallel_size": 8, "disable_hybrid_kv_cache_manager": False}
    hybrid = kv_budget(scout, H100, **keys, max_num_batched_tokens=8192)
    assert hybrid.layout.tables == (Tables(1, 16), Tables(3, 16, 8193))
    assert hybrid.needed(10_485_760) == 655_360 + 3 * 1536
    old = kv_budget(scout, H100, **keys, release=(0, 13, 0))
    assert old.layout == kv_budget(scout, H100, tensor_parallel_size=8).layout
    assert hybrid.num_gpu_blocks == hybrid.logged_blocks // 4


def test_qwen3_next_keeps_a_state_in_three_of_four_layers() -> None:
    """3 inputs of a convolution 8,192 wide, and 32 matrices of 128 x 128; 36 times, 2 bytes each.

    vLLM finds as much: it raises the block size to 544 tokens, so that a block of a full layer
    (2,048 bytes a token) holds the state of a linear one, 1,097,728 bytes.
    """
    model = load_model("qwen3-next-80b-a3b")
    assert model.linear is not None
    assert model.linear.state_bytes(2) == (3 * 8192 + 32 * 128 * 128) * 2 == 1_097_728
    assert -(-1_097_728 // 2048 // 16) * 16 == 544
    assert model.state_bytes == 36 * 1_097_728
    plain = kv_budget(model, B200, enable_prefix_caching=False)
    assert plain.layout.block_bytes == 544 * 2048 * 12
    assert plain.needed(5440) == 10 + 3 * 1  # 36 layers of states are three groups of 12
    assert kv_budget(model, B200).needed(5440) == 10 + 3 * 2  # a prefix cache keeps one more
    assert plain.tokens == int(plain.logged_blocks / (-(-262_144 // 544) + 3) * 262_144)


def test_layers_of_qwen3_next_by_hand() -> None:
    model = load_model("qwen3-next-80b-a3b")
    assert model.linear is not None
    full = 2048 * (3 * 16 * 256 + 2 * 2 * 256)  # query and its gate, output, key and value
    values = 32 * 128
    linear = 2048 * (2 * 2048 + 3 * values + 2 * 32) + 4 * 8192
    assert of_attention(model) == full
    own = [one for one in model.modules if one.name.startswith("layers.0.linear_attn.")]
    assert sum(one.numbers for one in own if not one.name.endswith(SMALL)) == linear
    experts = 48 * (513 * 3 * 2048 * 512 + 2048 * 513)
    small = 36 * (2 * 32 + 128) + 12 * 2 * 256 + 97 * 2048
    tables = 2 * 151936 * 2048
    assert model.parameters == tables + small + 12 * full + 36 * linear + experts


def test_internvls_projector_narrows_to_the_language_model() -> None:
    """Its second matrix counted as wide as four patches: 16 million weights too many in 1B."""
    block = {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 4096}
    block |= {"image_size": 448, "patch_size": 14}
    found = read_vision({"vision_config": block, "downsample_ratio": 0.5}, 896)
    assert found is not None
    layers = 2 * 1024 * (4 * 1024 + 2 * 4096)
    assert found.parameters + found.beside == layers + 4096 * 896 + 896 * 896


def test_deepstack_has_a_projector_for_each_inner_layer() -> None:
    """Qwen3-VL-8B: three more of 4,608 x (4,608 + 4,096)."""
    vision = load_model("qwen3-vl-8b").vision
    assert vision is not None
    assert vision.projector_parameters == 4 * 4608 * (4608 + 4096)


@pytest.mark.parametrize(
    ("kind", "sizes", "billions"),
    [
        ("starcoder2", (3072, 30, 24, 2, 12_288, 49_152), 3.03),  # starcoder2-3b
        ("gpt_neox", (4096, 32, 32, 32, 16_384, 50_432), 6.86),  # pythia-6.9b
        ("phi", (2560, 32, 32, 32, 10_240, 51_200), 2.78),  # phi-2
        ("nemotron", (3072, 32, 24, 8, 9216, 256_000), 4.19),  # Nemotron-Mini-4B
        ("stablelm", (2048, 24, 32, 32, 5632, 100_352), 1.64),  # stablelm-2-1.6b
        ("glm4v", (4096, 40, 32, 2, 13_696, 151_552), 9.40),  # GLM-4.1V-9B, the language model
    ],
)
def test_families_by_their_published_count(
    kind: str, sizes: tuple[int, ...], billions: float
) -> None:
    """Of sizes as published: ungated MLPs, tied tables, four norms."""
    order = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keys = (*order, "intermediate_size", "vocab_size")
    found = spec_of("m", dict(zip(keys, sizes, strict=True), model_type=kind) | LENGTH)
    assert round(found.parameters / 1e9, 2) == pytest.approx(billions, abs=0.011)


def test_experts_of_ernie() -> None:
    """ERNIE-4.5-21B-A3B: 64 experts and two for all, but for the first layer."""
    sizes = {"hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 12_288, "vocab_size": 103_424}
    experts = {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536}
    experts |= {"moe_num_shared_experts": 2, "moe_layer_start_index": 1}
    whole = sizes | experts | LENGTH | {"model_type": "ernie4_5_moe", "tie_word_embeddings": True}
    model = spec_of("m", whole)
    assert (model.num_experts_per_tok, model.dense_layers) == (6, 1)
    assert round(model.parameters / 1e9, 1) == 21.8


def test_a_window_that_a_file_does_not_name(tmp_path: Path) -> None:
    """Mistral's class in transformers has 4,096 tokens; null is none (vLLM 0.32 takes both so)."""
    config = json.loads((MODELS / "mistral-7b-v0.1" / "config.json").read_text())
    del config["sliding_window"]
    assert spec_of("", config).sliding_window == 4096
    assert spec_of("", config | {"sliding_window": None}).sliding_window == 0
    inner = {"model_type": "mistral3", "text_config": config | {"sliding_window": None}}
    assert spec_of("", inner).sliding_window == 0


@pytest.mark.parametrize(
    ("name", "gpus", "gib"),
    [
        ("granite-4.0-h-small", 8, 7.581),  # one group of Mamba-2's heads, whole on each GPU
        ("seed-oss-36b", 8, 8.418),  # in transformers' classes, which have no table of angles
        ("olmo-3-7b", 8, 1.700),
        ("gpt-oss-20b", 8, 1.804),  # whose angles are in float32
    ],
)
def test_weights_of_vllms_own_classes(name: str, gpus: int, gib: float) -> None:
    """GiB that parameters and buffers of vLLM 0.32 have on each GPU, on torch's meta device."""
    sizes = EngineSizes(tensor_parallel_size=gpus, release=(0, 32, 0))
    parts = loaded(load_model(name), H100, sizes)
    whole = sum(parts.layers) + sum(parts[1:])
    assert whole / 2**30 == pytest.approx(gib, rel=0.002)


DRAFTS = {"num_speculative_tokens": 1, "acceptance": 0.7}


def test_ernies_drafts_have_no_experts() -> None:
    """vLLM 0.32's ErnieMTP: a layer with the dense MLP and a matrix of two hidden states."""
    config = dict(TINY, model_type="ernie4_5_moe", moe_num_experts=64, moe_k=6)
    config |= {"moe_intermediate_size": 1536, "moe_layer_start_index": 1, "hidden_size": 2560}
    config |= {"num_attention_heads": 20, "num_key_value_heads": 4, "intermediate_size": 12288}
    model = spec_of("ernie", config)
    sizes = EngineSizes(speculative_config={"method": "mtp", **DRAFTS})
    attention = 2560 * (2 * 2560 + 2 * 512) + 2 * 2560  # and two norms
    weights = attention + 3 * 2560 * 12288 + 2 * 2560 * 2560
    assert loaded(model, H100, sizes).drafts == 2 * weights


def test_an_mlp_beside_experts_needs_its_size() -> None:
    """Gemma 4's; it was a traceback."""
    whole = copy.deepcopy(dict(load_model("gemma-4-26b-a4b").config))
    del whole["text_config"]["intermediate_size"]
    with pytest.raises(ValueError, match=r"^intermediate_size: must be a positive whole number"):
        spec_of("gemma", whole)


def test_longrope_has_its_first_positions_unless_more_are_asked(tmp_path: Path) -> None:
    """From vLLM 0.11.1 on (pull request 27431); a server takes requests up to all of them."""
    phi = load_model("phi-4-mini")
    assert [phi.longest(one, asked=False) for one in ((0, 11, 0), (0, 11, 1))] == [131_072, 4096]
    assert phi.longest((0, 32, 0)) == 131_072
    config = json.loads((MODELS / "phi-4-mini" / "config.json").read_text())
    config |= {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope"}}
    assert spec_of("", config).longest((0, 32, 0), asked=False) == 4096
    assert longest_of(EngineConfig(), phi) == 4096
    assert longest_of(EngineConfig(name="sglang"), phi) == 131_072
