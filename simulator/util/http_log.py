"""What the HTTP servers have in common: whom they answer, and which faults they log."""

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine to itself, by which a server that listens to it alone is asked."""


def is_foreign(
    request: "web.Request", hosts: Collection[str] | None, origins: Collection[str] = ()
) -> bool:
    """Say whether a request may come from a page of another site, open in somebody's browser.

    `hosts` are the server's own names, with or without the port; None: it may have any. Pages of
    `origins` are not foreign; with "*" none is.
    """
    host = request.host.lower()
    name = host.rpartition(":")[0] or host
    origin = request.headers.get("Origin", "").lower()
    renamed = hosts is not None and host not in hosts and name not in hosts
    allowed = not origin or "*" in origins or origin in origins
    return renamed or not (allowed or origin.partition("://")[2] == host)


def leave_out_bad_requests() -> None:
    """Log no traceback for what is no HTTP (400), nor for a client that has hung up."""
    logger = logging.getLogger("aiohttp.server")
    if _is_own_fault not in logger.filters:
        logger.addFilter(_is_own_fault)


def _is_own_fault(record: logging.LogRecord) -> bool:
    from aiohttp.http_exceptions import HttpProcessingError

    theirs = HttpProcessingError, ConnectionError
    return not (record.exc_info and isinstance(record.exc_info[1], theirs))
