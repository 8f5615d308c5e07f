"""Fit the cost profiles that come with the package.

    python -m tools.profiles.fit --data DIR --out simulator/costs/profiles

writes all of them; `python -m tools.profiles.build` writes one.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from simulator.models.dtypes import HALF, bytes_of
from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import GRACE
from simulator.models.kv_budget import estimate, fitting
from simulator.models.load import load_model
from simulator.models.spec import ModelSpec
from simulator.util.files import write_atomic
from tools.profiles.compose import Target
from tools.profiles.fit_target import FitReport, fit_target
from tools.profiles.profile_text import profile_text
from tools.profiles.tables import GPU_TABLES, GpuTables, run_command

HALVES, FP8, FP8_CACHE = ("bfloat16", "bfloat16"), ("fp8", "bfloat16"), ("fp8", "fp8")
MODELS: dict[str, dict[tuple[str, str], tuple[int, ...]]] = {
    "llama-3-8b": dict.fromkeys((HALVES, FP8, FP8_CACHE), (1, 2, 4)),
    "llama-2-7b": {HALVES: (1, 2)},
    "llama-2-13b": {HALVES: (1, 2)},
    "mistral-7b-v0.3": {HALVES: (1,)},
    "qwen2.5-7b": {HALVES: (1, 2)},
    "qwen3-8b": {HALVES: (1, 2)},
    "qwen3-14b": {HALVES: (1, 2, 4)},
    "qwen3-32b": dict.fromkeys((HALVES, FP8), (1, 2, 4, 8)),
    "yi-34b": {HALVES: (1, 2, 4)},
    "codellama-34b": {HALVES: (1, 2, 4)},
    "llama-3-70b": dict.fromkeys((HALVES, FP8, FP8_CACHE, ("nvfp4", "fp8")), (1, 2, 4, 8)),
    "llama-2-70b": {HALVES: (2, 4, 8)},
    "mixtral-8x7b": {HALVES: (1, 2, 4, 8)},
    "mixtral-8x22b": {HALVES: (4, 8)},
    "qwen3-30b-a3b": {HALVES: (1, 2, 4), FP8: (1, 2)},
    "qwen3-235b-a22b": {HALVES: (8,), FP8: (4, 8)},
    "gpt-oss-20b": {("mxfp4", "bfloat16"): (1, 2)},
    "gpt-oss-120b": {("mxfp4", "bfloat16"): (1, 2, 4, 8)},
    "llama-4-scout": {HALVES: (4, 8), FP8: (2, 4, 8)},
    "llama-4-maverick": {FP8: (4, 8)},
    "glm-4.5": {FP8: (4, 8)},
    "deepseek-v3": {FP8: (4, 8)},
    "kimi-k2": {FP8: (8,)},
    "qwen3-next-80b-a3b": {HALVES: (2, 4)},
    "gemma-3-27b": {HALVES: (1, 2)},
    "mistral-small-24b": {HALVES: (1, 2)},
}
"""TP degrees by the dtypes of weights and cache, where the weights leave room for a cache."""
WANTED = (
    "llama-3-8b",
    "qwen3-32b",
    "llama-3-70b",
    "deepseek-v3",
    "gpt-oss-120b",
    "kimi-k2",
    "llama-4-maverick",
    "qwen3-235b-a22b",
)
FEW = ("b300", "gb200", "gb300")
"""GPUs that have profiles of `WANTED` models alone."""
BLACKWELL = 10.0  # compute capability
GRACE_GPUS = 4
"""GPUs of a compute tray of GB200 or GB300; the all-reduce of more is not timed."""
LAYER_MODELS: dict[str, dict[str, tuple[int, ...]]] = {
    "rtx-4090": {"llama-3-8b": (1,)},
    "rtx-pro-6000": {"llama-3-8b": (1, 2), "qwen3-32b": (1, 2), "qwen3-30b-a3b": (1, 2)},
}
CACHED = {"mixtral-8x7b.l40s-tp8.bf16"}
"""Profiles that would be faster than the memory: the timed experts stayed in the L2."""
SEATS = 256
MIN_CACHE_TOKENS = 16_000  # tokens that the cache must hold
DTYPE_NAMES = {"bfloat16": "bf16"}


def shipped_targets() -> Iterator[Target]:
    """Yield all targets, model by model."""
    for (name, precisions), tables in product(MODELS.items(), GPU_TABLES):
        model = load_model(name)
        for gpus in LAYER_MODELS.get(tables.key, {}).get(name, ()):
            yield Target(model, tables, gpus)
        if tables.layers or (tables.key in FEW and name not in WANTED):
            continue
        if (model.latent and not tables.latent) or (model.linear and not tables.linear):
            continue
        for (dtype, cache), degrees in precisions.items():
            for gpus in degrees:
                target = Target(model, tables, gpus, dtype, cache)
                fits = _timed(tables, gpus, dtype) and _fits(model, tables, gpus, dtype, cache)
                if fits and target_name(target) not in CACHED:
                    yield target


def _timed(tables: GpuTables, gpus: int, dtype: str) -> bool:
    """Tell whether a GPU's tables have products of a dtype, and sums over so many of these GPUs."""
    if tables.gpu.name in GRACE and gpus > GRACE_GPUS:
        return False
    if dtype == "nvfp4" and tables.gpu.compute_capability < BLACKWELL:
        return False
    return dtype == "bfloat16" or bool(tables.gpu.fp8_flops)


def _fits(model: ModelSpec, tables: GpuTables, gpus: int, dtype: str, cache: str) -> bool:
    """Tell whether weights and ROOM tokens fit at vLLM's defaults."""
    try:
        sizes = EngineSizes(
            tensor_parallel_size=gpus,
            quantization=None if bytes_of(dtype) == HALF else dtype,
            kv_cache_dtype="auto" if bytes_of(cache) == HALF else cache,
        )
        budget = fitting(estimate(model, tables.gpu, sizes))
    except ValueError:
        return False
    states = SEATS * model.state_bytes / gpus  # where layers keep them: for a full batch
    return (budget.kv_cache - states) / budget.kv_bytes_per_token >= MIN_CACHE_TOKENS


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


if __name__ == "__main__":
    what = "folder to write profiles to"
    sys.exit(run_command("Fit the shipped cost profiles.", write_all, out=what))
