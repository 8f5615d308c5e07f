"""The block `cluster` of a scenario: several replicas of the engine behind a router."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from simulator.scenario.config import Block
from simulator.scenario.engines import named

if TYPE_CHECKING:
    from simulator.scenario.engine_config import EngineBlock
    from simulator.scenario.scenario import GpuBlock

MOST_REPLICAS = 100_000


def _router(value: object) -> object:
    """Let through a name, a mapping with the name as `router`, or, where it may be, null."""
    if isinstance(value, dict):
        if not isinstance(value.get("router"), str):
            raise ValueError(": the mapping needs a key `router`: a name or module:function")
    elif not isinstance(value, str):
        raise ValueError(f": must be a name or a mapping with a key `router`, not {value!r}")
    return value


class GroupBlock(Block):
    """Replicas that are alike; what is left out is as the scenario has it."""

    replicas: Annotated[int, Field(ge=0, le=MOST_REPLICAS)] = Field(
        1, description="servers, each on `gpu.count` GPUs of its own"
    )
    gpu: "GpuBlock | None" = Field(None, description="as `gpu`; null: the scenario's")
    engine: "EngineBlock | None" = Field(
        None, description="keys of `engine` that differ from the scenario's"
    )
    cost: dict[str, Any] | None = Field(
        None, description="as `cost`; null: the scenario's, or by the group's own GPU"
    )
    kv_role: Literal["kv_producer", "kv_consumer"] | None = Field(
        None,
        description="kv_producer: computes prompts, for kv_consumer to decode; every group has one "
        "or none; null: both at once",
    )
    dollars_per_hour: Annotated[float, Field(ge=0)] | None = Field(
        None, description="price of one replica; null: that of its GPUs in the table of hardware"
    )


class KvTransferBlock(Block):
    """How KV caches go from the replicas that prefill to those that decode."""

    bandwidth: Annotated[float, Field(gt=0, le=1_000_000)] = Field(
        50.0,
        description="GB/s (10^9 bytes) at which each GPU of a producer sends; 50 is a network card "
        "of 400 Gb/s for each",
    )
    latency: Annotated[float, Field(ge=0, le=1_000_000)] = Field(
        0.0, description="ms that a transfer takes beside its bytes"
    )
    router: Annotated[str | dict[str, Any] | None, BeforeValidator(_router)] = Field(
        None,
        description="to the consumers, as cluster.router, which is to the producers; null: "
        "the same",
    )


class AdmissionBlock(Block):
    """What the cluster refuses at its door."""

    max_outstanding: Annotated[int, Field(ge=1)] | None = Field(
        None, description="requests let in and not ended, at most, per open replica"
    )
    shed_from: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="share of max_outstanding from which on requests of priority 1 and more are "
        "refused",
    )
    rate: Annotated[float, Field(gt=0)] | None = Field(
        None, description="requests/s of one client, by a token bucket; null: no limit"
    )
    burst: Annotated[float, Field(ge=1)] = Field(10.0, description="size of that bucket, requests")


class ClientBlock(Block):
    """What clients do when they are refused or have to wait."""

    timeout: Annotated[float, Field(gt=0)] | None = Field(
        None, description="s from a try to its last token, then it is cancelled"
    )
    ttft_timeout: Annotated[float, Field(gt=0)] | None = Field(
        None, description="s from a try to its first token, then it is cancelled"
    )
    max_retries: Annotated[int, Field(ge=0, le=1000)] = Field(
        0, description="tries after the first that was refused or timed out"
    )
    backoff: Annotated[float, Field(ge=0)] = Field(1.0, description="s before the first retry")
    backoff_factor: Annotated[float, Field(ge=1)] = Field(
        2.0, description="by which each further wait is longer"
    )
    jitter: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of a wait that chance adds to it, at most"
    )


class OutageBlock(Block):
    """One failure of one replica."""

    replica: Annotated[int, Field(ge=0)] = Field(
        description="its number from 0 on, in the order of the groups; all its ranks fail"
    )
    start: Annotated[float, Field(ge=0)] = Field(description="s")
    duration: Annotated[float, Field(gt=0)] | None = Field(
        None, description="s until it is back; null: it stays away"
    )


class FailuresBlock(Block):
    """Failures by chance, by a list, or both."""

    mtbf: Annotated[float, Field(gt=0)] | None = Field(
        None, description="mean s that a replica is up until it fails, exponential"
    )
    mttr: Annotated[float, Field(gt=0)] = Field(
        300.0, description="mean s until it is back, exponential"
    )
    outages: list[OutageBlock] = Field([], description="a list of failures, see below")


class AutoscalingBlock(Block):
    """Replicas by need: one group grows and shrinks."""

    group: str | None = Field(None, description="which; null: the only one")
    metric: Literal["queue_depth", "kv_usage", "slo_attainment"] = Field(
        "queue_depth",
        description="waiting requests per replica; share of the KV cache in use; share of the "
        "requests ended since the last look that kept the scenario's goodput",
    )
    target: Annotated[float, Field(gt=0)] = Field(
        2.0, description="of the metric; the replicas are scaled by their quotient"
    )
    min_replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] = Field(1, description="at least")
    max_replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] = Field(8, description="at most")
    interval: Annotated[float, Field(gt=0)] = Field(15.0, description="s between two looks")
    cooldown: Annotated[float, Field(ge=0)] = Field(
        300.0, description="s after a change in which none are taken away"
    )
    startup_delay: Annotated[float, Field(ge=0)] = Field(
        120.0, description="s from the order of a replica, which is paid from then on, to its start"
    )

    @model_validator(mode="after")
    def _check(self) -> "AutoscalingBlock":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas: must be at most max_replicas ({self.max_replicas})")
        if self.metric != "queue_depth" and self.target >= 1:
            raise ValueError(f"target: must be less than 1 for {self.metric}, a share")
        return self


class ClusterBlock(Block):
    """Replicas and their router."""

    replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] | None = Field(
        None, description="servers that are all as the scenario says; null: 1, or see groups"
    )
    router: Annotated[str | dict[str, Any], BeforeValidator(_router)] = Field(
        "round_robin",
        description="a name listed below, or package.module:function (or Class); with arguments: "
        "{router: name, argument: value}",
    )
    groups: dict[str, GroupBlock] = Field(
        {}, description="in place of replicas: groups of different ones, by names of your own"
    )

    kv_transfer: KvTransferBlock | None = Field(
        None, description="with groups that have a kv_role: the links between them"
    )
    admission: AdmissionBlock | None = Field(None, description="null: everybody is let in")
    client: ClientBlock | None = Field(None, description="null: clients wait for ever")
    failures: FailuresBlock | None = Field(None, description="null: no replica fails")
    autoscaling: AutoscalingBlock | None = Field(None, description="null: always all replicas")

    @model_validator(mode="after")
    def _check(self) -> "ClusterBlock":
        if self.groups and self.replicas is not None:
            raise ValueError("replicas: beside groups, each group gives its own replicas")
        if self.groups and not any(group.replicas for group in self.groups.values()):
            raise ValueError("groups: there is not one replica")
        scaling = self.autoscaling
        if scaling is not None and scaling.group is None and len(self.kinds) > 1:
            raise ValueError(f"autoscaling.group: name one of {', '.join(self.kinds)}")
        if scaling is not None and scaling.group not in (None, *self.kinds):
            raise ValueError(f"autoscaling.group: there is {', '.join(self.kinds)}")
        return self

    @property
    def tries_again(self) -> bool:
        """Whether a request may be sent to replicas more than once."""
        patient = self.client is not None and self.client.max_retries > 0
        return patient or self.failures is not None

    def most(self, name: str) -> int:
        """Count the replicas that a group may come to have."""
        if self.autoscaling is not None and self.autoscaling.group in (None, name):
            return max(self.autoscaling.max_replicas, self.kinds[name].replicas)
        return self.kinds[name].replicas

    @property
    def kinds(self) -> dict[str, GroupBlock]:
        """Give the groups; where there are none, the one that `replicas` is short for."""
        return self.groups or {"all": GroupBlock(replicas=self.replicas or 1)}


def fill_in(raw: dict[str, Any]) -> dict[str, Any]:
    """Complete each group's engine by the scenario's, before anything is checked.

    A data-parallel server alone is a cluster of one.
    """
    engine = raw.get("engine")
    ranks = engine.get("data_parallel_size") if isinstance(engine, dict) else None
    if raw.get("cluster") is None and isinstance(ranks, int) and ranks > 1:
        raw = raw | {"cluster": {}}
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
