"""The memory budget: against what vLLM reported, and against itself."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.report.memory_report import log_lines, memory_table
from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import GIB, GPUS, find_gpu
from simulator.models.kv_budget import MemoryBudget, activation_bytes, estimate
from simulator.models.load import load_model
from simulator.models.quantization import Quantization
from tests.support.budgets import kv_budget

H100 = find_gpu("H100-80GB")
A100 = find_gpu("A100-80GB")


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("llama-2-7b", 119_008), ("codellama-34b", 40_592)],
)
def test_vllm_found_the_same(name: str, tokens: int) -> None:
    """What vLLM 0.11 logged on an H100 at 0.9 with 4,096 tokens a step, within 2 %."""
    budget = kv_budget(
        load_model(name),
        H100,
        gpu_memory_utilization=0.9,
        max_num_batched_tokens=4096,
        release=(0, 11, 0),
    )
    assert budget.tokens == pytest.approx(tokens, rel=0.02)


def test_llama_3_8b_on_an_a100() -> None:
    """About 28,000 blocks of 16, as users of vLLM know them."""
    budget = kv_budget(
        load_model("llama-3-8b"), A100, gpu_memory_utilization=0.9, max_num_batched_tokens=512
    )
    assert 27_000 < budget.num_gpu_blocks < 28_500


def test_the_lines_add_up() -> None:
    """Usable memory = weights + activations + context + cache, and the cache is whole blocks."""
    model = load_model("llama-3-8b")
    budget = kv_budget(model, A100, gpu_memory_utilization=0.9)
    assert budget.usable == int(0.9 * A100.memory)
    angles = 2 * 8192 * 128
    assert budget.weights == 16_060_522_496 + angles
    parts = budget.weights + budget.activations + budget.context + budget.graphs + budget.kv_cache
    assert parts == budget.usable
    assert budget.num_gpu_blocks == budget.kv_cache // (16 * 131_072)
    assert budget.tokens == 16 * budget.num_gpu_blocks


def test_activations_are_the_larger_peak() -> None:
    """Llama-3-8B: 512 tokens peak in the sampler, 65,536 in the layers, experts as chosen."""

    def peak(name: str, gpus: int, tokens: int, seqs: int, release=(0, 33, 0)) -> int:
        sizes = EngineSizes(
            tensor_parallel_size=gpus,
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            release=release,
        )
        return activation_bytes(load_model(name), sizes)

    name = "llama-3-8b"
    assert peak(name, 1, 512, 256) == 256 * 128_256 * 14
    assert peak(name, 1, 512, 256, (0, 16, 0)) == 256 * 128_256 * 38
    assert peak(name, 1, 512, 256, (0, 6, 3)) == 256 * 128_256 * 40
    assert peak(name, 1, 20_000, 1, (0, 6, 3)) == 20_000 * (3 * 4096 + 3 * 14_336) * 2
    assert peak(name, 1, 65_536, 256) == 65_536 * (2 * 4096 + 3 * 14_336) * 2
    assert peak(name, 2, 65_536, 256) == 65_536 * (2 * 4096 + 3 * 7168) * 2
    expected = 8192 * (2 * 4096 + 2 * (3 * 14_336 + 4096)) * 2
    assert peak("mixtral-8x7b", 1, 8192, 1) == expected


def test_tensor_parallelism_halves_what_each_gpu_holds() -> None:
    """On two GPUs each has half the weights and half of every token's KV."""
    model = load_model("llama-3-8b")
    one, two = (kv_budget(model, A100, tensor_parallel_size=n) for n in (1, 2))
    whole = 2 * (65 * 4096 + 8192 * 128)  # norms and angles are whole on each
    assert two.weights - whole == (one.weights - whole) // 2
    assert two.kv_bytes_per_token == one.kv_bytes_per_token / 2
    assert two.tokens > 2 * one.tokens


