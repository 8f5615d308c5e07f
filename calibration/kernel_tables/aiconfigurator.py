"""Kernel times out of AIConfigurator's tables: matrix products and all-reduce.

The products are timed on a grid of shapes (m tokens, n outputs, k inputs), in milliseconds, back to
back.
"""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibration.errors import Floats
from calibration.kernel_tables.tables import GpuTables, has_table, interpolate, read_table
from simulator.costs.roofline import LAUNCH
from simulator.models.spec import HALF, ModelSpec

if TYPE_CHECKING:
    import pandas as pd

SOURCE = "aiconfigurator"
MIB = float(1 << 20)
WEIGHT_BOUND = 256  # tokens: a GPU of this list does 150 to 420 operations per byte that it reads
FUSED_BYTES = {2: 64 * MIB, 4: 32 * MIB, 8: MIB}
"""Largest message, by number of GPUs, that vLLM's pass `fuse_allreduce_rms` takes on Blackwell
(`FI_ALLREDUCE_FUSION_MAX_SIZE_MB`)."""


@lru_cache(maxsize=8)
def read_cached(data: Path, path: str, columns: tuple[str, ...]) -> "pd.DataFrame":
    """Read a table that several profiles of a run need."""
    return read_table(data, path, SOURCE, columns)


class Products:
    """Seconds of matrix products [m, k] x [k, n] of one dtype, interpolated in log n and log k.

    Up to `WEIGHT_BOUND` tokens a product takes what reading its weights takes, and what disturbs a
    measurement makes it longer: there none takes longer than one of more tokens does.
    """

    def __init__(self, data: Path, tables: GpuTables, dtype: str) -> None:
        version = tables.products.get(dtype, tables.version)
        path = f"{tables.folder}/gemm/vllm/{version}/gemm_perf.parquet"
        table = read_cached(data, path, ("gemm_dtype", "m", "n", "k", "latency"))
        table = table[table["gemm_dtype"] == dtype]
        self.measured = not table.empty
        cube = table.pivot_table(index=["m", "n"], columns="k", values="latency")
        self._by_m: dict[int, pd.DataFrame] = {}
        more = None
        for m in np.unique(table["m"])[::-1]:
            grid = cube.loc[m].sort_index()
            if more is not None and m < WEIGHT_BOUND:
                longer = more.reindex_like(grid)
                grid = grid.mask(longer < grid, longer)
            self._by_m[int(m)] = more = grid
        self._by_m = dict(sorted(self._by_m.items()))
        self.tokens = np.array(list(self._by_m), float)

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

    def of_attention(self, model: ModelSpec, gpus: int) -> Floats:
        """Give the time of one layer's products around attention on each of so many GPUs."""
        query = model.num_attention_heads // gpus * model.head_dim
        key = max(1, model.num_key_value_heads // gpus) * model.head_dim
        gate = query * model.attention_gate
        hidden = model.hidden_size
        return self.seconds(query + gate + 2 * key, hidden) + self.seconds(hidden, query)

    def of_linear(self, model: ModelSpec, gpus: int) -> Floats:
        """Give the time of the products around one layer's linear attention."""
        linear, hidden = model.linear, model.hidden_size
        assert linear is not None
        values = linear.num_value_heads * linear.value_head_dim // gpus
        inputs = self.seconds(linear.convolved // gpus + values, hidden)
        gates = self.seconds(2 * linear.num_value_heads // gpus, hidden)
        return inputs + gates + self.seconds(hidden, values)

    def of_mlp(self, hidden: int, inner: int) -> Floats:
        """Give the time of gate, up and down projection."""
        return self.seconds(2 * inner, hidden) + self.seconds(hidden, inner)

    def of_layer(self, model: ModelSpec, gpus: int) -> Floats:
        """Give the time of one layer's products on each of so many GPUs, experts left out."""
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
        return _curve(table[sums & (table["num_gpus"] == gpus)])

    def seconds(self, size: Floats, *, norm: bool = False) -> Floats:
        """Give the time for sums of so many bytes; with a norm behind, less what it saves."""
        if self._plain is None:
            raise ValueError("no all-reduce was timed")
        plain = interpolate(size, *self._plain)
        if self._fused is None or not norm:
            return plain
        return np.where(size <= self._fused_bytes, interpolate(size, *self._fused) - LAUNCH, plain)


Curve = tuple[Floats, Floats]


def _curve(table: "pd.DataFrame") -> Curve | None:
    """Give the median time by bytes of a message of 16-bit elements; None for no rows."""
    if table.empty:
        return None
    times = table.groupby("message_size")["latency"].median()
    seconds = np.maximum.accumulate(times.to_numpy(float) / 1e3)
    return times.index.to_numpy(float) * HALF, seconds
