"""The table of GPUs."""

import pytest

from simulator.models.gpus import GIB, GPUS, find_gpu, find_gpu_of_driver


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
    what = "in the table; did you mean A100-40GB or A100-80GB or A100-80GB-PCIe"
    with pytest.raises(ValueError, match=rf"^gpu.name: no GPU 'A100' {what}\?$"):
        find_gpu("A100")
    with pytest.raises(ValueError, match="there are "):
        find_gpu("")


def test_the_table_of_gpus_is_physical() -> None:
    """Memory below the nominal size, fp8 twice bf16, hundreds of FLOPs per byte (H20: 37)."""
    for gpu in GPUS.values():
        nominal = [int(part[:-2]) for part in gpu.name.split("-") if part.endswith("GB")]
        assert not nominal or 0.96 < gpu.memory / (nominal[0] * GIB) < 1
        assert gpu.fp8_flops is None or round(gpu.fp8_flops / gpu.bf16_flops, 1) == 2
        assert 35 < gpu.bf16_flops / gpu.bandwidth < 500
        assert gpu.flops("int4") == gpu.bf16_flops


@pytest.mark.parametrize(
    ("said", "name"),
    [("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100-80GB"), ("NVIDIA B200", "B200")],
)
def test_gpus_by_what_their_driver_calls_them(said: str, name: str) -> None:
    """Memory and form in the name do not matter; what nobody knows is refused."""
    assert find_gpu_of_driver(said).name == name
    with pytest.raises(ValueError, match="no GPU 'Voodoo 2'"):
        find_gpu_of_driver("Voodoo 2")
