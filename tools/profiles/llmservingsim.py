"""Layer times out of LLMServingSim's tables: one model's kernels in vLLM's worker, by TP degree.

Microseconds of one layer on one rank, without all-reduce. Attention was timed for whole batches
of one chunk and any number of decodes: the only published measurement of mixed steps. They tell
what attention costs in such steps where FlashAttention-2 runs.

With a prompt in the batch FlashAttention-2 cuts the queries of each sequence into tiles of 64 and
the keys into blocks of 128, and computes whole tiles against whole blocks. So a decode costs what
64 queries cost, however few bytes it reads, and a sequence goes through its keys one block after
the other on one multiprocessor. If d is the time of one (query, key) pair on the whole GPU:

    c' = keys 64 d             seconds per cached token of a decode
    e' = block 128 c'          seconds per decode
    r  = serial 64 d SMs / h   seconds per key of the longest sequence; h: attention heads

The three factors would be 1 on an ideal GPU. They are fitted here to LLMServingSim's joint
measurements of mixed batches (MIT licence, vLLM 0.19) on two GPUs, and serve those that have none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibration.errors import Errors, Floats
from simulator.costs.roofline import TILE
from simulator.models.load import load_model
from simulator.models.spec import ModelSpec
from tools.profiles.attention import TimedSteps
from tools.profiles.positive import fit_positive
from tools.profiles.tables import GPU_TABLES, GpuTables, has_table, read_table

if TYPE_CHECKING:
    import pandas as pd

SOURCE = "llmservingsim"
MODELS = {
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B-Instruct-2507",
}
ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
SKEW = ("n", "nb", "pc", "kv_big", "kv_mean", "t_mean_us", "t_skew_us")
SUMMED = 3  # passes that a row of skew.csv adds up: its batches of one length take 3.00 x ATTENTION
FEW = 1 / 8  # of the sequences: longer than the others
PER_STEP = ("embedding", "final_layernorm")  # per step; the others are per layer
TWICE_PER_LAYER = "layernorm"  # per layer
MODEL = "llama-3.1-8b"
BLOCK = 128  # keys
HEADS = 32  # of Llama-3.1-8B
MIXED_START = np.array([1e-5, 1e-10, 3e-8, 8e-9, 1e-6, 3e-8])  # of one layer's coefficients
LONGEST = 8192  # tokens; beyond, one long sequence behaves unlike a batch


@dataclass(frozen=True)
class LayerTables:
    """The tables of a model of this shape on one GPU of so many."""

    data: Path
    tables: GpuTables
    model: ModelSpec
    gpus: int

    def _path(self, table: str, gpus: int) -> str:
        """Return the path of a table, "" where no such model was timed on the GPU.

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
        return TimedSteps(
            chunks=chunks,
            size=size,
            history=history,
            decodes=count,
            context=count * each,
            attention=seconds,
            rest=nothing,
        )

    def wait_per_key(self, pairs: float) -> float:
        """Return the seconds of all layers for each key of the longest sequence beyond the mean.

        In decodes of so many (sequence, KV head) pairs at least, few of them longer than the rest.
        """
        table = self._read("skew", SKEW)
        many = table["n"] * max(1, self.model.num_key_value_heads // self.gpus) >= pairs
        table = table[many & (table["pc"] == 0) & (table["nb"] <= FEW * table["n"])]
        waits = (table["t_skew_us"] - table["t_mean_us"]) / (table["kv_big"] - table["kv_mean"])
        return self.model.num_hidden_layers * float(waits.median()) / SUMMED / 1e6

    def dense(self) -> tuple[Floats, Floats]:
        """Return token counts and the seconds of all layers but attention and experts."""
        times = _pivot(self._read("dense", ("layer", "tokens", "time_us")), "tokens")
        total = np.zeros(len(times))
        for layer in times:
            number = self.model.num_hidden_layers * (1 + (layer == TWICE_PER_LAYER))
            total += times[layer].to_numpy() * (1 if layer in PER_STEP else number)
        return times.index.to_numpy(float), total / 1e6

    def head(self) -> tuple[Floats, Floats]:
        """Return sequence counts and the seconds of output projection and sampler."""
        times = _pivot(self._read("per_sequence", ("layer", "sequences", "time_us")), "sequences")
        return times.index.to_numpy(float), times.sum(axis=1).to_numpy() / 1e6

    def experts(self, tokens: Floats) -> Floats:
        """Return the seconds of all layers' experts, as many activated as even routing reaches.

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


@dataclass(frozen=True)
class MixedFactors:
    """The three factors above, and the relative errors of the fit they come from."""

    keys: float
    block: float
    serial: float
    median_error: float
    p95_error: float


def read_mixed(data: Path, tables: GpuTables) -> TimedSteps:
    """Read one GPU's batches with a chunk in them, of Llama-3.1-8B."""
    found = LayerTables(data, tables, load_model(MODEL), 1).attention()
    longest = np.maximum(found.history, found.context / np.maximum(found.decodes, 1))
    return found.select((found.size > 0) & (longest <= LONGEST))


Form = Callable[[Floats], Floats]
"""Seconds of some steps by the coefficients of a form."""


def mixed_form(steps: TimedSteps) -> Form:
    """Return the form m + max(d P + f T_p + c' S + e' N, r K) of those coefficients."""

    def predict(p: Floats) -> Floats:
        work = p[1] * steps.pairs + p[2] * steps.chunks * steps.size
        work = work + p[3] * steps.context + p[4] * steps.decodes
        return np.asarray(p[0] + np.maximum(work, p[5] * steps.longest))

    return predict


def fit_mixed(steps: TimedSteps, multiprocessors: int) -> MixedFactors:
    """Fit that form to one GPU's mixed batches; give its three factors."""
    predict, seconds = mixed_form(steps), steps.attention
    found = fit_positive(predict, seconds, MIXED_START * load_model(MODEL).num_hidden_layers)
    _, pair, _, key, sequence, serial = found
    errors = Errors.of(predict(found), seconds)
    return MixedFactors(
        key / (TILE * pair),
        sequence / (BLOCK * key),
        serial / (TILE * pair * multiprocessors / HEADS),
        errors.median,
        errors.p95,
    )


def fa2_factors(data: Path) -> MixedFactors:
    """Return the factors' geometric means over the measured GPUs, with the larger errors."""
    fits = [fit_mixed(read_mixed(data, t), t.multiprocessors) for t in GPU_TABLES if t.layers]

    def mean(name: str) -> float:
        return exp(sum(log(getattr(fit, name)) for fit in fits) / len(fits))

    return MixedFactors(
        mean("keys"),
        mean("block"),
        mean("serial"),
        max(fit.median_error for fit in fits),
        max(fit.p95_error for fit in fits),
    )
