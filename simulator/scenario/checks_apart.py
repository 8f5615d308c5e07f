"""What the groups of a cluster that prefills and decodes apart must have in common."""

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from simulator.models.load import load_model
from simulator.scenario.assemble import check_role
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from simulator.scenario.checks import Contradiction
    from simulator.scenario.cluster_config import ClusterConfig
    from simulator.scenario.scenario import Scenario


def apart(scenario: "Scenario", cluster: "ClusterConfig") -> "Iterator[Contradiction]":
    """Yield what is wrong with the roles of groups, then with the engines that have them."""
    if found := next(_roles(cluster), None):
        yield found
    elif cluster.kv_transfer is not None:
        yield from _engines(scenario, cluster)


def _roles(cluster: "ClusterConfig") -> "Iterator[Contradiction]":
    """Find roles that do not make a whole."""
    groups = cluster.groups
    if not any(group.kv_role for group in groups.values()):
        if cluster.kv_transfer is not None:
            what = "goes with groups of kv_role kv_producer and kv_consumer"
            yield "cluster.kv_transfer", "cluster.groups", what
        return
    for name, group in groups.items():
        if group.kv_role is None:
            what = "kv_producer or kv_consumer, as other groups have"
            yield f"cluster.groups.{name}.kv_role", "cluster.groups", what
    for role in ("kv_producer", "kv_consumer"):
        if not any(group.replicas for group in groups.values() if group.kv_role == role):
            yield "cluster.groups", "cluster", f"there is no replica of kv_role {role}"
    if cluster.kv_transfer is None:
        what = "groups with kv_role need it: {bandwidth: GB/s, latency: ms}"
        yield "cluster.kv_transfer", "cluster.groups", what


def _engines(scenario: "Scenario", cluster: "ClusterConfig") -> "Iterator[Contradiction]":
    first = next(iter(cluster.groups))
    one = scenario.of_group(first)
    for name, group in cluster.groups.items():
        own = scenario.of_group(name)
        assert group.kv_role is not None
        try:
            check_role(group.kv_role, own)
        except ValueError as error:
            key, _, what = str(error).partition(": ")
            yield f"cluster.groups.{name}.{key}", "engine", what
        for key, what in _unlike(first, one, own):
            yield f"cluster.groups.{name}.engine.{key}", "engine", what


def _unlike(first: str, one: "Scenario", other: "Scenario") -> Iterator[tuple[str, str]]:
    """Yield the keys in which two engines differ and must not: a KV block goes over as it is."""
    engine, another = one.engine, other.engine
    if engine.block_size != another.block_size:
        yield (
            "block_size",
            f"must be that of {first} ({engine.block_size}), not {another.block_size}",
        )
    kinds = [_kv_dtype(one), _kv_dtype(other)]
    if kinds[0] != kinds[1]:
        yield "kv_cache_dtype", f"must be that of {first} ({kinds[0]}), not {kinds[1]}"
    sizes = [engine.tensor_parallel_size, another.tensor_parallel_size]
    if max(sizes) % min(sizes):
        yield (
            "tensor_parallel_size",
            f"{sizes[1]} and that of {first} ({sizes[0]}): one must divide the other, or no GPU "
            "has the heads that another wants",
        )


def _kv_dtype(scenario: "Scenario") -> str:
    """Name the numbers of a KV cache; auto where the model is at fault, which is told elsewhere."""
    engine = scenario.engine
    kind: str = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    with suppress(HeadwayError, ValueError):
        kind = load_model(scenario.model, scenario.folder).resolve_dtype(kind)
    return "fp8_e4m3" if kind == "fp8" else kind
