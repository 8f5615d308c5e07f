"""Compose a model's steps on one GPU of a server out of kernel times, at any TP degree and dtype.

A step is what its layers call: four matrix products (or a mixture of experts), attention, and
small kernels bound by memory; twice per layer an all-reduce if several GPUs share it; the head and
the sampler once. Layers with a sliding window have the kernels of those without.
What no table times is reckoned by the roofline, at the efficiency that other kernels of the same
GPU reach (`simulator/costs/roofline.py`), and noted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calibration.errors import Floats
from simulator.core.engine_config import UNIFORM
from simulator.costs.roofline import (
    LAUNCH,
    STREAM_SHARE,
    all_reduce,
    products_seconds,
    small_kernels,
)
from simulator.costs.split import FULL, THREAD_BLOCKS
from simulator.models.dtypes import HALF, bytes_of
from simulator.models.spec import ModelSpec
from simulator.util.errors import HeadwayError, ScenarioError
from tools.profiles.aiconfigurator import AllReduce, Experts, Products
from tools.profiles.attention import (
    NO_LINEAR,
    HeadShape,
    LinearKernels,
    TimedSteps,
    has_latent,
    has_linear,
    read_attention,
    read_latent,
    read_linear,
)
from tools.profiles.llmservingsim import LayerTables
from tools.profiles.product_slowdown import UNSTEADY, slowdown, sustained
from tools.profiles.tables import GpuTables, NotTimedError, interpolate

MAX_SEQUENCES = 1024
SAMPLER_SECONDS = 25e-6  # s
SAMPLER_BYTES = 8  # per logit: LLMServingSim's sampler on RTX 4090 and RTX PRO 6000, 7 to 9
GAP = 1.3e-6  # s
"""Before each kernel of a CUDA graph on H100: hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles.
LLMServingSim's times are those of the kernels alone; the others' have their gaps within."""
KERNELS = 10  # per layer: LLMServingSim counts 324 in a step of 32 layers, 644 in one of 64
GEMM_DTYPES = {"fp8_e4m3": "fp8"}
QUANTIZED_INPUTS = {"nvfp4": 4}
"""Products of a layer whose input vLLM quantizes in a kernel of its own."""
SHARED_BESIDE = 256
"""Tokens up to which vLLM runs shared experts on a stream of their own, beside those that tokens
choose (since 0.11.1; pull requests 26440, which measured 1.3 of DeepSeek-R1's 23.35 ms per token
saved on eight B200s at 32 sequences, and 28406, which set the bound)."""
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
        if self.gpus < 1:
            raise HeadwayError(f"--tp: must be at least 1, not {self.gpus}")
        try:
            self.model.check_parallel(self.gpus)
        except ScenarioError as error:
            raise HeadwayError(f"--tp: {error.what}") from None

    @property
    def shape(self) -> HeadShape:
        """The heads of one GPU."""
        model = self.model
        kv_heads = max(1, model.num_key_value_heads // self.gpus)
        return HeadShape(model.num_attention_heads // self.gpus, kv_heads, model.head_dim)


Routings = Mapping[str, tuple[Floats, Floats]]
"""Token counts and seconds, by the routing of tokens to experts."""


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
    experts: Routings = field(default_factory=dict)  # of all layers, in slices; not in `dense`
    whole_experts: Routings = field(default_factory=dict)  # the same, with expert parallelism
    marlin: Routings = field(default_factory=dict)  # in slices, with Marlin's kernel
    wait_per_key: float = 0.0  # of the longest sequence beyond the mean, where none is split
    linear: LinearKernels = NO_LINEAR  # of which `dense` has `per_token`

    @property
    def steps(self) -> Floats:
        """Seconds of `dense`, and of experts that tokens choose evenly."""
        if not self.experts:
            return self.dense
        return self.dense + interpolate(self.tokens, *self.experts[UNIFORM])


def compose_kernels(data: Path, target: Target) -> Kernels:
    """Read or reckon what the target's steps are made of."""
    gpu, model = target.tables.gpu.name, target.model
    if not target.tables.layers:
        if model.latent is not None and not has_latent(data, target.tables, model):
            raise NotTimedError(f"latent attention as that of {model.name} on {gpu}")
        if model.linear is not None and not has_linear(data, target.tables):
            raise NotTimedError(f"linear attention on {gpu}")
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
    tokens, dense = _extrapolate(tokens, dense + GAP * KERNELS * target.model.num_hidden_layers)
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
    wait = layers.wait_per_key(FULL * THREAD_BLOCKS * target.tables.multiprocessors)
    return Kernels(
        tokens=tokens,
        dense=dense,
        counts=counts,
        head=head,
        attention=attention,
        notes=notes,
        sources=frozenset(sources),
        timed=timed,
        wait_per_key=wait,
    )


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
    dense = products + layers * small
    experts, whole, marlin = _experts(data, target, tokens, notes)
    dense = dense - _hidden_products(data, target, tokens, experts)
    linear = NO_LINEAR
    if model.linear is not None:
        linear = read_linear(data, target.tables, model, target.gpus)
        dense += linear.per_token * tokens
    dense += _all_reduces(data, target, tokens, notes)
    head = Products(data, target.tables, "bfloat16")
    logits = head.seconds(model.vocab_size // target.gpus, model.hidden_size)
    there = np.isfinite(logits) & (head.tokens <= MAX_SEQUENCES)
    counts, logits = head.tokens[there], logits[there]
    sampler = SAMPLER_SECONDS + counts * SAMPLER_BYTES * model.vocab_size / gpu.bandwidth
    head_seconds = logits + sampler + _gather_logits(data, target, counts)
    if model.latent is not None:
        precision = target.dtype, target.kv_cache_dtype
        heads = model.num_attention_heads // target.gpus
        latent = read_latent(data, target.tables, heads, *precision)
        dense += layers * interpolate(tokens, latent.tokens, latent.projections)
        attention = replace(latent.steps, attention=layers * latent.steps.attention)
    else:
        attention = _attention(data, target, notes)
    return Kernels(
        tokens=tokens,
        dense=dense,
        counts=counts,
        head=head_seconds,
        attention=attention,
        notes=notes,
        sources=frozenset({"AIConfigurator"}),
        experts=experts,
        whole_experts=whole,
        marlin=marlin,
        linear=linear,
    )


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
    return replace(both, attention=target.model.attention_layers * both.attention)


def compose_products(data: Path, target: Target, notes: list[str]) -> tuple[Floats, Floats]:
    """Return token counts and all layers' matrix products: measured, or reckoned and noted.

    Without the experts that tokens choose.
    """
    model, gpus, tables = target.model, target.gpus, target.tables
    dtype, table = _dtype(target), _products(data, target)
    if not table.measured:
        notes.append(f"matrix products: none were timed with {dtype} weights; by roofline")
        reckoned = products_seconds(model, tables.gpu, target.dtype, ROOFLINE_TOKENS, routed=False)
        return ROOFLINE_TOKENS, reckoned / gpus
    seconds = np.zeros(len(table.tokens))
    if model.latent is None:
        seconds = model.attention_layers * table.of_attention(model, gpus)
    if model.linear is not None:
        seconds = seconds + model.state_layers * table.of_linear(model, gpus)
    hidden, dense = model.hidden_size, model.dense_layers
    if model.num_experts:
        routed = model.num_hidden_layers - dense
        router = Products(data, tables, "bfloat16")
        choosing = np.interp(table.tokens, router.tokens, router.seconds(model.num_experts, hidden))
        seconds = seconds + routed * choosing
        if model.num_shared_experts:
            seconds = seconds + routed * _shared_experts(table, target)
        if dense:
            seconds = seconds + dense * table.of_mlp(hidden, model.dense_intermediate_size // gpus)
    else:
        inner = model.intermediate_size // gpus
        seconds = seconds + model.num_hidden_layers * table.of_mlp(hidden, inner)
    seconds = seconds * slowdown(tables, table.tokens)
    if (tables.key, dtype) not in UNSTEADY:
        seconds = sustained(table.tokens, seconds)
    there = np.isfinite(seconds)
    if dtype != "bfloat16":
        there &= ~_unaligned(table.tokens)
    return table.tokens[there], seconds[there]


def _dtype(target: Target) -> str:
    """Return the dtype of all products but those of the experts that tokens choose."""
    return "bfloat16" if target.dtype == "mxfp4" else target.dtype


def _products(data: Path, target: Target) -> Products:
    """Return the table of these products.

    Those with one scale a tensor stand for block-scaled ones, too: the tables' block-scaled ones
    were timed with their launches, at 56 us or more on Hopper and 170 on Blackwell, however small,
    of which a CUDA graph shows none. Where they take longer than that, both take as long.
    """
    dtype = _dtype(target)
    return Products(data, target.tables, GEMM_DTYPES.get(dtype, dtype))


def _shared_experts(table: Products, target: Target) -> Floats:
    """Return the seconds of one layer's shared experts at each token count of the table."""
    inner = target.model.num_shared_experts * target.model.intermediate_size
    return table.of_mlp(target.model.hidden_size, inner // target.gpus)


def _hidden_products(data: Path, target: Target, tokens: Floats, experts: Routings) -> Floats:
    """Return the seconds that all layers' shared experts run beside the chosen ones.

    At most the shorter of the two, and no more than the memory can serve: together they take at
    least as long as reading the weights of both.
    """
    model, gpus, tables = target.model, target.gpus, target.tables
    table = _products(data, target)
    if not model.num_shared_experts or not experts or not table.measured:
        return np.zeros(len(tokens))
    layers = model.num_hidden_layers - model.dense_layers
    alone = layers * _shared_experts(table, target) * slowdown(tables, table.tokens)
    shared = np.interp(tokens, table.tokens, alone)
    chosen = np.interp(tokens, *experts[UNIFORM])
    met = np.array([model.expected_experts(int(count)) for count in tokens])
    widths = model.num_shared_experts * bytes_of(_dtype(target)) + met * bytes_of(target.dtype)
    size = layers * 3 * model.hidden_size * model.intermediate_size * widths / gpus
    both = np.maximum(np.maximum(shared, chosen), size / (STREAM_SHARE * tables.gpu.bandwidth))
    hidden = np.maximum(0.0, shared + chosen - both)
    return np.where(tokens <= SHARED_BESIDE, hidden, 0.0)


def _experts(
    data: Path, target: Target, tokens: Floats, notes: list[str]
) -> tuple[Routings, Routings, Routings]:
    """Get all layers' experts by routing: measured, or reckoned and noted.

    In slices, whole, and in slices with Marlin's kernel.
    """
    model, gpus, tables = target.model, target.gpus, target.tables
    if not model.num_experts:
        return {}, {}, {}
    layers = model.num_hidden_layers - model.dense_layers
    table = Experts(data, tables, model, target.dtype)
    sliced = table.seconds(gpus) if table.measured else None
    whole = table.seconds(gpus, whole=True) if table.measured and gpus > 1 else None
    if sliced is None:
        notes.append("experts: none were timed so on this GPU; by roofline")
        none, some = (
            products_seconds(model, tables.gpu, target.dtype, tokens, routed=routed)
            for routed in (False, True)
        )
        sliced = {UNIFORM: (tokens, np.maximum(some - none, 1e-9) / gpus / layers)}
    elif table.note:
        notes.append(table.note)
    return tuple(  # type: ignore[return-value]
        {name: (tokens, layers * seconds) for name, (tokens, seconds) in (each or {}).items()}
        for each in (sliced, whole, table.marlin(gpus))
    )


def _unaligned(tokens: Floats) -> npt.NDArray[np.bool_]:
    """Tell which token counts of quantized products are left out.

    On Hopper the table's fp8 products take up to 2.6 times as long at odd counts as at the even
    ones beside them. Up to 512 tokens vLLM pads a step to a CUDA graph, of a multiple of 8 above
    16; beyond, servers do not show it: without the odd counts the mean TTFT of 20 runs of
    Llama-3.1-70B on H200 is off by 11 % instead of 14 %, mean TPOT by 5 % instead of 7 %.
    """
    return np.asarray((tokens > 16) & (tokens % 8 != 0))


def _all_reduces(data: Path, target: Target, tokens: Floats, notes: list[str]) -> Floats:
    """Return the seconds of all layers' all-reduces, two each, of 16-bit hidden states."""
    each = _all_reduce(data, target, tokens * target.model.hidden_size * HALF, notes)
    return 2 * target.model.num_hidden_layers * each


def _gather_logits(data: Path, target: Target, counts: Floats) -> Floats:
    """Return the seconds to collect the logits of all GPUs: half of what their all-reduce takes."""
    return _all_reduce(data, target, counts * target.model.vocab_size * HALF) / 2


def _all_reduce(data: Path, target: Target, size: Floats, notes: list[str] | None = None) -> Floats:
    """Return the seconds of one for so many bytes; one in a layer, with a norm behind, is noted."""
    if target.gpus == 1:
        return np.zeros(len(size))
    table = AllReduce(data, target.tables, target.gpus)
    if table.measured:
        return table.seconds(size, norm=notes is not None)
    if notes is not None:
        notes.append(f"all-reduce: not timed between {target.gpus} of these GPUs; by its link")
    return all_reduce(target.tables.gpu, target.gpus, size)
