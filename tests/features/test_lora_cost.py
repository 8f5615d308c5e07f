"""What adapters (LoRA) weigh and cost, against sums by hand."""

import pytest

from simulator.build.kv_room import memory_budget
from simulator.core.engine_config import EngineConfig
from simulator.core.request import Step
from simulator.costs.linear import LinearCost
from simulator.costs.roofline import efficiency_of
from simulator.features.lora.cost import lora_cost
from simulator.features.lora.size import adapter_size
from simulator.features.lora.work import KEY, AdapterWork
from simulator.models.gpus import GPUS
from simulator.models.load import load_model

LLAMA, GPU = load_model("llama-3-8b"), GPUS["H100-80GB"]
WEIGHTS = 41_943_040
"""Of an adapter of rank 16 on all projections of Llama-3-8B: 84 MB, the size of such files."""


def test_an_adapters_size_is_that_of_its_file() -> None:
    """Per layer and rank: q, o 8,192 each; k, v 5,120; gate, up, down 18,432."""
    assert WEIGHTS == 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    size = adapter_size(LLAMA, 16)
    assert size.weights == WEIGHTS
    assert size.slot_bytes == 2 * (WEIGHTS + 2 * 16 * (128_256 + 4096))
    assert adapter_size(LLAMA, 64).weights == 4 * WEIGHTS


def test_half_of_an_adapter_is_shared_out_by_tensor_parallelism() -> None:
    """Of q the outputs, of o the inputs: the hidden state's side is whole on both GPUs."""
    shared = 32 * 16 * (4096 + 2 * 1024 + 2 * 14336 + 4096 + 14336)  # on the other side
    assert adapter_size(LLAMA, 16, 2).weights == WEIGHTS - shared / 2


def test_slots_take_room_from_the_kv_cache() -> None:
    engine = EngineConfig(enable_lora=True, max_loras=8, max_lora_rank=64)
    plain = memory_budget(EngineConfig(), LLAMA, GPU)
    served = memory_budget(engine, LLAMA, GPU)
    assert plain.kv_cache - served.kv_cache == 8 * adapter_size(LLAMA, 64).slot_bytes
    assert served.num_gpu_blocks < plain.num_gpu_blocks


def test_a_step_pays_for_kernels_weights_tokens_and_loading() -> None:
    engine = EngineConfig(enable_lora=True, max_loras=4)
    cost = lora_cost(LinearCost(0.01), LLAMA, GPU, engine)
    step = Step([], 8, 800)
    assert cost.execute(step).seconds == 0.01
    step.add_work(KEY, AdapterWork())
    assert cost.execute(step).seconds == 0.01
    reached = GPU.bandwidth * efficiency_of(GPU).weights
    kernels, each = 8 * 32 * 2e-6, 2 * WEIGHTS / reached
    # Inputs read, outputs read and written: q, k, v; o; gate, up; down.
    moved = 2 * 32 * ((4096 + 2 * 6144) + 3 * 4096 + (4096 + 4 * 14336) + (14336 + 2 * 4096))
    token = moved / (0.9 * GPU.bandwidth)
    step.add_work(KEY, AdapterWork(active=3, tokens=6))
    assert cost.execute(step).seconds == pytest.approx(0.01 + kernels + 3 * each + 6 * token)
    step.add_work(KEY, AdapterWork(active=3, tokens=6, read=1, copied=2))
    loading = 2 * WEIGHTS / 2.1e9 + 2 * 2 * WEIGHTS / (0.85 * 64e9)
    assert cost.execute(step).seconds == pytest.approx(
        0.01 + kernels + 3 * each + 6 * token + loading
    )
    assert cost.execute(step).features[KEY] == pytest.approx(loading)
    step.add_work(KEY, AdapterWork(active=3, tokens=6))
    assert cost.leap(step, 2).seconds == [cost.execute(step).seconds] * 2
