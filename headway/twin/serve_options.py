"""The options of `headway serve` that say how a scenario is served."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from headway.cli.options import silent
from simulator.util.errors import HeadwayError


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Addresses, speed, names, and what else is there beside the answers."""

    host: Annotated[str, Parameter(help="address to listen at")] = "127.0.0.1"
    port: Annotated[int, Parameter(help="port to listen at; 0: one that is free")] = 8000
    speed: Annotated[float, Parameter(help="simulated seconds in a second")] = 1.0
    served_model_name: Annotated[
        str | None, silent("the model's name to clients [default: the scenario's]")
    ] = None
    startup_delay: Annotated[
        float, Parameter(help="simulated s until replicas are up; until then /health says 503")
    ] = 0.0
    admin: Annotated[bool, silent("POST /admin/...: make replicas slow, hang or fail")] = False
    kv_events_config: Annotated[
        str | None, silent("vLLM's JSON: publish prefix cache events over ZMQ [default: do not]")
    ] = None
    allowed_origins: Annotated[
        str, Parameter(help='JSON: sites whose pages may ask, as a browser names them; or ["*"]')
    ] = "[]"

    def check(self) -> None:
        """Raise HeadwayError for a number out of its range, or an empty name."""
        for name, value, least, most in (
            ("port", self.port, 0, 65535),
            ("speed", self.speed, 0.001, 1000),
            ("startup-delay", self.startup_delay, 0, 1_000_000),
        ):
            if not least <= value <= most:
                raise HeadwayError(f"--{name}: {value} is not between {least:g} and {most:,}")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise HeadwayError("--served-model-name: is empty")


DEFAULT_SERVE_OPTIONS = ServeOptions()
