"""Which scheduler an engine has, by its policy and its knobs, and what does not go together."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simulator.core.engine_config import EngineConfig
from simulator.core.speculative_config import TYPICAL, VLLM_DRAFTS, SpeculativeConfig
from simulator.features import features_of
from simulator.scenario.engine_spec import EngineSpec
from simulator.scenario.policy_table import DYNAMIC_HOOKS, policy_name
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.vllm.rules import options_without_effect, write_release
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import ScenarioError
from simulator.util.imported import Imported

REQUIRED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "required.json").read_text("utf-8")
)
"""What an engine must have for a feature: for states, unless a default says otherwise."""
SCHEDULERS: Imported[type[SchedulerBase]] = Imported(
    {
        "kv_producer": "simulator.schedulers.vllm.kv_roles:Producer",
        "asynchronous kv_producer": "simulator.schedulers.vllm.kv_roles:AsyncProducer",
        "kv_consumer": "simulator.schedulers.vllm.kv_roles:Consumer",
        "asynchronous kv_consumer": "simulator.schedulers.vllm.kv_roles:AsyncConsumer",
        "offloading": "simulator.schedulers.vllm.offloading:Offloading",
        "asynchronous offloading": "simulator.schedulers.vllm.offloading:AsyncOffloading",
        "pipeline": "simulator.schedulers.vllm.pipeline:PipelineScheduler",
        "drafts": "simulator.schedulers.vllm.speculative:Speculative",
        "cached drafts": "simulator.schedulers.vllm.drafts_ahead:DraftWalk",
        "asynchronous drafts": "simulator.schedulers.vllm.drafts_ahead:AsyncDraftWalk",
        "host drafts": "simulator.schedulers.vllm.host_drafts:HostDrafts",
        "asynchronous host drafts": "simulator.schedulers.vllm.host_drafts:AsyncHostDrafts",
        "eagle": "simulator.schedulers.sglang.speculative:SpeculativeSgLang",
        "asynchronous eagle": "simulator.schedulers.sglang.speculative:OverlappedSpeculativeSgLang",
    }
)
"""What schedules in the place of `Scheduler`, by a group's kv_role or by what the engine does."""
DRAFTS_BESIDE_HOST_SINCE = (0, 32, 0)
ORDERING = "policies that only order the queue: priority, sjf"


def _check_prefill_interval(spec: EngineSpec) -> None:
    """Raise ValueError where ranks that go their own ways would have to hold prefill back."""
    absent = "prefill_schedule_interval" in options_without_effect(spec.release)
    if absent and spec.engine.prefill_schedule_interval > 1 and not spec.model.num_experts:
        what = f"vLLM {spec.engine.version} has no such rule for ranks of a dense model"
        raise ScenarioError("engine.prefill_schedule_interval", f"{what}: leave it out")


def choose_scheduler(spec: EngineSpec) -> type[SchedulerBase] | None:
    """Return the scheduler that a policy works with; None: that of the vLLM that is installed.

    ValueError says, by field, what the scheduler does not do.
    """
    engine, name = spec.engine, policy_name(spec.policy)
    role = None if spec.role == "ec_producer" else spec.role
    chosen = of_policy(spec.policy)

    def need(at: str, required: Mapping[str, object], otherwise: str, words: str = "needs") -> None:
        if chosen is not Scheduler:
            raise ScenarioError(f"engine.{at}", otherwise)
        for key, word in differing_keys(engine, required):
            raise ScenarioError(f"engine.{at}", f"{words} {key}: {word}")

    _check_prefill_interval(spec)
    for feature in features_of(engine):
        lacks, others = feature.lacking
        if not (entry := feature.requires(engine)):
            continue
        if not engine.follows_vllm or spec.release < feature.since or role is not None:
            since = write_release(feature.since[:2])
            what = f"needs the rules of vLLM {since} or later, without a kv_role"
            raise ScenarioError(f"engine.{feature.key}", what)
        need(feature.key, REQUIRED[entry], f"{name} {lacks}; fcfs {others}, and {ORDERING}")
    if role is not None:
        others = f"in a group with kv_role {role} fcfs does, and {ORDERING}, fair"
        need("scheduling_policy", {}, f"{name} passes no KV caches on; {others}")
        for key, word in differing_keys(engine, REQUIRED["kv_role"]):
            raise ScenarioError(f"engine.{key}", f"a group with kv_role {role} needs {word}")
    if engine.pipeline_parallel_size > 1:
        whole = {"disable_hybrid_kv_cache_manager": True} if spec.keeps_window else {}
        lacks = f"{name} has one batch in flight; fcfs has more, and {ORDERING}, boost"
        need("pipeline_parallel_size", REQUIRED["pipeline stages"] | whole, lacks)
        return SCHEDULERS["pipeline"]
    if engine.scheduler == "vllm":
        return None
    if spec.keeps_window:
        lacks = f"must be true: {name} keeps all tokens; fcfs need not, nor {ORDERING}, boost"
        need("disable_hybrid_kv_cache_manager", REQUIRED["windows"], lacks, "false needs")
    if engine.speculative_config is not None:
        if name == "sglang":
            return _with_eagle(spec, engine.speculative_config)
        lacks = f"{name} verifies no drafts; fcfs does, and {ORDERING}, boost, sglang"
        required = REQUIRED["drafts ahead" if engine.drafts_ahead else "drafts"]
        need("speculative_config", required, lacks)
        return _with_drafts(spec, engine.speculative_config)
    return _in_time(spec, chosen, role)


