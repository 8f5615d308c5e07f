"""ModelSpec: sizes that are known, and those that cannot be."""

from pathlib import Path

import pytest

from simulator.models.load import load_model, shipped_models
from simulator.models.spec import ModelSpec
from tests.support.model_configs import write_config

# Parameters on the models' cards, in 1e9; without what a text request does not pass: the image
# encoders of Gemma-3 from 4B on (0.42), the layer that drafts of DeepSeek-V3, GLM-4.5 (5.54) and
# GLM-4.5-Air (3.62) and Qwen3-Next, the image encoder of Llama 4 (0.87).
PUBLISHED = {
    "codellama-34b": 33.74,
    "llama-2-13b": 13.02,
    "llama-2-70b": 68.98,
    "llama-2-7b": 6.74,
    "llama-3-70b": 70.55,
    "llama-3-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.3-70b": 70.55,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "deepseek-v2-lite": 15.71,
    "gpt-oss-20b": 20.91,
    "mistral-7b-v0.1": 7.24,
    "mistral-7b-v0.3": 7.25,
    "mixtral-8x7b": 46.70,
    "mixtral-8x22b": 140.63,
    "mistral-nemo": 12.25,
    "qwen2.5-7b": 7.62,
    "qwen2.5-vl-7b": 7.62,  # without the encoder
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.71,
    "yi-34b": 34.39,
    "qwen3-0.6b": 0.60,
    "qwen3-30b-a3b": 30.53,
    "qwen3-32b": 32.76,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "tiny-test": 0.00,
    "llama-3.1-405b": 405.85,
    "codellama-7b": 6.74,
    "codellama-13b": 13.02,
    "codellama-70b": 68.98,
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen3-1.7b": 1.72,
    "qwen3-235b-a22b": 235.09,
    "mistral-small-24b": 23.57,
    "mistral-large": 122.61,
    "phi-4": 14.66,
    "gpt-oss-120b": 116.83,
    "deepseek-v3": 671.03,
    "gemma-2-2b": 2.61,
    "gemma-2-9b": 9.24,
    "gemma-2-27b": 27.23,
    "gemma-3-1b": 1.00,
    "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.77,
    "gemma-3-27b": 27.01,
    "glm-4-9b": 9.40,
    "glm-4-32b": 32.57,
    "glm-4.5": 352.80,
    "glm-4.5-air": 106.85,
    "phi-3-mini-4k": 3.82,
    "phi-3-mini-128k": 3.82,
    "phi-3-medium-4k": 13.96,
    "phi-3-medium-128k": 13.96,
    "phi-4-mini": 3.84,
    "qwen3-coder-480b-a35b": 480.15,
    "kimi-k2": 1026.41,
    "llama-4-scout": 107.77,
    "llama-4-maverick": 400.71,
    "qwen3-next-80b-a3b": 79.67,
    "deepseek-v3.2": 671.88,
    "gemma-4-26b-a4b": 25.25,
    "gemma-4-31b": 30.81,
    "gemma-4-e2b": 4.63,
    "gemma-4-e4b": 7.46,
    "granite-3.0-1b-a400m": 1.33,
    "granite-3.0-3b-a800m": 3.30,
    "kimi-k2-thinking": 1026.41,
    "minimax-m2": 228.69,
    "nemotron-3-nano-30b-a3b": 31.58,
    "qwen2.5-vl-3b": 3.09,
    "qwen2.5-vl-32b": 32.76,
    "qwen2.5-vl-72b": 72.71,
    "qwen3-vl-4b": 4.02,
    "qwen3-vl-8b": 8.19,
    "qwen3-vl-32b": 32.76,
    "qwen3-vl-30b-a3b": 30.53,
    "qwen3-vl-235b-a22b": 235.09,
    "qwen3.5-9b": 8.95,
    "qwen3.5-27b": 26.90,
    "qwen3.5-35b-a3b": 34.66,
    "qwen3.5-122b-a10b": 122.11,
    "qwen3.5-397b-a17b": 396.35,
    "command-a": 111.06,
    "command-r-35b": 34.98,
    "command-r-plus": 103.81,
    "command-r7b": 8.03,
    "deepseek-v2": 235.74,
    "devstral-small-24b": 23.57,
    "exaone-4.0-32b": 32.0,
    "granite-3.3-2b": 2.53,
    "granite-3.3-8b": 8.17,
    "granite-4.0-h-small": 32.21,
    "granite-4.0-h-tiny": 6.94,
    "llava-1.5-7b": 6.74,
    "llava-1.5-13b": 13.02,
    "llava-v1.6-mistral-7b": 7.24,
    "magistral-small-24b": 23.57,
    "mistral-small-3.1-24b": 23.57,
    "nemotron-nano-9b-v2": 8.89,
    "olmo-3-7b": 7.3,
    "olmo-3-32b": 32.23,
    "phi-3.5-moe": 41.87,
    "qwen2-57b-a14b": 57.41,
    "qwen2-vl-2b": 1.54,
    "qwen2-vl-7b": 7.62,
    "qwen2-vl-72b": 72.71,
    "seed-oss-36b": 36.15,
    "smollm3-3b": 3.08,
    "tinyllama-1.1b": 1.1,
    "opt-125m": 0.13,
}


@pytest.mark.parametrize("name", shipped_models())
def test_shipped_models_have_the_published_number_of_parameters(name: str) -> None:
    """Every shipped config.json gives the count on the model's card, to its last digit."""
    assert round(load_model(name).parameters / 1e9, 2) == PUBLISHED[name]


