"""Kernel times out of AIConfigurator's tables: matrix products, experts, all-reduce.

The products are timed on a grid of shapes (m tokens, n outputs, k inputs), in milliseconds, back to
back.

A table of experts has the tokens of all GPUs together, and the time of the GPU that has the most to
do. Under `balanced` routing the tokens of a step meet as many experts as can be, all equally often;
under `power_law_1.01` and `power_law_1.2` the loads of experts are drawn from such a law. Tokens
that choose evenly, each by itself, meet fewer experts in a small step: `uniform` is the balanced
time, less the share of experts that nobody has chosen. In a large step their loads differ, so that
each expert's last tile is half empty, where balanced rows fill all: from `TILE` tokens an expert on
`uniform` takes no less than the quicker law, if experts are few (of many, a law's busiest one takes
longer than its tiles). More tokens take no shorter: where a table says so its times are smoothed
(isotonic regression of their logarithms).

The loads of a law are rounded, and in steps of more choices than experts drawn from 1 to 0.8 of the
tokens, else from 0.01 to 2 (AIConfigurator's collector/helper.py): of 128 experts, 4 a token, 32
tokens meet 49 and 48 tokens 82. Tokens that choose by these loads, each by itself, meet 50 and 75:
what reading the others takes is left out. AMD put tokens through gpt-oss-120b's own router: 32 to
64 meet 0.7 of the experts that even choices would, so 57 and 70 (AMD-AGI/Infera, of its
`moe_router_coverage`).
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibration.errors import Floats
from simulator.core.engine_config import UNIFORM
from simulator.costs.profile import FINE_EXPERTS
from simulator.costs.roofline import LAUNCH
from simulator.models.dtypes import HALF, bytes_of
from simulator.models.spec import ModelSpec
from tools.profiles.tables import GpuTables, has_table, interpolate, read_table

if TYPE_CHECKING:
    import pandas as pd

SOURCE = "aiconfigurator"
MIB = float(1 << 20)
WEIGHT_BOUND = 256  # tokens: a GPU of this list does 150 to 420 operations per byte that it reads
SMALL_TILES = 16
TILE = 128  # tokens of an expert that kernels multiply at once, in large steps
FUSED_BYTES = {2: 64 * MIB, 4: 32 * MIB, 8: MIB}
"""Largest message, by number of GPUs, that vLLM's pass `fuse_allreduce_rms` takes on Blackwell
(`FI_ALLREDUCE_FUSION_MAX_SIZE_MB`)."""
POWER_LAWS = ("power_law_1.01", "power_law_1.2")
LARGEST_LOAD = 0.8  # of a step's tokens, before the loads are scaled to them
DTYPES = {
    "bfloat16": ("bfloat16",),
    "fp8": ("fp8", "fp8_block"),
    "int4": ("int4_wo",),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("w4a16_mxfp4",),
}
"""Words of the tables for a dtype, the likest first."""
BLOCK_SCALED = ("fp8_block", "fp8")
HOPPER = ("h100", "h200")
"""On these the kernel timed with one scale a tensor takes 2.4 times as long as with 16-bit weights
at a sixth of the bandwidth. Servers contradict: Llama-4-Scout in fp8 on two H100s (vLLM 0.15.1)
decodes as with the times of block-scaled weights."""
MARLIN = "marlin"
MARLIN_LAUNCH = 30e-6  # s; gpt-oss-120b on four L40S and RTX PRO 6000 takes 29 us for one token
MARLIN_PADS = 256, 128
"""Marlin's kernel has hidden states of a multiple of the first, and inner ones of the second."""
SHAPE = ("hidden_size", "inter_size", "topk", "num_experts")
COLUMNS = (
    "moe_dtype",
    "num_tokens",
    *SHAPE,
    "moe_tp_size",
    "moe_ep_size",
    "distribution",
    "latency",
)


@lru_cache(maxsize=8)
def read_cached(data: Path, path: str, columns: tuple[str, ...]) -> "pd.DataFrame":
    """Read a table that several profiles of a run need."""
    return read_table(data, path, SOURCE, columns)


