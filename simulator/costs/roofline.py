"""What a step should cost by the data sheet: for models and GPUs that nobody has measured.

Each part of a step takes the longer of moving its bytes and doing its FLOPs, at the shares of the
GPU's bandwidth and FLOP/s that kernels were measured to reach there, or reach elsewhere.
docs/cost-models.md says how far this is from composed profiles.

The shares of the GPUs in `efficiencies.yaml` were fitted to kernel tables by `python -m
tools.profiles.fit_efficiencies`. Cards with the chip, or of the family, of one of these
take its shares; all others those of `USUAL`. GPUs without NVLink pass their sums through the host,
whose bandwidth depends little on the card's bus: 24 GB/s on the server of RTX PRO 6000s (PCIe 5.0)
that was measured. More than two on PCIe 4.0 reach `FEW_LANES`.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml

from simulator.costs.noise import REGIMES
from simulator.costs.piecewise import PiecewiseCost
from simulator.models.dtypes import HALF, bytes_of
from simulator.models.gpus import GPUS, NVLINK, Gpu
from simulator.models.spec import ModelSpec

EFFICIENCIES = Path(__file__).parent / "efficiencies.yaml"

STREAM_SHARE = 0.9  # of the bandwidth, by kernels that only stream
SMALL_KERNELS = 5  # per layer: two norms, rotary embedding, cache write, activation
LAUNCH = 2e-6  # s; 2.4 to 2.7 us each in LLMServingSim's table of an RTX PRO 6000
TILE = 64  # queries that FlashAttention-2 computes at once
MAX_TABLE_TOKENS = 1 << 16  # tokens in the table; beyond, it goes on straight


@dataclass(frozen=True)
class Efficiency:
    """Shares of bandwidth, FLOP/s and link that kernels reach; latencies in seconds.

    The usual ones were rounded from an earlier fit to kernels on A100, H100 and H200.
    coefficients.yaml has the medians of today's; `UNMEASURED` was judged with the values here.
    """

    weights: float = 0.78  # of the bandwidth, in matrix products of few tokens
    compute: float = 0.75  # of the 16-bit FLOP/s, in those of many
    compute_fp8: float = 0.75  # of the fp8 FLOP/s
    cache: float = 0.78  # of the bandwidth, in decode attention
    attention: float = 0.65  # of the 16-bit FLOP/s, in prompts' attention
    launch: float = 12e-6  # of attention, per layer
    link: float = 0.35  # of the link's bandwidth, in an all-reduce
    link_latency: float = 13e-6  # of an all-reduce
    error: float = 0.0  # median relative error of a roofline with these shares, if measured
    measured: str = ""  # the GPU that it was measured on

    def flops(self, gpu: Gpu, dtype: str) -> float:
        """Return the FLOP/s that products with weights of a dtype reach on a GPU."""
        peak = gpu.flops(dtype)
        return peak * (self.compute if peak == gpu.bf16_flops else self.compute_fp8)


USUAL = Efficiency()
AMD_SHARE = 0.57
"""Of the usual speeds, what AMD's GPUs reach under vLLM. Two sources count the same: Llama-3.1-405B
in fp8 on eight MI300X (Oracle's blog of 2024, 1 to 256 sequences) reaches 0.59 to 0.66 of them, the
servers of a blind set on MI300X 0.41 to 0.53."""
UNMEASURED = 0.3
"""Standard deviation of log(measured / predicted) of steps on a GPU without tables: an estimate.
With the usual shares the steps of Llama-3-8B and Qwen3-32B on each of ten GPUs with tables are off
by 0.11 to 0.29 (root mean square); none of these is AMD's."""
UNPACKED = 0.1  # the same of 4-bit weights, whose products no table has: AWQ's take 10 to 17 % more
MAD_TO_SD = 1.4826  # standard deviation of a normal variable / median of its absolute values
GA102 = {"A6000": 0.67, "A10G": 0.67, "A10": 0.67, "A5000": 0.67, "RTX-3090": 0.67}
"""Of the FLOP/s, what products reach on chips whose clocks give way: Llama-3.1-8B's of 512 to 2,048
tokens on an A6000 (LLMServingSim's first profile, MIT); an RTX 4090 beats its data sheet's."""
PCIE_GPU = "RTX-PRO-6000"
PCIE_4 = 32e9  # bytes/s
FEW_LANES = 8.8e9
"""Bytes/s in an all-reduce between four GPUs on PCIe 4.0: 67 MB take 11.4 ms on RTX 4090s and 11.6
on A100s without NVLink under vLLM 0.6.6 (besthub.dev, "Why NVLink supercharges Llama 3 70B"). Four
L40S reach 5.1 and eight 1.4 in AIConfigurator's table, which their profiles take."""
OVER_PCIE = "; sums over PCIe (two RTX 4090 took 9 times the TTFT and 1.3 times the TPOT predicted)"
"""Of a blind set: the cards' lanes were not recorded."""


@cache
def measured_efficiencies() -> dict[str, Efficiency]:
    """Read the file that comes with the package."""
    raw = yaml.safe_load(EFFICIENCIES.read_text())
    return {
        name: Efficiency(**{k: float(v) for k, v in shares.items()}, measured=name)
        for name, shares in raw["gpus"].items()
    }


def efficiency_of(gpu: Gpu) -> Efficiency:
    """Return what was measured on a GPU, or on the likest, or what is usual."""
    known = measured_efficiencies()
    if gpu.name in known:
        return known[gpu.name]
    if gpu.name.startswith("MI3"):
        return _slower(USUAL, AMD_SHARE)
    found = known.get(gpu.similar, USUAL)
    found = replace(found, compute=GA102.get(gpu.name, found.compute))
    if gpu.link_bandwidth > NVLINK:
        return found
    link = known[PCIE_GPU].link * GPUS[PCIE_GPU].link_bandwidth / gpu.link_bandwidth
    return replace(found, link=link, link_latency=known[PCIE_GPU].link_latency)


def _slower(usual: Efficiency, share: float) -> Efficiency:
    """Return shares of which that share is reached, and latencies as much longer."""
    speeds = ("weights", "compute", "compute_fp8", "cache", "attention", "link")
    return replace(
        usual,
        **{name: getattr(usual, name) * share for name in speeds},
        launch=usual.launch / share,
        link_latency=usual.link_latency / share,
    )


def roofline(
    model: ModelSpec,
    gpu: Gpu,
    *,
    tensor_parallel_size: int = 1,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    routed: bool = True,
) -> PiecewiseCost:
    """Make the cost of a model's kernels on a GPU out of their sizes alone.

    `dtype` is that of the weights, fp8, int8 and int4 among them, `auto` the published one; the
    activations are 16 bits, and the products are done in fp8 only where GPU and weights are.
    `routed=False` leaves out the experts that tokens choose. Raises ValueError for a
    tensor_parallel_size that does not fit the heads.
    """
    model.check_parallel(tensor_parallel_size)
    gpus, layers = tensor_parallel_size, model.num_hidden_layers
    efficiency, dtype = efficiency_of(gpu), model.weight_dtype(dtype)
    bandwidth = gpu.bandwidth * efficiency.weights
    flops = gpu.bf16_flops * efficiency.compute
    tokens = _grid(model, gpu, dtype, routed)
    dense = products_seconds(model, gpu, dtype, tokens, routed=routed) / gpus
    dense += layers * small_kernels(model, gpu, tokens, gpus)
    dense += 2 * layers * all_reduce(gpu, gpus, tokens * model.hidden_size * HALF)
    cached = model.kv_bytes_per_token(kv_cache_dtype, gpus)
    reached = gpu.bf16_flops * efficiency.attention
    read = cached / (gpu.bandwidth * efficiency.cache)
    pair = model.attention_flops_per_pair / gpus / reached
    # A latent's few bytes serve all heads: arithmetic may take longer.
    if (own := model.latent) is not None:
        scores = 2 * layers * model.num_attention_heads * (own.cached + own.kv_lora_rank) / gpus
        read = max(read, scores / reached)
    mixed = max(read, TILE * pair) if gpu.tiles_decodes and model.latent is None else read
    states = 2 * model.state_bytes / gpus / (gpu.bandwidth * efficiency.cache)
    scaled = f" scaled to {efficiency.measured} kernels" if efficiency.measured else ""
    windowed, full = model.windowed, 1.0 - model.windowed
    return PiecewiseCost(
        dense=np.column_stack([tokens, dense]).tolist(),
        head=model.head_parameters * HALF / gpus / bandwidth,
        head_per_sequence=2 * model.head_parameters / gpus / flops,
        decode=layers * efficiency.launch,
        decode_per_context=full * read,
        prefill=layers * efficiency.launch,
        prefill_per_pair=full * pair,
        mixed_per_context=full * mixed,
        mixed_per_sequence=states,
        state_per_sequence=states,
        window=model.sliding_window,
        decode_per_window=windowed * read,
        prefill_per_window_pair=windowed * pair,
        mixed_per_window=windowed * mixed,
        name=f"roofline{scaled}",
        residuals=dict.fromkeys(REGIMES, spread_of(gpu, dtype)),
        unmeasured=f"kernels of {model.name} in {dtype} on {gpu.name}{lacking_sums(gpu, gpus)}",
    )


def spread_of(gpu: Gpu, dtype: str) -> float:
    """Return the standard deviation of log(measured / predicted) of a roofline's steps."""
    own = measured_efficiencies().get(gpu.name)
    return max(MAD_TO_SD * own.error, UNPACKED * (bytes_of(dtype) < 1)) if own else UNMEASURED


def _grid(model: ModelSpec, gpu: Gpu, dtype: str, routed: bool) -> npt.NDArray[np.float64]:
    """Choose the token counts of the table: dense enough for experts, exact at the ridge."""
    one, two = products_seconds(model, gpu, dtype, np.array([1.0, MAX_TABLE_TOKENS]), routed=routed)
    ridge = one / two * MAX_TABLE_TOKENS
    counts = np.concatenate([np.geomspace(1, MAX_TABLE_TOKENS, 200), [ridge, ridge + 1]])
    return np.unique(np.clip(np.floor(counts), 1, None))


def products_seconds(
    model: ModelSpec,
    gpu: Gpu,
    dtype: str,
    tokens: npt.NDArray[np.float64],
    efficiency: Efficiency | None = None,
    *,
    routed: bool = True,
) -> npt.NDArray[np.float64]:
    """Return the seconds of the layers' matrix products on one GPU; see `roofline`."""
    share = efficiency or efficiency_of(gpu)
    experts = np.array([routed * model.expected_experts(int(count)) for count in tokens])
    size = np.array([model.matrix_bytes(met, dtype) for met in experts])
    moving = size / (gpu.bandwidth * share.weights)
    products = 2 * model.matrix_bytes(routed * model.num_experts_per_tok, None) * tokens
    return np.asarray(np.maximum(moving, products / share.flops(gpu, dtype)))


def small_kernels(
    model: ModelSpec, gpu: Gpu, tokens: npt.NDArray[np.float64], tensor_parallel_size: int = 1
) -> npt.NDArray[np.float64]:
    """Return a layer's seconds in norms, rotary embedding, cache write and activation.

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
    """Return the seconds to add up so many bytes over the GPUs of one server, in a ring."""
    share = efficiency_of(gpu)
    latency = share.link_latency if gpus > 1 else 0.0
    passed, link = 2 * (gpus - 1) / gpus * size, gpu.link_bandwidth * share.link
    if gpus > 2 and gpu.link_bandwidth <= PCIE_4:
        link = min(link, FEW_LANES)
    return latency + passed / link


def lacking_sums(gpu: Gpu, gpus: int) -> str:
    """Say that nobody measured how so many of a GPU add up, where they do it over PCIe; else ""."""
    return OVER_PCIE if gpus > 1 and gpu.link_bandwidth <= NVLINK else ""
