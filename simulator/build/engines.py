"""Engines by name, as `engines.json` has them: what is modelled of each, and its keys.

`vllm`, which is also meant where no name is given, is vLLM 0.33.0 as `vllm serve` starts it
(EngineArgs.get_batch_defaults, SchedulerConfig and CacheConfig), with the default sizes of a batch
that it chooses by GPU, or the release that `engine.version` names. `textbook` has its rules, one
step after another. Each of the others selects a scheduler of its own (`docs/engines.md`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from simulator.core.engine_config import VLLM, EngineConfig
from simulator.models.engine_sizes import FractionOf
from simulator.models.gpus import GIB, Gpu
from simulator.models.spec import ModelSpec
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
    release: Release = NEWEST_RELEASE  # of vLLM, where none is asked for
    memory: Mapping[str, Any] = {}  # by which the engine derives what it reserves


TABLE = json.loads((Path(__file__).parent / "engines.json").read_text("utf-8"))
ENGINES = {name: Engine(**one) for name, one in TABLE.items()}
OLD_RELEASE = (0, 6, 3)  # of vLLM: engines that follow none take memory as V0 did
ENGINES["vllm-v0"] = ENGINES["vllm-v0"]._replace(release=OLD_RELEASE)
SGLANG = ENGINES["sglang"].memory
"""What of its memory SGLang derives from where it runs. `sizes`: GiB below which a GPU has them,
tokens of a chunk of a prompt, requests of the largest CUDA graph, on fewer than four GPUs and on
more. `prompt_graphs`: CUDA graphs of prompts are so many tokens apart from some tokens up to
others. `nvidia_smi`: MiB of a GPU that it prints, more than CUDA's. Families: `text_alone` read
no images without --enable-multimodal; `captured` have an encoder, and CUDA graphs of prompts."""


def release_of(engine: EngineConfig) -> Release:
    """Return the vLLM release whose rules an engine follows, unless told the newest known."""
    told = read_release(engine.version or "") if engine.follows_vllm else None
    return told or ENGINES[engine.name].release


def _vllm_by_memory(gpu: Gpu, _: Defaults, __: ModelSpec) -> Defaults:
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


def _sglang_by_memory(gpu: Gpu, given: Defaults, model: ModelSpec) -> Defaults:
    """Return chunks of prompts and the static share, as SGLang's `memory_hook.py` does.

    Left out: what it reserves for DeepEP, a cap by `max_total_tokens`, larger graphs of Qwen3-VL on
    Hopper.
    """
    total = SGLANG["nvidia_smi"].get(gpu.name, gpu.memory / 2**20)
    _, chunk, few, many = next(one for one in SGLANG["sizes"] if total < one[0] * 1024)
    tokens, gpus = given.get("max_num_batched_tokens", chunk), given.get("tensor_parallel_size", 1)
    if type(tokens) is not int or type(gpus) is not int:
        return {"max_num_batched_tokens": chunk}
    whole = given.get("enable_chunked_prefill") is False
    encoder = None if model.family in SGLANG["text_alone"] else model.vision
    graph, most = few if gpus < 4 else many, given.get("max_num_seqs")
    graphs = 2 * (min(graph, most) if type(most) is int else graph)
    if model.latent:
        graphs += 1536
    elif not whole and (encoder is None or model.family in SGLANG["captured"]):
        bands = SGLANG["prompt_graphs"]
        last = min(tokens, 4096) if "llama-2" in model.name.lower() else tokens
        graphs += 8 * sum(max(min(last, end) - start, 0) // gap for start, end, gap in bands)
    reserved = 512 + 1.5 * max(16384 if whole else tokens, 2048) + 128 * gpus
    reserved += 0 if given.get("enforce_eager") else graphs
    reserved = max(reserved, 10240 if total > 60 * 1024 else 0)  # MiB
    share = round(max(1 - reserved / total, 0.1), 3)
    if encoder is not None:
        share *= 0.95 * max(min(1.1 - encoder.told_weights / (240 * 2**20), 1.05), 0.8)
    return {"max_num_batched_tokens": chunk, "gpu_memory_utilization": share}


BY_MEMORY = {VLLM: _vllm_by_memory, "sglang": _sglang_by_memory}
