"""Engines by name: what a scenario's `engine: NAME` fills in.

`vllm` is vLLM 0.33.0 as `vllm serve` starts it (EngineArgs.get_batch_defaults, SchedulerConfig and
CacheConfig), with the default sizes of a batch that it chooses by GPU.
"""

from typing import Any

from simulator.hardware import GIB, find_gpu


def named(engine: object, gpu: object) -> object:
    """Fill in the defaults of the engine that the block `engine` names; other blocks are kept.

    `engine` and `gpu` are plain values as a scenario gives them, checked or not.
    """
    if isinstance(engine, str):
        engine = {"name": engine}
    if not isinstance(engine, dict) or engine.get("name") != "vllm":
        return engine
    return _vllm(gpu.get("name") if isinstance(gpu, dict) else None) | engine


def _vllm(gpu: object) -> dict[str, Any]:
    tokens, seqs = 2048, 256
    try:
        found = find_gpu(gpu if isinstance(gpu, str) else "A100-80GB")
    except ValueError:
        pass  # told elsewhere
    else:
        if found.memory >= 160 * GIB:
            tokens, seqs = 16384, 1024
        elif found.memory >= 70 * GIB and "A100" not in found.name:
            tokens, seqs = 8192, 1024
    return {
        "scheduling_policy": "fcfs",
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "block_size": 16,
        "gpu_memory_utilization": 0.92,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False,
        "prefill_schedule_interval": 1,
        "scheduler_reserve_full_isl": True,
        "watermark": 0.0,
        "async_scheduling": True,
    }
