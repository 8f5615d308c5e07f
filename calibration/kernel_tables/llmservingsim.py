"""Layer times out of LLMServingSim's tables: one model's kernels in vLLM's worker, by TP degree.

Microseconds of one layer on one rank, without all-reduce. Attention was timed for whole batches
of one chunk and any number of decodes: the only published measurement of mixed steps.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibration.kernel_tables.batches import Batches
from calibration.kernel_tables.systems import System
from calibration.kernel_tables.tables import Floats, has_table, read_table
from simulator.models.load import load_model
from simulator.models.spec import ModelSpec

if TYPE_CHECKING:
    import pandas as pd

SOURCE = "llmservingsim"
MODELS = {
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B-Instruct-2507",
}
ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
ONCE = ("embedding", "final_layernorm")  # per step; the others are per layer
TWICE = "layernorm"  # per layer


def folder(system: System, model: ModelSpec) -> str:
    """Give the folder of a model of this shape; "" where none was timed on the GPU."""
    for name, published in MODELS.items():
        if system.layers and load_model(name).shape == model.shape:
            return f"{system.layers}/{published}"
    return ""


def path_of(system: System, model: ModelSpec, gpus: int, table: str) -> str:
    """Give the path of a table; the flattened files leave the dtype out."""
    return f"{folder(system, model)}/tp{gpus}/{table}.csv"


def has_layers(data: Path, system: System, model: ModelSpec, gpus: int) -> bool:
    """Tell whether this model was timed on this GPU at this TP degree."""
    if not folder(system, model):
        return False
    return has_table(data, path_of(system, model, gpus, "attention"), SOURCE)


def read_attention(data: Path, system: System, model: ModelSpec, gpus: int) -> Batches:
    """Read the attention of batches of every kind."""
    path = path_of(system, model, gpus, "attention")
    table = read_table(data, path, SOURCE, ATTENTION)
    size, history, count, each, time = (table[name].to_numpy(float) for name in ATTENTION)
    chunks = (size > 0).astype(float)
    seconds = model.num_hidden_layers * time / 1e6
    return Batches(chunks, size, history, count, count * each, seconds)


def read_dense(data: Path, system: System, model: ModelSpec, gpus: int) -> tuple[Floats, Floats]:
    """Give token counts and the seconds of all layers but attention and experts."""
    path = path_of(system, model, gpus, "dense")
    times = _pivot(read_table(data, path, SOURCE, ("layer", "tokens", "time_us")), "tokens")
    total = np.zeros(len(times))
    for layer in times:
        number = model.num_hidden_layers * (1 + (layer == TWICE))
        total += times[layer].to_numpy() * (1 if layer in ONCE else number)
    return times.index.to_numpy(float), total / 1e6


def read_head(data: Path, system: System, model: ModelSpec, gpus: int) -> tuple[Floats, Floats]:
    """Give sequence counts and the seconds of output projection and sampler."""
    path = path_of(system, model, gpus, "per_sequence")
    table = read_table(data, path, SOURCE, ("layer", "sequences", "time_us"))
    times = _pivot(table, "sequences")
    return times.index.to_numpy(float), times.sum(axis=1).to_numpy() / 1e6


def read_experts(data: Path, system: System, model: ModelSpec, gpus: int, tokens: Floats) -> Floats:
    """Give the seconds of all layers' experts, as many activated as even routing reaches.

    They were timed on one GPU. Each of several reads its share of the activated experts' weights,
    and computes its share of the tokens' products, whether experts or their columns are shared out.
    """
    path = path_of(system, model, 1, "moe")
    table = read_table(data, path, SOURCE, ("tokens", "activated_experts", "time_us"))
    met = np.array([model.experts_met(int(count)) for count in tokens]) / gpus
    tokens = tokens / gpus
    sizes, found = np.unique(table["tokens"]).astype(float), []
    for size in sizes:
        rows = table[table["tokens"] == size].sort_values("activated_experts")
        found.append(np.interp(met, rows["activated_experts"], rows["time_us"]))
    times = np.array(found)
    each = [np.interp(count, sizes, times[:, i]) for i, count in enumerate(tokens)]
    beyond = np.maximum(1.0, tokens / sizes[-1])
    return model.num_hidden_layers * np.array(each) * beyond / 1e6


def _pivot(table: "pd.DataFrame", index: str) -> "pd.DataFrame":
    return table.pivot_table(index=index, columns="layer", values="time_us").interpolate()
