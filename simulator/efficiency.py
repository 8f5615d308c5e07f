"""What share of its data sheet a GPU reaches, by kind of kernel: measured, or as others do.

The shares of the GPUs in `efficiencies.yaml` were fitted to kernel tables by
`python -m calibration.efficiencies`; all others take those of `USUAL`.
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import yaml

from simulator.hardware import Gpu

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
    link: float = 0.35  # of the link's bandwidth, in an all-reduce; over PCIe rather 0.2
    link_latency: float = 13e-6  # of an all-reduce
    error: float = 0.0  # median relative error of a roofline with these shares, if measured
    measured: bool = False


USUAL = Efficiency()


@lru_cache(maxsize=1)
def _measured() -> dict[str, Efficiency]:
    """Read the file that comes with the package."""
    if not FILE.exists():
        return {}
    raw = yaml.safe_load(FILE.read_text())
    known = {field.name for field in fields(Efficiency)}
    return {
        name: Efficiency(
            **{key: float(value) for key, value in shares.items() if key in known}, measured=True
        )
        for name, shares in raw["gpus"].items()
    }


def efficiency_of(gpu: Gpu) -> Efficiency:
    """Give what was measured on a GPU, or what is usual."""
    return _measured().get(gpu.name, USUAL)
