"""Pages of other sites that may ask a server: vLLM's `--allowed-origins` (CORS)."""

from collections.abc import Collection

from headway.twin.api.refusals import web

METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
ASKS = "Access-Control-Request-Method"


async def allow(
    origins: Collection[str], request: web.Request, response: web.StreamResponse
) -> None:
    """Let a page of one of the `origins` read a response."""
    origin = request.headers.get("Origin", "")
    if "*" in origins:
        response.headers["Access-Control-Allow-Origin"] = "*"
    elif origin in origins:
        response.headers.update({"Access-Control-Allow-Origin": origin, "Vary": "Origin"})


def preflight(origins: Collection[str], request: web.Request) -> web.Response | None:
    """Answer a browser that asks if a page may ask, as Starlette's CORSMiddleware with vLLM's
    defaults; None: it does not.
    """
    if request.method != "OPTIONS" or not {"Origin", ASKS} <= request.headers.keys():
        return None
    head = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": "600"}
    if (asked := request.headers.get("Access-Control-Request-Headers")) is not None:
        head["Access-Control-Allow-Headers"] = asked
    if {"*", request.headers["Origin"]} & {*origins}:
        return web.Response(text="OK", headers=head)
    return web.Response(text="Disallowed CORS origin", status=400, headers=head)
