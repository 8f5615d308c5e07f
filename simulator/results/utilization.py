"""How much of the GPUs' arithmetic and memory bandwidth the run made use of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simulator.core.log import Log
from simulator.results.gauges import StepSums, share
from simulator.results.tables import Floats, RequestTable

if TYPE_CHECKING:
    from simulator.models.gpus import Gpu
    from simulator.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Served:
    """A model on one engine core's GPUs; the dtypes are those of the weights and the KV cache."""

    model: "ModelSpec"
    gpu: "Gpu"
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    data_parallel_size: int = 1


def utilization(
    served: Served, table: RequestTable, logs: Sequence[Log], sums: StepSums, duration: float
) -> dict[str, object]:
    """Give `mfu` and `bandwidth_utilization`, shares of the peaks over the whole run."""
    flops, read = needed_flops(served.model, table), read_bytes(served, logs, sums)
    return shares_of_peaks(served, flops, read, len(logs), duration)


def shares_of_peaks(
    served: Served, flops: float, read: float, replicas: int, duration: float
) -> dict[str, object]:
    """Give the same of the FLOPs needed and the bytes read by so many replicas."""
    gpus = served.tensor_parallel_size * replicas
    peak = served.gpu.flops(served.model.resolve_dtype(served.dtype))
    return {
        "mfu": share(flops, peak * gpus * duration),
        "bandwidth_utilization": share(read, served.gpu.bandwidth * gpus * duration),
    }


def needed_flops(model: "ModelSpec", table: RequestTable) -> float:
    """Count the FLOPs that the answers need, as MFU is defined (PaLM, 2022, appendix B).

    Each token but the last one goes through the layers once and attends to those before it and
    to itself; lm_head runs for the tokens that come out. Not counted: cached prompt tokens,
    padding, ghosts of a static batch, recomputation, requests without a first token.
    """
    out = table.generated > 0
    begin = table.cached[out].astype(np.float64)
    generated = table.generated[out]
    end = (table.workload.prompt_tokens[out] + generated - 1).astype(np.float64)
    pairs = (end * (end + 1) - begin * (begin + 1)) / 2
    if model.sliding_window:
        seen = _seen(end, model.sliding_window) - _seen(begin, model.sliding_window)
        pairs += model.windowed * (seen - pairs)
    head = 2 * model.head_parameters
    layers = model.flops_per_token - head
    return (
        layers * float((end - begin).sum())
        + head * float(generated.sum())
        + model.attention_flops_per_pair * float(pairs.sum())
    )


def _seen(end: Floats, window: int) -> Floats:
    """Count the pairs of the first `end` queries within a window."""
    short = np.minimum(end, window)
    pairs: Floats = short * (short + 1) / 2 + (end - short) * window
    return pairs


def read_bytes(served: Served, logs: Sequence[Log], sums: StepSums) -> float:
    """Count the bytes that all GPUs read: every step the weights, and the decodes' KV entries.

    Left out: activations, writes, and the KV that prefills read. Of a mixture of experts, those
    that a step's tokens meet if they choose evenly, and those of its like on other ranks.
    """
    model, size = served.model, served.tensor_parallel_size
    width = model.linear_bytes_per_parameter(served.dtype)
    experts = _mean_experts(model, logs, sums.steps, served.data_parallel_size)
    weights = width * model.linear_parameters(experts) + max(width, 2.0) * model.head_parameters
    kv = model.kv_bytes_per_token(served.kv_cache_dtype) * model.kv_share(size) * size
    return weights * sums.steps + kv * _read_tokens(model, logs, sums)


def _read_tokens(model: "ModelSpec", logs: Sequence[Log], sums: StepSums) -> float:
    """Count the KV entries that decodes read, on the mean over the layers."""
    if not model.sliding_window:
        return sums.context
    within = 0.0
    for log in logs:
        rows = log.steps
        seats = rows["decodes"] + np.where(rows["prefill_tokens"], 0, rows["wasted"])
        context = rows["context"] + seats * (rows["steps"] - 1) / 2
        within += float((rows["steps"] * np.minimum(context, model.sliding_window * seats)).sum())
    return sums.context + model.windowed * (within - sums.context)


def _mean_experts(model: "ModelSpec", logs: Sequence[Log], steps: int, ranks: int) -> float:
    """Average over the steps the experts of a layer that a step needs, divided among the ranks."""
    if not model.num_experts or not steps:
        return 0.0
    total = 0.0
    for log in logs:
        rows = log.steps
        tokens = rows["prefill_tokens"] + rows["decodes"] + rows["wasted"]
        times = np.bincount(tokens, rows["steps"])
        met = {n: model.experts_met(ranks * int(n)) / ranks for n in np.flatnonzero(times)}
        total += sum(times[n] * experts for n, experts in met.items())
    return total / steps
