"""Orders of vLLM's waiting queue, and a choice of victims, that its tracker discusses.

`scheduling_policy: {policy: "vllm_proposals:ResidualSJF", max_wait: 10}`; the page
docs/waiting-order.md tells what they do to published traces. Written after the descriptions of pull
requests and issues, not after their code.
"""

from simulator.policies.waiting_queues import Fifo


class SortedEachStep:
    """A waiting queue sorted once before each step in which somebody may be admitted.

    Whoever has been preempted goes before all others, first come, first served.
    """

    moves = True  # what is cached, and so the head, may change while others decode

    def __init__(self, batch, key):
        self._batch, self._key = batch, key
        self._waiting = []
        self._sorted = False

    def __len__(self):
        return len(self._waiting)

    def settle(self, now):
        self._sorted = False

    def add(self, request):
        self._waiting.append(request)
        self._sorted = False
        return True

    def put_back(self, request):
        self.add(request)

    def remove(self, request):
        self._waiting.remove(request)

    def head(self):
        if not self._sorted:
            self._waiting.sort(key=self._rank, reverse=True)  # the head is the last
            self._sorted = True
        return self._waiting[-1]

    def take(self):
        self.head()
        return self._waiting.pop()

    def _rank(self, request):
        if request.preemptions:
            return (0, request.arrival, request.id)
        batch = self._batch
        cached = len(batch.blocks.match(request)) * batch.blocks.block_size
        return (*self._key(request, cached, batch.now), request.arrival, request.id)


class ResidualSJF:
    """Least to compute first: whole blocks of the prompt that are not cached (vLLM 51375).

    Whoever has waited `max_wait` seconds goes before those who have not, first come, first served.
    """

    def __init__(self, max_wait: float = 10.0) -> None:
        self.max_wait = max_wait

    def queue(self, batch):
        size = batch.blocks.block_size

        def key(request, cached, now):
            if now - request.arrival >= self.max_wait:
                return 1, 0
            return 2, (request.prompt_tokens - cached) // size

        return SortedEachStep(batch, key)


class CacheAffinity:
    """Most cached first, in tokens (vLLM 42185)."""

    def queue(self, batch):
        return SortedEachStep(batch, lambda request, cached, now: (1, -cached))


class LeastComputedVictim:
    """First come, first served; the one that has computed least is preempted (vLLM 54644)."""

    def queue(self, batch):
        return Fifo()

    def victim(self, running):
        return min(running, key=lambda request: request.computed)
