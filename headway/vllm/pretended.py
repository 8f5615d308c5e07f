"""vLLM's configuration as a server derives it, on a machine without a GPU.

The platform says that it is CUDA on a GPU, which it names; compiled operators that are missing are
empty. Only what vLLM derives from its options depends on it: no model is built.
"""

import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

GIB = 1 << 30
H100 = {"name": "NVIDIA H100 80GB HBM3", "gib": 79.2, "cc": (9, 0)}
"""What a driver calls it, and its compute capability."""


class Nothing(types.ModuleType):
    """A module, or an operator, of which nothing is computed."""

    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name)

    def __call__(self, *_args: object, **_more: object) -> bool:
        return False


@contextmanager
def pretended(gpu: Mapping[str, Any]) -> Iterator[None]:
    """Let vLLM take this machine for one with eight GPUs, of which `gpu` has name, gib and cc."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    torch = import_module("torch")  # vLLM's

    for name in ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch"):
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(f"vllm.{name}"))
    for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
        sys.modules[name] = Nothing(name)
    found = torch._ops._OpNamespace.__getattr__

    def operator(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.startswith(("_C", "_moe", "vllm", "_vllm")):
                raise
            return Nothing(name)

    import vllm.config.vllm as derives
    from vllm.platforms import current_platform

    with (
        _set(torch._ops._OpNamespace, "__getattr__", operator),
        _set(torch.library, "register_fake", lambda *_args, **_more: lambda function: function),
        _set(torch.cuda, "device_count", lambda: 8),
        _set(torch.cuda, "is_available", lambda: True),
        _set(derives, "HAS_TRITON", True),
        _set(current_platform, "__class__", _platform(gpu)),  # modules have it by name
    ):
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda function: function()
        model = registry._LazyRegisteredModel
        model._save_modelinfo_to_cache = lambda *_: None
        model._load_modelinfo_from_cache = lambda *_: None
        yield


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name, None)  # old releases ask for less
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _platform(gpu: Mapping[str, Any]) -> Any:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Pretended(CudaPlatformBase):
        """A platform that says what `gpu` does."""

        get_device_capability = classmethod(lambda _, device_id=0: DeviceCapability(*gpu["cc"]))
        get_device_name = classmethod(lambda _, device_id=0: gpu["name"])
        get_device_total_memory = classmethod(lambda _, device_id=0: int(gpu["gib"] * GIB))
        get_device_uuid = classmethod(lambda _, device_id=0: "GPU-0")
        device_count = classmethod(lambda _: 8)
        is_fully_connected = classmethod(lambda _, ids: True)
        log_warnings = classmethod(lambda _: None)
        get_cuda_runtime_major = classmethod(lambda _: 13)

        @classmethod
        def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
            if isinstance(capability, int):
                capability = divmod(capability, 10)
            return tuple(gpu["cc"]) >= tuple(capability)

    return Pretended
