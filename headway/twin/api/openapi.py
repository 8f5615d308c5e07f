"""The addresses of a server as a table, and the OpenAPI document that tells them."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from headway.twin.api.refusals import web

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
