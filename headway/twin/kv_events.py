"""What the prefix cache holds, told over ZMQ in vLLM's format: for routers that know of prefixes.

Messages are those of vLLM 0.33 (vllm/distributed/kv_events.py): three parts, which are the topic, a
number of 8 bytes, and msgpack of `[time, events, data-parallel rank]`, with an event as a map.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        raise HeadwayError(": ".join((*key, what)) for key, what in wrong) from None


def address_of(endpoint: str | None, number: int) -> str | None:
    """Return an engine core its own address: so many ports later, as vLLM's ranks have it."""
    if endpoint is None or number == 0:
        return endpoint
    host, colon, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit():
        return f"{host}{colon}{int(port) + number}"
    return f"{endpoint}_dp{number}"


@dataclass(slots=True)
class Publisher:
    """Sends one engine core's batches of events, and those of before to who asks."""

    config: KvEventsConfig
    number: int
    _next: int = 0
    _sent: deque[tuple[bytes, bytes]] = field(init=False)
    _socket: Any = None
    _replay: Any = None

    def __post_init__(self) -> None:
        self._sent = deque(maxlen=self.config.buffer_steps)

    def open(self) -> None:
        """Listen; raise HeadwayError where an address is not to be had."""
        import zmq
        import zmq.asyncio

        addresses = (
            address_of(self.config.endpoint, self.number),
            address_of(self.config.replay_endpoint, self.number),
        )
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(self.config.hwm)
        try:
            address = addresses[0]
            self._socket.bind(address)
            if addresses[1] is not None:
                address = addresses[1]
                self._replay = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.SNDHWM, 2 * (self.config.buffer_steps + 1))
                self._replay.bind(address)
        except zmq.ZMQError as error:
            raise HeadwayError(f"--kv-events-config: {address}: {error}") from None

    def send(self, events: list[dict[str, Any]]) -> None:
        """Send what happened in a step."""
        import msgpack

        number = self._next.to_bytes(8, "big")
        batch = msgpack.packb([time.time(), events, self.number])
        self._next += 1
        self._sent.append((number, batch))
        self._socket.send_multipart((self.config.topic.encode(), number, batch))

    async def answer(self) -> None:
        """Send again, from a number on, to each who asks; for ever."""
        while self._replay is not None:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            topic, first = self.config.topic.encode(), frames[2]
            for number, batch in [*self._sent]:
                if number >= first:
                    await self._replay.send_multipart((frames[0], b"", topic, number, batch))
            await self._replay.send_multipart((frames[0], b"", b"", END, b""))

    def close(self) -> None:
        for socket in (self._socket, self._replay):
            if socket is not None:
                socket.close(linger=100)


class KvEvents:
    """Listens to the prefix caches of engine cores, and publishes at the end of each step.

    `tokens(request, first, last)` gives tokens of a request, prompt and answer; None where its
    client has gone, of which nothing more is told.
    """

    def __init__(
        self,
        config: KvEventsConfig,
        cores: Sequence[EngineCore],
        tokens: Tokens,
        first: int = 0,
    ) -> None:
        need_package("--kv-events-config", "kv-events", "msgpack", "zmq")
        self._listeners = {
            core: _Listener(Publisher(config, first + number), tokens)
            for number, core in enumerate(cores)
        }
        self._tasks: list[asyncio.Task[None]] = []
        for core in cores:
            self.listen(core)

    def listen(self, core: EngineCore) -> None:
        """Listen to a core's cache; raise HeadwayError where it has none that tells."""
        blocks = core.scheduler.blocks
        if isinstance(blocks, HybridManager):
            raise HeadwayError(
                "--kv-events-config: goes with engine.disable_hybrid_kv_cache_manager: true"
            )
        if not isinstance(blocks, BlockManager) or not blocks.prefix_caching:
            raise HeadwayError(
                "--kv-events-config: needs vLLM's prefix cache: engine.enable_prefix_caching"
            )
        blocks.listener = listener = self._listeners[core]
        listener.size = blocks.block_size

    def restarted(self, core: EngineCore) -> None:
        """Go on with the empty cache of an engine that has begun anew."""
        self._listeners[core].events.append({"type": "AllBlocksCleared"})
        self.listen(core)

    def publish(self, core: EngineCore) -> None:
        """Send what has happened since."""
        listener = self._listeners[core]
        if listener.events:
            listener.publisher.send(listener.events)
            listener.events = []

    def open(self) -> None:
        """Listen at the addresses."""
        for listener in self._listeners.values():
            listener.publisher.open()
            self._tasks.append(asyncio.create_task(listener.publisher.answer()))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners.values():
            listener.publisher.close()


class _Listener:
    """Collects the events of a step."""

    size = 0

    def __init__(self, publisher: Publisher, tokens: Tokens) -> None:
        self.publisher, self.tokens = publisher, tokens
        self.events: list[dict[str, Any]] = []

    def stored(self, request: Request, first: int, hashes: Sequence[int]) -> None:
        assert request.hashes is not None
        size = self.size
        tokens = self.tokens(request, first * size, (first + len(hashes)) * size)
        if tokens is None:
            return
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [key & BITS for key in hashes],
            "parent_block_hash": request.hashes[first - 1] & BITS if first else None,
            "token_ids": tokens,
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
        }
        self.events.append(event)

    def removed(self, key: int) -> None:
        self.events.append(
            {"type": "BlockRemoved", "block_hashes": [key & BITS], "medium": "GPU", "group_idx": 0}
        )
