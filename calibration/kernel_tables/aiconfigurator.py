"""Kernel times out of AIConfigurator's tables: matrix products, attention, all-reduce.

The products are timed on a grid of shapes (m tokens, n outputs, k inputs), the attention kernels on
one of batches, lengths and heads, in milliseconds, back to back. What a grid lacks is taken from
its nearest entries; the returned notes say so.
"""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibration.errors import Floats
from calibration.kernel_tables.tables import GpuTables, has_table, read_table
from simulator.models.spec import ModelSpec, bytes_of
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    import pandas as pd

SOURCE = "aiconfigurator"
MAX_KV_HEADS = 8  # of the decode tables
CUSTOM_MAX_BYTES = 8 << 20  # bytes; vLLM's custom all-reduce takes less than that (max_size)
MAX_CAPTURED_TOKENS = 512  # tokens; the all-reduce of a larger step runs outside CUDA graphs
ATTENTION = (
    "batch_size",
    "isl",
    "step",
    "num_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_cache_dtype",
    "latency",
)


@lru_cache(maxsize=8)
def _read(data: Path, path: str, columns: tuple[str, ...]) -> "pd.DataFrame":
    return read_table(data, path, SOURCE, columns)


class Products:
    """Seconds of matrix products [m, k] x [k, n] of one dtype, interpolated in log n and log k."""

    def __init__(self, data: Path, tables: GpuTables, dtype: str) -> None:
        path = f"{tables.folder}/gemm/vllm/{tables.version}/gemm_perf.parquet"
        table = _read(data, path, ("gemm_dtype", "m", "n", "k", "latency"))
        table = table[table["gemm_dtype"] == dtype]
        self.measured = not table.empty
        cube = table.pivot_table(index=["m", "n"], columns="k", values="latency").sort_index()
        self._by_m = {int(m): cube.loc[m] for m in np.unique(table["m"])}
        self.tokens = np.array(sorted(self._by_m), float)

    def seconds(self, n: int, k: int) -> Floats:
        """Give the time at each of `tokens`; beyond the grid it grows in proportion.

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

    def of_layer(self, model: ModelSpec, gpus: int) -> Floats:
        """Give the time of one layer's products on each of so many GPUs, experts left out."""
        query = model.num_attention_heads // gpus * model.head_dim
        key = max(1, model.num_key_value_heads // gpus) * model.head_dim
        hidden, inner = model.hidden_size, model.intermediate_size // gpus
        attention = self.seconds(query + 2 * key, hidden) + self.seconds(hidden, query)
        if model.num_experts:
            return attention
        return attention + self.seconds(2 * inner, hidden) + self.seconds(hidden, inner)


def read_attention(
    data: Path, tables: GpuTables, kind: str, shape: tuple[int, int, int], kv_cache_dtype: str
) -> tuple["pd.DataFrame", list[str]]:
    """Pick the rows for one GPU's (query heads, KV heads, head size), in seconds of one layer.

    `kind` is context or generation. Adds the columns N, sequences, and S, cached tokens read.
    """
    path = f"{tables.folder}/attention/vllm/{tables.version}/{kind}_attention_perf.parquet"
    table, notes = _read(data, path, ATTENTION), []
    heads, kv_heads, size = shape
    table = table[table["head_dim"] == size]
    if "window_size" in table:
        table = table[table["window_size"] == 0]
    share = 1.0  # of a measured sequence's cache that one of this model fills
    if kind == "generation" and kv_heads > MAX_KV_HEADS:
        share = kv_heads / MAX_KV_HEADS
        heads, kv_heads = int(heads / share), MAX_KV_HEADS
    stretch = 1.0
    if kv_cache_dtype not in set(table["kv_cache_dtype"]):
        stretch = bytes_of("bfloat16") / bytes_of(kv_cache_dtype)
        notes.append(f"{kind} attention: a {kv_cache_dtype} cache was not timed; by its bytes")
        kv_cache_dtype = "bfloat16"
    table = table[table["kv_cache_dtype"] == kv_cache_dtype]
    if table.empty:
        raise HeadwayError(f"{path}: no rows of heads of size {size}")
    timed = set(table["num_key_value_heads"])
    kv_near = min(timed, key=lambda h: (abs(np.log(h / kv_heads)), h))
    if kv_near != kv_heads:
        notes.append(f"{kind} attention: of {kv_near} KV heads, for want of {kv_heads}")
        share *= kv_heads / kv_near if kind == "generation" else 1.0
    table = table[table["num_key_value_heads"] == kv_near]
    near = min(set(table["num_heads"]), key=lambda h: (abs(np.log(h / heads)), h))
    table = table[table["num_heads"] == near].sort_values(["batch_size", "step", "isl"])
    scale = 1.0
    if near != heads:
        scale = heads / near if kind == "context" else 1.0
        notes.append(f"{kind} attention: of {near} heads, for want of {heads}")
    count = table["batch_size"].to_numpy(float) / share
    context = (table["step"].to_numpy(float) + 1) * stretch  # the new token's key is read too
    seconds = table["latency"].to_numpy(float) * scale / 1e3
    table = table.assign(N=count, S=count * context, seconds=seconds)
    return table[table["N"] >= 1], notes


class AllReduce:
    """Seconds to add up so many bytes over the GPUs of a server, as vLLM would do it.

    vLLM's own kernel does it below 8 MiB, between GPUs that NVLink connects fully or between two;
    NCCL does it above, and between more than two GPUs on PCIe. Up to 512 tokens the step is a CUDA
    graph; above, each call adds its launch and a copy, which the `eager` rows have.
    """

    def __init__(self, data: Path, tables: GpuTables, gpus: int) -> None:
        self._graph = self._eager = self._nccl = None
        custom = f"{tables.folder}/comm/vllm/{tables.custom}/custom_allreduce_perf.parquet"
        if tables.custom and (tables.fully_connected or gpus == 2):
            table = _read(data, custom, ("num_gpus", "message_size", "backend", "latency"))
            table = table[table["num_gpus"] == gpus]
            self._graph = _curve(table[table["backend"] == "vllm_graph"])
            self._eager = _curve(table[table["backend"] == "vllm_eager"])
        nccl = f"{tables.folder}/comm/nccl/{tables.nccl}/nccl_perf.parquet"
        if tables.nccl and has_table(data, nccl, SOURCE):
            columns = ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency")
            table = _read(data, nccl, columns)
            table = table[(table["op_name"] == "all_reduce") & (table["nccl_dtype"] == "half")]
            self._nccl = _curve(table[table["num_gpus"] == gpus])
        self.measured = self._graph is not None or self._nccl is not None

    def seconds(self, tokens: Floats, bytes_per_token: float) -> Floats:
        """Give the time for the sums of so many tokens."""
        size = tokens * bytes_per_token
        large = self._nccl or self._graph
        if large is None:
            raise ValueError("no all-reduce was timed")
        if self._graph is None or self._eager is None:
            return _interpolate(large, size)
        graph, eager = _interpolate(self._graph, size), _interpolate(self._eager, size)
        small = np.where(tokens <= MAX_CAPTURED_TOKENS, graph, eager)
        return np.where(size < CUSTOM_MAX_BYTES, small, _interpolate(large, size))


Curve = tuple[Floats, Floats]


def _curve(table: "pd.DataFrame") -> Curve | None:
    """Give the median time by message size; None for no rows."""
    if table.empty:
        return None
    times = table.groupby("message_size")["latency"].median()
    return times.index.to_numpy(float), times.to_numpy(float) / 1e3


def _interpolate(curve: Curve, size: Floats) -> Floats:
    """Interpolate; beyond the largest message the time grows in proportion."""
    sizes, seconds = curve
    beyond = np.maximum(1.0, size / sizes[-1])
    return np.asarray(np.interp(size, sizes, seconds) * beyond)
