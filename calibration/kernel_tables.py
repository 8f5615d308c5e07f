"""Kernel times of one model on one GPU, read from AIConfigurator's measured tables.

AIConfigurator (NVIDIA, Apache-2.0) times vLLM's matrix products on a grid of shapes (m, n, k) and
its attention kernels on a grid of batches and lengths. A step of a model is the sum of what its
layers call; what the tables lack (norms, rotary embedding, activation: bound by memory) is
reckoned from the bytes that pass.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simulator.errors import HeadwayError
from simulator.hardware import GPUS, Gpu
from simulator.model import ModelSpec
from simulator.roofline import small_kernels

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class System:
    """Where AIConfigurator has a GPU, and what is special about it."""

    key: str  # in profile names
    gpu: Gpu
    folder: str
    version: str  # of vLLM
    attention: str

    def path(self, table: str) -> str:
        """Give the path of a table below AIConfigurator's `systems/data`."""
        area = "gemm" if table == "gemm" else "attention"
        return f"{self.folder}/{area}/vllm/{self.version}/{table}_perf.parquet"


SYSTEMS = (
    System("a100", GPUS["A100-80GB"], "a100_sxm", "0.14.0", "FlashAttention-2"),
    System("h100", GPUS["H100-80GB"], "h100_sxm", "0.24.0", "FlashAttention-3"),
    System("h200", GPUS["H200"], "h200_sxm", "0.24.0", "FlashAttention-3"),
)


@dataclass(frozen=True)
class Kernels:
    """Measured times in seconds, all layers together, by the numbers of tokens and sequences."""

    tokens: Floats  # the grid of the matrix products
    dense: Floats  # matrix products and small kernels, at `tokens`
    head: Floats  # the output projection, at `tokens` sequences
    decode: dict[str, Floats]  # N, S, seconds
    prefill: dict[str, Floats]  # n, T, P, seconds


def find_table(data: Path, path: str) -> Path:
    """Find a table below a folder, in AIConfigurator's tree or with `__` for each slash."""
    flat = path.replace("/", "__")
    for place in (data / path, data / flat, data / "profiles" / "aiconfigurator" / flat):
        if place.exists():
            return place
    raise HeadwayError(f"{data}: has neither {path} nor {flat} (AIConfigurator, systems/data)")


def read_table(data: Path, path: str) -> "pd.DataFrame":
    """Read a Parquet table; HeadwayError without pyarrow."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise HeadwayError(
            "reading Parquet tables needs pyarrow: pip install 'headway[parquet]'"
        ) from None
    import pandas as pd

    return pd.read_parquet(find_table(data, path))


def read_kernels(data: Path, system: System, model: ModelSpec) -> Kernels:
    """Read what a model's steps are made of, in bfloat16 on one GPU."""
    table = read_table(data, system.path("gemm"))
    products = _Products(table[table["gemm_dtype"] == "bfloat16"])
    hidden, layers = model.hidden_size, model.num_hidden_layers
    query = model.num_attention_heads * model.head_dim
    key = model.num_key_value_heads * model.head_dim
    layer = (
        products.seconds(query + 2 * key, hidden)
        + products.seconds(hidden, query)
        + products.seconds(2 * model.intermediate_size, hidden)
        + products.seconds(hidden, model.intermediate_size)
    )
    return Kernels(
        products.tokens,
        layers * (layer + small_kernels(model, system.gpu, products.tokens)),
        products.seconds(model.vocab_size, hidden),
        _decodes(_attention(data, system, model, "generation"), layers),
        _prefills(_attention(data, system, model, "context"), layers),
    )


class _Products:
    """Times of matrix products [m, k] x [k, n], interpolated in log n and log k."""

    def __init__(self, table: "pd.DataFrame") -> None:
        cube = table.pivot_table(index=["m", "n"], columns="k", values="latency").sort_index()
        self.tokens = np.unique(table["m"]).astype(float)
        self._by_m = [cube.loc[int(m)] for m in self.tokens]

    def seconds(self, n: int, k: int) -> Floats:
        """Give the time at each of `tokens`; beyond the largest n it grows in proportion."""
        from scipy.interpolate import RegularGridInterpolator

        found = []
        for grid in self._by_m:
            rows, columns = grid.index.to_numpy(float), grid.columns.to_numpy(float)
            look = RegularGridInterpolator((np.log(rows), np.log(columns)), np.log(grid.to_numpy()))
            inside = min(n, rows[-1])
            found.append(float(np.exp(look((np.log(inside), np.log(k))))) * n / inside)
        return np.array(found) / 1e3


def _attention(data: Path, system: System, model: ModelSpec, kind: str) -> "pd.DataFrame":
    """Pick the rows of an attention table that are of this model's shape."""
    table = read_table(data, system.path(f"{kind}_attention"))
    wanted = {
        "num_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "kv_cache_dtype": "bfloat16",
        "window_size": 0,
    }
    for column, value in wanted.items():
        if column in table:
            table = table[table[column] == value]
    if table.empty:
        raise HeadwayError(f"{system.path(kind)}: no rows of the shape of {model.name}")
    return table.sort_values(["batch_size", "step", "isl"])


def _decodes(table: "pd.DataFrame", layers: int) -> dict[str, Floats]:
    count = table["batch_size"].to_numpy(float)
    context = count * (table["step"].to_numpy(float) + 1)  # the new token's key is read too
    return {"N": count, "S": context, "seconds": layers * table["latency"].to_numpy(float) / 1e3}


def _prefills(table: "pd.DataFrame", layers: int) -> dict[str, Floats]:
    table = table[table["isl"] > 1]  # one token is timed as a decode
    count, length = table["batch_size"].to_numpy(float), table["isl"].to_numpy(float)
    return {
        "n": count,
        "T": count * length,
        "P": count * length * (length + 1) / 2,
        "seconds": layers * table["latency"].to_numpy(float) / 1e3,
    }
