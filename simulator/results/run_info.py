"""What the summary of a run says of the run itself: version, scenario, engines, step times."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from simulator.build.engine_spec import EngineSpec
from simulator.build.policy_table import vllm_version
from simulator.costs.cost_model import CostModel
from simulator.costs.noise import describe_cost
from simulator.scenario.engine_defaults import describe_engine
from simulator.scenario.scenario import Scenario
from simulator.util.version import __version__

Summary = dict[str, object]


def run_info(
    scenario: Scenario,
    first: EngineSpec,
    specs: Mapping[str, EngineSpec],
    warnings: Sequence[str],
) -> Summary:
    """Return what opens our block of the summary of a run that was neither stopped nor trimmed.

    `first` is the first engine core, `specs` those of all groups.
    """
    return {
        "version": __version__,
        "seed": scenario.seed,
        "scenario": scenario.name,
        **describe_cost(first.cost),
        "vllm_version": vllm_version(specs.values()),
        "engines": engines_of(scenario),
        **_host(first.cost),
        "interrupted": False,
        "warnings": [*warnings],
        "warmup_s": 0.0,
        "cooldown_s": 0.0,
    }


def engines_of(scenario: Scenario) -> list[Summary]:
    """Say which engines are simulated; of groups of a cluster that have the same, once."""
    found: list[dict[str, Any]] = []
    for name, group in scenario.groups.items():
        told = {"gpu": group.gpu.name}
        told |= describe_engine(group.engine, group.gpu.name, group.known_model)
        names = [name] if name else []
        same = [one for one in found if {**one, "groups": None} == {**told, "groups": None}]
        if same:
            same[0]["groups"] += names
        else:
            found.append({**told, "groups": names})
    return [*found]


def _host(cost: CostModel) -> Summary:
    """Return the host's part of a cost model, s; nothing where it has none of its own."""
    work = cost.host_work
    if work is None or not (work.per_step or work.per_sequence):
        return {}
    host = {
        "per_step_s": work.per_step,
        "per_sequence_s": work.per_sequence,
        "per_step_interval_s": [*work.interval] or None,
        "hidden": work.hidden,
    }
    return {"host": host}


def or_inf(value: float) -> float | str:
    """Return a setting as JSON can hold it: without limit it is a word, as in vLLM."""
    return "inf" if value == inf else float(value)
