"""From the blocks of a scenario to what an engine is: model, hardware, memory, costs, policy.

Every function names the scenario's field in its errors: `ValueError("field: what is wrong")`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from simulator.build.choose_scheduler import REQUIRED, differing_keys, with_scheduler
from simulator.build.engine_spec import EngineBlocks, EngineSpec
from simulator.build.engines import release_of
from simulator.build.kv_room import enough_memory, longest_of, memory_budget, remedies
from simulator.build.policy_table import FIELD, find_policy, ignored_keys
from simulator.core.engine_config import AUTO, VLLM, EngineConfig
from simulator.models.config_json import SINCE, overlaid
from simulator.models.engine_sizes import LONGER
from simulator.models.gpus import find_gpu
from simulator.models.kv_budget import MemoryBudget
from simulator.models.load import load_model
from simulator.models.power import gpu_power
from simulator.models.spec import ModelSpec
from simulator.schedulers.vllm.rules import NEWEST, STATES_SINCE, rules_of
from simulator.util.errors import HeadwayWarning, ScenarioError

OTHER_LIMITS = ("tensorrt-llm", "sglang")  # the server refuses longer prompts; takes them whole
AUTO_SINCE = (0, 14, 0)  # of vLLM: --max-model-len auto
THRESHOLD_SINCE = (0, 32, 0)  # and its bound on long_prefill_token_threshold, looked up from here
Attempt = Callable[[str, str], AbstractContextManager[object]]
"""Takes the key to blame where what is done within fails, and others that have a part in it."""


def at_once(_key: str, _others: str) -> AbstractContextManager[object]:
    """Attempt what raises for the first thing that is wrong."""
    return nullcontext()


def settle(own: EngineBlocks) -> EngineSpec:
    """Settle what an engine is; ValueError for the first thing that is wrong."""
    spec = try_to_settle(own, at_once)
    assert spec is not None
    return with_scheduler(spec)


def resolve_model(own: EngineBlocks) -> ModelSpec:
    """Return the model with the engine's `hf_overrides`, and states in its dtype."""
    model = load_model(own.known_model, own.folder)
    return overlaid(model, own.engine.hf_overrides, own.engine.mamba_ssm_cache_dtype)


def _check_caching(engine: EngineConfig, model: ModelSpec) -> None:
    align = engine.mamba_cache_mode == "align"
    if engine.enable_prefix_caching and model.linear is not None and not align:
        raise ScenarioError(
            "engine.enable_prefix_caching",
            "must be false: a prefix cache of the states of linear "
            f"attention or Mamba ({model.name}) is simulated with vLLM's rules from 0.30 on, for "
            "fcfs and policies that only order the queue, without drafts, host tiers, pipeline "
            "stages and kv_role",
        )
    if align and model.linear is None:
        raise ScenarioError("engine.mamba_cache_mode", f"must be none: {model.name} has no states")


def _with_size(engine: EngineConfig, block_size: int) -> EngineConfig:
    """Return an engine with blocks as long as its states or kernels make them."""
    if block_size == engine.block_size:
        return engine
    if (engine.prefix_cache_retention_interval or 0) % block_size:
        what = f"must be a multiple of the block of {block_size} tokens"
        raise ScenarioError("engine.prefix_cache_retention_interval", what)
    return engine.model_copy(update={"block_size": block_size})


def _check_unit(engine: EngineConfig, model: ModelSpec) -> None:
    """Check what prompts match at, as `resolve_kv_cache_block_sizes` of vLLM 0.33."""
    size, unit = engine.block_size, engine.prefix_match_unit or engine.block_size
    if unit == size or not engine.enable_prefix_caching:
        return
    what = f"must be the block of {size} tokens, as in vLLM: {model.name} has one kind of layers"
    if keeps_states := engine.mamba_cache_mode == "align":
        what = f"must be the block of {size} tokens: parts are simulated with vLLM 0.33's rules"
    if size % unit:
        what = f"must divide the block of {size} tokens"
    elif release_of(engine)[:2] >= NEWEST if keeps_states else _keeps_windows(engine, model):
        return
    raise ScenarioError("engine.prefix_match_unit", what)


