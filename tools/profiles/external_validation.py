"""Compare composed steps with measurements that no fit has seen.

    python -m tools.profiles.external_validation --data DIR

prints a line per comparison: median and 95th percentile of the relative errors, and the median of
predicted / measured. docs/cost-models.md shows what it printed.
"""

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from calibration.errors import Errors, Floats
from simulator.models.load import load_model
from tools.profiles.compose import Target, compose_kernels, compose_products
from tools.profiles.fit_target import (
    compose_steps,
    fit_cost,
    fit_target,
    roofline_errors,
)
from tools.profiles.llmservingsim import fit_mixed, read_mixed
from tools.profiles.product_slowdown import SHAPES, read_layer_products
from tools.profiles.tables import GPU_TABLES, find_gpu_tables, read_table, run_command

CHUNK, HISTORY = 256, 512  # tokens; below, launches outweigh what is compared
Comparison = tuple[str, Floats, Floats]  # what, predicted, measured


def vidur_attention(data: Path) -> Iterator[Comparison]:
    """Attention of Llama-2-70B at TP 2 on A100, timed by Vidur: decodes, and what a history adds.

    Whole prompts are left out: Vidur's kernel of 2023 computed the pairs that the mask hides.
    """
    target = Target(load_model("llama-2-70b"), find_gpu_tables("A100-80GB"), 2)
    cost, layers = fit_target(data, target).cost, target.model.num_hidden_layers
    names = [f"time_stats.attn_{kind}.median" for kind in ("prefill", "decode")]
    columns = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill", *names)
    table = read_table(data, "a100__Llama-2-70b__tp2__attention.csv", "vidur", columns)
    rows = table[(~table["is_prefill"]) & (table[names[1]] > 0)]
    count, each = (rows[name].to_numpy(float) for name in ("batch_size", "kv_cache_size"))
    reads = np.maximum(
        cost.decode_per_context * count * (each + 1), cost.decode_per_sequence * count
    )
    yield "decodes: attention", cost.decode + reads, layers * rows[names[1]].to_numpy(float) / 1e3
    rows = table[table["is_prefill"] & (table["prefill_chunk_size"] >= CHUNK)]
    size, history, time = (rows[name].to_numpy(float) for name in (*columns[1:3], names[0]))
    without = dict(zip(size[history == 0], time[history == 0], strict=True))
    added = layers * (time - np.array([without.get(count, np.nan) for count in size])) / 1e3
    some = (history >= HISTORY) & (added > 0)
    said = cost.prefill_per_pair * size * history
    what = f"what {HISTORY} or more cached tokens add to chunks of {CHUNK} or more"
    yield what, said[some], added[some]


def vidur_products(data: Path) -> Iterator[Comparison]:
    """Matrix products of the exact shapes, in sequence, on A100 and H100."""
    for key, models in SHAPES.items():
        tables = next(tables for tables in GPU_TABLES if tables.key == key)
        for low, high in ((1, 128), (129, 4096)):
            predicted, measured = [], []
            for name in models:
                for gpus in (1, 2, 4):
                    tokens, seconds = read_layer_products(data, key, name, gpus)
                    some = (tokens >= low) & (tokens <= high)
                    model = load_model(name)
                    grid, layers = compose_products(data, Target(model, tables, gpus), [])
                    each = layers / model.num_hidden_layers
                    predicted.append(np.interp(tokens[some], grid, each))
                    measured.append(seconds[some])
            what = f"products of {low} to {high} tokens, {tables.gpu.name}"
            yield what, np.concatenate(predicted), np.concatenate(measured)


def mixed_rule(data: Path) -> Iterator[Comparison]:
    """Mixed steps of one RTX GPU by FlashAttention-2's rule, its factors fitted on the other."""
    layers = [tables for tables in GPU_TABLES if tables.layers]
    for tables, other in (layers, layers[::-1]):
        target = Target(load_model("llama-3.1-8b"), tables)
        kernels = compose_kernels(data, target)
        steps = compose_steps(kernels)
        both = steps.mixed
        factors = fit_mixed(read_mixed(data, other), other.multiprocessors)
        cost = fit_cost(kernels, steps.select(~both), factors, target)
        held_out = steps.select(both)
        what = f"mixed steps of {target.model.name}, {tables.gpu.name}, rule of {other.gpu.name}"
        yield what, held_out.predict(cost), held_out.seconds


def rooflines(data: Path) -> Iterator[Comparison]:
    """Steps of models that the efficiencies have not seen, by roofline."""
    for gpu in ("A100-80GB", "H100-80GB", "B200", "L40S", "RTX-PRO-6000"):
        tables = find_gpu_tables(gpu)
        for name in ("qwen3-30b-a3b",) if tables.layers else ("qwen3-14b", "llama-2-7b"):
            target = Target(load_model(name), tables)
            yield f"roofline: steps of {name}, {gpu}", *roofline_errors(data, target)


def print_comparisons(data: Path) -> None:
    """Print a line of a table for each comparison."""
    print("| what | points | median error | P95 | predicted / measured |\n|---|--:|--:|--:|--:|")
    checks = (vidur_products, vidur_attention, mixed_rule, rooflines)
    for what, predicted, measured in chain.from_iterable(check(data) for check in checks):
        errors = Errors.of(predicted, measured)
        print(
            f"| {what} | {errors.points:,} | {errors.median:.1%} | {errors.p95:.1%} | "
            f"{np.median(predicted / measured):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(run_command("Compare composed steps with other sources.", print_comparisons))
