"""Record what vLLM derives from a command line, by its own EngineArgs, without a GPU.

    PYTHONPATH=WHEEL:. python engine_configs.py MODELS OUT.jsonl [MODEL ...]
    PYTHONPATH=WHEEL:. python engine_configs.py MODELS OUT.jsonl --states MODEL ...

It runs in an environment of vLLM's light dependencies and torch, beside the unpacked Python files
of a wheel. The platform pretends to be CUDA on the GPU of a case. MODELS has a folder with a
config.json for each model.

Models with states (Mamba, linear attention) need all dependencies of vLLM: their classes are
imported as on a CPU, and size the blocks.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from headway.vllm.pretended import H100, Nothing, pretended

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
        "max_num_batched_tokens",
        "max_num_seqs",
        "enable_chunked_prefill",
        "async_scheduling",
        "long_prefill_token_threshold",
        "watermark",
        "prefill_schedule_interval",
        "scheduler_reserve_full_isl",
    ),
    "cache_config": (
        "block_size",
        "gpu_memory_utilization",
        "enable_prefix_caching",
        "prefix_cache_retention_interval",
        "mamba_cache_mode",
    ),
}
"""What is compared; a release may lack some."""


def size_blocks(config: Any) -> None:
    """Size the blocks of a model with states as a worker with FlashAttention does once it loads."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import fa_utils

    fa_utils.is_flash_attn_varlen_func_available = lambda: False  # its kernels are not there
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
    platform = type(current_platform)
    platform._find_non_ssm_backends = lambda _: [FlashAttentionBackend]
    platform._find_non_ssm_backend = lambda _: FlashAttentionBackend  # up to 0.30
    current_platform.update_block_size_for_backend(config)


def record(models: Path, out: Path, wanted: list[str]) -> None:
    """Write a line for each model, command and GPU; what cannot be derived has an `error`."""
    commands: tuple[str, ...] = COMMANDS
    if wanted[:1] == ["--states"]:
        commands, wanted = STATES, wanted[1:]
        for name in CLASSES:
            if name == "qwen3_5":  # its pictures alone need it
                sys.modules.update({one: Nothing(one) for one in UNUSED})
            importlib.import_module(f"vllm.model_executor.models.{name}")
    gpu = dict(H100)
    with pretended(gpu):
        _write(models, out, wanted, commands, gpu)


def _write(
    models: Path, out: Path, wanted: list[str], commands: tuple[str, ...], gpu: dict[str, Any]
) -> None:
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
