"""What those who decode may still bring out, as sums."""

from math import inf

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request
from simulator.policies.fair import ServiceCounter

CLIP_MAX_NEW_TOKENS = 4096
"""Tokens that the estimate of one request's answer counts at most (SGLang's
CLIP_MAX_NEW_TOKENS_ESTIMATION); it may be longer for all that."""


class RemainingTokens:
    """Adds up the tokens that requests may still bring out, `most` of each at most.

    What a request has left falls by one a tick, once it is that much or less: so those who are
    near their end are a sum and a count. Whoever comes near next is looked for only then: most
    requests leave before. Ticks never go back.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.last: dict[Request, int] = {}  # the tick at which it has brought out all it may
        self.least: float = inf  # of those not near, also of some who have left
        self._near: dict[Request, None] = {}
        self._sum = 0  # of the last ticks of those near

    def leave(self, request: Request) -> None:
        """Count a request no more."""
        last = self.last.pop(request)
        if request in self._near:
            del self._near[request]
            self._sum -= last

    def at(self, tick: int) -> int:
        """Add up what is left at a tick."""
        if self.least - tick <= self._most:
            self._find_near(tick)
        near = len(self._near)
        return self._sum - near * tick + (len(self.last) - near) * self._most

    def _find_near(self, tick: int) -> None:
        near, self.least = self._near, inf
        for request, last in self.last.items():
            if request in near:
                continue
            if last - tick <= self._most:
                near[request] = None
                self._sum += last
            elif last < self.least:
                self.least = float(last)


class RunningBatch(DecodeSet):
    """Those who decode: a decode set that adds up what they may still bring out.

    A request may have `allowed` tokens in all, of which `most` count.
    """

    def __init__(self, block_size: int, by_phase: bool, most: int = CLIP_MAX_NEW_TOKENS) -> None:
        super().__init__(block_size, by_phase)
        self._most = most
        self._estimated = RemainingTokens(most)  # by the new-token ratio
        self._certain = RemainingTokens(most)  # of those who ignore the end of sequence

    def join(self, request: Request, ticks: int) -> None:
        DecodeSet.join(self, request, ticks)  # `super()`, in the time of a plain call
        left = self._certain if request.ignore_eos else self._estimated
        left.last[request] = last = self.tick + request.allowed - request.generated
        left.least = last if last < left.least else left.least

    def leave(self, request: Request) -> int:
        (self._certain if request.ignore_eos else self._estimated).leave(request)
        return DecodeSet.leave(self, request)

    def members_in_order(self) -> list[Request]:
        """List the members, in the order of the running batch."""
        both = [*self._certain.last, *self._estimated.last]
        return sorted(both, key=lambda request: request.admission)

    def expected(self, request: Request, ratio: float, lag: int = 0) -> float:
        """Estimate the tokens that a member will still bring out, as of `lag` ticks ago."""
        left = request.allowed - request.generated - self.tick + lag + request.joined
        tokens = left if left < self._most else self._most
        return tokens if request.ignore_eos else tokens * ratio

    def remaining(self, ratio: float, lag: int = 0) -> float:
        """Estimate the tokens that the members will still bring out, as of `lag` ticks ago."""
        tick, certain = self.tick - lag, self._certain
        expected = self._estimated.at(tick) * ratio
        return expected + certain.at(tick) if certain.last else expected


class CountedBatch(RunningBatch):
    """Those who decode, where a fair policy keeps books of the tokens of each client."""

    def __init__(self, block_size: int, by_phase: bool, books: ServiceCounter) -> None:
        super().__init__(block_size, by_phase)
        self._books = books

    def join(self, request: Request, ticks: int) -> None:
        super().join(request, ticks)
        account = self._books.account(request.client)
        account.members += 1
        account.output -= self._books.tick

    def leave(self, request: Request) -> int:
        account = self._books.account(request.client)
        account.members -= 1
        account.output += self._books.tick
        return super().leave(request)

    def emitted(self, request: Request) -> None:
        self._books.emitted(request)

    def advance(self, ticks: int) -> list[Request]:
        self._books.tick += ticks
        return super().advance(ticks)
