"""Steps whose attention was timed, and attention out of AIConfigurator's tables.

The kernels of full attention were timed on a grid of batches, lengths and heads, in milliseconds,
back to back. What the grid lacks is taken from its nearest entries; the returned notes say so.

DeepSeek-V3's multi-head latent attention was timed as vLLM runs it, with its projections: of a
decode, whose queries are multiplied with the latents, and of whole prompts, whose keys and values
are spelt out. The times of the shortest sequences are taken for the projections', what longer ones
add for attention's.

Gated DeltaNet is two kernels, the convolution and the delta rule: straight lines. A decode reads
and writes the state of every sequence; a prompt passes its state once and computes by tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from calibration.errors import Floats
from simulator.core.request import Chunk, Request, Step
from simulator.costs.cost_model import CostModel
from simulator.models.dtypes import bytes_of
from simulator.models.load import load_model
from simulator.models.spec import ModelSpec
from simulator.util.errors import HeadwayError
from tools.profiles.aiconfigurator import SOURCE, read_cached
from tools.profiles.positive import fit_positive
from tools.profiles.tables import (
    GpuTables,
    NotTimedError,
    has_table,
    interpolate,
    read_table,
)

if TYPE_CHECKING:
    import pandas as pd

MAX_KV_HEADS = 8  # of the decode tables
TIMED = "deepseek-v3"
SHORT = 64  # tokens of a prompt whose attention is next to nothing
MOST_DECODES = 512  # tokens up to which the projections are a decode's
LATENT = "{0.folder}/mla/vllm/{0.latent}/mla_{1}_module_perf.parquet"
LINEAR = "{0.folder}/linear_attention/vllm/{0.linear}/gdn_perf.parquet"


@dataclass(frozen=True)
class TimedSteps:
    """Steps of `chunks` prompts' parts, each of `size` tokens after `history`, and of decodes.

    One entry of each column per step; seconds are those of all layers, without the engine's
    overhead.
    """

    chunks: Floats
    size: Floats
    history: Floats
    decodes: Floats
    context: Floats  # cached tokens that all decodes read, S
    attention: Floats  # s
    rest: Floats  # s, matrix products, small kernels and head; 0 until they are added

    @classmethod
    def of_decodes(cls, count: Floats, context: Floats, attention: Floats) -> "TimedSteps":
        """Make steps of decodes alone."""
        nothing = np.zeros(len(count))
        return cls(
            chunks=nothing,
            size=nothing,
            history=nothing,
            decodes=count,
            context=context,
            attention=attention,
            rest=nothing,
        )

    @classmethod
    def of_prompts(cls, count: Floats, size: Floats, attention: Floats) -> "TimedSteps":
        """Make steps of whole prompts alone."""
        nothing = np.zeros(len(count))
        return cls(
            chunks=count,
            size=size,
            history=nothing,
            decodes=nothing,
            context=nothing,
            attention=attention,
            rest=nothing,
        )

    @classmethod
    def concatenated(cls, *parts: "TimedSteps") -> "TimedSteps":
        """Put steps into one set."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @property
    def seconds(self) -> Floats:
        """The whole step."""
        return self.rest + self.attention

    @property
    def tokens(self) -> Floats:
        """T, of chunks and decodes."""
        return self.chunks * self.size + self.decodes

    @property
    def sequences(self) -> Floats:
        """n, of chunks and decodes."""
        return self.chunks + self.decodes

    @property
    def pairs(self) -> Floats:
        """P, the (query, key) pairs of the chunks."""
        return self.chunks * (self.size * self.history + self.size * (self.size + 1) / 2)

    @property
    def longest(self) -> Floats:
        """K, the keys of the longest sequence; of decodes the mean is known."""
        mean = self.context / np.maximum(self.decodes, 1)
        return np.maximum((self.chunks > 0) * (self.size + self.history), mean)

    @property
    def mixed(self) -> npt.NDArray[np.bool_]:
        """Whether there are both prompts and decodes."""
        return np.asarray((self.chunks > 0) & (self.decodes > 0))

    def select(self, rows: npt.NDArray[np.bool_]) -> "TimedSteps":
        """Return some of the steps."""
        return TimedSteps(*(getattr(self, field.name)[rows] for field in fields(self)))

    def steps(self) -> list[Step]:
        """Return the steps as an executor receives them."""
        columns = (self.chunks, self.size, self.history, self.decodes, self.context)
        request = Request(0, 0.0, 1, 1)
        return [
            Step([Chunk(request, history, size)] * chunks, decodes, context)
            for chunks, size, history, decodes, context in np.stack(columns, 1).astype(int).tolist()
        ]

    def predict(self, cost: CostModel) -> Floats:
        """Return the seconds that a cost model predicts."""
        return np.array([cost.execute(step).seconds for step in self.steps()])


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


class HeadShape(NamedTuple):
    """The attention heads of one GPU."""

    heads: int  # of queries
    kv_heads: int
    size: int  # of a head


