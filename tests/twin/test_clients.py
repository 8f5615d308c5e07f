"""Clients that are many, slow, broken or gone: the clock goes on, and others get their answers."""

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientError, ClientSession

from headway.twin import server as http_server
from headway.twin.server import Server
from tests.support.twins import events, served_by

STREAMS = 1000
PROMPT = [7] * 40


def body(tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, **more}


async def tokens_of(client: ClientSession, tokens: int) -> int:
    """Stream an answer; give how many tokens came."""
    response = await client.post("/v1/completions", json=body(tokens))
    chunks = await events(response)
    return sum(len(one["choices"][0]["text"].split()) for one in chunks)


async def settled(server: Server) -> None:
    """Wait until nobody is served, and look whether all is free."""
    async with asyncio.timeout(60):
        while server.engine.streams:
            await asyncio.sleep(0.01)
    server.engine.clock.advance()
    while (
        server.engine.cores[0].stats().blocks_used
    ):  # whoever has gone leaves at the end of the step
        await asyncio.sleep(0.01)
    assert not server.engine.cores[0].scheduler.running


@pytest.mark.slow
def test_a_thousand_streams_at_once_get_every_token() -> None:
    async def play(client: ClientSession, server: Server) -> None:
        lengths = [5 + k % 7 for k in range(STREAMS)]
        found = await asyncio.gather(*(tokens_of(client, length) for length in lengths))
        assert found == lengths
        assert max(server.engine.result().requests.e2el) > 0
        assert server.engine.result().summary()["max_concurrent_requests"] == STREAMS
        await settled(server)

    served_by(play, "engine.max_num_seqs=1024", "engine.max_num_batched_tokens=8192", speed=0.1)


def test_clients_that_vanish_leave_nothing_behind() -> None:
    """A third before their first token, a third in the midst of it, a third stay."""

    async def play(client: ClientSession, server: Server) -> None:
        async def vanish(number: int) -> int | None:
            if number % 3 == 2:
                return await tokens_of(client, 20)
            with suppress(ClientError, TimeoutError):
                async with asyncio.timeout(0.05 if number % 3 == 0 else None):
                    response = await client.post("/v1/completions", json=body(6000))
                    await response.content.readany()
                    response.close()
            return None

        found = await asyncio.gather(*(vanish(number) for number in range(300)))
        assert [count for count in found if count is not None] == [20] * 100
        await settled(server)
        assert await tokens_of(client, 3) == 3

    served_by(play, "engine.max_num_seqs=128", speed=5)


def broken(draw: random.Random) -> Iterator[bytes]:
    """Yield what is no request, is cut short, or says one thing and does another."""
    good = json.dumps(body(3)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(good) + good
    yield b"\x00" * 5000
    yield b"GET " + b"/a" * 20_000 + b" HTTP/1.1\r\n\r\n"
    yield head + b"X: " + b"y" * 100_000 + b"\r\n\r\n"
    yield head + b"Content-Length: -1\r\n\r\n"
    yield head + b"Content-Length: 99999999999999999999\r\n\r\n" + good
    yield head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + good
    yield head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + good
    yield head + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n" + good
    yield head.replace(b"1.1", b"9.9") + b"\r\n"
    yield head + b"Expect: 200-maybe\r\nContent-Length: 4\r\n\r\n" + good
    yield head + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n" + good
    for _ in range(60):
        yield draw.randbytes(draw.randrange(1, 400))
        yield whole[: draw.randrange(len(whole))]
        place = draw.randrange(len(whole))
        yield whole[:place] + draw.randbytes(draw.randrange(1, 9)) + whole[place + 1 :]


def test_what_is_no_http_stops_nobody() -> None:
    async def play(client: ClientSession, server: Server) -> None:
        url = client._base_url
        assert url is not None

        async def send(data: bytes, *, stay: bool) -> None:
            reader, writer = await asyncio.open_connection(url.host, url.port)
            with suppress(OSError):
                writer.write(data)
                await writer.drain()
                if stay:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(), 1)
            writer.close()

        draw = random.Random(5)
        sent = [*broken(draw)]
        slow = [await asyncio.open_connection(url.host, url.port) for _ in range(50)]
        for _, writer in slow:  # a head that never ends
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-")
        tasks = [send(data, stay=k % 2 == 0) for k, data in enumerate(sent)]
        found, *_ = await asyncio.gather(tokens_of(client, 500), *tasks)
        assert found == 500
        assert (await client.get("/health")).status == 200
        for _, writer in slow:
            writer.write(b"y")
            writer.close()
        await settled(server)

    served_by(play, speed=5)


WORDS = ("prompt", "messages", "max_tokens", "min_tokens", "stream", "stream_options", "n", "user")
MORE = ("priority", "stop", "ignore_eos", "vllm_xargs", "model", "factor", "replica", "seconds")
PATHS = ("completions", "chat/completions")
ADMIN = ("slow", "failures", "restart", "hang", "kill")


def value(draw: random.Random, depth: int = 0) -> Any:
    kinds = 9 if depth < 3 else 7
    kind = draw.randrange(kinds)
    if kind == 7:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 8:
        return {draw.choice(WORDS + MORE): value(draw, depth + 1) for _ in range(draw.randrange(4))}
    return (None, True, draw.randrange(-5, 50), 10**30, draw.random(), "word", "\ud800\x00é")[kind]


@pytest.mark.parametrize("admin", [False, True])
def test_no_body_is_an_internal_error(admin: bool) -> None:
    async def play(client: ClientSession, server: Server) -> None:
        draw, head = random.Random(11), {"Content-Type": "application/json"}
        paths = [*(f"/v1/{path}" for path in PATHS), "/tokenize"]
        if admin:
            paths = [f"/admin/{path}" for path in ADMIN]
        for _ in range(250):
            asked = {draw.choice(WORDS + MORE): value(draw) for _ in range(draw.randrange(5))}
            if not admin and draw.random() < 0.5:
                asked |= {
                    "prompt": "some words",
                    "messages": [{"role": "user", "content": "some words"}],
                }
            asked.pop("ignore_eos", None)
            response = await client.post(draw.choice(paths), data=json.dumps(asked), headers=head)
            assert response.status < 500, (asked, await response.text())
            await response.read()
        if not admin:
            await settled(server)

    served_by(play, speed=1000, admin=admin)


def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 5)

    async def play(client: ClientSession, _: Server) -> None:
        url = client._base_url
        assert url is not None
        held = [await asyncio.open_connection(url.host, url.port) for _ in range(5)]
        with pytest.raises(ClientError):
            await client.get("/health")
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(20):
            while True:
                with suppress(ClientError):
                    assert (await client.get("/health")).status == 200
                    break
                await asyncio.sleep(0.02)

    served_by(play)
