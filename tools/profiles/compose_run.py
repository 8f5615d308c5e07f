"""Compose the profile of a measured run's engine, where none is shipped."""

from pathlib import Path

from simulator.core.engine_config import EngineConfig
from simulator.scenario.engine_spec import EngineSpec
from tools.profiles.compose import Target
from tools.profiles.fit_target import FitReport, fit_target
from tools.profiles.tables import find_gpu_tables


def compose_run(data: Path, spec: EngineSpec, engine: EngineConfig) -> FitReport:
    """Fit a cost to the kernel tables in `data`; HeadwayError where they lack its kernels."""
    cache = engine.kv_cache_dtype
    target = Target(
        spec.model,
        find_gpu_tables(spec.gpu.name),
        engine.tensor_parallel_size,
        engine.quantization or "bfloat16",
        "bfloat16" if cache in {"auto", "float16"} else cache,
    )
    return fit_target(data, target)