def test_gpus_that_nvlink_connects_keep_buffers() -> None:
    """1.79 GiB on each of two A100, from 0.11 on 0.45 for each other GPU; none by PCIe."""
    model = load_model("llama-3-8b")

    def kept(name: str, gpus: int, release: tuple[int, int, int]) -> int:
        one, all_ = (
            kv_budget(model, GPUS[name], tensor_parallel_size=n, release=release) for n in (1, gpus)
        )
        return all_.context - one.context

    assert kept("A100-80GB", 2, (0, 10, 2)) == int(1.79 * GIB)
    each = kept("A100-80GB", 2, (0, 11, 0))
    assert each == int(0.45 * GIB)
    assert kept("A100-80GB", 4, (0, 33, 0)) == kept("A100-80GB", 8, (0, 33, 0)) == 3 * each
    assert kept("RTX-4090", 2, (0, 10, 2)) == kept("RTX-4090", 2, (0, 33, 0)) == 0


def test_dtypes_of_weights_and_cache() -> None:
    """Quantization is the weights', kv_cache_dtype the cache's; auto follows dtype."""
    model = load_model("llama-3-8b")
    budget = kv_budget(model, A100, quantization="int4")
    assert (
        budget.model.weight_dtype(budget.sizes.weight_dtype),
        budget.sizes.cache(budget.model),
    ) == ("int4", "bfloat16")
    assert budget.kv_bytes_per_token == 131_072
    budget = kv_budget(model, A100, dtype="float32", kv_cache_dtype="auto")
    assert budget.kv_bytes_per_token == 262_144
    budget = kv_budget(model, A100, kv_cache_dtype="fp8")
    assert (budget.model.weight_dtype(budget.sizes.weight_dtype), budget.kv_bytes_per_token) == (
        "bfloat16",
        65_536,
    )


def test_a_model_that_does_not_fit_says_by_how_much() -> None:
    """141 GB of weights on one A100: refused with the missing GiB."""
    with pytest.raises(ValueError, match=r"llama-3-70b in bfloat16 .*by \d\d\.\d\d GiB"):
        kv_budget(load_model("llama-3-70b"), A100)
    assert kv_budget(load_model("llama-3-70b"), A100, tensor_parallel_size=4).num_gpu_blocks > 0


def test_bad_knobs_are_named() -> None:
    """Errors begin with the key."""
    model = load_model("llama-3-8b")
    with pytest.raises(ValueError, match=r"^gpu_memory_utilization: "):
        kv_budget(model, A100, gpu_memory_utilization=1.5)
    with pytest.raises(ValueError, match=r"^engine.tensor_parallel_size: "):
        kv_budget(model, A100, tensor_parallel_size=5)


def budget_of(tokens: int, longest: int | None = None) -> MemoryBudget:
    """Make a budget with a cache for exactly so many tokens."""
    model = load_model("llama-3-8b")
    budget = estimate(model, A100, EngineSizes(gpu_memory_utilization=0.5, max_model_len=longest))
    context = int(0.5 * A100.memory) - tokens * 131_072
    return budget._replace(weights=0, activations=0, graphs=0, context=context)


def test_concurrent_requests_take_whole_blocks() -> None:
    """101 blocks, one of them null: 17 tokens take two blocks, so 50 requests fit."""
    budget = budget_of(101 * 16)
    assert budget.num_gpu_blocks == 101
    assert [budget.concurrent(n) for n in (1, 16, 17, 1600, 1601)] == [100, 100, 50, 1, 0]


def test_a_server_says_how_long_its_requests_may_be() -> None:
    """As vLLM's log; 101 blocks are room for 1,616 tokens."""
    budget = budget_of(101 * 16)
    assert budget.longest == 1616
    assert "(1.00 GiB KV cache is needed, which is larger than" in budget.refusal
    assert "the estimated maximum model length is 1616. Try increasing" in budget.refusal
    assert budget_of(8192).refusal == ""
    none = budget._replace(weights=80 * GIB)
    assert (none.longest, none.concurrent(16)) == (0, 0)
    assert none.refusal.startswith("No available memory")


