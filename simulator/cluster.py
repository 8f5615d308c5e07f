"""From the block `cluster` of a scenario to a fleet, and from its run to a result."""

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import simpy

from simulator.assemble import Parts, assemble, make_scheduler
from simulator.client import Client
from simulator.errors import HeadwayWarning
from simulator.fleet import Fleet
from simulator.predictor import make_predictor
from simulator.routers import ROUTERS, Own, Router
from simulator.scenario import Scenario
from simulator.workload import Workload

if TYPE_CHECKING:
    from simulator.simulation import Result


def make_router(scenario: Scenario) -> Router:
    """Make the router; ValueError says what is wrong with `cluster.router`."""
    assert scenario.cluster is not None
    spec = scenario.cluster.router
    arguments = {} if isinstance(spec, str) else {k: v for k, v in spec.items() if k != "router"}
    name = spec if isinstance(spec, str) else spec["router"]
    if name not in ROUTERS:
        return _own(name, arguments, scenario)
    found = ROUTERS[name]
    known = inspect.signature(found).parameters
    if "seed" in known:
        arguments = {"seed": scenario.seed} | arguments
    _check(name, known, arguments)
    router: Router = found(**arguments)
    return router


def _check(name: str, known: Any, arguments: dict[str, Any]) -> None:
    """Refuse arguments that a router does not know, or that are no numbers of its kind."""
    for key, value in arguments.items():
        if key not in known:
            there = ", ".join(known) or "none"
            raise ValueError(f"{key}: {name} takes no such argument; there is {there}")
        kind = known[key].annotation
        good = isinstance(value, int if kind is int else int | float)
        if isinstance(value, bool) or not good:
            words = "a whole number" if kind is int else "a number"
            raise ValueError(f"{key}: must be {words}, not {value!r}")


def _own(name: str, arguments: dict[str, Any], scenario: Scenario) -> Router:
    """Load a function or class of the user's."""
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(ROUTERS)
        raise ValueError(f"no router {name!r}; there are {known}, or package.module:function")
    folder = str(scenario.folder.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found = getattr(importlib.import_module(module), attribute)
        choose = found(**arguments).choose if isinstance(found, type) else found
    except Exception as error:  # whatever the module does
        raise ValueError(f"cannot load {name}: {' '.join(str(error).split())}") from error
    if arguments and not isinstance(found, type):
        raise ValueError(f"{name} is a function and takes no arguments from here")
    if not callable(choose):
        raise ValueError(f"{name} is no function, and no class with choose(request, targets)")
    return Own(attribute, choose)


def sessions_of(workload: Workload) -> list[int] | None:
    """Name each request's conversation by its first request; -1 where nothing follows."""
    if workload.after is None:
        return None
    first = list(range(len(workload)))
    goes_on = [False] * len(workload)
    for turn, before in enumerate(workload.after.tolist()):
        if before >= 0:
            first[turn] = first[before]
            goes_on[turn] = goes_on[first[before]] = True
    return [root if on else -1 for root, on in zip(first, goes_on, strict=True)]


def run_cluster(
    scenario: Scenario,
    *,
    stepwise: bool = False,
    progress: Callable[[float, int, int], None] | None = None,
) -> "Result":
    """Simulate a scenario with a cluster; see `simulation.run`."""
    from simulator.simulation import Result, drive

    assert scenario.cluster is not None
    workload = scenario.make_workload()
    env = simpy.Environment()
    fleet = Fleet(env, make_router(scenario), sessions_of(workload))
    parts = _fill(fleet, scenario, workload, leap=not stepwise)
    predictor = make_predictor(scenario.predictor, workload, scenario.seed)
    client = Client(env, workload, fleet.submit, predictor)
    fleet.on_finish = client.finished
    interrupted = drive(env, client, progress)
    if interrupted:
        fleet.abandon()
    for member in fleet.members:
        if (tier := member.scheduler.blocks.tier) is not None:
            member.log.offloaded = tier.stored
    result = Result(
        scenario, workload, np.frombuffer(client.sent), fleet.logs, parts[0], interrupted
    )
    result.groups = [target.group for target in fleet.targets]
    result.parts_of = parts
    if client.hints is not None:
        result.hints = np.frombuffer(client.hints, np.int64)
    _warn(result)
    return result


def _fill(fleet: Fleet, scenario: Scenario, workload: Workload, *, leap: bool) -> list[Parts]:
    """Add all replicas; return what each is made of, by number."""
    assert scenario.cluster is not None
    every: list[Parts] = []
    for name, group in scenario.cluster.kinds.items():
        own = scenario.of_group(name)
        parts = assemble(own)
        for _ in range(group.replicas):
            scheduler = make_scheduler(own, parts, workload.segments is not None)
            fleet.router.open(fleet.add(name, scheduler, parts.cost, leap=leap))
            every.append(parts)
    return every


def _warn(result: "Result") -> None:
    """Say, once for each kind of replica, what cannot be trusted."""
    told: dict[str, None] = {}
    for group in dict.fromkeys(result.groups):
        logs = [log for log, name in zip(result.logs, result.groups, strict=True) if name == group]
        parts = result.parts_of[result.groups.index(group)]
        rows = np.concatenate([log.steps for log in logs])
        told |= dict.fromkeys(parts.cost.outside(rows))
    if (count := _rejected(result)) and count == len(result.workload):
        told[f"all {count:,} requests were rejected: no replica could ever hold them"] = None
    for message in told:
        result.warnings.append(message)
        warnings.warn(message, HeadwayWarning, stacklevel=4)


def _rejected(result: "Result") -> int:
    from simulator.replica import REJECTED

    return sum(int((log.requests["reason"] == REJECTED).sum()) for log in result.logs)


def replicas_in(groups: Sequence[str]) -> dict[str, list[int]]:
    """Give the numbers of the replicas of each group."""
    found: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        found.setdefault(group, []).append(number)
    return found
