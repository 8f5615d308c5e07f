"""Which keys of an engine give it more room for KV blocks, and the least change that is enough."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Final, TypedDict

from simulator.build.engine_spec import EngineBlocks
from simulator.build.engines import ENGINES, OLD_RELEASE, release_of
from simulator.core.engine_config import VLLM, EngineConfig
from simulator.features import features_of
from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import Gpu
from simulator.models.kv_budget import MemoryBudget, estimate, fitting, too_big
from simulator.models.load import load_model
from simulator.models.spec import ModelSpec
from simulator.util.errors import ScenarioError

SHARE: Final = "gpu_memory_utilization"
UTILIZATION = 0.95  # of the GPU's memory; CUDA graphs and fragmentation want the rest
EIGHT_BITS = ("fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
"""Dtypes of a KV cache that fp8 would not make narrower."""
TIMES = (2, 4, 8)  # as many GPUs as there are
ROOM = 4096  # tokens: of a request that there must be room for where nobody says how long they are
SHORTEST = 1024  # tokens: no shorter requests are proposed
FEWER = (512, 256, 128, 64)  # sequences at once, whose logits take less than 1,024 do


V0_CHUNKS_FROM = 32_768  # tokens of a request, from which vLLM V0 splits prompts
V0_CHUNK = 2048
TRTLLM_TOKENS = 8192
"""max_num_tokens of TensorRT-LLM, which refuses longer prompts; here a step has them whole."""


class EngineKeys(TypedDict, total=False):
    """Keys of an engine that give it more KV blocks, as a scenario has them."""

    num_gpu_blocks_override: None
    gpu_memory_utilization: float
    kv_cache_dtype: str
    quantization: str
    tensor_parallel_size: int
    pipeline_parallel_size: int


def longest_of(engine: EngineConfig, model: ModelSpec) -> int:
    """Return the most tokens of a request, where there is room for them."""
    own, given = model.longest(release_of(engine), engine.name != VLLM), engine.max_model_len
    return given if isinstance(given, int) else own


def engine_sizes(engine: EngineConfig, model: ModelSpec) -> EngineSizes:
    """Put beside the keys of an engine what else its memory depends on."""
    keys = dict(engine)
    longest = longest_of(engine, model)
    if engine.name == "vllm-v0" and longest > V0_CHUNKS_FROM:  # no prompt ends in its profile run
        keys |= {"max_num_batched_tokens": V0_CHUNK, "max_num_seqs": 1}
    if engine.name == "tensorrt-llm" and keys["max_num_batched_tokens"] == longest:
        keys["max_num_batched_tokens"] = min(longest, TRTLLM_TOKENS)
    return EngineSizes(
        **keys,
        fraction_of=ENGINES[engine.name].fraction_of,
        positions=model.longest(release_of(engine), engine.name != VLLM),
        release=release_of(engine) if engine.follows_vllm else OLD_RELEASE,
        draft=_draft_model(engine),
        adapters=sum(one.slot_bytes(engine, model) for one in features_of(engine)),
    )


def _draft_model(engine: EngineConfig) -> ModelSpec | None:
    """Return the model that drafts, or an EAGLE's; None where nobody names one that is known."""
    drafts = engine.speculative_config
    if drafts and drafts.model and drafts.method not in ("ngram", "mtp"):
        with suppress(ValueError):  # what is not counted is said
            return load_model(drafts.model)
    return None


def memory_budget(engine: EngineConfig, model: ModelSpec, gpu: Gpu) -> MemoryBudget:
    """Work out what memory an engine has for its KV cache; ValueError where it has none."""
    return fitting(estimate(model, gpu, engine_sizes(engine, model)))


def kv_blocks(engine: EngineConfig, model: ModelSpec, gpu: Gpu, **keys: Any) -> int:
    """Count the KV blocks that an engine with these keys has; 0: it does not fit."""
    with suppress(ValueError):
        return memory_budget(engine.model_copy(update=keys), model, gpu).num_gpu_blocks
    return 0


def _changes(own: EngineBlocks, model: ModelSpec, gpu: Gpu) -> Iterator[EngineKeys]:
    """Yield keys of an engine that give it more KV blocks, the least change first.

    What changes no answer comes first: more of the memory, more GPUs; then narrower numbers.
    """
    engine = own.engine
    if engine.num_gpu_blocks_override is not None:
        yield {"num_gpu_blocks_override": None}
        return
    if engine.gpu_memory_utilization < UTILIZATION:
        yield {SHARE: UTILIZATION}
    narrower: list[EngineKeys] = []
    if engine.cache_dtype not in EIGHT_BITS:
        narrower.append({"kv_cache_dtype": "fp8"})
    wider: list[EngineKeys] = []
    if not own.cost or own.cost.get("kind") == "roofline":
        wider = [{"tensor_parallel_size": n * engine.tensor_parallel_size} for n in TIMES]
        if engine.name == VLLM and engine.speculative_config is None:  # where heads do not divide
            wider += [{"pipeline_parallel_size": n * engine.pipeline_parallel_size} for n in TIMES]
        if engine.quantization is None and model.checkpoint is None:  # vLLM replaces no format
            narrower.append({"quantization": "fp8" if gpu.fp8_flops else "int8"})
    yield from wider
    yield from narrower
    yield from (one | other for other in narrower[1:] for one in wider)


