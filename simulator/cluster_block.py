"""The block `cluster` of a scenario: several replicas of the engine behind a router."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from simulator.block import Block
from simulator.engines import named

if TYPE_CHECKING:
    from simulator.engine_block import EngineBlock
    from simulator.scenario import GpuBlock

MOST_REPLICAS = 100_000


def _router(value: object) -> object:
    """Let through a name, or a mapping with the name as `router`."""
    if isinstance(value, dict):
        if not isinstance(value.get("router"), str):
            raise ValueError(": the mapping needs a key `router`: a name or module:function")
    elif not isinstance(value, str):
        raise ValueError(f": must be a name or a mapping with a key `router`, not {value!r}")
    return value


class GroupBlock(Block):
    """Replicas that are alike; what is left out is as the scenario has it."""

    replicas: Annotated[int, Field(ge=0, le=MOST_REPLICAS)] = Field(
        1, description="engines, each on `gpu.count` GPUs of its own"
    )
    gpu: "GpuBlock | None" = Field(None, description="as `gpu`; null: the scenario's")
    engine: "EngineBlock | None" = Field(
        None, description="keys of `engine` that differ from the scenario's"
    )
    cost: dict[str, Any] | None = Field(
        None, description="as `cost`; null: the scenario's, or by the group's own GPU"
    )
    dollars_per_hour: Annotated[float, Field(ge=0)] | None = Field(
        None, description="price of one replica; null: that of its GPUs in the table of hardware"
    )


class ClusterBlock(Block):
    """Replicas and their router."""

    replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] | None = Field(
        None, description="engines that are all as the scenario says; null: 1, or see groups"
    )
    router: Annotated[str | dict[str, Any], BeforeValidator(_router)] = Field(
        "round_robin",
        description="a name listed below, or package.module:function (or Class); with arguments: "
        "{router: name, argument: value}",
    )
    groups: dict[str, GroupBlock] = Field(
        {}, description="in place of replicas: groups of different ones, by names of your own"
    )

    @model_validator(mode="after")
    def _check(self) -> "ClusterBlock":
        if self.groups and self.replicas is not None:
            raise ValueError("replicas: beside groups, each group gives its own replicas")
        if self.groups and not any(group.replicas for group in self.groups.values()):
            raise ValueError("groups: there is not one replica")
        return self

    @property
    def kinds(self) -> dict[str, GroupBlock]:
        """Give the groups; where there are none, the one that `replicas` is short for."""
        return self.groups or {"all": GroupBlock(replicas=self.replicas or 1)}


def fill_in(raw: dict[str, Any]) -> dict[str, Any]:
    """Complete each group's engine by the scenario's, before anything is checked."""
    cluster = raw.get("cluster")
    groups = cluster.get("groups") if isinstance(cluster, dict) else None
    if not isinstance(groups, dict):
        return raw
    base = raw.get("engine") or {}
    base = {"name": base} if isinstance(base, str) else base
    filled = {}
    for name, group in groups.items():
        filled[name] = group
        own = {} if group is None else group.get("engine") if isinstance(group, dict) else 0
        own = {"name": own} if isinstance(own, str) else own or {}
        if isinstance(base, dict) and isinstance(own, dict) and (base or own):
            given = group or {}
            gpu = given.get("gpu") or raw.get("gpu")
            filled[name] = given | {"engine": named(base | own, gpu, raw.get("model"))}
    return raw | {"cluster": cluster | {"groups": filled}}  # type: ignore[operator]
