"""The scheduler of the vLLM that is installed, with vLLM's policies or Headway's."""

import os
import warnings

from headway.vllm.installed import InstalledBlocks, InstalledScheduler
from simulator.build.engine_spec import EngineSpec
from simulator.build.policy_table import (
    FCFS,
    PLUGIN,
    POLICY_VARIABLE,
    VLLM_POLICIES,
    check_arguments,
    check_rules,
    is_own,
    make_policy,
    plugin_spec,
    policy_name,
    takes_variable,
)
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.limits import VLLM_LIMITS, Limits
from simulator.schedulers.vllm.rules import read_release
from simulator.util.config import Named
from simulator.util.errors import HeadwayWarning, ScenarioError
from simulator.util.user_code import search_in

REQUIRED = {
    "allocation": ("paged", "vLLM's scheduler pages its memory"),
    "speculative_config": (None, "needs scheduler: headway"),
    "preemption_mode": ("recompute", "vLLM's scheduler knows recompute alone"),
}
"""What an engine must have, and what is said where it has not."""


def make_installed(spec: EngineSpec, limits: Limits) -> SchedulerBase:
    """Build the scheduler of the vLLM that is installed; ValueError by field."""
    engine = spec.engine
    environment = _plugin_policy(spec)
    if not environment and engine.scheduling_policy not in map(Named, VLLM_POLICIES):
        raise ScenarioError(
            "engine.scheduling_policy",
            "vLLM's scheduler has fcfs and priority; with scheduler_cls: "
            f"{PLUGIN} it has the policies that order the waiting queue",
        )
    for key, (known, what) in REQUIRED.items():
        if getattr(engine, key) != known:
            raise ScenarioError(f"engine.{key}", what)
    check_rules(engine, "vLLM's scheduler", VLLM_LIMITS)
    _check_installed(spec)
    if engine.scheduler_cls:  # else the scenario names no code
        search_in(spec.folder)
    return InstalledScheduler(
        InstalledBlocks(spec.num_gpu_blocks, engine.block_size),
        limits,
        enable_prefix_caching=engine.enable_prefix_caching,
        policy_name="fcfs" if environment else engine.policy_name,
        scheduler_cls=engine.scheduler_cls,
        environment=environment,
    )


def _check_installed(spec: EngineSpec) -> None:
    """Refuse a version that is not the installed one's, whose scheduler decides."""
    from importlib.metadata import PackageNotFoundError, version

    if spec.engine.version is None:
        return
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return  # told elsewhere
    found = read_release(installed)
    if found is not None and spec.release[:2] != found[:2]:
        what = f"is {spec.engine.version}, and vLLM {installed} is installed, whose scheduler "
        raise ScenarioError("engine.version", f"{what}decides: leave it out")


def _plugin_policy(spec: EngineSpec) -> dict[str, str]:
    """Return the environment by which `headway.vllm` is told the scenario's policy.

    It is empty where the class has a policy of its own, or is another's, and where the scenario
    names none: then HEADWAY_POLICY counts as it is set.
    """
    engine, told = spec.engine, os.environ.get(POLICY_VARIABLE)
    if told and takes_variable(engine):
        warnings.warn(
            f"engine.scheduling_policy: is that of {POLICY_VARIABLE}, {told}, which is not in the "
            "files of the run: give it as engine.scheduling_policy to keep it with them",
            HeadwayWarning,
            stacklevel=4,
        )
    if engine.scheduler_cls != PLUGIN or engine.scheduling_policy == FCFS:
        return {}
    given = plugin_spec(engine.policy_name, spec.arguments)
    if told and told != given:
        warnings.warn(
            f"{POLICY_VARIABLE} has no effect: the scenario names a policy",
            HeadwayWarning,
            stacklevel=4,
        )
    name = policy_name(spec.policy)
    if issubclass(spec.policy, SchedulerBase):
        what = f"{name} is a scheduler of its own: it cannot run in vLLM"
        raise ScenarioError("engine.scheduling_policy", what)
    check_arguments(spec.policy, spec.arguments, taken={})
    if not is_own(spec.policy):
        make_policy(spec, spec.policy, spec.arguments)
    return {POLICY_VARIABLE: given}
