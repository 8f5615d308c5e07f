"""What share of its data sheet a GPU reaches, by kind of kernel: measured, or as others do.

The shares of the GPUs in `efficiencies.yaml` were fitted to kernel tables by `python -m
calibration.kernel_tables.efficiencies`. Cards with the chip, or of the family, of one of these take
its shares; all others those of `USUAL`. GPUs without NVLink pass their sums through the host, whose
bandwidth does not depend on the card's bus: 12.5 GB/s on the server of RTX PRO 6000s that was
measured, a fifth of what PCIe 5.0 carries, between 4 and 8 of them (18 between two). So they all
reach so much, a greater share of a slower bus. NCCL reckons with as much: 10 GB/s between sockets,
24 within one on PCIe 4.0.
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import yaml

from simulator.models.gpus import GPUS, NVLINK, Gpu

FILE = Path(__file__).parent / "efficiencies.yaml"


@dataclass(frozen=True)
class Efficiency:
    """Shares of bandwidth, FLOP/s and link that kernels reach; latencies in seconds.

    The usual ones are rounded medians of Llama-3-8B's kernels on A100, H100 and H200.
    """

    weights: float = 0.78  # of the bandwidth, in matrix products of few tokens
    compute: float = 0.75  # of the 16-bit FLOP/s, in those of many
    compute_fp8: float = 0.75  # of the fp8 FLOP/s
    cache: float = 0.78  # of the bandwidth, in decode attention
    attention: float = 0.65  # of the 16-bit FLOP/s, in prompts' attention
    launch: float = 12e-6  # of attention, per layer
    link: float = 0.35  # of the link's bandwidth, in an all-reduce
    link_latency: float = 13e-6  # of an all-reduce
    error: float = 0.0  # median relative error of a roofline with these shares, if measured
    measured: str = ""  # the GPU that it was measured on


USUAL = Efficiency()
LIKE = {
    "A100-40GB": "A100-80GB",
    "A100-80GB-PCIe": "A100-80GB",
    "H100-PCIe": "H100-80GB",
    "H100-NVL": "H100-80GB",
    "H200-NVL": "H200",
    "L40": "L40S",
    "L4": "L40S",
}
PCIE = "RTX-PRO-6000"


@lru_cache(maxsize=1)
def _measured() -> dict[str, Efficiency]:
    """Read the file that comes with the package."""
    if not FILE.exists():
        return {}
    raw = yaml.safe_load(FILE.read_text())
    known = {field.name for field in fields(Efficiency)}
    return {
        name: Efficiency(
            **{key: float(value) for key, value in shares.items() if key in known}, measured=name
        )
        for name, shares in raw["gpus"].items()
    }


def efficiency_of(gpu: Gpu) -> Efficiency:
    """Give what was measured on a GPU, or on the likest, or what is usual."""
    known = _measured()
    if gpu.name in known:
        return known[gpu.name]
    found = known.get(LIKE.get(gpu.name, ""), USUAL)
    if gpu.link_bandwidth > NVLINK or PCIE not in known:
        return found
    link = known[PCIE].link * GPUS[PCIE].link_bandwidth / gpu.link_bandwidth
    return replace(found, link=link, link_latency=known[PCIE].link_latency)
