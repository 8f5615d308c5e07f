"""What each engine of a scenario is, with what it does otherwise than asked."""

import warnings
from collections.abc import Mapping
from typing import Any

from simulator.costs.noise import describe_cost
from simulator.scenario.engine_spec import EngineSpec
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayWarning


def resolve(scenario: Scenario) -> EngineSpec:
    """Return what the engine of a scenario is, whatever its cluster; warn as `resolve_groups`."""
    alone = scenario
    if scenario.cluster is not None:
        alone = scenario.model_copy(update={"cluster": None})
    return resolve_groups(alone)[""]


def resolve_groups(scenario: Scenario) -> Mapping[str, EngineSpec]:
    """Return what the engines of each group are; without a cluster the only one has no name.

    Warns of what they do otherwise than asked.
    """
    for spec in scenario.specs.values():
        for message in spec.notes:
            warnings.warn(message, HeadwayWarning, stacklevel=3)
    return scenario.specs


def describe_costs(scenario: Scenario) -> dict[str, Any]:
    """Return what a summary would say of the costs of a scenario, by group in a cluster."""
    groups = {name: describe_cost(spec.cost) for name, spec in scenario.specs.items()}
    return groups[""] if scenario.cluster is None else {"cluster": {"groups": groups}}
