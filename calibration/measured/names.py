"""Other people's names of GPUs, models and dtypes, in ours."""

import re

from simulator.hardware import GPUS, find_gpu
from simulator.model import shipped_models
from simulator.shapes import shipped_shape

GPU_WORDS = (
    (r"rtx.?pro.?6000", "RTX-PRO-6000"),
    (r"4090", "RTX-4090"),
    (r"a6000", "A6000"),
    (r"l40s?(?![0-9])", "L40S"),
    (r"a10g", "A10G"),
    (r"l4(?![0-9])", "L4"),
    (r"g?b200", "B200"),
    (r"h200", "H200"),
    (r"h100", "H100-80GB"),
    (r"a100.*40 ?gb", "A100-40GB"),
    (r"a100", "A100-80GB"),
)
"""The first pattern that a name holds decides."""

FOUR_BITS = ("fp4", "int4", "awq", "gptq", "w4a16", "w4", "gpt-oss", "gptoss")
EIGHT_BITS = {"fp8": "fp8", "e4m3": "fp8", "e5m2": "fp8", "int8": "int8", "w8a8": "int8"}


def gpu_name(name: str) -> str:
    """Give the table's name of a GPU; ValueError where none is meant."""
    plain = name.lower().replace("_", " ")
    for pattern, known in GPU_WORDS:
        if re.search(pattern, plain):
            return known
    try:
        return find_gpu(name).name
    except ValueError:
        known = ", ".join(GPUS)
        raise ValueError(f"gpu: no GPU {name!r} in the table; there are {known}") from None


def model_name(name: str) -> str:
    """Give the shipped model of a Hugging Face name; ValueError where there is none."""
    found = shipped_shape(name, shipped_models())
    if found is None:
        raise ValueError(
            f"model: no shipped model has the shape of {name!r}; there are "
            f"{', '.join(shipped_models())}"
        )
    return found


def quantization(dtype: str, model: str) -> str | None:
    """Give what `engine.quantization` should be for weights of a dtype; None: 16 bits.

    Where the dtype is not recorded, the model's name may tell.
    """
    word = (dtype or model.rsplit("/", 1)[-1]).lower()
    if any(four in word for four in FOUR_BITS):
        return "nvfp4" if "fp4" in word or "oss" in word else "int4"
    return next((ours for theirs, ours in EIGHT_BITS.items() if theirs in word), None)


def kv_dtype(dtype: str) -> str:
    """Give `engine.kv_cache_dtype`."""
    word = dtype.lower()
    return "fp8" if word.startswith(("fp8", "float8")) else "auto"
