"""Engines by name: what a scenario's `engine: NAME` fills in, what is modelled of it and what not.

`vllm` is vLLM 0.33.0 as `vllm serve` starts it (EngineArgs.get_batch_defaults, SchedulerConfig and
CacheConfig), with the default sizes of a batch that it chooses by GPU. Each of the others selects a
scheduler of its own (`docs/engines.md`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.costs.overhead import NEWEST, VLLM, Version, read_version
from simulator.models.gpus import GIB, Gpu, find_gpu
from simulator.models.kv_budget import FractionOf
from simulator.models.load import load_model

Defaults = dict[str, Any]

ASYNC_SINCE = (0, 14)
"""vLLM schedules asynchronously by default from 0.14 on (before: --async-scheduling)."""
RESERVES_SINCE = (0, 20)
"""Admission waits for room for a whole prompt; before, for that of its first chunk."""
UTILIZATION_SINCE = (0, 20)  # gpu_memory_utilization 0.92; before 0.9


@dataclass(frozen=True)
class Engine:
    """One serving system."""

    follows: str  # version and source
    modelled: str
    left_out: str
    defaults: Callable[[Gpu | None, int], Defaults]  # by GPU and longest request in tokens
    fraction_of: FractionOf = "all"  # what gpu_memory_utilization is a share of


def named(engine: object, gpu: object, model: object = None) -> object:
    """Fill in the defaults of the engine that the block `engine` names; other blocks are kept.

    The arguments are plain values as a scenario gives them, checked or not.
    """
    if isinstance(engine, str):
        engine = {"name": engine}
    if not isinstance(engine, dict):
        return engine
    name = engine.get("name")
    if not isinstance(name, str) or name not in ENGINES:
        return engine
    longest = engine.get("max_model_len") or _positions(model)
    found = _find(gpu.get("name") if isinstance(gpu, dict) else None)
    defaults = ENGINES[name].defaults(found, longest if isinstance(longest, int) else 0)
    version = engine.get("version")
    if name == VLLM and isinstance(version, str):
        defaults |= since(read_version(version) or NEWEST)
    if name == VLLM and _drafts_on_the_host(engine.get("speculative_config")):
        defaults["async_scheduling"] = False  # as in vLLM's VllmConfig.__post_init__
    return {"async_scheduling": False} | defaults | engine


def since(version: Version) -> Defaults:
    """Give the defaults of a vLLM V1 version that have changed since (EngineArgs, by release)."""
    return {
        "async_scheduling": version >= ASYNC_SINCE,
        "scheduler_reserve_full_isl": version >= RESERVES_SINCE,
        "gpu_memory_utilization": 0.92 if version >= UTILIZATION_SINCE else 0.9,
    }


def _drafts_on_the_host(speculation: object) -> bool:
    """Say whether drafts are n-grams of what has been said, so that a step waits for the last."""
    if not isinstance(speculation, dict):
        return False
    method = speculation.get("method")
    return method == "ngram" or (method is None and speculation.get("draft") is None)


def fraction_of(name: str | None) -> FractionOf:
    """Say what `gpu_memory_utilization` is a share of, for an engine's name."""
    return ENGINES[name].fraction_of if name else "all"


def _positions(model: object) -> int:
    """Give the positions of a model; 0 where it cannot be found, which is told elsewhere."""
    try:
        found = load_model(model if isinstance(model, str | Path) else "llama-3-8b")
    except Exception:  # the file may hold anything
        return 0
    return found.max_position_embeddings


def _find(gpu: object) -> Gpu | None:
    """Find the GPU; None where there is none of that name, which is told elsewhere."""
    try:
        return find_gpu(gpu if isinstance(gpu, str) else "A100-80GB")
    except ValueError:
        return None


def _vllm(gpu: Gpu | None, longest: int) -> Defaults:
    tokens, seqs = 2048, 256
    if gpu and gpu.memory >= 160 * GIB:
        tokens, seqs = 16384, 1024
    elif gpu and gpu.memory >= 70 * GIB and "A100" not in gpu.name:
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


def _vllm_v0(gpu: Gpu | None, longest: int) -> Defaults:
    return {
        "scheduling_policy": "fcfs-v0",
        "max_num_seqs": 256,
        "max_num_batched_tokens": max(longest, 2048),
        "block_size": 16,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": False,
        "watermark": 0.01,
    }


def _sglang(gpu: Gpu | None, longest: int) -> Defaults:
    tokens = 8192
    if gpu and gpu.memory < 25 * GIB:
        tokens = 2048
    elif gpu and gpu.memory >= 160 * GIB:
        tokens = 16384
    return {
        "scheduling_policy": "sglang",
        "max_num_seqs": 2048,
        "max_num_batched_tokens": tokens,
        "block_size": 1,
        "gpu_memory_utilization": 0.88,
        "enable_prefix_caching": True,
        "prefix_cache": "radix",
    }


