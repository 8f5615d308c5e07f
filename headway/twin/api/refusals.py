"""Answers that are errors, in vLLM's form; and what `serve` needs, or how to get it."""

from collections.abc import Awaitable, Callable

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
