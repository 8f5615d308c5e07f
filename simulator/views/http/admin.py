"""The addresses under /admin: drills of what goes wrong with servers. Off unless asked for."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from simulator.views.http.drills import SLOWEST, DrillError, Drills, FailureRates, number
from simulator.views.http.live_engine import LiveEngine
from simulator.views.http.responses import error_response, web

Body = Mapping[str, Any]
LONGEST_WAIT = 1e6  # s


def admin_routes(engine: LiveEngine, failures: FailureRates) -> list[web.RouteDef]:
    """Give what may be done to an engine that was made for drills."""
    admin = _Admin(engine, failures)
    routes = [web.get("/admin", admin.tell)]
    for name, act in (
        ("slow", admin.slow),
        ("hang", admin.hang),
        ("kill", admin.kill),
        ("restart", admin.restart),
        ("failures", admin.fail),
    ):
        routes.append(web.post(f"/admin/{name}", admin.handler(act)))
    return routes


class _Admin:
    def __init__(self, engine: LiveEngine, failures: FailureRates) -> None:
        assert engine.drills is not None
        self.engine, self.failures = engine, failures
        self.drills: Drills = engine.drills

    async def tell(self, _: web.Request) -> web.Response:
        """Tell how all is."""
        self.engine.clock.advance()
        return self._state()

    def _state(self) -> web.Response:
        found = {"replicas": self.drills.states(), "failures": self.failures.rates}
        return web.json_response(found)

    def handler(self, act: Callable[[Body], None]) -> Callable[[web.Request], Awaitable[Any]]:
        """Give what reads a body, acts on it, and tells how all is then."""

        async def handle(request: web.Request) -> web.Response:
            try:
                text = await request.read()
                body = json.loads(text) if text else {}
                if not isinstance(body, dict):
                    raise DrillError("the body is not a JSON object")
                act(body)
            except DrillError as error:
                return error_response(str(error), "BadRequestError", 400)
            except (ValueError, RecursionError):
                return error_response("the body is not a JSON object", "BadRequestError", 400)
            return self._state()

        return handle

    def _replicas(self, body: Body, *keys: str) -> list[int]:
        """Give the numbers of the replicas that are meant: one, or all."""
        if unknown := [key for key in body if key not in ("replica", *keys)]:
            raise DrillError(f"{unknown[0]}: unknown; there is {', '.join(('replica', *keys))}")
        if body.get("replica") is None:
            return [*range(len(self.drills.executors))]
        chosen = body["replica"]
        if isinstance(chosen, bool) or not isinstance(chosen, int):
            raise DrillError(f"replica: {str(chosen)[:40]} is not a whole number")
        self.drills.check(chosen)
        return [chosen]

    def slow(self, body: Body) -> None:
        factor = number(body, "factor", most=SLOWEST)
        if not factor:
            raise DrillError("factor: must be more than 0")
        self.engine.clock.advance()
        for replica in self._replicas(body, "factor"):
            self.drills.slow(replica, factor)

    def hang(self, body: Body) -> None:
        seconds = body.get("seconds")
        if seconds is not None:
            seconds = number(body, "seconds", most=LONGEST_WAIT)
        self.engine.clock.advance()
        for replica in self._replicas(body, "seconds"):
            self.drills.hang(replica, seconds)

    def kill(self, body: Body) -> None:
        for replica in self._replicas(body):
            self.engine.kill(replica)

    def restart(self, body: Body) -> None:
        delay = number(body, "delay", 0.0, LONGEST_WAIT)
        for replica in self._replicas(body, "delay"):
            self.engine.restart(replica, delay)

    def fail(self, body: Body) -> None:
        self.failures.set(body)
