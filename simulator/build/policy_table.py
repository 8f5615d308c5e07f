"""The policies by name, and those that a scenario names by module and class."""

import inspect
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simulator.build.engine_spec import EngineSpec
from simulator.build.engines import ENGINES
from simulator.cluster.config import AdmissionConfig
from simulator.core.engine_config import EngineConfig
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.limits import ADMISSION_RULES, ALL_LIMITS, VLLM_LIMITS
from simulator.schedulers.vllm.rules import NEWEST, options_without_effect, write_release
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.config import Named
from simulator.util.errors import (
    FieldError,
    HeadwayError,
    ScenarioError,
    at_key,
    did_you_mean,
)
from simulator.util.from_mapping import annotation_faults, raise_if
from simulator.util.imported import Imported
from simulator.util.user_code import load_user_code, unknown_name, with_line
from simulator.workload.workload import Workload

POLICIES: Imported[type] = Imported(
    {
        "fcfs": "simulator.schedulers.vllm.scheduler:Scheduler",
        "priority": "simulator.policies.orders:Priority",
        "preemptive": "simulator.policies.preemptive:Preemptive",
        "deadline": "simulator.policies.preemptive:Deadline",
        "sjf": "simulator.policies.orders:SJF",
        "srpt": "simulator.policies.preemptive:SRPT",
        "hrrn": "simulator.policies.orders:HRRN",
        "mlfq": "simulator.policies.preemptive:MLFQ",
        "boost": "simulator.policies.orders:Boost",
        "static": "simulator.schedulers.static:Static",
        "hf-static": "simulator.schedulers.static:HfStatic",
        "orca": "simulator.schedulers.continuous_batching:Orca",
        "fcfs-v0": "simulator.schedulers.vllm_v0:VllmV0",
        "sarathi": "simulator.schedulers.continuous_batching:Sarathi",
        "sglang": "simulator.schedulers.sglang.scheduler:SgLang",
        "trtllm": "simulator.schedulers.trtllm:TrtLlm",
        "tgi": "simulator.schedulers.tgi:Tgi",
        "fastgen": "simulator.schedulers.fastgen:FastGen",
        "fair": "simulator.policies.fair:Fair",
        "wfq": "simulator.policies.fair:WFQ",
        "drr": "simulator.policies.fair:DRR",
        "virtual-finish-time": "simulator.policies.virtual_finish_time:VirtualFinishTime",
    }
)


Found = tuple[type, Mapping[str, Any]]  # a policy and its arguments
FIELD = "engine.scheduling_policy"
ORDER = f"{FIELD}.order"
FCFS = Named("fcfs")
VLLM_POLICIES = ("fcfs", "priority")
"""What vLLM's scheduler has by itself."""
PLUGIN = "headway.vllm.HeadwayScheduler"
"""The class, given to vLLM as `--scheduler-cls`, that has the other policies there."""
POLICY_VARIABLE = "HEADWAY_POLICY"
"""The environment variable that tells it which, as JSON."""

DYNAMIC_HOOKS = ("rank", "displaces", "promote", "refresh")
"""What makes a policy need the DynamicScheduler, see `policies.Policy`."""

LIMIT_KEYS = ALL_LIMITS & {*EngineConfig.model_fields}
"""Limits that are keys of the engine."""


@lru_cache
def signature(cls: type) -> inspect.Signature:
    """Read a policy's arguments; once, though each replica of a fleet asks for them."""
    return inspect.signature(getattr(cls, "options_type", None) or cls)


class NamedPolicy(NamedTuple):
    """The class that a scenario names, its keyword arguments, and SGLang's order apart."""

    cls: type
    arguments: dict[str, Any]
    order: Found | None


