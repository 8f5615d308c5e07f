"""What a run asks of the GPUs' arithmetic and memory bandwidth."""

from collections.abc import Sequence

import numpy as np

from simulator.build.engine_spec import EngineSpec
from simulator.core.log import Log
from simulator.models.dtypes import HALF, bytes_of
from simulator.models.spec import ModelSpec
from simulator.results.request_table import Floats, RequestTable

SLICE = 1 << 16  # requests looked at together: bounds the temporaries


def peak_flops(spec: EngineSpec) -> float:
    """Return the FLOP/s of one GPU in the weights' dtype."""
    return spec.gpu.flops(spec.model.weight_dtype(spec.engine.weight_dtype))


def needed_flops(model: ModelSpec, table: RequestTable) -> float:
    """Count the FLOPs that the answers need, as MFU is defined (PaLM, 2022, appendix B).

    Each token but the last one goes through the layers once and attends to those before it and
    to itself; lm_head runs for the tokens that come out. Not counted: cached prompt tokens,
    padding, ghosts of a static batch, recomputation, requests without a first token.
    """
    through = out = attended = 0.0  # tokens through the layers, tokens out, (query, key) pairs
    for at in range(0, len(table.generated), SLICE):
        some = slice(at, at + SLICE)
        generated = table.generated[some]
        given = generated > 0
        begin, generated = table.cached[some][given].astype(np.float64), generated[given]
        end = (table.workload.prompt_tokens[some][given] + generated - 1).astype(np.float64)
        pairs = (end * (end + 1) - begin * (begin + 1)) / 2
        if model.sliding_window:
            seen = _seen(end, model.sliding_window) - _seen(begin, model.sliding_window)
            pairs += model.windowed * (seen - pairs)
        through += float((end - begin).sum())
        out += float(generated.sum())
        attended += float(pairs.sum())
    head = 2 * model.head_parameters
    layers = model.flops_per_token - head
    return layers * through + head * out + model.attention_flops_per_pair * attended


def _seen(end: Floats, window: int) -> Floats:
    """Count the pairs of the first `end` queries within a window."""
    short = np.minimum(end, window)
    pairs: Floats = short * (short + 1) / 2 + (end - short) * window
    return pairs


def read_bytes(spec: EngineSpec, logs: Sequence[Log], steps: int, context: int) -> float:
    """Count the bytes that all GPUs read: every step the weights, and the decodes' KV entries.

    Left out: activations, writes, and the KV that prefills read. Of a mixture of experts, those
    that a step's tokens meet if they choose evenly, and those of its like on other ranks. `steps`
    and `context` (KV entries that decodes read) are the sums over the logs.
    """
    model, engine = spec.model, spec.engine
    size, dtype = engine.tensor_parallel_size, engine.weight_dtype
    experts = _mean_experts(model, logs, steps, engine.data_parallel_size)
    width = max(bytes_of(model.weight_dtype(dtype)), HALF)
    weights = model.matrix_bytes(experts, dtype) + width * model.head_parameters
    kv = model.kv_bytes_per_token(engine.cache_dtype, size) * size
    return weights * steps + kv * _read_tokens(model, logs, context)


def _read_tokens(model: ModelSpec, logs: Sequence[Log], context: int) -> float:
    """Count the KV entries that decodes read, on the mean over the layers."""
    if not model.sliding_window:
        return context
    within = 0.0
    for log in logs:
        rows = log.steps
        sequences = rows["decodes"] + np.where(rows["prefill_tokens"], 0, rows["wasted"])
        mean = rows["context"] + sequences * (rows["steps"] - 1) / 2
        most = model.sliding_window * sequences
        within += float((rows["steps"] * np.minimum(mean, most)).sum())
    return context + model.windowed * (within - context)


def _mean_experts(model: ModelSpec, logs: Sequence[Log], steps: int, ranks: int) -> float:
    """Average over the steps the experts of a layer that a step needs, divided among the ranks."""
    if not model.num_experts or not steps:
        return 0.0
    total = 0.0
    for log in logs:
        rows = log.steps
        tokens = rows["prefill_tokens"] + rows["decodes"] + rows["wasted"]
        times = np.bincount(tokens, rows["steps"])
        met = {n: model.expected_experts(ranks * int(n)) / ranks for n in np.flatnonzero(times)}
        total += sum(times[n] * experts for n, experts in met.items())
    return total / steps
