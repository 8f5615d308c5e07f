"""ModelSpec and the table of GPUs: sizes that are known, and files that are wrong."""

import json
from pathlib import Path

import pytest

from simulator.models.gpus import GIB, GPUS, find_gpu
from simulator.models.load import MODELS, load_model, shipped_models
from simulator.models.spec import ModelSpec
from simulator.util.errors import HeadwayError

# Parameters on the models' cards, in 1e9; without what a text request does not pass: the image
# encoders of Gemma-3 from 4B on (0.42), the layer that drafts of DeepSeek-V3, GLM-4.5 (5.54) and
# GLM-4.5-Air (3.62).
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
    "gpt-oss-120b": 116.79,
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
}
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 10,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def write(folder: Path, **changes: object) -> Path:
    """Write a small config.json, with some keys changed or, where None, taken out."""
    raw = {key: value for key, value in (TINY | changes).items() if value is not None}
    path = folder / "config.json"
    path.write_text(json.dumps(raw, indent=1))
    return path


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
    model = load_model(write(tmp_path))
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8  # query, key and value, output
    layer = attention + 3 * 8 * 10
    assert model.parameters == 2 * 100 * 8 + 2 * (layer + 2 * 8) + 8
    assert model.flops_per_token == 2 * (2 * layer + 100 * 8)
    assert model.attention_flops_per_pair == 4 * 2 * 4 * 2
    assert model.kv_bytes_per_token("float16") == 2 * 2 * 2 * 2 * 2
    assert model.name == tmp_path.name


def test_quantization_leaves_embeddings_and_norms_at_two_bytes(tmp_path: Path) -> None:
    """int4: half a byte in the layers' matrices, two elsewhere."""
    model = load_model(write(tmp_path))
    linear = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 10)
    rest = model.parameters - linear
    assert model.weight_bytes("int4") == linear // 2 + 2 * rest
    assert model.weight_bytes("fp8") == linear + 2 * rest
    assert model.weight_bytes("float32") == 4 * model.parameters


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    """Tying saves vocabulary x hidden weights, but no computation."""
    apart = load_model(write(tmp_path))
    tied = load_model(write(tmp_path, tie_word_embeddings=True))
    assert apart.parameters - tied.parameters == 800
    assert apart.flops_per_token == tied.flops_per_token


def test_experts(tmp_path: Path) -> None:
    """All experts weigh, the chosen ones compute; both spellings are read."""
    dense = load_model(write(tmp_path))
    moe = load_model(write(tmp_path, num_local_experts=4, num_experts_per_tok=2))
    expert, router = 3 * 8 * 10, 8 * 4
    assert moe.parameters - dense.parameters == 2 * (3 * expert + router)
    assert moe.flops_per_token - dense.flops_per_token == 2 * 2 * (expert + router)
    small = load_model(
        write(tmp_path, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=5)
    )
    assert moe.parameters - small.parameters == 2 * 4 * expert // 2
    assert moe.experts_met(1) == 2
    assert moe.experts_met(2) == 3
    assert dense.experts_met(2) == 0


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
        ("float32", "auto", "float16"),
        ("bfloat16", "auto", "bfloat16"),
        (None, "auto", "float16"),
        ("torch.bfloat16", "auto", "bfloat16"),
        ("bfloat16", "fp8", "fp8"),
    ],
)
def test_dtype_auto_is_vllms(tmp_path: Path, published: str | None, asked: str, found: str) -> None:
    """`auto` means the published dtype, but float16 for float32."""
    assert load_model(write(tmp_path, torch_dtype=published)).resolve_dtype(asked) == found


def test_kv_heads_are_shared_out_or_copied() -> None:
    """8 KV heads on 2 GPUs: half each; on 16: one each, so every head is there twice."""
    model = load_model("llama-3-8b")
    assert model.kv_share(2) == 0.5
    assert model.kv_share(16) == 0.125
    model.check_parallel(16)
    with pytest.raises(ValueError, match=r"tensor_parallel_size: 3 does not divide the 32 att"):
        model.check_parallel(3)


def test_a_folder_and_a_relative_path(tmp_path: Path) -> None:
    """A model is found by its folder, or by a path beside the scenario."""
    write(tmp_path)
    assert load_model(tmp_path) == load_model("config.json", tmp_path)


def test_an_unknown_name_lists_the_shipped_ones_nearest_first() -> None:
    """The user sees at once what was meant."""
    with pytest.raises(ValueError, match=r"no shipped model 'lama-3-8b'; there are llama-3-8b, "):
        load_model("lama-3-8b")


