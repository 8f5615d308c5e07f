"""KV caches on their way from producers to consumers, and the links on which they go."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import simpy

from simulator.cluster.fleet import Fleet, Sessions
from simulator.cluster.routers import Router, Target
from simulator.core.alarm import Alarm
from simulator.core.request import Request


@dataclass(slots=True, eq=False)
class Handoff:
    """The KV cache of a prompt on its way from one replica to another. Times in s; -1: not yet."""

    request: Request  # that decodes
    job: Request  # that computes the prompt and has the blocks
    producer: Target | None = None  # None: none has been asked yet
    ready: float = -1.0  # when the prompt was computed
    consumer: Target | None = None  # None: none is open
    state: Literal["asked", "waiting", "moving", "here"] = "waiting"
    """asked: the consumer comes first, and has no prompt as yet (`layerwise`)."""
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

    With `layers` each layer's KV goes as soon as it is computed, all layers alike. A prompt whose
    prefill takes T and whose bytes take X on a free link is there max(T + X / layers, T / layers +
    X) after its prefill began: the last layer goes alone, or all wait for the link. Of prompts
    that are computed together the earlier one goes first, layer by layer.
    """

    def __init__(
        self,
        env: simpy.Environment,
        block_seconds: float,
        latency: float,
        done: Callable[[Handoff], None],
        layers: int = 1,
    ) -> None:
        self.env = env
        self.block_seconds, self.latency, self.layers = block_seconds, latency, layers
        self.transfers = 0  # that came to their end
        self.blocks = 0  # of these
        self._done = done
        self._queue: deque[Handoff] = deque()
        self._free = 0.0  # s, when all are sent
        self._last = 0.0  # s, when the last layers of all are, if nothing else keeps the link
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
        busy = handoff.blocks * self.block_seconds
        if self.layers == 1:
            handoff.begin = max(self.env.now, self._free)
            self._free = handoff.begin + busy
            handoff.end = self._free + self.latency
            return
        took = handoff.ready - handoff.job.first_scheduled
        handoff.begin = max(handoff.ready - took * (1.0 - 1.0 / self.layers), self._free)
        self._free = handoff.begin + busy
        self._last = max(self._last, handoff.ready) + busy / self.layers
        handoff.end = max(self._free, self._last) + self.latency

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
        self._free = self._last = now  # until now the link had others to send
        for handoff in self._queue:
            if handoff.begin < now:
                self._free = self._last = max(handoff.end - self.latency, now)
            else:
                self._plan(handoff)
        self._alarm = Alarm(self.env, self._ring)
        if self._queue:
            self._alarm.set(self._queue[0].end)
        return dropped


class PairedFleet(Fleet):
    """Replicas of two kinds, behind a router each: a request goes from one to the other."""

    def __init__(
        self,
        env: simpy.Environment,
        router: Router,
        sessions: Sessions | None,
        *,
        to_consumers: Router,
        latency: float,
    ) -> None:
        self.routers = RouterPair(router, to_consumers)
        super().__init__(env, self.routers, sessions)
        self.links: dict[int, Link] = {}  # by the number of who sends
        self._latency = latency  # s
        self._kinds: dict[str, int] = {}  # a replica of each group

    @property
    def has_no_replica(self) -> bool:
        return not self.routers.open_producers or not self.routers.open_consumers


class RouterPair:
    """The routers to producers and to consumers, as one for all who open and close replicas."""

    def __init__(self, to_producers: Router, to_consumers: Router) -> None:
        self.to_producers, self.to_consumers = to_producers, to_consumers
        self.consumers: set[int] = set()  # the replicas that are consumers
        self.open_producers = self.open_consumers = 0

    def _of(self, target: Target) -> Router:
        return self.to_consumers if target.index in self.consumers else self.to_producers

    def _count(self, target: Target, by: int) -> None:
        if target.index in self.consumers:
            self.open_consumers += by
        else:
            self.open_producers += by

    def open(self, target: Target) -> None:
        self._count(target, 1)
        self._of(target).open(target)

    def close(self, target: Target) -> None:
        self._count(target, -1)
        self._of(target).close(target)

    def changed(self, target: Target) -> None:
        self._of(target).changed(target)

    def choose(self, request: Request, session: int) -> Target:
        return self.to_producers.choose(request, session)
