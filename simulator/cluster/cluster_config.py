"""A scenario's `cluster`: several replicas of the engine behind a router."""

from math import ceil
from typing import Annotated, Any, Literal

from simulator.cluster.config import (
    MOST_REPLICAS,
    AdmissionConfig,
    AutoscalingConfig,
    ClientConfig,
    EcTransferConfig,
    FailuresConfig,
    KvTransferConfig,
    RouterSpec,
)
from simulator.core.engine_config import EngineConfig, GpuConfig, HostConfig
from simulator.util.config import Config, Named, NonNegativeFloat
from simulator.util.errors import MappingError
from simulator.util.from_mapping import Field


class GroupConfig(Config):
    """Replicas that are alike; what is left out is as the scenario has it."""

    replicas: Annotated[int, Field(ge=0, le=MOST_REPLICAS)] = Field(
        1, description="servers, each on `gpu.count` GPUs of its own"
    )
    model: str | None = Field(None, description="null, here and below: the scenario's")
    gpu: GpuConfig | None = Field(None, description="its own GPU")
    engine: EngineConfig | None = Field(None, description="keys that differ from the scenario's")
    cost: dict[str, Any] | None = Field(None, description="null: the scenario's, or by its GPU")
    host: HostConfig | None = Field(None, description="null: the scenario's, or by the engine")
    kv_role: Literal["kv_producer", "kv_consumer"] | None = Field(
        None, description="kv_producer: computes prompts; kv_consumer: decodes"
    )
    ec_role: Literal["ec_producer", "ec_consumer"] | None = Field(
        None, description="ec_producer: encodes images; ec_consumer: takes them"
    )
    autoscaling: AutoscalingConfig | None = Field(
        None, description="as `cluster.autoscaling`, of this group alone; null: that"
    )
    dollars_per_hour: NonNegativeFloat | None = Field(
        None, description="$/h of a replica; null: its GPUs' list price"
    )


