"""Engines by name, as `engines.json` has them: what is modelled of each, and its keys.

`vllm`, which is also meant where no name is given, is vLLM 0.33.0 as `vllm serve` starts it
(EngineArgs.get_batch_defaults, SchedulerConfig and CacheConfig), with the default sizes of a batch
that it chooses by GPU, or the release that `engine.version` names. `textbook` has its rules, one
step after another. Each of the others selects a scheduler of its own (`docs/engines.md`).
"""

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from simulator.core.engine_config import TEXTBOOK, VLLM, EngineConfig
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
    graph, most = few if gpus < 4 else many, given.get("max_num_seqs")
    graph = min(graph, most) if type(most) is int else graph
    reserved = 512 + 1.5 * max(tokens, 2048) + 128 * gpus + 2 * graph
    reserved = max(reserved, 10240 if gpu.memory > 60 * GIB else 0)  # MiB
    share = round(max(1 - reserved / (gpu.memory / 2**20), 0.1), 3)
    return {"max_num_batched_tokens": chunk, "gpu_memory_utilization": share}


BY_MEMORY = {VLLM: _vllm_by_memory, "sglang": _sglang_by_memory}
SAME_COST = "the kernels' speed: the cost profile is the same for all engines"


def _read_engines() -> dict[str, Engine]:
    read = json.loads((Path(__file__).parent / "engines.json").read_text("utf-8"))
    for name, engine in read.items():
        if name not in (VLLM, TEXTBOOK):
            engine["left_out"] += f"; {SAME_COST}"
    return {name: Engine(**one, by_memory=BY_MEMORY.get(name)) for name, one in read.items()}


ENGINES = _read_engines()