def _with_eagle(spec: EngineSpec, drafts: SpeculativeConfig) -> type[SchedulerBase]:
    """Return what verifies drafts as SGLang does; ValueError for what that does not do."""
    engine, at = spec.engine, "engine.speculative_config"
    for key, word in differing_keys(engine, REQUIRED["eagle"]):
        raise ScenarioError(at, f"needs {key}: {word}")
    if spec.order is not None:
        raise ScenarioError(at, "needs an order of SGLang's own, not a policy of Headway's")
    if drafts.method not in TYPICAL:
        raise ScenarioError(f"{at}.method", f"must be {', '.join(TYPICAL)} for sglang")
    for key in VLLM_DRAFTS:
        if getattr(drafts, key):
            raise ScenarioError(f"{at}.{key}", "is vLLM's, and sglang has none")
    return SCHEDULERS["asynchronous eagle" if engine.async_scheduling else "eagle"]


def _with_drafts(spec: EngineSpec, drafts: SpeculativeConfig) -> type[SchedulerBase]:
    """Return what verifies drafts: as sums, or with a prefix cache or a step ahead one by one."""
    engine = spec.engine
    if drafts.is_tree:
        what = "is SGLang's: vLLM's drafts are a chain"
        raise ScenarioError("engine.speculative_config.speculative_eagle_topk", what)
    if drafts.num_speculative_tokens_per_batch_size and engine.data_parallel_size > 1:
        what = "vLLM 0.28 and later ignore it with data_parallel_size: leave it out"
        raise ScenarioError(f"engine.speculative_config.{VLLM_DRAFTS[0]}", what)
    hashed = spec.rules.hashes_beyond and not drafts.disable_lookahead_block_hashes
    unhashed = drafts.reads_next and not hashed
    if spec.keeps_window and unhashed and engine.enable_prefix_caching:
        what = f"{drafts.method} with a window has a prefix cache from vLLM 0.33 on"
        raise ScenarioError("engine.enable_prefix_caching", f"must be false: {what}")
    if not engine.drafts_ahead:
        return SCHEDULERS["drafts"]
    if engine.kv_offloading_size is not None:
        _check_drafts_beside_host(spec, drafts)
        return SCHEDULERS["asynchronous host drafts" if engine.async_scheduling else "host drafts"]
    return SCHEDULERS["asynchronous drafts" if engine.async_scheduling else "cached drafts"]


def _check_drafts_beside_host(spec: EngineSpec, drafts: SpeculativeConfig) -> None:
    """Raise ValueError where nobody has recorded what drafts beside a host tier come to."""
    engine = spec.engine
    recorded = engine.follows_vllm and spec.release >= DRAFTS_BESIDE_HOST_SINCE
    for met, what in (
        (recorded, f"the rules of vLLM {write_release(DRAFTS_BESIDE_HOST_SINCE[:2])} or later"),
        (_loads_beside(engine), "hicache_write_policy: write_through, without secondary_tiers"),
        (not any(getattr(drafts, key) for key in VLLM_DRAFTS), f"no {', '.join(VLLM_DRAFTS)}"),
    ):
        if not met:
            raise ScenarioError("engine.kv_offloading_size", f"beside drafts needs {what}")


def _in_time(
    spec: EngineSpec, chosen: type[SchedulerBase], role: str | None
) -> type[SchedulerBase]:
    """Return the kind of a scheduler that schedules ahead, or not, as the engine does."""
    engine, name = spec.engine, policy_name(spec.policy)
    overlaps = "asynchronous " if engine.async_scheduling else ""
    if _loads_beside(engine) and chosen is Scheduler and role is None:
        return SCHEDULERS[f"{overlaps}offloading"]
    overlapped = _overlapped(chosen) if engine.async_scheduling else chosen
    if overlapped is None:
        raise ScenarioError(
            "engine.async_scheduling",
            f"{name} schedules a step when the one before has ended; set it to false",
        )
    if role is not None:
        return SCHEDULERS[f"{overlaps}{role}"]
    return overlapped


def _loads_beside(engine: EngineConfig) -> bool:
    """Say whether blocks come from host memory as by vLLM's connector, while others compute."""
    return (
        engine.kv_offloading_size is not None
        and engine.hicache_write_policy == "write_through"
        and not engine.secondary_tiers
        and engine.enable_prefix_caching
    )


def differing_keys(engine: EngineConfig, wanted: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the keys of an engine that have another value than is wanted, and that as in YAML."""
    for key, value in wanted.items():
        if getattr(engine, key) != value:
            yield key, "null" if value is None else str(value).lower()


def can_overlap(policy: type) -> bool:
    """Say whether under a policy a step can be decided while the one before it runs."""
    return (
        not issubclass(policy, SchedulerBase)
        or policy is Scheduler
        or policy_name(policy) == "sglang"
    )


def of_policy(policy: type) -> type[SchedulerBase]:
    """Return what decides one step after another under a policy."""
    if issubclass(policy, SchedulerBase):
        return policy
    if any(hasattr(policy, hook) for hook in DYNAMIC_HOOKS):
        from simulator.schedulers.vllm.dynamic import DynamicScheduler

        return DynamicScheduler
    return Scheduler


def _overlapped(chosen: type[SchedulerBase]) -> type[SchedulerBase] | None:
    """Get what schedules with async_scheduling in the place of a scheduler; None: nobody does."""
    if chosen is Scheduler:
        from simulator.schedulers.vllm.async_scheduler import AsyncScheduler

        return AsyncScheduler
    if policy_name(chosen) == "sglang":
        from simulator.schedulers.sglang.overlap import OverlappedSgLang

        return OverlappedSgLang
    from simulator.schedulers.vllm.dynamic import AsyncDynamicScheduler, DynamicScheduler

    return AsyncDynamicScheduler if chosen is DynamicScheduler else None
