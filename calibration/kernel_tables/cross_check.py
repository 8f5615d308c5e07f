"""Compare composed steps with measurements that no fit has seen.

    python -m calibration.kernel_tables.cross_check --data DIR

prints a line per comparison: median and 95th percentile of the relative errors, and the median of
predicted / measured. docs/cost-models.md shows what it printed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from calibration.kernel_tables.batches import Batches
from calibration.kernel_tables.compose import Target, compose_kernels
from calibration.kernel_tables.fit import Samples, calibrate, compose, fit_cost
from calibration.kernel_tables.in_sequence import SHAPES, read_sequence
from calibration.kernel_tables.llmservingsim import folder
from calibration.kernel_tables.mixed_steps import fit_mixed, read_mixed
from calibration.kernel_tables.systems import SYSTEMS, find_system
from calibration.kernel_tables.tables import Floats, read_table
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.roofline import roofline
from simulator.models.load import load_model
from simulator.util.errors import HeadwayError

CHUNK, HISTORY = 256, 512  # tokens; below, launches outweigh what is compared
Line = tuple[str, Floats, Floats]  # what, predicted, measured


def _said(cost: PiecewiseCost, batches: Batches) -> Floats:
    return np.array([cost.execute(step) for step in batches.steps()])


def vidur_attention(data: Path) -> Iterator[Line]:
    """Attention of Llama-2-70B at TP 2 on A100, timed by Vidur: decodes, and what a history adds.

    Whole prompts are left out: Vidur's kernel of 2023 computed the pairs that the mask hides.
    """
    target = Target(load_model("llama-2-70b"), find_system("A100-80GB"), 2)
    cost, layers = calibrate(data, target).cost, target.model.num_hidden_layers
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


def vidur_products(data: Path) -> Iterator[Line]:
    """Matrix products of the exact shapes, in sequence, on A100 and H100."""
    for key, models in SHAPES.items():
        system = next(system for system in SYSTEMS if system.key == key)
        for low, high in ((1, 128), (129, 4096)):
            said, measured = [], []
            for name in models:
                for gpus in (1, 2, 4):
                    tokens, seconds = read_sequence(data, key, name, gpus)
                    some = (tokens >= low) & (tokens <= high)
                    target = Target(load_model(name), system, gpus)
                    layer = _products(data, target, tokens[some])
                    said.append(layer)
                    measured.append(seconds[some])
            what = f"products of {low} to {high} tokens, {system.gpu.name}"
            yield what, np.concatenate(said), np.concatenate(measured)


def _products(data: Path, target: Target, tokens: Floats) -> Floats:
    from calibration.kernel_tables.compose import _products as products

    grid, layer = products(data, target, [])
    return np.asarray(np.interp(tokens, grid, layer))


def mixed_rule(data: Path) -> Iterator[Line]:
    """Mixed steps of one RTX GPU by FlashAttention-2's rule, its factors fitted on the other."""
    layers = [system for system in SYSTEMS if system.layers]
    for system, other in (layers, layers[::-1]):
        target = Target(load_model("llama-3.1-8b"), system)
        kernels = compose_kernels(data, target)
        samples = compose(kernels)
        found = samples.batches
        both = (found.chunks > 0) & (found.decodes > 0)
        factors = fit_mixed(read_mixed(data, other), other.multiprocessors)
        cost = fit_cost(kernels, samples.select(~both), factors, target)
        held: Samples = samples.select(both)
        what = f"mixed steps of {target.model.name}, {system.gpu.name}, rule of {other.gpu.name}"
        yield what, _said(cost, held.batches), held.seconds


def rooflines(data: Path) -> Iterator[Line]:
    """Steps of models that the efficiencies have not seen, by roofline."""
    for gpu in ("A100-80GB", "H100-80GB", "B200", "L40S", "RTX-PRO-6000"):
        system = find_system(gpu)
        for name in ("qwen3-14b", "llama-2-7b", "qwen3-30b-a3b"):
            target = Target(load_model(name), system)
            if (name == "qwen3-30b-a3b") != bool(system.layers):
                continue
            if system.layers and not folder(system, target.model):
                continue
            samples = compose(compose_kernels(data, target))
            said = _said(roofline(target.model, system.gpu), samples.batches)
            yield f"roofline: steps of {name}, {gpu}", said, samples.seconds


CHECKS: tuple[Callable[[Path], Iterator[Line]], ...] = (
    vidur_products,
    vidur_attention,
    mixed_rule,
    rooflines,
)


def main(arguments: list[str] | None = None) -> int:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(description="Compare composed steps with other sources.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the tables")
    options = parser.parse_args(arguments)
    print("| what | points | median error | P95 | predicted / measured |\n|---|--:|--:|--:|--:|")
    try:
        for check in CHECKS:
            for what, said, measured in check(options.data):
                off = np.abs(said / measured - 1)
                print(
                    f"| {what} | {len(off):,} | {np.median(off):.1%} | "
                    f"{np.percentile(off, 95):.1%} | {np.median(said / measured):.2f} |",
                    flush=True,
                )
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
