"""What `--quantization` makes of a checkpoint."""

from simulator.models.load import load_model
from simulator.models.quantization import Quantization
from simulator.schedulers.vllm.rules import Release
from simulator.util.errors import HeadwayError
from simulator.util.files import read_table

LOADERS = {row["method"]: row for row in read_table(__file__, "quantizations.csv")}
"""Loaders of weights, by the names of vLLM and SGLang: the methods of checkpoints that each reads,
and the dtype that it makes of 16 bits (`online`), or that most of these checkpoints have."""
OVERRIDES = {"modelopt": (0, 10, 2), "mxfp4": (0, 20, 0)}
"""The first release of vLLM that takes the loader of such a checkpoint, whatever is asked for."""


def loaded_as(option: str, name: str, release: Release, engine: str) -> str:
    """Return the dtype that `option`, `--quantization LOADER`, makes of a model.

    "": a checkpoint's own formats. HeadwayError, in vLLM's words, where the loader does not read
    the checkpoint.
    """
    asked = option.replace("=", " ").split()[-1]
    try:
        model = load_model(name)
    except ValueError:  # what is wrong is said where it is loaded
        return LOADERS[asked]["dtype"]
    own, why = model.checkpoint, ""
    if own is None and not LOADERS[asked]["online"]:
        why = f"Cannot find the config file for {asked}"
    elif own is not None and not _reads(asked, own, model.unread, release):
        why = f"Quantization method specified in the model config ({own.method}) does not match"
    if why and engine == "vllm":
        raise HeadwayError(f"{option}: vLLM refuses it: {why}")
    return "" if own is not None and own.rules else LOADERS[asked]["dtype"]


def _reads(asked: str, own: Quantization, unread: str, release: Release) -> bool:
    """Whether a loader reads a checkpoint.

    Where the model's name alone says it, `FP8` and the like are bits, `AWQ` is a method.
    """
    loader = LOADERS[asked]
    family = next((one for one in OVERRIDES if one in own.method), own.method)
    if family in loader["reads"].split() or own.method == "auto-round":
        return True
    if family in OVERRIDES and release >= OVERRIDES[family]:
        return True
    guessed = "by the name" in unread and (
        own.method == "fp8" or f"for {own.method} by" not in unread
    )
    return guessed and loader["dtype"] in ("", own.word)
