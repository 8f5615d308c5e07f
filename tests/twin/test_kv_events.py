"""What the prefix cache holds, told over ZMQ: who listens knows it as the engine does."""

import asyncio
import json
import re
import socket
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("msgpack")
pytest.importorskip("zmq")

import msgpack
from aiohttp import ClientSession
from zmq import DEALER, REQ, SUB
from zmq.asyncio import Context

from headway.twin.kv_events import END, address_of, read_config
from headway.twin.server import Server
from simulator.util.errors import HeadwayError
from tests.support.twins import served_by

CACHE = "engine.enable_prefix_caching=true"


def free_ports(count: int) -> list[int]:
    """Find ports that follow one another."""
    for first in range(21_000, 60_000, 7):
        ports = [*range(first, first + count)]
        try:
            for port in ports:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return ports
    raise AssertionError("no port is free")


def tcp(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


class Listener:
    """A router's view of an engine: hashes, each as often as there are blocks of it."""

    def __init__(self, port: int) -> None:
        self.socket = Context.instance().socket(SUB)
        self.socket.connect(tcp(port))
        self.socket.subscribe(b"")
        self.held: Counter[int] = Counter()
        self.events: list[dict[str, Any]] = []
        self.numbers: list[int] = []

    async def hear(self) -> None:
        while True:
            topic, number, payload = await self.socket.recv_multipart()
            assert topic == b"kv@me"
            self.numbers.append(int.from_bytes(number, "big"))
            time, events, self.rank = msgpack.unpackb(payload)
            assert time > 1.6e9
            for event in events:
                self.events.append(event)
                if event["type"] == "BlockStored":
                    self.held.update(event["block_hashes"])
                elif event["type"] == "BlockRemoved":
                    self.held.subtract(event["block_hashes"])
                else:
                    self.held.clear()


def held_by(server: Server, core: int = 0) -> Counter[int]:
    """Return the hashes of an engine's blocks."""
    blocks = server.engine.cores[core].scheduler.blocks
    found: Counter[int] = Counter({key % 2**64: 1 for key in blocks._block_of})
    for key, others in blocks._others_of.items():
        found[key % 2**64] += len(others)
    return found


async def ask(client: ClientSession, prompt: list[int], tokens: int) -> Any:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return await (await client.post("/v1/completions", json=body)).json()


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_who_listens_knows_what_the_cache_holds(asynchronous: str) -> None:
    ports = free_ports(2)
    config = {"endpoint": tcp(ports[0]), "replay_endpoint": tcp(ports[1]), "topic": "kv@me"}

    async def play(client: ClientSession, server: Server) -> None:
        listener = Listener(ports[0])
        hearing = asyncio.create_task(listener.hear())
        await asyncio.sleep(0.3)  # a subscription takes a while
        shared = [*range(500, 600)]
        prompts = [[*shared[: 20 * (k % 6)], *range(1000 * k, 1000 * k + 64)] for k in range(1, 30)]
        await asyncio.gather(*(ask(client, prompt, 30) for prompt in prompts))
        async with asyncio.timeout(20):
            while +listener.held != held_by(server):
                await asyncio.sleep(0.02)
        assert listener.numbers == [*range(len(listener.numbers))]
        kinds = Counter(event["type"] for event in listener.events)
        assert kinds["BlockRemoved"] > 0  # 80 blocks do not hold them all
        first = next(one for one in listener.events if one["parent_block_hash"] is None)
        assert first["token_ids"][: first["block_size"]] in [prompt[:16] for prompt in prompts]
        for event in listener.events:
            if event["type"] == "BlockStored":
                assert len(event["token_ids"]) == 16 * len(event["block_hashes"])

        asker = Context.instance().socket(REQ)
        asker.connect(tcp(ports[1]))
        await asker.send((3).to_bytes(8, "big"))
        number = await asker.recv_multipart()
        assert int.from_bytes(number[1], "big") == 3
        dealer = Context.instance().socket(DEALER)
        dealer.connect(tcp(ports[1]))
        await dealer.send_multipart((b"", (5).to_bytes(8, "big")))
        again = []
        while (frames := await dealer.recv_multipart())[2] != END:
            again.append(int.from_bytes(frames[2], "big"))
        assert again == listener.numbers[5:]
        hearing.cancel()
        for one in (asker, dealer, listener.socket):
            one.close(linger=0)

    blocks = "engine.num_gpu_blocks_override=80", "engine.max_model_len=1200"
    served_by(
        play,
        CACHE,
        *blocks,
        f"engine.async_scheduling={asynchronous}",
        kv_events_config=json.dumps(config),
    )


def test_an_engine_that_begins_anew_says_so() -> None:
    ports = free_ports(2)
    config = {"endpoint": tcp(ports[0]), "topic": "kv@me"}

    async def play(client: ClientSession, server: Server) -> None:
        listeners = [Listener(port) for port in ports]
        hearing = [asyncio.create_task(one.hear()) for one in listeners]
        await asyncio.sleep(0.3)
        for k in range(6):
            await ask(client, [*range(100 * k, 100 * k + 50)], 3)
        await client.post("/admin/restart", json={"replica": 1})
        for k in range(6):
            await ask(client, [*range(900 * k, 900 * k + 50)], 3)
        async with asyncio.timeout(20):
            while any(+one.held != held_by(server, k) for k, one in enumerate(listeners)):
                await asyncio.sleep(0.02)
        assert [one.rank for one in listeners] == [0, 1]
        kinds = [Counter(event["type"] for event in one.events) for one in listeners]
        assert [one["AllBlocksCleared"] for one in kinds] == [0, 1]
        for task in hearing:
            task.cancel()
        for one in listeners:
            one.socket.close(linger=0)

    fleet = "cluster={replicas: 2, router: round_robin}"
    served_by(play, CACHE, fleet, kv_events_config=json.dumps(config), admin=True)


def test_what_cannot_be_is_told() -> None:
    config = {"endpoint": tcp(free_ports(1)[0])}
    with pytest.raises(HeadwayError, match="needs vLLM's prefix cache"):
        served_by(None, "engine.enable_prefix_caching=false", kv_events_config=json.dumps(config))  # type: ignore
    for text, told in (
        ("{", "no JSON: '{'"),
        (
            "[]",
            "must be a mapping of keys, as {enable_kv_cache_events: true, publisher: zmq}, not []",
        ),
        ('{"endpoint": "x"}', "endpoint: must match (tcp|ipc)://.+, not 'x'"),
        ('{"publisher": null}', "publisher: must be 'zmq', not null"),
        ('{"hwm": "many"}', "hwm: must be a whole number such as 64, not 'many'"),
        ('{"port": 3}', "port: unknown key"),
    ):
        with pytest.raises(HeadwayError, match=f"^--kv-events-config: {re.escape(told)}"):
            read_config(text)
    assert address_of("tcp://*:5557", 2) == "tcp://*:5559"
    assert address_of("ipc:///tmp/events", 1) == "ipc:///tmp/events_dp1"
