"""What the groups of a cluster that prefills and decodes apart must have in common."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.assemble import check_role

if TYPE_CHECKING:
    from simulator.cluster_block import ClusterBlock
    from simulator.engine_block import EngineBlock
    from simulator.scenario import Scenario


def apart(scenario: "Scenario", cluster: "ClusterBlock") -> Iterator[tuple[str, str, str]]:
    """Yield key, other keys and what is wrong with the groups' engines, for `checks.py`."""
    first = next(iter(cluster.groups))
    one = scenario.of_group(first).engine
    for name, group in cluster.groups.items():
        own = scenario.of_group(name)
        assert group.kv_role is not None
        try:
            check_role(group.kv_role, own)
        except ValueError as error:
            key, _, what = str(error).partition(": ")
            yield f"cluster.groups.{name}.{key}", "engine", what
        for key, what in _unlike(first, one, own.engine):
            yield f"cluster.groups.{name}.engine.{key}", "engine", what


def _unlike(first: str, one: "EngineBlock", other: "EngineBlock") -> Iterator[tuple[str, str]]:
    """Yield the keys in which two engines differ and must not: a KV block goes over as it is."""
    if one.block_size != other.block_size:
        yield "block_size", f"must be that of {first} ({one.block_size}), not {other.block_size}"
    kinds = [engine.kv_cache_dtype for engine in (one, other)]
    kinds = [
        engine.dtype if kind == "auto" else kind
        for kind, engine in zip(kinds, (one, other), strict=True)
    ]
    if kinds[0] != kinds[1]:
        yield "kv_cache_dtype", f"must be that of {first} ({kinds[0]}), not {kinds[1]}"
    sizes = [engine.tensor_parallel_size for engine in (one, other)]
    if max(sizes) % min(sizes):
        yield (
            "tensor_parallel_size",
            f"{sizes[1]} and that of {first} ({sizes[0]}): one must divide the other, or no GPU "
            "has the heads that another wants",
        )
