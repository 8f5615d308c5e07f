"""Multi-head latent attention out of AIConfigurator's tables: projections and kernel in one.

DeepSeek-V3's module was timed as vLLM runs it, with its projections: of a decode, whose queries are
multiplied with the latents, and of whole prompts, whose keys and values are spelt out. The times of
the shortest sequences are taken for the projections', what longer ones add for attention's.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibration.errors import Floats
from calibration.kernel_tables.tables import GpuTables, has_table, read_table
from calibration.kernel_tables.timed_steps import TimedSteps
from simulator.models.load import load_model
from simulator.models.spec import ModelSpec

if TYPE_CHECKING:
    import pandas as pd

SOURCE = "aiconfigurator"
TIMED = "deepseek-v3"
SHORT = 64  # tokens of a prompt whose attention is next to nothing
MOST_DECODES = 512  # tokens up to which the projections are a decode's
COLUMNS = ("kv_cache_dtype", "gemm_type", "num_heads", "batch_size", "isl", "step", "latency")


def has_latent(data: Path, tables: GpuTables, model: ModelSpec) -> bool:
    """Tell whether the latent attention of a model of these sizes was timed on a GPU."""
    timed = load_model(TIMED)
    alike = model.latent == timed.latent and model.hidden_size == timed.hidden_size
    return alike and has_table(data, _path(tables, "generation"), SOURCE)


def _path(tables: GpuTables, kind: str) -> str:
    return f"{tables.folder}/mla/vllm/{tables.latent}/mla_{kind}_module_perf.parquet"


def _read(data: Path, tables: GpuTables, kind: str, **wanted: object) -> "pd.DataFrame":
    table = read_table(data, _path(tables, kind), SOURCE, COLUMNS)
    for name, value in wanted.items():
        table = table[table[name] == value]
    columns = ["batch_size", "isl", "step"]
    return table.groupby(columns, as_index=False)["latency"].median()


def read_latent(
    data: Path, tables: GpuTables, heads: int, dtype: str, kv_cache_dtype: str
) -> tuple[Floats, Floats, TimedSteps]:
    """Give the projections of one layer, by tokens, and steps whose attention is one layer's.

    `heads` are those of one GPU. Decodes have `step` tokens before theirs.
    """
    wanted: dict[str, object] = {
        "num_heads": heads,
        "kv_cache_dtype": kv_cache_dtype,
        "gemm_type": "bfloat16" if dtype == "bfloat16" else "fp8_block",
    }
    decodes = _read(data, tables, "generation", **wanted)
    prompts = _read(data, tables, "context", **wanted)
    prompts = prompts[prompts["isl"] > 1]
    count, isl = (prompts[name].to_numpy(float) for name in ("batch_size", "isl"))
    spent = prompts["latency"].to_numpy(float) / 1e3
    short = decodes[decodes["step"] == decodes["step"].min()]
    few = short[short["batch_size"] <= MOST_DECODES]
    curve = {
        float(tokens): latency / 1e3
        for tokens, latency in zip(few["batch_size"], few["latency"], strict=True)
    }
    for tokens in np.unique((count * isl)[(isl <= SHORT) & (count * isl > MOST_DECODES)]):
        curve[tokens] = spent[(count * isl == tokens) & (isl <= SHORT)].min()
    tokens, seconds = np.array(sorted(curve.items())).T
    seconds = np.maximum.accumulate(seconds)

    def added(at: Floats, whole: Floats) -> Floats:
        beyond = np.maximum(1.0, at / tokens[-1])
        return np.maximum(whole - np.interp(at, tokens, seconds) * beyond, 1e-9)

    running = decodes["batch_size"].to_numpy(float)
    context = running * (decodes["step"].to_numpy(float) + 1)
    whole = decodes["latency"].to_numpy(float) / 1e3
    steps = TimedSteps.concatenated(
        TimedSteps.of_decodes(running, context, added(running, whole)),
        TimedSteps.of_prompts(count, isl, added(count * isl, spent)),
    )
    return tokens, seconds, steps
