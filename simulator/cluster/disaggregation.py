"""A fleet whose prompts are computed by some replicas and whose answers come from others.

A request goes to a producer, as a job of one token; when that has ended, the second router gives
the request itself to a consumer, which pulls the KV cache over the producer's link
(`kv_roles.py`). So does the proxy beside vLLM's NixlConnector (toy_proxy_server.py): the client
gets its first token from the consumer.

With `layerwise` or `max_local_prefill_length` the consumer comes first, as in SGLang and Dynamo: it
has blocks for a prompt before that is computed. A prompt of which it lacks at most so many tokens
it computes itself; another goes to a producer as it has its blocks, and the KV comes to it layer by
layer, or as a whole at the end.

A try that is cancelled before its KV moves frees the producer's blocks at once; a transfer that is
under way runs to its end, as in vLLM, and frees the blocks at both ends then. A producer that fails
takes with it what it computes and what has not been copied; a consumer that fails, what it has and
what is on the way to it: these requests begin anew. (vLLM's producer keeps the blocks of a consumer
that is gone until a time-out; here it hears of it.)
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import inf, nextafter

import simpy

from simulator.cluster.fleet import Sessions
from simulator.cluster.kv_links import Handoff, Link, PairedFleet
from simulator.cluster.routers import Router, Target
from simulator.core.alarm import Alarm
from simulator.core.executor import Executor
from simulator.core.log import REJECTED, UNFINISHED, pack_transfer
from simulator.core.request import Request
from simulator.schedulers.interface import SchedulerInterface
from simulator.schedulers.vllm.kv_roles import ABSENT, ARRIVED, Consumer, Producer


class DisaggregatedFleet(PairedFleet):
    """Producers and consumers behind a router each.

    `block_seconds` says, for each group of producers, how long its link is busy with a KV block;
    `latency` is the s that its last byte then takes. `transfers` has a row of log.TRANSFER for each
    request that was given a seat with the KV that it pulled. `layers` of each group of producers
    says that the KV of each goes as it is computed; a consumer computes up to `max_local` tokens of
    a prompt itself. With either the consumer comes first.
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
        layers: Mapping[str, int] | None = None,
        max_local: int = 0,
    ) -> None:
        super().__init__(env, router, sessions, to_consumers=to_consumers, latency=latency)
        self._clock.on_settled = self._settled
        self.transfers = bytearray()
        self._block_seconds = block_seconds
        self._layers, self._max_local = layers or {}, max_local
        self._decodes_first = bool(layers) or max_local > 0
        self._client_requests: dict[int, Request] = {}  # what goes to a consumer, by id
        self._handoffs: dict[int, Handoff] = {}  # by id, until the request has a seat
        self._unplaced: deque[Handoff] = deque()  # while none is open that comes next
        self._placed: list[Handoff] = []  # since the last steps began
        self._kv_requests: list[tuple[int, Handoff]] = []  # likewise, with the consumer's number

    def add(
        self, group: str, scheduler: SchedulerInterface, executor: Executor, *, leap: bool = True
    ) -> Target:
        target = super().add(group, scheduler, executor, leap=leap)
        if isinstance(scheduler, Producer):
            of_link = self._block_seconds[group], self._latency, self._moved
            self.links[target.index] = Link(self.env, *of_link, self._layers.get(group, 1))
        else:
            self.routers.consumers.add(target.index)
        self._kinds.setdefault(group, target.index)
        self._connect(target, scheduler)
        return target

    def _connect(self, target: Target, scheduler: SchedulerInterface) -> None:
        if isinstance(scheduler, Consumer):
            scheduler.on_ask = partial(self._kv_requested, target.index)
            scheduler.on_admit = self._admitted
            scheduler.max_local = self._max_local

    def _producer(self, target: Target) -> Producer:
        scheduler = self.cores[target.index].scheduler
        assert isinstance(scheduler, Producer)
        return scheduler

    def _consumer(self, target: Target) -> Consumer:
        scheduler = self.cores[target.index].scheduler
        assert isinstance(scheduler, Consumer)
        return scheduler

    def open_target(self, target: Target) -> None:
        super().open_target(target)
        unplaced, self._unplaced = self._unplaced, deque()
        for handoff in unplaced:
            if self._handoffs.get(handoff.request.id) is handoff:
                self._ask_producer(handoff) if handoff.state == "asked" else self._place(handoff)

    def _submit(self, request: Request) -> None:
        """Send a prompt to a producer, or its request to a consumer first.

        Refuse a request that a replica of another kind could never hold.
        """
        routers = self.routers
        if not routers.open_producers or (self._decodes_first and not routers.open_consumers):
            self._hold(request)
            return
        self._stamp_arrival(request)
        job = replace(
            request, output_tokens=1, max_tokens=None, ignore_eos=False, model="", blocks=None
        )
        self._client_requests[request.id] = request
        if self._decodes_first:
            target = routers.to_consumers.choose(request, self._session(request))
            first = request
        else:
            first, target = job, routers.choose(job, self._session(job))
        self._assign(first, target)
        core = self.cores[target.index]
        if not core.scheduler.fits(first) or not self._fits(request, job):
            core.record(first, REJECTED)
            return
        if self._decodes_first:
            handoff = Handoff(request, job, consumer=target, state="asked", placed=self.env.now)
            self._handoffs[request.id] = handoff
            self._placed.append(handoff)
        core.submit(first)

    def _fits(self, request: Request, job: Request) -> bool:
        """Say whether every consumer could hold a request, and every producer its prompt."""
        return all(
            self.cores[index].scheduler.fits(job if index in self.links else request)
            for index in self._kinds.values()
        )

    def _ask_producer(self, handoff: Handoff) -> None:
        """Have a prompt computed for which a consumer has blocks."""
        if not self.routers.open_producers:
            self._unplaced.append(handoff)
            return
        job = handoff.job
        job.arrival = self.env.now
        self._stamp_arrival(job)
        handoff.producer = target = self.routers.choose(job, self._session(job))
        self._assign(job, target)
        self._at[job.id] = handoff.request, handoff.consumer
        self.cores[target.index].submit(job)

    def _asked(self, handoff: Handoff, _: simpy.Event) -> None:
        if self._handoffs.get(handoff.request.id) is handoff:
            self._ask_producer(handoff)

    def _leave(self, target: Target, request: Request) -> None:
        handoff = self._handoffs.get(request.id)
        if handoff is not None and handoff.job is request:
            self._forget(target, request)  # the consumer has it still
        else:
            super()._leave(target, request)

    def _computed(self, handoff: Handoff) -> None:
        """Send the KV of a prompt for which a consumer has blocks."""
        assert handoff.producer is not None
        handoff.ready = self.env.now
        if handoff.job in self._producer(handoff.producer).sending:
            self.links[handoff.producer.index].put(handoff)
            return
        # Its blocks were taken while its token was on its way.
        assert handoff.consumer is not None
        request = handoff.request
        del self._handoffs[request.id], self._at[request.id]
        self._give_up(handoff, handoff.consumer)
        self._withdraw(handoff, handoff.consumer)
        self.submit_again(self._client_requests.pop(request.id))

    def _give_up(self, handoff: Handoff, consumer: Target) -> None:
        """Let a consumer free the blocks of a request whose KV will not come."""
        if handoff.asked >= 0:
            self._consumer(consumer).failed(handoff.request)
            self.cores[consumer.index].wake()

    def _drop_job(self, handoff: Handoff) -> None:
        """Have a producer compute no longer what nobody waits for."""
        if (target := handoff.producer) is not None:
            self._forget(target, handoff.job)
            blocks = -(-handoff.job.prompt_tokens // target.block_size)
            target.used = max(target.used - blocks, 0)
            self.router.changed(target)
            self.cores[target.index].cancel(handoff.job)
            self._notify_if_idle(target)

    def _notify(self, target: Target, request: Request) -> None:
        """Pass a prompt that is computed on to a consumer; all else goes to the client."""
        wanted, under_way = self._client_requests[request.id], self._handoffs.get(request.id)
        if under_way is not None and request is under_way.job:
            self._computed(under_way)
        elif request is not wanted and request.state == "finished":
            handoff = Handoff(wanted, request, target, ready=self.env.now)
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

    def _settled(self, now: float) -> None:
        """Let links have what the steps that begin now have asked for."""
        # Which consumer's step began first at this instant may depend on leaps, its number not.
        self._kv_requests.sort(key=lambda entry: entry[0])
        for _, handoff in self._kv_requests:
            if handoff.producer is not None:
                self.links[handoff.producer.index].put(handoff)
            else:  # the next steps have begun: it comes too late for them
                Alarm(self.env, partial(self._asked, handoff)).set(nextafter(now, inf))
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
        assert target is not None
        core = self.cores[target.index]
        self._producer(target).sent(handoff.job)
        if core.stats().waiting:
            core.wake()
        self._notify_if_idle(target)

    def _notify_if_idle(self, target: Target) -> None:
        if target.index not in self.links or not self._producer(target).sending:
            super()._notify_if_idle(target)

    def _admitted(self, request: Request, now: float) -> None:
        """Write down how a request came to its seat for the first time."""
        handoff = self._handoffs.pop(request.id, None)
        if handoff is None or handoff.producer is None:  # its prompt is computed here
            return
        assert handoff.consumer is not None
        if handoff.asked < 0:  # there was nothing to be moved
            handoff.asked = handoff.begin = handoff.end = now
        numbers = handoff.producer.index, handoff.consumer.index
        asked = max(handoff.asked, handoff.ready)  # what goes while the prompt is computed: free
        times = handoff.ready, asked, max(handoff.begin, asked), handoff.end, now
        self.transfers += pack_transfer(request.id, *numbers, *times, handoff.blocks, handoff.found)

    def cancel(self, id: int) -> Request:
        request = super().cancel(id)
        handoff = self._handoffs.pop(id, None)
        if handoff is not None and handoff.state == "waiting":
            self._release(handoff)
        elif handoff is not None and handoff.state == "asked":
            assert handoff.consumer is not None
            self._give_up(handoff, handoff.consumer)
            self._drop_job(handoff)
        return self._client_requests.pop(id, request)

    def crash(self, target: Target, *schedulers: SchedulerInterface) -> int:
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
                if handoff.state == "asked":
                    self._give_up(handoff, handoff.consumer)
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
            lost_here = self._handoffs.pop(id) if id in self._handoffs else None
            if lost_here is not None and lost_here.state == "waiting":
                self._release(lost_here)
            elif lost_here is not None and lost_here.state == "asked":
                self._drop_job(lost_here)

    def abandon(self) -> None:
        super().abandon()
        for core in self.cores:
            if isinstance(core.scheduler, Consumer):
                for request in core.scheduler.wanted():
                    core.record(request, UNFINISHED)
