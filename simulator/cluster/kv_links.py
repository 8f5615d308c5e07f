"""The link on which a producer sends KV caches: one transfer behind the other."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import simpy

from simulator.cluster.routers import Target
from simulator.core.alarm import Alarm
from simulator.core.request import Request


@dataclass(slots=True, eq=False)
class Handoff:
    """The KV cache of a prompt on its way from one replica to another. Times in s; -1: not yet."""

    request: Request  # that decodes
    job: Request  # that computed the prompt and has the blocks
    producer: Target
    ready: float  # when the prompt was computed
    consumer: Target | None = None  # None: none is open
    state: Literal["waiting", "moving", "here"] = "waiting"
    found: int = 0  # blocks that the consumer had in its prefix cache
    blocks: int = 0  # to be moved
    placed: float = -1.0  # when it was given to a consumer
    asked: float = -1.0  # when the consumer had blocks for it
    begin: float = -1.0  # when the link turned to it
    end: float = -1.0  # when the KV was there


class Link:
    """First asked, first sent. `done(handoff)` is called as a KV cache has come to its end.

    A transfer keeps the link for `block_seconds` a block; its last byte arrives `latency` seconds
    after it was sent, when the link is busy with the next one already.
    """

    def __init__(
        self,
        env: simpy.Environment,
        block_seconds: float,
        latency: float,
        done: Callable[[Handoff], None],
    ) -> None:
        self.env = env
        self.block_seconds, self.latency = block_seconds, latency
        self.transfers = 0  # that came to their end
        self.blocks = 0  # of these
        self._done = done
        self._queue: deque[Handoff] = deque()
        self._free = 0.0  # s, when all are sent
        self._alarm = Alarm(env, self._ring)

    @property
    def busy(self) -> float:
        """Seconds that the transfers so far took."""
        return self.blocks * self.block_seconds

    def put(self, handoff: Handoff) -> None:
        """Send a KV cache behind those that are being sent."""
        handoff.state = "moving"
        self._plan(handoff)
        self._queue.append(handoff)
        if len(self._queue) == 1:
            self._alarm.set(handoff.end)

    def _plan(self, handoff: Handoff) -> None:
        handoff.begin = max(self.env.now, self._free)
        self._free = handoff.begin + handoff.blocks * self.block_seconds
        handoff.end = self._free + self.latency

    def _ring(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:
            return  # the link has failed in part since it was set
        queue, now = self._queue, self.env.now
        while queue and queue[0].end <= now:
            handoff = queue.popleft()
            handoff.state = "here"
            self.transfers += 1
            self.blocks += handoff.blocks
            self._done(handoff)
        if queue:
            self._alarm.set(queue[0].end)

    def drop(self, gone: Callable[[Handoff], bool]) -> list[Handoff]:
        """Break off the transfers for which `gone` holds, and return them; others move up."""
        now = self.env.now
        dropped = [handoff for handoff in self._queue if gone(handoff)]
        if not dropped:
            return []
        self._queue = deque(handoff for handoff in self._queue if not gone(handoff))
        self._free = 0.0
        for handoff in self._queue:
            if handoff.begin < now:
                self._free = handoff.end - self.latency
            else:
                self._plan(handoff)
        self._alarm = Alarm(self.env, self._ring)
        if self._queue:
            self._alarm.set(self._queue[0].end)
        return dropped
