"""A table of GPUs: what their makers publish, and the memory that CUDA lets a program use."""

import re
from typing import NamedTuple

GIB = 1 << 30
NVLINK = 100e9  # bytes/s, less than any; PCIe 5.0 has 64e9
GRACE = {"GH200", "GB200", "GB300"}
SXM = re.compile(r"sxm\d?\b", re.IGNORECASE)
LISTED = re.compile(r"^.*\bGPU \d+: *|\(UUID.*", re.IGNORECASE)
"""What `nvidia-smi -L` and vLLM's report of its environment put around a name."""
PART = re.compile(r"MIG[ -]\w+\.\w+|\bGRID\b.*", re.IGNORECASE)
SIZE = re.compile(r"\d+g(i?b)?")
HOST_SIZES = {120, 240, 480}  # GB beside a Grace CPU, which its driver puts into the name
NOISE = re.compile(
    r"nvidia|corporation|geforce|tesla|amd|instinct|hbm\d?e?|oam|ac|mega|shared|blackwell|server|"
    r"workstation|max|q|edition|gpu|vf"
)
"""Words that drivers and clouds put into names, and that tell no GPU from another."""
ORACLE = re.compile(r"(?:BM|VM)\.GPU\.([A-Z]+[0-9]+\w*)\.\d", re.IGNORECASE)
HOST_SHARE = 0.85
"""Of `host_bandwidth`, what copies between GPU and pinned host memory are taken to reach: an
assumption, not a measurement. A profile with swap terms of its own overrides it."""


