"""`workload.frontend`: what lies between a client and the scheduler."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from simulator.util.config import Config
from simulator.workload.workload import FRONTENDS, Frontend

Time = Annotated[float, Field(ge=0, le=1e9)]


class FrontendConfig(Config):
    """Network, HTTP and tokenizer; a name stands for one that was measured."""

    latency: Time = Field(0.0, description="ms that each request takes, whatever others do")
    per_request: Time = Field(0.0, description="ms that each holds up those behind it")
    per_token: Time = Field(0.0, description="likewise for each token of its prompt, ms")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, raw: Any) -> Any:
        if not isinstance(raw, str):
            return raw
        if raw not in FRONTENDS:
            raise ValueError(
                f": no frontend {raw!r}; there are {', '.join(FRONTENDS)}, or give latency, "
                "per_request and per_token"
            )
        found = FRONTENDS[raw]
        return {key: getattr(found, key) * 1e3 for key in cls.model_fields}

    def make(self) -> Frontend:
        """Give the frontend, in seconds."""
        return Frontend(self.latency / 1e3, self.per_request / 1e3, self.per_token / 1e3)
