"""The table of GPUs."""

import pytest

from simulator.models.gpus import GIB, GPUS, find_gpu


@pytest.mark.parametrize("name", ["a100-80gb", "A100 80GB", "NVIDIA A100-80GB", "a100_80gb"])
def test_gpus_are_found_however_they_are_spelt(name: str) -> None:
    """Case, blanks and the maker's name do not matter."""
    assert find_gpu(name).name == "A100-80GB"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("H100-SXM", "H100-80GB"),
        ("nvidia h100", "H100-80GB"),
        ("nvidia h100 SXM5", "H100-80GB"),
        ("A100-SXM4-80GB", "A100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("H200-SXM", "H200"),
    ],
)
def test_a_chip_is_the_one_with_nvlink(said: str, name: str) -> None:
    assert find_gpu(said).name == name
    with pytest.raises(ValueError, match="did you mean A100-40GB or A100-80GB"):
        find_gpu("A100-SXM")


def test_an_ambiguous_gpu_is_not_guessed() -> None:
    """`A100` could be either; the message asks."""
    what = "in the table; did you mean A100-40GB or A100-80GB or A100-40GB-PCIe"
    with pytest.raises(ValueError, match=rf"^gpu.name: no GPU 'A100' {what}\?$"):
        find_gpu("A100")
    with pytest.raises(ValueError, match="take a similar one, as A100-40GB, "):
        find_gpu("")
    with pytest.raises(ValueError, match="'H10O': take a similar one, as H100-80GB, "):
        find_gpu("H10O")


def test_the_table_of_gpus_is_physical() -> None:
    """Memory below the nominal size, fp8 twice bf16, hundreds of FLOPs per byte (H20: 37)."""
    for gpu in GPUS.values():
        nominal = [int(part[:-2]) for part in gpu.name.split("-") if part.endswith("GB")]
        assert not nominal or 0.96 < gpu.memory / (nominal[0] * GIB) < 1
        assert gpu.fp8_flops is None or round(gpu.fp8_flops / gpu.bf16_flops, 1) == 2
        assert 35 < gpu.bf16_flops / gpu.bandwidth < 500
        assert gpu.flops("int4") == gpu.bf16_flops


DRIVERS = {
    "A100-40GB": [
        "NVIDIA A100-SXM4-40GB",
        "gpu_1x_a100_sxm4",
        "p4d.24xlarge",
        "BM.GPU4.8",
        "nvidia-tesla-a100",
    ],
    "A100-80GB": [
        "NVIDIA-A100-SXM4-80GB-SHARED",
        "gd-8xa100-i128",
        "gpu_8x_a100_80gb_sxm4",
        "p4de.24xlarge",
        "a2-ultragpu-8g",
        "A100 80 GB",
    ],
    "A100-80GB-PCIe": ["NVIDIA A100 80GB PCIe", "A100-PCIE-80GB", "Standard_NC24ads_A100_v4"],
    "H100-80GB": [
        *("NVIDIA H100 80GB HBM3", "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)", "p5.48xlarge"),
        *("NVIDIA-H100-80GB-HBM3", "nvidia-h100-mega-80gb", "BM.GPU.H100.8", "H100 SXM5 80GB"),
        *("gd-8xh100ib-i128", "gpu_8x_h100_sxm5", "ml.p5.48xlarge"),
    ],
    "H100-PCIe": ["NVIDIA H100 PCIe", "gpu_1x_h100_pcie"],
    "L40": ["NVIDIA L40", "gd-8xl40-i128"],
    "L40S": ["NVIDIA L40S", "gd-8xl40s-i128", "g6e.xlarge"],
    "A10": ["NVIDIA A10", "gpu_1x_a10"],
    "H100-NVL": [
        "NVIDIA H100 NVL",
        "Standard_NC40ads_H100_v5",
        "H100 NVL 94GB",
        "Standard_NCC40ads_H100_v5",
    ],
    "H200": ["NVIDIA H200", "nvidia-h200-141gb", "p5en.48xlarge", "Standard_ND96isr_H200_v5"],
    "GH200": ["NVIDIA GH200 480GB", "NVIDIA GH200 120GB", "gpu_1x_gh200"],
    "B200": ["NVIDIA B200", "B200 192GB", "p6-b200.48xlarge", "a4-highgpu-8g"],
    "B300": ["NVIDIA B300 SXM6 AC"],
    "RTX-PRO-6000": ["NVIDIA RTX PRO 6000 Blackwell Server Edition", "g7e.2xlarge"],
    "A6000": ["NVIDIA RTX A6000"],
    "A10G": ["NVIDIA A10G", "g5.xlarge"],
    "T4": ["Tesla T4", "GPU models and configuration: GPU 0: Tesla T4", "g4dn.xlarge"],
    "V100-16GB": ["Tesla V100-SXM2-16GB", "p3.2xlarge"],
    "V100-32GB": ["Tesla V100-SXM2-32GB"],
    "V100-16GB-PCIe": ["Tesla V100-PCIE-16GB", "Standard_NC6s_v3"],
    "A100-40GB-PCIe": ["NVIDIA A100-PCIE-40GB"],
    "A4000": ["NVIDIA RTX A4000"],
    "MI300X": ["AMD Instinct MI300X OAM", "AMD_Instinct_MI300X_OAM", "BM.GPU.MI300X.8"],
}


@pytest.mark.parametrize(("name", "said"), DRIVERS.items())
def test_gpus_by_what_machines_call_them(name: str, said: list[str]) -> None:
    """Drivers, nvidia-smi -L, vLLM's report, labels of Kubernetes, instances of clouds."""
    assert {one: find_gpu(one).name for one in said} == dict.fromkeys(said, name)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Voodoo 2", "no GPU 'Voodoo 2'"),
        ("Tesla V100-PCIE-32GB", "did you mean V100-16GB-PCIe or V100-32GB or V100-16GB"),
        ("NVIDIA A100-SXM-64GB", "did you mean A100-40GB or A100-80GB"),
        ("NVIDIA GH200 144G HBM3e", r"did you mean GH200\?"),
        ("NVIDIA H20-3e", r"did you mean H20\?"),
        ("NVIDIA GeForce RTX 3090 Ti", r"did you mean RTX-3090\?"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", r"did you mean RTX-4090\?"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "is MIG 1g.5gb, a part of a GPU"),
        ("GRID A100D-40C", "a part of a GPU"),
    ],
)
def test_another_gpu_is_not_taken_for_it(said: str, why: str) -> None:
    """Its memory, a letter behind it or a slice of it make it another."""
    with pytest.raises(ValueError, match=why):
        find_gpu(said)
