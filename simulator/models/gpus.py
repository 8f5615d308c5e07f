"""A table of GPUs: what their makers publish, and the memory that CUDA lets a program use.

`gpus.csv` has bandwidth and FLOP/s of the data sheets of NVIDIA (SXM versions of A100, H100, H200,
B200, B300, V100 where the name says nothing else; cards on PCIe without NVLink bridges) and of AMD
(MI300X, MI325X, MI355X; their compute capability is that of gfx942 and gfx950, their link the sum
of those to seven peers); the host's is NVLink-C2C beside a Grace CPU, else PCIe 5.0 x16 from Hopper
on and PCIe 4.0 x16 before; a CPU copies within its own memory. Memory: totals that vLLM and PyTorch
print; of GH200, H20, GB200, GB300, AMD's, A10, A5000, PCIe's A100 and V100, and GeForce cards of 16
GB an estimate: what is sold, less what the others keep back. Prices: list prices of AWS EC2 on
demand, Linux, us-east-1, after the cuts of June 2025, per GPU of the smallest instance that has it.
Power: the maximum of the data sheets (TDP, TBP), of B200 and B300 on an HGX board; GH200's is that
of CPU and GPU together. That of A10G, which has none, is the limit that nvidia-smi shows on AWS's
g5. `instances.csv` has how the names of instances with whole GPUs begin: of AWS, Google Cloud,
Azure and Oracle.
"""

import re
from functools import cache
from typing import NamedTuple

from simulator.util.errors import ScenarioError
from simulator.util.files import read_table

GIB = 1 << 30
NVLINK = 100e9  # bytes/s, less than any; PCIe 5.0 has 64e9
GRACE = {"GH200", "GB200", "GB300"}
SXM = re.compile(r"sxm\d?\b", re.IGNORECASE)
# What `nvidia-smi -L` and vLLM's report of its environment put around a name.
LISTED = re.compile(r"^.*\bGPU \d+: *|\(UUID.*", re.IGNORECASE)
PART = re.compile(r"MIG[ -]\w+\.\w+|\bGRID\b.*", re.IGNORECASE)
SIZE = re.compile(r"\d+g(i?b)?")
HOST_SIZES = {120, 240, 480}  # GB beside a Grace CPU, which its driver puts into the name
# Words that drivers and clouds put into names, and that tell no GPU from another.
NOISE = re.compile(
    r"nvidia|corporation|geforce|tesla|amd|instinct|hbm\d?e?|oam|ac|mega|shared|blackwell|server|"
    r"workstation|max|q|edition|gpu|vf"
)
ORACLE = re.compile(r"(?:BM|VM)\.GPU\.([A-Z]+[0-9]+\w*)\.\d", re.IGNORECASE)
# Of `host_bandwidth`, what copies between GPU and pinned host memory are taken to reach: an
# assumption, not a measurement. A profile with swap terms of its own overrides it.
HOST_SHARE = 0.85


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
    host_bandwidth: float  # bytes/s to the host's memory, one direction
    compute_capability: float
    dollars_per_hour: float | None = None
    max_power: float | None = None  # W, of the data sheet; None: none that is the GPU's alone
    similar: str = ""  # the likest whose kernels were measured, if its own were not
    product: str = ""  # value of the node label nvidia.com/gpu.product (gpu-feature-discovery)

    @property
    def is_amd(self) -> bool:
        """Whether it is AMD's: gfx942 or gfx950."""
        return self.compute_capability in (9.4, 9.5)

    @property
    def tiles_decodes(self) -> bool:
        """Whether vLLM's attention is FlashAttention-2 here.

        It computes a decode that shares its step with a prompt like a tile of 64 queries. Hopper
        has FlashAttention-3; Blackwell's and AMD's servers have kernels of their own.
        """
        return self.compute_capability not in {9.0, 9.4, 9.5, 10.0, 10.3}

    def flops(self, dtype: str) -> float:
        """FLOP/s of matrices whose weights have this dtype; those of int4 and int8 are unpacked."""
        return (self.fp8_flops if dtype.startswith("fp8") else None) or self.bf16_flops


def _read(row: dict[str, str]) -> Gpu:
    """Make a GPU of a line of `gpus.csv`, where 0 is none."""
    return Gpu(
        row["name"],
        memory=int(float(row["gib"]) * GIB),
        bandwidth=float(row["tb_per_s"]) * 1e12,
        bf16_flops=float(row["bf16_tflops"]) * 1e12,
        fp8_flops=float(row["fp8_tflops"]) * 1e12 or None,
        link_bandwidth=float(row["link_gb_per_s"]) * 1e9,
        host_bandwidth=float(row["host_gb_per_s"]) * 1e9,
        compute_capability=float(row["capability"]),
        dollars_per_hour=float(row["dollars_per_hour"]) or None,
        max_power=float(row["watts"]) or None,
        product=row["product"],
        similar=row["similar"],
    )


