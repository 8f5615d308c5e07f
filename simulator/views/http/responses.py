"""Answers that are errors, in vLLM's form; and aiohttp, or a line that says how to get it."""

from simulator.util.errors import HeadwayError
from simulator.views.http.openai import error_body

__all__ = ["error_response", "web"]

try:
    from aiohttp import web
except ImportError as error:
    raise HeadwayError("serve: needs the package aiohttp: pip install headway[serve]") from error


def error_response(message: str, kind: str, status: int) -> web.Response:
    """Give an error as vLLM words it."""
    body = error_body(message, kind, status)
    return web.Response(body=body, status=status, content_type="application/json")
