"""What a measurement says of itself in `meta.json`: the engine, the machine, the software."""

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.text_files import read_json
from simulator.models.gpus import find_gpu_of_driver
from simulator.util.environment import source_commit
from simulator.util.errors import HeadwayError
from simulator.util.files import write_atomic

if TYPE_CHECKING:
    from gpu_backend.engine import Engine

Meta = dict[str, object]

REQUIRED_KEYS = ("model", "gpu", "dtype", "clock", "block_size", "torch", "started", "commit")


def utc_now() -> str:
    """Give the time, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def describe_engine(engine: "Engine") -> Meta:
    """Tell what was measured, and on what."""
    import torch

    cuda = engine.device.type == "cuda"
    name = engine.gpu_name
    try:
        gpu = find_gpu_of_driver(name).name
    except ValueError:
        gpu = name
    meta: Meta = {
        "model": engine.spec.name,
        "gpu": gpu,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "clock": "wall" if cuda else "cpu",
        "block_size": engine.block_size,
        "num_blocks": engine.num_blocks,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "commit": source_commit(),
    }
    if engine.capture_sizes:
        meta["cudagraph_capture_sizes"] = engine.capture_sizes
    if engine.mixed_sizes:
        meta["cudagraph_mixed_sizes"] = engine.mixed_sizes
    if cuda:
        meta |= {"device": name, "cuda": torch.version.cuda}
    return meta


def _processor() -> str:
    """Name the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "unknown")


def write_meta(path: Path, meta: Mapping[str, object]) -> None:
    """Write meta.json."""
    text = json.dumps(meta, indent=1) + "\n"
    write_atomic(path, text.encode())


def read_meta(path: Path) -> Meta:
    """Read meta.json; HeadwayError where it is damaged."""
    meta = read_json(path)
    if lacking := [key for key in REQUIRED_KEYS if key not in meta]:
        raise HeadwayError(f"{path}: is no description of a measurement: lacks {lacking}")
    if meta["clock"] not in {"cpu", "wall"} or not isinstance(meta["block_size"], int):
        raise HeadwayError(f"{path}: clock must be cpu or wall, block_size a whole number")
    return meta


def capture_sizes(meta: Meta, path: Path, name: str = "cudagraph_capture_sizes") -> list[int]:
    """Give the batches that had a CUDA graph, none on a CPU; HeadwayError where damaged.

    `cudagraph_mixed_sizes` names those of steps with prompts, in tokens.
    """
    sizes = meta.get(name, [])
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise HeadwayError(f"{path}: {name} must be whole numbers, not {sizes!r}")
    return sorted(set(sizes))
