"""Layer times out of LLMServingSim's tables: one model's kernels in vLLM's worker, by TP degree.

Microseconds of one layer on one rank, without all-reduce. Attention was timed for whole batches
of one chunk and any number of decodes: the only published measurement of mixed steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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

SOURCE = "llmservingsim"
MODELS = {
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B-Instruct-2507",
}
ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
PER_STEP = ("embedding", "final_layernorm")  # per step; the others are per layer
TWICE_PER_LAYER = "layernorm"  # per layer


@dataclass(frozen=True)
class LayerTables:
    """The tables of a model of this shape on one GPU of so many."""

    data: Path
    tables: GpuTables
    model: ModelSpec
    gpus: int

    def _path(self, table: str, gpus: int) -> str:
        """Give the path of a table, "" where no such model was timed on the GPU.

        The flattened files leave the dtype out.
        """
        for name, published in MODELS.items():
            if self.tables.layers and load_model(name).shape == self.model.shape:
                return f"{self.tables.layers}/{published}/tp{gpus}/{table}.csv"
        return ""

    @property
    def timed(self) -> bool:
        """Whether this model was timed on this GPU at this TP degree."""
        path = self._path("attention", self.gpus)
        return bool(path) and has_table(self.data, path, SOURCE)

    def _read(self, table: str, columns: Sequence[str], gpus: int = 0) -> "pd.DataFrame":
        return read_table(self.data, self._path(table, gpus or self.gpus), SOURCE, columns)

    def attention(self) -> TimedSteps:
        """Read the attention of batches of every kind."""
        table = self._read("attention", ATTENTION)
        size, history, count, each, time = (table[name].to_numpy(float) for name in ATTENTION)
        chunks = (size > 0).astype(float)
        seconds = self.model.num_hidden_layers * time / 1e6
        nothing = np.zeros(len(size))
        return TimedSteps(chunks, size, history, count, count * each, seconds, nothing)

    def dense(self) -> tuple[Floats, Floats]:
        """Give token counts and the seconds of all layers but attention and experts."""
        times = _pivot(self._read("dense", ("layer", "tokens", "time_us")), "tokens")
        total = np.zeros(len(times))
        for layer in times:
            number = self.model.num_hidden_layers * (1 + (layer == TWICE_PER_LAYER))
            total += times[layer].to_numpy() * (1 if layer in PER_STEP else number)
        return times.index.to_numpy(float), total / 1e6

    def head(self) -> tuple[Floats, Floats]:
        """Give sequence counts and the seconds of output projection and sampler."""
        times = _pivot(self._read("per_sequence", ("layer", "sequences", "time_us")), "sequences")
        return times.index.to_numpy(float), times.sum(axis=1).to_numpy() / 1e6

    def experts(self, tokens: Floats) -> Floats:
        """Give the seconds of all layers' experts, as many activated as even routing reaches.

        They were timed on one GPU. Each of several reads its share of the activated experts'
        weights, and computes its share of the tokens' products, whether experts or their columns
        are shared out.
        """
        table = self._read("moe", ("tokens", "activated_experts", "time_us"), gpus=1)
        met = np.array([self.model.expected_experts(int(count)) for count in tokens]) / self.gpus
        tokens = tokens / self.gpus
        sizes, found = np.unique(table["tokens"]).astype(float), []
        for size in sizes:
            rows = table[table["tokens"] == size].sort_values("activated_experts")
            found.append(np.interp(met, rows["activated_experts"], rows["time_us"]))
        times = np.array(found)
        each = [np.interp(count, sizes, times[:, i]) for i, count in enumerate(tokens)]
        beyond = np.maximum(1.0, tokens / sizes[-1])
        return self.model.num_hidden_layers * np.array(each) * beyond / 1e6


def _pivot(table: "pd.DataFrame", index: str) -> "pd.DataFrame":
    return table.pivot_table(index=index, columns="layer", values="time_us").interpolate()
