"""Servers of simulated engines, in this process and in one of their own."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from headway.twin.options import ServeOptions
from headway.twin.server import Server, token_counter
from simulator.scenario.load import load_scenario
from tests.support.commands import ROOT

Play = Callable[[aiohttp.ClientSession, Server], Awaitable[None]]


def served_by(
    play: Play,
    *overrides: str,
    tokenizer: Path | None = None,
    scenario: str | Path = "demo",
    **options: Any,
) -> None:
    """Serve a scenario in this process, as the command does, and do something with it."""

    async def run() -> None:
        loaded = load_scenario(scenario, list(overrides))
        chosen = ServeOptions(**{"port": 0, "speed": 50, **options})
        server = Server(loaded, chosen, token_counter(tokenizer))
        stop = asyncio.Event()
        address = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(server.run(stop, address.set_result))
        try:
            async with (
                asyncio.timeout(90),
                aiohttp.ClientSession(
                    await address, connector=aiohttp.TCPConnector(limit=0)
                ) as client,
            ):
                await play(client, server)
            if serving.done():
                serving.result()
        finally:
            stop.set()
            await serving

    asyncio.run(run())


def malformed(port: int) -> list[bytes]:
    """Send what is no HTTP to a server on this machine; give the first line of each answer."""
    answers = []
    for bytes_sent in (
        b"GET /" + 20_000 * b"a" + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"NO HTTP\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(bytes_sent)
            answers.append(connection.recv(4096).split(b"\r\n")[0])
    return answers


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """Read a stream of server-sent events."""
    text = (await response.read()).decode()
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts.pop() == "[DONE]"
    return [json.loads(part) for part in parts]


async def named_events(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """Read a stream whose events have names, each that of its data."""
    found = []
    for part in (await response.text()).strip().split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@contextmanager
def twin(*arguments: str, ports: int = 1) -> Iterator[tuple[Sequence[str], subprocess.Popen[str]]]:
    """Run `headway serve` with these arguments; give its addresses. It ends with the block."""
    command = [sys.executable, "-m", "headway", "serve", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": ROOT},
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(ports)]
            found = [line.split()[2].removesuffix(",").removesuffix(";") for line in lines]
            yield [address.removesuffix("/v1") for address in found], process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(30)
                finally:
                    process.kill()
