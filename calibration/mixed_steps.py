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

import csv
import gzip
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import numpy as np
import numpy.typing as npt

from simulator.errors import HeadwayError
from simulator.roofline import TILE

Floats = npt.NDArray[np.float64]

BLOCK = 128  # keys
HEADS = 32  # of Llama-3.1-8B
MULTIPROCESSORS = {"RTX4090": 128, "RTXPRO6000": 188}
MULTIPROCESSORS_A100 = 108
LONGEST = 8192  # tokens; beyond, one long sequence behaves unlike a batch


@dataclass(frozen=True)
class MixedFactors:
    """The three factors above, and the relative errors of the fit they come from."""

    keys: float
    block: float
    serial: float
    median_error: float
    p95_error: float


def _find(data: Path, gpu: str) -> Path:
    upstream = f"{gpu}/meta-llama/Llama-3.1-8B/bf16/tp1/attention.csv"
    flat = f"{gpu}__meta-llama__Llama-3.1-8B__tp1__attention.csv.gz"
    for place in (data / upstream, data / flat, data / "profiles" / "llmservingsim" / flat):
        if place.exists():
            return place
    raise HeadwayError(f"{data}: has neither {upstream} (LLMServingSim, profiler/perf) nor {flat}")


def read_mixed(data: Path, gpu: str) -> dict[str, Floats]:
    """Read one layer's attention by chunk, history, decodes and their context; seconds."""
    path = _find(data, gpu)
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    rows = list(csv.DictReader(text.splitlines()))
    table = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    longest = np.maximum(table["kv_prefill"], table["kv_decode"])
    keep = (table["prefill_chunk"] > 0) & (longest <= LONGEST)
    table = {name: column[keep] for name, column in table.items()}
    table["seconds"] = table.pop("time_us") / 1e6
    return table


def fit_mixed(table: dict[str, Floats], multiprocessors: int) -> MixedFactors:
    """Fit m + max(d P + f T_p + c' S + e' N, r K) to one GPU's mixed batches."""
    from scipy.optimize import least_squares

    chunk, history, seconds = table["prefill_chunk"], table["kv_prefill"], table["seconds"]
    pairs = chunk * history + chunk * (chunk + 1) / 2
    context = table["n_decode"] * table["kv_decode"]
    longest = np.maximum(chunk + history, table["kv_decode"])

    def predict(p: Floats) -> Floats:
        work = p[1] * pairs + p[2] * chunk + p[3] * context + p[4] * table["n_decode"]
        return np.asarray(p[0] + np.maximum(work, p[5] * longest))

    start = np.log([1e-5, 1e-10, 3e-8, 8e-9, 1e-6, 3e-8])
    result = least_squares(
        lambda z: np.log(predict(np.exp(z)) / seconds), start, loss="soft_l1", f_scale=0.05
    )
    _, pair, _, key, sequence, serial = np.exp(result.x)
    errors = np.abs(predict(np.exp(result.x)) / seconds - 1)
    return MixedFactors(
        key / (TILE * pair),
        sequence / (BLOCK * key),
        serial / (TILE * pair * multiprocessors / HEADS),
        float(np.median(errors)),
        float(np.percentile(errors, 95)),
    )


def fa2_factors(data: Path) -> MixedFactors:
    """Give the factors' geometric means over the measured GPUs, with the larger errors."""
    fits = [fit_mixed(read_mixed(data, gpu), count) for gpu, count in MULTIPROCESSORS.items()]

    def mean(values: list[float]) -> float:
        return exp(sum(map(log, values)) / len(values))

    return MixedFactors(
        mean([fit.keys for fit in fits]),
        mean([fit.block for fit in fits]),
        mean([fit.serial for fit in fits]),
        max(fit.median_error for fit in fits),
        max(fit.p95_error for fit in fits),
    )
