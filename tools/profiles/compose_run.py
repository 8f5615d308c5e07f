"""Compose the profile of a measured run's engine, where none is shipped."""

import warnings
from dataclasses import replace
from pathlib import Path

from simulator.build.engine_spec import EngineSpec
from simulator.build.settle_cost import with_overhead
from simulator.core.engine_config import EngineConfig
from simulator.util.errors import HeadwayError, HeadwayWarning
from tools.profiles.compose import Target
from tools.profiles.fit_target import fit_target
from tools.profiles.tables import find_gpu_tables


def compose_run(data: Path, spec: EngineSpec, engine: EngineConfig) -> EngineSpec:
    """Put a cost fitted to the kernel tables in `data` in place of a roofline; others stay.

    A roofline stays, with a warning, where the tables lack the run's kernels, and that of pipeline
    stages stays, too.
    """
    if engine.pipeline_parallel_size > 1 or not spec.cost.name.startswith("roofline"):
        return spec
    name = f"{spec.model.name} on {spec.gpu.name}, TP {engine.tensor_parallel_size}"
    cache = engine.kv_cache_dtype
    try:
        target = Target(
            spec.model,
            find_gpu_tables(spec.gpu.name),
            engine.tensor_parallel_size,
            engine.quantization or "bfloat16",
            "bfloat16" if cache in {"auto", "float16"} else cache,
        )
        report = fit_target(data, target)
    except HeadwayError as error:
        warnings.warn(f"no profile of {name}, and {error}; roofline", HeadwayWarning, stacklevel=2)
        return spec
    kernels = replace(report.cost, name=f"{spec.model.name}, composed", limits=report.limits)
    for note in report.notes:
        warnings.warn(f"{name}: {note}", HeadwayWarning, stacklevel=2)
    return replace(spec, cost=with_overhead(kernels, spec.model, spec.gpu, engine))
