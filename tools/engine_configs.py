"""Record what vLLM derives from a command line, by its own EngineArgs, without a GPU.

    PYTHONPATH=WHEEL python engine_configs.py MODELS OUT.jsonl [MODEL ...]
    PYTHONPATH=WHEEL python engine_configs.py MODELS OUT.jsonl --states MODEL ...

It runs in an environment of vLLM's light dependencies and torch, beside the unpacked Python files
of a wheel, and takes nothing of Headway. The platform pretends to be CUDA on the GPU of a case;
compiled operators are empty. MODELS has a folder with a config.json for each model.

Models with states (Mamba, linear attention) need all dependencies of vLLM: their classes are
imported as on a CPU, and size the blocks.
"""

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

GIB = 1 << 30
GPUS = {
    "A100-80GB": ("NVIDIA A100-SXM4-80GB", 79.25, (8, 0)),
    "H100-80GB": ("NVIDIA H100 80GB HBM3", 79.2, (9, 0)),
    "H200": ("NVIDIA H200", 139.8, (9, 0)),
    "B200": ("NVIDIA B200", 178.35, (10, 0)),
    "L40S": ("NVIDIA L40S", 44.4, (8, 9)),
    "L4": ("NVIDIA L4", 22.1, (8, 9)),
}
"""What a driver calls each, GiB, and its compute capability."""
COMMANDS = (
    "",
    "--no-enable-chunked-prefill",
    "--no-enable-chunked-prefill --max-model-len 4k --max-num-seqs 1000",
    "--max-model-len 4096 --max-num-seqs 2",
    "--max-num-seqs 64 --gpu-memory-utilization 0.8",
    "--max-num-batched-tokens 512",
    "--scheduling-policy priority --max-num-batched-tokens 64",
    "-tp 2",
    "-pp 2",
    "-dp 2",
    "--no-enable-prefix-caching --no-async-scheduling",
    "--enable-lora --max-loras 4",
    "--block-size 32 --kv-cache-dtype fp8",
    "--disable-hybrid-kv-cache-manager",
    '--speculative-config {"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}',
    '--speculative-config {"method":"draft_model","model":"MODEL","num_speculative_tokens":4}',
    '--speculative-config {"method":"mtp","num_speculative_tokens":2}',
)
STATES = (
    *(f"-tp {gpus} --kv-cache-dtype {kind}" for gpus in (1, 2, 4) for kind in ("auto", "fp8")),
    "--no-enable-prefix-caching",
    "--block-size 32",
)
CLASSES = ("qwen3_next", "nemotron_h", "granitemoehybrid", "qwen3_5")
UNUSED = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
FIELDS = {
    "scheduler_config": (
        *("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill", "async_scheduling"),
        *("long_prefill_token_threshold", "watermark", "prefill_schedule_interval"),
        "scheduler_reserve_full_isl",
    ),
    "cache_config": (
        *("block_size", "gpu_memory_utilization", "enable_prefix_caching"),
        *("prefix_cache_retention_interval", "mamba_cache_mode"),
    ),
}
"""What is compared; a release may lack some."""


class _Nothing(types.ModuleType):
    """A module, or an operator, of which nothing is computed."""

    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name)

    def __call__(self, *_args: object, **_more: object) -> bool:
        return False


def pretend() -> dict[str, Any]:
    """Let vLLM take this machine for one with eight GPUs; return what says which they are."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="CRITICAL", VLLM_NO_USAGE_STATS="1")
    import torch
    import torch._ops
    import torch.library

    for name in ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch"):
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(f"vllm.{name}"))
    for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
        sys.modules[name] = _Nothing(name)
    found = torch._ops._OpNamespace.__getattr__

    def operator(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.startswith(("_C", "_moe", "vllm", "_vllm")):
                raise
            return _Nothing(name)

    torch._ops._OpNamespace.__getattr__ = operator  # type: ignore[method-assign]
    torch.library.register_fake = lambda *_args, **_more: lambda function: function
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    gpu: dict[str, Any] = {}

    class Pretended(CudaPlatformBase):  # type: ignore[misc]
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

    vllm.platforms._current_platform = Pretended()
    torch.cuda.device_count = lambda: 8
    torch.cuda.is_available = lambda: True
    gpu.update(zip(("name", "gib", "cc"), GPUS["H100-80GB"], strict=True))
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()
    model = registry._LazyRegisteredModel
    model._save_modelinfo_to_cache = lambda *_: None
    model._load_modelinfo_from_cache = lambda *_: None
    return gpu


def size_blocks(config: Any) -> None:
    """Size the blocks of a model with states as a worker with FlashAttention does once it loads."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    class Layer(gdn.QwenGatedDeltaNetAttention):  # type: ignore[misc]
        """Says of itself what that layer does, without weights."""

        __init__ = object.__init__
        _checkpoint_alignment = getattr(gdn, "FLASHINFER_GDN_CHECKPOINT_ALIGNMENT", None)

    gdn.current_platform = current_platform  # it was imported as on a CPU
    aligned = config.cache_config.mamba_cache_mode == "align"
    delta = hasattr(config.model_config.hf_text_config, "linear_key_head_dim")
    if aligned and delta and gdn._resolve_gdn_prefill_backend(config)[1] == "flashinfer":
        config.compilation_config.static_forward_context["layer"] = Layer()
    type(current_platform)._find_non_ssm_backends = lambda _: [FlashAttentionBackend]
    current_platform.update_block_size_for_backend(config)


def record(models: Path, out: Path, wanted: list[str]) -> None:
    """Write a line for each model, command and GPU; what cannot be derived has an `error`."""
    commands: tuple[str, ...] = COMMANDS
    if wanted[:1] == ["--states"]:
        commands, wanted = STATES, wanted[1:]
        for name in CLASSES:
            if name == "qwen3_5":  # its pictures alone need it
                sys.modules.update({one: _Nothing(one) for one in UNUSED})
            importlib.import_module(f"vllm.model_executor.models.{name}")
    gpu = pretend()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    with out.open("w", encoding="utf-8") as file:
        for model in wanted or sorted(path.parent.name for path in models.glob("*/config.json")):
            place = str(models / model)
            fixed = ["--model", place, "--skip-tokenizer-init", "--tokenizer", place]
            for command in commands:
                words = [word.replace("MODEL", place) for word in command.split()]
                for name, known in GPUS.items():
                    gpu.update(zip(("name", "gib", "cc"), known, strict=True))
                    row: dict[str, Any] = {"model": model, "command": command, "gpu": name}
                    try:
                        args = AsyncEngineArgs.from_cli_args(parser.parse_args([*fixed, *words]))
                        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
                        if commands is STATES:
                            size_blocks(config)
                    except (Exception, SystemExit) as error:
                        row["error"] = f"{type(error).__name__}: {error}"[:300]
                    else:
                        for block, names in FIELDS.items():
                            values = vars(getattr(config, block))
                            row |= {key: values[key] for key in names if key in values}
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
