"""Other people's names of GPUs, models and dtypes, in ours."""

import re
import warnings
from pathlib import Path

from simulator.models.gpus import GPUS, find_gpu
from simulator.models.load import shipped_models, shipped_shape
from simulator.util.errors import HeadwayWarning

GPU_WORDS = (
    (r"rtx.?pro.?6000", "RTX-PRO-6000"),
    (r"(?<![0-9])4090", "RTX-4090"),
    (r"(?<!rtx )a6000", "A6000"),
    (r"(?<![a-z])l40s(?![0-9])", "L40S"),
    (r"(?<![a-z])l40(?![0-9])", "L40"),
    (r"a10g", "A10G"),
    (r"(?<![a-z])l4(?![0-9])", "L4"),
    (r"(?<!g)h200.*nvl", "H200-NVL"),
    (r"(?<!g)b200", "B200"),
    (r"(?<!g)h200", "H200"),
    (r"h100.*nvl", "H100-NVL"),
    (r"h100.*pcie", "H100-PCIe"),
    (r"h100", "H100-80GB"),
    (r"a100.*40 ?gb", "A100-40GB"),
    (r"a100.*pcie", "A100-80GB-PCIe"),
    (r"a100", "A100-80GB"),
)
"""The first pattern that a name holds decides."""
SUBSTITUTES = {"gb200": "B200", "a800": "A100-80GB"}
"""GPUs that are not in the table, and what is taken for them."""

FOUR_BITS = ("fp4", "int4", "awq", "gptq", "w4a16", "w4", "gpt-oss", "gptoss", "nf4", "bnb-4")
EIGHT_BITS = {
    "fp8": "fp8",
    "float8": "fp8",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "int8": "int8",
    "w8a8": "int8",
    "w8a16": "int8",
}
SIXTEEN_BITS = ("bf16", "bfloat16", "fp16", "float16", "f16", "half", "16-bit", "16bit", "w16a16")
UNSPECIFIED = {"", "auto", "none", "default", "unknown", "na", "n/a", "nan", "-", "?", "null"}
QUANTIZED_FORMATS = {"compressed-tensors", "modelopt", "quantized", "quark", "torchao"}
"""Ways of keeping weights that say nothing about their width: the model's name must."""


def gpu_name(name: str) -> str:
    """Give the table's name of a GPU; ValueError where none is meant."""
    plain = name.lower().replace("_", " ")
    for pattern, known in GPU_WORDS:
        if re.search(pattern, plain):
            return known
    for word, known in SUBSTITUTES.items():
        if word in plain:
            warnings.warn(f"gpu: {name!r} is taken as {known}", HeadwayWarning, stacklevel=2)
            return known
    try:
        return find_gpu(name).name
    except ValueError:
        known = ", ".join(GPUS)
        raise ValueError(f"gpu: no GPU {name!r} in the table; there are {known}") from None


def model_name(name: str, folder: Path = Path()) -> str:
    """Give the shipped model of a Hugging Face name, or the path of a config.json.

    A relative path is one from `folder`. ValueError where there is neither.
    """
    if (path := folder / name).is_file() or (path / "config.json").is_file():
        return str(path.resolve())
    found = shipped_shape(name, shipped_models())
    if found is None:
        raise ValueError(
            f"model: no shipped model has the shape of {name!r}, and it is no path of a "
            f"config.json; there are {', '.join(shipped_models())}"
        )
    return found


def quantization(dtype: str, model: str) -> str | None:
    """Give what `engine.quantization` should be for weights of a dtype; None: 16 bits.

    Where the dtype is not recorded, the model's name may tell. ValueError for an unknown one.
    """
    told, named = dtype.lower(), model.rsplit("/", 1)[-1].lower()
    half = any(word in told for word in SIXTEEN_BITS)
    word = named if half or told in UNSPECIFIED | QUANTIZED_FORMATS else told
    found = _quantization_in(word)
    if half and found:
        what = f"weight_dtype: {dtype!r} is taken as that of activations: {model} has {found}"
        warnings.warn(what, HeadwayWarning, stacklevel=2)
    if found is None and not half and told not in UNSPECIFIED:
        raise ValueError(f"weight_dtype: {dtype!r} is none of bf16, fp16, fp8, int8, int4, nvfp4")
    return found


def _quantization_in(word: str) -> str | None:
    """Give the quantization that a word tells of; None: none."""
    if any(four in word for four in FOUR_BITS):
        if "mxfp4" in word or "oss" in word:
            return "mxfp4"
        return "nvfp4" if "fp4" in word else "int4"
    return next((ours for theirs, ours in EIGHT_BITS.items() if theirs in word), None)


def kv_dtype(dtype: str) -> str:
    """Give `engine.kv_cache_dtype`; ValueError for a dtype that no cache has."""
    word = dtype.lower()
    if any(eight in word for eight in ("fp8", "float8", "e4m3", "e5m2")):
        return "fp8"
    if word in UNSPECIFIED or any(half in word for half in SIXTEEN_BITS):
        return "auto"
    raise ValueError(f"kv_dtype: {dtype!r} is none of auto, bf16, fp16, fp8")