class Products:
    """Seconds of matrix products [m, k] x [k, n] of one dtype, interpolated in log n and log k.

    Up to `WEIGHT_BOUND` tokens a product takes what reading its weights takes, and what disturbs a
    measurement makes it longer: there none takes longer than one of more tokens does. But on Hopper
    vLLM's kernel with one scale a tensor has other tiles beyond `SMALL_TILES` tokens, 64 and 128,
    and takes longer just behind: on H200 1.3 times as long for 17 to 33, 1.1 times for 48 and 64.
    """

    def __init__(self, data: Path, tables: GpuTables, dtype: str) -> None:
        version = tables.products.get(dtype, tables.version)
        path = f"{tables.folder}/gemm/vllm/{version}/gemm_perf.parquet"
        table = read_cached(data, path, ("gemm_dtype", "m", "n", "k", "latency"))
        table = table[table["gemm_dtype"] == dtype]
        self.measured = not table.empty
        cube = table.pivot_table(index=["m", "n"], columns="k", values="latency")
        self._by_m: dict[int, pd.DataFrame] = {}
        tiles = dtype == "fp8" and tables.folder.startswith(HOPPER)
        least = None  # of those of more tokens
        for m in np.unique(table["m"])[::-1]:
            grid = cube.loc[m].sort_index()
            clipped = grid
            if least is not None and m < WEIGHT_BOUND:
                longer = least.reindex_like(grid)
                clipped = grid.mask(longer < grid, longer)
            least = clipped
            self._by_m[int(m)] = grid if tiles and m > SMALL_TILES else clipped
        self._by_m = dict(sorted(self._by_m.items()))
        self.tokens = np.array(list(self._by_m), float)

    def seconds(self, n: int, k: int) -> Floats:
        """Return the time at each of `tokens`; beyond the grid it grows in proportion.

        NaN where the grid has a hole.
        """
        from scipy.interpolate import RegularGridInterpolator

        found = []
        for grid in self._by_m.values():
            rows, columns = grid.index.to_numpy(float), grid.columns.to_numpy(float)
            look = RegularGridInterpolator((np.log(rows), np.log(columns)), np.log(grid.to_numpy()))
            in_n, in_k = (np.clip(x, g[0], g[-1]) for x, g in ((n, rows), (k, columns)))
            beyond = max(1.0, n / in_n) * max(1.0, k / in_k)
            found.append(float(np.exp(look((np.log(in_n), np.log(in_k))))) * beyond)
        return np.array(found) / 1e3

    def of_attention(self, model: ModelSpec, gpus: int) -> Floats:
        """Return the time of one layer's products around attention on each of so many GPUs."""
        query = model.num_attention_heads // gpus * model.head_dim
        key = max(1, model.num_key_value_heads // gpus) * model.head_dim
        gate = query * model.attention_gate
        hidden = model.hidden_size
        return self.seconds(query + gate + 2 * key, hidden) + self.seconds(hidden, query)

    def of_linear(self, model: ModelSpec, gpus: int) -> Floats:
        """Return the time of the products around one layer's linear attention."""
        linear, hidden = model.linear, model.hidden_size
        assert linear is not None
        values = linear.num_value_heads * linear.value_head_dim // gpus
        inputs = self.seconds(linear.convolved // gpus + values, hidden)
        gates = self.seconds(2 * linear.num_value_heads // gpus, hidden)
        return inputs + gates + self.seconds(hidden, values)

    def of_mlp(self, hidden: int, inner: int) -> Floats:
        """Return the time of gate, up and down projection."""
        return self.seconds(2 * inner, hidden) + self.seconds(hidden, inner)

    def of_layer(self, model: ModelSpec, gpus: int) -> Floats:
        """Return the time of one layer's products on each of so many GPUs, experts left out."""
        attention = self.of_attention(model, gpus)
        if model.num_experts:
            return attention
        return attention + self.of_mlp(model.hidden_size, model.intermediate_size // gpus)


class AllReduce:
    """Seconds to add up so many bytes over the GPUs of a server, as vLLM would do it.

    The table of vLLM times `tensor_model_parallel_all_reduce` in a CUDA graph, and so the kernel
    that vLLM dispatches each size to: its own up to 8 MiB (one shot, or two for more bytes; less on
    Hopper and Blackwell), symmetric memory by multicast up to 64 or 128 MiB, NCCL beyond. Without
    it, and between more than two GPUs on PCIe, NCCL's. Where the pass `fuse_allreduce_rms` is on,
    by default on Blackwell, FlashInfer's kernels (TensorRT-LLM's one-shot and two-shot) take
    messages up to `FUSED_BYTES` and do the norm behind them, too. On Hopper vLLM 0.12 and 0.15 took
    what its own table says. All tables give the size of a message in elements. More bytes never
    take less time.
    """

    def __init__(self, data: Path, tables: GpuTables, gpus: int) -> None:
        self._fused: Curve | None = None
        self._plain = self._vllm(data, tables, gpus) or self._nccl(data, tables, gpus)
        self._fused_bytes = FUSED_BYTES.get(gpus, 0.0)
        if tables.fused and self._fused_bytes:
            path = f"{tables.folder}/comm/trtllm/{tables.fused}/custom_allreduce_perf.parquet"
            table = read_cached(data, path, ("num_gpus", "message_size", "latency"))
            self._fused = _curve(table[table["num_gpus"] == gpus])
        self.measured = self._plain is not None

    def _vllm(self, data: Path, tables: GpuTables, gpus: int) -> "Curve | None":
        if not tables.custom or not (tables.fully_connected or gpus == 2):
            return None
        path = f"{tables.folder}/comm/vllm/{tables.custom}/custom_allreduce_perf.parquet"
        table = read_cached(data, path, ("num_gpus", "message_size", "backend", "latency"))
        return _curve(table[(table["num_gpus"] == gpus) & (table["backend"] == "vllm_graph")])

    def _nccl(self, data: Path, tables: GpuTables, gpus: int) -> "Curve | None":
        path = f"{tables.folder}/comm/nccl/{tables.nccl}/nccl_perf.parquet"
        if not tables.nccl or not has_table(data, path, SOURCE):
            return None
        table = read_cached(
            data, path, ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency")
        )
        sums = (table["op_name"] == "all_reduce") & (table["nccl_dtype"] == "half")
        timed = min(gpus, tables.linked)
        found = _curve(table[sums & (table["num_gpus"] == timed)])
        more = (1 - 1 / gpus) / (1 - 1 / timed)
        return None if found is None else (found[0], more * found[1])

    def seconds(self, size: Floats, *, norm: bool = False) -> Floats:
        """Return the time for sums of so many bytes; with a norm behind, less what it saves."""
        if self._plain is None:
            raise ValueError("no all-reduce was timed")
        plain = interpolate(size, *self._plain)
        if self._fused is None or not norm:
            return plain
        return np.where(size <= self._fused_bytes, interpolate(size, *self._fused) - LAUNCH, plain)


Curve = tuple[Floats, Floats]


def _curve(table: "pd.DataFrame") -> Curve | None:
    """Return the median time by bytes of a message of 16-bit elements; None for no rows."""
    if table.empty:
        return None
    times = table.groupby("message_size")["latency"].median()
    seconds = np.maximum.accumulate(times.to_numpy(float) / 1e3)
    return times.index.to_numpy(float) * HALF, seconds


@dataclass(frozen=True)
class Experts:
    """The experts of a model with weights of a dtype, on the GPUs of one kind."""

    data: Path
    tables: GpuTables
    model: ModelSpec
    dtype: str

    @cached_property
    def _rows(self) -> "pd.DataFrame | None":
        """Rows of this dtype, of the shape that is the likest; None for none."""
        tables, model = self.tables, self.model
        path = f"{tables.folder}/moe/vllm/{tables.experts}/moe_perf.parquet"
        if not tables.experts or not has_table(self.data, path, SOURCE):
            return None
        table = read_table(self.data, path, SOURCE, COLUMNS)
        block = model.quantization == "fp8" or tables.key in HOPPER
        words = BLOCK_SCALED if self.dtype == "fp8" and block else DTYPES.get(self.dtype, ())
        wanted = self._shape
        for exact in (True, False):
            for word in words:
                rows = table[table["moe_dtype"] == word]
                shapes = set(map(tuple, rows[list(SHAPE)].drop_duplicates().to_numpy()))
                if exact:
                    shapes &= {wanted}
                if shapes:
                    near = min(shapes, key=lambda shape: (_distance(shape, wanted), shape))
                    return rows[(rows[list(SHAPE)] == list(near)).all(axis=1)]
        return None

    @property
    def _shape(self) -> tuple[int, ...]:
        model = self.model
        sizes = model.hidden_size, model.intermediate_size
        return (*sizes, model.num_experts_per_tok, model.num_experts)

    @property
    def measured(self) -> bool:
        """Whether experts of this dtype were timed."""
        return self._rows is not None

    @property
    def note(self) -> str:
        """Say what was timed in place of the model's experts; "" where they were."""
        assert self._rows is not None
        found = tuple(int(self._rows[name].iloc[0]) for name in SHAPE)
        if found == self._shape:
            balanced = "balanced" in set(self._rows["distribution"])
            return "" if balanced else f"experts: no even routing was timed; by {POWER_LAWS[0]}"
        hidden, inner, chosen, experts = found
        return (
            f"experts: of {experts} of {hidden} x {inner}, {chosen} a token, for want of these; "
            "scaled by the bytes and FLOPs of both"
        )

    def seconds(self, gpus: int, *, whole: bool = False) -> dict[str, tuple[Floats, Floats]] | None:
        """Return the times of one layer by routing: token counts and seconds.

        Each GPU has a slice of every expert, or, if `whole`, whole experts. None: not timed so.
        """
        from scipy.optimize import isotonic_regression

        assert self._rows is not None
        rows = self._rows
        sizes = (1, gpus) if whole else (gpus, 1)
        rows = rows[(rows["moe_tp_size"] == sizes[0]) & (rows["moe_ep_size"] == sizes[1])]
        found, most = {}, rows["num_tokens"].max()
        for routing, word in {UNIFORM: "balanced", **{law: law for law in POWER_LAWS}}.items():
            times = (
                rows[rows["distribution"] == word]
                .groupby("num_tokens")["latency"]
                .median()
                .dropna()
            )
            if len(times) > 1 and times.index[-1] == most:  # some were broken off
                tokens, seconds = times.index.to_numpy(float), times.to_numpy(float) / 1e3
                seconds = seconds * self._scale(tokens)
                if routing == UNIFORM:
                    seconds = seconds * self._chosen_share(tokens, seconds)
                else:
                    seconds = seconds - self._not_chosen(tokens, routing, gpus)
                found[routing] = tokens, np.exp(isotonic_regression(np.log(seconds)).x)
        if found and UNIFORM not in found:  # as in the A100's tables
            found[UNIFORM] = found[POWER_LAWS[0]]
        elif not whole and POWER_LAWS[0] in found and self.model.num_experts < FINE_EXPERTS:
            tokens, seconds = found[UNIFORM]
            laws = [interpolate(tokens, *found[law]) for law in POWER_LAWS if law in found]
            uneven = np.maximum(seconds, np.min(laws, axis=0))
            full = tokens * self.model.num_experts_per_tok >= TILE * self.model.num_experts
            found[UNIFORM] = tokens, np.where(full, uneven, seconds)
        return found or None

    def marlin(self, gpus: int) -> dict[str, tuple[Floats, Floats]] | None:
        """Return the times of one layer in slices with Marlin's kernel, by routing.

        It was timed with other experts in int4: as many tokens an expert take, beside the launches,
        as long as the weights of all are large, padded as vLLM pads them. None where the kernel of
        `seconds` is Marlin's, or none was timed so.
        """
        tables, model = self.tables, self.model
        if self.dtype != "mxfp4" or tables.key not in HOPPER or not self.measured:
            return None
        path = f"{tables.folder}/moe/vllm/{tables.experts}/moe_perf.parquet"
        rows = read_table(self.data, path, SOURCE, (*COLUMNS, "kernel_source"))
        rows = rows[rows["kernel_source"].str.contains(MARLIN) & (rows["moe_dtype"] == "int4_wo")]
        rows = rows[(rows["moe_tp_size"] == gpus) & (rows["moe_ep_size"] == 1)]
        if rows.empty:
            return None
        hidden, inner, chosen, experts = (int(rows[name].iloc[0]) for name in SHAPE)
        ours = zip((model.hidden_size, model.intermediate_size // gpus), MARLIN_PADS, strict=True)
        size = model.num_experts * prod(-(-width // pad) * pad for width, pad in ours) * gpus
        share = size / (experts * hidden * inner)
        alike = model.num_experts_per_tok / model.num_experts / (chosen / experts)
        found = {}
        for routing, word in {UNIFORM: "balanced", **{law: law for law in POWER_LAWS}}.items():
            times = rows[rows["distribution"] == word].groupby("num_tokens")["latency"].median()
            tokens, seconds = times.index.to_numpy(float), times.to_numpy(float) / 1e3
            moved = np.maximum(interpolate(tokens * alike, tokens, seconds) - MARLIN_LAUNCH, 0.0)
            scaled = MARLIN_LAUNCH + share * moved
            if routing == UNIFORM:
                scaled = scaled * self._chosen_share(tokens, scaled)
            else:
                scaled = scaled - self._not_chosen(tokens, routing, gpus)
            found[routing] = tokens, np.maximum.accumulate(scaled)
        return found

    def _chosen_share(self, tokens: Floats, seconds: Floats) -> Floats:
        """Get the time of the experts met if tokens choose evenly, to that if none meets another.

        It is read off the table, at the tokens that meet as many when none meets another.
        """
        model = self.model
        met = np.array([model.expected_experts(int(count)) for count in tokens])
        most = np.minimum(tokens * model.num_experts_per_tok, model.num_experts)
        at, all_met = (experts / model.num_experts_per_tok for experts in (met, most))
        share = np.interp(at, tokens, seconds) / np.interp(all_met, tokens, seconds)
        return np.minimum(1.0, share)

    def _not_chosen(self, tokens: Floats, law: str, gpus: int) -> Floats:
        """Get the time to read, at the data sheet's bandwidth, experts that tokens do not meet.

        They have a load in the rows of a law, but tokens that choose by these loads miss them. Of
        few experts each is met.
        """
        hidden, inner, chosen, experts = self._shape
        size = 3 * hidden * inner * bytes_of(self.dtype) / gpus
        each = size / self.tables.gpu.bandwidth
        power = 1.0 - float(law.rpartition("_")[2])
        at = (np.arange(experts) + 0.5) / experts
        found = np.zeros(len(tokens))
        for row, count in enumerate(tokens):
            if FINE_EXPERTS <= experts < count * chosen and count <= WEIGHT_BOUND:
                drawn = (((LARGEST_LOAD * count) ** power - 1.0) * at + 1.0) ** (1.0 / power)
                loads = count * chosen * drawn / drawn.sum()
                met = 1.0 - (1.0 - np.minimum(loads / count, 1.0)) ** count
                found[row] = max(0.0, float((loads >= 0.5).sum() - met.sum())) * each
        return found

    def _scale(self, tokens: Floats) -> Floats:
        """Return the work of the model's experts to that of those timed: bytes, or FLOPs."""
        assert self._rows is not None
        timed = tuple(int(self._rows[name].iloc[0]) for name in SHAPE)
        ridge = self.tables.gpu.flops(self.dtype) / self.tables.gpu.bandwidth  # FLOPs a byte
        ours, theirs = (
            _work(shape, tokens, bytes_of(self.dtype), ridge) for shape in (self._shape, timed)
        )
        return np.asarray(ours / theirs)


def _work(shape: tuple[int, ...], tokens: Floats, width: float, ridge: float) -> Floats:
    """Return what a layer's experts take, in bytes that are moved in the same time."""
    hidden, inner, chosen, experts = shape
    met = experts * (1 - (1 - chosen / experts) ** tokens)
    return np.asarray(3 * hidden * inner * np.maximum(met * width, 2 * chosen * tokens / ridge))


def _distance(one: tuple[int, ...], two: tuple[int, ...]) -> float:
    """Return how unlike two shapes are."""
    return float(np.abs(np.log(np.array(one) / np.array(two))).sum())
