"""vLLM's internal load balancer: which engine core of a data-parallel server gets a request.

As `DPLBAsyncMPClient.get_core_engine_for_request` in vLLM 0.33 (since pull request 49204, July
2026; before it the score was waiting x 4 + running). Each front end (API server) counts exactly
what it has in flight at each rank; of the others' requests it knows what the coordinator published
last, up to `INTERVAL` ago, and what it has sent itself since. It takes the rank with the smallest

    max(front ends x in flight, waiting + running) + 6 waiting max(0, share of KV in use - 0.5)

and of equals the first from a place that goes on by one with every request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random

SINCE = (0, 27)
"""vLLM's version from which on it balances so, to its month: August 2026."""
INTERVAL = 0.1
"""s between two publications of the counts, while there are requests (vLLM's coordinator)."""

Counts = tuple[int, int, float]
"""Of a rank: requests waiting, requests running, share of the KV cache in use."""


@dataclass(slots=True)
class FrontEnd:
    """One API server, and what it knows."""

    start: int  # where its next look begins
    inflight: list[int]  # its own requests at each rank
    published: list[Counts]  # as published last
    since: list[int]  # counted as waiting since then, by rank

    def choose(self, front_ends: int) -> int:
        """Choose a rank for a request, and count it there."""
        count = len(self.published)
        chosen, least = 0, inf
        for step in range(count):
            rank = (self.start + step) % count
            waiting, running, usage = self.published[rank]
            waiting += self.since[rank]
            score: float = max(front_ends * self.inflight[rank], waiting + running)
            if waiting and usage > 0.5:
                score += waiting * 6.0 * (usage - 0.5)
            if score < least:
                chosen, least = rank, score
        self.since[chosen] += front_ends
        self.inflight[chosen] += 1
        self.start = (self.start + 1) % count
        return chosen


class Balancer:
    """Spreads requests over ranks.

    Which of the `front_ends` a request comes to is drawn evenly from `random`, as the kernel deals
    connections out to processes that listen at one port.
    """

    def __init__(self, ranks: int, front_ends: int, random: Random) -> None:
        self._ranks = ranks
        self._count = front_ends
        self._random = random
        self._sent: dict[int, tuple[FrontEnd, int]] = {}
        self.reset()

    def reset(self) -> None:
        """Begin anew, without requests."""
        none: Counts = (0, 0, 0.0)
        zeros = [0] * self._ranks
        self._fronts = [
            FrontEnd(self._ranks * k // self._count, [*zeros], [none] * self._ranks, [*zeros])
            for k in range(self._count)
        ]
        self._sent.clear()

    @property
    def busy(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._sent)

    def send(self, id: int) -> int:
        """Choose the rank that a request goes to."""
        front = self._fronts[int(self._random.random() * self._count) if self._count > 1 else 0]
        rank = front.choose(self._count)
        self._sent[id] = front, rank
        return rank

    def left(self, id: int) -> int:
        """Take note that a request is no longer in flight; give the rank where it was."""
        front, rank = self._sent.pop(id)
        front.inflight[rank] -= 1
        return rank

    def publish(self, counts: Sequence[Counts]) -> None:
        """Tell all front ends how many wait and run at each rank, and how full it is."""
        for front in self._fronts:
            front.published = [*counts]
            front.since = [0] * self._ranks
