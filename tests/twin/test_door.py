"""Limits of the queue behind HTTP: 503 beyond them, counted as vLLM counts it."""

import asyncio

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession

from headway.twin.server import Server
from tests.support.twins import served_by

BODY = {"prompt": "one two three", "max_tokens": 400, "ignore_eos": True}


def test_the_third_of_three_at_once_gets_503():
    async def play(client: ClientSession, _: Server) -> None:
        async def ask() -> int:
            response = await client.post("/v1/completions", json=BODY)
            answer = await response.json()
            assert response.status == 200 or "max_num_queued_reqs" in answer["error"]["message"]
            return response.status

        assert sorted(await asyncio.gather(ask(), ask(), ask())) == [200, 200, 503]
        assert await ask() == 200  # the others have ended
        text = await (await client.get("/metrics")).text()
        counts = [line for line in text.splitlines() if "admission_rejections_total{" in line]
        assert [line.split()[-1] for line in counts] == ["1.0", "0.0"]
        assert 'reason="max_num_queued_reqs"' in counts[0]

    served_by(play, "engine.max_num_queued_reqs=2", speed=5)
