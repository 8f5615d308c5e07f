"""Options of `headway serve` and `headway shadow` that are handed on as they are."""

from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any, Self

from cyclopts import Parameter

from headway.cli.options import Port, between, silent
from simulator.util.errors import HeadwayError

OBEYED = "--served-model-name", "--api-key", "--enable-auto-tool-choice", "--tool-call-parser"
"""Options of a server's command that are `serve`'s, too."""


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
        list[str] | None,
        silent("the model's names to clients [default: the scenario's]"),
        Parameter(consume_multiple=True),
    ] = None
    api_key: Annotated[
        list[str] | None,
        silent("key that clients must give (repeatable) [default: VLLM_API_KEY, or none]"),
        Parameter(consume_multiple=True),
    ] = None
    startup_delay: Annotated[
        float,
        Parameter(help="simulated seconds until replicas are up; /health returns 503 before"),
        between(0, 1_000_000),
    ] = 0.0
    admin: Annotated[bool, silent("accept POST /admin/..., to slow, hang or fail replicas")] = False
    kv_events_config: Annotated[
        str | None, silent("vLLM's JSON: publish prefix cache events over ZMQ [default: none]")
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        silent('JSON: sites whose pages may ask, as browsers name them; or ["*"]', json_list=True),
    ] = None

    parses_tools: Annotated[bool, Parameter(parse=False)] = True
    """Whether a vLLM that is launched so takes tools; without a command all are taken."""

    def check(self) -> None:
        """Raise HeadwayError for an empty name or key, and for what is no origin of pages."""
        for field in ("served_model_name", "api_key"):  # no key leaves the server open
            values = getattr(self, field)
            if values is not None and not all(map(str.strip, values or [""])):
                raise HeadwayError(f"--{field.replace('_', '-')}: needs a value, such as my-own")
        for one in self.allowed_origins or ():
            if one != "*" and "://" not in one:
                raise HeadwayError(f"--allowed-origins: {one[:60]}: is not like http://host:3000")

    def with_command(self, command: str) -> Self:
        """Take what clients see from a server's command, where no option says it."""
        from simulator.launch.options import read_options
        from simulator.launch.words import find_command

        found = find_command(command)
        said = {one.row.field: one.value for one in read_options(found)[1]}
        given: dict[str, Any] = {
            field: getattr(self, field) or str(said.get(field) or "").split()
            for field in ("served_model_name", "api_key")
        }
        auto, parser = said.get("enable_auto_tool_choice"), said.get("tool_call_parser")
        if auto and not parser:
            raise HeadwayError("--command: --enable-auto-tool-choice requires --tool-call-parser")
        given["parses_tools"] = found.engine != "vllm" or bool(auto)
        return replace(self, **given)


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
            raise HeadwayError(
                f"--window {self.window:g}: must be --interval, {self.interval:g} s, or more"
            )


DEFAULT_SERVE_OPTIONS, DEFAULT_WATCHED = ServeOptions(), Watched()
