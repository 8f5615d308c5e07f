"""What a scenario's engines have where it does not say: by the engine's name, its version, the GPU.

Plain values go in and come out, before anything is checked: what is wrong with them is kept, and
told where all keys are checked.
"""

from collections.abc import Mapping
from contextlib import suppress
from math import inf, prod
from pathlib import Path
from typing import Any

from simulator.build.choose_scheduler import REQUIRED, can_overlap, of_policy
from simulator.build.engines import BY_MEMORY, ENGINES, Defaults, offline_tokens, release_of
from simulator.build.kv_room import engine_sizes
from simulator.build.policy_table import POLICIES
from simulator.core.engine_config import TEXTBOOK, VLLM, EngineConfig
from simulator.core.speculative_config import draft_method, published
from simulator.models.config_json import overlaid
from simulator.models.engine_sizes import KEEPS_WINDOWS_SINCE
from simulator.models.gpus import CPU, GIB, Gpu, find_gpu
from simulator.models.kv_budget import estimate, kv_block_bytes
from simulator.models.load import load_model
from simulator.models.loaded import draft_method_of
from simulator.models.spec import ModelSpec
from simulator.schedulers.vllm.rules import (
    NEWEST,
    RULES_SINCE,
    STATES_SINCE,
    Release,
    options_without_effect,
    read_release,
    write_release,
)
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.files import resolve
from simulator.util.from_mapping import as_plain
from simulator.util.yaml_lines import Block, block_in

ASYNC_SINCE = (0, 14, 0)
"""vLLM schedules asynchronously by default from 0.14 on (before: --async-scheduling)."""
ASYNC_DRAFTS_SINCE = {"ngram": (0, 33, 0), "draft_model": (0, 28, 0)}
"""The same with drafts that are no EAGLE or MTP; of ngram 0.31 and 0.32 were not recorded."""
ASYNC_PIPELINE_SINCE = (0, 15, 0)
"""The same under pipeline parallelism."""
HYBRID_SINCE = (0, 9, 1)
"""The first release whose hybrid KV cache manager gives back, by default, what has left a window;
its decisions were compared with those of 0.33 alone."""
STATES_CACHED_SINCE = (0, 26, 0)  # a prefix cache of linear attention and Mamba by default
UTILIZATION_SINCE = (0, 20, 0)  # gpu_memory_utilization 0.92; before 0.9
LARGE_BATCHES_SINCE = (0, 28, 0)  # on GPUs of 160 GiB and more; before, as on those of 70
CLAMPS_SINCE = (0, 11, 1)  # max_num_batched_tokens by max_model_len


def look_up_models(raw: Block, folder: Path) -> None:
    """Look the models of drafts up in the scenario's folder, and find how they draft."""
    for one in [raw, *block_in(raw, "cluster", "groups").values()]:
        block = block_in(one, "engine", "speculative_config")
        if isinstance(model := block.get("model"), str) and model:
            block["method"] = draft_method_of(block, folder)
            if (path := resolve(model, folder)).exists():
                block["model"] = str(path)


def fill_in_defaults(raw: Block) -> Block:
    """Complete a scenario's engine, and those of its groups by it, before anything is checked.

    A data-parallel server alone is a cluster of one.
    """
    raw = open_named_blocks(raw)
    base, gpu, model = raw.get("engine") or {}, raw.get("gpu"), raw.get("model")
    ranks = block_in(raw, "engine").get("data_parallel_size")
    if raw.get("cluster") is None and isinstance(ranks, int) and ranks > 1:
        raw = raw | {"cluster": {}}
    if (counted := _with_count(gpu, base)) is not gpu:
        raw = raw | {"gpu": counted}
    if groups := block_in(raw, "cluster", "groups"):
        filled = {name: _fill_in_group(group, base, gpu, model) for name, group in groups.items()}
        raw = raw | {"cluster": raw["cluster"] | {"groups": filled}}
    return raw | {"engine": with_defaults(_sharing(base, gpu), gpu, model)}


def _fill_in_group(group: object, base: object, gpu: object, model: object) -> object:
    """Complete a group's engine by the scenario's, then both by the defaults."""
    given = {} if group is None else group
    if not isinstance(given, dict) or not isinstance(base, dict):
        return group
    given = open_named_blocks(given)
    changed = given.get("engine") or {}
    if not isinstance(changed, dict):
        return group
    if given.get("kv_role") is not None:  # it passes on the blocks of all tokens
        base = {"disable_hybrid_kv_cache_manager": True} | base
    if changed.get("name") not in (None, VLLM, TEXTBOOK):
        base = {key: value for key, value in base.items() if key != "version"}  # it is vLLM's
    own = given.get("gpu")
    if isinstance(own, dict) and isinstance(gpu, dict) and "name" not in own:
        own = given["gpu"] = gpu | own
    counted = _with_count(own or gpu, base | changed)
    if counted is not (own or gpu) and (own or counted != _with_count(gpu, base)):
        given = given | {"gpu": counted}
    on, model = given.get("gpu") or gpu, given.get("model") or model
    return given | {"engine": with_defaults(_sharing(base | changed, on), on, model)}


