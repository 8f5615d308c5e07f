"""What those who decode may still bring out, as sums."""

from collections.abc import Callable
from heapq import heappop, heappush

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request

CLIP_MAX_NEW_TOKENS = 4096
"""Tokens that the estimate of one request's answer counts at most (SGLang's
CLIP_MAX_NEW_TOKENS_ESTIMATION); it may be longer for all that."""


class RemainingTokens:
    """Adds up the tokens that requests may still bring out, `most` of each at most.

    What a request has left falls by one a tick, once it is that much or less: so those who are
    near their end are a sum and a count, and of the others a heap tells who comes near next.
    Ticks never go back.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.last: dict[Request, int] = {}  # the tick at which it has brought out all it may
        self._far: list[tuple[int, int, Request]] = []  # (last tick, admission, request), a heap
        self._near: dict[Request, None] = {}
        self._sum = 0  # of the last ticks of those near

    def join(self, request: Request, last: int) -> None:
        """Count a request that may bring out tokens up to the tick `last`."""
        self.last[request] = last
        heappush(self._far, (last, request.admission, request))

    def leave(self, request: Request) -> None:
        """Count a request no more."""
        last = self.last.pop(request)
        if request in self._near:
            del self._near[request]
            self._sum -= last

    def at(self, tick: int) -> int:
        """Add up what is left at a tick."""
        far, near = self._far, self._near
        while far and far[0][0] - tick <= self._most:
            last, _, request = heappop(far)
            if self.last.get(request) == last and request not in near:  # else it has left since
                near[request] = None
                self._sum += last
        others = len(self.last) - len(near)
        return self._sum - len(near) * tick + others * self._most


class RunningBatch(DecodeSet):
    """Those who decode: a decode set that adds up what they may still bring out.

    `limit(request)` is the most that a request may have in all, of which `most` count.
    """

    def __init__(
        self,
        block_size: int,
        by_phase: bool,
        limit: Callable[[Request], int],
        most: int = CLIP_MAX_NEW_TOKENS,
    ) -> None:
        super().__init__(block_size, by_phase)
        self._limit = limit
        self._most = most
        self._estimated = RemainingTokens(most)  # by the new-token ratio
        self._certain = RemainingTokens(most)  # of those who ignore the end of sequence

    def join(self, request: Request, ticks: int) -> None:
        super().join(request, ticks)
        left = self._certain if request.ignore_eos else self._estimated
        left.join(request, self.tick + self._limit(request) - request.generated)

    def leave(self, request: Request) -> int:
        (self._certain if request.ignore_eos else self._estimated).leave(request)
        return super().leave(request)

    def members_in_order(self) -> list[Request]:
        """List the members, in the order of the running batch."""
        both = [*self._certain.last, *self._estimated.last]
        return sorted(both, key=lambda request: request.admission)

    def expected(self, request: Request, ratio: float) -> float:
        """Estimate the tokens that a member will still bring out."""
        left = self._certain if request.ignore_eos else self._estimated
        tokens = min(left.last[request] - self.tick, self._most)
        return tokens if request.ignore_eos else tokens * ratio

    def remaining(self, ratio: float, lag: int = 0) -> float:
        """Estimate the tokens that the members will still bring out, as of `lag` ticks ago."""
        tick, certain = self.tick - lag, self._certain
        expected = self._estimated.at(tick) * ratio
        return expected + certain.at(tick) if certain.last else expected
