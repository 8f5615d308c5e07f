"""Engines by name: what is modelled of each and what not, and the keys that it has otherwise.

`vllm`, which is also meant where no name is given, is vLLM 0.33.0 as `vllm serve` starts it
(EngineArgs.get_batch_defaults, SchedulerConfig and CacheConfig), with the default sizes of a batch
that it chooses by GPU, or the release that `engine.version` names. `textbook` has its rules, one
step after another. Each of the others selects a scheduler of its own (`docs/engines.md`).
"""

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from simulator.core.engine_config import TEXTBOOK, EngineConfig
from simulator.models.engine_sizes import FractionOf
from simulator.models.gpus import GIB, Gpu
from simulator.schedulers.vllm.rules import NEWEST_RELEASE, Release, read_release

Defaults = dict[str, Any]


class Engine(NamedTuple):
    """One serving system."""

    follows: str  # version and source
    modelled: str
    left_out: str
    defaults: Defaults
    fraction_of: FractionOf = "all"  # what gpu_memory_utilization is a share of
    whole_prompts: bool = False  # a step holds the longest prompt: max_num_batched_tokens at least
    by_memory: Callable[[Gpu, Defaults], Defaults] | None = None  # by the GPU's, beside keys given


def release_of(engine: EngineConfig) -> Release:
    """Return the vLLM release whose rules an engine follows, unless told the newest known."""
    told = read_release(engine.version or "") if engine.follows_vllm else None
    return told or NEWEST_RELEASE