def test_llama_3_8b_to_the_last_weight() -> None:
    """The count of the published checkpoint, and what follows from it."""
    model = load_model("llama-3-8b")
    assert model.parameters == 8_030_261_248
    assert model.weight_bytes() == 2 * 8_030_261_248
    assert model.kv_bytes_per_token() == 2 * 32 * 8 * 128 * 2
    assert model.kv_bytes_per_token("fp8") == 65_536
    assert model.attention_flops_per_pair == 4 * 32 * 32 * 128


def test_every_quantity_by_hand(tmp_path: Path) -> None:
    """A model small enough to count: 4 heads and 2 KV heads of 2, MLP of 10, 2 layers."""
    model = load_model(write_config(tmp_path))
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8  # query, key and value, output
    layer = attention + 3 * 8 * 10
    assert model.parameters == 2 * 100 * 8 + 2 * (layer + 2 * 8) + 8
    assert model.flops_per_token == 2 * (2 * layer + 100 * 8)
    assert model.attention_flops_per_pair == 4 * 2 * 4 * 2
    assert model.kv_bytes_per_token("float16") == 2 * 2 * 2 * 2 * 2
    assert model.name == tmp_path.name


def test_quantization_leaves_embeddings_and_norms_at_two_bytes(tmp_path: Path) -> None:
    """int4: half a byte in the layers' matrices, two elsewhere; 2.5 bytes a scale and zero point.

    fp8 has a scale of 4 bytes for each of the 62 rows of a layer.
    """
    model = load_model(write_config(tmp_path))
    rows = 8 + 2 * 4 + 8 + 2 * 10 + 8
    linear = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 10)
    rest = model.parameters - linear
    assert model.weight_bytes("int4") == linear // 2 + 2 * rest + 2 * rows * 2.5
    assert model.weight_bytes("fp8") == linear + 2 * rest + 2 * rows * 4
    assert model.weight_bytes("float32") == 4 * model.parameters


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    """Tying saves vocabulary x hidden weights, but no computation."""
    apart = load_model(write_config(tmp_path))
    tied = load_model(write_config(tmp_path, tie_word_embeddings=True))
    assert apart.parameters - tied.parameters == 800
    assert apart.flops_per_token == tied.flops_per_token


def test_experts(tmp_path: Path) -> None:
    """All experts weigh, the chosen ones compute; both spellings are read."""
    dense = load_model(write_config(tmp_path))
    moe = load_model(write_config(tmp_path, num_local_experts=4, num_experts_per_tok=2))
    expert, router = 3 * 8 * 10, 8 * 4
    assert moe.parameters - dense.parameters == 2 * (3 * expert + router)
    assert moe.flops_per_token - dense.flops_per_token == 2 * 2 * (expert + router)
    small = load_model(
        write_config(tmp_path, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=5)
    )
    assert moe.parameters - small.parameters == 2 * 4 * expert // 2
    assert moe.expected_experts(1) == 2
    assert moe.expected_experts(2) == 3
    assert dense.expected_experts(2) == 0


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.88), ("qwen3-30b-a3b", 3.35)])
def test_published_active_parameters(name: str, billions: float) -> None:
    """A token needs 2 FLOPs for each weight that it meets, but for those of the embedding.

    The cards say 12.9 of 46.7 billion, and 3.3 of 30.5.
    """
    model = load_model(name)
    met = model.flops_per_token / 2 + model.head_parameters  # neither model ties the two
    assert round(met / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("published", "asked", "found"),
    [
        ("float32", "auto", "bfloat16"),
        ("bfloat16", "auto", "bfloat16"),
        (None, "auto", "bfloat16"),
        ("torch.bfloat16", "auto", "bfloat16"),
        ("bfloat16", "fp8", "fp8"),
    ],
)
def test_dtype_auto_is_vllms(tmp_path: Path, published: str | None, asked: str, found: str) -> None:
    """`auto` means the published dtype, but bfloat16 for float32."""
    assert load_model(write_config(tmp_path, torch_dtype=published)).resolve_dtype(asked) == found


def test_kv_heads_are_shared_out_or_copied() -> None:
    """8 KV heads on 2 GPUs: half each; on 16: one each, so every head is there twice."""
    model = load_model("llama-3-8b")
    whole = model.kv_bytes_per_token()
    assert model.kv_bytes_per_token(gpus=2) == 0.5 * whole
    assert model.kv_bytes_per_token(gpus=16) == 0.125 * whole
    model.check_parallel(16)
    with pytest.raises(ValueError, match=r"tensor_parallel_size: 3 does not divide the 32 att"):
        model.check_parallel(3)


def test_gemma_and_glm_to_the_last_weight() -> None:
    """The published checkpoints: tied embeddings, four norms per layer, Gemma-3's on q and k too.

    DeepSeek-V3 and GLM-4.5 have a bias for each expert more, 256 in 58 layers and 160 in 89.
    """
    names = ("gemma-2-9b", "gemma-3-1b", "glm-4-9b", "deepseek-v3", "glm-4.5")
    counts = [load_model(name).parameters for name in names]
    assert counts[:3] == [9_241_705_984, 999_885_952, 9_400_094_720]
    assert counts[3] + 58 * 256 == 671_026_419_200
    assert counts[4] + 89 * 160 == 352_797_829_024


def test_shape_leaves_out_names_and_limits() -> None:
    """Llama-3.1-8B takes the time of Llama-3-8B; Llama-2-7B does not."""
    shapes = [load_model(name).shape for name in ("llama-3-8b", "llama-3.1-8b", "llama-2-7b")]
    assert shapes[0] == shapes[1] != shapes[2]


def test_constructor_refuses_nonsense() -> None:
    """A ModelSpec made by hand is checked too."""
    with pytest.raises(ValueError, match=r"hidden_size: must be positive"):
        ModelSpec("m", 1, 0, 1, 1, 1, 1, 1)
