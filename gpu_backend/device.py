"""Whether an engine can be had: is the device there, does it run such a model, does it fit."""

import os

import torch

from simulator.models.gpus import GIB
from simulator.models.spec import ModelSpec
from simulator.util.errors import HeadwayError

SPARE = GIB // 2
"""Bytes that must be left on a GPU beside weights and cache: activations, graphs, libraries."""


def find_device(name: str) -> torch.device:
    """Find a device by its torch name; HeadwayError where it is none, or not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise HeadwayError(f"device: {name!r} is none; there are cpu and cuda") from None
    if device.type not in {"cpu", "cuda"}:
        raise HeadwayError(f"device: {name!r} is not supported; there are cpu and cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise HeadwayError(f"device: no {name}: torch {torch.__version__} finds no CUDA GPU")
        if (device.index or 0) >= torch.cuda.device_count():
            raise HeadwayError(f"device: no {name}: there are {torch.cuda.device_count()} GPUs")
    return device


def check_supported(spec: ModelSpec) -> None:
    """Raise HeadwayError for a model that the simulator knows but the engine does not."""
    if spec.num_experts:
        raise HeadwayError(
            f"model: {spec.name} is a mixture of experts; the engine runs dense ones"
        )
    if spec.latent is not None or spec.sliding_window:
        what = "latent attention" if spec.latent is not None else "a sliding window"
        raise HeadwayError(f"model: {spec.name} has {what}; the engine has full attention alone")
    if spec.norms_per_layer != 2:
        raise HeadwayError(
            f"model: {spec.name} has {spec.norms_per_layer} norms in a layer; the engine has 2"
        )
    scaling = spec.rope_scaling
    if scaling is not None and scaling.rope_type not in {"llama3", "linear"}:
        raise HeadwayError(
            f"model: {spec.name} has rope_scaling {scaling.rope_type!r}; the engine knows llama3 "
            "and linear"
        )


def free_bytes(device: torch.device) -> int:
    """Give the bytes that the device has left."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(
    spec: ModelSpec, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise HeadwayError where weights and cache are more than the device has left."""
    weights = spec.parameters * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    cache = int(num_blocks * block_size * spec.kv_bytes_per_token(name))
    free = free_bytes(device)
    if weights + cache + SPARE <= free:
        return
    fitting = int((free - SPARE - weights) // (cache / num_blocks))
    hint = f"at most {fitting} blocks fit" if fitting > 1 else "take a smaller model"
    raise HeadwayError(
        f"device: {spec.name} in {name} does not fit {device}: {weights / GIB:.2f} GiB of weights, "
        f"{cache / GIB:.2f} GiB for {num_blocks} KV blocks and {SPARE / GIB:.2f} GiB to work with, "
        f"but {free / GIB:.2f} GiB are free; {hint}"
    )
