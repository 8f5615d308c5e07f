"""What a cluster must be whose images are encoded by replicas of their own."""

from collections.abc import Iterator

from simulator.core.engine_config import EngineConfig
from simulator.scenario.cluster_config import ClusterConfig, GroupConfig
from simulator.scenario.scenario import Scenario

Conflict = tuple[str, str, str]  # as in checks.py
WITHOUT = {
    "kv_transfer": "a request's prompt is computed where it is decoded",
    "pods": "encoders would be shared",
    "sleep_mode": "a model that sleeps would get outputs",
    "failures": "none is simulated of encoders",
}
"""Blocks of a cluster that do not go with encoders apart, and why."""


def check_encoders(scenario: Scenario, cluster: ClusterConfig) -> Iterator[Conflict]:
    """Find what is wrong with groups that have an ec_role."""
    groups = cluster.groups
    if not any(group.ec_role for group in groups.values()):
        if cluster.ec_transfer is not None:
            what = "goes with groups of ec_role ec_producer and ec_consumer"
            yield "cluster.ec_transfer", "cluster.groups", what
        return
    for key, why in WITHOUT.items():
        if getattr(cluster, key) is not None:
            yield f"cluster.{key}", "cluster.groups", f"goes without ec_role: {why}"
    for name, group in groups.items():
        yield from _check_group(f"cluster.groups.{name}", group, scenario.of_group(name).engine)
    for role in ("ec_producer", "ec_consumer"):
        if not any(group.replicas for group in groups.values() if group.ec_role == role):
            yield "cluster.groups", "cluster", f"there is no replica of ec_role {role}"
    if cluster.ec_transfer is None:
        what = "groups with ec_role need it: {bandwidth: GB/s, latency: ms}, or {} for the defaults"
        yield "cluster.ec_transfer", "cluster.groups", what


def _check_group(at: str, group: GroupConfig, engine: EngineConfig) -> Iterator[Conflict]:
    """Find what is wrong with one group, whose key is `at`."""
    if group.ec_role is None:
        what = "ec_producer or ec_consumer, as other groups have"
        yield f"{at}.ec_role", "cluster.groups", what
    if engine.multimodal_config is None:
        what = "goes with engine.multimodal_config: of text there is nothing to encode"
        yield f"{at}.ec_role", "engine.multimodal_config", what
    for key, why in (("kv_role", WITHOUT["kv_transfer"]), ("model", "all groups serve one model")):
        if getattr(group, key) is not None:
            yield f"{at}.{key}", "cluster.groups", f"goes without ec_role: {why}"
    if group.ec_role == "ec_producer" and group.cost is not None:
        what = "an ec_producer runs no language model: give engine.multimodal_config"
        yield f"{at}.cost", "engine.multimodal_config", f"{what}.encoder_seconds"
    if engine.data_parallel_size > 1:
        yield f"{at}.engine.data_parallel_size", "engine", "must be 1 in a group with ec_role"
