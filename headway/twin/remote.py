"""A real server that is asked: a session with it, and what its /metrics say."""

import asyncio
import os
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable
from math import nan
from typing import Any, TypeVar

from headway.traffic.scrapes import LABEL, SAMPLE
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError

T = TypeVar("T")
MOST_BYTES = 2**24  # of what a server says of itself, and of one answer's stream
PATIENCE = 10.0  # s that a server may take to say what it says of itself


def with_session(option: str, url: str, seconds: float, play: Callable[[Any], Awaitable[T]]) -> T:
    """Return what becomes of `play(session)`, whose requests take at most so many seconds.

    A server that wants a key gets that of the environment variable OPENAI_API_KEY. Raises
    HeadwayError, which names the option, where the server at `url` does not answer, or without end.
    """
    if not url.startswith(("http://", "https://")):
        raise HeadwayError(f"{option}: {url!r} does not begin with http:// or https://")
    need_package(option, "serve", "aiohttp")
    import aiohttp

    key = os.environ.get("OPENAI_API_KEY")
    head = {"Authorization": f"Bearer {key}"} if key else {}

    async def run() -> T:
        limits, ports = aiohttp.ClientTimeout(total=seconds), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=limits, connector=ports, headers=head) as session:
            try:
                return await play(session)
            except HeadwayError:
                raise
            except (aiohttp.ClientError, OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error) or "it does not answer in time"
                raise HeadwayError(f"{option}: {url}: cannot be reached: {why}") from None

    return asyncio.run(run())


class Scrape:
    """The values of vLLM's metrics, by name, each with its labels; ValueError where one is none."""

    def __init__(self, text: str) -> None:
        self.values: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for name, labels, value, _ in re.findall(rf"(?m)^{SAMPLE.pattern}", text):
            self.values[name].append((dict(LABEL.findall(labels)), float(value)))

    def total(self, name: str, none: float = nan) -> float:
        """Return the sum of a metric of vLLM's; `none` where there is none."""
        found = self.values.get(f"vllm:{name}")
        return sum(value for _, value in found) if found else none


async def read_text(response: Any) -> str:
    """Read what a server says of itself, MOST_BYTES at most, within PATIENCE seconds.

    Raises ValueError where it is longer, TimeoutError where it takes longer.
    """
    text = bytearray()
    async with asyncio.timeout(PATIENCE):
        async for part in response.content.iter_any():
            text += part
            if len(text) > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES:,} bytes")
    return text.decode("utf-8", "replace")
