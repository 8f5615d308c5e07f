"""Schedulers of engines that prefill for others, and of those that decode what others prefilled.

As in vLLM V1 with its NixlConnector, which pulls (`v1/core/sched/scheduler.py`,
`kv_connector/v1/nixl/pull_scheduler.py`, read in 2026). The producer is asked for one token and
keeps the blocks of the prompt until they have been copied. The consumer takes blocks for the whole
prompt, but for what its own prefix cache has, when the request comes to the head of its queue and
fewer than `max_num_seqs` run; while the copy runs it waits (WAITING_FOR_REMOTE_KVS), and others are
admitted. Once the KV is there it is before all that wait; its first step computes the last prompt
token again and brings out the first token of the answer. After a preemption the prompt is computed
here: only one transfer is made for a request. So it is where the producer has lost the KV: under
asynchronous scheduling it may preempt a request whose token is on its way.
"""

from collections.abc import Callable, Sequence
from typing import Unpack

from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.waiting_queues import FrontQueue
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.connector import Loading
from simulator.schedulers.vllm.scheduler import Options, Scheduler

TO_PULL, ARRIVED, LOST, ABSENT = 1, 2, 3, 4  # states of `Request.remote`


class Producer(Scheduler):
    """Computes prompts; what has ended keeps its blocks until it is `sent`."""

    def __init__(self, blocks: BlockCounter, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)
        self.sending: dict[Request, None] = {}

    @property
    def awaits_transfer(self) -> bool:
        """Whether blocks come free without a step."""
        return bool(self.sending)

    def finish(self, request: Request, now: float) -> None:
        if request not in self.running:  # its blocks were taken while its token was on its way
            super().finish(request, now)
            return
        self.running.remove(request)
        request.finish = now
        self.sending[request] = None
        self.kept_tokens += request.computed

    def sent(self, request: Request) -> None:
        """Free the blocks of a request: they have been copied, or nobody wants them."""
        del self.sending[request]
        self.kept_tokens -= request.computed
        self.blocks.release(request)

    def forget(self, request: Request) -> None:
        if request in self.sending:
            self.sent(request)


class AsyncProducer(Producer, AsyncScheduler):
    """A producer that schedules asynchronously."""


class Consumer(Loading):
    """Decodes requests whose prompts were computed elsewhere.

    `on_ask(request, found)` is called when a request has its blocks, of which `found` were in the
    prefix cache; the others are to be copied, then `arrived` is to be called, or `failed` if they
    never come. `on_admit(request, now)` is called whenever it is admitted. One that
    comes with `remote` ABSENT has no KV elsewhere, and its prompt is computed here; so is one of
    which `max_local` tokens or fewer are not in the prefix cache.

    Before all that wait stand those whose KV has come, in the order of asking; those whose KV is on
    its way are not in the queue. vLLM's first come, first served takes its queue of skipped
    requests, in which these are, before the other.
    """

    def __init__(self, blocks: BlockCounter, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)
        self.on_ask: Callable[[Request, int], None] | None = None
        self.on_admit: Callable[[Request, float], None] | None = None
        self.max_local = 0  # tokens of a prompt that it computes itself, at most
        self.waiting: FrontQueue = FrontQueue(self.waiting)
        self._asked = 0  # requests in `loading`, by the order in which they asked
        self._cancelled: set[Request] = set()  # of the loading: blocks go when the copy is over
        self._to_free: list[Request] = []  # blocks to be freed before the next step

    @property
    def awaits_transfer(self) -> bool:
        """Whether a copy is on its way."""
        return bool(self.loading)

    def add(self, request: Request) -> bool:
        request.remote = 0 if request.remote == ABSENT else TO_PULL
        return super().add(request)

    def schedule(self, now: float) -> Step:
        # Between two steps: a leap takes its blocks when it is over.
        for request in self._to_free:
            self._let_go(request)
        self._to_free.clear()
        return super().schedule(now)

    def pull(self, step: Step, request: Request, budget: int) -> int:
        """Take the head's blocks, or admit it; return the tokens left, 0 if it must wait.

        What has its blocks is not asked for more: it runs though the watermark be reached.
        """
        if request.remote == ARRIVED:
            return self._take_up(step, request, budget)
        hits = self.blocks.match(request)
        if request.known - len(hits) * self.blocks.block_size <= self.max_local:
            request.remote = 0
            return budget
        if self._lacks_room(step, request, hits):
            return 0
        self.waiting.take()
        self.admission.reserve(request)
        self.blocks.hold(request, hits, request.known)
        request.cached = len(hits) * self.blocks.block_size
        self.kept_tokens += request.computed
        self._asked += 1
        self.loading[request] = self._asked
        if self.on_ask is not None:
            self.on_ask(request, len(hits))
        return budget

    def _take_up(self, step: Step, request: Request, budget: int) -> int:
        """Admit the head, whose KV is there; return the tokens left, 0 if it must wait."""
        self.waiting.take()
        request.remote = 0
        self.kept_tokens -= request.computed
        self.blocks.publish(request)
        self.start(request)
        step.add_single(request, request.computed - 1)
        return budget - 1

    def _lacks_room(self, step: Step, request: Request, hits: Sequence[int]) -> bool:
        """Say whether there is no room for a prompt that comes from elsewhere."""
        return self.lacks_blocks(request, hits, request.known)

    def start(self, request: Request) -> None:
        super().start(request)
        if self.on_admit is not None:
            self.on_admit(request, self.now)

    def arrived(self, request: Request) -> bool:
        """Hear that a request's KV has come; say whether the next step may differ for it."""
        order = self.loading.pop(request)
        if request in self._cancelled:
            self._cancelled.discard(request)
            self._to_free.append(request)
            return True
        request.remote = ARRIVED
        self.waiting.push(order, request)
        return len(self.running) < self.max_num_active_seqs

    def failed(self, request: Request) -> None:
        """Hear that a request's KV will never come: its blocks go before the next step."""
        del self.loading[request]
        self._cancelled.discard(request)
        self._to_free.append(request)
        request.remote = LOST

    def cancel(self, request: Request) -> None:
        if request in self.loading:
            self._cancelled.add(request)
        elif request.remote == ARRIVED:
            self.waiting.remove(request)
            self._let_go(request)
        elif request.remote != LOST:
            super().cancel(request)

    def wanted(self) -> list[Request]:
        """List the requests whose KV is on its way and that have not been cancelled."""
        return [request for request in self.loading if request not in self._cancelled]


class AsyncConsumer(Consumer, AsyncScheduler):
    """A consumer that schedules asynchronously."""