def _vllm_by_memory(gpu: Gpu, _: Defaults) -> Defaults:
    if gpu.memory >= 160 * GIB:
        return {"max_num_seqs": 1024, "max_num_batched_tokens": 16384}
    if gpu.memory >= 70 * GIB and "A100" not in gpu.name:
        return {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    return {}


def offline_tokens(gpu: Gpu) -> int:
    """Return the tokens of a step of vLLM's `LLM`, which no server answers beside (vLLM 0.10 on).

    EngineArgs.get_batch_defaults, UsageContext.LLM_CLASS.
    """
    return 16384 if gpu.memory >= 70 * GIB and "A100" not in gpu.name else 8192


SGLANG_SIZES = (  # GiB below which a GPU has them
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (inf, 16384, 512, 512),
)
"""Of SGLang: tokens of a chunk of a prompt, requests of the largest CUDA graph, on fewer than four
GPUs and on more."""


def _sglang_by_memory(gpu: Gpu, given: Defaults) -> Defaults:
    """Return chunks of prompts and the static share, as SGLang's `memory_hook.py` does.

    Left out: what it reserves for CUDA graphs of prompts, encoders, drafts and DeepEP.
    """
    _, chunk, few, many = next(one for one in SGLANG_SIZES if gpu.memory < one[0] * GIB)
    tokens, gpus = given.get("max_num_batched_tokens", chunk), given.get("tensor_parallel_size", 1)
    if type(tokens) is not int or type(gpus) is not int:
        return {"max_num_batched_tokens": chunk}
    reserved = 512 + 1.5 * max(tokens, 2048) + 128 * gpus + 2 * (few if gpus < 4 else many)
    reserved = max(reserved, 10240 if gpu.memory > 60 * GIB else 0)  # MiB
    share = round(max(1 - reserved / (gpu.memory / 2**20), 0.1), 3)
    return {"max_num_batched_tokens": chunk, "gpu_memory_utilization": share}


_VLLM: Defaults = {
    "scheduling_policy": "fcfs",
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "block_size": 16,
    "gpu_memory_utilization": 0.92,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
}
SAME_COST = "the kernels' speed: the cost profile is the same for all engines"
ENGINES = {
    "vllm": Engine(
        "vLLM 0.33.0: vllm/v1/core/sched/scheduler.py, EngineArgs.get_batch_defaults",
        "every decision of the scheduler, checked by `headway conform`; asynchronous scheduling; "
        "hash-chain prefix cache, sliding windows; images, LoRA adapters, KV offloading, drafts; "
        "sizes by GPU; pipeline parallelism",
        "drafts beside asynchronous scheduling, a prefix cache or images; "
        "structured output; KV connectors but offloading and between prefill and decode",
        {
            **_VLLM,
            "long_prefill_token_threshold": 0,
            "long_prefill_token_threshold_adaptive": False,
            "prefill_schedule_interval": 1,
            "prefix_cache_retention_interval": 0,
            "scheduler_reserve_full_isl": True,
            "watermark": 0.0,
            "async_scheduling": True,
        },
        by_memory=_vllm_by_memory,
    ),
    TEXTBOOK: Engine(
        "iteration-level scheduling over a paged KV cache (Orca, OSDI 2022; vLLM, SOSP 2023) by "
        "the rules of vLLM 0.33.0",
        "one step after another, the same sizes on every GPU: what an engine is compared with, and "
        "what a schedule worked out by hand agrees with",
        "asynchronous scheduling, sizes by GPU",
        {
            **_VLLM,
            "async_scheduling": False,
        },
    ),
    "vllm-v0": Engine(
        "vLLM 0.6.3: vllm/core/scheduler.py, _schedule_default",
        "prompts first, whole; watermark; a free block at hand for each decode; recomputation; "
        "swapped queue (preemption_mode: swap); scheduler_delay_factor",
        f"multi-step scheduling and prefix cache (off by default), chunked prefill; {SAME_COST}",
        {
            "scheduling_policy": "fcfs-v0",
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
            "block_size": 16,
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": False,
            "watermark": 0.01,
        },
        whole_prompts=True,
    ),
    "sglang": Engine(
        "SGLang 0.5.23: managers/scheduler.py, schedule_policy.py, schedule_batch.py, "
        "mem_cache/unified_radix_cache.py",
        "every decision of the scheduler, checked by `headway conform`; overlap of scheduling; "
        "radix tree of pages, HiCache; weights and cache in mem_fraction_static; chunks by GPU",
        f"LoRA, storage behind the host, speculation, order by routing key; {SAME_COST}",
        {
            "scheduling_policy": "sglang",
            "max_num_seqs": 2048,
            "max_num_batched_tokens": 8192,
            "block_size": 1,
            "gpu_memory_utilization": 0.88,
            "enable_prefix_caching": True,
            "prefix_cache": "radix",
            "hicache_write_policy": "write_through",
            "async_scheduling": True,
        },
        "static",
        by_memory=_sglang_by_memory,
    ),
    "tensorrt-llm": Engine(
        "TensorRT-LLM at commit 002f3cc3, read and not replayed: "
        "_torch/pyexecutor/scheduler/scheduler.py",
        "in-flight batching; GUARANTEED_NO_EVICT, MAX_UTILIZATION, STATIC_BATCH; requests held "
        "back to reuse a prefix; max_num_tokens; chunked context by blocks; cache in 0.9 of the "
        "memory left free",
        "priority of cached blocks, equal progress of chunks, two steps' lookahead, overlap; "
        f"{SAME_COST}",
        {
            "scheduling_policy": "trtllm",
            "max_num_seqs": 2048,
            "max_num_batched_tokens": 8192,
            "block_size": 32,
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": False,
        },
        "free",
        whole_prompts=True,
    ),
    "tgi": Engine(
        "Text Generation Inference 2.3: backends/v3/src/backend.rs, queue.rs",
        "waiting_served_ratio, max_waiting_tokens, prefill and total token budgets, reservation "
        "of prompt and max_new_tokens",
        "prefix cache, chunked prompts (version 3), refusal beyond 128 requests: here they wait; "
        f"{SAME_COST}",
        {
            "scheduling_policy": "tgi",
            "max_num_seqs": 128,
            "max_num_batched_tokens": 4096,
            "block_size": 1,
            "gpu_memory_utilization": 0.95,
            "enable_prefix_caching": False,
        },
        "free",
        whole_prompts=True,
    ),
    "deepspeed-fastgen": Engine(
        "DeepSpeed-MII 0.3: mii/batching/ragged_batching.py; Holmes et al. 2024",
        "Dynamic SplitFuse; stalls for want of a block; reset of the cache at a deadlock",
        f"the reserve of 1 GB of memory is 2 % here; {SAME_COST}",
        {
            "scheduling_policy": "fastgen",
            "max_num_seqs": 512,
            "max_num_batched_tokens": 768,
            "block_size": 64,
            "gpu_memory_utilization": 0.98,
            "enable_prefix_caching": False,
        },
    ),
    "orca": Engine(
        "Yu et al., Orca, OSDI 2022",
        "iteration-level scheduling with max_bs 32; memory reserved for the longest request",
        f"selective batching's cost, pipelining over workers; {SAME_COST}",
        {
            "scheduling_policy": "orca",
            "max_num_seqs": 32,
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": False,
            "allocation": "contiguous",
        },
    ),
    "hf": Engine(
        "Hugging Face transformers 4: generate() on batches of 8",
        "padding of prompts and of answers, no queue but between batches",
        "growth of the cache by concatenation: memory is reserved for the longest request; "
        f"{SAME_COST}",
        {
            "scheduling_policy": "hf-static",
            "max_num_seqs": 64,
            "gpu_memory_utilization": 0.95,
            "enable_prefix_caching": False,
            "allocation": "contiguous",
        },
    ),
}
