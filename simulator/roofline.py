"""What a step should cost by the data sheet: for models and GPUs that nobody has measured.

Each part of a step takes the longer of moving its bytes and doing its FLOPs, at the shares of the
GPU's bandwidth and FLOP/s that such kernels reach elsewhere. The shares are rounded medians of the
kernels behind the shipped profiles (Llama-3-8B on A100, H100 and H200). Their steps come out with
a median error of 6 % and a 95th percentile of 20 %; those of Llama-3.1-8B on RTX 4090 and RTX PRO
6000 (LLMServingSim), which the shares have not seen, mixed ones included, with 12 % and 32 %.
"""

import numpy as np
import numpy.typing as npt

from simulator.hardware import Gpu
from simulator.model import HALF, ModelSpec
from simulator.piecewise import PiecewiseCost

OVERHEAD = 0.8e-3
"""Seconds per step that the engine adds to its kernels: scheduling, sampling, input and output.
Kernel sums fall short of vLLM V1 by 1.0 ms (Llama-2-7B, batch 1, H100, 0.11), by 0.6 ms (the same
server under load) and by about 1 ms (Llama-3.1-8B, RTX PRO 6000, 0.19)."""

BANDWIDTH_SHARE = 0.78  # 0.69 to 0.83 for weights, 0.77 to 0.89 for the KV cache
COMPUTE_SHARE = 0.75  # 0.72 to 0.80 in large matrix products
ATTENTION_SHARE = 0.65  # 0.62 to 0.71 in prompts' attention
STREAM_SHARE = 0.9  # of the bandwidth, by kernels that only stream
SMALL_KERNELS = 5  # per layer: two norms, rotary embedding, cache write, activation
LAUNCH = 2e-6  # s; 2.4 to 2.7 us each in LLMServingSim's table of an RTX PRO 6000
ATTENTION_LAUNCH = 12e-6  # s per layer
ALL_REDUCE_LATENCY = 13e-6  # s; 12 us on H100 and H200, 25 us on A100
LINK_SHARE = 0.35  # 0.3 to 0.5 over NVLink; over PCIe rather 0.1
TILE = 64  # queries that FlashAttention-2 computes at once
LONGEST = 1 << 16  # tokens in the table; beyond, it goes on straight


def roofline(
    model: ModelSpec,
    gpu: Gpu,
    *,
    tensor_parallel_size: int = 1,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
) -> PiecewiseCost:
    """Make the cost of a model on a GPU out of their sizes alone.

    `dtype` is that of the weights, fp8, int8 and int4 among them; the activations are 16 bits, and
    the products are done in fp8 only where GPU and weights are. Raises ValueError for a
    tensor_parallel_size that does not fit the heads.
    """
    model.check_parallel(tensor_parallel_size)
    gpus, layers = tensor_parallel_size, model.num_hidden_layers
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE
    flops = gpu.bf16_flops * COMPUTE_SHARE
    tokens = _grid(model, gpu, dtype)
    dense = _products(model, gpu, dtype, tokens) / gpus
    dense += layers * small_kernels(model, gpu, tokens, gpus)
    if gpus > 1:
        dense += 2 * layers * all_reduce(gpu, gpus, tokens * model.hidden_size * HALF)
    read = model.kv_bytes_per_token(kv_cache_dtype) * model.kv_share(gpus) / bandwidth
    pair = model.attention_flops_per_pair / gpus / (gpu.bf16_flops * ATTENTION_SHARE)
    return PiecewiseCost(
        dense=np.column_stack([tokens, dense]).tolist(),
        overhead=OVERHEAD,
        head=model.head_parameters * HALF / gpus / bandwidth,
        head_per_sequence=2 * model.head_parameters / gpus / flops,
        decode=layers * ATTENTION_LAUNCH,
        decode_per_context=read,
        prefill=layers * ATTENTION_LAUNCH,
        prefill_per_pair=pair,
        mixed_per_context=max(read, TILE * pair) if gpu.tiles_decodes else read,
        name="roofline",
    )


def _grid(model: ModelSpec, gpu: Gpu, dtype: str) -> npt.NDArray[np.float64]:
    """Choose the token counts of the table: dense enough for experts, exact at the ridge."""
    one, two = _products(model, gpu, dtype, np.array([1.0, LONGEST]))
    ridge = one / two * LONGEST
    counts = np.concatenate([np.geomspace(1, LONGEST, 200), [ridge, ridge + 1]])
    return np.unique(np.clip(np.floor(counts), 1, None))


def _products(
    model: ModelSpec, gpu: Gpu, dtype: str, tokens: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Give the seconds of the layers' matrix products on one GPU."""
    width = model.linear_bytes_per_parameter(dtype)
    experts = np.array([model.experts_met(int(count)) for count in tokens])
    weights = np.array([model.linear_parameters(met) for met in experts])
    moving = weights * width / (gpu.bandwidth * BANDWIDTH_SHARE)
    products = 2 * model.linear_parameters(model.num_experts_per_tok) * tokens
    return np.asarray(np.maximum(moving, products / (gpu.flops(dtype) * COMPUTE_SHARE)))


def small_kernels(
    model: ModelSpec, gpu: Gpu, tokens: npt.NDArray[np.float64], tensor_parallel_size: int = 1
) -> npt.NDArray[np.float64]:
    """Give a layer's seconds in norms, rotary embedding, cache write and activation.

    The norms, each fused with an addition, read and write two hidden states; the rotary
    embedding reads and writes queries and keys, the cache write keys and values; the activation
    reads two and writes one of the MLP's inner states.
    """
    query = model.num_attention_heads * model.head_dim
    key = model.num_key_value_heads * model.head_dim
    inner = model.intermediate_size * max(1, model.num_experts_per_tok)
    shared = (2 * (query + key) + 4 * key + 3 * inner) / tensor_parallel_size
    speed = STREAM_SHARE * gpu.bandwidth
    return SMALL_KERNELS * LAUNCH + tokens * (8 * model.hidden_size + shared) * HALF / speed


def all_reduce(gpu: Gpu, gpus: int, size: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Give the seconds to add up so many bytes over the GPUs of one server, in a ring."""
    passed = 2 * (gpus - 1) / gpus * size
    return ALL_REDUCE_LATENCY + passed / (gpu.link_bandwidth * LINK_SHARE)
