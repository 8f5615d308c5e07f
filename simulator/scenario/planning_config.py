"""The blocks `sweep`, `plan` and `rollouts`: what `headway sweep`, `plan` and `rollouts` run."""

from math import exp, inf, log
from typing import Annotated, Any, Literal

import numpy as np

from simulator.util.config import Config, PositiveFinite, PositiveShare
from simulator.util.errors import MappingError
from simulator.util.from_mapping import Field, check_least, raise_if

Values = Annotated[list[Any], Field(min_length=1)]


class SpreadConfig(Config):
    """Where the random values of a key come from."""

    low: int | float | None = Field(
        None, description="least value; two whole numbers draw whole numbers"
    )
    high: int | float | None = Field(None, description="greatest value")
    log: bool = Field(False, description="spread evenly over the logarithm")
    choice: Values | None = Field(None, description="or one of these")

    def _check(self) -> None:
        if self.choice is not None:
            if self.low is not None or self.high is not None or self.log:
                raise MappingError("choice", "cannot be used with low, high and log")
        elif self.low is None or self.high is None or self.low > self.high:
            raise MappingError("", "needs low and high with low <= high, or choice")
        elif self.log and self.low <= 0:
            raise MappingError("low", f"must be more than 0 for log, not {self.low}")

    def draw(self, rng: "np.random.Generator") -> object:
        """Draw one value."""
        if self.choice is not None:
            return self.choice[int(rng.integers(len(self.choice)))]
        low, high = self.low, self.high
        assert low is not None
        assert high is not None
        whole = isinstance(low, int) and isinstance(high, int)
        if self.log:
            value = min(max(exp(rng.uniform(log(low), log(high))), low), high)
        elif whole:
            return int(rng.integers(int(low), int(high), endpoint=True))
        else:
            value = rng.uniform(low, high)
        return round(value) if whole else float(f"{value:.6g}")


class RandomConfig(Config):
    """Points drawn at random, reproducibly by the scenario's seed."""

    samples: Annotated[int, Field(ge=1, le=1_000_000)] = Field(description="points")
    keys: Annotated[dict[str, SpreadConfig], Field(min_length=1)] = Field(
        description="{dotted.key: {low, high, log} or {choice: [...]}}"
    )


class SweepConfig(Config):
    """Points to run; where several of these are given, every combination of them."""

    grid: dict[str, Values] = Field({}, description="{dotted.key: [values]}: all combinations")
    points: list[dict[str, Any]] = Field([], description="a list of {dotted.key: value, ...}")
    random: RandomConfig | None = Field(None, description="points drawn at random")


class RolloutsConfig(Config):
    """Steps of reinforcement learning: `workload.num_prompts` groups of `workload.n` samples."""

    steps: Annotated[int, Field(ge=1, le=100_000)] = Field(10, description="steps to simulate")
    oversampling: Annotated[float, Field(ge=0, le=10)] = Field(
        0.0, description="share of groups that a step begins but need not end"
    )
    partial: bool = Field(
        False, description="what a step cuts off goes on in the next; false: it is lost"
    )
    train_time: Annotated[float, Field(ge=0, lt=inf)] = Field(
        0.0, description="s between two steps"
    )


class PlanConfig(Config):
    """Service levels, and what may be changed to keep them."""

    slo: list[str] = Field([], description="bounds, as p99_ttft_ms<=1000 or goodput>=0.95")
    vary: dict[str, Values] = Field(
        {}, description="{dotted.key: [values]}: candidates are all combinations"
    )
    fewest: dict[str, str] = Field(
        {}, description="{dotted.key: LOW..HIGH}: find the smallest value that keeps the levels"
    )
    cheapest: bool = Field(False, description="find the cheapest combination that keeps the levels")
    objective: Literal["cost", "energy"] = Field(
        "cost", description="the lowest cost, else the fewest GPUs; or the fewest watts"
    )
    replications: Annotated[int, Field(ge=1, le=1000)] = Field(
        3, description="runs where one cannot decide"
    )
    most_replications: Annotated[int, Field(ge=1, le=1000)] = Field(
        96, description="most runs, doubled up to this number"
    )
    confidence: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.95, description="of the largest load; for `fewest`, `cheapest` a tenth of its risk, 0.995"
    )
    tolerance: PositiveShare = Field(0.05, description="tolerance of the largest rate, a share")
    min_duration: PositiveFinite = Field(
        600.0, description="least s of load in each run that decides"
    )
    min_e2els: Annotated[float, Field(ge=0)] = Field(
        20.0, description="least length of such a run in P99 E2ELs"
    )
    max_duration: PositiveFinite = Field(2400.0, description="s in the longest run")
    window: PositiveFinite | None = Field(
        None, description="s of each stretch that must keep the bounds; null: the whole run"
    )

    def _check(self) -> None:
        runs = self.most_replications
        raise_if(
            check_least("max_duration", self.max_duration, self.min_duration, "min_duration"),
            check_least("most_replications", runs, self.replications, "replications"),
            (self.cheapest and bool(self.fewest), "cheapest", "cannot be used with fewest"),
            (len(self.fewest) > 1, "fewest", "one key; vary the others"),
        )
