"""Options of `headway serve` and `headway shadow` that are handed on as they are."""

from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Self

from cyclopts import Parameter

from headway.cli.options import Port, between, silent
from simulator.util.errors import HeadwayError


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Addresses, speed, names, and what else is there beside the answers."""

    host: Annotated[str, Parameter(help="address to listen at")] = "127.0.0.1"
    port: Port = 8000
    speed: Annotated[
        float, Parameter(help="simulated seconds per second of wall time"), between(0.001, 1000)
    ] = 1.0
    served_model_name: Annotated[
        str | None, silent("the model's name to clients [default: the scenario's]")
    ] = None
    api_key: Annotated[
        list[str] | None,
        silent("a key that clients must give (repeated: any of them) [default: none]"),
    ] = None
    startup_delay: Annotated[
        float,
        Parameter(help="simulated s until replicas are up; /health returns 503 before"),
        between(0, 1_000_000),
    ] = 0.0
    admin: Annotated[bool, silent("POST /admin/...: make replicas slow, hang or fail")] = False
    kv_events_config: Annotated[
        str | None, silent("vLLM's JSON: publish prefix cache events over ZMQ [default: none]")
    ] = None
    allowed_origins: Annotated[
        str, Parameter(help='JSON: sites whose pages may ask, as a browser names them; or ["*"]')
    ] = "[]"

    def check(self) -> None:
        """Raise HeadwayError for an empty name."""
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise HeadwayError("--served-model-name: is empty")

    def with_command(self, command: str) -> Self:
        """Take what clients see from a server's command, where no option says it."""
        from simulator.launch.options import read_options
        from simulator.launch.words import find_command

        said = {one.row.field: one.value for one in read_options(find_command(command))[1]}
        names, keys = (
            str(said.get(field) or "").split() for field in ("served_model_name", "api_key")
        )
        return replace(
            self,
            served_model_name=self.served_model_name or next(iter(names), None),
            api_key=self.api_key or keys,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Watched:
    """How a server is watched; s, and the relative difference that is none."""

    duration: Annotated[float, silent("time to watch, s [default: until Ctrl-C]"), between(0)] = inf
    interval: Annotated[float, Parameter(help="time between two polls, s"), between(0.01)] = 1.0
    window: Annotated[float, Parameter(help="length of a window that is compared, s")] = 10.0
    tolerance: Annotated[
        float, Parameter(help="largest relative difference that passes"), between(0)
    ] = 0.2

    def __post_init__(self) -> None:
        """Raise HeadwayError for a window without a poll."""
        if not self.window >= self.interval:
            raise HeadwayError(f"--window: {self.window} is not {self.interval:g} or more")


DEFAULT_SERVE_OPTIONS, DEFAULT_WATCHED = ServeOptions(), Watched()
