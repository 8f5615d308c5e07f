"""Which scheduler an engine has, by its policy and its knobs, and what does not go together."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.build.engine_spec import EngineSpec
from simulator.build.policy_table import (
    DYNAMIC_HOOKS,
    LIMIT_KEYS,
    check_arguments,
    check_rules,
    policy_name,
)
from simulator.core.engine_config import EngineConfig
from simulator.features import features_of
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.feature import ORDERING
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
    }
)
"""What schedules in the place of `Scheduler`, by a group's kv_role or by what the engine does."""


def _check_prefill_interval(spec: EngineSpec) -> None:
    """Raise ValueError where ranks that go their own ways would have to hold prefill back."""
    absent = "prefill_schedule_interval" in options_without_effect(spec.release)
    if absent and spec.engine.prefill_schedule_interval > 1 and not spec.model.num_experts:
        what = f"vLLM {spec.engine.version} has no such rule for ranks of a dense model"
        raise ScenarioError("engine.prefill_schedule_interval", f"{what}: leave it out")


def with_scheduler(spec: EngineSpec) -> EngineSpec:
    """Choose the scheduler of an engine; ValueError says, by field, what it does not do."""
    chosen = _choose(spec)
    if chosen is not None:
        _check_knobs(spec, chosen)
    return replace(spec, scheduler=chosen)


def _check_knobs(spec: EngineSpec, chosen: type[SchedulerBase]) -> None:
    """Raise ValueError for a knob or an argument that a scheduler does not take."""
    engine, traits, name = spec.engine, chosen.traits, policy_name(chosen)
    check_rules(engine, name, traits.obeys)
    admits = issubclass(chosen, Scheduler) and chosen.admit is not Scheduler.admit
    own_rules = admits and not traits.loads_beside
    if engine.kv_offloading_size and (not traits.has_host_tier or own_rules):
        who = "sglang" if policy_name(spec.policy) == "sglang" else name
        raise ScenarioError("engine.kv_offloading_size", f"{who} has no host tier")
    parts = {"limits", "features", "rules"} if issubclass(chosen, Scheduler) else {"limits"}
    order = {"policy"} if spec.order is not None else set()
    taken = {*(LIMIT_KEYS & traits.obeys), *parts, *order}
    check_arguments(spec.policy, spec.arguments, taken=taken)


def _choose(spec: EngineSpec) -> type[SchedulerBase] | None:
    """Return the scheduler that a policy works with; None: that of the vLLM that is installed."""
    engine, name = spec.engine, policy_name(spec.policy)
    role = None if spec.role == "ec_producer" else spec.role
    chosen = of_policy(spec.policy)

    def need(at: str, entry: str, otherwise: str = "", words: str = "needs") -> None:
        if otherwise and chosen is not Scheduler:
            raise ScenarioError(f"engine.{at}", otherwise)
        for key, word in differing_keys(engine, REQUIRED[entry]):
            raise ScenarioError(f"engine.{at}", f"{words} {key}: {word}")

    _check_prefill_interval(spec)
    for feature in features_of(engine):
        lacks, others = feature.lacking
        if (entry := feature.requires(engine)) not in REQUIRED:
            continue
        if not engine.follows_vllm or spec.release < feature.since or role is not None:
            since = write_release(feature.since[:2])
            what = f"needs the rules of vLLM {since} or later, without a kv_role"
            raise ScenarioError(f"engine.{feature.key}", what)
        need(feature.key, entry, f"{name} {lacks}; fcfs {others}, and {ORDERING}")
    if role is not None:
        if chosen is not Scheduler:
            what = f"{name} passes no KV caches on; in a group with kv_role {role} fcfs does, and "
            raise ScenarioError("engine.scheduling_policy", f"{what}{ORDERING}, fair")
        for key, word in differing_keys(engine, REQUIRED["kv_role"]):
            raise ScenarioError(f"engine.{key}", f"a group with kv_role {role} needs {word}")
    if engine.pipeline_parallel_size > 1:
        lacks = f"{name} has one batch in flight; fcfs has more, and {ORDERING}, boost"
        need("pipeline_parallel_size", "pipeline stages", lacks)
        if spec.keeps_window:
            what = "needs disable_hybrid_kv_cache_manager: true"
            raise ScenarioError("engine.pipeline_parallel_size", what)
    if spec.keeps_window:
        lacks = f"must be true: {name} keeps all tokens; fcfs need not, nor {ORDERING}, boost"
        need("disable_hybrid_kv_cache_manager", "windows", lacks, "false needs")
    if engine.scheduler == "vllm":
        return None
    for feature in features_of(engine):
        if (own := feature.scheduler(spec, name, need)) is not None:
            return own
    return _in_time(spec, chosen, role)


def _in_time(
    spec: EngineSpec, chosen: type[SchedulerBase], role: str | None
) -> type[SchedulerBase]:
    """Return the kind of a scheduler that schedules ahead, or not, as the engine does."""
    engine, name = spec.engine, policy_name(spec.policy)
    if engine.pipeline_parallel_size > 1:
        return SCHEDULERS["pipeline"]
    overlaps = "asynchronous " if engine.async_scheduling else ""
    if engine.loads_beside and chosen is Scheduler and role is None:
        return SCHEDULERS[f"{overlaps}offloading"]
    overlapped = _overlapped(chosen) if engine.async_scheduling else chosen
    if overlapped is None:
        what = f"{name} schedules a step when the one before has ended; set it to false"
        raise ScenarioError("engine.async_scheduling", what)
    if role is not None:
        return SCHEDULERS[f"{overlaps}{role}"]
    return overlapped


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
