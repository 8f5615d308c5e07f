"""What share of its data sheet each GPU's kernels reach: simulator/costs/efficiencies.yaml.

    python -m tools.profiles.fit_efficiencies --data DIR

For every GPU with tables the shares are fitted to the composed steps of two models, each kind of
kernel by itself.
"""

import sys
from pathlib import Path

import numpy as np

from calibration.errors import Errors, Floats
from simulator.costs.roofline import (
    EFFICIENCIES,
    Efficiency,
    measured_efficiencies,
    products_seconds,
    small_kernels,
)
from simulator.models.gpus import GPUS
from simulator.models.load import load_model
from simulator.util.files import write_atomic
from tools.profiles.aiconfigurator import AllReduce
from tools.profiles.compose import Kernels, Target, compose_kernels
from tools.profiles.fit_target import fit_target, roofline_errors
from tools.profiles.positive import fit_positive
from tools.profiles.tables import GPU_TABLES, GpuTables, run_command

MODELS = ("llama-3-8b", "qwen3-32b")
MODELS_OF = {"rtx-4090": MODELS[:1]}
DEGREES = (2, 4, 8)
DEGREES_OF = {"l40s": (2,)}  # more depend on how a server connects them
FP8 = "H200"
PCIE = "RTX-PRO-6000"
LARGE_MESSAGES = np.array([8.0, 16, 32, 64]) * (1 << 20)  # bytes of an all-reduce
HEAD = f"""\
# What share of its data sheet each GPU's kernels reach; simulator/costs/roofline.py explains
# the keys. Written by `python -m tools.profiles.fit_efficiencies` from the tables of
# AIConfigurator (Apache-2.0) and LLMServingSim (MIT), as fitted to {" and ".join(MODELS)} in 16
# bits on one GPU. `error` is the median relative error of a roofline with these shares on the
# composed steps of these models. No all-reduce was timed on
# RTX 4090: its `link` is the share that has the bandwidth of the RTX PRO 6000's; that of L40S is of
# two GPUs, since four and more depend on how a server connects them. Where no fp8 products were
# timed, `compute_fp8` is that of the H200.
gpus:
"""

Composed = tuple[Target, Kernels]


def fit_products(composed: list[Composed]) -> tuple[float, float]:
    """Fit the shares of bandwidth and FLOP/s in matrix products, robustly in relative terms."""

    def predict(shares: Floats) -> Floats:
        weights, compute = shares
        share = Efficiency(weights=weights, compute=compute, compute_fp8=compute)
        found = []
        for target, kernels in composed:
            model, gpu = target.model, target.tables.gpu
            small = small_kernels(model, gpu, kernels.tokens) * model.num_hidden_layers
            found.append(products_seconds(model, gpu, target.dtype, kernels.tokens, share) + small)
        return np.concatenate(found)

    measured = np.concatenate([kernels.dense for _, kernels in composed])
    weights, compute = fit_positive(predict, measured, (0.8, 0.7))
    return float(weights), float(compute)


def attention_shares(data: Path, targets: list[Target]) -> dict[str, float]:
    """Return the shares that the attention of fitted costs stands for."""
    cache, pairs, launch = [], [], []
    for target in targets:
        model, gpu, cost = target.model, target.tables.gpu, fit_target(data, target).cost
        cache.append(model.kv_bytes_per_token("bf16") / cost.decode_per_context / gpu.bandwidth)
        flops = model.attention_flops_per_pair / cost.prefill_per_pair
        pairs.append(flops / gpu.bf16_flops)
        launch.append(cost.decode / model.num_hidden_layers)
    shares = {"cache": cache, "attention": pairs, "launch": launch}
    return {name: float(np.median(values)) for name, values in shares.items()}


def link_shares(data: Path, tables: GpuTables) -> dict[str, float]:
    """Return latency and share of the link of all-reduces, their medians over TP degrees."""
    latency, link = [], []
    for gpus in DEGREES_OF.get(tables.key, DEGREES):
        sums = AllReduce(data, tables, gpus)
        if not sums.measured:
            continue
        first = float(sums.seconds(np.array([8192.0]))[0])
        spent = sums.seconds(LARGE_MESSAGES)
        passed = 2 * (gpus - 1) / gpus * LARGE_MESSAGES
        latency.append(first)
        link.append(float(np.median(passed / (spent - first))) / tables.gpu.link_bandwidth)
    if not link:
        return {}
    return {"link": float(np.median(link)), "link_latency": float(np.median(latency))}


def measure_shares(data: Path, tables: GpuTables) -> dict[str, float]:
    """Return a GPU's shares by name."""
    targets = [Target(load_model(name), tables) for name in MODELS_OF.get(tables.key, MODELS)]
    composed = [(target, compose_kernels(data, target)) for target in targets]
    weights, compute = fit_products(composed)
    shares = {"weights": weights, "compute": compute}
    if tables.gpu.fp8_flops and not tables.layers:
        halves = [Target(target.model, tables, dtype="fp8") for target in targets]
        found = fit_products([(target, compose_kernels(data, target)) for target in halves])
        shares["compute_fp8"] = found[1]
    return shares | attention_shares(data, targets) | link_shares(data, tables)


def roofline_fit_errors(data: Path, tables: GpuTables) -> Errors:
    """Return the relative errors of the roofline, with the shares that are shipped."""
    names = MODELS_OF.get(tables.key, MODELS)
    pairs = [roofline_errors(data, Target(load_model(name), tables)) for name in names]
    return Errors.of(*map(np.concatenate, zip(*pairs, strict=True)))


def efficiencies_text(measured: dict[str, dict[str, float]]) -> str:
    """Write the shares as YAML."""
    lines = [HEAD.rstrip()]
    for name, shares in measured.items():
        lines.append(f"  {name}:")
        lines += [f"    {key}: {value:.3g}" for key, value in shares.items()]
    return "\n".join(lines) + "\n"


def write_efficiencies(data: Path) -> None:
    """Measure all GPUs' shares and write the file that comes with the package."""
    found = {tables.gpu.name: measure_shares(data, tables) for tables in GPU_TABLES}
    for name, shares in found.items():
        if "link" not in shares:  # on PCIe: the share that has the bandwidth of the measured one
            ratio = GPUS[PCIE].link_bandwidth / GPUS[name].link_bandwidth
            shares["link"] = found[PCIE]["link"] * ratio
            shares["link_latency"] = found[PCIE]["link_latency"]
        shares.setdefault("compute_fp8", found[FP8]["compute_fp8"])
    _write(found)
    measured_efficiencies.cache_clear()
    for tables in GPU_TABLES:
        off = roofline_fit_errors(data, tables)
        found[tables.gpu.name] |= {"error": off.median}
    _write(found)


def _write(found: dict[str, dict[str, float]]) -> None:
    content = efficiencies_text(found).encode()
    write_atomic(EFFICIENCIES, content)


if __name__ == "__main__":
    sys.exit(run_command("Fit the GPUs' efficiencies.", write_efficiencies))
