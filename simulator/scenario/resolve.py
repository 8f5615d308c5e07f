"""From a scenario to what its engines are, and where its requests go.

Both are settled once: where the scenario is loaded, or where a copy of it is asked for first.
"""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simulator.build.engine_spec import EngineSpec
from simulator.build.settle import settle
from simulator.costs.noise import describe_cost
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayWarning

if TYPE_CHECKING:
    from simulator.build.assemble_fleet import FleetSpec


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
    specs = engine_specs(scenario)
    for spec in specs.values():
        for message in spec.notes:
            warnings.warn(message, HeadwayWarning, stacklevel=3)
    return specs


def engine_specs(scenario: Scenario) -> Mapping[str, EngineSpec]:
    """Return what `resolve_groups` does, and warn of nothing."""
    if scenario._specs is None:
        scenario._specs = {name: settle(own) for name, own in scenario.groups.items()}
    return scenario._specs


def fleet_spec(scenario: Scenario) -> "FleetSpec":
    """Return where the requests of a scenario's cluster go."""
    if scenario._fleet is None:
        from simulator.build.assemble_fleet import settle_fleet  # for nothing without a cluster

        assert scenario.cluster is not None
        scenario._fleet = settle_fleet(scenario, scenario.cluster, scenario.models)
        assert scenario._fleet is not None
    return scenario._fleet


def keep_specs(
    scenario: Scenario, specs: Mapping[str, EngineSpec], fleet: "FleetSpec | None"
) -> None:
    """Keep what a scenario has been settled to, for who asks next."""
    scenario._specs, scenario._fleet = specs, fleet


def describe_costs(scenario: Scenario) -> dict[str, Any]:
    """Return what a summary would say of the costs of a scenario, by group in a cluster."""
    groups = {name: describe_cost(spec.cost) for name, spec in engine_specs(scenario).items()}
    return groups[""] if scenario.cluster is None else {"cluster": {"groups": groups}}
