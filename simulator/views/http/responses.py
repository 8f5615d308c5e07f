"""Answers that are errors, in vLLM's form; and aiohttp, or a line that says how to get it."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from simulator.util.errors import HeadwayError
from simulator.views.http.openai import BadRequestError, error_body

__all__ = ["error_response", "refusals_in_json", "refuse", "web"]

try:
    from aiohttp import web
except ImportError as error:
    raise HeadwayError("serve: needs the package aiohttp: pip install headway[serve]") from error


def error_response(message: str, kind: str, status: int) -> web.Response:
    """Give an error as vLLM words it."""
    body = error_body(message, kind, status)
    return web.Response(body=body, status=status, content_type="application/json")


def refuse(error: BadRequestError) -> web.Response:
    """Say what of a body is wrong."""
    body = error_body(str(error), error.kind, error.status, error.param)
    return web.Response(body=body, status=error.status, content_type="application/json")


@web.middleware
async def refusals_in_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Put aiohttp's own refusals (no such address, no such method) in vLLM's form."""
    try:
        return await handler(request)
    except web.HTTPClientError as error:
        phrase = HTTPStatus(error.status).phrase
        response = error_response(phrase, phrase, error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
