"""Routes with their OpenAPI document, pages of other sites, errors in vLLM's form."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from headway.twin.api.bodies import BadRequestError
from headway.twin.api.messages import message_error
from headway.twin.api.openai import error_body
from simulator.util.environment import need_package

__all__ = ["refusals_in_json", "web"]

need_package("serve", "serve", "aiohttp", "llguidance")
from aiohttp import web  # noqa: E402


@web.middleware
async def refusals_in_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Say as vLLM's server what of a body is wrong, or that there is no such address."""
    try:
        return await handler(request)
    except BadRequestError as error:
        words = message_error if request.path.startswith("/v1/messages") else error_body
        return web.Response(body=words(error), status=error.status, content_type="application/json")
    except web.HTTPClientError as error:
        head = {key: value for key, value in error.headers.items() if key == "Allow"}
        return web.json_response({"detail": error.reason}, status=error.status, headers=head)


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


PLACE = "#/components/schemas/{model}"


class Route(NamedTuple):
    """An address, and what answers there."""

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    body: type[BaseModel] | None = None


def openapi(routes: Sequence[Route], version: str) -> dict[str, Any]:
    """Return the document at /openapi.json."""
    bodies = [(route.body, "validation") for route in routes if route.body is not None]
    _, schemas = models_json_schema(bodies, ref_template=PLACE)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for route in routes:
        said: dict[str, Any] = {"responses": {"200": {"description": "Successful Response"}}}
        if route.body is not None:
            schema = {"$ref": PLACE.format(model=route.body.__name__)}
            content = {"application/json": {"schema": schema}}
            said["requestBody"] = {"content": content, "required": True}
        paths.setdefault(route.path, {})[route.method.lower()] = said
    found = {"openapi": "3.1.0", "info": {"title": "Headway", "version": version}}
    return found | {"paths": paths, "components": {"schemas": schemas["$defs"]}}
