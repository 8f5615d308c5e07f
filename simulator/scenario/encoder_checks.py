"""What a cluster must be whose groups have roles: prefill and decode, or encoders, apart."""

from collections.abc import Iterator

from simulator.cluster.cluster_config import ClusterConfig, GroupConfig
from simulator.core.engine_config import EngineConfig
from simulator.scenario.scenario import Scenario
from simulator.schedulers.feature import Conflict

WITHOUT = {
    "kv_transfer": "a request's prompt is computed where it is decoded",
    "pods": "encoders would be shared",
    "failures": "none is simulated of encoders",
}
"""Blocks of a cluster that do not go with encoders apart, and why."""


def check_encoders(scenario: Scenario, cluster: ClusterConfig) -> Iterator[Conflict]:
    """Find what is wrong with groups that have an ec_role."""
    if not any(group.ec_role for group in cluster.groups.values()):
        yield from check_roles(cluster, "ec")
        return
    for key, why in WITHOUT.items():
        if getattr(cluster, key) is not None:
            what = f"cannot be used with ec_role: {why}"
            yield Conflict(f"cluster.{key}", "cluster.groups", what)
    yield from check_roles(cluster, "ec")
    for name, group in cluster.groups.items():
        yield from _check_group(f"cluster.groups.{name}", group, scenario.of_group(name).engine)


def check_roles(cluster: ClusterConfig, kind: str) -> Iterator[Conflict]:
    """Find roles of groups, kv or ec, that do not make a whole."""
    key, transfer = f"{kind}_role", f"{kind}_transfer"
    groups, roles = cluster.groups, (f"{kind}_producer", f"{kind}_consumer")
    given = {name: getattr(group, key) for name, group in groups.items()}
    at = "cluster.groups"
    if not any(given.values()):
        if getattr(cluster, transfer) is not None:
            what = f"needs groups of {key} {roles[0]} and {roles[1]}"
            yield Conflict(f"cluster.{transfer}", at, what)
        return
    for name, role in given.items():
        if role is None:
            what = f"{roles[0]} or {roles[1]}, as other groups have"
            yield Conflict(f"cluster.groups.{name}.{key}", at, what)
    for role in roles:
        if not any(group.replicas for name, group in groups.items() if given[name] == role):
            yield Conflict(at, "cluster", f"there is no replica of {key} {role}")
    if getattr(cluster, transfer) is None:
        what = (
            f"groups with {key} need it: {{bandwidth: GB/s, latency: ms}}, or {{}} for the defaults"
        )
        yield Conflict(f"cluster.{transfer}", at, what)


def _check_group(at: str, group: GroupConfig, engine: EngineConfig) -> Iterator[Conflict]:
    """Find what is wrong with one group, whose key is `at`."""
    if engine.multimodal_config is None:
        what = "needs engine.multimodal_config: of text there is nothing to encode"
        yield Conflict(f"{at}.ec_role", "engine.multimodal_config", what)
    for key, why in (("kv_role", WITHOUT["kv_transfer"]), ("model", "all groups serve one model")):
        if getattr(group, key) is not None:
            yield Conflict(f"{at}.{key}", "cluster.groups", f"cannot be used with ec_role: {why}")
    if group.ec_role == "ec_producer" and group.cost is not None:
        what = "an ec_producer runs no language model: give engine.multimodal_config"
        yield Conflict(f"{at}.cost", "engine.multimodal_config", f"{what}.encoder_seconds")
    if engine.data_parallel_size > 1:
        what = "must be 1 in a group with ec_role"
        yield Conflict(f"{at}.engine.data_parallel_size", "engine", what)
