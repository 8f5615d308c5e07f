"""Weighted fair queueing in which each request is a flow of its own, by virtual finish times."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from simulator.core.request import Request
from simulator.policies.fair import check_shares
from simulator.policies.policy import Batch, Factor
from simulator.util.from_mapping import check_range, raise_if

STALE = 0.05  # shares of the longest wait that are off by more are taken anew


@dataclass(slots=True, eq=False)
class Entry:
    """A request that waits, and its place in virtual time."""

    request: Request
    since: float  # s, when it came to wait
    start: float  # virtual time then, tokens per weight
    size: float  # its remaining tokens / its weight


class VirtualFinishTime:
    """Weighted fair queueing of single requests: the smallest virtual time + remaining tokens /
    weight first, waiting ones with up to `starvation_boost` fewer (a share). It preempts the
    largest running request.

    Weighted fair queueing (Demers, Keshav and Shenker, SIGCOMM 1989), self-clocked (Golestani,
    INFOCOM 1994), with each request as a flow of its own where `wfq` has clients. Virtual time is
    the largest finish that was admitted. A request keeps that of the time when it came to wait, so
    that those who come later pass it until virtual time has grown by its size. The proof that this
    is soon is of few flows; here each request is one, and of a queue that only grows virtual time
    grows as the logarithm of time, which a long request waits out. Remaining are the
    prompt tokens not computed and the tokens of the answer not said, of as many as the predictor
    expects, or else the client allows (`max_tokens`); without both they count nothing. `weights`
    are those of clients, 1 for others.

    Who waits has a boost: of its remaining tokens, up to the share `starvation_boost` does not
    count, in proportion to its wait divided by the longest in the queue. It is taken of the
    request's own tokens, not of its finish: virtual time grows without end, and a share of that
    would soon count for more than any length. The queue is sorted again when shares of the longest
    wait are off by 0.05.

    When blocks run out, the running requests are sorted by virtual time + remaining tokens /
    weight, and the last of them is preempted. It comes to wait as one who is new.
    """

    reads = "lengths"
    trials = ({"weights": {"b": 0.3}},)
    moves = False  # `refresh` is called when it may have

    def __init__(
        self, *, weights: Mapping[str, float] | None = None, starvation_boost: Factor = 0.3
    ) -> None:
        if weights is not None:
            check_shares(weights)
        raise_if(check_range("starvation_boost", starvation_boost, 0, 1))
        self.weights = weights or {}
        self.starvation_boost = starvation_boost

    def size(self, request: Request) -> float:
        """Return a request's remaining tokens, divided by its weight."""
        answer = request.max_tokens or 0 if request.hint is None else request.hint
        tokens = max(0, request.prompt_tokens - request.computed)
        tokens += max(0, answer - request.generated)
        return tokens / self.weights.get(request.client, 1)

    def victim(self, running: Iterable[Request]) -> Request:
        # Virtual time is the same for all of them.
        return max(running, key=lambda one: (self.size(one), one.arrival, one.id))

    def queue(self, batch: Batch) -> "VirtualFinishTime":
        """Begin with an empty queue, at virtual time 0."""
        self.virtual = 0.0
        self._batch = batch
        self._entries: dict[Request, Entry] = {}
        self._heap: list[tuple[float, float, int, Entry]] = []
        self._oldest: deque[Entry] = deque()  # in order of `since`; those who have left among them
        self._now = 0.0  # s, when the shares were taken
        self._longest = 0.0  # s, the longest wait then
        self._newest = -inf  # s, when the last of those who waited then had come
        self._newcomer = inf  # s, when the first came since
        return self

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> bool:
        self._join(request, request.arrival)
        # The next step takes shares anew, and which they are later depends on when that was.
        return self.starvation_boost > 0 or self.head() is request

    def put_back(self, request: Request) -> None:
        self._join(request, self._batch.now)

    def _join(self, request: Request, now: float) -> None:
        entry = Entry(request, now, self.virtual, self.size(request))
        self._entries[request] = entry
        self._oldest.append(entry)
        self._newcomer = min(self._newcomer, now)
        heappush(self._heap, self._ranked(entry))

    def _share(self, since: float) -> float:
        """Return the share that a wait had of the longest, when shares were taken."""
        return (self._now - since) / self._longest if since < self._now else 0.0

    def _ranked(self, entry: Entry) -> tuple[float, float, int, Entry]:
        left = 1 - self.starvation_boost * self._share(entry.since)
        request = entry.request
        return entry.start + entry.size * left, request.arrival, request.id, entry

    def refresh(self, now: float) -> None:
        """Sort the queue again, if shares of the longest wait have changed by more than STALE.

        Between two who came, the change of a share is a straight line: so it is largest for the
        first or the last of those who waited then, or for the first who came since.
        """
        oldest = self._oldest
        while oldest and self._entries.get(oldest[0].request) is not oldest[0]:
            oldest.popleft()
        longest = now - oldest[0].since if oldest else 0.0
        if longest <= 0:
            return
        first = oldest[0].since
        extremes = (first, max(self._newest, first), max(self._newcomer, first))
        changes = [(now - s) / longest - self._share(s) for s in extremes if s < now]
        if max(map(abs, changes)) > STALE:
            self._now, self._longest = now, longest
            self._newest, self._newcomer = oldest[-1].since, inf
            self._heap = [self._ranked(entry) for entry in self._entries.values()]
            heapify(self._heap)

    def head(self) -> Request:
        heap = self._heap
        while self._entries.get(heap[0][3].request) is not heap[0][3]:
            heappop(heap)
        return heap[0][3].request

    def take(self) -> Request:
        request = self.head()
        entry = self._entries.pop(request)
        heappop(self._heap)
        self.virtual = max(self.virtual, entry.start + entry.size)
        return request

    def remove(self, request: Request) -> None:
        del self._entries[request]
