"""What a scenario's `cluster` says of each part of a fleet, all but the replicas themselves."""

from typing import Annotated, Literal

from simulator.util.config import (
    Amount,
    Config,
    Named,
    NonNegativeFloat,
    PositiveFloat,
    PositiveShare,
    Share,
    read_named,
)
from simulator.util.errors import MappingError
from simulator.util.from_mapping import Field, check_least, raise_if

MOST_REPLICAS = 100_000

RouterSpec = Annotated[Named, read_named("router", "module:function")]

LEAST_S = 0.001  # s, of what comes again and again: less would hardly move the clock


class KvTransferConfig(Config):
    """How KV caches go from the replicas that prefill to those that decode."""

    bandwidth: Annotated[float, Field(ge=1e-6, le=1_000_000)] = Field(
        50.0,
        description="GB/s of each GPU of a producer; 50: a card of 400 Gb/s each",
    )
    latency: Amount = Field(0.0, description="ms of each transfer besides its bytes")
    layerwise: bool = Field(
        False,
        description="send each layer's KV as it is computed; false: all at the end",
    )
    max_local_prefill_length: Annotated[int, Field(ge=0)] = Field(
        0,
        description="a consumer computes a prompt itself that lacks at most this many tokens in "
        "its prefix cache",
    )
    ratio: Annotated[str, Field(pattern=r"^[1-9]\d{0,4}P[1-9]\d{0,4}D$")] | None = Field(
        None,
        description="as 1P3D: shares out cluster.replicas among producers and consumers",
    )
    router: RouterSpec | None = Field(
        None,
        description="to the consumers; null: as cluster.router",
    )

    def shared_out(self, replicas: int) -> dict[str, int]:
        """Return how many of so many replicas have each role, at least one each."""
        assert self.ratio is not None
        x, y = map(int, self.ratio[:-1].split("P"))
        producers = min(max(round(replicas * x / (x + y)), 1), replicas - 1)
        return {"kv_producer": producers, "kv_consumer": replicas - producers}


class EcTransferConfig(Config):
    """How encoder outputs go from the replicas that encode images to those that take them."""

    bandwidth: Annotated[float, Field(ge=1e-6, le=1_000_000)] = Field(
        50.0, description="GB/s at which an encoder sends"
    )
    latency: Amount = Field(0.0, description="ms of each output besides its bytes")
    router: RouterSpec = Field(
        Named("round_robin"),
        description="the router of images to the encoders",
    )


class AdmissionConfig(Config):
    """What the cluster refuses at its door."""

    max_outstanding: Annotated[int, Field(ge=1)] | None = Field(
        None, description="most unfinished requests per open replica"
    )
    shed_from: PositiveShare = Field(
        1.0,
        description="share of max_outstanding from which priorities of 1 or more are refused",
    )
    rate: PositiveFloat | None = Field(
        None, description="requests/s of one client, by a token bucket; null: no limit"
    )
    burst: Annotated[float, Field(ge=1)] = Field(10.0, description="size of that bucket, requests")


class ClientConfig(Config):
    """What clients do when they are refused or have to wait."""

    timeout: PositiveFloat | None = Field(
        None, description="s from sending to the last token until a client cancels"
    )
    ttft_timeout: PositiveFloat | None = Field(None, description="longest s to the first token")
    max_retries: Annotated[int, Field(ge=0, le=1000)] = Field(
        0, description="tries after a refusal or timeout"
    )
    backoff: NonNegativeFloat = Field(1.0, description="s before the first retry")
    backoff_factor: Annotated[float, Field(ge=1)] = Field(
        2.0, description="factor of each wait to the next"
    )
    jitter: Share = Field(0.0, description="largest random share added to a wait")


class OutageConfig(Config):
    """One failure of one replica."""

    replica: Annotated[int, Field(ge=0)] = Field(
        description="from 0, in the order of groups; all its ranks fail"
    )
    start: NonNegativeFloat = Field(description="s from the start of the run")
    duration: PositiveFloat | None = Field(
        None, description="s until it is back; null: it stays away"
    )


class FailuresConfig(Config):
    """Failures by chance, by a list, or both."""

    mtbf: float | None = Field(
        None, ge=LEAST_S, description="mean s until a replica fails, exponential"
    )
    mttr: float = Field(300.0, ge=LEAST_S, description="mean s until it is back, exponential")
    outages: list[OutageConfig] = Field([], description="a list of failures, see below")


class AutoscalingConfig(Config):
    """Replicas by need: one group grows and shrinks."""

    group: str | None = Field(None, description="the group to scale; null: the only one")
    metric: Literal["queue_depth", "kv_usage", "slo_attainment"] = Field(
        "queue_depth",
        description="queue_depth: waiting requests per replica; kv_usage: share of KV cache; "
        "slo_attainment: share of requests since the last look that kept `goodput`",
    )
    target: PositiveFloat = Field(2.0, description="replicas are scaled by metric / target")
    min_replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] = Field(
        1, description="fewest replicas"
    )
    max_replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] = Field(
        8, description="most replicas"
    )
    interval: float = Field(15.0, ge=LEAST_S, description="s between two looks")
    cooldown: NonNegativeFloat = Field(300.0, description="s after a change until replicas go")
    startup_delay: NonNegativeFloat = Field(
        120.0,
        description="s from a replica's order to its start, which are paid for",
    )

    def _check(self) -> None:
        raise_if(check_least("max_replicas", self.max_replicas, self.min_replicas, "min_replicas"))
        if self.metric != "queue_depth" and self.target >= 1:
            raise MappingError("target", f"must be less than 1 for {self.metric}, a share")