def _with_count(gpu: object, engine: object) -> object:
    """Get a block `gpu` as many GPUs as its engine shares the work out to, unless it has a number.

    The same block comes back where that is one, and where something is wrong.
    """
    block = {} if gpu is None else gpu
    if not isinstance(block, dict) or not isinstance(engine, dict) or "count" in block:
        return gpu
    sizes = [engine.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data")]
    if not all(type(size) is int and size > 0 for size in sizes) or prod(sizes) == 1:
        return gpu
    return block | {"count": prod(sizes)}


def _sharing(engine: Any, gpu: object) -> Any:
    """Return an engine that shares out the GPUs it has, by tensors, unless it says how it does.

    The same block comes back where the number is not a multiple of the stages and ranks.
    """
    count = gpu.get("count") if isinstance(gpu, dict) else None
    if not isinstance(engine, dict) or "tensor_parallel_size" in engine:
        return engine
    sizes = [engine.get(f"{kind}_parallel_size", 1) for kind in ("pipeline", "data")]
    if not all(type(size) is int and size > 0 for size in (count, *sizes)):
        return engine
    shares, rest = divmod(count, prod(sizes))
    return engine if rest or shares <= 1 else engine | {"tensor_parallel_size": shares}


def open_named_blocks(raw: Block) -> Block:
    """Write `engine: NAME` and `gpu: NAME` of a scenario or group as what they are short for."""
    return raw | {
        key: {"name": raw[key]} for key in ("engine", "gpu") if isinstance(raw.get(key), str)
    }


DRAFTED_SEQS = 48
"""SGLang's max_running_requests with EAGLE (`_handle_eagle_family`)."""
NULLABLE = ("name", "max_num_seqs", "max_num_batched_tokens")


def with_defaults(engine: object, gpu: object, model: object = None) -> object:
    """Fill in the defaults of the engine that the block `engine` names, by default vllm.

    What is no block of a known name is kept. The arguments are plain values as a scenario gives
    them, checked or not. The NULLABLE may be null: the default.
    """
    if not isinstance(engine, dict):
        return engine
    given = {k: v for k, v in engine.items() if v is not None or k not in NULLABLE}
    engine = {"name": VLLM} | given
    name, version = engine["name"], engine.get("version")
    if not isinstance(name, str) or name not in ENGINES:
        return engine
    known, spec = ENGINES[name], _find_model(model, engine)
    told = read_release(str(version)) if isinstance(version, str | float) else None
    release = told or known.release
    drafted = name == "sglang" and engine.get("speculative_config")
    defaults: Defaults = {"async_scheduling": False} | known.defaults
    defaults |= {"max_num_seqs": DRAFTED_SEQS} if drafted else {}
    defaults |= _states_cache(spec, engine, release)
    own = spec.longest(release, name != VLLM) if spec else 0
    asked = engine.get("max_model_len")
    longest = own if asked in (None, "auto") else asked
    if known.whole_prompts and isinstance(longest, int):
        defaults["max_num_batched_tokens"] = max(longest, defaults["max_num_batched_tokens"])
    found = _find_gpu(gpu.get("name") if isinstance(gpu, dict) else None)
    if name in BY_MEMORY and found is not None and spec is not None:
        defaults |= BY_MEMORY[name](found, engine, spec)
    if name == TEXTBOOK:
        defaults |= options_without_effect(release)
    if name == VLLM:
        defaults |= version_defaults(release, found)
        if engine.get("pipeline_parallel_size", 1) != 1 and release < ASYNC_PIPELINE_SINCE:
            defaults["async_scheduling"] = False
    if not engine.get("enable_prefix_caching", defaults.get("enable_prefix_caching")):
        defaults.pop("prefix_cache", None)  # SGLang's --disable-radix-cache
    on_cpu = name == VLLM and found is CPU  # where vLLM decides one step after another
    if on_cpu or not _overlaps(name, engine, release):
        defaults["async_scheduling"] = False
    block = defaults | engine
    if name == VLLM:
        if spec is not None and spec.keeps_window:
            _give_windows_back(block, release)
        _clamp_sizes(block, engine, longest, release)
    return block


def _states_cache(spec: ModelSpec | None, engine: Defaults, release: Release) -> Defaults:
    """Return the defaults of a prefix cache of states: one where it is simulated, and none else."""
    if spec is None or not spec.linear:
        return {}
    simulated = (
        engine["name"] == VLLM
        and release >= STATES_SINCE
        and _decides_as_vllm(engine)
        and all(
            engine.get(key, value) == value
            for key, value in REQUIRED["states"].items()
            if key != "enable_chunked_prefill"  # without it vLLM does not start
        )
    )
    if engine.get("mamba_cache_mode") == "none":  # vLLM's own, whatever is chosen in the end
        del engine["mamba_cache_mode"]
    mode = "align" if simulated and engine.get("enable_prefix_caching", True) else "none"
    return {"enable_prefix_caching": mode == "align", "mamba_cache_mode": mode}


def _overlaps(name: str, engine: Defaults, release: Release) -> bool:
    """Say whether what a block asks for goes with deciding a step while the one before it runs."""
    policy = policy_name_of(engine)
    if policy in POLICIES and not can_overlap(POLICIES[str(policy)]):
        return False
    if name == "sglang" and policy not in (None, "sglang"):
        return False
    drafts = engine.get("speculative_config")
    since = ASYNC_DRAFTS_SINCE.get(_draft_method(drafts), ASYNC_SINCE) if drafts else release
    if drafts and name != "sglang" and (name != VLLM or release < since):
        return False
    if engine.get("preemption_mode") in ("swap", "auto"):
        return False
    return engine.get("prefix_cache") != "radix" or policy == "sglang" or name == "sglang"


def _drops_last(drafts: object, release: Release) -> bool:
    """Say whether a prompt does not use the last block that it finds, for drafts as a block has."""
    block = drafts if isinstance(drafts, dict) else {}
    hashed = release >= RULES_SINCE["hashes_beyond"]
    if not block or (hashed and not block.get("disable_lookahead_block_hashes")):
        return False
    own = _draft_method(drafts) not in ("ngram", "draft_model")
    return own and not block.get("disable_eagle_block_drop")


def _draft_method(drafts: object) -> str:
    """Return how a block's drafts are made; what is wrong with it is told elsewhere."""
    return draft_method(drafts if isinstance(drafts, dict) else {})


def fit_to_gpu(raw: Block, pool: Mapping[str, Any], *, offline: bool) -> Any:
    """Return a scenario's engine with what its launch command takes by the memory of the GPU.

    That is `LLM`'s tokens of a step where vLLM runs `offline`. `pool` has vLLM's
    `kv_cache_memory_bytes` of each GPU; or SGLang's `max_total_tokens`, taken where they fit, and
    `hicache_ratio`, tokens on the host for one on the GPUs. Keys that the engine has are kept;
    what is wrong with the scenario is told elsewhere.
    """
    engine, gpu = raw["engine"], raw.get("gpu")
    model, found = _find_model(raw.get("model"), engine), _find_gpu(gpu and gpu.get("name"))
    if model is None or found is None or not isinstance(engine, dict):
        return engine
    keys: Defaults = {"max_num_batched_tokens": offline_tokens(found)} if offline else {}
    with suppress(ValueError):
        filled = fill_in_defaults(raw | {"engine": keys | engine})["engine"]
        own = EngineConfig.model_validate(filled)
        budget = estimate(model, found, engine_sizes(own, model))
        page, blocks = budget.block_size, budget.logged_blocks
        if size := pool.get("kv_cache_memory_bytes"):
            keys["num_gpu_blocks_override"] = int(size // budget.layout.block_bytes)
        if (tokens := pool.get("max_total_tokens", inf)) < blocks * page:
            keys["num_gpu_blocks_override"] = blocks = tokens // page
        if ratio := pool.get("hicache_ratio"):
            host = blocks * page * ratio // page + 1.5  # halves are left over
            each = kv_block_bytes(model, own) * own.tensor_parallel_size
            keys["kv_offloading_size"] = host * each / GIB
    return keys | engine


def _give_windows_back(block: Defaults, release: Release) -> None:
    """Let a block of vLLM's give back what leaves a window, where nobody says and it is simulated.

    Policies of one's own may keep books of all blocks.
    """
    needs = REQUIRED["windows"].items()
    if not _decides_as_vllm(block) or any(block.get(key, value) != value for key, value in needs):
        return
    if release >= HYBRID_SINCE and not _drops_last(block.get("speculative_config"), release):
        block.setdefault("disable_hybrid_kv_cache_manager", False)


def _decides_as_vllm(engine: Defaults) -> bool:
    """Say whether a block's policy, if it names one, is a setting of vLLM's own scheduler."""
    policy = policy_name_of(engine)
    return policy is None or (policy in POLICIES and of_policy(POLICIES[str(policy)]) is Scheduler)


def version_defaults(release: Release, gpu: Gpu | None = None) -> Defaults:
    """Return the defaults of a vLLM V1 release that have changed since (EngineArgs, by release)."""
    defaults: Defaults = {
        "async_scheduling": release >= ASYNC_SINCE,
        "gpu_memory_utilization": 0.92 if release >= UTILIZATION_SINCE else 0.9,
    }
    if gpu is not None and gpu.memory >= 160 * GIB and release < LARGE_BATCHES_SINCE:
        defaults["max_num_batched_tokens"] = 8192
    return defaults | options_without_effect(release)


def _clamp_sizes(block: Defaults, given: Defaults, longest: Any, release: Release) -> None:
    """Fit the sizes of a batch that nobody gave to the others, as vLLM's EngineArgs does."""
    tokens, seqs = block["max_num_batched_tokens"], block["max_num_seqs"]
    if not all(type(size) is int and size > 0 for size in (tokens, seqs, longest)):
        return  # told elsewhere
    if "max_num_batched_tokens" not in given and release >= CLAMPS_SINCE:
        tokens = min(tokens, seqs * longest)
        if block["enable_chunked_prefill"] is False:
            tokens = max(tokens, longest)
        block["max_num_batched_tokens"] = tokens
    if "max_num_seqs" not in given:
        block["max_num_seqs"] = min(seqs, tokens)


def describe_engine(engine: EngineConfig, gpu: str, model: str) -> Defaults:
    """Say which engine is simulated, and which of its keys are as it has them on such a GPU.

    `defaults` are the keys whose value is what leaving them out gives, `set` all others; `follows`
    is the system and its version. `not_simulated`, where there is any, has the values that vLLM's
    own defaults would give other keys.
    """
    block = engine.model_dump()
    usual, given = {}, {}
    for key, field in EngineConfig.model_fields.items():
        if key in ("name", "version"):
            continue
        rest = {name: value for name, value in block.items() if name != key}
        filled = with_defaults(rest, {"name": gpu}, model)
        assert isinstance(filled, dict)
        default = as_plain(field.default)
        if filled.get(key, default) != block[key]:
            given[key] = block[key]
        elif key in ENGINES[engine.name].defaults or block[key] != default:
            usual[key] = block[key]
    told = {"name": engine.name, "follows": _followed(engine), "defaults": usual, "set": given}
    drafts = engine.speculative_config
    if drafts and drafts.acceptance == "typical":
        spec = _find_model(model, block)
        told["acceptance"] = published(drafts.method, spec.name if spec else "")
    missing = {k: v for k, v in not_simulated(engine, model).items() if k not in given}
    return told | ({"not_simulated": missing} if missing else {})


def not_simulated(engine: EngineConfig, model: object) -> Defaults:
    """Return the keys that an engine would set otherwise beside what is asked for, and its values.

    vLLM's prefix cache of models with states: `ModelConfig.is_prefix_caching_supported`.
    """
    release, spec = release_of(engine), _find_model(model, dict(engine))
    if spec is None:
        return {}
    missing: Defaults = {}
    keeps_all = engine.disable_hybrid_kv_cache_manager and spec.keeps_window
    since = HYBRID_SINCE if engine.kv_offloading_size is None else KEEPS_WINDOWS_SINCE
    if engine.name == VLLM and keeps_all and release >= since:
        missing["disable_hybrid_kv_cache_manager"] = False
    if spec.linear is not None and (engine.name != VLLM or release >= STATES_CACHED_SINCE):
        usual = ENGINES[engine.name].defaults.get("enable_prefix_caching")
        missing |= {"enable_prefix_caching": True} if usual else {}
    return missing


def _followed(engine: EngineConfig) -> str:
    """Name the system that an engine is simulated after, with its version."""
    if engine.scheduler == "vllm":
        return "the vLLM that is installed"
    if not engine.follows_vllm:
        followed = ENGINES[engine.name].follows.partition(":")[0]
        work = f", with the work around the kernels of vLLM {engine.version}"
        return followed + (work if engine.version else "")
    told = engine.version or f"{write_release(NEWEST)} (newest known)"
    return f"vLLM {told}" if engine.name == VLLM else f"textbook, with the rules of vLLM {told}"


def policy_name_of(engine: Defaults) -> object:
    """Return the name of a block's policy, with arguments or without; None where it has none."""
    policy = engine.get("scheduling_policy")
    return policy.get("policy") if isinstance(policy, dict) else policy


def _find_model(model: object, engine: Mapping[str, Any]) -> ModelSpec | None:
    """Find the model; None where it cannot be found, which is told elsewhere."""
    like: object = model.get("like") if isinstance(model, dict) else model
    try:
        known = load_model(like if isinstance(like, str | Path) else "llama-3-8b")
        return overlaid(known, engine.get("hf_overrides"), engine.get("mamba_ssm_cache_dtype"))
    except Exception:  # the file may hold anything
        return None


def _find_gpu(name: object) -> Gpu | None:
    """Find the GPU; None where there is none of that name, which is told elsewhere."""
    try:
        return find_gpu(name if isinstance(name, str) else "A100-80GB")
    except ValueError:
        return None
