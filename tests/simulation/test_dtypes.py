"""What dtypes of weights and cache change in a run."""

from math import isclose

import pytest

from simulator.core.request import Step
from simulator.scenario.load import load_scenario

WEIGHTS = 6_979_321_856  # of Llama-3-8B's matrices; 1,050,939,392 more stay at 16 bits

FP8_SCALES = 4 * 32 * (4096 + 2 * 1024 + 4096 + 2 * 14_336 + 4096) / WEIGHTS  # one for each row


@pytest.mark.medium
@pytest.mark.parametrize(
    ("engine", "weights", "scales", "token"),
    [
        ("{dtype: fp16}", 2.0, 0.0, 131_072),
        ("{dtype: bf16}", 2.0, 0.0, 131_072),
        ("{quantization: fp8}", 1.0, FP8_SCALES, 131_072),
        ("{quantization: int4}", 0.5, 2.5 / 128, 131_072),
        ("{kv_cache_dtype: fp8}", 2.0, 0.0, 65_536),
        ("{quantization: fp8, kv_cache_dtype: fp8}", 1.0, FP8_SCALES, 65_536),
        ("{quantization: int4, kv_cache_dtype: int4}", 0.5, 2.5 / 128, 32_768),
    ],
)
def test_dtypes_change_capacity_and_time(
    write, engine: str, weights: float, scales: float, token: int
) -> None:
    """Blocks by the bytes left; a decode's time by the bytes moved, at the GPU's shares of 1."""
    from simulator.costs.roofline import efficiency_of
    from simulator.scenario.resolve import resolve

    text = f"model: llama-3-8b\ngpu: {{name: L40S}}\nengine: {engine}\ncost: {{kind: roofline}}\n"
    parts = resolve(load_scenario(write(text)))
    gpu, share = parts.gpu, efficiency_of(parts.gpu)
    held = int((weights + scales) * WEIGHTS) + 2 * 1_050_939_392 + 2 * 8192 * 128
    rest = int(gpu.memory * 0.92) - held - 256 * 128_256 * 14 - 2**28 - 32 * (18 << 20)
    assert parts.num_gpu_blocks == pytest.approx(rest // (16 * token), abs=1)
    one, two = (parts.cost.execute(Step([], 1, s)).seconds for s in (1000, 2000))
    assert isclose(two - one, 1000 * token / (gpu.bandwidth * share.cache))
    plain = resolve(load_scenario(write(text.replace(engine, "{dtype: bf16}"))))
    saved = plain.cost.execute(Step([], 1, 0)).seconds - parts.cost.execute(Step([], 1, 0)).seconds
    moved = (2.0 - weights - scales) * WEIGHTS / (gpu.bandwidth * share.weights)
    assert isclose(saved, moved, rel_tol=1e-9, abs_tol=1e-12)
