"""From the block `cluster` of a scenario to its routers, and to a fleet without replicas as yet."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import simpy

from simulator.cluster.disaggregation import DisaggregatedFleet
from simulator.cluster.fleet import Fleet, Sessions
from simulator.cluster.own_router import Own
from simulator.cluster.routers import (
    ROUTERS,
    ByModel,
    Pods,
    RoundRobin,
    Router,
    SessionHash,
    StatelessRouter,
    Uniform,
)
from simulator.scenario.engine_spec import EngineSpec
from simulator.scenario.scenario import Scenario
from simulator.util.config import split_spec
from simulator.util.errors import did_you_mean, one_line
from simulator.util.from_mapping import short_repr
from simulator.util.user_code import load_user_code


def make_router(scenario: Scenario, *, decodes: bool = False) -> Router:
    """Make a cluster's router, or that to its consumers (`router_maker`)."""
    router, cluster = router_maker(scenario, decodes=decodes)(), scenario.cluster
    assert cluster is not None
    if served := scenario.models:
        names = [*dict.fromkeys(served)]
        each = {place: router_maker(scenario)() for place in range(len(names))}
        groups = zip(cluster.groups, served, strict=True)
        places = [
            names.index(name) for group, name in groups for _ in range(cluster.max_replicas(group))
        ]
        return Pods(ByModel(names), places, each)
    if cluster.pods is None:
        return router
    return Pods(router, cluster.pod_numbers, pod_routers(scenario, range(cluster.pods)))


def make_front(scenario: Scenario) -> StatelessRouter:
    """Make the router before a cluster's pods, or its replicas: one that looks at none."""
    router = router_maker(scenario)()
    assert isinstance(router, RoundRobin | Uniform | SessionHash)
    return router


def pod_routers(scenario: Scenario, pods: Iterable[int]) -> dict[int, Router]:
    """Make the routers of some pods; without pods each has a single replica."""
    assert scenario.cluster is not None
    if scenario.cluster.pods is None:
        return {pod: RoundRobin() for pod in pods}
    return {pod: router_maker(scenario, pod=pod)() for pod in pods}


def router_maker(
    scenario: Scenario, *, decodes: bool = False, pod: int | None = None
) -> Callable[[], Router]:
    """Check a cluster's router, that to its consumers or of one `pod`; give what makes it.

    ValueError says what is wrong with its key. Nothing of the user's own is made before the call,
    which raises HeadwayError where it cannot be.
    """
    cluster = scenario.cluster
    assert cluster is not None
    key, spec = "cluster.router", cluster.router
    if decodes:
        assert cluster.kv_transfer is not None
        key, spec = "cluster.kv_transfer.router", cluster.kv_transfer.router or spec
    if pod is not None:
        key, spec = "cluster.pod_router", cluster.pod_router or "least_outstanding"
    name, arguments = split_spec(spec, "router")
    if name not in ROUTERS:
        own = _load_router(name, arguments, scenario)
        return partial(_make_own, own, name, arguments, scenario, key)
    found = ROUTERS[name]
    known = inspect.signature(found).parameters
    if "seed" in known:  # several routers draw apart
        apart = decodes if pod is None else 1 + pod
        arguments = {"seed": scenario.seed + apart} | arguments
    for argument, value in arguments.items():
        if argument not in known:
            there = ", ".join(known) or "none"
            raise ValueError(f"{argument}: {name} takes no such argument; there is {there}")
        whole = known[argument].annotation is int
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            words = "a whole number" if whole else "a number"
            raise ValueError(f"{argument}: must be {words}, not {short_repr(value)}")
    router: Router = found(**arguments)
    return lambda: router


def _load_router(name: str, arguments: dict[str, Any], scenario: Scenario) -> Any:
    """Load a function or class of the user's; see that it is one before it is called."""
    if ":" not in name:
        known = ", ".join(ROUTERS)
        raise ValueError(
            f"no router {name!r}; there are {known}, or package.module:function"
            f"{did_you_mean(name, ROUTERS)}"
        )
    found = load_user_code(name, scenario.folder)
    if not callable(getattr(found, "choose", None) if isinstance(found, type) else found):
        raise ValueError(f"{name} is no function, and no class with choose(request, targets)")
    if isinstance(found, type):
        try:
            inspect.signature(found).bind(**arguments)
        except TypeError as error:
            raise ValueError(f"cannot make {name}: {error}") from error
    elif arguments:
        raise ValueError(f"{name} is a function and takes no arguments from here")
    return found


def _make_own(
    found: Any, name: str, arguments: dict[str, Any], scenario: Scenario, key: str
) -> Router:
    try:
        choose = found(**arguments).choose if isinstance(found, type) else found
    except Exception as error:  # whatever the class does
        wrong = ValueError(f"cannot make {name}: {one_line(error)}")
        raise scenario.error_at(key, wrong) from error
    return Own(name.partition(":")[2], choose, key)


def make_fleet(
    env: simpy.Environment,
    scenario: Scenario,
    specs: Mapping[str, EngineSpec],
    sessions: Sessions | None,
) -> Fleet:
    """Make the fleet, one that prefills and decodes apart if its groups have roles."""
    assert scenario.cluster is not None
    kv = scenario.cluster.kv_transfer
    if kv is None:
        return Fleet(env, make_router(scenario), sessions)
    rate = kv.bandwidth * 1e9  # of each GPU
    links = {
        name: spec.block_bytes / rate for name, spec in specs.items() if spec.role == "kv_producer"
    }
    return DisaggregatedFleet(
        env,
        make_router(scenario),
        sessions,
        to_consumers=make_router(scenario, decodes=True),
        block_seconds=links,
        latency=kv.latency * 1e-3,
    )