def _tensorrt_llm(gpu: Gpu | None, longest: int) -> Defaults:
    return {
        "scheduling_policy": "trtllm",
        "max_num_seqs": 2048,
        "max_num_batched_tokens": max(longest, 8192),
        "block_size": 32,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": False,
    }


def _tgi(gpu: Gpu | None, longest: int) -> Defaults:
    return {
        "scheduling_policy": "tgi",
        "max_num_seqs": 128,
        "max_num_batched_tokens": max(longest, 4096),
        "block_size": 1,
        "gpu_memory_utilization": 0.95,
        "enable_prefix_caching": False,
    }


def _deepspeed_fastgen(gpu: Gpu | None, longest: int) -> Defaults:
    return {
        "scheduling_policy": "fastgen",
        "max_num_seqs": 512,
        "max_num_batched_tokens": 768,
        "block_size": 64,
        "gpu_memory_utilization": 0.98,
        "enable_prefix_caching": False,
    }


def _orca(gpu: Gpu | None, longest: int) -> Defaults:
    return {
        "scheduling_policy": "orca",
        "max_num_seqs": 32,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": False,
        "allocation": "contiguous",
    }


def _hf(gpu: Gpu | None, longest: int) -> Defaults:
    return {
        "scheduling_policy": "hf-static",
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.95,
        "enable_prefix_caching": False,
        "allocation": "contiguous",
    }


COST = "the kernels' speed: the cost profile is the same for all engines"
ENGINES = {
    "vllm": Engine(
        "vLLM 0.33.0: vllm/v1/core/sched/scheduler.py, EngineArgs.get_batch_defaults",
        "every decision of the scheduler, checked by `headway conform`; asynchronous scheduling; "
        "hash-chain prefix cache; sizes by GPU",
        "LoRA, multimodal inputs, pipeline parallelism",
        _vllm,
    ),
    "vllm-v0": Engine(
        "vLLM 0.6.3: vllm/core/scheduler.py, _schedule_default",
        "prompts first, whole; watermark; a free block at hand for each decode; recomputation; "
        "swapped queue (preemption_mode: swap); scheduler_delay_factor",
        f"multi-step scheduling and prefix cache (off by default), chunked prefill; {COST}",
        _vllm_v0,
    ),
    "sglang": Engine(
        "SGLang 0.4.6: managers/scheduler.py, schedule_policy.py, schedule_batch.py",
        "prompts first in chunks; lpm order with in-batch sharing; new-token ratio and its decay; "
        "retraction; radix tree of pages of one token; weights and cache in mem_fraction_static",
        f"overlap of scheduling, mixed chunks, dfs-weight; {COST}",
        _sglang,
        "static",
    ),
    "tensorrt-llm": Engine(
        "TensorRT-LLM 1.0: batch_manager/capacityScheduler.cpp, microBatchScheduler.cpp",
        "in-flight batching; GUARANTEED_NO_EVICT, MAX_UTILIZATION, STATIC_BATCH; max_num_tokens; "
        "chunked context by blocks; cache in 0.9 of the memory left free",
        "priority of cached blocks, equal progress of chunks, requests held back to reuse a "
        f"prefix; {COST}",
        _tensorrt_llm,
        "free",
    ),
    "tgi": Engine(
        "Text Generation Inference 2.3: backends/v3/src/backend.rs, queue.rs",
        "waiting_served_ratio, max_waiting_tokens, prefill and total token budgets, reservation "
        "of prompt and max_new_tokens",
        "prefix cache, chunked prompts (version 3), refusal beyond 128 requests: here they wait; "
        f"{COST}",
        _tgi,
        "free",
    ),
    "deepspeed-fastgen": Engine(
        "DeepSpeed-MII 0.3: mii/batching/ragged_batching.py; Holmes et al. 2024",
        "Dynamic SplitFuse; stalls for want of a block; reset of the cache at a deadlock",
        f"the reserve of 1 GB of memory is 2 % here; {COST}",
        _deepspeed_fastgen,
    ),
    "orca": Engine(
        "Yu et al., Orca, OSDI 2022",
        "iteration-level scheduling with max_bs 32; memory reserved for the longest request",
        f"selective batching's cost, pipelining over workers; {COST}",
        _orca,
    ),
    "hf": Engine(
        "Hugging Face transformers 4: generate() on batches of 8",
        "padding of prompts and of answers, no queue but between batches",
        f"growth of the cache by concatenation: memory is reserved for the longest request; {COST}",
        _hf,
    ),
}
