"""Blocks of caches by groups of layers, by hand, as vLLM 0.22 to 0.33 cut them."""

import json

import pytest

from simulator.core.multimodal_config import MultimodalConfig
from simulator.models.config_json import spec_of
from simulator.models.engine_sizes import EngineSizes, Release
from simulator.models.gpus import find_gpu
from simulator.models.kv_budget import estimate
from simulator.models.kv_layout import Tables, kv_layout, model_groups
from simulator.models.load import MODELS, load_model
from simulator.models.loaded import loaded
from simulator.models.spec import module_bytes
from simulator.models.vision import read_vision
from tests.support.budgets import kv_budget

H200 = find_gpu("H200")


def drafts(method: str, tokens: int = 1) -> dict[str, object]:
    """Write what drafts as a block has it."""
    return {"method": method, "num_speculative_tokens": tokens, "acceptance": 0.0}


def test_gpt_oss_as_a_server_logged() -> None:
    """104,202 blocks of 18 layers; 2,068 tokens take 130 and 131 of them."""
    model = load_model("gpt-oss-120b")
    layout = kv_layout(model, EngineSizes(disable_hybrid_kv_cache_manager=False))
    assert layout.block_bytes == 16 * 18 * 2 * 8 * 64 * 2
    assert layout.needed(2068, 8192) == 130 + 131
    assert int(57.24 * 2**30 // layout.block_bytes) == 104_202


def test_layers_of_a_draft_as_each_engine_counts_them() -> None:
    """SGLang takes a draft's layers for as large as the model's; these have half as wide heads."""
    draft, model = load_model("llama-3.2-1b"), load_model("llama-3.1-8b")
    drafting = EngineSizes(draft=draft, speculative_config=drafts("eagle"))
    assert drafting.more_layers(model) == 8
    assert drafting.model_copy(update={"fraction_of": "static"}).more_layers(model) == 16


def test_tokens_are_what_the_log_of_that_release_calls_them() -> None:
    """Gemma-3-27B: 10 layers with all tokens, 52 in six groups; before 0.20 blocks by tables."""
    keys = {
        "disable_hybrid_kv_cache_manager": False,
        "max_model_len": 4096,
        "max_num_batched_tokens": 8192,
    }
    old, new = (
        kv_budget(load_model("gemma-3-27b"), H200, **keys, release=release)
        for release in ((0, 11, 0), (0, 22, 0))
    )
    assert sum(one.number for one in old.layout.tables) == 7
    assert old.tokens == old.logged_blocks // 7 * 16
    assert old.needed(4096) == 256 + 6 * (256 + 1)
    assert new.tokens == int(new.logged_blocks / old.needed(4096) * 4096)


def test_pages_of_gemma_4_are_of_one_size() -> None:
    """E2B: of 15 layers with a cache 3 have heads twice as large; the others' blocks are longer."""
    model = load_model("gemma-4-e2b")
    assert model.cached_layers == {"full_attention": 3, "sliding_attention": 12}
    assert model_groups(model) == (1, 4)
    layout = kv_layout(model, EngineSizes(disable_hybrid_kv_cache_manager=False))
    assert layout.tables == (Tables(1, 16), Tables(4, 32, 512, 1))
    assert layout.block_bytes == 3 * 16 * 2 * 512 * 2
    assert layout.needed(8192, 2048) == 512 + 4 * (80 + 1)


@pytest.mark.parametrize(
    ("caching", "ahead", "blocks"), [(False, 0, 1), (True, 0, 2), (True, 1, 3)]
)
def test_states_take_blocks_of_the_pool(caching: bool, ahead: int, blocks: int) -> None:
    """Qwen3.5-35B-A3B in fp8: 2,146,304 bytes a state, 2,096 tokens of 1,024 bytes a block."""
    model = load_model("qwen3.5-35b-a3b")
    assert model.linear is not None
    assert model.linear.state_bytes(2) == 3 * 8192 * 2 + 32 * 128 * 128 * 4 == 2_146_304
    keys = {"kv_cache_dtype": "fp8", "enable_prefix_caching": caching}
    keys |= {"speculative_config": drafts("mtp", ahead)} if ahead else {}
    layout = kv_layout(model, EngineSizes(**keys))
    assert layout.needed(131_072, 8192) == -(-131_072 // layout.least_block) + 3 * blocks
    assert layout.least_block == (2096 if not ahead else 2112)


def test_an_indexer_has_a_cache_of_its_own() -> None:
    """DeepSeek-V3.2: 128 numbers in 8 bits and a scale beside the latent; in fp8 656 bytes."""
    model = load_model("deepseek-v3.2")
    assert model.kv_bytes_per_token() == 61 * (576 * 2 + 132)
    assert model.kv_bytes_per_token("fp8") == 61 * (656 + 132)
    assert load_model("deepseek-v3").kv_bytes_per_token("fp8") == 61 * 576


@pytest.mark.parametrize(("release", "dtype"), [((0, 11, 0), "fp8"), ((0, 11, 1), "bfloat16")])
def test_the_first_release_had_an_indexed_cache_in_fp8(release, dtype):
    """verify_and_update_config of 0.11.0; of 0.11.1 it leaves `auto` in 16 bits."""
    sizes = EngineSizes(release=release)
    assert sizes.cache(load_model("deepseek-v3.2")) == dtype
    assert sizes.cache(load_model("deepseek-v3")) == "bfloat16"


def test_mamba_of_nemotron_h() -> None:
    """23 states of 64 heads x 64 x 128 in 32 bits, and the last 3 inputs of a convolution."""
    model = load_model("nemotron-3-nano-30b-a3b")
    assert model.linear is not None
    assert model.attention_layers == 6
    convolved = 64 * 64 + 2 * 8 * 128
    assert model.state_bytes == 23 * (3 * convolved * 2 + 64 * 64 * 128 * 4)
    assert model.kv_bytes_per_token() == 6 * 2 * 2 * 128 * 2


def test_states_of_nemotron_h_are_in_32_bits_where_its_file_says_nothing() -> None:
    """As update_mamba_ssm_cache_dtype of vLLM 0.14 to 0.32 has it: 2,134,016 bytes."""
    path = MODELS / "nemotron-3-nano-30b-a3b" / "config.json"
    raw = json.loads(path.read_text("utf-8"))
    del raw["mamba_ssm_cache_dtype"]
    model = spec_of("untold", raw)
    assert model.linear is not None
    assert model.linear.state_bytes(2) == 2_134_016
    assert model.state_bytes == load_model("nemotron-3-nano-30b-a3b").state_bytes


def test_each_kind_of_layer_of_gemma_4_shares_out_its_own_heads() -> None:
    """31B: 4 heads of 512 in 10 layers, 16 of 256 in 50; each of 8 GPUs has one and two.

    vLLM 0.32 (CPU build, its class without weights) has 32,768 and 65,536 bytes a page on 4 GPUs.
    """
    model = load_model("gemma-4-31b")
    assert model.kv_bytes_per_token(gpus=8) == 10 * 2 * 512 * 2 + 50 * 2 * 2 * 256 * 2
    for gpus, full, page in ((4, 32, 65_536), (8, 16, 32_768)):
        sizes = EngineSizes(tensor_parallel_size=gpus, disable_hybrid_kv_cache_manager=False)
        layout = kv_layout(model, sizes)
        assert [(one.number, one.block_size) for one in layout.tables] == [(1, full), (5, 16)]
        assert layout.block_bytes == 10 * page


def test_pools_of_sglang_by_hand() -> None:
    """Of gpt-oss 18 layers keep 0.8 tokens for one of the others, of Qwen3-Next states take 9 / 19.

    Gemma 3 keeps all tokens in all layers there.
    """
    oss, delta, gemma = map(load_model, ("gpt-oss-20b", "qwen3-next-80b-a3b", "gemma-3-27b"))
    each = 2 * 8 * 64 * 2
    sizes = EngineSizes(fraction_of="static", block_size=1)
    assert kv_layout(oss, sizes).block_bytes == pytest.approx((12 + 0.8 * 12) * each)
    two = sizes.model_copy(update={"tensor_parallel_size": 2})
    assert kv_layout(delta, two).block_bytes == pytest.approx(12 * 2 * 256 * 2 * 1.9)
    assert kv_layout(gemma, sizes).block_bytes == gemma.kv_bytes_per_token()


def test_a_draft_model_has_a_cache_of_its_own() -> None:
    """In vLLM its layers lie in the same blocks: 256 KiB of a token for 64 + 28 layers' 112 KiB."""
    target, draft = load_model("qwen3-32b"), load_model("qwen3-0.6b")
    sizes = EngineSizes(speculative_config=drafts("draft_model"), draft=draft)
    budget = estimate(target, find_gpu("H200"), sizes)
    assert budget.layout.block_bytes == 16 * 1024 * (256 + 112)
    assert budget.drafts == pytest.approx(draft.weight_bytes(), rel=0.01)
    assert "draft" not in budget.unread
    unknown = sizes.model_copy(update={"draft": None})
    assert "draft model" in estimate(target, find_gpu("H200"), unknown).unread


@pytest.mark.parametrize(
    ("gpu", "release", "hidden", "inner"),
    [
        ("H100-80GB", (0, 22, 0), 3072, 2944),  # Marlin's
        ("B200", (0, 22, 0), 3072, 3072),  # FlashInfer's
        ("B200", (0, 10, 2), 2880, 2880),  # Triton's: 64 divide 2,880
        ("MI300X", (0, 22, 0), 3072, 3072),
    ],
)
def test_experts_are_padded_by_kernel(gpu: str, release: Release, hidden: int, inner: int) -> None:
    """Of gpt-oss-20b 24 layers of 32 experts with three matrices, 4.25 bits a number."""
    model = load_model("gpt-oss-20b")
    budget = estimate(model, find_gpu(gpu), EngineSizes(release=release))
    angles = 4 * 131_072 * 64  # float32
    more = 24 * 32 * 3 * (hidden * inner - 2880 * 2880) * 4.25 / 8
    assert budget.weights - angles - model.weight_bytes() == pytest.approx(more, abs=1)


def test_sglang_logs_what_is_gone_of_the_gpu() -> None:
    """Qwen3-14B on four GPUs, MiB a layer: 17.5, 12.5, 85 and 42.5 take 18, 14, 86 and 44."""
    model, keys = load_model("qwen3-14b"), {"tensor_parallel_size": 4, "block_size": 1}
    tensors, gone = (
        sum(loaded(model, H200, EngineSizes(**keys, fraction_of=fraction)).layers)
        for fraction in ("all", "static")
    )
    assert gone - tensors == 40 * 4.5 * 2**20


def test_drafts_by_mtp_are_a_layer_of_the_last_kind() -> None:
    """Of DeepSeek-V3 one with experts, in 8 bits, and a matrix from two hidden states to one."""
    model = load_model("deepseek-v3")
    last = [one for one in model.modules if one.name.startswith("layers.60.")]
    own = sum(module_bytes(one, model.formats(), 2.0) for one in last)
    found = loaded(model, H200, EngineSizes(speculative_config=drafts("mtp"))).drafts
    assert found == pytest.approx(own + 2 * 2 * 7168**2)


def test_encoders_of_gemma_4_are_whole_on_each_gpu() -> None:
    """E2B with its audio encoder: 951,458,456 bytes in vLLM 0.32, by classes of transformers."""
    model = load_model("gemma-4-e2b")
    towers = [loaded(model, H200, EngineSizes(tensor_parallel_size=gpus)).tower for gpus in (1, 4)]
    assert towers[0] == towers[1] == pytest.approx(951_458_456, rel=0.02)


@pytest.mark.parametrize(
    ("name", "limits", "left"),
    [
        ("qwen2.5-vl-3b", {"video": 0}, 1.0),
        ("qwen2.5-vl-3b", {"audio": 0}, 1.0),
        ("qwen2.5-vl-3b", {"image": 0}, 1.0),
        ("qwen2.5-vl-3b", {"image": 0, "video": 0}, 0.0),
        ("gemma-3-4b", {"video": 0}, 1.0),
        ("gemma-3-4b", {"image": 0}, 0.0),
        ("llama-4-scout", {"video": 0}, 1.0),
        ("mistral-small-3.1-24b", {"video": 0, "audio": 0}, 1.0),
        ("mistral-small-3.1-24b", {"image": 0, "video": 2}, 0.0),
        ("gemma-4-e2b", {"image": 0, "audio": 0, "video": 0}, 0.0),
        ("gemma-4-e2b", {"image": 0, "video": 0}, 0.64),
        ("gemma-4-e2b", {"audio": 0}, 0.36),
    ],
)
def test_an_encoder_goes_where_all_that_it_reads_are_limited_to_none(
    name: str, limits: dict[str, int], left: float
) -> None:
    """As _mark_tower_model of vLLM 0.33, which limits nothing that is not named."""
    model = load_model(name)
    sizes = EngineSizes(multimodal_config=MultimodalConfig(limit_mm_per_prompt=limits))
    whole = loaded(model, H200, EngineSizes()).tower
    assert loaded(model, H200, sizes).tower == pytest.approx(left * whole, rel=0.02)


@pytest.mark.parametrize(("release", "times"), [((0, 30, 0), 4), ((0, 32, 0), 1)])
def test_pictures_lengthen_the_table_of_angles(release: Release, times: int) -> None:
    """MRotaryEmbedding's is four times as long, of Qwen3's families no more (0.32)."""
    sizes = EngineSizes(release=release)
    rest = loaded(load_model("qwen3-vl-4b"), H200, sizes).rest
    assert rest == 2 * times * 262_144 * 128 + 2 * 2560
    qwen2 = loaded(load_model("qwen2-vl-7b"), H200, sizes).rest
    assert qwen2 == 2 * 4 * 32_768 * 128 + 2 * 3584


def test_the_encoder_of_glm_4v_has_its_wide_mlp_behind_the_layers() -> None:
    """vLLM 0.32 has 1.67 GiB of GLM-4.1V: MLPs of 4,096 in the layers, one of 13,696 behind."""
    block = {"depth": 24, "hidden_size": 1536, "intermediate_size": 13_696, "patch_size": 14}
    block |= {"out_hidden_size": 4096, "spatial_merge_size": 2, "hidden_act": "silu"}
    found = read_vision({"model_type": "glm4v", "vision_config": block}, 4096)
    assert found is not None
    layers = 24 * (4 * 1536**2 + 3 * 1536 * 4096)
    merger = 4 * 1536 * 4096 + 4096**2 + 3 * 4096 * 13_696
    assert found.parameters + found.beside == layers + merger


def test_linear_scaling_lengthens_the_table_of_angles() -> None:
    """Of Gemma 3 eight times, for layers with full attention alone; beside it a norm."""
    rest = loaded(load_model("gemma-3-27b"), H200, EngineSizes()).rest
    assert rest == 2 * 131_072 * 128 * (8 + 1) + 2 * 5376


def test_chunks_have_no_table_of_angles_of_their_own() -> None:
    """Of Llama 4 the layers with chunks alone have angles: one table of 10,485,760 positions."""
    rest = loaded(load_model("llama-4-scout"), H200, EngineSizes()).rest
    assert rest == 2 * 10_485_760 * 128 + 2 * 5120


@pytest.mark.parametrize(
    ("gpu", "release", "cache", "given", "block"),
    [
        ("H200", (0, 8, 5), "auto", 16, 64),
        ("H200", (0, 17, 0), "auto", 128, 128),
        ("H200", (0, 18, 0), "auto", 16, 16),
        ("H200", (0, 33, 0), "fp8", 16, 64),
        ("B200", (0, 10, 0), "auto", 16, 16),
        ("B200", (0, 12, 0), "auto", 16, 128),
        ("B200", (0, 17, 0), "auto", 16, 64),
        ("B200", (0, 33, 0), "fp8", 16, 32),
        ("A100-80GB", (0, 33, 0), "auto", 16, 16),
        ("MI300X", (0, 33, 0), "fp8", 16, 16),
    ],
)
def test_latent_attention_has_the_blocks_of_its_kernels(
    gpu: str, release: Release, cache: str, given: int, block: int
) -> None:
    """`check_and_update_config` of CudaPlatform, from 0.18 on `update_block_size_for_backend`."""
    sizes = EngineSizes(
        tensor_parallel_size=8, release=release, kv_cache_dtype=cache, block_size=given
    )
    budget = estimate(load_model("deepseek-v3"), find_gpu(gpu), sizes)
    assert budget.block_size == budget.layout.least_block == block
    assert estimate(load_model("qwen3-32b"), find_gpu(gpu), sizes).block_size == given
    if gpu == "H200":
        assert estimate(load_model("deepseek-v3.2"), H200, sizes).block_size in (64, given)
