"""Measurements that cannot be: more FLOP/s than the GPUs have, decodes faster than their bytes."""

from collections.abc import Mapping

from simulator.core.engine_config import EngineConfig
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec

FOUR_BIT_SPEEDUP = 3.0  # over 8 bits: B300's data sheet; others' say 2 or none
EIGHT_BIT_SPEEDUP = 2.0  # over 16 bits


def why_impossible(
    measured: Mapping[str, float],
    model: ModelSpec,
    gpu: Gpu,
    engine: EngineConfig,
    *,
    servers: int,
    computed: float,
    output: float,
) -> str:
    """Say by how much a run's measurements beat the data sheet; "" where they do not.

    `measured` has `request_throughput` (requests/s) and `mean_tpot_ms`, where they were recorded.
    `servers` are engine replicas, data-parallel ranks among them; a request computes `computed`
    prompt tokens and `output` tokens in the mean. Both bounds are generous: attention, activations
    and the KV cache cost nothing, kernels reach the peak of the data sheet, and a step of decodes
    reads the experts of a single token.
    """
    dtype, tensor = engine.weight_dtype, engine.tensor_parallel_size
    rate = measured.get("request_throughput", 0.0)
    head = 2 * model.head_parameters
    layers = model.flops_per_token - head
    needed = rate * (layers * (computed + max(0.0, output - 1.0)) + head * output)
    gpus = tensor * engine.pipeline_parallel_size
    peak = peak_flops(gpu, model.weight_dtype(dtype)) * gpus * servers
    if needed > peak:
        return (
            f"{rate:.4g} requests/s of {computed:,.0f} prompt tokens need {needed:.3g} FLOP/s; "
            f"{gpus * servers} x {gpu.name} have {peak:.3g} at most"
        )
    tpot = measured.get("mean_tpot_ms", 0.0) / 1e3
    experts = 0.0 if engine.data_parallel_size > 1 else model.expected_experts(1)
    read = model.matrix_bytes(experts, dtype) / tensor  # one stage after the other
    least = read / gpu.bandwidth
    if 0 < tpot < least:
        return (
            f"a token takes {tpot * 1e3:.4g} ms; to read {read:.3g} bytes of weights takes "
            f"{gpu.name} {least * 1e3:.4g} ms at least"
        )
    return ""


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Give the most FLOP/s that any GPU of its kind could have for weights of a dtype."""
    eight = gpu.fp8_flops or EIGHT_BIT_SPEEDUP * gpu.bf16_flops
    if "fp4" in dtype or dtype in ("awq", "gptq", "int4"):
        return FOUR_BIT_SPEEDUP * eight
    return eight if dtype.startswith(("fp8", "int8")) else gpu.bf16_flops
