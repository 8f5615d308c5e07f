"""A fleet whose prompts are computed by some replicas and whose answers come from others.

A request goes to a producer, as a job of one token; when that has ended, the second router gives
the request itself to a consumer, which pulls the KV cache over the producer's link
(`kv_roles.py`). So does the proxy beside vLLM's NixlConnector (toy_proxy_server.py): the client
gets its first token from the consumer.

A try that is cancelled before its KV moves frees the producer's blocks at once; a transfer that is
under way runs to its end, as in vLLM, and frees the blocks at both ends then. A producer that fails
takes with it what it computes and what has not been copied; a consumer that fails, what it has and
what is on the way to it: these requests begin anew. (vLLM's producer keeps the blocks of a consumer
that is gone until a time-out; here it hears of it.)
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import simpy

from simulator.cluster.fleet import Fleet, Sessions
from simulator.cluster.routers import Router, Target
from simulator.core.alarm import Alarm
from simulator.core.executor import Executor
from simulator.core.log import REJECTED, UNFINISHED, pack_transfer
from simulator.core.request import Request
from simulator.schedulers.vllm.kv_roles import ABSENT, ARRIVED, Consumer, Producer
from simulator.schedulers.vllm.scheduler import Scheduler


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


class DisaggregatedFleet(Fleet):
    """Producers and consumers behind a router each.

    `block_seconds` says, for each group of producers, how long its link is busy with a KV block;
    `latency` is the s that its last byte then takes. `transfers` has a row of log.TRANSFER for each
    request that was given a seat with the KV that it pulled.
    """

    def __init__(
        self,
        env: simpy.Environment,
        router: Router,
        sessions: Sessions | None,
        *,
        to_consumers: Router,
        block_seconds: Mapping[str, float],
        latency: float = 0.0,
    ) -> None:
        self.routers = RouterPair(router, to_consumers)
        super().__init__(env, self.routers, sessions)
        self.links: dict[int, Link] = {}  # by the producer's number
        self.transfers = bytearray()
        self._block_seconds, self._latency = block_seconds, latency
        self._kinds: dict[str, int] = {}  # a consumer of each group
        self._client_requests: dict[int, Request] = {}  # what goes to a consumer, by id
        self._handoffs: dict[int, Handoff] = {}  # by id, until the request has a seat
        self._unplaced: deque[Handoff] = deque()  # while no consumer is open
        self._placed: list[Handoff] = []  # since the last steps began
        self._kv_requests: list[tuple[int, Handoff]] = []  # likewise, with the consumer's number

    def add(
        self, group: str, scheduler: Scheduler, executor: Executor, *, leap: bool = True
    ) -> Target:
        target = super().add(group, scheduler, executor, leap=leap)
        if isinstance(scheduler, Producer):
            seconds = self._block_seconds[group]
            self.links[target.index] = Link(self.env, seconds, self._latency, self._moved)
        else:
            self.routers.consumers.add(target.index)
            self._kinds.setdefault(group, target.index)
        self._connect(target, scheduler)
        return target

    def _connect(self, target: Target, scheduler: Scheduler) -> None:
        if isinstance(scheduler, Consumer):
            scheduler.on_ask = partial(self._kv_requested, target.index)
            scheduler.on_admit = self._admitted

    def _producer(self, target: Target) -> Producer:
        scheduler = self.cores[target.index].scheduler
        assert isinstance(scheduler, Producer)
        return scheduler

    def _consumer(self, target: Target) -> Consumer:
        scheduler = self.cores[target.index].scheduler
        assert isinstance(scheduler, Consumer)
        return scheduler

    @property
    def has_no_replica(self) -> bool:
        return not self.routers.open_producers or not self.routers.open_consumers

    def open_target(self, target: Target) -> None:
        super().open_target(target)
        unplaced, self._unplaced = self._unplaced, deque()
        for handoff in unplaced:
            if self._handoffs.get(handoff.request.id) is handoff:
                self._place(handoff)

    def _submit(self, request: Request) -> None:
        """Send a prompt to a producer; refuse a request that a consumer could never hold."""
        if not self.routers.open_producers:
            self._hold(request)
            return
        self._stamp_arrival(request)
        job = Request(
            *(request.id, request.arrival, request.prompt_tokens, 1),
            *(request.client, request.priority, request.segments, request.hint),
        )
        target = self.routers.choose(job, self._session(job))
        self._client_requests[request.id] = request
        self._assign(job, target)
        core = self.cores[target.index]
        if core.scheduler.fits(job) and self._fits(request):
            core.submit(job)
        else:
            core.record(job, REJECTED)

    def _fits(self, request: Request) -> bool:
        kinds = self._kinds.values()
        return all(self.cores[index].scheduler.fits(request) for index in kinds)

    def _notify(self, target: Target, request: Request) -> None:
        """Pass a prompt that is computed on to a consumer; all else goes to the client."""
        wanted = self._client_requests[request.id]
        if request is not wanted and request.finish >= 0:
            handoff = Handoff(wanted, request, target, self.env.now)
            if request not in self._producer(target).sending:
                wanted.remote, handoff.state = ABSENT, "here"
            self._handoffs[request.id] = handoff
            self._place(handoff)
        else:
            del self._client_requests[request.id]
            super()._notify(target, wanted)

    def _place(self, handoff: Handoff) -> None:
        """Send a request whose prompt is computed to a consumer."""
        request = handoff.request
        if not self.routers.open_consumers:
            self._at[request.id] = request, None
            self._unplaced.append(handoff)
            return
        request.arrival = handoff.placed = self.env.now
        self._stamp_arrival(request)
        target = self.routers.to_consumers.choose(request, self._session(request))
        handoff.consumer = target
        self._assign(request, target)
        self._placed.append(handoff)
        self.cores[target.index].submit(request)

    def _kv_requested(self, number: int, request: Request, found: int) -> None:
        """Take note that a consumer has blocks for a request."""
        handoff = self._handoffs[request.id]
        size = self.targets[number].block_size
        handoff.found, handoff.asked = found, self.env.now
        handoff.blocks = -(-request.prompt_tokens // size) - found
        self._kv_requests.append((number, handoff))

    def _ring(self, now: float) -> None:
        super()._ring(now)
        # Which consumer's step began first at this instant may depend on leaps, its number not.
        self._kv_requests.sort(key=lambda entry: entry[0])
        for _, handoff in self._kv_requests:
            self.links[handoff.producer.index].put(handoff)
        self._kv_requests.clear()
        for handoff in self._placed:
            if handoff.state == "here" or handoff.consumer is None:
                continue
            if handoff.asked == handoff.placed:
                self.cores[handoff.consumer.index].log.joined.pop()  # it has not waited
        self._placed.clear()

    def _moved(self, handoff: Handoff) -> None:
        """Free a producer's blocks: the KV is at the consumer, be it wanted there or not."""
        assert handoff.consumer is not None
        self._release(handoff)
        core = self.cores[handoff.consumer.index]
        changes = self._consumer(handoff.consumer).arrived(handoff.request)
        if handoff.request.remote == ARRIVED:
            core.log.joined.append(self.env.now)  # it waits for a seat
        if changes:
            core.wake()

    def _release(self, handoff: Handoff) -> None:
        target = handoff.producer
        scheduler = self._producer(target)
        scheduler.sent(handoff.job)
        if scheduler.waiting:
            self.cores[target.index].wake()
        self._notify_if_idle(target)

    def _notify_if_idle(self, target: Target) -> None:
        if target.index not in self.links or not self._producer(target).sending:
            super()._notify_if_idle(target)

    def _admitted(self, request: Request, now: float) -> None:
        """Write down how a request came to its seat for the first time."""
        handoff = self._handoffs.pop(request.id, None)
        if handoff is None:
            return
        assert handoff.consumer is not None
        if handoff.asked < 0:  # there was nothing to be moved
            handoff.asked = handoff.begin = handoff.end = now
        numbers = handoff.producer.index, handoff.consumer.index
        times = handoff.ready, handoff.asked, handoff.begin, handoff.end, now
        self.transfers += pack_transfer(request.id, *numbers, *times, handoff.blocks, handoff.found)

    def cancel(self, id: int) -> Request:
        request = super().cancel(id)
        handoff = self._handoffs.pop(id, None)
        if handoff is not None and handoff.state == "waiting":
            self._release(handoff)
        return self._client_requests.pop(id, request)

    def crash(self, target: Target, *schedulers: Scheduler) -> int:
        if target.index in self.open:
            del self.open[target.index]
            self.router.close(target)
        lost = [id for id, (_, at) in self._at.items() if at is target]
        self._connect(target, schedulers[0])
        if target.index in self.links:
            lost += self._lose_producer(target)
        else:
            self._lose_consumer(target, lost)
        self.engines[target.index].crash(*schedulers)
        target.outstanding = target.tokens = target.used = 0
        target.models.clear()
        for id in lost:
            del self._at[id]
            self.submit_again(self._client_requests.pop(id))
        return len(lost)

    def _lose_producer(self, target: Target) -> list[int]:
        """Break its transfers off; give the requests whose KV was there and nowhere else."""
        moving = self.links[target.index].drop(lambda _: True)
        for handoff in moving:
            assert handoff.consumer is not None
            self._consumer(handoff.consumer).failed(handoff.request)
            self.cores[handoff.consumer.index].wake()
        lost = []
        for id, handoff in list(self._handoffs.items()):
            if handoff.producer is not target or handoff.state == "here":
                continue
            del self._handoffs[id]
            lost.append(id)
            if handoff.consumer is not None:
                self._withdraw(handoff, handoff.consumer)
        return lost

    def _withdraw(self, handoff: Handoff, consumer: Target) -> None:
        """Take a request whose KV is lost from the consumer where it waits."""
        request = handoff.request
        self._forget(consumer, request)
        consumer.used = max(consumer.used - -(-request.prompt_tokens // consumer.block_size), 0)
        self.router.changed(consumer)
        if handoff.state == "waiting":
            self.cores[consumer.index].cancel(request)
        self._notify_if_idle(consumer)

    def _lose_consumer(self, target: Target, lost: list[int]) -> None:
        """Break off the transfers to it, and free what was kept for it."""
        for link in self.links.values():
            for handoff in link.drop(lambda handoff: handoff.consumer is target):
                self._release(handoff)
        for id in lost:
            if id in self._handoffs and (handoff := self._handoffs.pop(id)).state == "waiting":
                self._release(handoff)

    def abandon(self) -> list[Request]:
        left = super().abandon()
        for core in self.cores:
            if isinstance(core.scheduler, Consumer):
                for request in core.scheduler.wanted():
                    core.record(request, UNFINISHED)
        return left