def find_policy(engine: EngineConfig, folder: Path) -> NamedPolicy:
    """Find the class that `engine.scheduling_policy` names, and its keyword arguments.

    A subclass of Scheduler decides everything itself; any other class is a policy: it orders
    the waiting queue of the Scheduler. Of SGLang's scheduler such a policy may be the `order`: it
    is found apart, with its own arguments. The user's own is looked for in `folder`.
    """
    given, order = engine.scheduling_policy, None
    cls, arguments = find_class(given.name, folder, FIELD), {**given.arguments}
    if policy_name(cls) == "sglang" and isinstance(arguments.get("order"), dict):
        order = find_order(arguments.pop("order"), folder, ORDER)
    return NamedPolicy(cls, arguments, order)


def find_class(name: Any, folder: Path, field: str) -> type:
    """Find the class of a policy's name, or of the user's own `module:Class` in `folder`."""
    if isinstance(name, type):  # from Python, see testing/check.py
        return name
    if name in POLICIES:
        return POLICIES[name]
    with at_key(field, ScenarioError):
        if ":" not in name:
            raise unknown_name("policy", name, POLICIES, "Class")
        cls = load_user_code(name, folder)
    if not isinstance(cls, type) or not (
        issubclass(cls, SchedulerBase)
        or callable(getattr(cls, "key", None))
        or callable(getattr(cls, "rank", None))
        or callable(getattr(cls, "queue", None))
    ):
        what = "is no Scheduler and has no method `key(request)` or `rank(waiting, now)`"
        raise ScenarioError(field, f"{name} {what}")
    return cls


def find_order(spec: Any, folder: Path, field: str) -> Found:
    """Find the policy that orders the queue of SGLang's scheduler, and its arguments.

    ValueError names `field` where it cannot.
    """
    from simulator.schedulers.sglang.queue_order import check_orders

    name = spec.get("policy") if isinstance(spec, dict) else None
    if not isinstance(name, str):
        raise ScenarioError(field, f"must name a policy, as in {{policy: sjf}}, not {spec!r}")
    cls, arguments = find_class(name, folder, field), {k: spec[k] for k in spec if k != "policy"}
    name = policy_name(cls)
    if issubclass(cls, SchedulerBase):
        raise ScenarioError(field, f"{name} is a scheduler of its own: it cannot run in SGLang's")
    with at_key(field, ScenarioError):
        check_orders(cls, name)
    check_arguments(cls, arguments, taken={}, field=field)
    return cls, arguments


def takes_variable(engine: EngineConfig) -> bool:
    """Say whether the policy is the one that HEADWAY_POLICY names when the scheduler is made."""
    return engine.scheduler_cls == PLUGIN and engine.scheduling_policy == FCFS


def plugin_spec(name: str, arguments: Mapping[str, Any]) -> str:
    """Write a policy, by its name in the scenario, as HEADWAY_POLICY has it."""
    return json.dumps({"policy": name, **arguments})


def policy_name(cls: type) -> str:
    """Return a policy's name in scenarios; the class's, where it is the user's own."""
    return POLICIES.name_of(cls) or cls.__name__


def ignored_keys(spec: EngineSpec) -> list[str]:
    """Tell of the keys that a scheduler does not know, or takes otherwise than given."""
    engine, cls, max_model_len = spec.engine, spec.policy, spec.max_model_len
    if engine.scheduler == "vllm":
        return []
    messages = []
    if not engine.follows_vllm and (cls is Scheduler or not issubclass(cls, SchedulerBase)):
        name, own = engine.policy_name, ENGINES[engine.name].defaults["scheduling_policy"]
        if own == "sglang" and cls is not Scheduler:
            own += f", in this order {{policy: sglang, order: {{policy: {name}}}}}"
        messages.append(
            f"engine.scheduling_policy: {name}: vLLM's scheduler runs, with {engine.name}'s "
            f"defaults; its own is {own}"
        )
    if not issubclass(cls, SchedulerBase):
        return messages
    if engine.preemption_mode != "recompute" and "swap_blocks" not in cls.traits.obeys:
        messages.append(
            f"{policy_name(cls)} computes a preempted request again: engine.preemption_mode has no "
            "effect"
        )
    absent = options_without_effect(spec.release)
    for name in VLLM_LIMITS:
        given = getattr(engine, name)
        default = EngineConfig.model_fields[name].default
        if name not in absent and given != default and name not in cls.traits.obeys:
            messages.append(f"{policy_name(cls)} knows no {name}: engine.{name} has no effect")
    tokens = engine.max_num_batched_tokens
    if cls is Scheduler or tokens >= max_model_len:
        return messages
    if issubclass(cls, (POLICIES["fcfs-v0"], POLICIES["tgi"])):
        messages.append(
            f"{policy_name(cls)} computes prompts whole: engine.max_num_batched_tokens {tokens:,} "
            f"is taken as max_model_len, {max_model_len:,}"
        )
    return messages


