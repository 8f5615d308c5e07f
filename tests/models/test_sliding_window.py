"""What layers with a sliding window keep, by hand."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.models.gpus import find_gpu
from simulator.models.kv_layout import group_size, model_groups
from simulator.models.load import load_model, shipped_models
from simulator.models.sliding_window import LayerGroups, window_pairs
from tests.support.budgets import kv_budget

H100 = find_gpu("H100-80GB")
MISTRAL, OSS = map(load_model, ("mistral-7b-v0.1", "gpt-oss-20b"))


def test_groups_of_layers_are_of_one_size() -> None:
    """gpt-oss-20b has 12 and 12; Gemma-3 27B 10 full and 52 windowed; 8 and 9 differ by little."""
    assert model_groups(OSS) == (1, 1)
    assert model_groups(load_model("gemma-3-27b")) == (1, 6)
    assert model_groups(MISTRAL) == (0, 1)
    assert model_groups(load_model("llama-3-8b")) == (1, 0)
    assert [group_size(counts) for counts in ([12, 12], [10, 52], [8, 9])] == [12, 10, 9]


def test_mistral_keeps_4096_tokens_of_a_request() -> None:
    """8,192 tokens take 512 blocks, or those of the window, two steps of 2,048 and one across.

    From vLLM 0.26 on (0.25.1 has no `max_in_flight_tokens`); without asynchronous steps one.
    """
    plain, budget = (
        kv_budget(MISTRAL, H100, disable_hybrid_kv_cache_manager=one) for one in (True, False)
    )
    assert plain.num_gpu_blocks == budget.num_gpu_blocks == budget.logged_blocks
    assert plain.concurrent(8192) == (plain.num_gpu_blocks - 1) // 512
    assert budget.needed(8192) == -(-(4096 - 1 + 2 * 2048) // 16) + 1 == 513
    assert budget.concurrent(8192) == (budget.num_gpu_blocks - 1) // 513
    for one in ({"release": (0, 25, 1)}, {"async_scheduling": False}):
        alone = kv_budget(MISTRAL, H100, disable_hybrid_kv_cache_manager=False, **one)
        assert alone.needed(8192) == 385


def test_mistral_has_a_window_in_its_first_release_alone() -> None:
    """The files of the others have null, which without the key would be 4,096 tokens."""
    names = [name for name in shipped_models() if "stral" in name and "mixtral" not in name]
    assert len(names) > 7
    assert [name for name in names if load_model(name).sliding_window] == ["mistral-7b-v0.1"]


def test_every_second_layer_of_gpt_oss_keeps_128_tokens() -> None:
    """A block of 12 layers is 16 * 12 * 2,048 bytes; a window's two steps are all 4,096 tokens."""
    budget = kv_budget(OSS, H100, disable_hybrid_kv_cache_manager=False)
    assert budget.kv_bytes_per_token == 24 * 2 * 8 * 64 * 2
    blocks = budget.kv_cache // (16 * 12 * 2048)
    assert budget.num_gpu_blocks == blocks
    window = 4096 // 16 + 1
    assert budget.concurrent(4096) == (blocks - 1) // (256 + window)
    assert kv_budget(OSS, H100).concurrent(4096) == (budget.kv_cache // (16 * 24 * 2048) - 1) // 256


def test_blocks_leave_the_window_one_by_one() -> None:
    """A window of 8 in blocks of 4: two blocks, and a third while it lies across."""
    groups = LayerGroups(full=0, windowed=1, window=8)
    held = [groups.blocks_held(-(-n // 4), groups.blocks_outside(n - 1, 4)) for n in range(1, 18)]
    assert held == [1] * 4 + [2] * 4 + [3, 3, 3, 2] * 2 + [3]


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 200))
def test_pairs_within_a_window_are_those_of_each_query(
    start: int, tokens: int, window: int
) -> None:
    expected = sum(min(query, window) for query in range(start + 1, start + tokens + 1))
    assert window_pairs(start, tokens, window) == expected
