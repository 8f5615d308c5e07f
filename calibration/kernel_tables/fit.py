"""Fit the cost profiles that come with the package.

    python -m calibration.kernel_tables.fit --data DIR --out simulator/costs/profiles

writes all of them; `headway profile build` writes one.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

from calibration.kernel_tables.compose import Target
from calibration.kernel_tables.fit_target import FitReport, fit_target
from calibration.kernel_tables.profile_text import profile_text
from calibration.kernel_tables.tables import GPU_TABLES, GpuTables, run_command
from simulator.models.gpus import GRACE
from simulator.models.kv_budget import kv_budget
from simulator.models.load import load_model
from simulator.models.spec import HALF, ModelSpec, bytes_of
from simulator.util.files import write_atomic

MODELS = {
    "llama-3-8b": (1, 2, 4),
    "llama-2-7b": (1, 2),
    "llama-2-13b": (1, 2),
    "mistral-7b-v0.3": (1,),
    "qwen2.5-7b": (1, 2),
    "qwen3-8b": (1, 2),
    "qwen3-14b": (1, 2, 4),
    "qwen3-32b": (1, 2, 4, 8),
    "yi-34b": (1, 2, 4),
    "codellama-34b": (1, 2, 4),
    "llama-3-70b": (1, 2, 4, 8),
    "llama-2-70b": (2, 4, 8),
}
"""TP degrees of models in 16 bits, where the weights leave room for a cache."""
NEWER_MODELS: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
    "mixtral-8x7b": (("bfloat16", (1, 2, 4)),),
    "mixtral-8x22b": (("bfloat16", (4, 8)),),
    "qwen3-30b-a3b": (("bfloat16", (1, 2)), ("fp8", (1, 2))),
    "qwen3-235b-a22b": (("bfloat16", (8,)), ("fp8", (4, 8))),
    "gpt-oss-20b": (("mxfp4", (1,)),),
    "gpt-oss-120b": (("mxfp4", (1, 2, 4)),),
    "llama-4-scout": (("bfloat16", (4, 8)), ("fp8", (2, 4, 8))),
    "llama-4-maverick": (("fp8", (4, 8)),),
    "glm-4.5": (("fp8", (4, 8)),),
    "deepseek-v3": (("fp8", (4, 8)),),
    "kimi-k2": (("fp8", (8,)),),
    "qwen3-next-80b-a3b": (("bfloat16", (2, 4)),),
    "gemma-3-27b": (("bfloat16", (1, 2)),),
    "mistral-small-24b": (("bfloat16", (1, 2)),),
}
"""Models that have experts, or came later: the dtypes in which they are served, and TP degrees."""
LARGE = ("deepseek-v3", "gpt-oss-120b", "kimi-k2", "llama-4-maverick", "qwen3-235b-a22b")
FEW = ("b300", "gb200", "gb300")
"""GPUs that have profiles of `QUANTIZED` and `LARGE` models alone."""
GRACE_GPUS = 4
"""GPUs of a compute tray of GB200 or GB300; the all-reduce of more is not timed."""
QUANTIZED = ("llama-3-8b", "qwen3-32b", "llama-3-70b")
LAYER_MODELS: dict[str, dict[str, tuple[int, ...]]] = {
    "rtx-4090": {"llama-3-8b": (1,)},
    "rtx-pro-6000": {"llama-3-8b": (1, 2), "qwen3-32b": (1, 2), "qwen3-30b-a3b": (1, 2)},
}
MIN_CACHE_TOKENS = 16_000  # tokens that the cache must hold
DTYPE_NAMES = {"bfloat16": "bf16"}


def shipped_targets() -> Iterator[Target]:
    """Give all targets, model by model."""
    grids = [tables for tables in GPU_TABLES if not tables.layers]
    for (name, degrees), tables in product(MODELS.items(), grids):
        if tables.key not in FEW or name in QUANTIZED:
            for gpus in degrees:
                if _timed(tables, gpus, "bfloat16"):
                    yield from _precisions(load_model(name), tables, gpus)
    for (name, precisions), tables in product(NEWER_MODELS.items(), grids):
        if tables.key not in FEW or name in LARGE:
            yield from _newer(load_model(name), tables, precisions)
    for key, models in LAYER_MODELS.items():
        tables = next(tables for tables in GPU_TABLES if tables.key == key)
        for name, degrees in models.items():
            for gpus in degrees:
                yield Target(load_model(name), tables, gpus)


def _newer(
    model: ModelSpec, tables: GpuTables, precisions: Iterable[tuple[str, tuple[int, ...]]]
) -> Iterator[Target]:
    """Give the precisions of a newer model that fit, where its attention was timed."""
    if (model.latent and not tables.latent) or (model.linear and not tables.linear):
        return
    for dtype, degrees in precisions:
        for gpus in degrees:
            if _timed(tables, gpus, dtype) and _fits(model, tables, gpus, dtype, "bfloat16"):
                yield Target(model, tables, gpus, dtype)


def _timed(tables: GpuTables, gpus: int, dtype: str) -> bool:
    """Tell whether a GPU's tables have experts of a dtype, and sums over so many of these GPUs."""
    if tables.gpu.name in GRACE and gpus > GRACE_GPUS:
        return False
    return dtype == "bfloat16" or bool(tables.gpu.fp8_flops)


