"""The addresses under /admin: faults of servers, brought about on purpose. Off unless asked for."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headway.twin.api.bodies import BadRequestError, parse_json, read_types
from headway.twin.api.refusals import Route, web
from headway.twin.fault_injection import SLOWEST, FailureRates, FaultInjector, Rates
from headway.twin.live_engine import LiveEngine
from simulator.util.errors import HeadwayError

LONGEST_WAIT = 1e6  # s
RUNNING = ("up", "draining")
ALIVE = (*RUNNING, "starting")


class Kill(BaseModel):
    """What is done to a replica, or to all."""

    model_config = ConfigDict(extra="forbid", strict=True)

    replica: int | None = None


class Slow(Kill):
    """Its steps take so many times as long."""

    factor: float = Field(gt=0, le=SLOWEST)


class Hang(Kill):
    """Its next step takes so much longer."""

    seconds: float | None = Field(None, ge=0, le=LONGEST_WAIT)


class Restart(Kill):
    """It comes back so much later, s."""

    delay: float = Field(0.0, ge=0, le=LONGEST_WAIT)


class Admin:
    """Does to an engine's replicas what clients ask for."""

    def __init__(self, engine: LiveEngine, failures: FailureRates) -> None:
        self.engine, self.failures = engine, failures
        self.faults = FaultInjector(engine)

    def routes(self) -> list[Route]:
        """Return the addresses: what each does, and to replicas in which states."""
        faults, to = self.faults, self._to_replicas
        return [
            Route("GET", "/admin", self.tell),
            self._route("/admin/failures", Rates, self.failures.set),
            self._route("/admin/slow", Slow, partial(to, faults.slow, ALIVE)),
            self._route("/admin/hang", Hang, partial(to, faults.hang, ALIVE)),
            self._route("/admin/kill", Kill, partial(to, faults.kill, RUNNING)),
            self._route("/admin/restart", Restart, partial(to, faults.restart, ("up", "down"))),
        ]

    async def tell(self, _: web.Request) -> web.Response:
        """Tell how all is."""
        self.engine.clock.advance()
        found = {"replicas": self.faults.states(), "failures": self.failures.rates}
        return web.json_response(found)

    def _route(self, path: str, kind: type[BaseModel], act: Callable[[Any], None]) -> Route:
        async def answer(request: web.Request) -> web.Response:
            """Read a body, act on it, and tell how all is then."""
            text = await request.read()
            body = read_types(parse_json(text) if text else {}, kind)
            self.engine.clock.advance()
            try:
                act(body)
            except HeadwayError as error:
                raise BadRequestError(str(error)) from None
            return await self.tell(request)

        return Route("POST", path, answer, kind)

    def _to_replicas(self, act: Callable[..., None], states: tuple[str, ...], body: Kill) -> None:
        """Do something to the replica that is meant, or to all that are in such a state."""
        now, chosen, allowed = self.faults.life.states, body.replica, " or ".join(states)
        found = [number for number in range(len(now)) if now[number] in states]
        if chosen is not None:
            if not 0 <= chosen < len(now):
                raise BadRequestError(f"replica: there is no {chosen}; the last is {len(now) - 1}")
            if chosen not in found:
                raise BadRequestError(f"replica: {chosen} is not {allowed}: it is {now[chosen]}")
            found = [chosen]
        if not found:
            raise BadRequestError(f"replica: none is {allowed}")
        for number in found:
            act(number, **body.model_dump(exclude={"replica"}))