def vllm_version(specs: Iterable[EngineSpec]) -> str | None:
    """Say whose rules schedulers follow; None: other engines', or those of what is installed.

    Where there are several versions, all of them are told.
    """
    found = map(_vllm_version, specs)
    return ", ".join(dict.fromkeys(filter(None, found))) or None


def _vllm_version(spec: EngineSpec) -> str | None:
    engine, cls = spec.engine, spec.policy
    others = not engine.follows_vllm or engine.scheduler == "vllm"
    another = issubclass(cls, SchedulerBase) and cls is not Scheduler
    if others or (another and not is_own(cls)):
        return None
    return engine.version or f"{write_release(NEWEST)} (newest known)"


def is_own(cls: type) -> bool:
    """Say whether a policy is the user's own."""
    return POLICIES.name_of(cls) is None


def construct(spec: EngineSpec, cls: type, *parts: object, **arguments: Any) -> Any:
    """Make a policy or a scheduler; ValueError where its constructor fails.

    Of a user's own it is a HeadwayError, with file and line: until a run makes them they have not
    been tried. A shipped scheduler has the policy: it fails where that does.
    """
    blamed = cls if is_own(cls) else spec.policy
    try:
        return cls(*parts, **arguments)
    except HeadwayError:
        raise
    except ValueError as error:  # it says which argument is wrong
        if not is_own(blamed):
            raise
        raise spec.blame(FIELD, error) from error
    except Exception as error:
        wrong = ValueError(f"{policy_name(blamed)} raised {with_line(error)}")
        raise spec.blame(FIELD, wrong) from error


def make_policy(
    spec: EngineSpec, cls: type, arguments: Mapping[str, Any], field: str = FIELD
) -> Any:
    """Make a policy; refuse one that ranks by predicted lengths where nobody predicts any."""
    policy = construct(spec, cls, **arguments)
    if getattr(policy, "needs_hint", False) and not spec.predicts:
        raise ScenarioError(
            field,
            f"{policy_name(cls)} ranks by predicted lengths, "
            "and the scenario has no `predictor`; {kind: oracle} is the simplest",
        )
    return policy


def check_rules(engine: EngineConfig, who: str, obeyed: Collection[str]) -> None:
    """Refuse rules of admission and ways of preempting that a scheduler does not take."""
    for rule in ADMISSION_RULES:
        default = EngineConfig.model_fields[rule].default
        if getattr(engine, rule) != default and rule not in obeyed:
            raise ScenarioError(f"engine.{rule}", f"{who} has no such rule")
    if engine.preemption_mode == "auto" and "swap_prices" not in obeyed and "swap_blocks" in obeyed:
        raise ScenarioError("engine.preemption_mode", f"{who} does not choose: swap or recompute")