def _starts(engine: EngineConfig, model: ModelSpec, gpu: Gpu) -> bool:
    with suppress(ValueError):
        budget = estimate(model, gpu, engine_sizes(engine, model))
        return not budget.refusal and budget.concurrent(min(ROOM, budget.max_model_len)) > 0
    return False


def least_change(
    own: EngineBlocks, model: ModelSpec, gpu: Gpu, needed: int | None = None
) -> Mapping[str, Any]:
    """Return the least change after which an engine has so many KV blocks, vLLM's null block
    included, by dotted keys of its replica's scenario; {} if none is known. None: after which it
    starts, with room for a request of ROOM tokens.
    """

    def enough(keys: EngineKeys) -> bool:
        if needed is None:
            return _starts(own.engine.model_copy(update=keys), model, gpu)
        return kv_blocks(own.engine, model, gpu, **keys) >= needed

    for keys in _changes(own, model, gpu):
        if enough(keys):
            return _of_replica(own, _least_share(own.engine, enough) if SHARE in keys else keys)
    return {}


def _least_share(engine: EngineConfig, enough: Callable[[EngineKeys], bool]) -> EngineKeys:
    """Return the least `gpu_memory_utilization` that is enough, of whole percents."""
    shares = range(int(100 * engine.gpu_memory_utilization) + 1, round(100 * UTILIZATION))
    at = bisect_left(shares, True, key=lambda share: enough({SHARE: share / 100}))
    return {SHARE: shares[at] / 100 if at < len(shares) else UTILIZATION}


def _of_replica(own: EngineBlocks, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Write keys of an engine as those of its replica's scenario, with the GPUs that they take."""
    change = {f"engine.{name}": value for name, value in keys.items()}
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if size := keys.get(name):
            change["gpu.count"] = size // getattr(own.engine, name) * own.gpu.count
    return change


def enough_memory(own: EngineBlocks, model: ModelSpec, gpu: Gpu, runs: bool = True) -> MemoryBudget:
    """Work out the memory; ValueError where it `runs` in too little, with what would be enough."""
    budget = estimate(model, gpu, engine_sizes(own.engine, model))
    if not runs or not (why := too_big(budget)):
        return budget
    change = remedies(own, budget)
    enough = f"it fits with {change}" if change else "take a larger GPU"
    known = own.engine.follows_vllm or own.engine.name in ("sglang", "tensorrt-llm")
    log = f'; its log would say "{budget.refusal}"' if known else ""
    raise ScenarioError("gpu", f"{why}{log}; {enough}", "memory")


def remedies(own: EngineBlocks, budget: MemoryBudget) -> str:
    """Say what starts an engine: shorter requests, fewer at once, or the least other change.

    "": nothing that is known.
    """
    least = least_change(own, budget.model, budget.gpu)
    changes = _shortened(own, budget, least), _fewer(own, budget), least
    return " or ".join(filter(None, map(settings, changes)))


def _fewer(own: EngineBlocks, budget: MemoryBudget) -> Mapping[str, Any]:
    """Return the most sequences at once that start an engine, of FEWER than it has."""
    for number in FEWER:
        changed = own.engine.model_copy(update={"max_num_seqs": number})
        if number < own.engine.max_num_seqs and _starts(changed, budget.model, budget.gpu):
            return {"engine.max_num_seqs": number}
    return {}


def _shortened(
    own: EngineBlocks, budget: MemoryBudget, least: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the longest requests that start an engine, on fewer GPUs than `least` takes."""
    most = least.get("engine.tensor_parallel_size", 0) if least else inf
    wider = _changes(own, budget.model, budget.gpu)
    sizes = {keys.get("tensor_parallel_size", 0) for keys in wider}
    for size in sorted({0} | {size for size in sizes if size < most}):
        keys = {"tensor_parallel_size": size} if size else {}
        engine = own.engine.model_copy(update=keys)
        try:
            found = estimate(budget.model, budget.gpu, engine_sizes(engine, budget.model))
        except ValueError:  # that many GPUs cannot share it
            continue
        fits = min(found.safe_length, found.sizes.positions)
        if SHORTEST <= fits < found.max_model_len:
            return _of_replica(own, keys) | {"engine.max_model_len": fits}
    return {}


def settings(change: Mapping[str, Any]) -> str:
    """Write a change as `--set` takes it: `engine.tensor_parallel_size=4 gpu.count=4`."""
    return " ".join(f"{key}={'null' if to is None else to}" for key, to in change.items())
