"""From the block `cluster` of a scenario to what routes, and to a fleet without replicas as yet."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import simpy

from simulator.build.engine_spec import EngineBlocks, EngineSpec
from simulator.build.settle import Attempt, at_once
from simulator.cluster.cluster_config import ClusterConfig
from simulator.cluster.config import EcTransferConfig, KvTransferConfig
from simulator.cluster.disaggregation import DisaggregatedFleet
from simulator.cluster.encoders import EncoderFleet
from simulator.cluster.fleet import Fleet, Sessions
from simulator.cluster.routers import (
    ROUTERS,
    ByModel,
    Own,
    Pods,
    RoundRobin,
    Router,
    StatelessRouter,
)
from simulator.util.config import Named
from simulator.util.errors import MappingError, one_line
from simulator.util.from_mapping import annotation_faults
from simulator.util.user_code import load_user_code, unknown_name

Maker = Callable[..., Router]
"""Makes a router; those of other numbers, its only argument, draw apart."""


@dataclass(slots=True, frozen=True)
class FleetSpec:
    """What routes in a fleet: all is checked, and nothing of the user's own made as yet.

    What makes a router raises HeadwayError where it cannot.
    """

    front: Maker  # before the pods, or before all replicas
    within: Maker | None  # each pod; None: there are none
    pods: Sequence[int]  # of each replica that there may be; without any each is one by itself
    kv_transfer: KvTransferConfig | None  # None: each replica prefills and decodes
    consumers: Maker  # to those who decode
    ec_transfer: EcTransferConfig | None = None  # None: each replica encodes its own images
    encoders: Maker | None = None  # to those who encode for others

    def make_router(self) -> Router:
        """Make the router, with those of all pods."""
        if self.within is None:
            return self.front()
        return Pods(self.front(), self.pods, self.pod_routers(sorted({*self.pods})))

    def make_front(self) -> StatelessRouter:
        """Make the router before the pods, or the replicas: one that looks at none."""
        router = self.front()
        assert isinstance(router, StatelessRouter)
        return router

    def pod_routers(self, pods: Iterable[int]) -> dict[int, Router]:
        """Make the routers of some pods; without pods each has a single replica."""
        within = self.within or (lambda _: RoundRobin())
        return {pod: within(1 + pod) for pod in pods}


def settle_fleet(
    own: EngineBlocks, cluster: ClusterConfig, models: Sequence[str], attempt: Attempt = at_once
) -> FleetSpec | None:
    """Settle where requests go, each router in an attempt; None where one has failed.

    `models` are those of the groups, or none where all serve the same.
    """
    makers: dict[str, Maker] = {}
    for key, spec in cluster.routers.items():
        with attempt(key, ""):
            makers[key] = _settle(own, key, spec)
    if len(makers) < len(cluster.routers):
        return None
    front, within = makers["cluster.router"], makers.get("cluster.pod_router")
    consumers = makers.get("cluster.kv_transfer.router", front)
    if not models:
        links, encoders = cluster.ec_transfer, makers.get("cluster.ec_transfer.router")
        apart = cluster.kv_transfer, consumers, links, encoders
        return FleetSpec(front, within, cluster.pod_numbers, *apart)
    counts, names = map(cluster.max_replicas, cluster.groups), [*dict.fromkeys(models)]
    each = zip(models, counts, strict=True)
    places = [names.index(name) for name, count in each for _ in range(count)]
    return FleetSpec(partial(ByModel, names), lambda _: front(), places, None, consumers)


def _settle(own: EngineBlocks, key: str, spec: Named) -> Maker:
    """Check the router at a key; give what makes it. ValueError says what is wrong."""
    name, arguments = spec.name, spec.arguments
    if name not in ROUTERS:
        found = _load(name, arguments, own)
        return lambda _=0: _make_own(found, name, arguments, own, key)
    shipped = ROUTERS[name]
    known = inspect.signature(shipped).parameters
    for argument, value in arguments.items():
        if argument not in known:
            there = ", ".join(known) or "none"
            raise MappingError(argument, f"{name} takes no such argument; there is {there}")
        if faults := annotation_faults(argument, known[argument].annotation, value):
            raise MappingError(faults)

    def make(number: int = 0) -> Router:
        draws = {"seed": own.seed + number} if "seed" in known else {}
        router: Router = shipped(**{**draws, **arguments})
        return router

    make()
    return make


def _load(name: str, arguments: Mapping[str, Any], own: EngineBlocks) -> Any:
    """Load a function or class of the user's; see that it is one before it is called."""
    if ":" not in name:
        raise unknown_name("router", name, ROUTERS, "function")
    found = load_user_code(name, own.folder)
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
    found: Any, name: str, arguments: Mapping[str, Any], own: EngineBlocks, key: str
) -> Router:
    try:
        choose = found(**arguments).choose if isinstance(found, type) else found
    except Exception as error:  # whatever the class does
        wrong = ValueError(f"cannot make {name}: {one_line(error)}")
        raise own.error_at(key, wrong) from error
    return Own(name.partition(":")[2], choose, key)


def make_fleet(
    env: simpy.Environment,
    fleet: FleetSpec,
    specs: Mapping[str, EngineSpec],
    sessions: Sessions | None,
) -> Fleet:
    """Make the fleet, one whose replicas do a part each if its groups have roles."""
    kv, router = fleet.kv_transfer, fleet.make_router()
    if (ec := fleet.ec_transfer) is not None:
        assert fleet.encoders is not None
        encoders = {name: spec for name, spec in specs.items() if spec.role == "ec_producer"}
        return EncoderFleet(
            env,
            router,
            sessions,
            to_encoders=fleet.encoders(1),
            token_seconds={
                name: spec.model.output_bytes / (ec.bandwidth * 1e9)
                for name, spec in encoders.items()
            },
            latency=ec.latency * 1e-3,
        )
    if kv is None:
        return Fleet(env, router, sessions)
    rate = kv.bandwidth * 1e9  # of each GPU
    links = {
        name: spec.block_bytes / rate for name, spec in specs.items() if spec.role == "kv_producer"
    }
    return DisaggregatedFleet(
        env,
        router,
        sessions,
        to_consumers=fleet.consumers(1),
        block_seconds=links,
        latency=kv.latency * 1e-3,
        layers={name: specs[name].model.num_hidden_layers for name in links if kv.layerwise},
        max_local=kv.max_local_prefill_length,
    )
