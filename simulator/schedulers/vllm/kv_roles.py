"""Schedulers of engines that prefill for others, and of those that decode what others prefilled.

As in vLLM V1 with its NixlConnector, which pulls (`v1/core/sched/scheduler.py`,
`kv_connector/v1/nixl/pull_scheduler.py`, read in 2026). The producer is asked for one token and
keeps the blocks of the prompt until they have been copied. The consumer takes blocks for the whole
prompt, but for what its own prefix cache has, when the request comes to the head of its queue and
a seat is free; while the copy runs it waits without a seat (WAITING_FOR_REMOTE_KVS), and others
board. Once the KV is there it is before all that wait; its first step computes the last prompt
token again and brings out the first token of the answer. After a preemption the prompt is computed
here: only one transfer is made for a request.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.waiting_queues import WaitingQueue
from simulator.schedulers.vllm.scheduler import Scheduler

TO_PULL, ARRIVED, LOST = 1, 2, 3  # states of `Request.remote`


class Producer(Scheduler):
    """Computes prompts; what has ended keeps its blocks until it is `sent`."""

    def __init__(self, blocks: BlockCounter, **options: object) -> None:
        super().__init__(blocks, **options)  # type: ignore[arg-type]
        self.sending: dict[Request, None] = {}
        self._kept = 0  # tokens of these

    @property
    def expects(self) -> bool:  # type: ignore[override]
        """Whether blocks come free without a step."""
        return bool(self.sending)

    def _finish(self, request: Request, now: float) -> None:
        self._leave(request)
        request.finish = now
        del self.running[request]
        self.sending[request] = None
        self._kept += request.computed

    def sent(self, request: Request) -> None:
        """Free the blocks of a request: they have been copied, or nobody wants them."""
        del self.sending[request]
        self._kept -= request.computed
        self.blocks.release(request)

    forget = sent

    def stored(self, step: Step) -> int:
        return super().stored(step) + self._kept


class Consumer(Scheduler):
    """Decodes requests whose prompts were computed elsewhere.

    `on_ask(request, found)` is called when a request has its blocks, of which `found` were in the
    prefix cache; the others are to be copied, then `arrived` is to be called, or `failed` if they
    never come. `on_board(request, now)` is called when it is given its seat.
    """

    def __init__(self, blocks: BlockCounter, **options: object) -> None:
        super().__init__(blocks, **options)  # type: ignore[arg-type]
        self.on_ask: Callable[[Request, int], None] | None = None
        self.on_board: Callable[[Request, float], None] | None = None
        self.waiting: LoadedFirst = LoadedFirst(self.waiting)
        self.loading: dict[Request, int] = {}  # by the order in which they asked
        self._asked = 0
        self._unwanted: set[Request] = set()  # of the loading: blocks go when the copy is over
        self._over: list[Request] = []  # blocks to be freed before the next step
        self._kept = 0  # tokens of those that have blocks and no seat

    @property
    def expects(self) -> bool:  # type: ignore[override]
        """Whether a copy is on its way."""
        return bool(self.loading)

    def add(self, request: Request) -> bool:
        request.remote = TO_PULL
        return super().add(request)

    def schedule(self, now: float) -> Step:
        # Between two steps: a leap takes its blocks when it is over.
        for request in self._over:
            self._drop(request)
        self._over.clear()
        return super().schedule(now)

    def _pull(self, step: Step, request: Request, budget: int, now: float) -> int:
        """Take the head's blocks, or give it a seat; return the tokens left, 0 if it must wait.

        What has its blocks is not asked for more: it boards though the watermark be reached.
        """
        if request.remote == ARRIVED:
            self.waiting.take()
            request.remote = 0
            self._kept -= request.computed
            self.blocks.publish(request)
            self._seat(request, now)
            self._single(step, request, request.computed - 1)
            if self.on_board is not None:
                self.on_board(request, now)
            return budget - 1
        hits = self.blocks.match(request)
        if self.admission.lacking(request, hits, request.known, len(self.running)):
            return 0
        self.waiting.take()
        self.admission.board(request)
        self.blocks.hold(request, hits, request.known)
        request.cached = len(hits) * self.blocks.block_size
        self._kept += request.computed
        self._asked += 1
        self.loading[request] = self._asked
        if self.on_ask is not None:
            self.on_ask(request, len(hits))
        return budget

    def arrived(self, request: Request) -> bool:
        """Hear that a request's KV has come; say whether the next step may differ for it."""
        order = self.loading.pop(request)
        if request in self._unwanted:
            self._unwanted.discard(request)
            self._over.append(request)
            return True
        request.remote = ARRIVED
        self.waiting.let_in(request, order)
        return len(self.running) < self.max_num_seqs

    def failed(self, request: Request) -> None:
        """Hear that a request's KV will never come: its blocks go before the next step."""
        del self.loading[request]
        self._unwanted.discard(request)
        self._over.append(request)
        request.remote = LOST

    def cancel(self, request: Request) -> None:
        if request in self.loading:
            self._unwanted.add(request)
        elif request.remote == ARRIVED:
            self.waiting.remove(request)
            self._drop(request)
        elif request.remote != LOST:
            super().cancel(request)

    def _drop(self, request: Request) -> None:
        self._kept -= request.computed
        self.blocks.release(request)

    def wanted(self) -> list[Request]:
        """List the requests whose KV is on its way and that have not been cancelled."""
        return [request for request in self.loading if request not in self._unwanted]

    def stored(self, step: Step) -> int:
        return super().stored(step) + self._kept


class LoadedFirst:
    """A waiting queue before which those stand whose KV has come, in the order of asking.

    Those whose KV is on its way are not in it. vLLM's first come, first served takes its queue of
    skipped requests, in which these are, before the other.
    """

    def __init__(self, others: WaitingQueue) -> None:
        self._others = others
        self.moves = others.moves
        self._loaded: list[tuple[int, Request]] = []  # a heap; no two have the same number

    def __len__(self) -> int:
        return len(self._loaded) + len(self._others)

    def let_in(self, request: Request, order: int) -> None:
        """Take a request whose KV has come."""
        heappush(self._loaded, (order, request))

    def add(self, request: Request) -> bool:
        return self._others.add(request)

    def put_back(self, request: Request) -> None:
        self._others.put_back(request)

    def head(self) -> Request:
        return self._loaded[0][1] if self._loaded else self._others.head()

    def take(self) -> Request:
        return heappop(self._loaded)[1] if self._loaded else self._others.take()

    def remove(self, request: Request) -> None:
        if request.remote == ARRIVED:
            self._loaded = [entry for entry in self._loaded if entry[1] is not request]
            heapify(self._loaded)
        else:
            self._others.remove(request)
