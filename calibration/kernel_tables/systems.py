"""The GPUs that have kernel tables: where those lie, which kernels they time, and what is lacking.

AIConfigurator (NVIDIA, Apache-2.0) times vLLM's kernels on grids of shapes, LLMServingSim (KAIST,
MIT) those of whole models in vLLM's worker, attention in mixed batches among them.
"""

from dataclasses import dataclass

from simulator.models.gpus import GPUS, NVLINK, Gpu, find_gpu
from simulator.util.errors import HeadwayError


@dataclass(frozen=True)
class System:
    """One GPU's tables: folders and versions in the published trees, "" for those there are not."""

    key: str  # in profile names
    gpu: Gpu
    folder: str  # of AIConfigurator's systems/data
    version: str  # of vLLM
    attention: str
    multiprocessors: int
    custom: str = ""  # vLLM whose own all-reduce was timed
    nccl: str = ""
    layers: str = ""  # folder of LLMServingSim's profiler/perf

    @property
    def tiles_decodes(self) -> bool:
        """Whether FlashAttention-2 computes a decode beside a prompt as a tile of 64 queries."""
        return self.attention == "FlashAttention-2"

    @property
    def fully_connected(self) -> bool:
        """Whether all GPUs of a server reach each other by NVLink."""
        return self.gpu.link_bandwidth > NVLINK


FA2, FA3 = "FlashAttention-2", "FlashAttention-3"
SYSTEMS = (
    System("a100", GPUS["A100-80GB"], "a100_sxm", "0.14.0", FA2, 108, "0.14.0", "2.27.3"),
    System("h100", GPUS["H100-80GB"], "h100_sxm", "0.24.0", FA3, 132, "0.24.0", "2.27.3"),
    System("h200", GPUS["H200"], "h200_sxm", "0.24.0", FA3, 132, "0.24.0", "2.29.2"),
    System("b200", GPUS["B200"], "b200_sxm", "0.19.0", "FlashInfer", 148, "0.24.0"),
    System("l40s", GPUS["L40S"], "l40s", "0.24.0", FA2, 142),
    System("rtx-4090", GPUS["RTX-4090"], "", "0.19.0", FA2, 128, layers="RTX4090"),
    System(
        "rtx-pro-6000",
        GPUS["RTX-PRO-6000"],
        "rtx_pro_6000_server",
        "0.19.0",
        FA2,
        188,
        "0.19.0",
        "2.29.2",
        "RTXPRO6000",
    ),
)


def find_system(name: str) -> System:
    """Find the tables of a GPU by its name; HeadwayError names those that there are."""
    try:
        gpu = find_gpu(name)
    except ValueError as error:
        raise HeadwayError(f"--gpu: {str(error).removeprefix('gpu.name: ')}") from None
    for system in SYSTEMS:
        if system.gpu is gpu:
            return system
    known = ", ".join(system.gpu.name for system in SYSTEMS)
    raise HeadwayError(f"--gpu: {gpu.name} has no kernel tables; there are those of {known}")
