"""From the block `cluster` of a scenario to its routers, and to a fleet without replicas as yet."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import simpy

from simulator.cluster.disaggregation import DisaggregatedFleet
from simulator.cluster.fleet import Fleet
from simulator.cluster.routers import ROUTERS, Own, Router
from simulator.models.kv_budget import kv_block_bytes
from simulator.models.load import load_model
from simulator.scenario.scenario import Scenario
from simulator.util.config import split_spec
from simulator.util.errors import did_you_mean, one_line
from simulator.util.from_mapping import short_repr
from simulator.util.user_code import load_user_code


def make_router(
    scenario: Scenario,
    spec: str | dict[str, Any] | None = None,
    key: str = "cluster.router",
    stream: int = 0,
) -> Router:
    """Make the router that `spec` says, null: `cluster.router`; ValueError says what is wrong.

    `stream` tells the random numbers of several routers apart. HeadwayError where one of the
    user's own cannot be made.
    """
    router = _make_router(scenario, spec, key, stream)
    assert router is not None
    return router


def check_router(
    scenario: Scenario, spec: str | dict[str, Any] | None = None, key: str = "cluster.router"
) -> None:
    """Raise ValueError for what `make_router` refuses; nothing of the user's own is made."""
    _make_router(scenario, spec, key, check_only=True)


def _make_router(
    scenario: Scenario,
    spec: str | dict[str, Any] | None,
    key: str,
    stream: int = 0,
    *,
    check_only: bool = False,
) -> Router | None:
    """Make a router; None where it is the user's own and shall only be checked."""
    assert scenario.cluster is not None
    name, arguments = split_spec(spec or scenario.cluster.router, "router")
    if name not in ROUTERS:
        found = _load_router(name, arguments, scenario)
        return None if check_only else _make_own(found, name, arguments, scenario, key)
    found = ROUTERS[name]
    known = inspect.signature(found).parameters
    if "seed" in known:
        arguments = {"seed": scenario.seed + stream} | arguments
    for argument, value in arguments.items():
        if argument not in known:
            there = ", ".join(known) or "none"
            raise ValueError(f"{argument}: {name} takes no such argument; there is {there}")
        whole = known[argument].annotation is int
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            words = "a whole number" if whole else "a number"
            raise ValueError(f"{argument}: must be {words}, not {short_repr(value)}")
    router: Router = found(**arguments)
    return router


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


def check_decode_router(scenario: Scenario) -> None:
    """Raise ValueError for what `make_decode_router` refuses."""
    assert scenario.cluster is not None
    assert scenario.cluster.kv_transfer is not None
    check_router(scenario, scenario.cluster.kv_transfer.router, "cluster.kv_transfer.router")


def make_decode_router(scenario: Scenario) -> Router:
    """Make the router to the consumers; ValueError says what is wrong with its key."""
    assert scenario.cluster is not None
    assert scenario.cluster.kv_transfer is not None
    spec = scenario.cluster.kv_transfer.router
    return make_router(scenario, spec, "cluster.kv_transfer.router", stream=1)


def make_fleet(
    env: simpy.Environment, scenario: Scenario, sessions: Sequence[int] | Mapping[int, int] | None
) -> Fleet:
    """Make the fleet, one that prefills and decodes apart if its groups have roles."""
    assert scenario.cluster is not None
    kv = scenario.cluster.kv_transfer
    if kv is None:
        return Fleet(env, make_router(scenario), sessions)
    rate = kv.bandwidth * 1e9  # of each GPU
    links = {
        name: size / scenario.of_group(name).engine.tensor_parallel_size / rate
        for name, size in block_bytes(scenario).items()
    }
    return DisaggregatedFleet(
        env,
        make_router(scenario),
        sessions,
        to_consumers=make_decode_router(scenario),
        block_seconds=links,
        latency=kv.latency * 1e-3,
    )


def block_bytes(scenario: Scenario) -> dict[str, float]:
    """Give the bytes of a KV block, on all GPUs of a replica, for each group of producers."""
    assert scenario.cluster is not None
    model = load_model(scenario.model, scenario.folder)
    sizes = {}
    for name, group in scenario.cluster.replica_groups.items():
        if group.kv_role == "kv_producer":
            engine = scenario.of_group(name).engine
            sizes[name] = kv_block_bytes(model, engine) * engine.tensor_parallel_size
    return sizes
