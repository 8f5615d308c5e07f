"""Compose a model's steps on one GPU of a server out of kernel times, at any TP degree and dtype.

A step is what its layers call: four matrix products (or a mixture of experts), attention, and
small kernels bound by memory; twice per layer an all-reduce if several GPUs share it; the head and
the sampler once. What no table times is reckoned by the roofline, at the efficiency that other
kernels of the same GPU reach (`simulator/costs/roofline.py`), and noted.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calibration.errors import Floats
from calibration.kernel_tables.aiconfigurator import AllReduce, Products, read_attention
from calibration.kernel_tables.llmservingsim import LayerTables
from calibration.kernel_tables.product_slowdown import slowdown
from calibration.kernel_tables.tables import GpuTables
from calibration.kernel_tables.timed_steps import TimedSteps
from simulator.costs.roofline import LAUNCH, all_reduce, products_seconds, small_kernels
from simulator.models.spec import HALF, ModelSpec
from simulator.util.errors import HeadwayError

MAX_SEQUENCES = 1024
SAMPLER_SECONDS = 25e-6  # s
SAMPLER_BYTES = 8  # per logit: LLMServingSim's sampler on RTX 4090 and RTX PRO 6000, 7 to 9
GEMM_DTYPES = {"fp8": "fp8", "fp8_e4m3": "fp8", "nvfp4": "nvfp4", "bfloat16": "bfloat16"}
QUANTIZED_INPUTS = {"nvfp4": 4}
"""Products of a layer whose input vLLM quantizes in a kernel of its own."""
EXTRAPOLATED = np.array([1.5, 2.0, 3.0, 4.0, 6.0, 8.0])  # times the tokens of a table
ROOFLINE_TOKENS = np.unique(np.floor(np.geomspace(1, 16384, 60)))


@dataclass(frozen=True)
class Target:
    """What to compose: a model in a precision, on so many GPUs."""

    model: ModelSpec
    tables: GpuTables
    gpus: int = 1
    dtype: str = "bfloat16"  # of the weights
    kv_cache_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        try:
            self.model.check_parallel(self.gpus)
        except ValueError as error:
            raise HeadwayError(f"--tp: {str(error).partition(': ')[2]}") from None
        model = self.model
        if model.latent is not None or model.sliding_window:
            what = "latent attention" if model.latent is not None else "a sliding window"
            raise HeadwayError(
                f"--model: {model.name} has {what}, of which there are no tables; "
                "`cost: {kind: roofline}` prices it"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Query heads, KV heads and head size of one GPU."""
        model = self.model
        kv_heads = max(1, model.num_key_value_heads // self.gpus)
        return model.num_attention_heads // self.gpus, kv_heads, model.head_dim


@dataclass(frozen=True)
class Kernels:
    """Measured times in seconds, all layers together, by the numbers of tokens and sequences."""

    tokens: Floats  # the grid of `dense`
    dense: Floats  # matrix products, small kernels and all-reduce
    counts: Floats  # the grid of `head`
    head: Floats  # output projection and sampler
    attention: TimedSteps
    notes: list[str] = field(default_factory=list)  # what was not measured
    sources: frozenset[str] = frozenset()
    timed: float = np.inf  # tokens up to which `dense` was


class NotTimedError(HeadwayError):
    """No table times a model of this shape in this precision on this GPU."""


def compose_kernels(data: Path, target: Target) -> Kernels:
    """Read or reckon what the target's steps are made of."""
    gpu = target.tables.gpu.name
    if not target.tables.layers:
        return _compose_grid(data, target)
    layers = LayerTables(data, target.tables, target.model, target.gpus)
    if not layers.timed:
        raise NotTimedError(f"{target.model.name} at TP {target.gpus} on {gpu}")
    if {target.dtype, target.kv_cache_dtype} != {"bfloat16"}:
        raise NotTimedError(f"other dtypes than bfloat16 on {gpu}")
    return _compose_layers(data, target, layers)


def _compose_layers(data: Path, target: Target, layers: LayerTables) -> Kernels:
    """Compose the layers of a model that LLMServingSim timed as it is."""
    tokens, dense = layers.dense()
    timed = tokens[-1]
    tokens, dense = _extrapolate(tokens, dense)
    attention = layers.attention()
    notes: list[str] = []
    if target.model.num_experts:
        dense = dense + layers.experts(tokens)
        if target.gpus > 1:
            notes.append(f"experts: timed on one GPU; each of {target.gpus} has its share")
    dense = dense + _all_reduces(data, target, tokens, notes)
    counts, head = layers.head()
    sources = {"LLMServingSim"} | ({"AIConfigurator"} if target.gpus > 1 else set())
    head = head + _gather_logits(data, target, counts)
    attention = attention.select(attention.sequences > 0)
    return Kernels(tokens, dense, counts, head, attention, notes, frozenset(sources), timed)


def _extrapolate(tokens: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Let products go on beyond their table with the mean slope of its upper half.

    All-reduces come on top of that: they have tables of their own, which reach further.
    """
    most, half = tokens[-1], tokens[-1] / 2
    slope = (seconds[-1] - float(np.interp(half, tokens, seconds))) / (most - half)
    more = most * EXTRAPOLATED
    return np.append(tokens, more), np.append(seconds, seconds[-1] + slope * (more - most))


def _compose_grid(data: Path, target: Target) -> Kernels:
    """Compose a model of any shape from AIConfigurator's grids."""
    model, gpu, layers = target.model, target.tables.gpu, target.model.num_hidden_layers
    notes: list[str] = []
    tokens, products = compose_products(data, target, notes)
    small = small_kernels(model, gpu, tokens, target.gpus)
    small = small + QUANTIZED_INPUTS.get(target.dtype, 0) * LAUNCH
    dense = layers * (products + small)
    dense += _all_reduces(data, target, tokens, notes)
    head = Products(data, target.tables, "bfloat16")
    logits = head.seconds(model.vocab_size // target.gpus, model.hidden_size)
    there = np.isfinite(logits) & (head.tokens <= MAX_SEQUENCES)
    counts, logits = head.tokens[there], logits[there]
    sampler = SAMPLER_SECONDS + counts * SAMPLER_BYTES * model.vocab_size / gpu.bandwidth
    head_seconds = logits + sampler + _gather_logits(data, target, counts)
    attention = _attention(data, target, notes)
    sources = frozenset({"AIConfigurator"})
    return Kernels(tokens, dense, counts, head_seconds, attention, notes, sources)


def _attention(data: Path, target: Target, notes: list[str]) -> TimedSteps:
    """Read decodes and whole prompts, each by themselves; the grids have no others."""
    place = (target.shape, target.kv_cache_dtype)
    decode, more = read_attention(data, target.tables, "generation", *place)
    prefill, also = read_attention(data, target.tables, "context", *place)
    prefill = prefill[prefill["isl"] > 1]  # one token is timed as a decode
    notes += more + also
    decodes = (decode[name].to_numpy(float) for name in ("N", "S", "seconds"))
    prompts = (prefill[name].to_numpy(float) for name in ("N", "isl", "seconds"))
    both = TimedSteps.concatenated(TimedSteps.of_decodes(*decodes), TimedSteps.of_prompts(*prompts))
    return replace(both, attention=target.model.num_hidden_layers * both.attention)


def compose_products(data: Path, target: Target, notes: list[str]) -> tuple[Floats, Floats]:
    """Give token counts and one layer's matrix products: measured, or reckoned and noted."""
    model, gpus, tables = target.model, target.gpus, target.tables
    table = Products(data, tables, GEMM_DTYPES.get(target.dtype, target.dtype))
    if not table.measured:
        notes.append(f"matrix products: none were timed with {target.dtype} weights; by roofline")
        reckoned = products_seconds(model, tables.gpu, target.dtype, ROOFLINE_TOKENS)
        return ROOFLINE_TOKENS, reckoned / gpus / model.num_hidden_layers
    seconds = table.of_layer(model, gpus)
    if model.num_experts:
        notes.append("experts: none were timed on this GPU; by roofline")
        dense_only = replace(model, num_experts=0, num_experts_per_tok=0, intermediate_size=1)
        whole, rest = (
            products_seconds(one, tables.gpu, target.dtype, table.tokens)
            for one in (model, dense_only)
        )
        seconds = seconds + np.maximum(whole - rest, 0.0) / gpus / model.num_hidden_layers
    seconds = seconds * slowdown(tables, table.tokens)
    there = np.isfinite(seconds)
    if target.dtype != "bfloat16":
        there &= ~_unaligned(table.tokens)
    return table.tokens[there], seconds[there]


def _unaligned(tokens: Floats) -> npt.NDArray[np.bool_]:
    """Tell which token counts of quantized products are left out.

    On Hopper the table's fp8 products take up to 2.6 times as long at odd counts as at the even
    ones beside them. Up to 512 tokens vLLM pads a step to a CUDA graph, of a multiple of 8 above
    16; beyond, servers do not show it: without the odd counts the mean TTFT of 20 runs of
    Llama-3.1-70B on H200 is off by 11 % instead of 14 %, mean TPOT by 5 % instead of 7 %.
    """
    return np.asarray((tokens > 16) & (tokens % 8 != 0))


def _all_reduces(data: Path, target: Target, tokens: Floats, notes: list[str]) -> Floats:
    """Give the seconds of all layers' all-reduces, two each, of 16-bit hidden states."""
    if target.gpus == 1:
        return np.zeros(len(tokens))
    table = AllReduce(data, target.tables, target.gpus)
    size = tokens * target.model.hidden_size * HALF
    if table.measured:
        each = table.seconds(size, norm=True)
    else:
        notes.append(f"all-reduce: not timed between {target.gpus} of these GPUs; by its link")
        each = all_reduce(target.tables.gpu, target.gpus, size)
    return 2 * target.model.num_hidden_layers * each


def _gather_logits(data: Path, target: Target, counts: Floats) -> Floats:
    """Give the seconds to collect the logits of all GPUs: half of what their all-reduce takes."""
    if target.gpus == 1:
        return np.zeros(len(counts))
    table = AllReduce(data, target.tables, target.gpus)
    size = counts * target.model.vocab_size * HALF
    if table.measured:
        return table.seconds(size) / 2
    return all_reduce(target.tables.gpu, target.gpus, size) / 2