def read_attention(
    data: Path, tables: GpuTables, kind: str, shape: HeadShape, kv_cache_dtype: str
) -> tuple["pd.DataFrame", list[str]]:
    """Pick the rows for the heads of one GPU, in seconds of one layer.

    `kind` is context or generation. Adds the columns N, sequences, and S, cached tokens read.
    """
    path = f"{tables.folder}/attention/vllm/{tables.version}/{kind}_attention_perf.parquet"
    table, notes = read_cached(data, path, ATTENTION), []
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


def has_latent(data: Path, tables: GpuTables, model: ModelSpec) -> bool:
    """Tell whether the latent attention of a model of these sizes was timed on a GPU."""
    timed = load_model(TIMED)
    alike = model.latent == timed.latent and model.hidden_size == timed.hidden_size
    return alike and has_table(data, LATENT.format(tables, "generation"), SOURCE)


class LatentTimes(NamedTuple):
    """What one layer of latent attention takes."""

    tokens: Floats  # the grid of `projections`
    projections: Floats  # s
    steps: TimedSteps  # whose attention is that of the layer


def read_latent(
    data: Path, tables: GpuTables, heads: int, dtype: str, kv_cache_dtype: str
) -> LatentTimes:
    """Read the times of one layer.

    `heads` are those of one GPU. Decodes have `step` tokens before theirs.
    """
    gemm = "bfloat16" if dtype == "bfloat16" else "fp8_block"
    wanted = {"num_heads": heads, "kv_cache_dtype": kv_cache_dtype, "gemm_type": gemm}
    at = ["batch_size", "isl", "step"]

    def read(kind: str) -> Floats:
        """Return four rows: sequences, new and cached tokens of each, and seconds."""
        path = LATENT.format(tables, kind)
        table = _pick(read_table(data, path, SOURCE, (*wanted, *at, "latency")), wanted)
        median = table.groupby(at)["latency"].median()
        counts = [median.index.get_level_values(name).to_numpy(float) for name in at]
        return np.array([*counts, median.to_numpy(float) / 1e3])

    running, _, cached, whole = read("generation")
    prompts = read("context")
    count, isl, _, spent = prompts[:, prompts[1] > 1]
    few = (cached == cached.min()) & (running <= MOST_DECODES)
    curve = dict(zip(running[few], whole[few], strict=True))
    for tokens in np.unique((count * isl)[(isl <= SHORT) & (count * isl > MOST_DECODES)]):
        curve[tokens] = spent[(count * isl == tokens) & (isl <= SHORT)].min()
    tokens, seconds = np.array(sorted(curve.items())).T
    seconds = np.maximum.accumulate(seconds)

    def added(at: Floats, whole: Floats) -> Floats:
        return np.maximum(whole - interpolate(at, tokens, seconds), 1e-9)

    steps = TimedSteps.concatenated(
        TimedSteps.of_decodes(running, running * (cached + 1), added(running, whole)),
        TimedSteps.of_prompts(count, isl, added(count * isl, spent)),
    )
    return LatentTimes(tokens, seconds, steps)


@dataclass(frozen=True)
class LinearKernels:
    """Seconds of the kernels of all layers with linear attention."""

    decode: float = 0.0
    per_sequence: float = 0.0
    prefill: float = 0.0
    per_token: float = 0.0


NO_LINEAR = LinearKernels()


def has_linear(data: Path, tables: GpuTables) -> bool:
    """Tell whether linear attention was timed on a GPU."""
    return has_table(data, LINEAR.format(tables), SOURCE)


def read_linear(data: Path, tables: GpuTables, model: ModelSpec, gpus: int) -> LinearKernels:
    """Fit the lines to the heads of one GPU of so many."""
    linear = model.linear
    assert linear is not None
    wanted = {
        "num_k_heads": linear.num_key_heads // gpus,
        "num_v_heads": linear.num_value_heads // gpus,
        "head_k_dim": linear.key_head_dim,
        "head_v_dim": linear.value_head_dim,
    }
    by = ["phase", "batch_size", "seq_len"]
    columns = (*by, "kernel_source", "latency", *wanted)
    table = _pick(read_table(data, LINEAR.format(tables), SOURCE, columns), wanted)
    if table.empty:
        keys, values, *_ = wanted.values()
        raise NotTimedError(f"linear attention with {keys} and {values} heads on {tables.gpu.name}")
    each = table.groupby([*by, "kernel_source"], as_index=False)["latency"].median()
    total = each.groupby(by, as_index=False)["latency"].sum()

    def line(rows: "pd.DataFrame", name: str) -> Floats:
        """Fit a constant and a slope to relative errors."""
        at, seconds = rows[name].to_numpy(float), rows["latency"].to_numpy(float) / 1e3
        start = (seconds.min(), seconds[-1] / at[-1])
        return model.state_layers * fit_positive(lambda p: p[0] + p[1] * at, seconds, start, 1e-12)

    return LinearKernels(
        *line(_pick(total, {"phase": "generation"}), "batch_size"),
        *line(_pick(total, {"phase": "context", "batch_size": 1}), "seq_len"),
    )


def _pick(table: "pd.DataFrame", wanted: Mapping[str, object]) -> "pd.DataFrame":
    """Keep the rows that have these values in these columns."""
    return table[(table[[*wanted]] == [*wanted.values()]).all(axis=1)]