class ClusterConfig(Config):
    """Replicas and their router."""

    replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] | None = Field(
        None,
        description="equal servers, or all that kv_transfer.ratio shares out; null: 1, or by "
        "groups",
    )
    router: RouterSpec = Field(
        Named("round_robin"),
        description="a name, package.module:function or Class, or {router: name, argument: value}",
    )
    pods: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] | None = Field(
        None,
        description="number of equal parts of the fleet; `router` chooses one, and sees no replica",
    )
    pod_router: RouterSpec | None = Field(
        None, description="router in a pod; null: least_outstanding"
    )
    groups: dict[str, GroupConfig] = Field(
        {}, description="different servers, by name, in place of replicas"
    )

    kv_transfer: KvTransferConfig | None = Field(
        None, description="the links between groups that have a kv_role"
    )
    ec_transfer: EcTransferConfig | None = Field(None, description="the links of ec_producers")
    admission: AdmissionConfig | None = Field(
        None, description="limits on requests; null: no limit"
    )
    client: ClientConfig | None = Field(
        None, description="clients that give up and try again; null: they wait for ever"
    )
    failures: FailuresConfig | None = Field(None, description="replicas that fail; null: none")
    autoscaling: AutoscalingConfig | None = Field(
        None, description="replicas that come and go; null: always all"
    )
    max_gpu_budget: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="most GPUs of all groups, which then take replicas from one another; null: no "
        "limit",
    )
    switch_delay: NonNegativeFloat | None = Field(
        None, description="s until a replica on such GPUs serves; null: its group's startup_delay"
    )

    def _check(self) -> None:
        if self.kv_transfer is not None and self.kv_transfer.ratio is not None:
            self._share_out(self.kv_transfer)
        elif self.groups and self.replicas is not None:
            raise MappingError("replicas", "beside groups, each group gives its own replicas")
        if self.groups and not any(group.replicas for group in self.groups.values()):
            raise MappingError("groups", "there is not one replica")
        self._check_pods()
        self._check_models()
        self._check_scaling()

    def _share_out(self, links: KvTransferConfig) -> None:
        """Set how many replicas each group has."""
        roles: dict[str | None, str] = {g.kv_role: name for name, g in self.groups.items()}
        if len(self.groups) != 2 or set(roles) != {"kv_producer", "kv_consumer"}:
            what = "needs one group of kv_role kv_producer and one of kv_consumer"
            raise MappingError("kv_transfer.ratio", what)
        if self.replicas is None or self.replicas < 2:
            raise MappingError("replicas", "kv_transfer.ratio shares them out: 2 or more")
        for role, count in links.shared_out(self.replicas).items():
            name = roles[role]
            if "replicas" in self.groups[name].model_fields_set:
                raise MappingError(
                    f"groups.{name}.replicas", "cannot be used with kv_transfer.ratio"
                )
            self.groups[name] = self.groups[name].model_copy(update={"replicas": count})

    def _check_scaling(self) -> None:
        scaling = self.autoscaling
        if scaling is not None and scaling.group is None and len(self.replica_groups) > 1:
            raise MappingError("autoscaling.group", f"name one of {', '.join(self.replica_groups)}")
        if scaling is not None and scaling.group not in (None, *self.replica_groups):
            raise MappingError("autoscaling.group", f"there is {', '.join(self.replica_groups)}")
        for name, group in self.replica_groups.items():
            if group.autoscaling is not None:
                if group.autoscaling.group is not None:
                    raise MappingError(f"groups.{name}.autoscaling.group", "it is this group")
                if scaling is not None and scaling.group in (None, name):
                    raise MappingError(
                        f"groups.{name}.autoscaling", "cannot be used with cluster.autoscaling"
                    )
            if group.replicas > (most := self.max_replicas(name)):
                key = f"groups.{name}.replicas" if self.groups else "replicas"
                what = f"must be at most autoscaling.max_replicas ({most}): one begins with them"
                raise MappingError(key, what)
        if self.max_gpu_budget is not None and len(self.scalers) < 2:
            raise MappingError("max_gpu_budget", "needs two groups or more that have autoscaling")
        if self.switch_delay is not None and self.max_gpu_budget is None:
            raise MappingError("switch_delay", "needs max_gpu_budget")

    def _check_pods(self) -> None:
        if self.pods is None:
            if self.pod_router is not None:
                raise MappingError("pod_router", "needs pods")
            return
        from simulator.cluster.routers import STATELESS_ROUTERS  # only for a fleet with pods

        if self.router_name not in STATELESS_ROUTERS:
            known = ", ".join(STATELESS_ROUTERS)
            raise MappingError("router", f"must be one of these if there are pods: {known}")
        if self.kv_transfer is not None or any(g.kv_role for g in self.replica_groups.values()):
            raise MappingError("pods", "cannot be used with kv_role: consumers would be shared")
        for name, group in self.replica_groups.items():
            if group.replicas % self.pods:
                key = f"groups.{name}.replicas" if self.groups else "replicas"
                raise MappingError(key, f"must be a multiple of pods ({self.pods})")

    def _check_models(self) -> None:
        """Refuse what goes with one model alone."""
        if not any(group.model for group in self.groups.values()):
            return
        for key in ("pods", "kv_transfer", "failures"):
            if getattr(self, key) is not None:
                what = "needs one model, without groups that have their own"
                raise MappingError(key, what)

    @property
    def pod_numbers(self) -> list[int]:
        """The pod of each replica that there may be; without pods each is one by itself."""
        counts = [self.max_replicas(name) for name in self.replica_groups]
        if self.pods is None:
            return [*range(sum(counts))]
        return [number % self.pods for count in counts for number in range(count)]

    @property
    def encoders(self) -> list[str]:
        """The groups that encode images for the others."""
        return [name for name, group in self.groups.items() if group.ec_role == "ec_producer"]

    @property
    def may_retry(self) -> bool:
        """Whether a request may be sent to replicas more than once."""
        patient = self.client is not None and self.client.max_retries > 0
        return patient or self.failures is not None

    @property
    def is_shared_out(self) -> bool:
        """Whether `replicas` counts those of both roles."""
        return bool(self.groups) and self.replicas is not None

    def replicas_of(self, name: str) -> tuple[str, int]:
        """Return the key that counts a group's replicas, and its number."""
        if self.is_shared_out or not self.groups:
            return "cluster.replicas", self.replicas or 1
        return f"cluster.groups.{name}.replicas", self.groups[name].replicas

    def key_of(self, name: str, key: str) -> str:
        """Return the dotted key of a group for one of a replica's scenario."""
        return f"cluster.groups.{name}.{key}" if name in self.groups else key

    def in_pods(self, replicas: float) -> int:
        """Return the least number of replicas that is no less and that the pods share evenly."""
        each = self.pods or 1
        return each * ceil(replicas / each)

    @property
    def scalers(self) -> dict[str, AutoscalingConfig]:
        """What makes the replicas of a group come and go, by the names of those that do."""
        found = {name: group.autoscaling for name, group in self.groups.items()}
        if self.autoscaling is not None:
            found[self.autoscaling.group or next(iter(self.replica_groups))] = self.autoscaling
        return {name: block for name, block in found.items() if block is not None}

    def scaler_key(self, name: str) -> str:
        """Name the block that scales a group."""
        own = name in self.groups and self.groups[name].autoscaling is not None
        return f"cluster.groups.{name}.autoscaling" if own else "cluster.autoscaling"

    def max_replicas(self, name: str) -> int:
        """Count the replicas that a group may come to have."""
        scaler = self.scalers.get(name)
        return self.replica_groups[name].replicas if scaler is None else scaler.max_replicas

    @property
    def most_replicas(self) -> int:
        """Count the replicas that there may come to be at once, in all groups."""
        return sum(map(self.max_replicas, self.replica_groups))

    @property
    def routers(self) -> dict[str, Named]:
        """The routers that there are, by their keys in the scenario."""
        kv, within = self.kv_transfer, self.pod_router or Named("least_outstanding")
        ec = self.ec_transfer
        found = {
            "cluster.router": self.router,
            "cluster.kv_transfer.router": None if kv is None else kv.router,
            "cluster.ec_transfer.router": None if ec is None else ec.router,
            "cluster.pod_router": None if self.pods is None else within,
        }
        return {key: spec for key, spec in found.items() if spec is not None}

    @property
    def router_name(self) -> str:
        """Name of `router`, which may have arguments."""
        return str(self.router.name)

    @property
    def replica_groups(self) -> dict[str, GroupConfig]:
        """The groups; where there are none, the one that `replicas` is short for."""
        return self.groups or {"all": GroupConfig(replicas=self.replicas or 1)}
