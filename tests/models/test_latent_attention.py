"""Multi-head latent attention: sizes by hand."""

from simulator.models.gpus import find_gpu
from simulator.models.load import load_model
from tests.support.budgets import kv_budget
from tests.support.model_configs import of_attention

H100 = find_gpu("H100-80GB")
LITE = load_model("deepseek-v2-lite")


def test_a_latent_is_one_vector_per_token_and_layer_whatever_the_heads() -> None:
    """27 layers of 512 + 64 numbers; each of 4 GPUs holds all of it. Llama-3-8B: 131,072 bytes."""
    assert LITE.kv_bytes_per_token() == 27 * 576 * 2 == 31_104
    assert LITE.kv_bytes_per_token("fp8") == 15_552
    assert LITE.kv_bytes_per_token(gpus=4) == LITE.kv_bytes_per_token()
    one, four = (kv_budget(LITE, H100, tensor_parallel_size=n) for n in (1, 4))
    assert one.kv_bytes_per_token == four.kv_bytes_per_token == 31_104
    assert one.num_gpu_blocks == one.kv_cache // (16 * 31_104)


def test_deepseek_v2_lite_to_the_last_weight() -> None:
    """The published checkpoint has 15,706,484,224 weights; attention by hand."""
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    assert of_attention(LITE) == attention == 13_762_560
    assert LITE.parameters == 15_706_484_224


def test_queries_may_have_a_rank_too() -> None:
    """DeepSeek-V3: 1,536 between 7,168 and 128 heads of 192."""
    query = 7168 * 1536 + 1536 * 128 * 192
    rest = 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert of_attention(load_model("deepseek-v3")) == query + rest
