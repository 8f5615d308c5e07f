"""What attention costs in steps that mix prompts and decodes, where FlashAttention-2 runs.

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

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import numpy as np

from calibration.errors import Errors, Floats, fit_positive
from calibration.kernel_tables.llmservingsim import LayerTables
from calibration.kernel_tables.tables import GPU_TABLES, GpuTables
from calibration.kernel_tables.timed_steps import TimedSteps
from simulator.costs.roofline import TILE
from simulator.models.load import load_model

MODEL = "llama-3.1-8b"
BLOCK = 128  # keys
HEADS = 32  # of Llama-3.1-8B
MIXED_START = np.array([1e-5, 1e-10, 3e-8, 8e-9, 1e-6, 3e-8])  # of one layer's coefficients
LONGEST = 8192  # tokens; beyond, one long sequence behaves unlike a batch


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
    """Give the form m + max(d P + f T_p + c' S + e' N, r K) of those coefficients."""

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
    """Give the factors' geometric means over the measured GPUs, with the larger errors."""
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
