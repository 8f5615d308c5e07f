"""The addresses under /admin: faults of servers, brought about on purpose. Off unless asked for."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headway.twin.api.bodies import BadRequestError, parse_json, read_types
from headway.twin.api.openapi import Route
from headway.twin.api.refusals import web
from headway.twin.fault_injection import SLOWEST, FailureRates, FaultError, FaultInjector, Rates
from headway.twin.live_engine import LiveEngine

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
        assert engine.faults is not None
        self.engine, self.failures = engine, failures
        self.faults: FaultInjector = engine.faults

    def routes(self) -> list[Route]:
        """Return the addresses."""
        acts: dict[type[BaseModel], Callable[[Any], None]] = {
            Slow: self.slow,
            Hang: self.hang,
            Kill: self.kill,
            Restart: self.restart,
            Rates: self.failures.set,
        }
        names = ("slow", "hang", "kill", "restart", "failures")
        return [Route("GET", "/admin", self.tell)] + [
            Route("POST", f"/admin/{name}", partial(self.act, kind, act), kind)
            for name, (kind, act) in zip(names, acts.items(), strict=True)
        ]

    async def tell(self, _: web.Request) -> web.Response:
        """Tell how all is."""
        self.engine.clock.advance()
        found = {"replicas": self.faults.states(), "failures": self.failures.rates}
        return web.json_response(found)

    async def act(
        self, kind: type[BaseModel], act: Callable[[Any], None], request: web.Request
    ) -> web.Response:
        """Read a body, act on it, and tell how all is then."""
        text = await request.read()
        body = read_types(parse_json(text) if text else {}, kind)
        self.engine.clock.advance()
        try:
            act(body)
        except FaultError as error:
            raise BadRequestError(str(error)) from None
        return await self.tell(request)

    def _replicas(self, body: Kill, states: Sequence[str]) -> list[int]:
        """Get the numbers of the replicas that are meant: one, or all that are in such a state."""
        now, chosen, allowed = self.faults.life.states, body.replica, " or ".join(states)
        if chosen is None:
            if not (found := [k for k in range(len(now)) if now[k] in states]):
                raise FaultError(f"replica: none is {allowed}")
            return found
        self.faults.check(chosen)
        if now[chosen] not in states:
            raise FaultError(f"replica: {chosen} is not {allowed}: it is {now[chosen]}")
        return [chosen]

    def slow(self, body: Slow) -> None:
        """Let steps take longer."""
        for replica in self._replicas(body, ALIVE):
            self.faults.slow(replica, body.factor)

    def hang(self, body: Hang) -> None:
        """Let the next step take longer."""
        for replica in self._replicas(body, ALIVE):
            self.faults.hang(replica, body.seconds)

    def kill(self, body: Kill) -> None:
        """Let replicas fail."""
        for replica in self._replicas(body, RUNNING):
            self.engine.kill(replica)

    def restart(self, body: Restart) -> None:
        """Let replicas come back."""
        for replica in self._replicas(body, ("up", "down")):
            self.engine.restart(replica, body.delay)