class Gpu(NamedTuple):
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
    compute_capability: float
    dollars_per_hour: float | None = None
    max_power: float | None = None  # W, of the data sheet; None: none that is the GPU's alone

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s to the host's memory, one direction, by the data sheet of the bus.

        NVLink-C2C beside a Grace CPU; PCIe 5.0 x16 from Hopper on, PCIe 4.0 x16 before; a CPU
        copies within its own memory.
        """
        if self.name in GRACE:
            return 450e9
        if not self.compute_capability:
            return self.bandwidth / 2
        return 64e9 if self.compute_capability >= 9.0 else 32e9

    @property
    def tiles_decodes(self) -> bool:
        """Whether vLLM's attention is FlashAttention-2 here.

        It computes a decode that shares its step with a prompt like a tile of 64 queries. Hopper
        has FlashAttention-3; Blackwell's and AMD's servers have kernels of their own.
        """
        return self.compute_capability not in {9.0, 9.4, 9.5, 10.0, 10.3}

    def flops(self, dtype: str) -> float:
        """FLOP/s of matrices whose weights have this dtype; those of int4 and int8 are unpacked."""
        if dtype.startswith("fp8") and self.fp8_flops:
            return self.fp8_flops
        return self.bf16_flops


# Prices are AWS EC2's on-demand list prices, Linux, us-east-1, after the cuts of June 2025, per GPU
# of the smallest instance that has it.
_TABLE: tuple[tuple[str, float, float, float, float, float, float, float, float], ...] = (
    # GPU, GiB, TB/s, TFLOP/s in bf16, in fp8, GB/s to its peers, capability, $/h, W; 0: none
    ("A100-40GB", 39.49, 1.555, 312, 0, 300, 8.0, 2.74, 400),
    ("A100-80GB", 79.25, 2.039, 312, 0, 300, 8.0, 3.43, 400),
    ("A100-80GB-PCIe", 79.25, 1.935, 312, 0, 32, 8.0, 0, 300),
    ("H100-80GB", 79.2, 3.35, 989, 1979, 450, 9.0, 6.88, 700),
    ("H100-PCIe", 79.1, 2.039, 756, 1513, 64, 9.0, 0, 350),
    ("H100-NVL", 93.1, 3.938, 835, 1671, 64, 9.0, 0, 400),
    ("H200", 139.8, 4.8, 989, 1979, 450, 9.0, 7.91, 700),
    ("H200-NVL", 139.8, 4.8, 835, 1671, 64, 9.0, 0, 600),
    ("GH200", 94.5, 4.0, 989, 1979, 450, 9.0, 0, 0),  # 96 GB of HBM3
    ("H20", 95.1, 4.0, 148, 296, 450, 9.0, 0, 400),
    ("B200", 178.35, 7.7, 2250, 4500, 900, 10.0, 14.24, 1000),
    ("B300", 267.69, 8.0, 2250, 4500, 900, 10.3, 0, 1100),
    ("GB200", 184.3, 8.0, 2500, 5000, 900, 10.0, 0, 1200),
    ("GB300", 277.0, 8.0, 2500, 5000, 900, 10.3, 0, 1400),
    ("MI300X", 191.9, 5.3, 1307, 2615, 448, 9.4, 0, 750),
    ("MI325X", 255.9, 6.0, 1307, 2615, 448, 9.4, 0, 1000),
    ("MI355X", 287.9, 8.0, 2517, 5033, 537, 9.5, 0, 1400),
    ("A10G", 22.06, 0.6, 70, 0, 32, 8.6, 1.01, 300),
    ("A10", 22.06, 0.6, 125, 0, 32, 8.6, 0, 150),
    ("A5000", 23.68, 0.768, 111, 0, 32, 8.6, 0, 230),
    ("A6000", 47.5, 0.768, 155, 0, 32, 8.6, 0, 300),
    ("L4", 22.1, 0.3, 121, 242, 32, 8.9, 0.80, 72),
    ("L40", 44.4, 0.864, 181, 362, 32, 8.9, 0, 300),
    ("L40S", 44.4, 0.864, 362, 733, 32, 8.9, 1.86, 350),
    ("RTX-3090", 23.68, 0.936, 71, 0, 32, 8.6, 0, 350),
    ("RTX-4080", 15.7, 0.717, 97, 195, 32, 8.9, 0, 320),
    ("RTX-4090", 23.53, 1.008, 165, 330, 32, 8.9, 0, 450),
    ("RTX-5060-Ti-16GB", 15.5, 0.448, 47, 95, 32, 12.0, 0, 180),
    ("RTX-5080", 15.5, 0.96, 113, 225, 64, 12.0, 0, 360),
    ("RTX-5090", 31.36, 1.792, 209, 419, 64, 12.0, 0, 575),
    ("RTX-PRO-6000", 94.97, 1.597, 468, 936, 64, 12.0, 0, 600),  # Blackwell, Server Edition
    ("GB10", 119.7, 0.273, 125, 250, 25, 12.1, 0, 140),  # shares it with its CPU
    ("T4", 14.56, 0.32, 65, 0, 16, 7.5, 0.53, 70),
    ("V100-16GB", 15.77, 0.9, 125, 0, 150, 7.0, 3.06, 300),
)

GPUS = {
    name: Gpu(
        name,
        memory=int(gib * GIB),
        bandwidth=bandwidth * 1e12,
        bf16_flops=bf16 * 1e12,
        fp8_flops=fp8 * 1e12 or None,
        link_bandwidth=link * 1e9,
        compute_capability=capability,
        dollars_per_hour=dollars or None,
        max_power=watts or None,
    )
    for name, gib, bandwidth, bf16, fp8, link, capability, dollars, watts in _TABLE
}
"""Bandwidth and FLOP/s: the data sheets of NVIDIA (SXM versions of A100, H100, H200, B200, B300
where the name says nothing else; cards on PCIe without NVLink bridges) and of AMD (MI300X, MI325X,
MI355X; their compute capability is that of gfx942 and gfx950, their link the sum of those to seven
peers). Memory: totals that vLLM and PyTorch print; of GH200, H20, GB200, GB300, AMD's, A10,
A5000 and cards of 16 GB an estimate: what is sold, less what the others keep back. Power: the
maximum of the data sheets (TDP, TBP), of B200 and B300 on an HGX board; GH200's is that of CPU and
GPU together. That of A10G, which has none, is the limit that nvidia-smi shows on AWS's g5."""

INSTANCES = {
    r"p3\.": "V100-16GB",
    r"p4d\.": "A100-40GB",
    r"p4de\.": "A100-80GB",
    r"p5\.": "H100-80GB",
    r"p5en?\.": "H200",
    r"p6-b200\.": "B200",
    r"p6-b300\.": "B300",
    r"p6e-gb200": "GB200",
    r"p6e-gb300": "GB300",
    r"g4dn\.": "T4",
    r"g5\.": "A10G",
    r"gr?6\.": "L4",
    r"g6e\.": "L40S",
    r"g7e\.": "RTX-PRO-6000",
    r"a2-(high|mega)gpu": "A100-40GB",
    r"a2-ultragpu": "A100-80GB",
    r"a3-(high|mega|edge)gpu": "H100-80GB",
    r"a3-ultragpu": "H200",
    r"a4-highgpu": "B200",
    r"a4x-highgpu": "GB200",
    r"a4x-maxgpu": "GB300",
    r"g2-standard": "L4",
    r"g4-standard": "RTX-PRO-6000",
    r"nvidia-tesla-a100$": "A100-40GB",
    r"(Standard_)?ND96asr_(A100_)?v4": "A100-40GB",
    r"(Standard_)?ND96amsr_A100_v4": "A100-80GB",
    r"(Standard_)?NC\d+ads_A100_v4": "A100-80GB-PCIe",
    r"(Standard_)?ND96is?r_H100_v5": "H100-80GB",
    r"(Standard_)?NC\d+adi?s_H100_v5": "H100-NVL",
    r"(Standard_)?ND96is?r_H200_v5": "H200",
    r"(Standard_)?ND128isr_(NDR_)?GB200_v6": "GB200",
    r"(Standard_)?ND128isr_(NDR_)?GB300_v6": "GB300",
    r"(Standard_)?ND96is?r_MI300X_v5": "MI300X",
    r"(Standard_)?NV(36|72)ad[ms]+_A10_v5": "A10",
    r"(Standard_)?NC\d+as_T4_v3": "T4",
    r"BM\.GPU4\.8": "A100-40GB",
    r"BM\.GPU\.A100-v2\.8": "A100-80GB",
}
"""How the names of instances with whole GPUs begin: of AWS, Google Cloud, Azure and Oracle."""

