"""What the HTTP servers have in common: whom they answer, what ends them, which faults they log."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
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


def on_interrupt(act: Callable[[], object]) -> None:
    """Let Ctrl-C and SIGTERM do this, in the loop that runs."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # On Windows Ctrl-C ends the loop, and only the main thread gets signals.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, act)


@asynccontextmanager
async def running(application: "web.Application") -> "AsyncIterator[web.AppRunner]":
    """Run an application, for a block.

    No traceback is logged for what is no HTTP (400), nor for a client that has hung up.
    """
    from aiohttp import web

    logger = logging.getLogger("aiohttp.server")
    if _is_own_fault not in logger.filters:
        logger.addFilter(_is_own_fault)
    runner = web.AppRunner(
        application, access_log=None, shutdown_timeout=1.0, handler_cancellation=True
    )
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


def _is_own_fault(record: logging.LogRecord) -> bool:
    from aiohttp.http_exceptions import HttpProcessingError

    theirs = HttpProcessingError, ConnectionError
    return not (record.exc_info and isinstance(record.exc_info[1], theirs))