GPUS = {row["name"]: _read(row) for row in read_table(__file__, "gpus.csv")}

CPU = GPUS.pop("CPU")
"""One core of a server, on which the torch engine runs small models."""


def find_gpu(name: str, price: float | None = None) -> Gpu:
    """Find a GPU by its name; case, blanks, hyphens, `NVIDIA` and `SXM` do not matter.

    A name may be what a driver, `nvidia-smi -L`, vLLM's report or Kubernetes' label says, such as
    `GPU 0: NVIDIA H100 80GB HBM3`, or an instance of a cloud, such as `p5.48xlarge`.

    `price`, dollars an hour, stands in place of its list price.

    The name of a chip alone, with or without `SXM`, is the one that has NVLink, where there is but
    one: H100 and H100-SXM are the H100-80GB.

    Raises ValueError, which lists the names that there are, the likeliest first.
    """
    found = _find(name)
    return found if price is None else found._replace(dollars_per_hour=price)


@cache
def _find(name: str) -> Gpu:
    if part := PART.search(name):
        what = f"{name!r} is {part[0]}, a part of a GPU, which is not simulated"
        raise ScenarioError("gpu.name", what)
    plain = LISTED.sub("", name).strip()
    for row in read_table(__file__, "instances.csv"):
        if re.match(row["pattern"], plain, re.IGNORECASE):
            return GPUS[row["gpu"]]
    if shape := ORACLE.match(plain):
        return _find(shape[1])
    words = _words(plain)
    if found := _named(words):
        return found

    kinds = {known: _words(known) for known in GPUS}
    wanted = "".join(words)
    near = [known for known, own in kinds.items() if words and wanted in "".join(own)]
    if not near:  # another of its chip: of other memory, on another bus, a laptop's
        near = [known for known, own in kinds.items() if {*_chip(own)} <= {*words}]
        near.sort(key=lambda known: -len({*kinds[known]}.intersection(words)))
    if near:
        near.sort(key=lambda known: "PCIe" in known and "pcie" not in words)
        hint = " or ".join(near[:3])
        what = f"no GPU {name!r} in the table; did you mean {hint}?"
        raise ScenarioError("gpu.name", what, "value")
    from difflib import get_close_matches

    chips = {known.partition("-")[0]: known for known in reversed(GPUS)} | {g: g for g in GPUS}
    close = get_close_matches(name.upper(), chips, cutoff=0.5)
    shown = ", ".join(dict.fromkeys(chips[one] for one in close) or GPUS)
    raise ScenarioError("gpu.name", f"no GPU {name!r}: take a similar one, as {shown}", "value")


def _chip(words: list[str]) -> list[str]:
    """Return a name's words without its memory and its bus."""
    return [word for word in words if word not in ("pcie", "nvl") and not SIZE.fullmatch(word)]


def _named(words: list[str]) -> Gpu | None:
    """Find a GPU by its name as one word, by its words in any order, or by its chip and memory."""
    wanted = "".join(words)
    for gpu in (*GPUS.values(), CPU):
        own = _words(gpu.name)
        if words and ("".join(own) == wanted or sorted(own) == sorted(words)):
            return gpu
    linked = [
        gpu
        for gpu in GPUS.values()
        if gpu.link_bandwidth > NVLINK and "".join(_words(gpu.name.partition("-")[0])) == wanted
    ]
    if len(linked) == 1:
        return linked[0]
    sizes = [word for word in words if SIZE.fullmatch(word)]
    if len(sizes) != 1:
        return None
    others = [word for word in words if word != sizes[0]]
    found, size = _named(others), int(sizes[0].rstrip("gib"))
    if found and found.name in GRACE and size in HOST_SIZES:
        return found
    return found if found and 0.9 < found.memory / GIB / max(size, 1) < 1.01 else None


def _words(name: str) -> list[str]:
    """Return the words of a name that tell a GPU from others, in lower case."""
    parts = re.split(r"[^a-z0-9]+", re.sub(r"\brtx(?=[ -]?a\d)", "", SXM.sub("", name.lower())))
    return [part for part in parts if part and not NOISE.fullmatch(part)]
