"""What an HTTP server of aiohttp's logs: its own faults, not those of whoever calls it."""

import logging


def leave_out_bad_requests() -> None:
    """Let aiohttp answer what is no HTTP (400) without a traceback on stderr."""
    logger = logging.getLogger("aiohttp.server")
    if _is_own_fault not in logger.filters:
        logger.addFilter(_is_own_fault)


def _is_own_fault(record: logging.LogRecord) -> bool:
    from aiohttp.http_exceptions import HttpProcessingError

    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
