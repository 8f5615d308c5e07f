"""The block `plan` of a scenario: what `headway plan` is to find out."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from simulator.util.config import Config


class PlanConfig(Config):
    """Service levels, and what may be changed to keep them."""

    slo: list[str] = Field([], description="bounds, as p99_ttft_ms<=1000 or goodput>=0.95")
    vary: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        {}, description="by dotted key a list of values: every combination is a candidate"
    )
    fewest: dict[str, str] = Field(
        {}, description="{dotted.key: LOW..HIGH}: find the least whole number that holds the load"
    )
    cheapest: bool = Field(False, description="find the cheapest candidate that holds the load")
    replications: Annotated[int, Field(ge=1, le=1000)] = Field(
        3, description="runs of each place under other seeds, at least"
    )
    most_replications: Annotated[int, Field(ge=1, le=1000)] = Field(
        12, description="and at most, as long as the confidence interval cannot tell"
    )
    confidence: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.95, description="of the interval over the replications"
    )
    tolerance: Annotated[float, Field(gt=0, le=1)] = Field(
        0.02, description="of the largest rate, relative"
    )

    @model_validator(mode="after")
    def _check(self) -> "PlanConfig":
        if self.most_replications < self.replications:
            raise ValueError(
                f"most_replications: must be at least replications ({self.replications}), not "
                f"{self.most_replications}"
            )
        if self.fewest and self.cheapest:
            raise ValueError("cheapest: goes without fewest")
        if len(self.fewest) > 1:
            raise ValueError("fewest: one key; vary the others")
        return self
