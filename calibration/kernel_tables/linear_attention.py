"""Gated DeltaNet out of AIConfigurator's tables: straight lines, in sequences and in tokens.

A decode reads and writes the state of every sequence; a prompt passes its state once and computes
by tokens. Each is two kernels: the convolution and the delta rule.
"""

from dataclasses import dataclass
from pathlib import Path

from calibration.errors import Floats, fit_positive
from calibration.kernel_tables.tables import GpuTables, NotTimedError, has_table, read_table
from simulator.models.spec import ModelSpec

SOURCE = "aiconfigurator"
COLUMNS = ("phase", "batch_size", "seq_len", "kernel_source", "latency")
HEADS = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")


@dataclass(frozen=True)
class LinearKernels:
    """Seconds of the kernels of all layers with linear attention."""

    decode: float = 0.0
    per_sequence: float = 0.0
    prefill: float = 0.0
    per_token: float = 0.0


NO_LINEAR = LinearKernels()


def _path(tables: GpuTables) -> str:
    return f"{tables.folder}/linear_attention/vllm/{tables.linear}/gdn_perf.parquet"


def has_linear(data: Path, tables: GpuTables) -> bool:
    """Tell whether linear attention was timed on a GPU."""
    return has_table(data, _path(tables), SOURCE)


def read_linear(data: Path, tables: GpuTables, model: ModelSpec, gpus: int) -> LinearKernels:
    """Fit the lines to the heads of one GPU of so many."""
    linear = model.linear
    assert linear is not None
    table = read_table(data, _path(tables), SOURCE, (*COLUMNS, *HEADS))
    heads = linear.num_key_heads // gpus, linear.num_value_heads // gpus
    for name, size in zip(HEADS, (*heads, linear.key_head_dim, linear.value_head_dim), strict=True):
        table = table[table[name] == size]
    if table.empty:
        raise NotTimedError(
            f"linear attention with {heads[0]} and {heads[1]} heads on {tables.gpu.name}"
        )
    by = ["phase", "batch_size", "seq_len"]
    each = table.groupby([*by, "kernel_source"], as_index=False)["latency"].median()
    total = each.groupby(by, as_index=False)["latency"].sum()
    decodes = total[total["phase"] == "generation"]
    prompts = total[(total["phase"] == "context") & (total["batch_size"] == 1)]

    def line(at: Floats, milliseconds: Floats) -> Floats:
        """Fit a constant and a slope to relative errors."""
        seconds = milliseconds / 1e3
        start = (seconds.min(), seconds[-1] / at[-1])
        return linear.layers * fit_positive(lambda p: p[0] + p[1] * at, seconds, start, 1e-12)

    return LinearKernels(
        *line(decodes["batch_size"].to_numpy(float), decodes["latency"].to_numpy(float)),
        *line(prompts["seq_len"].to_numpy(float), prompts["latency"].to_numpy(float)),
    )
