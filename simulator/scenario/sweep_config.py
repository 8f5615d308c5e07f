"""The block `sweep` of a scenario: which points `headway sweep` runs."""

from math import exp, log
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from simulator.util.config import Config

if TYPE_CHECKING:
    import numpy as np

Values = Annotated[list[Any], Field(min_length=1)]


class SpreadConfig(Config):
    """Where the random values of a key come from."""

    low: int | float | None = Field(None, description="least value; whole numbers draw whole ones")
    high: int | float | None = Field(None, description="greatest value")
    log: bool = Field(False, description="spread evenly over the logarithm")
    choice: Values | None = Field(None, description="or one of these")

    @model_validator(mode="after")
    def _check(self) -> "SpreadConfig":
        if self.choice is not None:
            if self.low is not None or self.high is not None or self.log:
                raise ValueError("choice: goes without low, high and log")
        elif self.low is None or self.high is None or self.low > self.high:
            raise ValueError(": needs low and high with low <= high, or choice")
        elif self.log and self.low <= 0:
            raise ValueError(f"low: must be more than 0 for log, not {self.low}")
        return self

    def draw(self, rng: "np.random.Generator") -> object:
        """Draw one value."""
        if self.choice is not None:
            return self.choice[int(rng.integers(len(self.choice)))]
        low, high = self.low, self.high
        assert low is not None
        assert high is not None
        if self.log:
            value = exp(rng.uniform(log(low), log(high)))
            value = min(max(value, low), high)
        elif isinstance(low, int) and isinstance(high, int):
            return int(rng.integers(low, high, endpoint=True))
        else:
            return float(f"{rng.uniform(low, high):.6g}")
        return (
            round(value)
            if isinstance(low, int) and isinstance(high, int)
            else float(f"{value:.6g}")
        )


class RandomConfig(Config):
    """Points drawn at random, reproducibly by the scenario's seed."""

    samples: Annotated[int, Field(ge=1, le=1_000_000)] = Field(description="points")
    keys: Annotated[dict[str, SpreadConfig], Field(min_length=1)] = Field(
        description="by dotted key: {low, high, log} or {choice: [...]}"
    )


class SweepConfig(Config):
    """Points to run; where several of these are given, every combination of them."""

    grid: dict[str, Values] = Field({}, description="by dotted key a list: all combinations")
    points: list[dict[str, Any]] = Field([], description="a list of {dotted.key: value, ...}")
    random: RandomConfig | None = Field(None, description="points drawn at random")
