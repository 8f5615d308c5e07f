"""Times of routed experts out of AIConfigurator's tables, by routing, on GPUs that share them.

A table has the tokens of all GPUs together, and the time of the GPU that has the most to do. Under
`balanced` routing the tokens of a step meet as many experts as can be, all equally often; under
`power_law_1.01` and `power_law_1.2` the loads of experts are drawn from such a law. Tokens that
choose evenly, each by itself, meet fewer experts in a small step: `uniform` is the balanced time,
less the share of experts that nobody has chosen. More tokens take no shorter: where a table says so
its times are smoothed (isotonic regression of their logarithms).
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibration.errors import Floats
from calibration.kernel_tables.tables import GpuTables, has_table, read_table
from simulator.core.engine_config import UNIFORM
from simulator.models.spec import ModelSpec, bytes_of

if TYPE_CHECKING:
    import pandas as pd

SOURCE = "aiconfigurator"
POWER_LAWS = ("power_law_1.01", "power_law_1.2")
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
        """Give the times of one layer by routing: token counts and seconds.

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
                found[routing] = tokens, np.exp(isotonic_regression(np.log(seconds)).x)
        if found and UNIFORM not in found:  # as in the A100's tables
            found[UNIFORM] = found[POWER_LAWS[0]]
        return found or None

    def _chosen_share(self, tokens: Floats, seconds: Floats) -> Floats:
        """Give the time of the experts met if tokens choose evenly, to that if none meets another.

        It is read off the table, at the tokens that meet as many when none meets another.
        """
        model = self.model
        met = np.array([model.expected_experts(int(count)) for count in tokens])
        most = np.minimum(tokens * model.num_experts_per_tok, model.num_experts)
        at, all_met = (experts / model.num_experts_per_tok for experts in (met, most))
        share = np.interp(at, tokens, seconds) / np.interp(all_met, tokens, seconds)
        return np.minimum(1.0, share)

    def _scale(self, tokens: Floats) -> Floats:
        """Give the work of the model's experts to that of those timed: bytes, or FLOPs."""
        assert self._rows is not None
        timed = tuple(int(self._rows[name].iloc[0]) for name in SHAPE)
        ridge = self.tables.gpu.flops(self.dtype) / self.tables.gpu.bandwidth  # FLOPs a byte
        ours, theirs = (
            _work(shape, tokens, bytes_of(self.dtype), ridge) for shape in (self._shape, timed)
        )
        return np.asarray(ours / theirs)


def _work(shape: tuple[int, ...], tokens: Floats, width: float, ridge: float) -> Floats:
    """Give what a layer's experts take, in bytes that are moved in the same time."""
    hidden, inner, chosen, experts = shape
    met = experts * (1 - (1 - chosen / experts) ** tokens)
    return np.asarray(3 * hidden * inner * np.maximum(met * width, 2 * chosen * tokens / ridge))


def _distance(one: tuple[int, ...], two: tuple[int, ...]) -> float:
    """Give how unlike two shapes are."""
    return float(np.abs(np.log(np.array(one) / np.array(two))).sum())