def _keeps_windows(engine: EngineConfig, model: ModelSpec) -> bool:
    """Say whether an engine's layers are in groups of which some have a window."""
    return model.keeps_window and not engine.disable_hybrid_kv_cache_manager


def _check_keys(engine: EngineConfig, model: ModelSpec) -> None:
    if engine.name == VLLM and engine.max_model_len == AUTO and release_of(engine) < AUTO_SINCE:
        what = "must be a number of tokens before vLLM 0.14"
        raise ScenarioError("engine.max_model_len", what)
    windows = _keeps_windows(engine, model) or engine.mamba_cache_mode == "align"
    if engine.prefix_cache_retention_interval and not windows:
        raise ScenarioError(
            "engine.prefix_cache_retention_interval",
            f"must be 0, as in vLLM: no layer of {model.name} keeps a window alone",
        )


def try_to_settle(own: EngineBlocks, attempt: Attempt, *, runs: bool = True) -> EngineSpec | None:
    """Settle what an engine is, each part in an attempt; None where one has failed.

    `runs=False`: no step of it will run, so what its steps cost is not settled; None, too.
    """
    engine, folder = own.engine, own.folder
    policy = gpu = model = blocks = cost = budget = None
    with attempt(FIELD, ""):
        policy, arguments, order = find_policy(engine, folder)
    with attempt("gpu", "gpu.name"):
        gpu = find_gpu(own.gpu.name)
    with attempt("model", "model"):
        model = resolve_model(own)
    if model is None:
        return None
    if runs:
        with attempt("engine.enable_prefix_caching", "model"):
            _check_caching(engine, model)
    with attempt("engine.prefix_cache_retention_interval", "model"):
        _check_keys(engine, model)
    longest = longest_of(engine, model)
    tokens = engine.max_num_batched_tokens
    holds = engine.enable_chunked_prefill or tokens >= longest or engine.name in OTHER_LIMITS
    with attempt("engine", "engine.enable_chunked_prefill engine.max_model_len model"):
        if not holds:
            raise ScenarioError(
                "engine.max_num_batched_tokens",
                "without chunked prefill must be at least "
                f"max_model_len ({longest}), not {tokens}: the longest prompt must fit into one "
                "step",
            )
    if gpu is None:
        return None
    power, given = None, own.gpu.power
    with attempt("gpu.power", "gpu.name"):
        power = gpu_power(given.idle, given.max, gpu.max_power)
    with attempt("gpu", "gpu model engine"):
        if own.role == "ec_producer":  # it has no KV cache: enough is never too little
            blocks = engine.max_num_seqs * -(-longest // engine.block_size) + 1
        else:
            budget = enough_memory(own, model, gpu, runs)
            longest, blocks = budget.max_model_len, budget.num_gpu_blocks
            engine = _with_size(engine, budget.block_size)
            _check_unit(engine, model)
    if not runs:
        return None
    from simulator.build.settle_cost import make_cost

    with (
        attempt("cost", "cost host model gpu engine"),
        warnings.catch_warnings(record=True, action="always", category=HeadwayWarning) as notes,
    ):
        cost = make_cost(own, model, gpu)
    if policy is None or blocks is None or cost is None or not holds:
        return None
    release = release_of(engine)
    spec = EngineSpec(
        engine=engine,
        model=model,
        gpu=gpu,
        memory=budget,
        power=power,
        carbon_intensity=own.gpu.carbon_intensity,
        cost=cost,
        release=release,
        rules=rules_of(release),
        num_gpu_blocks=blocks,
        max_model_len=longest,
        policy=policy,
        arguments=arguments,
        order=order,
        predicts=own.predictor is not None,
        seed=own.seed,
        folder=folder,
        blame=own.error_at,
        role=own.role,
        retries=own.retries,
    )
    told = [_refused(own, budget) if budget else "", *(str(note.message) for note in notes)]
    return replace(spec, notes=(*filter(None, told), *_warnings(spec)))


def _refused(own: EngineBlocks, budget: MemoryBudget) -> str:
    """Say that vLLM would not start, with what its log would say and what is enough; "": it would.

    What is simulated all the same are the requests that fit.
    """
    if own.engine.name != VLLM or not budget.refusal:
        return ""
    return (
        f"vLLM would not start here on {budget.sizes.gpus} x {budget.gpu.name}: its log would say "
        f'"{budget.refusal}"; it starts with {remedies(own, budget)}'
    )


def beyond_positions(model: ModelSpec, engine: EngineConfig, longest: int) -> int:
    """Return the most tokens of a request of a model, where `longest` is more; 0: it is not."""
    most = model.longest(release_of(engine))
    return most if longest > most else 0


def not_started(model: ModelSpec, engine: EngineConfig, longest: int) -> Iterator[str]:
    """Say what vLLM does not start: by the model's positions, family and experts, and by limits."""
    since, refuses = SINCE.get(model.family, "0.0.0"), f"vLLM does not start {model.name}: "
    if most := beyond_positions(model, engine, longest):
        beyond = f"engine.max_model_len {longest:,} is beyond the {most:,} positions of"
        asked = LONGER.get(engine.name)
        what = f": a server takes it only with {asked}=1" if asked else ""
        yield f"{beyond} {model.name}{what}"
    if engine.name == VLLM and release_of(engine) < tuple(map(int, since.split("."))):
        yield f"vLLM {engine.version} does not start {model.name}: {model.family} came with {since}"
    if engine.name == VLLM and engine.enable_expert_parallel and not model.num_experts:
        yield f"{refuses}engine.enable_expert_parallel: it has no experts"
    if engine.name == VLLM and (size := engine.block_size) % 16 and size not in (1, 8):
        yield f"{refuses}engine.block_size={size}: attention backends take multiples of 16"
    most = engine.long_prefill_token_threshold
    if engine.name == VLLM and most > longest and release_of(engine) >= THRESHOLD_SINCE:
        what = f"engine.long_prefill_token_threshold ({most:,}) cannot be greater than "
        yield f"{refuses}{what}max_model_len ({longest:,})"


def _warnings(spec: EngineSpec) -> Iterator[str]:
    """Say what an engine does otherwise than it was asked to, or than the real one would."""
    engine, model, longest = spec.engine, spec.model, spec.max_model_len
    yield from not_started(model, engine, longest)
    if engine.name == VLLM and model.keeps_window and engine.disable_hybrid_kv_cache_manager:
        room = ""
        if engine.num_gpu_blocks_override is None:
            hybrid = engine.model_copy(update={"disable_hybrid_kv_cache_manager": False})
            whole, windowed = (
                memory_budget(one, model, spec.gpu).concurrent(longest) for one in (engine, hybrid)
            )
            room = f": {whole:,} requests of {longest:,} tokens fit, not {windowed:,}"
        yield (
            f"{model.name} has layers that keep a window alone in vLLM; here they keep all tokens"
            f"{room}. engine.disable_hybrid_kv_cache_manager: false has windows"
        )
    if engine.name == VLLM and model.linear and not engine.enable_prefix_caching:
        manager = {"disable_hybrid_kv_cache_manager": engine.disable_hybrid_kv_cache_manager}
        beside = differing_keys(engine, REQUIRED["states"] | manager)
        for key, _ in beside if spec.release >= STATES_SINCE else ():
            what = "has a prefix cache of its states in vLLM by default: none is simulated beside"
            yield f"{model.name} {what} engine.{key}"
    if engine.enforce_eager:
        yield (
            "engine.enforce_eager counts for memory alone: steps take as long as with CUDA graphs"
        )
    if model.unread:
        yield f"{model.name}: memory lacks what of its config.json is not read: {model.unread}"
    yield from ignored_keys(spec)
    from simulator.costs.overhead import read_version

    version = read_version(engine.version or "")
    if engine.data_parallel_size == 1 or version is None:
        return
    from simulator.cluster.data_parallel import BALANCES_SINCE

    if version < BALANCES_SINCE:
        yield (
            f"engine.version {engine.version}: its load balancer filled data-parallel ranks less "
            "evenly than vLLM 0.33's, which is simulated"
        )
