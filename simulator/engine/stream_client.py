"""Sends a workload that comes a chunk at a time, and keeps no request for longer than it must."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf, isnan, nan, nextafter

import numpy as np
import simpy

from simulator.core.alarm import Alarm
from simulator.core.request import Request
from simulator.engine.client import Writer
from simulator.workload.workload import Workload


@dataclass(slots=True)
class Chunk:
    """Successive requests of which not all have ended."""

    work: Workload
    first: int  # id of the first
    writer: Writer
    sent: "array[float]"  # s; NaN: not yet
    left: int  # requests that have not ended


class Sent:
    """When each request that is still in memory was sent, s, by id."""

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self.chunks: dict[int, Chunk] = {}

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, id: int) -> float:
        return self.chunks[id // self.size].sent[id % self.size]


class StreamClient:
    """A `Client` of requests that wait for nobody but behind `max_concurrency`."""

    def __init__(
        self,
        env: simpy.Environment,
        total: int,
        size: int,
        parts: Iterator[Workload],
        submit: Callable[[Request], None],
    ) -> None:
        self.env = env
        self.submit = submit
        self.sent = Sent(total, size)
        self.done = 0
        self._parts = parts
        self._flying = 0
        self._free = 0.0  # s, when the frontend has passed on all that was sent
        self._stamp = -1.0  # the last request's arrival at the engine, s
        self._sending = self._set = False
        self._number = -1  # of the chunk that is being sent
        self._index = 0  # in it, of the next to be sent
        self._chunk = self._load()
        self._limit = self._chunk.work.max_concurrency or total + 1
        self._alarm = Alarm(env, self._arrive)
        self._alarm.set(env.now)

    def _load(self) -> Chunk:
        """Take up the next chunk."""
        work = next(self._parts)
        self._number, self._index = self._number + 1, 0
        writer, sent = Writer(work), array("d", [nan]) * len(work)
        chunk = Chunk(work, self._number * self.sent.size, writer, sent, len(work))
        self.sent.chunks[self._number] = self._chunk = chunk
        self._times = work.arrival.data
        return chunk

    def nothing(self) -> Chunk:
        """Give a chunk without requests."""
        work = self._chunk.work.part(np.empty(0, np.int64))
        return Chunk(work, self.sent.total, Writer(work), array("d"), 0)

    def ended(self) -> Iterator[Chunk]:
        """Give away the first chunks, as far as all of their requests have ended."""
        chunks = self.sent.chunks
        while chunks:
            number = next(iter(chunks))
            if chunks[number].left:
                return
            yield chunks.pop(number)

    def unsettled(self) -> float:
        """Give the earliest time, s, that matters to a request which was not given away."""
        first = next(iter(self.sent.chunks.values()), None)
        return self.env.now if first is None or isnan(first.sent[0]) else first.sent[0]

    def finished(self, request: Request) -> None:
        """Take note that a request has ended: its seat at the client is free."""
        self.done += 1
        self._flying -= 1
        self.sent.chunks[request.id // self.sent.size].left -= 1
        if not self._sending and not self._set:
            self._send_due()

    def _arrive(self, alarm: simpy.Event) -> None:
        self._set = False
        self._send_due()

    def _send_due(self) -> None:
        """Send those whose time has come, as many as may be; sleep until the next one's."""
        self._sending = True
        now = self.env.now
        while self._flying < self._limit:
            if self._index == len(self._times):
                if self._chunk.first + self._index == self.sent.total:
                    break
                self._load()
            if self._times[self._index] > now:
                self._set = True
                self._alarm.set(self._times[self._index])
                break
            self._index += 1
            self._send(self._chunk, self._index - 1)
        self._sending = False

    def _send(self, chunk: Chunk, index: int) -> None:
        self._flying += 1
        chunk.sent[index] = now = self.env.now
        frontend = chunk.work.frontend
        if frontend is None:
            self._submit(chunk, index)
            return
        work = frontend.per_request + frontend.per_token * chunk.writer.prompts[index]
        self._free = max(self._free, now) + work
        arrival = self.env.timeout(self._free - now + frontend.latency)
        arrival.callbacks.append(partial(self._pass_on, chunk, index))

    def _pass_on(self, chunk: Chunk, index: int, _: simpy.Event) -> None:
        self._submit(chunk, index)

    def _submit(self, chunk: Chunk, index: int) -> None:
        """Hand a request to the engine, now."""
        now = self.env.now
        self._stamp = now if now > self._stamp else nextafter(self._stamp, inf)
        request = chunk.writer.write(index, self._stamp)
        request.id += chunk.first
        self.submit(request)
