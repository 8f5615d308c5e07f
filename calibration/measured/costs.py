"""The kernels' cost of a measured run: shipped, composed of tables on the spot, or by roofline."""

import os
import warnings
from dataclasses import replace
from pathlib import Path

from calibration.kernel_tables.compose import Target
from calibration.kernel_tables.fit_target import fit_target
from calibration.kernel_tables.tables import find_gpu_tables
from simulator.costs.load import with_overhead
from simulator.costs.piecewise import PiecewiseCost
from simulator.scenario.assemble import Parts
from simulator.scenario.engine_config import EngineConfig
from simulator.util.errors import HeadwayError, HeadwayWarning


def with_tables(parts: Parts, engine: EngineConfig) -> Parts:
    """Compose a profile where none is shipped and HEADWAY_DATA names the tables' folder.

    Warn where there are no tables either: the roofline stays.
    """
    if not parts.cost.name.startswith("roofline"):
        return parts
    name = f"{parts.model.name} on {parts.gpu.name}, TP {engine.tensor_parallel_size}"
    data = os.environ.get("HEADWAY_DATA")
    try:
        if not data:
            raise HeadwayError("HEADWAY_DATA names no folder with kernel tables")
        report = fit_target(Path(data), _target(parts, engine))
    except HeadwayError as error:
        warnings.warn(f"no profile of {name}, and {error}; roofline", HeadwayWarning, stacklevel=2)
        return parts
    kernels = replace(report.cost, name=f"{parts.model.name}, composed", limits=report.limits)
    cost = with_overhead(kernels, parts.model, parts.gpu, engine)
    for note in report.notes:
        warnings.warn(f"{name}: {note}", HeadwayWarning, stacklevel=2)
    return replace(parts, cost=cost)


def with_terms(parts: Parts, step: float, per_sequence: float) -> Parts:
    """Put other seconds to wait in each step, and for each sequence in it, on the kernels."""
    if not isinstance(parts.cost, PiecewiseCost):
        return parts
    cost = replace(parts.cost, overhead=step, overhead_per_sequence=per_sequence)
    return replace(parts, cost=cost)


def _target(parts: Parts, engine: EngineConfig) -> Target:
    dtype = engine.quantization or "bfloat16"
    cache = engine.kv_cache_dtype
    return Target(
        parts.model,
        find_gpu_tables(parts.gpu.name),
        engine.tensor_parallel_size,
        dtype,
        "bfloat16" if cache in {"auto", "float16"} else cache,
    )
