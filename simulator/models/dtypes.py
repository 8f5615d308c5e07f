"""Bytes of numbers, by vLLM's words for their types."""

HALF = 2.0  # bytes of fp16 and bf16
BYTES = {
    **dict.fromkeys(("float32", "float", "fp32"), 4.0),
    **dict.fromkeys(("float16", "fp16", "half", "bfloat16", "bf16"), HALF),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 1.0),
    "int4": 0.5,
    "bitsandbytes": 0.5625,  # int4 with a scale of 32 bits for every 64
    "nvfp4": 0.5625,  # with a scale of 8 bits for every 16 numbers
    "mxfp4": 0.53125,  # with one for every 32
}
"""Bytes of one number, by vLLM's words and the short ones."""


def bytes_of(dtype: str) -> float:
    """Return the bytes of one number of a dtype; ValueError for a word that is none."""
    if dtype not in BYTES:
        raise ValueError(f"dtype: {dtype!r} is none of auto, {', '.join(BYTES)}")
    return BYTES[dtype]
