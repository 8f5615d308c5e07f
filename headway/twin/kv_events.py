"""What the prefix cache holds, told over ZMQ in vLLM's format: for routers that know of prefixes.

Messages are those of vLLM 0.33 (vllm/distributed/kv_events.py): three parts, which are the topic, a
number of 8 bytes, and msgpack of `[time, events, data-parallel rank]`, with an event as a map.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from simulator.core.request import Request
from simulator.engine.core import EngineCore
from simulator.kv_cache.block_manager import BlockManager
from simulator.kv_cache.hybrid_manager import HybridManager
from simulator.util.config import INT32, Config
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError, field_errors
from simulator.util.from_mapping import Field

END = (-1).to_bytes(8, "big", signed=True)
"""In the place of a number: all that is remembered has been sent again."""
BITS = 2**64 - 1
PLACE = {"medium": "GPU", "group_idx": 0}
STORED = {"type": "BlockStored", "lora_id": None, "lora_name": None, **PLACE}
REMOVED = {"type": "BlockRemoved", **PLACE}
"""What is the same in each event of a kind."""
Tokens = Callable[[Request, int, int], list[int] | None]
Address = Annotated[str, Field(pattern=r"(tcp|ipc)://.+")]


class KvEventsConfig(Config):
    """vLLM's `--kv-events-config`; all addresses are listened at, ranks have a port each."""

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq"] = "zmq"
    endpoint: Address = "tcp://127.0.0.1:5557"
    replay_endpoint: Address | None = None
    buffer_steps: int = Field(10_000, ge=1, le=1_000_000)
    hwm: int = Field(100_000, ge=1, le=INT32)
    topic: str = ""


def read_config(text: str) -> KvEventsConfig:
    """Read the JSON of the option; raise HeadwayError where it is wrong."""
    try:
        return KvEventsConfig.model_validate(json.loads(text))
    except json.JSONDecodeError:
        raise HeadwayError(f"--kv-events-config: no JSON: {text[:60]!r}") from None
    except ValueError as error:
        wrong = field_errors(("--kv-events-config",), error)
        raise HeadwayError(": ".join((*key, what)) for key, what, _ in wrong) from None


def address_of(endpoint: str | None, number: int) -> str | None:
    """Return an engine core its own address: so many ports later, as vLLM's ranks have it."""
    if endpoint is None or number == 0:
        return endpoint
    host, colon, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit():
        return f"{host}{colon}{int(port) + number}"
    return f"{endpoint}_dp{number}"


class Publisher:
    """Sends the events of one engine core, step by step, and those of before to a router that asks.

    `tokens(request, first, last)` gives tokens of a request, prompt and answer; None where its
    client has gone, of which nothing more is told.
    """

    def __init__(self, config: KvEventsConfig, number: int, tokens: Tokens) -> None:
        self.config, self.number, self.tokens = config, number, tokens
        self.events: list[dict[str, Any]] = []
        self._size = self._next = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._sockets: list[Any] = []

    def listen(self, blocks: object) -> None:
        """Listen to a core's cache; raise HeadwayError where it has none that tells."""
        needs = "vLLM's prefix cache: engine.enable_prefix_caching"
        if is_hybrid := isinstance(blocks, HybridManager):
            needs = "engine.disable_hybrid_kv_cache_manager: true"
        if is_hybrid or not isinstance(blocks, BlockManager) or not blocks.prefix_caching:
            raise HeadwayError(f"--kv-events-config: needs {needs}")
        blocks.listener, self._size = self, blocks.block_size

    def restarted(self, blocks: object) -> None:
        """Go on with the empty cache of an engine that has begun anew."""
        self.events.append({"type": "AllBlocksCleared"})
        self.listen(blocks)

    def open(self) -> None:
        """Listen at the addresses; raise HeadwayError where one is not to be had."""
        self._task = asyncio.create_task(self.answer())
        import zmq
        import zmq.asyncio

        config, replayed = self.config, 2 * (self.config.buffer_steps + 1)
        for endpoint, context, kind, most in (
            (config.endpoint, zmq.Context, zmq.PUB, config.hwm),
            (config.replay_endpoint, zmq.asyncio.Context, zmq.ROUTER, replayed),
        ):
            if (address := address_of(endpoint, self.number)) is None:
                continue
            socket = context.instance().socket(kind)
            self._sockets.append(socket)
            socket.setsockopt(zmq.SNDHWM, most)
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                raise HeadwayError(f"--kv-events-config: {address}: {error}") from None

    def publish(self) -> None:
        """Send what happened in a step."""
        import msgpack

        if not self.events:
            return
        number = self._next.to_bytes(8, "big")
        batch = msgpack.packb([time.time(), self.events, self.number])
        self.events = []
        self._next += 1
        self._sent.append((number, batch))
        self._sockets[0].send_multipart((self.config.topic.encode(), number, batch))

    async def answer(self) -> None:
        """Send again, from a number on, to each who asks; for ever."""
        topic = self.config.topic.encode()
        for replay in self._sockets[1:]:
            while True:
                frames = await replay.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    continue
                for number, batch in [*self._sent]:
                    if number >= frames[2]:
                        await replay.send_multipart((frames[0], b"", topic, number, batch))
                await replay.send_multipart((frames[0], b"", b"", END, b""))

    def close(self) -> None:
        self._task.cancel()
        for socket in self._sockets:
            socket.close(linger=100)

    def stored(self, request: Request, first: int, hashes: Sequence[int]) -> None:
        assert request.hashes is not None
        size = self._size
        tokens = self.tokens(request, first * size, (first + len(hashes)) * size)
        if tokens is None:
            return
        event: dict[str, Any] = STORED | {"block_hashes": [key & BITS for key in hashes]}
        event["parent_block_hash"] = request.hashes[first - 1] & BITS if first else None
        self.events.append(event | {"token_ids": tokens, "block_size": size})

    def removed(self, key: int) -> None:
        self.events.append(REMOVED | {"block_hashes": [key & BITS]})


def publishers(
    config: KvEventsConfig, cores: Sequence[EngineCore], tokens: Tokens, first: int = 0
) -> dict[EngineCore, Publisher]:
    """Let each engine core have a publisher; the number of the first one is `first`."""
    need_package("--kv-events-config", "kv-events", "msgpack", "zmq")
    found = {core: Publisher(config, first + number, tokens) for number, core in enumerate(cores)}
    for core, publisher in found.items():
        publisher.listen(core.scheduler.blocks)
    return found