def test_a_bad_config_is_told_whole(tmp_path: Path) -> None:
    """Every missing, wrong and unsupported key in one go, with its line."""
    path = write(tmp_path, vocab_size=None, hidden_size="8", model_type="mamba", torch_dtype="int3")
    with pytest.raises(HeadwayError) as caught:
        load_model(path)
    assert [message.split(" ", 1)[0] for message in caught.value.messages] == [
        f"{path}:",
        f"{path}:3:",
        f"{path}:8:",
        f"{path}:9:",
    ]
    keys = [message.split(": ")[1] for message in caught.value.messages]
    assert keys == ["vocab_size", "hidden_size", "model_type", "torch_dtype"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads: must divide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be positive, not 0"),
        ({"num_experts": 4}, "num_experts_per_tok: must be from 1 to num_experts"),
        ({"num_experts": 4, "decoder_sparse_step": 2}, "mlp_only_layers: every layer"),
    ],
)
def test_impossible_sizes(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    """Sizes that contradict each other are refused, by file and key."""
    path = write(tmp_path, **changes)
    with pytest.raises(HeadwayError, match=words) as caught:
        load_model(path)
    assert str(caught.value).startswith(str(path))


def test_what_is_not_json(tmp_path: Path) -> None:
    """A broken file is told by its line."""
    path = tmp_path / "config.json"
    path.write_text('{\n"hidden_size": 8,\n}')
    with pytest.raises(HeadwayError, match=r"config.json:3: not JSON"):
        load_model(path)


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"sliding_window": 16}, (16, 2)),
        ({"sliding_window": 64}, (0, 0)),  # as long as the longest request
        ({"sliding_window": None}, (0, 0)),
        ({"sliding_window": 16, "use_sliding_window": False}, (0, 0)),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, (16, 1)),
        ({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}, (16, 1)),
        ({"sliding_window": 16, "layer_types": ["full_attention", "full_attention"]}, (0, 0)),
        ({"sliding_window": 16, "model_type": "gemma2"}, (16, 1)),
        ({"sliding_window": 16, "model_type": "gemma3_text"}, (16, 2)),
        (
            {"sliding_window": 16, "model_type": "gemma3_text", "sliding_window_pattern": 2},
            (16, 1),
        ),
    ],
)
def test_which_layers_have_a_window(tmp_path: Path, keys: dict, window: tuple[int, int]) -> None:
    """By families' habits, or layer by layer."""
    model = load_model(write(tmp_path, **keys))
    assert (model.sliding_window, model.windowed_layers) == window


def test_gemma_and_glm_to_the_last_weight() -> None:
    """The published checkpoints: tied embeddings, four norms per layer, Gemma-3's on q and k too.

    DeepSeek-V3 and GLM-4.5 have a bias for each expert more, 256 in 58 layers and 160 in 89.
    """
    names = ("gemma-2-9b", "gemma-3-1b", "glm-4-9b", "deepseek-v3", "glm-4.5")
    counts = [load_model(name).parameters for name in names]
    assert counts[:3] == [9_241_705_984, 999_885_952, 9_400_094_720]
    assert counts[3] + 58 * 256 == 671_026_419_200
    assert counts[4] + 89 * 160 == 352_797_829_024


def test_what_the_files_of_a_family_leave_out(tmp_path: Path) -> None:
    """Gemma ties its embeddings unsaid; GLM-4 has norms behind attention and MLP, its elder not."""
    plain, gemma, elder, glm, air = (
        load_model(write(tmp_path, model_type=kind, **more))
        for kind, more in (
            ("llama", {}),
            ("gemma2", {}),
            ("glm", {}),
            ("glm4", {}),
            ("glm4_moe", {"use_qk_norm": True}),
        )
    )
    assert gemma.parameters == plain.parameters - 100 * 8 + 2 * 2 * 8
    assert elder.parameters == plain.parameters
    assert glm.parameters == plain.parameters + 2 * 2 * 8
    assert air.parameters == plain.parameters + 2 * 2 * 2


def test_gemma_3_reads_its_window_in_five_of_six_layers() -> None:
    """27B: 10 layers see all, 52 the last 1,024 tokens; each token takes 62 * 2 * 16 * 128 * 2."""
    model = load_model("gemma-3-27b")
    assert (model.sliding_window, model.windowed_layers) == (1024, 52)
    assert model.kv_bytes_per_token() == 507_904
    assert model.attention_flops_per_pair == 62 * 32 * 4 * 128


def test_shape_leaves_out_names_and_limits() -> None:
    """Llama-3.1-8B takes the time of Llama-3-8B; Llama-2-7B does not."""
    shapes = [load_model(name).shape for name in ("llama-3-8b", "llama-3.1-8b", "llama-2-7b")]
    assert shapes[0] == shapes[1] != shapes[2]


def test_constructor_refuses_nonsense() -> None:
    """A ModelSpec made by hand is checked too."""
    with pytest.raises(ValueError, match=r"hidden_size: must be positive"):
        ModelSpec("m", 1, 0, 1, 1, 1, 1, 1)


def test_shipped_files_are_plain_configs() -> None:
    """Each folder holds a config.json that names its architecture."""
    for name in shipped_models():
        raw = json.loads((MODELS / name / "config.json").read_text())
        kind = raw["model_type"].removesuffix("_text").replace("_", "")
        assert kind in raw["architectures"][0].lower()


@pytest.mark.parametrize("name", ["a100-80gb", "A100 80GB", "NVIDIA A100-80GB", "a100_80gb"])
def test_gpus_are_found_however_they_are_spelt(name: str) -> None:
    """Case, blanks and the maker's name do not matter."""
    assert find_gpu(name).name == "A100-80GB"


def test_an_ambiguous_gpu_is_not_guessed() -> None:
    """`A100` could be either; the message asks."""
    what = "in the table; did you mean A100-40GB or A100-80GB or A100-80GB-PCIe"
    with pytest.raises(ValueError, match=rf"^gpu.name: no GPU 'A100' {what}\?$"):
        find_gpu("A100")
    with pytest.raises(ValueError, match=r"did you mean H100-80GB or H100-PCIe or H100-NVL\?$"):
        find_gpu("nvidia h100")
    with pytest.raises(ValueError, match="there are "):
        find_gpu("")


def test_the_table_of_gpus_is_physical() -> None:
    """Memory below the nominal size, fp8 twice bf16, hundreds of FLOPs per byte."""
    for gpu in GPUS.values():
        nominal = [int(part[:-2]) for part in gpu.name.split("-") if part.endswith("GB")]
        assert not nominal or 0.97 < gpu.memory / (nominal[0] * GIB) < 1
        assert gpu.fp8_flops is None or round(gpu.fp8_flops / gpu.bf16_flops, 1) == 2
        assert 50 < gpu.bf16_flops / gpu.bandwidth < 500
        assert gpu.flops("int4") == gpu.bf16_flops