def _precisions(model: ModelSpec, tables: GpuTables, gpus: int) -> Iterator[Target]:
    """Give the precisions that fit, in 16 bits, fp8 and nvfp4."""
    wanted = [("bfloat16", "bfloat16")]
    if model.name in QUANTIZED and tables.gpu.fp8_flops:
        wanted.append(("fp8", "bfloat16"))
        if model.name != "qwen3-32b":
            wanted.append(("fp8", "fp8"))
    if model.name == "llama-3-70b" and tables.key in ("b200", *FEW):
        wanted.append(("nvfp4", "fp8"))
    for dtype, cache in wanted:
        if _fits(model, tables, gpus, dtype, cache):
            yield Target(model, tables, gpus, dtype, cache)


def _fits(model: ModelSpec, tables: GpuTables, gpus: int, dtype: str, cache: str) -> bool:
    """Tell whether weights and ROOM tokens fit at vLLM's defaults."""
    try:
        budget = kv_budget(
            model,
            tables.gpu,
            tensor_parallel_size=gpus,
            quantization=None if bytes_of(dtype) == HALF else dtype,
            kv_cache_dtype=cache,
        )
    except ValueError:
        return False
    return budget.num_gpu_blocks * 16 >= MIN_CACHE_TOKENS


def target_name(target: Target) -> str:
    """Name a profile: model, GPU with TP degree, dtypes of weights and, where another, of cache."""
    weights = DTYPE_NAMES.get(target.dtype, target.dtype)
    cache = DTYPE_NAMES.get(target.kv_cache_dtype, target.kv_cache_dtype)
    gpus = f"-tp{target.gpus}" if target.gpus > 1 else ""
    kept = "" if cache == "bf16" else f"-kv{cache}"
    return f"{target.model.name}.{target.tables.key}{gpus}.{weights}{kept}"


def write_profile(data: Path, target: Target, path: Path) -> FitReport:
    """Fit a target's cost and write its profile."""
    report = fit_target(data, target)
    text = profile_text(target, report)
    write_atomic(path, text.encode())
    return report


def write_all(data: Path, out: Path) -> None:
    """Fit and write all shipped profiles."""
    for target in shipped_targets():
        path = out / f"{target_name(target)}.yaml"
        report = write_profile(data, target, path)
        assert report.errors is not None  # all were timed
        print(f"{path}: median error {report.errors.median:.1%}")


def main(words: Sequence[str] | None = None) -> int:
    """Fit and write all shipped profiles; return the exit code."""
    what = "folder to write profiles to"
    return run_command("Fit the shipped cost profiles.", write_all, words, out=what)


if __name__ == "__main__":
    sys.exit(main())
