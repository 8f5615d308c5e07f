"""Which rules a measured engine followed: its flags where recorded, else its version's defaults.

The defaults are those of vLLM V1's EngineArgs for `vllm serve`, release by release.
"""

from typing import Any

from calibration.measured import names
from calibration.measured.runs import Run
from simulator.engines import ASYNC_SINCE, named, since
from simulator.overhead import NEWEST, Version, read_version


def version(text: str) -> Version:
    """Read major and minor out of a version as people write it; `NEWEST` where there is none."""
    return read_version(text) or NEWEST


def schedules_asynchronously(run: Run) -> bool:
    """Tell whether a run's engine decided a step while the one before ran.

    Recorded in the notes, or the version's default. InferenceMAX started its servers of 2025 with
    --async-scheduling.
    """
    notes = run.word("notes").lower()
    if "no async" in notes or "async scheduling off" in notes:
        return False
    told = "async scheduling" in notes or "async-scheduling" in notes or "inferencemax" in notes
    return told or version(run.word("engine_version")) >= ASYNC_SINCE


def gpus_per_replica(run: Run) -> int:
    """Give the tensor parallelism: as recorded, else the GPUs of each replica."""
    return run.count("tp") or max(1, (run.count("n_gpus") or 1) // (run.count("dp") or 1))


def engine_block(run: Run, gpu: str) -> dict[str, Any]:
    """Give the keys of a scenario's `engine` that say how a run was configured."""
    released = version(run.word("engine_version"))
    block: dict[str, Any] = {"name": "vllm", **_sizes(run, gpu), **since(released)}
    if released != NEWEST:
        block["version"] = ".".join(map(str, released))
    block["async_scheduling"] = schedules_asynchronously(run)
    if share := run.number("gpu_mem_util"):
        block["gpu_memory_utilization"] = share
    for column, key in (
        ("prefix_caching", "enable_prefix_caching"),
        ("chunked_prefill", "enable_chunked_prefill"),
    ):
        if (flag := run.flag(column)) is not None:
            block[key] = flag
    block["tensor_parallel_size"] = gpus_per_replica(run)
    if quantized := names.quantization(run.word("weight_dtype"), run.word("model")):
        block["quantization"] = quantized
    if (cache := names.kv_dtype(run.word("kv_dtype"))) != "auto":
        block["kv_cache_dtype"] = cache
    if tokens := run.count("kv_capacity_tokens"):
        block["num_gpu_blocks_override"] = tokens // (run.count("block_size") or 16)
    return block


def _sizes(run: Run, gpu: str) -> dict[str, Any]:
    """Give the sizes of a batch: as recorded, else vLLM's defaults for the GPU."""
    defaults = named("vllm", {"name": gpu})
    assert isinstance(defaults, dict)
    sizes = {
        key: run.count(key) or defaults[key]
        for key in ("max_num_seqs", "max_num_batched_tokens", "block_size")
    }
    sizes["max_num_batched_tokens"] = max(sizes["max_num_batched_tokens"], sizes["max_num_seqs"])
    if longest := run.count("max_model_len"):
        sizes["max_model_len"] = longest
    return sizes