def check_arguments(
    cls: type, arguments: Mapping[str, Any], taken: Collection[str], field: str = FIELD
) -> None:
    """Refuse arguments that the policy does not know, that the engine's keys already give, or
    whose annotations are plain types that they are not, and name those that are missing."""
    known = signature(cls).parameters
    given = {*taken, "blocks"} if issubclass(cls, SchedulerBase) else set()
    if given and (old := sorted(LIMIT_KEYS & {*known})):
        what = f"{policy_name(cls)}.__init__ takes {old[0]} by itself: it is limits.{old[0]} now"
        raise ScenarioError(field, what)
    free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    wrong: list[FieldError] = []
    for name, value in arguments.items():
        if name in taken:
            wrong.append(FieldError((name,), f"give it as engine.{name}"))
        elif name not in known and not free:
            close = did_you_mean(name, known)
            what = f"{policy_name(cls)} takes no such argument{close}"
            wrong.append(FieldError((name,), what))
        elif name in known:
            wrong += annotation_faults(name, known[name].annotation, value)
    wrong += [
        FieldError((name,), f"is missing; {policy_name(cls)} needs it")
        for name, parameter in known.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in {*arguments, *given}
    ]
    with at_key(field, ScenarioError):
        raise_if(others=wrong)


def missing_inputs(
    specs: Iterable[EngineSpec], workload: Workload, admission: AdmissionConfig | None = None
) -> list[str]:
    """Say, in a line each, what policies and rules of admission would read in vain.

    A policy without its input serves in order of arrival, or all by the same defaults; the result
    is right, but tells nothing of the policy.
    """
    sheds = admission is not None and admission.shed_from < 1
    found = [line for spec in specs for line in _missing(spec, workload, sheds)]
    if sheds and (workload.priority is None or not (workload.priority >= 1).any()):
        found.append(
            "cluster.admission.shed_from: no request has a priority of 1 or more, so none is "
            "refused before max_outstanding"
        )
    return [*dict.fromkeys(found)]


def _missing(spec: EngineSpec, workload: Workload, sheds: bool) -> Iterator[str]:
    """Look at one engine's policy; `sheds`: admission reads the priorities."""
    cls, arguments, kind = spec.policy, spec.arguments, spec.scheduler
    reads = getattr(cls, "reads", "")
    name = f"engine.scheduling_policy: {policy_name(cls)}"
    clients = {*(workload.client or ())}
    equal = workload.priority is None or bool(np.all(workload.priority == workload.priority[:1]))
    asks = workload.segments is not None and spec.engine.enable_prefix_caching
    if asks and kind is not None and not kind.traits.caches_prefixes:
        what = "has no prefix cache: engine.enable_prefix_caching has no effect"
        yield f"{policy_name(kind)} {what}"
    if cls is Scheduler and not equal and not sheds:
        yield f"{name}: ignores the requests' priorities, which `priority` and `preemptive` read"
    if reads == "priority" and equal:
        yield (
            f"{name}: all requests have the same priority, so they are served in order of "
            "arrival; a trace may have a column `priority`, a generator has `priorities`"
        )
    if reads == "client" and len(clients) < 2:
        yield (
            f"{name}: all requests are of one client, so they are served in order of arrival; a "
            "trace may have a column `client`, and workload.clients draws some"
        )
    if reads == "deadline" and not {"ttft", "tpot", "clients"} & {*arguments}:
        yield (
            f"{name}: has no deadlines, neither ttft and tpot nor clients; its defaults are for "
            "all, 1000 ms to the first token and 50 ms for each further one"
        )
    told = spec.predicts or workload.max_tokens is not None
    if reads == "lengths" and not told:
        yield (
            f"{name}: knows nothing of the lengths of answers, so prompts alone count; the "
            "scenario may have a `predictor`, requests may have `max_tokens`"
        )
    if reads == "size" and arguments.get("by", "prompt") == "prompt" and spec.predicts:
        yield f"predictor: {policy_name(cls)} ranks by the prompt alone; by: hint or total reads it"
    named = arguments.get("weights") or arguments.get("clients")
    if reads and isinstance(named, dict):
        for client in sorted({str(one) for one in named} - clients):
            yield f"{name}: no request is of client {client!r}"