def test_the_question_of_the_80_gb_gpu_and_the_40_gb_model() -> None:
    """The table answers it line by line, with paging and with contiguous allocation."""
    table = memory_table(budget_of(101 * 16, longest=800))
    lines = [line.split() for line in table.splitlines()]
    assert ["blocks", "of", "16", "tokens", "101"] in lines
    assert lines[-4:-2] == [["512", "3", "2"], ["800", "2", "2"]]
    assert table.splitlines()[0] == "llama-3-8b on 1 x A100-80GB"
    assert all(line == line.rstrip() for line in table.splitlines())


def test_the_table_ends_at_the_models_length() -> None:
    """Without max_model_len the model's own limit is the last row."""
    table = memory_table(kv_budget(load_model("llama-3-8b"), A100))
    assert table.splitlines()[-3].split()[0] == "8,192"
    assert "14.96 GiB" in table


@given(
    gpu=st.sampled_from(sorted(GPUS)),
    share=st.floats(0.5, 0.95),
    tokens=st.integers(256, 16_384),
    block=st.sampled_from([8, 16, 32]),
)
def test_more_memory_never_means_fewer_blocks(
    gpu: str, share: float, tokens: int, block: int
) -> None:
    """Blocks grow with the memory and shrink with the batch; they never exceed the cache."""
    model = load_model("llama-3.2-1b")

    def blocks(share: float, tokens: int) -> MemoryBudget:
        return kv_budget(
            model,
            GPUS[gpu],
            gpu_memory_utilization=share,
            max_num_batched_tokens=tokens,
            block_size=block,
        )

    budget = blocks(share, tokens)
    assert budget.num_gpu_blocks <= blocks(share + 0.05, tokens).num_gpu_blocks
    assert budget.num_gpu_blocks >= blocks(share, 2 * tokens).num_gpu_blocks
    used = budget.num_gpu_blocks * block * budget.kv_bytes_per_token
    assert 0 <= budget.kv_cache - used < block * budget.kv_bytes_per_token
    assert budget.kv_cache < GPUS[gpu].memory
    assert GPUS[gpu].memory > GIB


@pytest.mark.parametrize(
    ("name", "card", "dtype", "shown"),
    [
        ("gemma-2-2b", "L4", "auto", "bfloat16"),  # published in float32
        ("gpt-oss-20b", "L4", "auto", "bfloat16"),
        ("llama-3.2-1b", "T4", "auto", "float16"),
        ("gemma-2-2b", "T4", "auto", "float32"),  # its numbers overflow in float16
        ("llama-3.2-1b", "L4", "float16", "float16"),
    ],
)
def test_the_dtype_is_one_that_the_gpu_has(name: str, card: str, dtype: str, shown: str) -> None:
    """As vLLM's `_resolve_auto_dtype`."""
    budget = estimate(load_model(name), find_gpu(card), EngineSizes(dtype=dtype))
    assert budget.sizes.cache(budget.model) == shown
    assert budget.model.weight_dtype(budget.sizes.weight_dtype) in (shown, "mxfp4")


def test_a_caches_own_precision_counts_beside_a_dtype() -> None:
    """`--dtype bfloat16` is not that of a cache whose scales the checkpoint has."""
    model = load_model("llama-3.1-8b")
    fp8 = replace(model, checkpoint=Quantization((), "fp8", "modelopt"))
    assert EngineSizes(dtype="bfloat16").cache(fp8) == "fp8"
    assert EngineSizes(dtype="bfloat16", kv_cache_dtype="bfloat16").cache(fp8) == "bfloat16"


@pytest.mark.parametrize(("card", "fits"), [("L4", "reduced from 131072 to"), ("H200", "full")])
def test_auto_is_the_longest_that_fits(card: str, fits: str) -> None:
    """As vLLM's `_auto_fit_max_model_len`: one token more does not start."""
    model, gpu = load_model("llama-3.1-8b"), find_gpu(card)
    auto = estimate(model, gpu, EngineSizes(max_model_len="auto"))
    (line,) = [one for one in log_lines(auto) if "Auto-fit" in one]
    assert fits in line
    longest = auto.max_model_len
    assert estimate(model, gpu, EngineSizes(max_model_len=longest)).refusal == ""
    assert longest == 131072 or estimate(model, gpu, EngineSizes(max_model_len=longest + 1)).refusal
