"""Published kernel tables: which GPUs have them, where they lie, and how one is read.

AIConfigurator (NVIDIA, Apache-2.0) times vLLM's kernels on grids of shapes, LLMServingSim (KAIST,
MIT) those of whole models in vLLM's worker, attention in mixed batches among them.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration.errors import Floats
from simulator.models.gpus import GPUS, NVLINK, Gpu, find_gpu
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError, ScenarioError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class GpuTables:
    """One GPU's tables: folders and versions in the published trees, "" for those there are not."""

    key: str  # in profile names
    gpu: Gpu
    folder: str  # of AIConfigurator's systems/data
    version: str  # of vLLM
    attention: str
    multiprocessors: int
    custom: str = ""  # vLLM whose all-reduce was timed
    nccl: str = ""
    fused: str = ""  # TensorRT-LLM whose all-reduce was timed; "": vLLM does not use it here
    products: Mapping[str, str] = field(default_factory=dict)  # vLLM, where not `version`, by dtype
    layers: str = ""  # folder of LLMServingSim's profiler/perf
    experts: str = "0.24.0"  # vLLM whose experts were timed
    latent: str = "0.24.0"  # likewise its multi-head latent attention
    linear: str = "0.24.0"  # and its linear attention
    linked: int = 8  # GPUs; a ring of more takes as long per byte passed as one of these

    @property
    def tiles_decodes(self) -> bool:
        """Whether FlashAttention-2 computes a decode beside a prompt as a tile of 64 queries."""
        return self.attention == "FlashAttention-2"

    @property
    def fully_connected(self) -> bool:
        """Whether all GPUs of a server reach each other by NVLink."""
        return self.gpu.link_bandwidth > NVLINK


FA2, FA3, FI = "FlashAttention-2", "FlashAttention-3", "FlashInfer"
TRTLLM, RTX_PRO = "1.3.0rc20", "rtx_pro_6000_server"
_TABLE: tuple[tuple[Any, ...], ...] = (
    # profile names, GPU, AIConfigurator's folder, vLLM, attention, multiprocessors; of all-reduces
    # vLLM, NCCL, TensorRT-LLM
    ("a100", "A100-80GB", "a100_sxm", "0.14.0", FA2, 108, "0.14.0", "2.27.3", ""),
    ("h100", "H100-80GB", "h100_sxm", "0.24.0", FA3, 132, "0.24.0", "2.29.2", ""),
    ("h200", "H200", "h200_sxm", "0.24.0", FA3, 132, "0.24.0", "2.29.2", ""),
    ("b200", "B200", "b200_sxm", "0.24.0", FI, 148, "0.24.0", "2.29.2", TRTLLM),
    ("b300", "B300", "b300_sxm", "0.24.0", FI, 148, "0.24.0", "2.29.2", TRTLLM),
    ("gb200", "GB200", "gb200", "0.24.0", FI, 152, "0.24.0", "2.29.2", TRTLLM),
    ("gb300", "GB300", "gb300", "0.24.0", FI, 152, "0.27.0", "2.29.2", TRTLLM),
    ("l40s", "L40S", "l40s", "0.24.0", FA2, 142, "0.22.0", "2.27.3", ""),
    ("rtx-4090", "RTX-4090", "", "0.19.0", FA2, 128, "", "", ""),
    (
        "rtx-pro-6000",
        "RTX-PRO-6000",
        "rtx_pro_6000_server",
        "0.19.0",
        FA2,
        188,
        "0.19.0",
        "2.29.2",
        "",
    ),
)
_OTHERS: dict[str, dict[str, Any]] = {
    "a100": {"experts": "0.14.0", "latent": "", "linear": ""},
    "b200": {"products": {"nvfp4": "0.19.0"}},  # 0.24's are faster than a server of 0.15 was
    "gb300": {"latent": "0.27.0"},
    "l40s": {"linked": 4},  # eight reach 1.4 GB/s on the one server timed, four 5.1
    "rtx-4090": {"layers": "RTX4090"},
    "rtx-pro-6000": {"layers": "RTXPRO6000"},
}
GPU_TABLES = tuple(
    GpuTables(key, GPUS[gpu], *rest, **_OTHERS.get(key, {})) for key, gpu, *rest in _TABLE
)


class NotTimedError(HeadwayError):
    """No table times a model of this shape in this precision on this GPU."""


def find_gpu_tables(name: str) -> GpuTables:
    """Find the tables of a GPU by its name; HeadwayError names those that there are."""
    try:
        gpu = find_gpu(name)
    except ScenarioError as error:
        raise HeadwayError(f"--gpu: {error.what}") from None
    for tables in GPU_TABLES:
        if tables.gpu is gpu:
            return tables
    known = ", ".join(tables.gpu.name for tables in GPU_TABLES)
    raise HeadwayError(f"--gpu: {gpu.name} has no kernel tables; take one of {known}")


def find_table(data: Path, path: str, source: str) -> Path:
    """Find a table below a folder: as in its repository, or flat with `__` for each slash.

    `source` is the folder that flattened files may lie in, below `profiles`.
    """
    flat = path.replace("/", "__")
    for place in (data, data / "profiles" / source):
        for name in (path, flat, f"{flat}.gz"):
            if (place / name).is_file():
                return place / name
    raise HeadwayError(f"{data}: has neither {path} nor {flat} ({source})")


def has_table(data: Path, path: str, source: str) -> bool:
    """Tell whether a table is there."""
    try:
        find_table(data, path, source)
    except HeadwayError:
        return False
    return True


def read_table(data: Path, path: str, source: str, columns: Collection[str]) -> "pd.DataFrame":
    """Read a CSV or Parquet table; HeadwayError where it is missing, damaged or lacks columns."""
    import pandas as pd

    place = find_table(data, path, source)
    if place.suffix == ".parquet":
        need_package(str(place), "parquet", "pyarrow")
    try:
        table = pd.read_parquet(place) if place.suffix == ".parquet" else pd.read_csv(place)
    except pd.errors.EmptyDataError:
        raise HeadwayError(f"{place}: damaged: it is empty") from None
    except (OSError, ValueError, EOFError) as error:
        what = " ".join(str(error).split())
        raise HeadwayError(f"{place}: cannot be read as a table: {what}") from None
    if lacking := [name for name in columns if name not in table]:
        raise HeadwayError(f"{place}: lacks the columns {', '.join(lacking)}")
    return table


def interpolate(at: Floats, places: Floats, values: Floats) -> Floats:
    """Interpolate; beyond the last place a value grows in proportion."""
    return np.asarray(np.interp(at, places, values) * np.maximum(1.0, at / places[-1]))


def run_command(
    description: str, work: Callable[..., None], words: Sequence[str] | None = None, **folders: str
) -> int:
    """Do the work of a command on tables, in the folder `--data`; give its exit code.

    `folders` are further options that name folders, with their help; `work` gets all of them. What
    is wrong with the tables becomes a line.
    """
    parser = ArgumentParser(description=description)
    for name, what in {"data": "folder with the kernel tables", **folders}.items():
        parser.add_argument(f"--{name}", type=Path, required=True, help=what)
    try:
        work(**vars(parser.parse_args(words)))
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