CPU = Gpu(
    "CPU",
    memory=16 * GIB,
    bandwidth=20e9,
    bf16_flops=100e9,
    fp8_flops=None,
    link_bandwidth=20e9,
    compute_capability=0.0,
)
"""One core of a server, on which the torch engine runs small models; round figures for the order of
magnitude. What a step takes there must be calibrated."""


def find_gpu(name: str, price: float | None = None) -> Gpu:
    """Find a GPU by its name; case, blanks, hyphens, `NVIDIA` and `SXM` do not matter.

    A name may be what a driver, `nvidia-smi -L`, vLLM's report or Kubernetes' label says, such as
    `GPU 0: NVIDIA H100 80GB HBM3`, or an instance of a cloud, such as `p5.48xlarge`.

    `price`, dollars an hour, stands in place of its list price.

    The name of a chip alone, with or without `SXM`, is the one that has NVLink, where there is but
    one: H100 and H100-SXM are the H100-80GB.

    Raises ValueError, which lists the names that there are, the likeliest first.
    """
    if price is not None:
        return find_gpu(name)._replace(dollars_per_hour=price)
    if part := PART.search(name):
        raise ValueError(
            f"gpu.name: {name!r} is {part[0]}, a part of a GPU, which is not simulated"
        )
    plain = LISTED.sub("", name).strip()
    for pattern, chip in INSTANCES.items():
        if re.match(pattern, plain, re.IGNORECASE):
            return GPUS[chip]
    if shape := ORACLE.match(plain):
        return find_gpu(shape[1])
    wanted = _normalised(plain)
    if found := _named(wanted, _words(plain)):
        return found

    def alike(part: str) -> list[str]:
        return [known for known in GPUS if part in _normalised(known)] if part else []

    if longer := alike(wanted):
        hint = " or ".join(longer)
        raise ValueError(f"gpu.name: no GPU {name!r} in the table; did you mean {hint}?")
    near = alike(wanted[:4])
    from difflib import get_close_matches

    near += get_close_matches(name.upper(), [n for n in GPUS if n not in near], cutoff=0.5)
    order = dict.fromkeys([*near, *GPUS])
    raise ValueError(f"gpu.name: no GPU {name!r} in the table; there are {', '.join(order)}")


def _named(wanted: str, words: list[str]) -> Gpu | None:
    """Find a GPU by its name as one word, by its words in any order, or by its chip and memory."""
    for gpu in (*GPUS.values(), CPU):
        if _normalised(gpu.name) == wanted or (words and sorted(_words(gpu.name)) == sorted(words)):
            return gpu
    linked = [
        gpu
        for gpu in GPUS.values()
        if gpu.link_bandwidth > NVLINK and _normalised(gpu.name.partition("-")[0]) == wanted
    ]
    if len(linked) == 1:
        return linked[0]
    sizes = [word for word in words if SIZE.fullmatch(word)]
    if len(sizes) != 1:
        return None
    others = [word for word in words if word != sizes[0]]
    found, size = _named("".join(others), others), int(sizes[0].rstrip("gib"))
    if found and found.name in GRACE and size in HOST_SIZES:
        return found
    return found if found and 0.9 < found.memory / GIB / max(size, 1) < 1.01 else None


def _words(name: str) -> list[str]:
    """Return the words of a name that tell a GPU from others, in lower case."""
    parts = re.split(r"[^a-z0-9]+", re.sub(r"\brtx(?=[ -]?a\d)", "", SXM.sub("", name.lower())))
    return [part for part in parts if part and not NOISE.fullmatch(part)]


def _normalised(name: str) -> str:
    words = re.sub(r"nvidia|geforce|tesla|amd|instinct|rtx(?= ?a\d)", "", SXM.sub("", name.lower()))
    return re.sub(r"[^a-z0-9]", "", words)
