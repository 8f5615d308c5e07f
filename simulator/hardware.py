"""A table of GPUs: what their makers publish, and the memory that CUDA lets a program use."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from simulator.errors import HeadwayError

GIB = 1 << 30
TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """One GPU; FLOP/s are those of dense matrices, without sparsity.

    `memory` is the total that cudaMemGetInfo reports and of which vLLM takes
    `gpu_memory_utilization`: less than the size in the GPU's name by what driver and ECC keep.
    `dollars_per_hour` is the list price described in PRICE; None where none is listed.
    """

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes/s between memory and chip
    bf16_flops: float  # FLOP/s, accumulating in fp32
    fp8_flops: float | None  # FLOP/s; None: computed in 16 bits
    link_bandwidth: float  # bytes/s to the other GPUs of the server, one direction
    dollars_per_hour: float | None = None

    def flops(self, dtype: str) -> float:
        """FLOP/s of matrices whose weights have this dtype; those of int4 and int8 are unpacked."""
        if dtype.startswith("fp8") and self.fp8_flops:
            return self.fp8_flops
        return self.bf16_flops


PRICE = (
    "AWS EC2 on-demand list price, Linux, us-east-1, after the cuts of June 2025, per GPU of the "
    "smallest instance that has it"
)


def _gpu(
    name: str,
    gib: float,
    bandwidth: float,
    bf16: float,
    fp8: float | None,
    link: float,
    dollars: float | None = None,
) -> Gpu:
    """Make a row from GiB, TB/s, TFLOP/s and GB/s."""
    flops8 = fp8 and fp8 * TERA
    return Gpu(
        name, int(gib * GIB), bandwidth * TERA, bf16 * TERA, flops8, link * 1e9, dollars
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40GB", 39.4, 1.555, 312, None, 300, 2.74),
        _gpu("A100-80GB", 79.25, 2.039, 312, None, 300, 3.43),
        _gpu("H100-80GB", 79.2, 3.35, 989, 1979, 450, 6.88),
        _gpu("H200", 139.8, 4.8, 989, 1979, 450, 7.91),
        _gpu("B200", 178.35, 7.7, 2250, 4500, 900, 14.24),
        _gpu("A10G", 22.1, 0.6, 70, None, 32, 1.01),
        _gpu("A6000", 47.5, 0.768, 155, None, 32),
        _gpu("L4", 22.1, 0.3, 121, 242, 32, 0.80),
        _gpu("L40S", 44.4, 0.864, 362, 733, 32, 1.86),
        _gpu("RTX-4090", 23.6, 1.008, 165, 330, 32),
        _gpu("RTX-PRO-6000", 94.97, 1.597, 468, 936, 64),  # Blackwell, Server Edition
    )
}
"""Bandwidth and FLOP/s: NVIDIA's data sheets (SXM versions of A100, H100, H200, B200). Memory:
totals that vLLM and PyTorch print on these GPUs."""


def find_gpu(name: str) -> Gpu:
    """Find a GPU by its name; case, blanks, hyphens and `NVIDIA` do not matter.

    Raises HeadwayError, which lists the names that there are, the likeliest first.
    """
    by_plain = {_plain(known): gpu for known, gpu in GPUS.items()}
    wanted = _plain(name)
    if wanted in by_plain:
        return by_plain[wanted]
    alike = [known for plain, known in zip(by_plain, GPUS, strict=True) if wanted[:4] in plain]
    near = alike if wanted else []
    near += get_close_matches(name.upper(), [n for n in GPUS if n not in near], cutoff=0.5)
    order = near + [known for known in GPUS if known not in near]
    raise HeadwayError(f"gpu.name: no GPU {name!r} in the table; there are {', '.join(order)}")


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
