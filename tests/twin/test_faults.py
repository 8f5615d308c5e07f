"""Fault injection: what gateways see of replicas that start, are slow, hang, fail and come back."""

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from headway.twin.live_engine import replica_scenarios
from headway.twin.server import Server
from simulator import run
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError
from tests.support.twins import events, served_by

FLEET = "cluster={replicas: 2, router: round_robin}"
BODY = {"prompt": "a b c", "max_tokens": 20, "ignore_eos": True}


async def ask(client: aiohttp.ClientSession, **more: Any) -> float:
    """Send a completion and wait for it; give the seconds."""
    start = asyncio.get_running_loop().time()
    async with client.post("/v1/completions", json=BODY | more) as response:
        assert response.status == 200
        await response.read()
    return asyncio.get_running_loop().time() - start


async def act(client: aiohttp.ClientSession, name: str, **body: Any) -> Any:
    async with client.post(f"/admin/{name}", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def test_no_replica_is_up_while_they_start() -> None:
    async def play(client: aiohttp.ClientSession, _: Server) -> None:
        assert (await client.get("/health")).status == 503
        response = await client.post("/v1/completions", json=BODY)
        assert response.status == 503
        assert (await response.json())["error"]["message"] == "no replica is up"

    served_by(play, startup_delay=1e6)


def test_replicas_are_up_after_their_start() -> None:
    async def play(client: aiohttp.ClientSession, server: Server) -> None:
        async with asyncio.timeout(60):
            while (await client.get("/health")).status == 503:
                await asyncio.sleep(0.05)
        assert server.engine.env.now >= 5.0
        await ask(client)

    served_by(play, startup_delay=5.0)


def test_a_slow_replica_takes_longer() -> None:
    async def play(client: aiohttp.ClientSession, server: Server) -> None:
        await ask(client)
        state = await act(client, "slow", factor=4.0)
        assert state["replicas"][0]["slow"] == 4.0
        await ask(client)
        before, after = server.engine.result().requests.e2el
        assert after == pytest.approx(4 * before, rel=0.05)
        await act(client, "slow", factor=1, replica=0)
        await ask(client)
        assert server.engine.result().requests.e2el.iloc[2] == pytest.approx(before, rel=0.05)

    served_by(play, admin=True)


def test_a_replica_hangs_until_it_is_restarted() -> None:
    async def play(client: aiohttp.ClientSession, server: Server) -> None:
        state = await act(client, "hang", replica=0)
        assert [one["hangs"] for one in state["replicas"]] == [True, False]
        stuck = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await asyncio.sleep(0.05)
        await ask(client)  # the other replica answers
        assert not stuck.done()
        state = await act(client, "restart", replica=0, delay=5)
        assert [one["state"] for one in state["replicas"]] == ["down", "up"]
        with pytest.raises(aiohttp.ClientError):
            await stuck
        await asyncio.sleep(0.2)
        state = await (await client.get("/admin")).json()
        assert [one["state"] for one in state["replicas"]] == ["up", "up"]
        await asyncio.gather(ask(client), ask(client))
        await act(client, "hang", replica=1, seconds=10)
        assert max(await asyncio.gather(ask(client), ask(client))) > 10 / 50

    served_by(play, FLEET, admin=True)


@pytest.mark.parametrize("stream", [True, False])
def test_a_replica_that_is_killed_drops_its_connections(stream: bool) -> None:
    async def play(client: aiohttp.ClientSession, server: Server) -> None:
        bodies = [BODY | {"max_tokens": 6000, "stream": stream} for _ in range(4)]

        async def post(body: Any) -> str:
            try:
                async with client.post("/v1/completions", json=body) as response:
                    await response.read()
                    return "whole"
            except aiohttp.ClientError:
                return "broken"

        asked = [asyncio.create_task(post(body)) for body in bodies]
        while len(server.engine.streams) < 4:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        state = await act(client, "kill", replica=1)
        assert [one["outstanding"] for one in state["replicas"]] == [2, 0]
        assert (await client.get("/health")).status == 200
        await act(client, "kill", replica=0)
        assert await asyncio.gather(*asked) == ["broken"] * 4
        assert (await client.get("/health")).status == 503
        again = await client.post("/admin/kill", json={"replica": 0})
        assert "is not up or draining: it is down" in (await again.json())["error"]["message"]
        await act(client, "restart")
        assert (await client.get("/health")).status == 200
        await ask(client)
        assert server.engine.result().summary()["completed"] == 1
        assert (
            server.engine.cores[0].stats().blocks_used
            == server.engine.cores[1].stats().blocks_used
            == 0
        )

    served_by(play, FLEET, admin=True, speed=2)


def test_a_fault_of_all_is_of_those_that_it_can_be_done_to() -> None:
    async def refused(client: aiohttp.ClientSession, name: str, **body: Any) -> str:
        response = await client.post(f"/admin/{name}", json=body)
        assert response.status == 400
        return str((await response.json())["error"]["message"])

    async def play(client: aiohttp.ClientSession, server: Server) -> None:
        starting = "replica: 0 is not up or down: it is starting"
        assert await refused(client, "restart", replica=0) == starting
        assert await refused(client, "kill") == "replica: none is up or draining"
        while (await client.get("/health")).status == 503:
            await asyncio.sleep(0.02)
        await act(client, "kill", replica=0)
        assert "replica: 0 is not up" in await refused(client, "slow", factor=2, replica=0)
        assert "replica: 0 is not up" in await refused(client, "hang", replica=0)
        state = await act(client, "slow", factor=3)
        assert [one["slow"] for one in state["replicas"]] == [1, 3]
        state = await act(client, "kill")  # the other one
        assert [one["state"] for one in state["replicas"]] == ["down", "down"]
        await act(client, "restart", replica=0, delay=1)
        await act(client, "restart", replica=0, delay=1e6)  # in place of the first
        state = await act(client, "restart", replica=1)
        assert state["replicas"][1]["slow"] == 1
        await asyncio.sleep(0.1)
        state = await (await client.get("/admin")).json()
        assert [one["state"] for one in state["replicas"]] == ["down", "up"]

    served_by(play, FLEET, admin=True, startup_delay=60.0)


def test_requests_fail_at_the_rates_that_are_set() -> None:
    async def play(client: aiohttp.ClientSession, _: Server) -> None:
        state = await act(client, "failures", rate_limit=0.3, server_error=0.2)
        assert state["failures"] == {"rate_limit": 0.3, "server_error": 0.2}
        seen = [(await client.post("/v1/completions", json=BODY)).status for _ in range(200)]
        assert 40 <= seen.count(429) <= 80
        assert 20 <= seen.count(500) <= 60
        assert seen.count(200) == 200 - seen.count(429) - seen.count(500)
        for name, status in (("context_length", 400), ("model_not_found", 404)):
            await act(client, "failures", **{name: 1})
            assert (await client.post("/v1/completions", json=BODY)).status == status
        await act(client, "failures")
        await ask(client)

    served_by(play, admin=True)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("slow", {"factor": 0}, "'body.factor', 'msg': 'Input should be greater than 0'"),
        ("slow", {}, "'body.factor', 'msg': 'Field required'"),
        (
            "slow",
            {"factor": 2, "factr": 2},
            "'body.factr', 'msg': 'Extra inputs are not permitted'",
        ),
        ("slow", {"factor": 2, "replica": 2}, "replica: there is no 2; the last is 1"),
        ("kill", {"replica": "a"}, "'body.replica', 'msg': 'Input should be a valid integer'"),
        ("hang", {"second": 3}, "'body.second', 'msg': 'Extra inputs are not permitted'"),
        ("restart", {"delay": -1}, "'body.delay', 'msg': 'Input should be greater than or equal"),
        ("failures", {"rate_limits": 0.1}, "'body.rate_limits', 'msg': 'Extra inputs are not"),
        ("failures", {"rate_limit": 0.9, "server_error": 0.2}, "add up to more than 1"),
        ("failures", {"rate_limit": 7}, "'body.rate_limit', 'msg': 'Input should be less than"),
        ("failures", [1], "Input should be a valid dictionary"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(path: str, body: Any, told: str) -> None:
    async def play(client: aiohttp.ClientSession, _: Server) -> None:
        response = await client.post(f"/admin/{path}", json=body)
        assert response.status == 400
        assert told in (await response.json())["error"]["message"]

    served_by(play, FLEET, admin=True)


def test_without_admin_there_are_no_faults() -> None:
    async def play(client: aiohttp.ClientSession, _: Server) -> None:
        assert (await client.get("/admin")).status == 404
        assert (await client.post("/admin/kill")).status == 404

    served_by(play)


def test_replicas_served_apart_are_what_the_cluster_says() -> None:
    fleet = load_scenario(
        "demo",
        ["cluster={groups: {a: {replicas: 2}, b: {engine: {max_num_seqs: 7}}}}"],
    )
    found = replica_scenarios(fleet)
    assert [one.engine.max_num_seqs == 7 for one in found] == [False, False, True]
    alone = load_scenario("demo")
    assert run(found[0]).requests.e2el.equals(run(alone).requests.e2el)
    with pytest.raises(HeadwayError, match="--replica-ports: the scenario has no cluster"):
        replica_scenarios(alone)
    scaled = load_scenario("demo", ["cluster={replicas: 2, failures: {mtbf: 9}}"])
    with pytest.raises(HeadwayError, match=r"--replica-ports: cluster\.failures acts on several"):
        replica_scenarios(scaled)


@pytest.mark.medium
def test_the_head_of_a_stream_does_not_wait_for_its_first_token() -> None:
    """As vLLM's, whose StreamingResponse sends the head before it asks for the first chunk."""

    async def play(client: aiohttp.ClientSession, server: Server) -> None:
        await act(client, "hang", seconds=20)
        body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
        begin = time.perf_counter()
        response = await client.post("/v1/completions", json=body)
        assert response.status == 200
        assert time.perf_counter() - begin < 20 / 10
        assert (await events(response))[-1]["usage"]["completion_tokens"] == BODY["max_tokens"]
        assert time.perf_counter() - begin >= 20 / 10
        await act(client, "hang")
        stuck = await client.post("/v1/completions", json=body)
        await act(client, "kill", replica=0)
        with pytest.raises(aiohttp.ClientError):
            await stuck.read()

    served_by(play, admin=True, speed=10)
