"""The addresses under /admin: faults of servers, brought about on purpose. Off unless asked for."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from headway.twin.fault_injection import (
    SLOWEST,
    FailureRates,
    FaultError,
    FaultInjector,
    number,
)
from headway.twin.live_engine import LiveEngine
from headway.twin.responses import error_response, web

Body = Mapping[str, Any]
LONGEST_WAIT = 1e6  # s
RUNNING = ("up", "draining")
ALIVE = (*RUNNING, "starting")


def admin_routes(engine: LiveEngine, failures: FailureRates) -> list[web.RouteDef]:
    """Return what may be done to an engine that was made for fault injection."""
    admin = _Admin(engine, failures)
    routes = [web.get("/admin", admin.tell)]
    for name, act in (
        ("slow", admin.slow),
        ("hang", admin.hang),
        ("kill", admin.kill),
        ("restart", admin.restart),
        ("failures", failures.set),
    ):
        routes.append(web.post(f"/admin/{name}", admin.handler(act)))
    return routes


class _Admin:
    def __init__(self, engine: LiveEngine, failures: FailureRates) -> None:
        assert engine.faults is not None
        self.engine, self.failures = engine, failures
        self.faults: FaultInjector = engine.faults

    async def tell(self, _: web.Request) -> web.Response:
        """Tell how all is."""
        self.engine.clock.advance()
        return self._state()

    def _state(self) -> web.Response:
        found = {"replicas": self.faults.states(), "failures": self.failures.rates}
        return web.json_response(found)

    def handler(self, act: Callable[[Body], None]) -> Callable[[web.Request], Awaitable[Any]]:
        """Return what reads a body, acts on it, and tells how all is then."""

        async def handle(request: web.Request) -> web.Response:
            try:
                text = await request.read()
                body = json.loads(text) if text else {}
                if not isinstance(body, dict):
                    raise FaultError("the body is not a JSON object")
                self.engine.clock.advance()
                act(body)
            except FaultError as error:
                return error_response(str(error), "BadRequestError", 400)
            except (ValueError, RecursionError):
                return error_response("the body is not a JSON object", "BadRequestError", 400)
            return self._state()

        return handle

    def _replicas(self, body: Body, states: Sequence[str], *keys: str) -> list[int]:
        """Get the numbers of the replicas that are meant: one, or all that are in such a state."""
        if unknown := [key for key in body if key not in ("replica", *keys)]:
            raise FaultError(f"{unknown[0]}: unknown; there is {', '.join(('replica', *keys))}")
        now = self.faults.life.states
        allowed = " or ".join(states)
        if body.get("replica") is None:
            if not (found := [k for k in range(len(now)) if now[k] in states]):
                raise FaultError(f"replica: none is {allowed}")
            return found
        chosen = body["replica"]
        if isinstance(chosen, bool) or not isinstance(chosen, int):
            raise FaultError(f"replica: {str(chosen)[:40]} is not a whole number")
        self.faults.check(chosen)
        if now[chosen] not in states:
            raise FaultError(f"replica: {chosen} is not {allowed}: it is {now[chosen]}")
        return [chosen]

    def slow(self, body: Body) -> None:
        replicas = self._replicas(body, ALIVE, "factor")
        factor = number(body, "factor", most=SLOWEST)
        if not factor:
            raise FaultError("factor: must be more than 0")
        for replica in replicas:
            self.faults.slow(replica, factor)

    def hang(self, body: Body) -> None:
        replicas = self._replicas(body, ALIVE, "seconds")
        seconds = body.get("seconds")
        if seconds is not None:
            seconds = number(body, "seconds", most=LONGEST_WAIT)
        for replica in replicas:
            self.faults.hang(replica, seconds)

    def kill(self, body: Body) -> None:
        for replica in self._replicas(body, RUNNING):
            self.engine.kill(replica)

    def restart(self, body: Body) -> None:
        replicas = self._replicas(body, ("up", "down"), "delay")
        delay = number(body, "delay", 0.0, LONGEST_WAIT)
        for replica in replicas:
            self.engine.restart(replica, delay)
